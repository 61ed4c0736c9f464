"""Messages as bytes: they survive encoding, and anything else is rejected with its reason."""

import json
from dataclasses import replace
from typing import Any
from zlib import crc32

import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save
from torch import Tensor

from peerage.engine.router import Packet
from peerage.errors import PeerageError
from peerage.net.wire.header import (
    HEADER_LIMIT,
    REASONS,
    WIRES,
    Header,
    MessagePolicy,
    Rejected,
    done,
    header_bytes,
    parse_header,
)
from peerage.net.wire.payload import decode, encode
from peerage.requests import DTYPES, Envelope, TensorSpec

TENSORS = {
    "x": torch.tensor([0.5, -2.0, 3.0]),
    "b": torch.empty(0),
    "t": torch.tensor(1.25),
    "who": torch.tensor([2**62, -1]),
    "small": torch.tensor([7, -7], dtype=torch.int32),
    "mask": torch.tensor([True, False, True]),
    "raw": torch.tensor([0, 255], dtype=torch.uint8),
}
EXPECTED = MessagePolicy(
    run="demo",
    me=2,
    members=frozenset({0, 1, 2}),
    tensors={
        "net": {
            "x": TensorSpec((3,)),
            "b": TensorSpec((0,)),
            "t": TensorSpec(()),
            "who": TensorSpec((None,), torch.int64),
            "small": TensorSpec((2,), torch.int32),
            "mask": TensorSpec((3,), torch.bool),
            "raw": TensorSpec((2,), torch.uint8),
        },
        "other": {"x": TensorSpec((4,))},
    },
    max_bytes=10_000,
)


def packet(payload: dict[str, Tensor], architecture: str = "net") -> Packet:
    return Packet(Envelope(1, 60, 4, architecture, 5), (2, 0), payload, 0)


def written(payload: dict[str, Tensor], **options: Any) -> tuple[Header, memoryview]:
    return encode(packet(payload), run="demo", round=3, recipient=2, sequence=1, **options)


def allowing(**tensors: Any) -> MessagePolicy:
    """Tensors like these; a shape alone stands for float32."""
    specs = {n: TensorSpec(s) if isinstance(s, tuple) else s for n, s in tensors.items()}
    return replace(EXPECTED, tensors={"net": specs}, max_bytes=1 << 24)


def stating(header: Header, **changes: Any) -> Header:
    """The same header with another envelope."""
    return replace(header, envelope=replace(header.envelope, **changes))


def reason(call: Any, *arguments: Any) -> str:
    with pytest.raises(Rejected) as caught:
        call(*arguments)
    assert caught.value.reason in REASONS
    return caught.value.reason


# There and back


def test_a_header_is_written_in_one_way():
    header, payload = written({})
    assert bytes(payload) == b"\x08" + bytes(7) + b"{}      "
    assert header_bytes(header).decode() == (
        f'{{"acknowledged":false,"architecture":"net","checksum":{crc32(payload)},"degree":4,"examples":60,'
        '"kind":"data","number":5,"packed":false,"recipient":2,"round":3,"run":"demo",'
        '"schema":3,"sender":1,"sequence":1,"size":16,"wire":"fp32"}'
    )
    assert parse_header(header_bytes(header), EXPECTED, 1) == header


def test_a_header_acknowledges_its_recipient_only():
    header, _ = written({})
    for senders, acknowledged in {(2, 5): (2,), (1, 5): ()}.items():
        read = parse_header(header_bytes(stating(header, acknowledged=senders)), EXPECTED, 1)
        assert read.envelope.acknowledged == acknowledged


def test_everything_comes_back_to_the_bit():
    header, payload = written(TENSORS)
    got = decode(header, payload, EXPECTED)
    assert got.payload.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert torch.equal(got.payload[name], tensor)
        assert got.payload[name].dtype == tensor.dtype
    assert got.bytes == 3 * 4 + 4 + 2 * 8 + 2 * 4 + 3 + 2
    about = replace(got, payload={}, bytes=0)
    assert about == Packet(Envelope(1, 60, 4, "net", 5), (2,), {}, 0)


def test_payloads_are_safetensors_both_ways():
    header, payload = written(TENSORS)
    theirs = load(bytes(payload))
    assert all(torch.equal(theirs[name], tensor) for name, tensor in TENSORS.items())
    foreign = save(TENSORS)
    consistent = replace(header, size=len(foreign), checksum=crc32(foreign))
    got = decode(consistent, foreign, EXPECTED).payload
    assert all(torch.equal(got[name], tensor) for name, tensor in TENSORS.items())


def test_a_message_without_tensors():
    header, payload = written({})
    assert decode(header, payload, EXPECTED).payload == {}


def test_shared_strided_and_tracked_tensors():
    x = torch.arange(12.0).reshape(3, 4)
    tensors = {"a": x, "same": x, "t": x.T, "w": torch.nn.Parameter(x[:, 1])}
    header, payload = written(tensors)
    forms = allowing(a=(3, 4), same=(3, 4), t=(4, 3), w=(3,))
    got = decode(header, payload, forms).payload
    assert all(torch.equal(got[name], tensor) for name, tensor in tensors.items())
    assert not any(tensor.requires_grad for tensor in got.values())


def test_the_order_of_names_does_not_matter():
    backwards = dict(reversed(TENSORS.items()))
    assert bytes(written(backwards)[1]) == bytes(written(TENSORS)[1])


def test_other_recipients_get_the_same_payload():
    header, payload = written({"x": TENSORS["x"]})
    other = replace(header, recipient=0, sequence=9)
    got = decode(other, payload, replace(EXPECTED, me=0))
    assert got.to == (0,)
    assert torch.equal(got.payload["x"], TENSORS["x"])


def test_tensors_lie_in_the_received_buffer():
    header, payload = written({"x": TENSORS["x"]})
    received = bytearray(payload)
    got = decode(header, received, EXPECTED).payload["x"]
    received[-12:-8] = torch.tensor([9.0]).numpy().tobytes()
    assert got.tolist() == [9.0, -2.0, 3.0]


@given(st.data())
@settings(deadline=None, max_examples=60)
def test_any_tensors_come_back(data):
    shapes = st.lists(st.integers(0, 4), max_size=3)
    dtypes = st.sampled_from(list(DTYPES.values()))
    names = data.draw(st.lists(st.text(max_size=5), unique=True, max_size=5))
    tensors = {name: torch.randint(0, 2, data.draw(shapes)).to(data.draw(dtypes)) for name in names}
    wire, pack = data.draw(st.sampled_from(WIRES)), data.draw(st.booleans())
    header, payload = written(tensors, wire=wire, pack=pack)
    forms = allowing(**{n: TensorSpec(tuple(x.shape), x.dtype) for n, x in tensors.items()})
    got = decode(parse_header(header_bytes(header), forms, 1), bytes(payload), forms).payload
    assert got.keys() == tensors.keys()
    assert all(
        torch.equal(got[name], x) and got[name].dtype == x.dtype for name, x in tensors.items()
    )


# Smaller


def test_bf16_halves_float32_and_leaves_integers():
    x = torch.randn(10_000, generator=torch.Generator().manual_seed(1))
    tensors = {"x": x, "i": torch.tensor([2**40 + 1])}
    header, payload = written(tensors, wire="bf16")
    assert header.wire == "bf16"
    assert header.size == pytest.approx(20_000, abs=200)
    got = decode(header, payload, allowing(x=(10_000,), i=TensorSpec((1,), torch.int64)))
    assert got.payload["i"].tolist() == [2**40 + 1]
    assert got.payload["x"].dtype == torch.float32
    assert got.bytes == 40_008
    # Eight bits of precision, and rounding to the nearest.
    assert ((got.payload["x"] - x).abs() <= x.abs() * 2**-8).all()
    assert not torch.equal(got.payload["x"], x)


def test_packing_is_used_where_it_pays():
    zeros = {"x": torch.zeros(100_000)}
    header, payload = written(zeros, pack=True)
    assert header.packed
    assert header.size == len(payload) < 1000
    assert torch.equal(decode(header, payload, allowing(x=(100_000,))).payload["x"], zeros["x"])
    random = torch.randint(0, 256, (400_000,), dtype=torch.uint8)
    header, payload = written({"x": random}, pack=True)
    assert not header.packed
    assert header.size > 400_000


def test_packing_must_save_a_twentieth():
    """Random bytes do not shrink and zeros vanish, so what counts is the share of the zeros."""
    random = torch.randint(0, 256, (500_000,), dtype=torch.uint8)
    for zeros, worth in ((20_000, False), (60_000, True)):
        tensors = {"x": torch.cat([torch.zeros(zeros, dtype=torch.uint8), random])}
        assert written(tensors, pack=True)[0].packed == worth


def test_a_sample_decides_whether_packing_is_tried():
    """Zeros between the pieces that are looked at go unnoticed, and cost no time."""
    eighth = 200_000
    random = torch.randint(0, 256, (8, eighth), dtype=torch.uint8)
    random[:, eighth // 2 : -eighth // 8] = 0
    tensors = {"x": random.flatten()}
    assert not written(tensors, pack=True)[0].packed
    assert len(zstandard.compress(written(tensors)[1])) < 0.7 * 8 * eighth


def test_packed_payloads_that_are_rejected():
    _, plain = written({"x": TENSORS["x"]})
    frame = zstandard.compress(plain)
    nameless = zstandard.ZstdCompressor(write_content_size=False).compress(plain)
    assert decode(*with_checksum(frame, packed=True), EXPECTED).payload["x"].tolist() == [
        0.5,
        -2,
        3,
    ]
    for odd in (frame[:-1], frame + b"\0", frame + frame, nameless, bytes(plain), b""):
        assert reason(decode, *with_checksum(odd, packed=True), EXPECTED) == "malformed"
    large = zstandard.compress(bytes(10_001))
    assert reason(decode, *with_checksum(large, packed=True), EXPECTED) == "oversized"


# Numbers that are not finite


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_one_bad_entry_is_found_wherever_it_is(bad, wire):
    for size in (1, 7, 100, 1025):
        for at in {0, size // 2, size - 1}:
            x = torch.ones(size)
            x[at] = bad
            header, payload = written({"x": x}, wire=wire)
            assert reason(decode, header, payload, allowing(x=(size,))) == "nonfinite"


def test_infinities_do_not_cancel_and_large_numbers_are_finite():
    cancel = torch.tensor([float("inf"), -float("inf")])
    header, payload = written({"x": cancel})
    assert reason(decode, header, payload, allowing(x=(2,))) == "nonfinite"
    large = torch.full((1000,), torch.finfo(torch.float32).max)
    header, payload = written({"x": large})
    assert torch.equal(decode(header, payload, allowing(x=(1000,))).payload["x"], large)


# Headers that are rejected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"schema": 2}, "schema"),
        ({"schema": "3"}, "schema"),
        ({"schema": True}, "schema"),
        ({"run": "other"}, "run"),
        ({"sender": 0}, "sender"),  # a member, but not the caller
        ({"sender": 2}, "sender"),
        ({"recipient": 0}, "recipient"),
        ({"round": -2}, "round"),
        ({"round": 10**9 + 1}, "round"),
        ({"architecture": "unknown"}, "architecture"),
        ({"kind": "hello"}, "malformed"),
        ({"kind": "done"}, "malformed"),  # with a payload
        ({"wire": "fp16"}, "malformed"),
        ({"sequence": -1}, "malformed"),
        ({"number": -2}, "malformed"),
        ({"examples": -1}, "malformed"),
        ({"examples": 10**12}, "malformed"),
        ({"degree": True}, "malformed"),
        ({"packed": 0}, "malformed"),
        ({"size": -1}, "malformed"),
        ({"size": 10_001}, "oversized"),
        ({"size": 10**30}, "malformed"),  # too large to compute with
        ({"size": 1.0}, "malformed"),
        ({"checksum": -1}, "malformed"),
        ({"checksum": 1 << 32}, "malformed"),
        ({"checksum": "0"}, "malformed"),
        ({"more": 1}, "malformed"),
        ({"run": "x" * 5000}, "oversized"),
    ],
)
def test_headers_that_are_rejected(changes, expected):
    header, _ = written({})
    stated = {**json.loads(header_bytes(header)), **changes}
    raw = json.dumps(stated, sort_keys=True, separators=(",", ":")).encode()
    assert reason(parse_header, raw, EXPECTED, 1) == expected


def test_a_member_cannot_send_as_another():
    header, _ = written({})
    raw = header_bytes(header)
    assert parse_header(raw, EXPECTED, None) == header
    assert reason(parse_header, raw, EXPECTED, 0) == "sender"
    for sender in (2, 9):  # the peer itself, and no member
        other = header_bytes(stating(header, sender=sender))
        assert reason(parse_header, other, EXPECTED, sender) == "sender"


def test_there_is_one_way_to_write_a_header():
    raw = header_bytes(written({})[0])
    for other in (
        raw + b" ",
        raw.replace(b":", b": ", 1),
        raw.replace(b'"demo"', b'"\\u0064emo"'),
        raw.replace(b'"degree":4', b'"degree":-0'),
        raw.replace(b'"degree":4,', b'"degree":4,"degree":4,'),
        json.dumps(dict(reversed(json.loads(raw).items()))).encode(),
    ):
        assert other != raw
        assert reason(parse_header, other, EXPECTED, 1) == "malformed"


def test_the_header_that_a_sender_is_done():
    header = done(run="demo", round=-1, sender=0, recipient=2, sent=3)
    assert parse_header(header_bytes(header), EXPECTED, 0) == header
    assert (header.kind, header.sequence, header.size) == ("done", 3, 0)
    assert reason(decode, header, b"", EXPECTED) == "malformed"
    odd = stating(header, examples=1)
    assert reason(parse_header, header_bytes(odd), EXPECTED, 0) == "malformed"


# Payloads that are rejected


def with_checksum(payload: bytes, **changes: Any) -> tuple[Header, bytes]:
    header, _ = written({})
    stated = {"size": len(payload), "checksum": crc32(payload)}
    return replace(header, **{**stated, **changes}), payload


def analytic_gradients(layout: Any, data: bytes) -> tuple[Header, bytes]:
    text = json.dumps(layout).encode()
    text += b" " * (-len(text) % 8)
    return with_checksum(len(text).to_bytes(8, "little") + text + data)


def about(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_a_payload_must_match_its_header():
    header, payload = written({"x": TENSORS["x"]})
    assert reason(decode, header, payload[:-1], EXPECTED) == "truncated"
    assert reason(decode, header, bytes(payload) + b"\0", EXPECTED) == "oversized"
    assert reason(decode, header, bytes(payload[:-1]) + b"\1", EXPECTED) == "checksum"


X = bytes(12)
WHO = bytes(16)


@pytest.mark.parametrize(
    ("layout", "data", "expected"),
    [
        ({"x": about("F32", [3], 0, 12)}, X, None),
        ({"x": about("F32", [3], 0, 12)}, X[:-1], "truncated"),
        ({"x": about("F32", [3], 0, 12)}, X + b"\0", "malformed"),
        ({"y": about("F32", [3], 0, 12)}, X, "name"),
        ({"__metadata__": {"format": "pt"}}, b"", "malformed"),
        ({"x": about("F32", [4], 0, 16)}, X, "shape"),
        ({"x": about("F32", [3, 1], 0, 12)}, X, "shape"),
        ({"x": about("F32", [], 0, 4)}, X[:4], "shape"),
        ({"x": about("I32", [3], 0, 12)}, X, "dtype"),
        ({"x": about("BF16", [3], 0, 6)}, X[:6], "dtype"),  # the header says fp32
        ({"x": about("F64", [3], 0, 24)}, X + X, "dtype"),
        ({"who": about("F32", [3], 0, 12)}, X, "dtype"),
        ({"x": about("F32", [3], 0, 8)}, X[:8], "malformed"),
        ({"x": about("F32", [3], 4, 16)}, X + X[:4], "malformed"),
        ({"x": about("F32", [3], 12, 0)}, X, "malformed"),
        ({"x": about("F32", [-3], 0, 12)}, X, "malformed"),
        ({"x": {**about("F32", [3], 0, 12), "z": 0}}, X, "malformed"),
        ({"x": about("F32", [3], 0, 12), "who": about("I64", [2], 12, 28)}, X + WHO, "malformed"),
        ({"x": about("F32", [3], 16, 28), "who": about("I64", [2], 0, 16)}, WHO + X, None),
        ({"x": about("F32", [3], 12, 24), "who": about("I64", [2], 0, 16)}, WHO + X, "malformed"),
        ({"x": about("F32", [3], 20, 32), "who": about("I64", [2], 0, 16)}, WHO + X, "malformed"),
        ({"mask": about("BOOL", [3], 0, 3)}, b"\0\1\1", None),
        ({"mask": about("BOOL", [3], 0, 3)}, b"\0\1\2", "malformed"),
        ({"who": about("I64", [0], 0, 0), "x": about("F32", [3], 0, 12)}, X, None),
        ([], b"", "malformed"),
        ({"x": []}, b"", "malformed"),
    ],
)
def test_layouts_by_hand(layout, data, expected):
    header, payload = analytic_gradients(layout, data)
    if expected is None:
        assert decode(header, payload, EXPECTED).payload.keys() == layout.keys()
    else:
        assert reason(decode, header, payload, EXPECTED) == expected


def test_payloads_without_a_layout():
    for payload, expected in (
        (b"", "truncated"),
        (bytes(7), "truncated"),
        ((16).to_bytes(8, "little") + b"{}", "truncated"),
        ((2).to_bytes(8, "little") + b"{}", "malformed"),
        ((2**63).to_bytes(8, "little") + b"{}", "oversized"),
        (bytes(8), "malformed"),
    ):
        assert reason(decode, *with_checksum(payload), EXPECTED) == expected
        assert reason(decode, *with_checksum(payload, packed=True), EXPECTED) == "malformed"


def test_long_sides_of_an_empty_tensor_are_rejected():
    forms = replace(EXPECTED, tensors={"net": {"x": TensorSpec((None, None, None))}})
    layout = {"x": about("F32", [0, 2**40, 2**40], 0, 0)}
    assert reason(decode, *analytic_gradients(layout, b""), forms) == "oversized"
    fine = {"x": about("F32", [0, 2, 3], 0, 0)}
    assert decode(*analytic_gradients(fine, b""), forms).payload["x"].shape == (0, 2, 3)


@pytest.mark.parametrize(("declared", "fitting"), [((0,), (0,)), ((2, None), (2, 5))])
def test_shapes_that_are_declared(declared, fitting):
    forms = replace(EXPECTED, tensors={"net": {"x": TensorSpec(declared)}})
    for shape in ((0,), (2, 5), (1,), (3, 5), ()):
        header, payload = written({"x": torch.ones(shape)})
        if shape == fitting:
            assert decode(header, payload, forms).payload["x"].shape == shape
        else:
            assert reason(decode, header, payload, forms) == "shape"


def test_architectures_have_their_own_tensors():
    tensors = {"x": torch.ones(4)}
    other = encode(packet(tensors, "other"), run="demo", round=0, recipient=2, sequence=0)
    assert torch.equal(decode(*other, EXPECTED).payload["x"], tensors["x"])
    assert reason(decode, *written(tensors), EXPECTED) == "shape"


# What cannot be sent


def test_the_sender_gets_an_error_for_what_cannot_be_sent():
    with pytest.raises(
        PeerageError, match="tensor 'x' is of type complex64, which messages cannot"
    ):
        written({"x": torch.ones(2, dtype=torch.complex64)})
    with pytest.raises(PeerageError, match="wire must be one of fp32, bf16, int8; got 'fp16'"):
        written({}, wire="fp16")
    with pytest.raises(PeerageError, match="a message of 5000 tensors has too many names"):
        written({f"tensor{i}": torch.ones(1) for i in range(5000)})
    with pytest.raises(
        PeerageError, match="complex64, which messages cannot contain; use one of flo"
    ):
        TensorSpec((1,), torch.complex64)
    header, _ = written({})
    with pytest.raises(PeerageError, match=f"more than {HEADER_LIMIT}; shorten the name"):
        header_bytes(stating(header, architecture="a" * 5000))
    with pytest.raises(PeerageError, match="invalid run id 'a b'"):
        header_bytes(replace(header, run="a b"))
