"""A measure of work that is the same on every machine, busy or not: lines of Python."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def lines_at_most(most: int) -> Iterator[None]:
    """Fail once functions called inside have run so many lines of Python.

    Work on whole arrays takes few lines, however long the arrays are.
    """
    left = most

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        if event == "line":
            left -= 1
            assert left >= 0, f"more than {most} lines of Python ran"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)
