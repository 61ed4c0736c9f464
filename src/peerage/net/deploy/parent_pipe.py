"""A process that started others is gone, or asked to go: nothing of it is left behind."""

import os
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from time import sleep
from types import FrameType

from peerage.errors import Interrupted

VARIABLE = "PEERAGE_LIFELINE"  # in the environment of a child: the descriptor that it reads
GRACE = 20.0  # seconds to end in peace, which are few on a busy machine
ENDINGS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)


class ParentPipe:
    """A pipe whose far end only this process holds: those who read it learn when it is gone."""

    def __init__(self) -> None:
        self.theirs, self._ours = os.pipe()

    @property
    def environment(self) -> Mapping[str, str]:
        return {VARIABLE: str(self.theirs)}

    def close(self) -> None:
        os.close(self._ours)
        os.close(self.theirs)


def exit_with_parent(descriptor: str | None) -> None:
    """End this process, as SIGTERM does, when the far end of a pipe closes; None is no pipe."""
    if descriptor is not None:
        name = "lifeline"
        threading.Thread(target=_hold, args=(int(descriptor),), name=name, daemon=True).start()


def _hold(descriptor: int) -> None:
    while os.read(descriptor, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    sleep(GRACE)  # it may be in the middle of a long round; checkpoints survive what comes now
    os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def interrupt_once() -> Iterator[None]:
    """Ctrl-C, SIGTERM and a closed terminal raise Interrupted, and none disturbs the cleaning up.

    A terminal that closes often sends its signal twice. What was ignored before, as by nohup,
    stays ignored.
    """
    if threading.current_thread() is not threading.main_thread():  # which alone may set handlers
        yield
        return
    before = {number: signal.getsignal(number) for number in ENDINGS}

    def end(number: int, frame: FrameType | None) -> None:
        for each in ENDINGS:
            signal.signal(each, signal.SIG_IGN)
        raise Interrupted(f"ended by signal {signal.Signals(number).name}")

    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
