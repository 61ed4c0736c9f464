"""Ends child processes when their parent dies, and cleans up once after a signal."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import sleep
from types import FrameType

from peerage.errors import Interrupted

VARIABLE = "PEERAGE_LIFELINE"  # environment variable with the descriptor that a child reads
GRACE = 20.0  # seconds between SIGTERM and SIGKILL
ENDINGS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)


class ParentPipe:
    """A pipe that closes when this process dies, so that its children notice."""

    def __init__(self) -> None:
        self.theirs, self._ours = os.pipe()

    def close(self) -> None:
        os.close(self._ours)
        os.close(self.theirs)


def exit_with_parent(descriptor: str | None) -> None:
    """Send SIGTERM to this process when the parent's end of the pipe closes; None does nothing."""
    if descriptor is not None:
        arguments = (int(descriptor),)
        threading.Thread(target=_wait, args=arguments, name="parent pipe", daemon=True).start()


def _wait(descriptor: int) -> None:
    while os.read(descriptor, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    sleep(GRACE)  # a round may take longer; checkpoints survive SIGKILL
    os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def interrupt_once() -> Iterator[None]:
    """Raise Interrupted at Ctrl-C, SIGTERM or SIGHUP, and ignore these signals after the first.

    A closing terminal often sends its signal twice, which must not disturb the clean-up. Signals
    that were ignored before, as by nohup, stay ignored.
    """
    if threading.current_thread() is not threading.main_thread():  # only it may set handlers
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
