"""Peer processes that a process with all modules loaded forks, so that they share its memory.

An interpreter that loads torch takes seconds, and memory that no other process shares. A forked
peer starts at once and shares all pages that it does not change. It still has its own files,
connections and signals, like any process.
"""

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import reduction
from pathlib import Path
from threading import Lock
from typing import IO, Any

from peerage.files import socket_folder
from peerage.net.deploy.preloaded import FORKS

CONTEXT = multiprocessing.get_context("forkserver")
# What the process that forks loads. The last one prepares it for forking.
MODULES = ["peerage.cli.app", "peerage.net.peer.node", "peerage.net.deploy.preloaded"]
# Of the process that forks: it has no thread that a fork would lose, and gRPC logs nothing.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GRPC_VERBOSITY": "NONE", FORKS: "1"}
_lock = Lock()  # while the environment of this process is changed


class Descriptor:
    """A file descriptor that a forked process gets under a number of its own."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return _open, (reduction.DupFd(self.number),)


def _open(sent: Any) -> Descriptor:
    return Descriptor(sent.detach())


class Forked:
    """A process, with the methods of `subprocess.Popen` that networks use."""

    def __init__(
        self,
        argv: Sequence[str],
        log: IO[bytes],
        environment: Mapping[str, str],
        passed: Mapping[str, int] | None = None,
        same: Sequence[int] = (),
        name: str = "peerage",
    ) -> None:
        """`passed` are descriptors by the environment variable that gets their number.

        Those in `same` keep their number.
        """
        descriptors = {key: Descriptor(number) for key, number in (passed or {}).items()}
        kept = {number: Descriptor(number) for number in same}
        output = Descriptor(log.fileno())
        arguments = (list(argv), output, dict(environment), descriptors, kept, name)
        self._process = CONTEXT.Process(target=perform, args=arguments)
        with _lock:
            CONTEXT.set_forkserver_preload(MODULES)
            before = {key: os.environ.get(key) for key in ENVIRONMENT}
            os.environ.update(ENVIRONMENT)
            temporary = tempfile.tempdir
            tempfile.tempdir = socket_folder()  # where the process that forks makes its socket
            try:
                self._process.start()
            finally:
                tempfile.tempdir = temporary
                for key, value in before.items():
                    os.environ.pop(key) if value is None else os.environ.update({key: value})
        self.args = list(argv)
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self._process.exitcode is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def perform(
    argv: list[str],
    log: Descriptor,
    environment: dict[str, str],
    passed: dict[str, Descriptor],
    kept: dict[int, Descriptor],
    name: str,
) -> None:
    """Inside the forked process: do what `peerage ARGV` does, in a new session."""
    os.setsid()  # Ctrl-C reaches only the process that started this one, which ends it
    with suppress(OSError):  # as tools such as `top` show it; Linux only
        Path("/proc/self/comm").write_text(name)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    for stream in (1, 2):
        os.dup2(log.number, stream)
    os.close(log.number)
    for number, one in kept.items():
        os.dup2(one.number, number)
        os.close(one.number)
    os.environ.clear()
    os.environ.update(environment)
    os.environ.update({key: str(one.number) for key, one in passed.items()})
    sys.argv = ["peerage", *argv]
    runpy.run_module("peerage", run_name="__main__", alter_sys=True)
