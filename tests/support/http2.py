"""A small HTTP/2 client that can also send what is no HTTP/2, for attacks on the port of a peer.

It does not decode the headers of answers: an answer with data is one that the peer gave, and an
answer without data is a refusal, whose reason the peer counts.
"""

import socket
import ssl
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
WINDOW = (1 << 16) - 1  # bytes that may be sent before the other end allows more
LARGEST = 1 << 14  # bytes of a frame
ROOM = 1 << 30  # bytes of answers that a connection may carry
END_STREAM, END_HEADERS, ACK = 0x1, 0x4, 0x1
SECONDS = 60.0  # for anything to arrive

Headers = Iterable[tuple[bytes, bytes]]


class Type(IntEnum):
    """What a frame is."""

    DATA = 0
    HEADERS = 1
    PRIORITY = 2
    RST_STREAM = 3
    SETTINGS = 4
    PUSH_PROMISE = 5
    PING = 6
    GOAWAY = 7
    WINDOW_UPDATE = 8
    CONTINUATION = 9


class Closed(OSError):
    """The other end has closed the connection, or does not answer."""


@dataclass
class Answer:
    """What came back on a stream."""

    data: bytes = b""
    ended: bool = False
    window: int = WINDOW


def frame(kind: int, flags: int, stream: int, body: bytes = b"") -> bytes:
    return struct.pack(">I", len(body))[1:] + struct.pack(">BBI", kind, flags, stream) + body


def header_block(fields: Headers) -> bytes:
    """Fields as literals that no table is needed for."""
    return b"".join(b"\0" + _text(name) + _text(value) for name, value in fields)


def _text(text: bytes) -> bytes:
    size = len(text)
    if size < 127:
        return bytes([size]) + text
    size, rest = size - 127, bytearray([127])
    while size >= 128:
        rest.append(size % 128 + 128)
        size //= 128
    rest.append(size)
    return bytes(rest) + text


def request(path: bytes, more: Headers = ()) -> list[tuple[bytes, bytes]]:
    """The headers of a gRPC call."""
    return [
        (b":method", b"POST"),
        (b":scheme", b"https"),
        (b":path", path),
        (b":authority", b"peer"),
        (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
        *more,
    ]


def grpc_message(data: bytes) -> bytes:
    return struct.pack(">BI", 0, len(data)) + data


class Connection:
    """A connection over TLS, with several calls at once; all methods may raise `OSError`."""

    def __init__(self, port: int, context: ssl.SSLContext, name: str, source: str) -> None:
        plain = socket.create_connection(("127.0.0.1", port), SECONDS, source_address=(source, 0))
        try:
            self.socket = context.wrap_socket(plain, server_hostname=name)
        except BaseException:
            plain.close()
            raise
        self.answers: dict[int, Answer] = {}  # of the streams that are open
        self.pongs: list[bytes] = []  # the answers to pings
        self._stream, self._window, self._initial = -1, WINDOW, WINDOW
        self._incoming = bytearray()
        self._outgoing = bytearray(PREFACE + frame(Type.SETTINGS, 0, 0))
        self.write(frame(Type.WINDOW_UPDATE, 0, 0, struct.pack(">I", ROOM)))

    def close(self) -> None:
        self.socket.close()

    def write(self, data: bytes) -> None:
        """Queue any bytes."""
        self._outgoing += data

    def flush(self) -> None:
        if self._outgoing:
            data, self._outgoing = self._outgoing, bytearray()
            self.socket.sendall(data)

    def begin(self, headers: Headers, end: bool = False) -> int:
        """Begin a call; return its stream."""
        self._stream += 2
        self.answers[self._stream] = Answer(window=self._initial)
        flags = END_HEADERS | (END_STREAM if end else 0)
        self.write(frame(Type.HEADERS, flags, self._stream, header_block(headers)))
        return self._stream

    def send(self, stream: int, data: bytes, end: bool = True) -> None:
        """Send data of a call, as fast as the other end allows."""
        answer = self.answers[stream]
        parts = [data[i : i + LARGEST] for i in range(0, len(data), LARGEST)] or [b""]
        for number, part in enumerate(parts):
            while not answer.ended and len(part) > min(answer.window, self._window):
                self.receive()
            if answer.ended:  # it was refused early
                return
            answer.window -= len(part)
            self._window -= len(part)
            last = end and number == len(parts) - 1
            self.write(frame(Type.DATA, END_STREAM if last else 0, stream, part))

    def call(self, path: bytes, messages: Sequence[bytes], more: Headers = ()) -> int:
        stream = self.begin(request(path, more))
        self.send(stream, b"".join(map(grpc_message, messages)))
        return stream

    def finish(self, *streams: int) -> list[Answer]:
        """Wait until these calls have ended."""
        while not all(self.answers[stream].ended for stream in streams):
            self.receive()
        return [self.answers.pop(stream) for stream in streams]

    def receive(self) -> None:
        """Send what is queued, and handle what comes back."""
        self.flush()
        try:
            data = self.socket.recv(1 << 16)
        except TimeoutError as error:
            raise Closed("no answer") from error
        if not data:
            raise Closed("closed")
        self._incoming += data
        while len(self._incoming) >= 9:
            size = int.from_bytes(self._incoming[:3], "big")
            if len(self._incoming) < 9 + size:
                break
            kind, flags, stream = struct.unpack(">BBI", self._incoming[3:9])
            body = bytes(self._incoming[9 : 9 + size])
            del self._incoming[: 9 + size]
            self._handle(kind, flags, stream, body)

    def _handle(self, kind: int, flags: int, stream: int, body: bytes) -> None:
        answer = self.answers.get(stream)
        if kind == Type.SETTINGS and not flags & ACK:
            for at in range(0, len(body), 6):
                name, value = struct.unpack_from(">HI", body, at)
                if name == 4:  # the window of a new stream
                    for one in self.answers.values():
                        one.window += value - self._initial
                    self._initial = value
            self.write(frame(Type.SETTINGS, ACK, 0))
        elif kind == Type.PING:
            if flags & ACK:
                self.pongs.append(body)
            else:
                self.write(frame(Type.PING, ACK, 0, body))
        elif kind == Type.WINDOW_UPDATE:
            more = struct.unpack(">I", body)[0]
            if stream == 0:
                self._window += more
            elif answer is not None:
                answer.window += more
        elif answer is not None:
            if kind == Type.DATA:
                answer.data += body
            answer.ended |= kind == Type.RST_STREAM
            answer.ended |= kind in (Type.DATA, Type.HEADERS) and bool(flags & END_STREAM)
