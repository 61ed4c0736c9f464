"""Changed messages: by accident, or by an attacker that knows the format.

All mutations begin with a valid message whose payload is not packed. In those of the kind "valid
checksum", the header has the size and checksum of the changed payload, so that only a reader of the
payload finds the change.
"""

import json
import random
import struct
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple
from zlib import crc32

import torch
import zstandard
from safetensors.torch import load

from peerage.net.wire.header import WIRES

Bytes = tuple[bytes, bytes]  # header, payload
BOMB = 1 << 28  # bytes of zeros, which pack into a few thousand

ODD: list[Any] = [
    *(None, True, False, 0, 1, -1, -2, 7, 10**9, 10**9 + 1, 2**31, 2**63 - 1, -(2**63)),
    *(2**64, 10**30, -(10**30), 0.5, 1.0, 1e308, float("nan"), float("inf"), -float("inf")),
    *("", "x", "0", "data", "done", "fp32", "bf16", "int8", "fp16", "A" * 3000, "0" * 64, "f" * 64),
    *("é", "\u202e", "\x00", "\ud800", "💥" * 50, "../../etc/passwd", "'; --", "%s%n", "\r\nlog"),
    *([], {}, [0], [[]], {"": 0}, [None] * 50, {"run": "demo"}),
]
CODES = ["F32", "BF16", "I64", "I32", "I8", "U8", "BOOL", "F64", "F16", "F8_E4M3", "f32", "", "O"]
NOT_FINITE = {4: [0x7FC00000, 0x7F800000, 0xFF800000, 0x7F800001], 2: [0x7FC0, 0x7F80, 0xFF80]}


class Mutation(NamedTuple):
    kind: str
    header: bytes
    payload: bytes


def mutations(rng: random.Random, header: bytes, payload: bytes) -> Iterator[Mutation]:
    """Endless changed messages of all kinds; a few of them are still valid."""
    kinds = [
        *KINDS,
        *["header: field", "valid checksum: entry", "valid checksum: packed"] * 4,
    ]  # these have many variants
    while True:
        kind = rng.choice(kinds)
        yield Mutation(kind, *KINDS[kind](rng, header, payload))


def dumps(stated: Any) -> bytes:
    return json.dumps(stated, sort_keys=True, separators=(",", ":")).encode()


def with_checksum(header: bytes, payload: bytes, **changes: Any) -> Bytes:
    stated = {"size": len(payload), "checksum": crc32(payload)}
    return dumps({**json.loads(header), **changes, **stated}), payload


# Any bytes


def flip(rng: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 8])):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def cut(rng: random.Random, data: bytes) -> bytes:
    start = rng.choice([0, rng.randrange(len(data))])
    return data[:start] if start else data[: rng.randrange(len(data))]


def insert(rng: random.Random, data: bytes) -> bytes:
    at = rng.choice([0, len(data), rng.randrange(len(data))])
    return data[:at] + rng.randbytes(rng.choice([1, 1, 8, 100])) + data[at:]


def repeat(rng: random.Random, data: bytes) -> bytes:
    start, stop = sorted(rng.choices(range(len(data) + 1), k=2))
    return data[:stop] + data[start:]


def noise(rng: random.Random, data: bytes) -> bytes:
    return rng.randbytes(rng.choice([0, 1, 7, 8, 9, 100, len(data)]))


ANY = {"flip": flip, "cut": cut, "insert": insert, "repeat": repeat, "noise": noise}


# Headers


def field(rng: random.Random, header: bytes, payload: bytes) -> Bytes:
    stated = json.loads(header)
    return dumps({**stated, rng.choice(list(stated)): rng.choice(ODD)}), payload


def missing(rng: random.Random, header: bytes, payload: bytes) -> Bytes:
    stated = json.loads(header)
    del stated[rng.choice(list(stated))]
    return dumps(stated), payload


def more(rng: random.Random, header: bytes, payload: bytes) -> Bytes:
    return dumps({**json.loads(header), f"z{rng.randrange(9)}": rng.choice(ODD)}), payload


def twice(rng: random.Random, header: bytes, payload: bytes) -> Bytes:
    stated = json.loads(header)
    name = rng.choice(list(stated))
    again = dumps({name: rng.choice([stated[name], rng.choice(ODD)])})
    return header[:-1] + b"," + again[1:], payload


def deep(rng: random.Random, header: bytes, payload: bytes) -> Bytes:
    opening, closing = rng.choice([(b"[", b"]"), (b'{"a":', b"}")])
    depth = rng.choice([2, 50, 600, 2000, 100_000])
    return opening * depth + b"1" + closing * rng.choice([0, depth]), payload


def long(rng: random.Random, header: bytes, payload: bytes) -> Bytes:
    return header + b" " * rng.choice([1, 3000, 4096, 1 << 20]), payload


def digits(rng: random.Random, header: bytes, payload: bytes) -> Bytes:
    stated = json.loads(header)
    name = rng.choice([name for name, value in stated.items() if type(value) is int])
    number = rng.choice(["", "-"]) + "9" * rng.choice([18, 19, 100, 3500])
    before, after = f'"{name}":{stated[name]}', f'"{name}":{number}'
    return header.replace(before.encode(), after.encode()), payload


# Payloads


def layout(payload: bytes) -> tuple[dict[str, Any], bytes]:
    size = int.from_bytes(payload[:8], "little")
    return json.loads(payload[8 : 8 + size]), payload[8 + size :]


def rebuilt(stated: Any, data: bytes, align: int = 8) -> bytes:
    text = json.dumps(stated).encode()
    text += b" " * (-len(text) % align)
    return len(text).to_bytes(8, "little") + text + data


def length(rng: random.Random, header: bytes, payload: bytes) -> Bytes:
    """The layout does not have the stated length."""
    size = int.from_bytes(payload[:8], "little")
    wrong = [0, 1, 8, size - 8, size - 1, size + 1, size + 8, len(payload) - 8, len(payload)]
    stated = rng.choice([*wrong, 100_000, 2**31, 2**63, 2**64 - 1])
    return with_checksum(header, max(stated, 0).to_bytes(8, "little") + payload[8:])


def entry(rng: random.Random, header: bytes, payload: bytes) -> Bytes:
    """Something odd about one tensor."""
    stated, data = layout(payload)
    about = stated[rng.choice(list(stated))]
    numbers = [-1, 0, 1, 2, 3, 2**31, 2**63, 2**64, 10**40, 0.5, True, None, "1"]
    some = [rng.choice(numbers) for _ in range(rng.randrange(5))]
    change: dict[str, Any] = {
        "dtype": rng.choice([*CODES, rng.choice(ODD)]),
        "shape": rng.choice([some, [1] * 70, [0, 2**40, 2**40], rng.choice(ODD)]),
        "data_offsets": rng.choice([some[:2], rng.choice(ODD)]),
        "more": rng.choice(ODD),
    }
    key = rng.choice(list(change))
    about[key] = change[key]
    if rng.random() < 0.1:
        del about[rng.choice(list(about))]
    return with_checksum(header, rebuilt(stated, data))


def name(rng: random.Random, header: bytes, payload: bytes) -> Bytes:
    stated, data = layout(payload)
    old = rng.choice(list(stated))
    odd = rng.choice(["", "__metadata__", "y", "\u0000", "x" * 9000, "é", "__class__"])
    return with_checksum(header, rebuilt({odd if n == old else n: stated[n] for n in stated}, data))


def again(rng: random.Random, header: bytes, payload: bytes) -> Bytes:
    """One name for two tensors."""
    stated, data = layout(payload)
    old = rng.choice(list(stated))
    text = json.dumps(stated)[:-1] + f", {json.dumps(old)}: {json.dumps(stated[old])}}}"
    text += " " * (-len(text) % 8)
    return with_checksum(header, len(text).to_bytes(8, "little") + text.encode() + data)


def offsets(rng: random.Random, header: bytes, payload: bytes) -> Bytes:
    """Tensors that overlap, or leave gaps, or lie outside."""
    stated, data = layout(payload)
    first, second = rng.choices(list(stated), k=2)
    begin, end = stated[first]["data_offsets"]
    shift = rng.choice([-8, -4, -1, 1, 4, 8, len(data), 2**40])
    moved = [[begin + shift, end + shift], [begin, end + shift], [begin + shift, end], [end, begin]]
    stated[first]["data_offsets"] = rng.choice([*moved, stated[second]["data_offsets"]])
    return with_checksum(header, rebuilt(stated, data))


def nested(rng: random.Random, header: bytes, payload: bytes) -> Bytes:
    depth = rng.choice([50, 2000, 49_000])
    text = rng.choice([b"[" * depth + b"]" * depth, b'{"a":' * (depth // 6) + b"1"])
    text += b" " * (-len(text) % 8)
    return with_checksum(header, len(text).to_bytes(8, "little") + text)


def nonfinite(rng: random.Random, header: bytes, payload: bytes) -> Bytes:
    stated, data = layout(payload)
    changed = bytearray(data)
    floats = [about for about in stated.values() if about["dtype"] in ("F32", "BF16")]
    begin, end = rng.choice([a["data_offsets"] for a in floats if 0 not in a["shape"]])
    width = 2 if json.loads(header)["wire"] == "bf16" else 4  # of int8, the scales
    at = rng.randrange(begin, end, width)
    struct.pack_into("<I" if width == 4 else "<H", changed, at, rng.choice(NOT_FINITE[width]))
    return with_checksum(header, rebuilt(stated, bytes(changed)))


def unaligned(rng: random.Random, header: bytes, payload: bytes) -> Bytes:
    stated, data = layout(payload)
    return with_checksum(header, rebuilt(stated, data, align=rng.choice([1, 2, 3, 4, 5, 16])))


def rewired(rng: random.Random, header: bytes, payload: bytes) -> Bytes:
    other = rng.choice([wire for wire in WIRES if wire != json.loads(header)["wire"]])
    return with_checksum(header, payload, wire=other)


# Packed payloads


@cache
def bomb(size: int) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(bytes(size))


def packed(rng: random.Random, header: bytes, payload: bytes) -> Bytes:
    zstd = zstandard.ZstdCompressor(level=rng.choice([1, 3, 10]))
    nameless = zstandard.ZstdCompressor(write_content_size=False)
    frame = zstd.compress(payload)
    frames = {
        "whole": frame,
        "flipped": flip(rng, frame),
        "cut": cut(rng, frame),
        "longer": insert(rng, frame),
        "two": frame + zstd.compress(noise(rng, payload)),
        "skippable": b"\x50\x2a\x4d\x18\xff\xff\xff\xff" + frame,
        "without size": nameless.compress(payload),
        "not packed": payload,
        "bomb": bomb(BOMB),
        "small bomb": bomb(1 << 20),
        "lying bomb": bomb(BOMB)[:5] + struct.pack("<I", 1000) + bomb(BOMB)[9:],
        "noise": frame[:4] + noise(rng, payload),
        "nothing": b"",
    }
    return with_checksum(header, frames[rng.choice(list(frames))], packed=True)


def _of_header(change: Callable[[random.Random, bytes], bytes]) -> Any:
    return lambda rng, header, payload: (change(rng, header), payload)


def _of_payload(change: Callable[[random.Random, bytes], bytes]) -> Any:
    return lambda rng, header, payload: (header, change(rng, payload))


def _of_checksummed(change: Callable[[random.Random, bytes], bytes]) -> Any:
    return lambda rng, header, payload: with_checksum(header, change(rng, payload))


KINDS: dict[str, Callable[[random.Random, bytes, bytes], Bytes]] = {
    **{f"header: {name}": _of_header(change) for name, change in ANY.items()},
    **{f"payload: {name}": _of_payload(change) for name, change in ANY.items()},
    **{f"valid checksum: {name}": _of_checksummed(change) for name, change in ANY.items()},
    **{
        f"header: {change.__name__}": change
        for change in (field, missing, more, twice, deep, long, digits)
    },
    **{
        f"valid checksum: {change.__name__}": change
        for change in (
            length,
            entry,
            name,
            again,
            offsets,
            nested,
            nonfinite,
            unaligned,
            rewired,
            packed,
        )
    },
}


# A second way to read a message


def as_others_read_it(raw: bytes, payload: bytes) -> dict[str, torch.Tensor]:
    if json.loads(raw)["packed"]:
        payload = zstandard.ZstdDecompressor().decompress(payload)
    found = {
        name: tensor.float() if tensor.dtype == torch.bfloat16 else tensor
        for name, tensor in load(payload).items()
    }
    for name in [name for name in found if name.endswith("/scales")]:
        values = found[name.removesuffix("/scales")]
        each = found.pop(name).repeat_interleave(256)[: values.numel()]  # the scale of each value
        found[name.removesuffix("/scales")] = values.float() * each.view(values.shape)
    return found
