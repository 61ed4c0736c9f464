"""Start of the command line: `peerage --help` compared with the import of torch."""

import subprocess
import sys
from time import perf_counter

from ratios import alternate

BOUND = 1 / 3


def measure(repeats: int) -> dict[str, float]:
    """Seconds of `peerage --help` / those of `import torch`, each in a new process."""
    return alternate(
        lambda: _seconds("-c", "import torch"), lambda: _seconds("-m", "peerage", "--help"), repeats
    )


def _seconds(*arguments: str) -> float:
    start = perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    return perf_counter() - start
