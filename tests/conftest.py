"""What all tests share."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

# Two busy processes fill a small machine: tests use one thread each, as workers do.
torch.set_num_threads(1)

# Examples take as long as they take: on a busy machine that says nothing about the program.
settings.register_profile("peerage", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("peerage")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all studies, as users have: they share runs."""
    return tmp_path_factory.mktemp("reproduced")


@pytest.fixture
def speeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """No calibration: it measures, and writes to the user's cache."""
    from peerage.reproduce.calibrate import Rate, Speeds  # slow, and few tests need it

    monkeypatch.setattr(Speeds, "_read", lambda self: {})
    monkeypatch.setattr(Speeds, "_write", lambda self: None)
    monkeypatch.setattr(Speeds, "rate", lambda self, *about: Rate(1000.0, 5000.0))
    monkeypatch.setattr(Speeds, "averaged", lambda self: 1e9)
    monkeypatch.setattr(Speeds, "products", lambda self: 1e9)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real disk of 64 kB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
