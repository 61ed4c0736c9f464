"""The frames of a tunnel: calls to a peer that dials out, over the connection that it opened.

Each message of the stream `Tunnel` is one frame: its kind, the number of its call, and a body.

    to the peer that dials out    CALL (method and offset), DATA, END, CANCEL
    from that peer                RESULT, FAILURE (code, reason and details), PING
"""

import struct
from enum import IntEnum
from typing import Any, NamedTuple

import grpc

from peerage.net.wire.header import Rejected, format_value
from peerage.net.wire.server import REASON, short

START = struct.Struct(">BI")  # kind and number
MAX_NUMBER = (1 << 32) - 1
MAX_CALL = 64  # bytes of the body of a CALL
NO_REASON = "-"

Code = grpc.StatusCode


class Kind(IntEnum):
    """What a frame is."""

    CALL = 1
    DATA = 2
    END = 3  # the caller sends no more data
    CANCEL = 4
    RESULT = 5
    FAILURE = 6
    PING = 7


TO_DIALLER = (Kind.CALL, Kind.DATA, Kind.END, Kind.CANCEL)
FROM_DIALLER = (Kind.RESULT, Kind.FAILURE, Kind.PING)


class Frame(NamedTuple):
    """One message in a tunnel.

    >>> Frame.parse(Frame(Kind.DATA, 7, b"abc").encode(), TO_DIALLER)
    Frame(kind=<Kind.DATA: 2>, number=7, body=b'abc')
    """

    kind: Kind
    number: int = 0
    body: bytes = b""

    def encode(self) -> bytes:
        return START.pack(self.kind, self.number) + self.body

    @classmethod
    def parse(cls, raw: bytes, allowed: tuple[Kind, ...]) -> "Frame":
        """Raises `Rejected` if this is not a frame, or not of an allowed kind."""
        if len(raw) < START.size:
            raise Rejected("malformed", f"a frame of {len(raw)} bytes is too short")
        kind, number = START.unpack_from(raw)
        if kind not in allowed:
            raise Rejected("malformed", f"unexpected kind {kind} of a frame")
        return cls(Kind(kind), number, bytes(raw[START.size :]))


def call_frame(number: int, method: str, offset: str) -> Frame:
    """The frame that begins a call; the offset is that of the payload, or empty."""
    return Frame(Kind.CALL, number, f"{method} {offset}".encode("ascii"))


def parse_call(body: bytes) -> tuple[str, str]:
    """The method and the offset of a call."""
    try:
        method, offset = body[: MAX_CALL + 1].decode("ascii").split(" ")
    except ValueError:
        raise Rejected("malformed", f"invalid call {format_value(body[:MAX_CALL])}") from None
    if len(body) > MAX_CALL:
        raise Rejected("oversized", f"a call of more than {MAX_CALL} bytes")
    return method, offset


def failure_frame(number: int, code: Any, reason: str | None, details: object) -> Frame:
    """The frame that ends a call with a status other than OK."""
    text = f"{code.name} {reason or NO_REASON} {short(details)}"
    return Frame(Kind.FAILURE, number, text.encode("ascii"))


def parse_failure(body: bytes) -> grpc.aio.AioRpcError:
    """The error that the caller gets, as from a call without a tunnel."""
    words = body.decode("ascii", "backslashreplace").split(" ", 2)
    if len(words) < 3 or words[0] not in Code.__members__ or words[0] == Code.OK.name:
        raise Rejected("malformed", f"invalid failure {format_value(body[:60])}")
    code, reason, details = words
    return rpc_error(Code[code], short(details), None if reason == NO_REASON else reason)


def rpc_error(code: Any, details: str, reason: str | None = None) -> grpc.aio.AioRpcError:
    trailing = grpc.aio.Metadata() if reason is None else grpc.aio.Metadata((REASON, reason))
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details)
