"""Forked worker processes, their pipes, and their errors.

Workers inherit data, models and classes without pickling. They end with their parent process:
closing `Workers` kills them, and the kernel does so if the parent is killed.
"""

import contextlib
import ctypes
import gc
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from peerage import errors
from peerage.errors import PeerageError, WorkerDied
from peerage.isolation import exclusive_torch

PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)
ENDED = object()  # yielded by `receive` for a worker that has closed its pipe
Work = Callable[..., None]  # work(pipe, *arguments)


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


class Workers:
    """One process for each tuple of arguments, running `work(pipe, *arguments)`.

    A worker sends answers with `pipe.send`. If `work` raises an exception in a worker, `receive`
    raises it in the parent.
    """

    def __init__(self, work: Work, arguments: Sequence[tuple[Any, ...]]) -> None:
        context = multiprocessing.get_context("fork")
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []
        try:
            for number, values in enumerate(arguments):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=_run,
                    args=(work, values, theirs, [*self.pipes, ours]),
                    name=f"peerage-worker-{number}",
                    daemon=True,
                )
                with exclusive_torch():  # a fork would copy locks that another thread holds
                    process.start()
                theirs.close()
                self.pipes.append(ours)
                self.processes.append(process)
        except BaseException:
            self.close()
            raise

    def send(self, worker: int, message: Any) -> None:
        try:
            self.pipes[worker].send(message)
        except OSError:
            raise self.died(worker) from None

    def receive(self, workers: Sequence[int]) -> Iterator[tuple[int, Any]]:
        """Yield the answers of these workers in the order of arrival.

        Yields `ENDED` for a worker that ended normally, and raises `WorkerDied` for one that died.
        """
        left = set(workers)
        while left:
            # After a worker has ended, a child of it may still hold its pipe open.
            sources: dict[Any, int] = {self.pipes[worker]: worker for worker in left}
            sources |= {self.processes[worker].sentinel: worker for worker in left}
            for worker in {sources[source] for source in wait(list(sources))}:
                pipe = self.pipes[worker]
                try:
                    ended = not self.processes[worker].is_alive() and not pipe.poll()
                    good, answer = (False, ()) if ended else pipe.recv()
                except (EOFError, OSError):
                    ended = True
                if ended:
                    left.remove(worker)
                    if self._exit_code(worker) != 0:
                        raise self.died(worker) from None
                    yield worker, ENDED
                    continue
                if not good:
                    raise _rebuild(worker, *answer)
                yield worker, answer

    def died(self, worker: int) -> WorkerDied:
        """An error that states how a worker ended."""
        code = self._exit_code(worker)
        killed = code is not None and code < 0
        how = f"was killed by signal {-code}" if killed and code is not None else f"ended ({code})"
        hint = ", perhaps for lack of memory" if code == -signal.SIGKILL else ""
        pid = self.processes[worker].pid
        return WorkerDied(f"worker {worker} (process {pid}) {how}{hint}")

    def _exit_code(self, worker: int) -> int | None:
        self.processes[worker].join(timeout=5)
        code: int | None = self.processes[worker].exitcode
        return code

    def close(self) -> None:
        """Kill all workers and wait until they have ended."""
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
            process.close()
        self.pipes, self.processes = [], []


def _run(
    work: Work, arguments: tuple[Any, ...], pipe: Connection, inherited: Sequence[Connection]
) -> None:
    """The main function of a worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the parent handles it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)
    for other in inherited:
        other.close()  # otherwise a worker keeps other workers' pipes open after the parent died
    # A worker must not finalise the garbage that it inherits: gRPC's finalisers, for example, wait
    # for threads that were not forked.
    gc.freeze()
    torch.set_num_threads(1)
    try:
        work(pipe, *arguments)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the parent has closed its end
    except Exception as error:
        text = "".join(traceback.format_exception(error))
        with contextlib.suppress(OSError):
            pipe.send((False, (type(error).__name__, str(error), text)))


def _rebuild(worker: int, kind: str, message: str, trace: str) -> Exception:
    """The exception that a worker raised, to be raised in the parent."""
    known = getattr(errors, kind, None)
    if isinstance(known, type) and issubclass(known, PeerageError):
        return known(message)
    if kind == "OSError" and "No space left" in message:
        return errors.DiskError(message)
    error = RuntimeError(f"{kind} in worker {worker}: {message}")
    error.add_note(trace)
    return error
