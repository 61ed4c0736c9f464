"""The payload of a message: tensors in the safetensors format, optionally compressed with zstd.

It is validated here before torch reads it, and never unpickled. Decoding any bytes returns a value
or raises `Rejected`, and needs a few times `MessagePolicy.max_bytes` of memory.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import torch
import zstandard
from torch import Tensor

from peerage.engine.router import Packet
from peerage.errors import PeerageError, check_choice
from peerage.net.wire.header import (
    DONE,
    WIRES,
    Buffer,
    Header,
    MessagePolicy,
    Rejected,
    check_content,
    code_of,
    format_value,
    parsed,
)
from peerage.requests import DTYPES, check_dtype

LAYOUT_LIMIT = 100_000  # bytes of the JSON at the beginning of a payload
LEVEL = 1  # of zstd; on models, higher levels take longer and save no more
PIECES, PIECE = 8, 1 << 15  # number and bytes of the samples that are compressed first
WORTH = 0.95  # a payload is sent uncompressed unless it shrinks to this part of its size


# Writing


def encode(
    packet: Packet,
    *,
    run: str,
    round: int,
    recipient: int,
    sequence: int,
    wire: str = "fp32",
    pack: bool = False,
) -> tuple[Header, memoryview]:
    """Encode a packet as header and payload for one recipient.

    For other recipients, `dataclasses.replace` the recipient and the sequence number; the payload
    is the same. With `pack`, a sample decides whether zstd is tried. It is used if it saves 5 %.
    """
    plain = _written(packet.payload, wire)
    payload = _packed(plain) if pack else plain
    header = Header(
        run=run,
        round=round,
        envelope=packet.envelope,
        recipient=recipient,
        sequence=sequence,
        wire=wire,
        packed=payload is not plain,
        size=len(payload),
        checksum=crc32(payload),
    )
    return header, payload


def _written(tensors: Mapping[str, Tensor], wire: str) -> memoryview:
    """Encode tensors as safetensors; every tensor is copied once."""
    check_choice("wire", wire, WIRES)
    codes = {name: _code(name, tensor, wire) for name, tensor in tensors.items()}
    # Wide types first, as safetensors does, so that all tensors are aligned.
    names = sorted(tensors, key=lambda name: (-DTYPES[codes[name]].itemsize, name))
    layout: dict[str, dict[str, Any]] = {}
    end = 0
    for name in names:
        span = end, end + tensors[name].numel() * DTYPES[codes[name]].itemsize
        shape = list(tensors[name].shape)
        layout[name] = {"dtype": codes[name], "shape": shape, "data_offsets": span}
        end = span[1]
    text = json.dumps(layout, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % 8)
    if len(text) > LAYOUT_LIMIT:
        raise PeerageError(
            f"a message of {len(names)} tensors has too many names; concatenate some of them"
        )
    start = 8 + len(text)
    buffer = torch.empty(start + end, dtype=torch.uint8)
    payload = buffer.numpy().data
    payload[:start] = len(text).to_bytes(8, "little") + text
    for name, about in layout.items():
        begin, end = about["data_offsets"]
        piece = buffer[start + begin : start + end].view(DTYPES[codes[name]])
        piece.view(tensors[name].shape).copy_(tensors[name].detach())
    return payload


def _code(name: str, tensor: Tensor, wire: str) -> str:
    check_dtype(tensor.dtype, f"tensor {name!r} is")
    return code_of(tensor.dtype, wire)


def _packed(plain: memoryview) -> memoryview:
    """The payload compressed with zstd, or unchanged where that saves too little."""
    zstd = zstandard.ZstdCompressor(level=LEVEL)
    step = max(len(plain) // PIECES, PIECE)
    sample = b"".join(plain[at : at + PIECE] for at in range(0, len(plain), step))
    if len(zstd.compress(sample)) > WORTH * len(sample):
        return plain
    packed = zstd.compress(plain)
    return memoryview(packed) if len(packed) <= WORTH * len(plain) else plain


# Reading


@dataclass(frozen=True)
class Entry:
    """The layout of one tensor, as stated in the payload."""

    name: str
    code: str
    shape: tuple[int, ...]
    begin: int
    end: int


def decode(
    header: Header, payload: Buffer, expected: MessagePolicy, checksum: int | None = None
) -> Packet:
    """Decode a payload; raises `Rejected` if it is not valid.

    The tensors are views of a writable payload, which the caller must then not change or reuse. A
    read-only payload is copied once. `checksum` is that of the payload if it is already known.
    """
    check_content(header, expected)
    if header.kind == DONE:
        raise Rejected("malformed", "a message of kind 'done' has no payload")
    received = memoryview(payload)
    if len(received) != header.size:
        reason = "truncated" if len(received) < header.size else "oversized"
        raise Rejected(reason, f"expected {header.size} bytes, got {len(received)}")
    if (crc32(received) if checksum is None else checksum) != header.checksum:
        raise Rejected("checksum", f"the payload does not have the CRC-32 {header.checksum}")
    if header.packed:
        received = _unpacked(received, expected.max_bytes)
    entries, start = _layout(received)
    dtypes = {entry.name: _check_spec(entry, header, expected) for entry in entries}
    _check_offsets(entries, len(received) - start)
    whole = received if not received.readonly else memoryview(bytearray(received))
    buffer = torch.frombuffer(whole, dtype=torch.uint8)[start:]
    tensors = {entry.name: _tensor(buffer, entry, dtypes[entry.name]) for entry in entries}
    size = sum(tensor.nbytes for tensor in tensors.values())
    return Packet(header.envelope, (header.recipient,), tensors, size)


def _unpacked(packed: memoryview, limit: int) -> memoryview:
    try:
        # The frame states its unpacked size, which zstd enforces.
        size = zstandard.get_frame_parameters(packed).content_size
        if size == zstandard.CONTENTSIZE_UNKNOWN:
            raise Rejected("malformed", "the packed payload does not state its size")
        if size > limit:
            raise Rejected("oversized", f"the payload unpacks to {size} bytes, more than {limit}")
        plain = zstandard.ZstdDecompressor().decompress(packed, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise Rejected("malformed", f"the payload cannot be unpacked: {error}") from None
    return memoryview(plain)


def _layout(payload: memoryview) -> tuple[list[Entry], int]:
    """The layout of the tensors, and the offset of their bytes."""
    if len(payload) < 8:
        raise Rejected("truncated", f"a payload of {len(payload)} bytes has no layout")
    size = int.from_bytes(payload[:8], "little")
    if size > LAYOUT_LIMIT:
        raise Rejected("oversized", f"the layout has {size} bytes, more than {LAYOUT_LIMIT}")
    if size % 8:
        raise Rejected("malformed", f"a layout of {size} bytes leaves tensors unaligned")
    if 8 + size > len(payload):
        raise Rejected("truncated", f"the payload ends inside its layout of {size} bytes")
    stated = parsed(bytes(payload[8 : 8 + size]), "layout")
    return [_entry(name, about) for name, about in stated.items()], 8 + size


def _entry(name: str, about: Any) -> Entry:
    match about:
        case {"dtype": str(code), "shape": list(shape), "data_offsets": [begin, end], **more}:
            numbers = (*shape, begin, end)
            if not more and all(type(n) is int and n >= 0 for n in numbers):
                return Entry(name, code, tuple(shape), begin, end)
    raise Rejected("malformed", f"invalid layout of {format_value(name)}: {format_value(about)}")


def _check_spec(entry: Entry, header: Header, expected: MessagePolicy) -> torch.dtype:
    """The declared type of a tensor; raises `Rejected` if it does not match its declaration."""
    name = entry.name
    spec = expected.tensors[header.architecture].get(name)
    if spec is None:
        raise Rejected("name", f"unknown tensor {format_value(name)}")
    code = code_of(spec.dtype, header.wire)
    if entry.code != code:
        raise Rejected("dtype", f"tensor {name!r} must be {code}, got {format_value(entry.code)}")
    if not spec.allows(entry.shape):
        raise Rejected("shape", f"tensor {name!r} has the wrong shape {format_value(entry.shape)}")
    # An empty tensor may still have large dimensions, and their product is a stride.
    if math.prod(max(n, 1) for n in entry.shape) > expected.max_bytes:
        raise Rejected("oversized", f"tensor {name!r} is too large: {format_value(entry.shape)}")
    return spec.dtype


def _check_offsets(entries: Iterable[Entry], size: int) -> None:
    """Check that the tensors fill the payload in order, without gaps or overlaps."""
    position = 0
    for entry in sorted(entries, key=lambda entry: (entry.begin, entry.end)):
        item = DTYPES[entry.code].itemsize
        length = math.prod(entry.shape) * item
        if entry.begin != position or entry.end != position + length or entry.begin % item:
            raise Rejected(
                "malformed",
                f"tensor {entry.name!r} of {length} bytes has the wrong offsets "
                f"[{format_value(entry.begin)}, {format_value(entry.end)}) after {position}",
            )
        position = entry.end
    if position > size:
        raise Rejected("truncated", f"the tensors have {position} bytes, got {size}")
    if position < size:
        raise Rejected("malformed", f"{size - position} bytes belong to no tensor")


def _tensor(buffer: Tensor, entry: Entry, dtype: torch.dtype) -> Tensor:
    piece = buffer[entry.begin : entry.end]
    if entry.code == "BOOL" and piece.numel() and int(piece.max()) > 1:
        raise Rejected("malformed", f"tensor {entry.name!r} has boolean values above 1")
    tensor = piece.view(DTYPES[entry.code]).view(entry.shape)
    if not tensor.is_floating_point():
        return tensor
    tensor = tensor.to(dtype)  # float32 may have been sent as bfloat16
    if tensor.numel():
        # One pass that cannot overflow, eight times as fast as torch.isfinite; NaN propagates.
        low, high = tensor.aminmax()
        if not (math.isfinite(low) and math.isfinite(high)):
            raise Rejected("nonfinite", f"tensor {entry.name!r} has entries that are not finite")
    return tensor
