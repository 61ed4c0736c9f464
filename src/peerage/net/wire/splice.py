"""Carries the bytes of a connection between two sockets, in the kernel.

`splice` moves pages from a socket to a pipe and from there to the other socket, so the bytes never
reach Python. A pipe is taken only while it holds bytes. If the target does not take them, the
source is not read.
"""

import asyncio
import fcntl
import os
import socket
from collections.abc import Callable
from contextlib import suppress

PIPE_SIZE = 1 << 20  # bytes
SPARE_PIPES = 4  # that are kept open
FLAGS = os.SPLICE_F_MOVE | os.SPLICE_F_NONBLOCK


class Pipes:
    """Pipes that are empty and can be used again."""

    def __init__(self) -> None:
        self._spare: list[tuple[int, int]] = []

    def take(self) -> tuple[int, int]:
        """The ends of a pipe, to read from and to write to; may raise OSError."""
        if self._spare:
            return self._spare.pop()
        ends = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        with suppress(OSError):  # the user has many large pipes; a small one works too
            fcntl.fcntl(ends[1], fcntl.F_SETPIPE_SZ, PIPE_SIZE)
        return ends

    def give_back(self, ends: tuple[int, int], *, empty: bool) -> None:
        if empty and len(self._spare) < SPARE_PIPES:
            self._spare.append(ends)
        else:
            close(ends)

    def close(self) -> None:
        while self._spare:
            close(self._spare.pop())


class Splice:
    """Two sockets that send what the other one receives, until one of them is closed.

    `ended` is called once; its argument says whether the server has closed the connection.
    """

    def __init__(
        self,
        client: socket.socket,
        server: socket.socket,
        pipes: Pipes,
        ended: Callable[[bool], None],
    ) -> None:
        self._sockets, self._ended = (client, server), ended
        self._flows = [
            _Flow(client, server, pipes, lambda: self._end(False)),
            _Flow(server, client, pipes, lambda: self._end(True)),
        ]

    def start(self) -> None:
        for flow in self._flows:
            flow.start()

    def close(self) -> None:
        self._end(False)

    def _end(self, by_server: bool) -> None:
        if not self._flows:
            return
        for flow in self._flows:
            flow.stop()
        self._flows.clear()
        for one in self._sockets:
            one.close()
        self._ended(by_server)


class _Flow:
    """One direction; `ended` is called when its source is closed, or an end is broken."""

    def __init__(
        self, source: socket.socket, target: socket.socket, pipes: Pipes, ended: Callable[[], None]
    ) -> None:
        self._source, self._target = source.fileno(), target.fileno()
        self._pipes, self._ended = pipes, ended
        self._loop = asyncio.get_running_loop()
        self._pipe: tuple[int, int] | None = None
        self._held = 0  # bytes in the pipe

    def start(self) -> None:
        self._loop.add_reader(self._source, self._read)

    def stop(self) -> None:
        self._loop.remove_reader(self._source)
        self._loop.remove_writer(self._target)
        self._free()

    def _read(self) -> None:
        try:
            if self._pipe is None:
                self._pipe = self._pipes.take()
            self._held = os.splice(self._source, self._pipe[1], PIPE_SIZE, flags=FLAGS)
            if not self._held:
                self._ended()
            elif not self._write():
                self._loop.remove_reader(self._source)
                self._loop.add_writer(self._target, self._go_on)
        except BlockingIOError:  # there is nothing to read
            self._free()
        except OSError:
            self._ended()

    def _go_on(self) -> None:
        """Write what is left, now that the target takes it."""
        try:
            if self._write():
                self._loop.remove_writer(self._target)
                self._loop.add_reader(self._source, self._read)
        except OSError:
            self._ended()

    def _write(self) -> bool:
        """Write what the pipe holds; return False if the target does not take all of it now."""
        assert self._pipe is not None
        while self._held:
            try:
                self._held -= os.splice(self._pipe[0], self._target, self._held, flags=FLAGS)
            except BlockingIOError:
                return False
        self._free()
        return True

    def _free(self) -> None:
        if self._pipe is not None:
            self._pipes.give_back(self._pipe, empty=not self._held)
            self._pipe = None


def close(ends: tuple[int, int]) -> None:
    for end in ends:
        os.close(end)
