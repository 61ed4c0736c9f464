"""The header of a message: written in one way, and read as if everybody lied.

A message is a header, canonical JSON of a few hundred bytes, and a payload (see `payload`). All
that a header can tell is checked before a byte of the payload is taken.

The checksum finds transfers that were put together wrongly. It is no seal: that nobody changes
messages on their way is up to TLS, and a sender who means harm could seal what he likes.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor

from peerage.engine.shard import PRE_ROUND
from peerage.errors import InputError, PeerageError
from peerage.requests import DTYPES, Envelope, Enveloped, TensorSpec

SCHEMA = 2  # 1 called the sequence number `place`
HEADER_LIMIT = 4096  # bytes
NUMBER_LIMIT = 10**9  # for every number in a header
DATA, DONE = "data", "done"
WIRES = ("fp32", "bf16")
REASONS = (
    "oversized",
    "truncated",
    "malformed",
    "schema",
    "run",
    "round",
    "sender",
    "recipient",
    "architecture",
    "name",
    "shape",
    "dtype",
    "nonfinite",
    "checksum",
    "replayed",
    "late",
    "early",
    "full",
)
RETRYABLE_REASONS = ("early", "full")  # what a sender should try again

CODES = {dtype: code for code, dtype in DTYPES.items()}

Buffer = bytes | bytearray | memoryview


class Rejected(PeerageError):
    """A message that is not accepted; `reason` is one of `REASONS`, and the text has the value."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


@dataclass(frozen=True)
class Header(Enveloped):
    """What a message says about itself before its payload comes."""

    run: str
    round: int  # BEFORE is the prelude
    envelope: Envelope
    recipient: int
    sequence: int  # how many messages came before it on this link in this round
    kind: str  # data; or done: nothing more will come in this round, after `sequence` messages
    wire: str  # how float32 tensors travel
    packed: bool  # with zstd, as a whole
    size: int  # bytes of the payload as it travels
    checksum: int  # CRC-32 of the payload as it travels


# What a header states, on one level: the fields of its envelope beside its own.
TYPES = {field.name: field.type for kind in (Header, Envelope) for field in fields(kind)}
del TYPES["envelope"]


@dataclass(frozen=True)
class MessagePolicy:
    """What a peer accepts."""

    run: str
    me: int
    members: frozenset[int]
    tensors: Mapping[str, Mapping[str, TensorSpec]]  # architecture -> name -> what is declared
    max_bytes: int  # of a payload, as it travels and unpacked
    rounds: int = NUMBER_LIMIT
    pack: bool = True  # whether payloads may come packed

    def check_own(self, architecture: str, payload: Mapping[str, Tensor]) -> None:
        """Refuse to send a type that is not declared: others would take BF16 for something else."""
        for name, tensor in payload.items():
            spec = self.tensors[architecture].get(name)
            if spec is not None and spec.dtype != tensor.dtype:
                raise InputError(
                    f"node {self.me} sends tensor {name!r} as {tensor.dtype}, and speaks declares "
                    f"{spec.dtype}; declare what is sent"
                )


def code_of(dtype: torch.dtype, wire: str) -> str:
    """How a tensor that is declared with this type is written: only float32 is rounded.

    So BF16 stands for bfloat16 where that is declared, and for rounded float32 elsewhere; the
    recipient knows the declaration, and gives back the type that was sent.
    """
    return "BF16" if dtype is torch.float32 and wire == "bf16" else CODES[dtype]


# Headers


def header_bytes(header: Header) -> bytes:
    """The one way to write a header."""
    raw = _canonical(header)
    if not re.fullmatch(r"[0-9a-zA-Z_-]{1,64}", header.run):
        raise PeerageError(
            f"{header.run!r} is no id of a run; use 1 to 64 letters, digits, - and _"
        )
    if len(raw) > HEADER_LIMIT:
        raise PeerageError(
            f"a header of {len(raw)} bytes is more than {HEADER_LIMIT}; shorten the name of the "
            f"architecture, {format_value(header.architecture)}"
        )
    return raw


def _canonical(header: Header) -> bytes:
    stated = {"schema": SCHEMA, **asdict(header)}
    stated |= stated.pop("envelope")
    return json.dumps(stated, sort_keys=True, separators=(",", ":")).encode("ascii")


def done(*, run: str, round: int, sender: int, recipient: int, sent: int) -> Header:
    """The word that nothing more will come in this round; its payload is empty."""
    return Header(
        run=run,
        round=round,
        envelope=Envelope(sender, examples=0, degree=0, architecture=""),
        recipient=recipient,
        sequence=sent,
        kind=DONE,
        wire=WIRES[0],
        packed=False,
        size=0,
        checksum=0,
    )


def parse_header(raw: Buffer, expected: MessagePolicy, identity: int | None) -> Header:
    """The header in these bytes, if it is one that this peer can accept.

    `identity` is who speaks, as the connection was authenticated; None if nobody was asked.
    """
    raw = bytes(raw[: HEADER_LIMIT + 1])
    if len(raw) > HEADER_LIMIT:
        raise Rejected("oversized", f"a header has at most {HEADER_LIMIT} bytes, this one more")
    header = _typed(parsed(raw, "header"))
    _check_address(header, expected, identity)
    check_content(header, expected)
    if _canonical(header) != raw:
        raise Rejected("malformed", "the header is not written as canonical JSON")
    return header


def _typed(stated: dict[str, Any]) -> Header:
    schema = stated.pop("schema", None)
    if type(schema) is not int or schema != SCHEMA:
        raise Rejected("schema", f"this peer reads schema {SCHEMA}, not {format_value(schema)}")
    if stated.keys() != TYPES.keys():
        odd = min(stated.keys() ^ TYPES.keys())
        raise Rejected(
            "malformed", f"field {format_value(odd)} of the header is missing or unknown"
        )
    for name, value in stated.items():
        if type(value) is not TYPES[name]:  # a bool is no int here
            raise Rejected("malformed", f"{name} of the header cannot be {format_value(value)}")
    envelope = Envelope(**{field.name: stated.pop(field.name) for field in fields(Envelope)})
    return Header(envelope=envelope, **stated)


def _check_address(h: Header, expected: MessagePolicy, identity: int | None) -> None:
    if h.run != expected.run:
        raise Rejected("run", f"run {format_value(h.run)} is not {expected.run!r}")
    if identity is not None and h.sender != identity:
        raise Rejected("sender", f"node {identity} speaks for node {format_value(h.sender)}")
    if h.sender not in expected.members or h.sender == expected.me:
        raise Rejected(
            "sender", f"sender {format_value(h.sender)} is not another member of the network"
        )
    if h.recipient != expected.me:
        raise Rejected(
            "recipient", f"a message to {format_value(h.recipient)} came to {expected.me}"
        )
    if not PRE_ROUND <= h.round < expected.rounds:
        raise Rejected("round", f"there is no round {format_value(h.round)}")


def check_content(h: Header, expected: MessagePolicy) -> None:
    stated = {**vars(h), **vars(h.envelope)}
    for name, least in (
        ("sequence", 0),
        ("number", -1),
        ("examples", 0),
        ("degree", 0),
        ("size", 0),
    ):
        if stated[name] < least or (name != "size" and stated[name] > NUMBER_LIMIT):
            raise Rejected("malformed", f"{name} cannot be {format_value(stated[name])}")
    if h.size > expected.max_bytes:
        raise Rejected(
            "oversized",
            f"a payload has at most {expected.max_bytes} bytes, this one {format_value(h.size)}",
        )
    if h.kind == DONE:
        plain = done(
            run=h.run, round=h.round, sender=h.sender, recipient=h.recipient, sent=h.sequence
        )
        if h != plain:
            raise Rejected("malformed", "a message of kind 'done' says more than how many came")
        return
    if h.kind != DATA:
        raise Rejected("malformed", f"there is no kind {format_value(h.kind)}")
    if h.architecture not in expected.tensors:
        raise Rejected(
            "architecture", f"nobody has the architecture {format_value(h.architecture)}"
        )
    if h.packed and not expected.pack:
        raise Rejected("malformed", "the payload is packed, and nobody in this network packs")
    if h.wire not in WIRES:
        raise Rejected("malformed", f"wire cannot be {format_value(h.wire)}")
    if not 0 <= h.checksum < 1 << 32:
        raise Rejected("malformed", f"{format_value(h.checksum)} is no CRC-32")


# JSON


def parsed(raw: bytes, what: str) -> dict[str, Any]:
    """JSON objects of texts, truth values and integers of a reasonable length, no key twice."""
    try:
        value = json.loads(
            raw.decode("ascii"),
            object_pairs_hook=_once,
            parse_int=_integer,
            parse_float=_refuse,
            parse_constant=_refuse,
        )
    except (ValueError, RecursionError) as error:
        raise Rejected("malformed", f"the {what} is not JSON as it should be: {error}") from None
    if type(value) is not dict:
        raise Rejected("malformed", f"the {what} is no JSON object, but {format_value(value)}")
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key comes twice")
    return found


def _integer(text: str) -> int:
    if len(text) > 18:  # whatever is shorter fits into 64 bits
        raise ValueError(f"a number of {len(text)} digits")
    return int(text)


def _refuse(text: str) -> Any:
    raise ValueError(f"{text[:20]} is no integer")


def format_value(value: Any) -> str:
    """A value of others, safe for a line of a log."""
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
