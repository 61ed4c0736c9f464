"""Whatever arrives, reading it ends in a value or in `Rejected`, and memory does not grow."""

import json
import os
import random
import tracemalloc
from collections import Counter
from itertools import islice

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.hostile import (
    BOMB,
    KINDS,
    ODD,
    as_others_read_it,
    bomb,
    dumps,
    mutations,
    with_checksum,
)

from peerage.engine.router import Packet
from peerage.net.wire.header import (
    REASONS,
    SCHEMA,
    WIRES,
    MessagePolicy,
    Rejected,
    header_bytes,
    parse_header,
)
from peerage.net.wire.payload import LAYOUT_LIMIT, decode, encode
from peerage.requests import Envelope, TensorSpec

BUDGET = int(os.environ.get("PEERAGE_FUZZ", "6000"))

TENSORS = {
    "x": torch.linspace(-1, 1, 300),
    "b": torch.empty(0),
    "z": torch.full((2, 3), 1e-3),
    "scale": torch.tensor(0.5),
    "who": torch.tensor([3, 1, 2]),
    "mask": torch.tensor([True, False, True]),
    "bytes": torch.arange(5, dtype=torch.uint8),
    "cube": torch.ones(1, 1, 2, dtype=torch.uint8),
}
EXPECTED = MessagePolicy(
    run="demo",
    me=0,
    members=frozenset(range(8)),
    tensors={
        "net": {
            "x": TensorSpec((300,)),
            "b": TensorSpec((0,)),
            "z": TensorSpec((None, None)),
            "scale": TensorSpec(()),
            "who": TensorSpec((None,), torch.int64),
            "mask": TensorSpec((3,), torch.bool),
            "bytes": TensorSpec((5,), torch.uint8),
            "cube": TensorSpec((None, None, None), torch.uint8),
        }
    },
    max_bytes=1 << 16,
)
BY_HEADER = {"schema", "run", "round", "sender", "recipient", "architecture"}
INSIDE = {"oversized", "truncated", "malformed", "name", "shape", "dtype", "nonfinite", "checksum"}
BY_WIRE = BY_HEADER | INSIDE


def valid(wire: str = "fp32") -> tuple[bytes, bytes]:
    packet = Packet(Envelope(1, 60, 2, "net", 4), (0,), TENSORS, 1233)
    header, payload = encode(packet, run="demo", round=7, recipient=0, sequence=1, wire=wire)
    return header_bytes(header), bytes(payload)


def read(raw: bytes, payload: bytes) -> tuple[str, Packet | None]:
    """What becomes of a message: nothing but `Rejected` may be raised, and values must be true."""
    refusal = None
    try:
        header = parse_header(raw, EXPECTED, identity=1)
        packet = decode(header, payload, EXPECTED)
    except Rejected as rejected:
        refusal = rejected
    if refusal is not None:
        assert refusal.reason in BY_WIRE
        assert len(str(refusal)) < 400
        assert str(refusal).isprintable()
        return refusal.reason, None
    link = dict(vars(header))
    envelope = link.pop("envelope")
    facts = {**vars(envelope), "acknowledged": header.recipient in envelope.acknowledged}
    assert json.loads(raw) == {"schema": SCHEMA, **link, **facts}
    expected = as_others_read_it(raw, payload)
    assert packet.payload.keys() == expected.keys()
    assert all(torch.equal(packet.payload[name], expected[name]) for name in expected)
    assert all(packet.payload[name].dtype == TENSORS[name].dtype for name in expected)
    return "accepted", packet


@pytest.mark.slow
def test_nothing_but_rejections_and_true_values_come_out_of_mutated_messages():
    process, counts = psutil.Process(), Counter()
    rng = random.Random(BUDGET)
    streams = [mutations(rng, *valid(wire)) for wire in WIRES]
    for mutation in islice(streams[0], 100):
        read(mutation.header, mutation.payload)
    before = process.memory_info().rss
    for stream in streams:
        for _, raw, payload in islice(stream, BUDGET // len(streams)):
            outcome, _ = read(raw, payload)
            counts[outcome] += 1
    assert process.memory_info().rss - before < 50e6
    assert counts.keys() - {"accepted"} <= set(REASONS)
    assert counts["accepted"] < 0.3 * counts.total()
    if BUDGET >= 6000:
        assert counts.keys() == BY_WIRE | {"accepted"}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_mutation_is_noticed(kind):
    rng = random.Random(kind)
    messages = [KINDS[kind](rng, *valid()) for _ in range(20)]
    assert any(read(*message)[0] != "accepted" for message in messages)


def test_every_field_with_every_odd_value():
    """Only uncheckable statements about the sender, its round and its sequence are accepted."""
    raw, payload = valid()
    stated = json.loads(raw)
    free = {"round", "sequence", "number", "examples", "degree", "acknowledged"}
    for name in stated:
        for value in ODD:
            outcome, _ = read(dumps({**stated, name: value}), payload)
            if outcome == "accepted" and name not in free:
                assert value == stated[name]
            if outcome == "accepted":
                assert type(value) is type(stated[name])
                assert name not in free or -1 <= value <= 10**9


@pytest.mark.parametrize("size", [BOMB, 1 << 20])
def test_a_small_message_that_unpacks_to_much_takes_no_memory(size):
    message = with_checksum(valid()[0], bomb(size), packed=True)
    header = parse_header(message[0], EXPECTED, 1)
    tracemalloc.start()
    with pytest.raises(Rejected, match=f"unpacks to {size} bytes, more than 65536") as caught:
        decode(header, message[1], EXPECTED)
    assert tracemalloc.get_traced_memory()[1] < 1e6
    tracemalloc.stop()
    assert caught.value.reason == "oversized"


def test_a_long_layout_is_rejected_before_it_is_read():
    payload = (LAYOUT_LIMIT + 8).to_bytes(8, "little") + b"[" * 60_000
    assert read(*with_checksum(valid()[0], payload))[0] == "oversized"


@given(st.binary(max_size=200))
@settings(deadline=None, max_examples=200)
def test_any_bytes_as_a_header(raw):
    assert read(raw, b"")[0] in ("malformed", "schema")


@given(st.binary(max_size=300), st.booleans(), st.sampled_from(WIRES))
@settings(deadline=None, max_examples=200)
def test_any_bytes_as_a_payload(payload, packed, wire):
    raw, payload = with_checksum(valid()[0], payload, packed=packed, wire=wire)
    outcome, packet = read(raw, payload)
    assert packet is None or packet.payload == {}
    assert outcome in INSIDE | {"accepted"}


NUMBERS = st.one_of(st.integers(-2, 40), st.integers(), st.booleans(), st.floats())
ABOUT = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "I64", "U8", "BOOL", "BF16", "F64", ""]),
        "shape": st.lists(NUMBERS, max_size=4),
        "data_offsets": st.lists(NUMBERS, max_size=3),
    }
)


@pytest.mark.slow
@given(
    st.dictionaries(st.sampled_from([*TENSORS, "y"]), ABOUT, max_size=4),
    st.binary(max_size=64),
)
@settings(deadline=None, max_examples=300)
def test_any_layout(stated, data):
    text = dumps(stated)
    text += b" " * (-len(text) % 8)
    raw, payload = with_checksum(valid()[0], len(text).to_bytes(8, "little") + text + data)
    assert read(raw, payload)[0] in INSIDE | {"accepted"}


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=10)),
    lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.text(max_size=5), inner)),
    max_leaves=10,
)


@pytest.mark.slow
@given(st.dictionaries(st.sampled_from([*json.loads(valid()[0])]), JSON, min_size=1, max_size=3))
@settings(deadline=None, max_examples=300)
def test_any_json_in_the_fields_of_a_header(changes):
    raw, payload = valid()
    assert read(dumps({**json.loads(raw), **changes}), payload)[0] in BY_WIRE | {"accepted"}
