"""The share of a round of FedNL that is spent inside BLAS and LAPACK.

Run `python benchmarks/fednl.py`: ten problems of 785 x 785 (a logistic regression on images of
28 x 28), 10 clients with 1000 random examples each, one thread. The first two rounds, in which
whole Hessians are sent and the first differences are learned, are for warming up.

Three runs with torch 2.13.0 on two shared (and busy) cores of an AVX-512 Xeon: 0.71 to 0.72, with
2.6 to 4.2 s per round. The profiler's own work, about a tenth of that, counts as time outside.
"""

import json
from time import perf_counter

import torch
from torch.profiler import ProfilerActivity, profile

from peerage import Experiment, FedNL, in_memory
from peerage.engine.lockstep import Lockstep, SerialTeam
from peerage.engine.pool import keep_freed_memory
from peerage.engine.prepare import prepare

CLIENTS, EXAMPLES, SHAPE, CLASSES = 10, 1000, (1, 28, 28), 10
SEED, WARM_UP = 0, 2
SHARE_BOUND = 0.70
# The profiler's names; only the time in these functions themselves counts.
KERNELS = {
    "aten::addmm_",
    "aten::addmm",
    "aten::mm",
    "aten::bmm",
    "aten::baddbmm",
    "aten::linalg_qr",
    "aten::_linalg_eigh",
    "aten::linalg_cholesky_ex",
    "aten::_cholesky_solve_helper",
}


def experiment() -> Experiment:
    rng = torch.Generator().manual_seed(SEED)
    count = CLIENTS * EXAMPLES
    x = torch.randn(count, *SHAPE, generator=rng)
    y = torch.randint(CLASSES, (count,), generator=rng)
    return Experiment(
        algorithm=FedNL(),
        dataset=in_memory(x, y, x[:CLASSES], torch.arange(CLASSES)),
        model="logistic",
        nodes=CLIENTS,
        partition="iid",
        seed=SEED,
        engine={"name": "serial"},
    )


def share(repeats: int) -> dict[str, float]:
    """Seconds of the median round, and the share of them inside kernels."""
    keep_freed_memory()  # as in the workers of the pool, which the profiler cannot see
    world = prepare(experiment())
    with Lockstep(world, SerialTeam(world)) as engine:
        for round in range(WARM_UP):
            engine.round(round, evaluate=False)
        rounds = range(WARM_UP, WARM_UP + repeats)
        measured = sorted(one_round(engine, round) for round in rounds)
    ratio, inside, seconds = measured[len(measured) // 2]
    return {"ratio": ratio, "base": seconds, "measured": inside}


def one_round(engine: Lockstep, round: int) -> tuple[float, float, float]:
    """(share, seconds inside kernels, seconds)."""
    with profile(activities=[ProfilerActivity.CPU]) as found:
        start = perf_counter()
        engine.round(round, evaluate=False)
        seconds = perf_counter() - start
    times = {event.key: event.self_cpu_time_total / 1e6 for event in found.key_averages()}
    inside = sum(times.get(name, 0.0) for name in KERNELS)
    return inside / seconds, inside, seconds


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(share(repeats=3), indent=2))
