"""The payload of a message: tensors in the safetensors format, optionally compressed with zstd.

It is validated here before torch reads it, and never unpickled. Decoding any bytes returns a value
or raises `Rejected`, and needs a few times `MessagePolicy.max_bytes` of memory.

With the wire format int8, a float32 tensor `x` of 256 or more values is written as two tensors: its
int8 values as `x`, and the float32 scales of its blocks as `x/scales` (see `quantise`).
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import torch
import zstandard
from torch import Tensor

from peerage.engine.router import Packet
from peerage.errors import InputError, PeerageError, check_choice
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
from peerage.net.wire.quantise import num_blocks, quantise, restore
from peerage.requests import DTYPES, TensorSpec, check_dtype

LAYOUT_LIMIT = 100_000  # bytes of the JSON at the beginning of a payload
LEVEL = 1  # of zstd; on models, higher levels take longer and save no more
PIECES, PIECE = 8, 1 << 15  # number and bytes of the samples that are compressed first
WORTH = 0.95  # a payload is sent uncompressed unless it shrinks to this part of its size
SCALES = "/scales"  # end of the name of the scales of a quantised tensor


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
    if wire == "int8":
        tensors = _quantised(tensors, codes)
        codes |= dict.fromkeys(tensors.keys() - codes.keys(), "F32")  # the scales
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
    return code_of(tensor.dtype, wire, tensor.numel())


def _quantised(tensors: Mapping[str, Tensor], codes: Mapping[str, str]) -> dict[str, Tensor]:
    """The tensors to write: those with the code I8 as int8 values and scales, all others as is."""
    written = dict(tensors)
    for name, tensor in tensors.items():
        if codes[name] == "I8" and tensor.dtype is torch.float32:
            if name + SCALES in tensors:
                raise InputError(
                    f"a message has tensors {name!r} and {name + SCALES!r}, and int8 needs the "
                    "second name for itself; rename that tensor, or use wire fp32"
                )
            written[name], written[name + SCALES] = quantise(tensor)
    return written


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
    scales = _scales(entries, header, expected)
    declared = expected.tensors[header.architecture]
    specs = {**declared, **scales}
    # Scales last: those of a tensor with the wrong shape are unknown, which would hide the reason.
    for entry in sorted(entries, key=lambda entry: entry.name not in declared):
        wire = "fp32" if entry.name in scales else header.wire
        _check_spec(entry, specs.get(entry.name), wire, expected.max_bytes)
    _check_complete(entries, scales, specs, expected.max_bytes)
    _check_offsets(entries, len(received) - start)
    whole = received if not received.readonly else memoryview(bytearray(received))
    buffer = torch.frombuffer(whole, dtype=torch.uint8)[start:]
    tensors = {entry.name: _tensor(buffer, entry) for entry in entries}
    for name in scales:  # checked even if none of its block's values needs it
        quantised = name.removesuffix(SCALES)
        tensors[quantised] = restore(tensors[quantised], _finite(name, tensors.pop(name)))
    # Float32 may have been sent as bfloat16.
    tensors = {name: _finite(name, x.to(specs[name].dtype)) for name, x in tensors.items()}
    for name, tensor in tensors.items():
        broken = specs[name].broken_bound(tensor, header.round)
        if broken is not None:
            text = f"tensor {name!r} of node {header.sender} has {broken} by the algorithm"
            raise Rejected("bound", text)
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


def _scales(
    entries: Iterable[Entry], header: Header, expected: MessagePolicy
) -> dict[str, TensorSpec]:
    """The scales that the quantised tensors among these need, by name."""
    if header.wire != "int8":
        return {}
    declared = expected.tensors[header.architecture]
    found = {}
    for entry in entries:
        spec = declared.get(entry.name)
        if spec is not None and spec.dtype is torch.float32 and spec.allows(entry.shape):
            count = math.prod(entry.shape)
            if code_of(spec.dtype, header.wire, count) == "I8":
                found[entry.name + SCALES] = TensorSpec((num_blocks(count),))
    return found


def _check_spec(entry: Entry, spec: TensorSpec | None, wire: str, max_bytes: int) -> None:
    """Raise `Rejected` if a tensor does not match its declaration."""
    name = entry.name
    if spec is None:
        raise Rejected("name", f"unknown tensor {format_value(name)}")
    if not spec.allows(entry.shape):
        raise Rejected("shape", f"tensor {name!r} has the wrong shape {format_value(entry.shape)}")
    code = code_of(spec.dtype, wire, math.prod(entry.shape))
    if entry.code != code:
        raise Rejected("dtype", f"tensor {name!r} must be {code}, got {format_value(entry.code)}")
    # An empty tensor may still have large dimensions, and their product is a stride.
    if math.prod(max(n, 1) for n in entry.shape) > max_bytes:
        raise Rejected("oversized", f"tensor {name!r} is too large: {format_value(entry.shape)}")


def _check_complete(
    entries: Sequence[Entry],
    scales: Iterable[str],
    specs: Mapping[str, TensorSpec],
    max_bytes: int,
) -> None:
    """Check that no scales are missing, and that the restored tensors are not too large."""
    for name in scales:
        if all(entry.name != name for entry in entries):
            raise Rejected("name", f"tensor {name!r} is missing")
    size = sum(specs[entry.name].dtype.itemsize * math.prod(entry.shape) for entry in entries)
    if size > max_bytes:
        raise Rejected("oversized", f"the tensors have {size} bytes, more than {max_bytes}")


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


def _tensor(buffer: Tensor, entry: Entry) -> Tensor:
    piece = buffer[entry.begin : entry.end]
    if entry.code == "BOOL" and piece.numel() and int(piece.max()) > 1:
        raise Rejected("malformed", f"tensor {entry.name!r} has boolean values above 1")
    return piece.view(DTYPES[entry.code]).view(entry.shape)


def _finite(name: str, tensor: Tensor) -> Tensor:
    """The tensor; raises `Rejected` if it has values that are not finite."""
    if tensor.is_floating_point() and tensor.numel():
        # One pass that cannot overflow, eight times as fast as torch.isfinite; NaN propagates.
        low, high = tensor.aminmax()
        if not (math.isfinite(low) and math.isfinite(high)):
            raise Rejected("nonfinite", f"tensor {name!r} has entries that are not finite")
    return tensor
