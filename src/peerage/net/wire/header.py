"""Message headers: one canonical encoding, every field validated before the payload is read.

A message is a header, canonical JSON of a few hundred bytes, and a payload (see `payload`).

The checksum detects chunks that were assembled wrongly. It is no signature: TLS protects messages
in transit, and a malicious sender could compute a checksum for any content.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from peerage.errors import InputError, PeerageError
from peerage.net.wire.quantise import BLOCK, num_blocks
from peerage.requests import DTYPES, PRE_ROUND, UNNUMBERED, Envelope, Enveloped, TensorSpec

SCHEMA = 3  # 1 called the sequence number `place`, 2 had no acknowledgements
HEADER_LIMIT = 4096  # bytes
NUMBER_LIMIT = 10**9  # for every number in a header
DATA, DONE = "data", "done"
WIRES = ("fp32", "bf16", "int8")  # formats of float32 tensors
RUN = re.compile(r"[0-9A-Za-z_-]{1,64}")
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
    "bound",
    "checksum",
    "replayed",
    "late",
    "early",
    "full",
)
RETRYABLE_REASONS = ("early", "full")  # the sender should try again
HONEST_REASONS = ("late", "early", "replayed", "full")  # also occur between honest peers

CODES = {dtype: code for code, dtype in DTYPES.items()}

Buffer = bytes | bytearray | memoryview


class Rejected(PeerageError):
    """A message that is not accepted; `reason` is one of `REASONS`, and the text has details."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


@dataclass(frozen=True)
class Header(Enveloped):
    """The fields that describe a message, sent before its payload."""

    run: str
    round: int  # PRE_ROUND for the exchange before round 1
    envelope: Envelope
    recipient: int
    sequence: int  # number of earlier messages on this link in this round
    kind: str = DATA  # or done: the sender has sent `sequence` messages and sends no more
    wire: str = WIRES[0]  # the format of float32 tensors
    packed: bool = False  # whether the whole payload is compressed with zstd
    size: int = 0  # bytes of the payload on the wire
    checksum: int = 0  # CRC-32 of the payload on the wire


# The fields of a header and of its envelope, on one level as in the JSON.
TYPES = {each.name: each.type for kind in (Header, Envelope) for each in fields(kind)}
del TYPES["envelope"]
TYPES["acknowledged"] = bool  # whether the recipient is among the senders that are acknowledged


@dataclass(frozen=True)
class MessagePolicy:
    """The messages that a peer accepts."""

    run: str
    me: int
    members: frozenset[int]
    tensors: Mapping[str, Mapping[str, TensorSpec]]  # architecture -> tensor name -> declared spec
    max_bytes: int  # of a payload, on the wire and unpacked
    rounds: int = NUMBER_LIMIT
    pack: bool = True  # whether payloads may be compressed
    examples: Mapping[int, int] = field(default_factory=dict)  # member -> number that it must state
    max_examples: int = NUMBER_LIMIT  # that any member may state

    def check_own(self, architecture: str, payload: Mapping[str, Tensor]) -> None:
        """Raise InputError if a tensor to be sent does not have its declared type.

        The recipient relies on it: BF16 stands for bfloat16 or for rounded float32, and I8 for
        int8 or for quantised float32.
        """
        for name, tensor in payload.items():
            spec = self.tensors[architecture].get(name)
            if spec is not None and spec.dtype != tensor.dtype:
                raise InputError(
                    f"node {self.me} sends tensor {name!r} as {tensor.dtype}, but message_schema "
                    f"declares {spec.dtype}; declare the type that is sent"
                )

    def check_examples(self, member: int, stated: int) -> None:
        """Raise `Rejected` if a member may not state this number of training examples."""
        wanted = self.examples.get(member, stated)
        if stated != wanted:
            raise Rejected(
                "bound",
                f"node {member} states {stated} examples, but the network file says {wanted}",
            )
        if stated > self.max_examples:
            raise Rejected(
                "bound",
                f"node {member} states {stated} examples, more than max_examples = "
                f"{self.max_examples} of the network file",
            )


def code_of(dtype: torch.dtype, wire: str, count: int) -> str:
    """The safetensors code in which `count` values of this declared type are sent.

    Only float32 is rounded. So BF16 stands for bfloat16 where that is declared, and for rounded
    float32 elsewhere; I8 likewise. The recipient knows the declaration and restores the declared
    type. Tensors smaller than a block of int8 are few bytes, and often weights or counts.
    """
    if dtype is torch.float32 and wire == "bf16":
        return "BF16"
    if dtype is torch.float32 and wire == "int8" and count >= BLOCK:
        return "I8"
    return CODES[dtype]


def written_bytes(dtype: torch.dtype, count: int, wire: str) -> int:
    """The bytes that `count` values of a type take in a payload.

    >>> written_bytes(torch.float32, 1000, "fp32"), written_bytes(torch.float32, 1000, "int8")
    (4000, 1016)
    """
    code = code_of(dtype, wire, count)
    quantised = code == "I8" and dtype is torch.float32
    return count * DTYPES[code].itemsize + quantised * num_blocks(count) * torch.float32.itemsize


# Headers


def header_bytes(header: Header) -> bytes:
    """The canonical encoding of a header; raises PeerageError if it is too long."""
    raw = _canonical(header)
    if not RUN.fullmatch(header.run):
        raise PeerageError(f"invalid run id {header.run!r}; use 1 to 64 letters, digits, - and _")
    if len(raw) > HEADER_LIMIT:
        raise PeerageError(
            f"a header has {len(raw)} bytes, more than {HEADER_LIMIT}; shorten the name of the "
            f"architecture, {format_value(header.architecture)}"
        )
    return raw


def _canonical(header: Header) -> bytes:
    stated = {"schema": SCHEMA, **asdict(header)}
    stated |= stated.pop("envelope")
    stated["acknowledged"] = header.recipient in header.envelope.acknowledged
    return json.dumps(stated, sort_keys=True, separators=(",", ":")).encode("ascii")


def done(*, run: str, round: int, sender: int, recipient: int, sent: int) -> Header:
    """A message without payload: the sender sends nothing more in this round."""
    envelope = Envelope(sender, examples=0, degree=0, architecture="")
    return Header(run, round, envelope, recipient, sequence=sent, kind=DONE)


def parse_header(raw: Buffer, expected: MessagePolicy, identity: int | None) -> Header:
    """Parse a header; raises `Rejected` if this peer cannot accept it.

    `identity` is the authenticated node at the other end; None skips the check of the sender.
    """
    raw = bytes(raw[: HEADER_LIMIT + 1])
    if len(raw) > HEADER_LIMIT:
        raise Rejected("oversized", f"the header has more than {HEADER_LIMIT} bytes")
    header = _typed(parsed(raw, "header"))
    _check_address(header, expected, identity)
    check_content(header, expected)
    if _canonical(header) != raw:
        raise Rejected("malformed", "the header is not canonical JSON")
    return header


def _typed(stated: dict[str, Any]) -> Header:
    schema = stated.pop("schema", None)
    if type(schema) is not int or schema != SCHEMA:
        raise Rejected("schema", f"expected schema {SCHEMA}, got {format_value(schema)}")
    if stated.keys() != TYPES.keys():
        odd = min(stated.keys() ^ TYPES.keys())
        raise Rejected(
            "malformed", f"field {format_value(odd)} of the header is missing or unknown"
        )
    for name, value in stated.items():
        if type(value) is not TYPES[name]:  # a bool is no int here
            raise Rejected("malformed", f"invalid {name} {format_value(value)} in the header")
    stated["acknowledged"] = (stated["recipient"],) if stated["acknowledged"] else ()
    envelope = Envelope(**{each.name: stated.pop(each.name) for each in fields(Envelope)})
    return Header(envelope=envelope, **stated)


def _check_address(h: Header, expected: MessagePolicy, identity: int | None) -> None:
    if h.run != expected.run:
        raise Rejected("run", f"expected run {expected.run!r}, got {format_value(h.run)}")
    if identity is not None and h.sender != identity:
        raise Rejected(
            "sender", f"node {identity} sent a message in the name of {format_value(h.sender)}"
        )
    if h.sender not in expected.members or h.sender == expected.me:
        raise Rejected(
            "sender", f"sender {format_value(h.sender)} is not another member of the network"
        )
    if h.recipient != expected.me:
        raise Rejected(
            "recipient", f"node {expected.me} got a message for {format_value(h.recipient)}"
        )
    if not PRE_ROUND <= h.round < expected.rounds:
        raise Rejected("round", f"invalid round {format_value(h.round)}")


def check_content(h: Header, expected: MessagePolicy) -> None:
    stated = {**vars(h), **vars(h.envelope)}
    least = {"sequence": 0, "number": UNNUMBERED, "examples": 0, "degree": 0, "size": 0}
    for name, low in least.items():
        if stated[name] < low or (name != "size" and stated[name] > NUMBER_LIMIT):
            raise Rejected("malformed", f"invalid {name} {format_value(stated[name])}")
    if h.size > expected.max_bytes:
        raise Rejected(
            "oversized",
            f"the payload has {format_value(h.size)} bytes, more than {expected.max_bytes}",
        )
    if h.kind == DONE:
        plain = done(
            run=h.run, round=h.round, sender=h.sender, recipient=h.recipient, sent=h.sequence
        )
        if h != plain:
            raise Rejected("malformed", "a message of kind 'done' has unexpected fields")
        return
    if h.kind != DATA:
        raise Rejected("malformed", f"unknown kind {format_value(h.kind)}")
    expected.check_examples(h.sender, h.examples)
    if h.architecture not in expected.tensors:
        raise Rejected("architecture", f"unknown architecture {format_value(h.architecture)}")
    if h.packed and not expected.pack:
        raise Rejected("malformed", "the payload is packed, but this network has pack = false")
    if h.wire not in WIRES:
        raise Rejected("malformed", f"unknown wire {format_value(h.wire)}")
    if not 0 <= h.checksum < 1 << 32:
        raise Rejected("malformed", f"invalid CRC-32 {format_value(h.checksum)}")


# JSON


def parsed(raw: bytes, what: str) -> dict[str, Any]:
    """Parse a JSON object; rejects floats, integers over 64 bits and duplicate keys."""
    try:
        value = json.loads(
            raw.decode("ascii"),
            object_pairs_hook=_once,
            parse_int=_integer,
            parse_float=_reject,
            parse_constant=_reject,
        )
    except (ValueError, RecursionError) as error:
        raise Rejected("malformed", f"the {what} is not valid JSON: {error}") from None
    if type(value) is not dict:
        raise Rejected("malformed", f"the {what} is not a JSON object: {format_value(value)}")
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("duplicate key")
    return found


def _integer(text: str) -> int:
    if len(text) > 18:  # up to 18 digits fit into 64 bits
        raise ValueError(f"a number of {len(text)} digits")
    return int(text)


def _reject(text: str) -> Any:
    raise ValueError(f"{text[:20]} is not an integer")


# Text from other peers


def escaped(text: object, limit: int | None = None) -> str:
    r"""A text as one line of printable characters, at most `limit` of them.

    Everything that a peer logs or reports passes through it, because the text may come from another
    peer. Newlines could forge log lines, and escape sequences could change the terminal.

    >>> print(escaped("a\nb\x1b[2J"))
    a\nb\x1b[2J
    """
    line = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(text))
    return line if limit is None or len(line) <= limit else f"{line[: limit - 3]}..."


def format_value(value: Any) -> str:
    """A value from another peer, quoted, shortened and escaped for a log line."""
    return escaped(ascii(value), 60)
