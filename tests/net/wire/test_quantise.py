"""Int8 on the wire: the bound on the error, what stays as it is, and hostile scales."""

from dataclasses import replace
from typing import Any
from zlib import crc32

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from safetensors.torch import load, save
from torch import Tensor

from peerage.engine.router import Packet
from peerage.errors import InputError
from peerage.net.wire.header import Header, MessagePolicy, Rejected
from peerage.net.wire.payload import decode, encode
from peerage.net.wire.quantise import BLOCK, MAX_SCALE, num_blocks, quantise, restore
from peerage.requests import Envelope, TensorSpec

MAX = float(torch.finfo(torch.float32).max)
TINY = 2.0**-149  # the smallest positive number


def slow_quantise(x: list[float]) -> list[int]:
    """The integers of one block, by the definition."""
    scale = float(quantise(torch.tensor(x))[1][0])
    return [0 if scale == 0 else max(-127, min(127, round(v / scale))) for v in x]


FINITE = st.floats(-MAX, MAX, width=32)
ARRAYS = arrays(np.float32, st.integers(1, 3 * BLOCK), elements=FINITE, fill=FINITE)


@settings(deadline=None, max_examples=200)
@given(ARRAYS)
@example(np.full(BLOCK, MAX, dtype=np.float32))
@example(np.array([TINY], dtype=np.float32))
@example(np.array([TINY, -TINY, 127.4 * 128 * TINY, 0.0], dtype=np.float32))
def test_the_error_is_at_most_half_a_scale(array):
    x = torch.from_numpy(array)
    values, scales = quantise(x)
    assert (values.dtype, values.shape, scales.shape) == (
        torch.int8,
        x.shape,
        (num_blocks(len(x)),),
    )
    restored = restore(values, scales).double()
    bounds = scales.double().repeat_interleave(BLOCK)[: len(x)] / 2
    assert restored.isfinite().all()
    assert ((restored - x.double()).abs() <= bounds).all()
    # Restoring is exact, so it does not depend on the kernel.
    assert torch.equal(restored, values.double() * 2 * bounds)


@settings(deadline=None, max_examples=100)
@given(arrays(np.float32, st.integers(1, BLOCK), elements=FINITE))
def test_integers_are_the_nearest_and_ties_go_to_even(array):
    assert quantise(torch.from_numpy(array))[0].tolist() == slow_quantise(array.tolist())


def test_a_block_computed_by_hand():
    """The scale of 127 is 1: ties go to even, and each block has a scale of its own."""
    block = torch.zeros(BLOCK)
    block[:8] = torch.tensor([127.0, -127.0, 0.5, 1.5, 2.5, -2.5, 0.49, -126.6])
    values, scales = quantise(torch.cat([block, 1000 * block, torch.zeros(3)]))
    wanted = [127, -127, 0, 2, 2, -2, 0, -127]
    assert values[:8].tolist() == values[BLOCK : BLOCK + 8].tolist() == wanted
    assert scales.tolist() == [1.0, 1000.0, 0.0]
    assert values[-3:].tolist() == [0, 0, 0]
    assert restore(values, scales)[BLOCK : BLOCK + 3].tolist() == [127_000.0, -127_000.0, 0.0]


def test_shapes_and_many_blocks():
    x = torch.randn(5, 7, 400, generator=torch.Generator().manual_seed(1))
    values, scales = quantise(x)
    again, same = quantise(x.transpose(0, 1).contiguous().transpose(0, 1))  # other strides
    assert values.shape == (5, 7, 400)
    assert torch.equal(values, again)
    assert torch.equal(scales, same)
    large = torch.randn(256 * 5000 + 9, generator=torch.Generator().manual_seed(2))
    error = (restore(*quantise(large)) - large).abs()
    assert 0 < float(error.max()) <= float(quantise(large)[1].max()) / 2


# In messages


def policy(**tensors: TensorSpec) -> MessagePolicy:
    return MessagePolicy("demo", 0, frozenset({0, 1}), {"net": tensors}, 1 << 20)


def written(tensors: dict[str, Tensor], **options: Any) -> tuple[Header, memoryview]:
    packet = Packet(Envelope(1, 1, 1, "net"), (0,), tensors, 0)
    return encode(packet, run="demo", round=0, recipient=0, sequence=0, wire="int8", **options)


def specs_of(tensors: dict[str, Tensor]) -> MessagePolicy:
    return policy(**{name: TensorSpec(tuple(x.shape), x.dtype) for name, x in tensors.items()})


@pytest.mark.parametrize("pack", [False, True])
def test_a_quarter_of_the_bytes_and_all_else_unchanged(pack):
    rng = torch.Generator().manual_seed(3)
    tensors = {
        "x": torch.randn(100, 100, generator=rng),
        "smaller than a block": torch.randn(BLOCK - 1, generator=rng),
        "double": torch.randn(300, generator=rng, dtype=torch.float64),
        "half": torch.randn(301, generator=rng).half(),
        "int8": torch.arange(-128, 128, dtype=torch.int8),
        "int64": torch.arange(300),
        "flags": torch.ones(301, dtype=torch.bool),
    }
    header, payload = written(tensors, pack=pack)
    assert header.wire == "int8"
    got = decode(header, payload, specs_of(tensors))
    assert got.payload.keys() == tensors.keys()
    assert got.bytes == sum(x.nbytes for x in tensors.values())
    for name, x in tensors.items():
        assert got.payload[name].dtype == x.dtype
        assert torch.equal(got.payload[name], restore(*quantise(x)) if name == "x" else x)
    alone = written({"x": tensors["x"]})[0].size
    assert alone == pytest.approx(10_000 + 4 * 40, abs=200)


def test_payloads_are_still_safetensors():
    x = torch.linspace(-1, 1, 300)
    _, payload = written({"x": x})
    found = load(bytes(payload))
    values, scales = quantise(x)
    assert found.keys() == {"x", "x/scales"}
    assert torch.equal(found["x"], values)
    assert torch.equal(found["x/scales"], scales)


def test_open_ended_tensors_are_restored_with_the_shape_that_arrives():
    expected = policy(x=TensorSpec((None, 100)))
    for rows in (0, 1, 2, 3, 50):  # the first three are smaller than a block
        x = torch.randn(rows, 100, generator=torch.Generator().manual_seed(rows))
        got = decode(*written({"x": x}), expected).payload["x"]
        assert torch.equal(got, x if rows < 3 else restore(*quantise(x)))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_the_recipient_rejects_what_was_not_finite(bad):
    x = torch.ones(3 * BLOCK)
    x[BLOCK + 7] = bad
    assert rejection(*written({"x": x}), specs_of({"x": x})) == "nonfinite"


def test_a_name_that_int8_needs_is_an_error_for_the_sender():
    tensors = {"x": torch.ones(BLOCK), "x/scales": torch.ones(1)}
    with pytest.raises(InputError, match="tensors 'x' and 'x/scales', and int8 needs the second"):
        written(tensors)
    small = {"x": torch.ones(2), "x/scales": torch.ones(1)}  # not quantised
    assert decode(*written(small), specs_of(small)).payload.keys() == small.keys()


# Hostile payloads


def rejection(header: Header, payload: bytes | memoryview, expected: MessagePolicy) -> str:
    with pytest.raises(Rejected) as caught:
        decode(header, payload, expected)
    return caught.value.reason


def forged(tensors: dict[str, Tensor]) -> tuple[Header, bytes]:
    """A message with exactly these tensors in its payload."""
    header, _ = written({})
    payload = save(tensors)
    return replace(header, size=len(payload), checksum=crc32(payload)), payload


EXPECTED = policy(x=TensorSpec((300,)))
VALUES = torch.full((300,), 127, dtype=torch.int8)


@pytest.mark.parametrize("scale", [3e38, -3e38, MAX, float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("at", [0, 1])
def test_hostile_scales_never_give_infinite_values(scale, at):
    scales = torch.ones(2)
    scales[at] = scale
    assert rejection(*forged({"x": VALUES, "x/scales": scales}), EXPECTED) == "nonfinite"
    zeros = forged({"x": torch.zeros_like(VALUES), "x/scales": scales})
    if np.isfinite(scale):  # nothing overflows
        assert not decode(*zeros, EXPECTED).payload["x"].any()
    else:
        assert rejection(*zeros, EXPECTED) == "nonfinite"


def test_the_largest_scale_is_finite_and_the_integer_that_no_sender_uses_is_not():
    scales = torch.full((2,), MAX_SCALE)
    got = decode(*forged({"x": VALUES, "x/scales": scales}), EXPECTED).payload["x"]
    assert float(got[0]) == 127 * MAX_SCALE <= MAX
    lowest = torch.full((300,), -128, dtype=torch.int8)
    assert rejection(*forged({"x": lowest, "x/scales": scales}), EXPECTED) == "nonfinite"


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({"x": VALUES}, "name"),  # without scales
        ({"x/scales": torch.ones(2)}, "name"),  # of no tensor
        ({"x": VALUES, "x/scales": torch.ones(2), "y/scales": torch.ones(2)}, "name"),
        ({"x": VALUES, "x/scales": torch.ones(3)}, "shape"),
        ({"x": VALUES, "x/scales": torch.ones(2, 1)}, "shape"),
        ({"x": VALUES, "x/scales": torch.ones(0)}, "shape"),
        ({"x": VALUES, "x/scales": torch.ones(2).double()}, "dtype"),
        ({"x": VALUES, "x/scales": torch.ones(2, dtype=torch.int8)}, "dtype"),
        ({"x": VALUES.float(), "x/scales": torch.ones(2)}, "dtype"),
        ({"x": VALUES.to(torch.uint8), "x/scales": torch.ones(2)}, "dtype"),
        ({"x": VALUES[:299], "x/scales": torch.ones(2)}, "shape"),
    ],
)
def test_forged_tensors_are_rejected(tensors, reason):
    assert rejection(*forged(tensors), EXPECTED) == reason


def test_a_message_that_would_be_restored_beyond_the_limit_is_rejected():
    """Int8 is a quarter of what it is restored to, so the limit holds for both."""
    expected = replace(policy(x=TensorSpec((None,))), max_bytes=100_000)
    fits, large = (torch.ones(n) for n in (24_000, 26_000))
    assert decode(*written({"x": fits}), expected).bytes == 96_000
    header, payload = written({"x": large})
    assert header.size < 30_000
    assert rejection(header, payload, expected) == "oversized"


def test_int8_values_under_another_wire_are_rejected():
    header, payload = written({"x": torch.ones(300)})
    for wire in ("fp32", "bf16"):
        assert rejection(replace(header, wire=wire), payload, EXPECTED) in ("name", "dtype")
