"""Real processes of `peerage` that start fast: a process that has loaded it forks them.

Starting an interpreter and loading torch takes more than two seconds of processor time, and
networks have many peers. A forked peer has its own memory, files, connections and signals, like
any process.
"""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import reduction
from types import SimpleNamespace
from typing import IO, Any
from unittest import mock

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["peerage.cli.app", "peerage.net.peer.node"])
# Of the process that forks: it has no thread that a fork would lose, and gRPC logs nothing.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GRPC_VERBOSITY": "NONE"}


class Descriptor:
    """A file descriptor that a forked process gets under a number of its own."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return opened, (reduction.DupFd(self.number),)


def opened(sent: Any) -> Descriptor:
    return Descriptor(sent.detach())


class Forked:
    """A process, with the methods of `subprocess.Popen` that networks use."""

    def __init__(
        self,
        argv: Sequence[str],
        log: IO[bytes],
        environment: Mapping[str, str],
        passed: Mapping[str, int] | None = None,
    ) -> None:
        """`passed` are descriptors by the environment variable that gets their number."""
        descriptors = {name: Descriptor(number) for name, number in (passed or {}).items()}
        arguments = (list(argv), Descriptor(log.fileno()), dict(environment), descriptors)
        self._process = CONTEXT.Process(target=perform, args=arguments)
        with mock.patch.dict(os.environ, ENVIRONMENT):
            self._process.start()
        self.args = list(argv)
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    poll = returncode.fget

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
) -> None:
    """Inside the forked process: do what `peerage ARGV` does, in a new session."""
    os.setsid()
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    for stream in (1, 2):
        os.dup2(log.number, stream)
    os.close(log.number)
    os.environ.clear()
    os.environ.update(environment)
    os.environ.update({name: str(one.number) for name, one in passed.items()})
    sys.argv = ["peerage", *argv]
    from peerage.cli.app import main

    main()


@contextlib.contextmanager
def forked_peers() -> Iterator[None]:
    """`peerage up` within this process forks its peers."""
    from peerage.net.deploy import up
    from peerage.net.deploy.parent_pipe import VARIABLE

    def start(command: Sequence[str], **options: Any) -> Forked:
        assert command[:3] == [sys.executable, "-m", "peerage"]
        [parent_pipe] = options["pass_fds"]
        return Forked(command[3:], options["stdout"], options["env"], {VARIABLE: parent_pipe})

    forking = SimpleNamespace(**vars(subprocess) | {"Popen": start})
    with mock.patch.object(up, "subprocess", forking):
        yield
