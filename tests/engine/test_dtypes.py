"""One set of tensor types for every engine: real peers send what the simulator sends."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from support.networking import InMemory, OverSockets, run_peers
from torch import Tensor

import peerage as pg
from peerage import Algorithm, LocalSGD, Node
from peerage.algorithm import Dimensions
from peerage.engine.router import Packet
from peerage.errors import InputError
from peerage.net.wire import header as wires
from peerage.net.wire.header import MessagePolicy, Rejected
from peerage.net.wire.payload import decode, encode
from peerage.requests import DTYPES, Envelope, TensorSpec
from peerage.testing import check_law, toy

FLOATS = [dtype for dtype in DTYPES.values() if dtype.is_floating_point]
OTHERS = [torch.complex64, torch.uint16, torch.float8_e4m3fn]


def hard(dtype: torch.dtype) -> Tensor:
    """Values that any detour over another type would change."""
    if dtype is torch.bool:
        return torch.tensor([True, False, True])
    if not dtype.is_floating_point:
        limits = torch.iinfo(dtype)
        return torch.tensor([limits.min, limits.max, limits.max - 1, 1], dtype=dtype)
    limits = torch.finfo(dtype)
    values = [limits.max, limits.min, limits.smallest_normal / 2, 1 + limits.eps, -0.0, 1 / 3]
    return torch.tensor(values, dtype=dtype)


def bits(tensor: Tensor) -> bytes:
    return bytes(tensor.contiguous().view(torch.uint8).flatten().tolist())


@dataclass(frozen=True)
class Typed(Algorithm[None]):
    """Beside its model, a node sends a tensor of some type, and checks what it receives."""

    local: LocalSGD = LocalSGD(epochs=1)
    sent: str = "float32"
    declared: str = "float32"

    def message_schema(self, dimensions: Dimensions) -> dict[str, TensorSpec]:
        more = TensorSpec((None,), getattr(torch, self.declared))
        return {**super().message_schema(dimensions), "more": more}

    async def round(self, node: Node[None]) -> None:
        await node.train(self.local)
        more = hard(torch.float32)[3:].to(getattr(torch, self.sent))  # without those that overflow
        if self.sent == self.declared:
            more = hard(more.dtype)
        inbox = await node.exchange(x=node.params, more=more)
        same = sum(bits(one) == bits(more) and one.dtype == more.dtype for one in inbox["more"])
        node.note(same=same)
        node.params = inbox.stack("x").mean(0) * (same / len(inbox))


def typed(dtype: torch.dtype) -> Typed:
    name = str(dtype).removeprefix("torch.")
    return Typed(sent=name, declared=name)


def test_the_set():
    names = "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 bool"
    assert " ".join(str(one).removeprefix("torch.") for one in DTYPES.values()) == names


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.slow
def test_every_type_has_the_same_bits_in_every_engine(dtype):
    pool = pg.run(toy(typed(dtype), rounds=2, engine={"name": "pool", "workers": 2}))
    assert check_peers(dtype, InMemory()) == pool.digest


def check_peers(dtype: torch.dtype, transports: Any) -> str:
    """Real peers end as the serial engine does, whose digest is the answer."""
    experiment = toy(typed(dtype), rounds=2)
    serial = pg.run(experiment)
    peers = run_peers(experiment, transports=transports)
    for peer, wanted in zip(peers, serial.parameters, strict=True):
        assert torch.equal(peer.shard.members[peer.me].node.params, wanted)
        assert peer.rows[-1]["notes"] == {"same": 3.0}  # of two neighbours, and its own
        assert not peer.counters
    for row in serial.rows:
        if row["scope"] == "network":
            assert sum(peer.rows[row["round"]]["bytes"] for peer in peers) == row["bytes"]
    return serial.digest


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_the_law_about_declarations_knows_every_type(dtype):
    check_law("declared", typed(dtype))


@pytest.mark.parametrize("dtype", OTHERS, ids=str)
@pytest.mark.slow
def test_other_types_are_rejected_by_engine_declaration_and_law(dtype):
    name = str(dtype).removeprefix("torch.")
    known = "use one of float64, float32, float16, bfloat16, int64, int32, int16, int8, uint8, bool"
    sent = f"node . sends tensor 'more' of type {name}, which messages cannot contain; {known}"
    for engine in ({"name": "serial"}, {"name": "pool", "workers": 2}):
        with pytest.raises(InputError, match=f"^{sent}$"):
            pg.run(toy(Typed(sent=name), engine=engine))
    with pytest.raises(AssertionError, match=f"breaks the law 'declared'.*of type {name}"):
        check_law("declared", Typed(sent=name))
    with pytest.raises(InputError, match=f"message_schema declares a tensor of type {name}, which"):
        TensorSpec((1,), dtype)
    with pytest.raises(AssertionError, match=f"breaks the law 'declared'.*of type {name}"):
        check_law("declared", Typed(declared=name))


@pytest.mark.slow
def test_a_type_that_is_not_declared_breaks_the_law_and_is_not_sent():
    """With bf16 on the wire, others would take true bfloat16 for rounded float32."""
    lying = Typed(sent="bfloat16", declared="float32")
    with pytest.raises(AssertionError, match="breaks the law 'declared'"):
        check_law("declared", lying)
    text = "node . sends tensor 'more' as torch.bfloat16, but message_schema declares torch.float32"
    with pytest.raises(InputError, match=text):
        run_peers(toy(lying, rounds=1), wire="bf16")


# On the wire


def there_and_back(tensors: dict[str, Tensor], **options: Any) -> Packet:
    forms = {name: TensorSpec(tuple(x.shape), x.dtype) for name, x in tensors.items()}
    expected = MessagePolicy("demo", 0, frozenset({0, 1}), {"net": forms}, 1 << 20)
    size = sum(x.numel() * x.element_size() for x in tensors.values())
    packet = Packet(Envelope(1, 1, 1, "net"), (0,), tensors, size)
    header, payload = encode(packet, run="demo", round=0, recipient=0, sequence=0, **options)
    return decode(header, payload, expected)


@pytest.mark.parametrize("wire", ["fp32", "bf16"])
@pytest.mark.parametrize("pack", [False, True])
def test_all_types_in_one_message(wire, pack):
    tensors = {f"{code}{n}": hard(d)[n:] for code, d in DTYPES.items() for n in range(3)}
    rounded = {name for name, x in tensors.items() if x.dtype is torch.float32 and wire == "bf16"}
    tensors |= {name: tensors[name].clamp(-1e30, 1e30) for name in rounded}
    got = there_and_back(tensors, wire=wire, pack=pack)
    for name, sent in tensors.items():
        wanted = sent.bfloat16().float() if name in rounded else sent
        assert got.payload[name].dtype == sent.dtype
        assert bits(got.payload[name]) == bits(wanted)
    assert got.bytes == sum(x.numel() * x.element_size() for x in tensors.values())


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_every_floating_type_must_be_finite(dtype, bad):
    with pytest.raises(Rejected) as caught:
        there_and_back({"x": torch.tensor([1.0, bad, 2.0]).to(dtype)})
    assert caught.value.reason == "nonfinite"


def test_the_same_bytes_under_another_declaration_are_rejected():
    """Types of the same width differ by their names only."""
    x = hard(torch.float16)
    packet = Packet(Envelope(1, 1, 1, "net"), (0,), {"x": x}, 2 * len(x))
    header, payload = encode(packet, run="demo", round=0, recipient=0, sequence=0)
    for dtype in (torch.bfloat16, torch.int16, torch.float32):
        forms = {"x": TensorSpec((len(x),), dtype)}
        expected = MessagePolicy("demo", 0, frozenset({0, 1}), {"net": forms}, 1 << 20)
        for wire in wires.WIRES:
            with pytest.raises(Rejected) as caught:
                decode(replace(header, wire=wire), payload, expected)
            assert caught.value.reason == "dtype"


@pytest.mark.slow
def test_true_bfloat16_over_real_connections(tmp_path):
    check_peers(torch.bfloat16, OverSockets(tmp_path))
