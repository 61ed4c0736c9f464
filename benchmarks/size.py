"""Many real peers on one machine: messages that are missing, memory and time of 64 on a ring.

Run `make bench-size`, or `python benchmarks/size.py [--peers N] [--rounds N] [--write FILE]`:
logistic regression on digits, with encrypted connections. All peers are processes. It takes some
minutes, so `make bench` does not run it. Memory is the proportional set size: pages that processes
share are counted once in all.
"""

import argparse
import json
import os
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import psutil

from peerage import Experiment
from peerage.net.deploy.process import PeerProgress
from peerage.net.deploy.up import LocalNetwork
from peerage.net.peer.network import Timeouts

PEERS, ROUNDS = 64, 20
NEIGHBOURS = 2
TIMEOUTS = Timeouts(start=600.0)
MISSING_BOUND = 0
PRIVATE_BOUND = 129.0  # MB per peer: half of the 258 MB that peers took before they shared memory
MEGABYTE = 1e6


class Memory(threading.Thread):
    """Records the peak of all processes together, and the largest private memory of a peer."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.total, self.private, self.stop = 0, 0, threading.Event()

    def run(self) -> None:
        while not self.stop.is_set():
            this = psutil.Process()
            known = {each: rollup(each.pid) for each in [this, *this.children(recursive=True)]}
            self.total = max(self.total, sum(each.get("Pss", 0) for each in known.values()))
            for process, each in known.items():
                if is_peer(process):
                    self.private = max(self.private, each.get("Private_Dirty", 0))
            sleep(2.0)  # reading the pages of all processes takes time that they need


def is_peer(process: psutil.Process) -> bool:
    try:
        return process.name().startswith("node-")
    except psutil.Error:
        return False


def rollup(pid: int) -> dict[str, int]:
    """The memory of a process in bytes; empty if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    except OSError:
        return {}
    return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}


class Start:
    """Notes when all peers had finished the first round."""

    def __init__(self) -> None:
        self.began, self.seconds = perf_counter(), 0.0

    def __call__(self, peers: Sequence[PeerProgress]) -> None:
        if not self.seconds and all(peer.round > 0 for peer in peers):
            self.seconds = perf_counter() - self.began


def measure(peers: int = PEERS, rounds: int = ROUNDS) -> dict[str, Any]:
    """Run the peers once; returns what they missed, and what they took."""
    experiment = Experiment(
        algorithm="decavg",
        nodes=peers,
        topology="ring",
        rounds=rounds,
        dataset="digits",
        model="logistic",
        partition="iid",
        local={"epochs": 1},
        evaluation={"every": rounds},
    )
    memory, start = Memory(), Start()
    memory.start()
    with tempfile.TemporaryDirectory() as temporary:
        up = LocalNetwork(experiment, Path(temporary) / "up", TIMEOUTS, show=start)
        summary = up.run()
        rows = [row for peer in up.watched for row in peer.rows if row["round"] > 0]
    memory.stop.set()
    memory.join()
    received = sum(row["heard"][0] for row in rows)
    return {
        "peers": peers,
        "rounds": summary["rounds"],
        # Of all messages: a peer that skipped rounds has no rows for them.
        "missing": peers * rounds * NEIGHBOURS - received,
        "troubles": sum("troubles" in row for row in rows),
        "seconds": round(summary["seconds"], 1),
        "seconds_to_round_1": round(start.seconds, 1),
        "cores": len(os.sched_getaffinity(0)),
        "peak_memory_mb": round(memory.total / MEGABYTE),
        "private_memory_mb_per_peer": round(memory.private / MEGABYTE),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--peers", type=int, default=PEERS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--write", type=Path, help="store the result in this file as well")
    arguments = parser.parse_args()
    found = measure(arguments.peers, arguments.rounds)
    text = json.dumps(found, indent=2)
    print(text)
    if arguments.write is not None:
        arguments.write.parent.mkdir(parents=True, exist_ok=True)
        arguments.write.write_text(text + "\n")
    if found["missing"] > MISSING_BOUND or found["private_memory_mb_per_peer"] > PRIVATE_BOUND:
        raise SystemExit("error: messages are missing, or peers take too much memory")


if __name__ == "__main__":
    main()
