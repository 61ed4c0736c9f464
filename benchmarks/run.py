"""Measure every claim about speed and memory, and store the results.

    python benchmarks/run.py [--only NAME] [--repeats N] [--out FILE]

Compared measurements alternate, and the result is the median ratio of consecutive ones, as the load
of a shared machine changes.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import cluster
import diffusion
import fednl
import graphs
import jobs
import memory
import memory_format
import network
import noise
import peers
import startup
import together
import torch
from ratios import alternate
from rich.console import Console
from rich.table import Table

from peerage import EL, HWA, DecAvg, DecHW, Facade, LocalSGD
from peerage.algorithm import Algorithm
from peerage.files import write_bytes
from peerage.records.environment import environment

WORKERS = len(os.sched_getaffinity(0))
KERNEL_SECONDS = 3.0
RESULTS = Path("docs/results/bench.json")


def against_kernel(
    job: jobs.Job, repeats: int, algorithm: Algorithm | None = None
) -> dict[str, float]:
    """Whole rounds compared with the bare training kernel, with the same workers."""
    dataset = job.dataset()
    rounds = jobs.Rounds(job, dataset, WORKERS, algorithm)
    try:
        return alternate(
            lambda: jobs.kernel_rate(job, dataset, WORKERS, KERNEL_SECONDS), rounds.rate, repeats
        )
    finally:
        rounds.close()


def against_naive(job: jobs.Job, repeats: int) -> dict[str, float]:
    """Whole rounds compared with a simple loop, which may use all cores."""
    dataset = job.dataset()
    rounds = jobs.Rounds(job, dataset, WORKERS)
    try:
        return alternate(lambda: jobs.naive_rate(job, dataset), rounds.rate, repeats)
    finally:
        rounds.close()


def two_workers(repeats: int) -> dict[str, float]:
    dataset = jobs.P0.dataset()
    one, two = (jobs.Rounds(jobs.P0, dataset, workers) for workers in (1, 2))
    try:
        return alternate(one.rate, two.rate, repeats)
    finally:
        one.close()
        two.close()


def curvature_share(repeats: int) -> dict[str, float]:
    """DecHW with curvature compared with DecAvg, both with five epochs; at most 5/6."""
    local = LocalSGD(epochs=5, batch_size=100, lr=0.001, momentum=0.5)
    job = jobs.Job("", "mnist-cnn", (1, 28, 28), 50, 1200, local, rounds=1)
    dataset = job.dataset()
    plain = jobs.Rounds(job, dataset, WORKERS, DecAvg())
    curved = jobs.Rounds(job, dataset, WORKERS, DecHW())
    try:
        return alternate(plain.rate, curved.rate, max(2, repeats // 2))
    finally:
        plain.close()
        curved.close()


def head_choice(repeats: int, choice_batches: int | None) -> dict[str, float]:
    """Seconds of a round of FACADE with three heads / those of EL."""
    dataset = jobs.GN_LENET.dataset()
    facade = jobs.Rounds(
        jobs.GN_LENET, dataset, WORKERS, Facade(k=3, choice_batches=choice_batches)
    )
    plain = jobs.Rounds(jobs.GN_LENET, dataset, WORKERS, EL())
    try:
        return alternate(facade.rate, plain.rate, repeats)
    finally:
        facade.close()
        plain.close()


# name -> (claim, function that measures it, bound, whether it is a lower bound)
CLAIMS: dict[str, tuple[str, Callable[[int], dict[str, float]], float, bool]] = {
    "kernel-p0": (
        f"{jobs.P0.name}: rounds / kernel",
        lambda n: against_kernel(jobs.P0, n),
        0.93,
        True,
    ),
    "kernel-gn-lenet": (
        f"{jobs.GN_LENET.name}: rounds / kernel",
        lambda n: against_kernel(jobs.GN_LENET, n, EL()),
        0.93,
        True,
    ),
    "kernel-mlp": (
        f"{jobs.MLP.name}: rounds / kernel",
        lambda n: against_kernel(jobs.MLP, n),
        0.80,
        True,
    ),
    "kernel-hub": (
        f"{jobs.HUB.name}: rounds / kernel",
        lambda n: against_kernel(jobs.HUB, n, HWA()),
        0.80,
        True,
    ),
    "dechw": ("DecHW / DecAvg, 5 epochs, P0 MNIST CNN", curvature_share, 0.78, True),
    "facade": (
        "FACADE with 3 heads, tried on all batches of a round / EL: seconds of a round",
        lambda n: head_choice(n, None),
        1.40,
        False,
    ),
    "facade-one": (
        "the same, tried on one batch",
        lambda n: head_choice(n, 1),
        1.10,
        False,
    ),
    "memory-format": (
        f"{memory_format.NAME}: seconds of a step in channels-last memory / PyTorch's default",
        memory_format.measure,
        memory_format.BOUND,
        False,
    ),
    "workers": ("two workers / one worker, P0 MNIST CNN", two_workers, 1.8, True),
    "naive-p0": (
        f"{jobs.P0.name}: rounds / naive loop",
        lambda n: against_naive(jobs.P0, n),
        1.8,
        True,
    ),
    "naive-mlp": (
        f"{jobs.MLP.name}: rounds / naive loop",
        lambda n: against_naive(jobs.MLP, n),
        1.5,
        True,
    ),
    "memory": ("1000 nodes, DecHW, P0 MNIST CNN: peak GB in all", memory.peak, 2.5, False),
    "scaling": ("cost of a node-round, 1000 nodes / 50 nodes", memory.scaling, 1.15, False),
    "graphs": (
        "graphs of a million nodes (ER, BA, regular; the slowest): building / igraph",
        graphs.measure,
        graphs.BOUND,
        False,
    ),
    "diffusion": (
        "diffusion, a million nodes of degree 8, 32 parameters: step / scipy product",
        diffusion.step_ratio,
        diffusion.STEP_BOUND,
        False,
    ),
    "diffusion-memory": (
        "the same for 50 rounds, with building the graph: peak GB",
        diffusion.peak,
        diffusion.PEAK_BOUND,
        False,
    ),
    "together": (
        f"{together.NAME}: mutual learning / separate forward and backward passes",
        together.measure,
        together.BOUND,
        False,
    ),
    "together-memory": (
        f"{together.MEMORY_NAME}: peak GB of the process that trains them together",
        together.hub_memory,
        together.MEMORY_BOUND,
        False,
    ),
    "fednl": (
        "FedNL, 10 problems of 785 x 785, 10 clients: share of a round in BLAS and LAPACK",
        fednl.share,
        fednl.SHARE_BOUND,
        True,
    ),
    "transfer": (
        "100 MB between two peers, encrypted and with all checks: rate / bare gRPC stream",
        network.transfer,
        network.RATE_BOUND,
        True,
    ),
    "transfer-memory": (
        "the same: chunks of 1 MiB that the receiver holds beyond the payload",
        network.chunks,
        network.CHUNKS_BOUND,
        False,
    ),
    "noise": (
        "secret noise on a message / training in a round of its node, P0 MNIST CNN: seconds",
        noise.measure,
        noise.BOUND,
        False,
    ),
    "peers": (
        "32 real peers on this machine, P0 MNIST CNN, 20 rounds: share of messages in time",
        peers.messages_in_time,
        peers.IN_TIME_BOUND,
        True,
    ),
    "ray-p0": (
        f"{jobs.P0.name}: engine ray / pool, {WORKERS} workers",
        lambda n: cluster.against_pool(jobs.P0, n, WORKERS),
        0.92,
        True,
    ),
    "ray-gn-lenet": (
        f"{jobs.GN_LENET.name}: engine ray / pool, {WORKERS} workers",
        lambda n: cluster.against_pool(jobs.GN_LENET, n, WORKERS, EL()),
        0.80,
        True,
    ),
    "ray-step": (
        f"{cluster.LOGISTIC.name}: milliseconds that engine ray adds to a call of all workers",
        lambda n: cluster.call_overhead(n, WORKERS),
        cluster.CALL_BOUND,
        False,
    ),
    "ray-memory": (
        f"{jobs.P0.name}: private MB of a worker of engine ray",
        lambda n: cluster.worker_memory(WORKERS),
        cluster.MEMORY_BOUND,
        False,
    ),
    "help": (
        "`peerage --help` / `import torch`: seconds of a new process",
        startup.measure,
        startup.BOUND,
        False,
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", choices=CLAIMS, action="append", help="measure only these")
    parser.add_argument("--repeats", type=int, default=5, help="pairs of measurements")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    machine = environment()
    # Claims can be measured one by one, so each records its commit.
    origin = {"repeats": arguments.repeats, "git": machine.pop("git")}
    table = Table("claim", "bound", "measured", "holds")
    for name in arguments.only or CLAIMS:
        print(f"measuring {name} ...", file=sys.stderr, flush=True)
        text, measure, bound, lower = CLAIMS[name]
        values = measure(arguments.repeats)
        holds = values["ratio"] >= bound if lower else values["ratio"] <= bound
        sign = "≥" if lower else "≤"
        table.add_row(text, f"{sign} {bound}", f"{values['ratio']:.3f}", "yes" if holds else "NO")
        rounded = {key: round(value, 4) for key, value in values.items()}
        results[name] = {
            "claim": text,
            "bound": f"{sign} {bound}",
            "holds": holds,
            **rounded,
            **origin,
        }
    results["environment"] = {**machine, "workers": WORKERS}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(arguments.out, (json.dumps(results, indent=1) + "\n").encode())
    if arguments.out == RESULTS:
        page = Path("docs/speed.md")
        write_bytes(page, with_results(page.read_text(), results).encode())
    Console().print(table)
    print(json.dumps(results))


def with_results(page: str, results: dict) -> str:
    """The page with the results between its `bench` marks."""
    before, rest = page.split("<!-- bench -->\n")
    after = rest.split("<!-- /bench -->")[1]
    lines = ["| | asked for | measured |", "| --- | --: | --: |"]
    for name in CLAIMS:
        if name in results:
            row = results[name]
            verdict = "" if row["holds"] else " (falls short)"
            lines.append(f"| {row['claim']} | {row['bound']} | {row['ratio']:.2f}{verdict} |")
    table = "\n".join(lines)
    return f"{before}<!-- bench -->\n{table}\n<!-- /bench -->{after}"


if __name__ == "__main__":
    main()
