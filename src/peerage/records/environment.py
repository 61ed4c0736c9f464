"""The environment of a run: versions and machine."""

import os
import platform
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def environment() -> dict[str, Any]:
    return {
        "peerage": package_version("peerage"),
        "python": platform.python_version(),
        "torch": package_version("torch"),
        "numpy": package_version("numpy"),
        "platform": _platform(),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "git": _commit(Path(__file__)),
    }


def package_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _platform() -> str:
    return platform.platform()  # runs uname in a subprocess, once


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


@cache  # the checkout may change after the code was loaded
def _commit(file: Path) -> str | None:
    """The commit of the checkout that contains and tracks this file, if any."""
    # An installed copy may be inside the checkout of another project, which does not track it.
    tracked = _git(file.parent, "ls-files", file.name)
    return _git(file.parent, "rev-parse", "HEAD") if tracked else None


def _git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
