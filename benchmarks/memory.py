"""Memory and time of many nodes: 1000 with the P0 MNIST CNN and DecHW."""

import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from time import perf_counter, sleep

import jobs
import psutil

from peerage import DecHW, LocalSGD, run

SMALL, LARGE = 50, 1000
# 60 examples per node, so that 1000 nodes share the 60 000 of MNIST.
JOB = jobs.Job(
    "many nodes",
    "mnist-cnn",
    (1, 28, 28),
    SMALL,
    60,
    LocalSGD(epochs=5, batch_size=100, lr=0.001, momentum=0.5),
    rounds=1,
)
GIGABYTE = 1e9


class PeakMemory(threading.Thread):
    """Records the peak memory of this process and all its children; shared pages count once."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak, self.stop = 0, threading.Event()

    def run(self) -> None:
        while not self.stop.is_set():
            self.peak = max(self.peak, memory_in_use())
            sleep(0.2)


def memory_in_use() -> int:
    """Bytes (proportional set size) of this process and its children."""
    this = psutil.Process()
    total = 0
    for process in [this, *this.children(recursive=True)]:
        try:
            rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
        except OSError:
            continue
        line = next(line for line in rollup.splitlines() if line.startswith("Pss:"))
        total += int(line.split()[1]) * 1024
    return total


def peak(repeats: int) -> dict[str, float]:
    """Peak of a run of three rounds, with evaluation and checkpoints, in a new process."""
    command = [sys.executable, __file__]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    gigabytes = float(done.stdout.split()[-1])
    return {"ratio": gigabytes, "gigabytes": gigabytes}


def whole_run() -> float:
    watcher = PeakMemory()
    watcher.start()
    dataset = JOB.dataset(LARGE)
    experiment = jobs.experiment(JOB, dataset, DecHW()).model_copy(update={"rounds": 3})
    with tempfile.TemporaryDirectory() as folder:
        run(experiment, Path(folder) / "run", checkpoint_every=1)
    watcher.stop.set()
    watcher.join()
    return watcher.peak / GIGABYTE


def scaling(repeats: int) -> dict[str, float]:
    """Ratio of the seconds per node and round with 1000 nodes to those with 50, alternating."""
    workers = len(os.sched_getaffinity(0))
    small = jobs.Rounds(JOB, JOB.dataset(SMALL), workers, DecHW())
    large = jobs.Rounds(JOB, JOB.dataset(LARGE), workers, DecHW())
    ratios, costs = [], {SMALL: [], LARGE: []}
    try:
        for _ in range(max(2, repeats // 2)):
            costs[SMALL].append(_cost(small, SMALL, LARGE // SMALL))
            costs[LARGE].append(_cost(large, LARGE, 1))
            ratios.append(costs[LARGE][-1] / costs[SMALL][-1])
    finally:
        small.close()
        large.close()
    return {
        "ratio": sorted(ratios)[len(ratios) // 2],
        "spread": max(ratios) - min(ratios),
        "base": min(costs[SMALL]),
        "measured": min(costs[LARGE]),
    }


def _cost(rounds: jobs.Rounds, nodes: int, count: int) -> float:
    start = perf_counter()
    for _ in range(count):
        rounds.done += 1
        rounds.engine.round(rounds.done, False)
    return (perf_counter() - start) / (count * nodes)


if __name__ == "__main__":
    print(whole_run())
