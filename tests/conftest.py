"""What all tests share, what the marker `slow` means, and what `--engine` does."""

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from peerage.data import cache_folder
from peerage.experiment import Engine
from peerage.records import environment
from peerage.runs import run

# Two busy processes fill a small machine: tests use one thread each, as workers do.
torch.set_num_threads(1)

# Examples take as long as they take: on a busy machine that says nothing about the program.
settings.register_profile("peerage", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("peerage")


# The marker `slow`. A test needs it if it starts a process, opens a connection, reads fetched data
# or takes seconds. All but the last are enforced: in other tests these audit events are errors.

PROCESSES = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.system"}
CONNECTIONS = {"socket.bind", "socket.connect", "socket.getaddrinfo", "socket.sendto"}
FETCHED = f"{cache_folder()}{os.sep}"


class Guard:
    """Blocks what the current test must not do, and remembers it where a test hides the error."""

    def __init__(self) -> None:
        self.active = False
        self.forks = False  # whether workers of an engine may be started
        self.blocked: list[str] = []
        self.other_threads: set[int | None] = set()  # that earlier tests have left behind

    def begin(self, active: bool, forks: bool) -> None:
        self.active, self.forks, self.blocked = active, forks, []
        self.other_threads = {one.ident for one in threading.enumerate()} - {threading.get_ident()}

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.active or threading.get_ident() in self.other_threads:
            return
        if self.forks and event == "os.fork":
            return
        if what := described(event, arguments):
            self.blocked.append(what)
            raise RuntimeError(f"a test without the marker slow {what}; mark it, or do without")


def described(event: str, arguments: tuple[Any, ...]) -> str | None:
    if event in PROCESSES:
        return f"starts a process ({event})"
    if event in CONNECTIONS:
        return f"uses the network ({event})"
    if event == "open" and isinstance(arguments[0], str | os.PathLike):
        path = os.fspath(arguments[0])
        if isinstance(path, str) and path.startswith(FETCHED):
            return f"opens {path}, which belongs to the user"
    return None


GUARD = Guard()
sys.addaudithook(GUARD)


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests whose parameter `engine` starts worker processes."""
    for item in items:
        engine = getattr(item, "callspec", None) and item.callspec.params.get("engine")
        slow = {"small_disk", "machines"} & set(getattr(item, "fixturenames", ()))
        if slow or any(name in str(engine) for name in PARALLEL):
            item.add_marker("slow")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    fast = item.get_closest_marker("slow") is None
    with pytest.MonkeyPatch.context() as patch:
        if fast:  # else a run in a folder would ask git and uname
            patch.setattr(environment, "_commit", lambda file: None)
            patch.setattr(environment, "_platform", lambda: "any")
        engine = replaced_engine(item)
        if engine is not None:
            replace_engine(patch, engine)
        elif "machines" in getattr(item, "fixturenames", ()):
            release_actors()
        GUARD.begin(fast, forks=engine is not None)
        try:
            return (yield)
        finally:
            GUARD.active = False


@pytest.fixture(autouse=True)
def nothing_slow() -> Iterator[None]:
    """A test without the marker has done nothing that needs it, also where it hid the error."""
    yield
    assert GUARD.blocked == []


@pytest.fixture
def guard() -> Guard:
    return GUARD


# The option `--engine`. Tests with the fixture `engine` run with that one only. In all others, runs
# within this process use it instead of the engine that they ask for. So an engine has the whole
# suite as soon as it is in ENGINES.

ENGINES: dict[str, dict[str, Any]] = {
    "serial": {"name": "serial"},
    "pool": {"name": "pool", "workers": 2},
    "ray": {"name": "ray", "workers": 2},
}
PARALLEL = ("pool", "ray")
WITHOUT_OPTION = ("serial", "pool")  # Ray has tests of its own, and `make test-ray`


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--engine", choices=ENGINES, help="Run everything with this engine only.")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give tests with a fixture `engine` the settings of every engine, or of the chosen one."""
    marks = [mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")]
    if "engine" in metafunc.fixturenames and not any("engine" in names for names in marks):
        chosen = metafunc.config.getoption("engine")
        names = [chosen] if chosen else list(WITHOUT_OPTION)
        metafunc.parametrize("engine", [ENGINES[name] for name in names], ids=names)


def replaced_engine(item: pytest.Item) -> str | None:
    """The engine of `--engine`, unless the test chooses by itself."""
    chosen: str | None = item.config.getoption("engine")
    return None if item.get_closest_marker("own_engine") else chosen


def replace_engine(patch: pytest.MonkeyPatch, name: str) -> None:
    """Let every run within this process use the engine of this name."""
    patch.setattr(run._Run, "settings", Engine(**ENGINES[name]))
    if name == "ray":
        from support.ray_machines import KEPT, machines  # slow, and few tests need it

        machines()
        KEPT.use(patch)


def release_actors() -> None:
    """Give the cores of the cluster to a test that starts its own actors."""
    if "support.ray_machines" in sys.modules:
        sys.modules["support.ray_machines"].KEPT.release()


def pytest_unconfigure() -> None:
    if "support.ray_machines" in sys.modules:
        sys.modules["support.ray_machines"].close_machines()


# Fixtures


@pytest.fixture(scope="session")
def machines() -> Any:
    """A Ray cluster of two machines, to which this process is connected."""
    if find_spec("ray") is None:  # the import itself must wait for the token
        pytest.skip("needs the extra peerage[ray]")
    from support.ray_machines import machines  # slow, and few tests need it

    return machines()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all studies, as users have: they share runs."""
    return tmp_path_factory.mktemp("reproduced")


@pytest.fixture
def speeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """No calibration: it measures, and writes to the user's cache."""
    from peerage.papers.calibrate import Rate, Speeds  # slow, and few tests need it

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
