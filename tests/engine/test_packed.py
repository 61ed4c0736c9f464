"""Payloads in one buffer per shard: what is packed for whom, and what comes out."""

import pytest
import torch

from peerage.engine.packed import PackedStore, refs_for_driver, refs_for_shards
from peerage.engine.router import Packet, ShardOutput
from peerage.engine.shard import ShardReport
from peerage.requests import Envelope

OWNER = {0: 0, 1: 0, 2: 1, 3: 1, 4: 2}


def packet(sender, to, **payload):
    return Packet(Envelope(sender, 1, 1, "mlp"), to, payload, 0)


def test_tensors_of_any_type_and_shape_arrive():
    sender, recipient = PackedStore(0), PackedStore(1)
    tensors = [
        torch.randn(3, 5),
        torch.tensor([1, 2, 3], dtype=torch.int8),
        torch.empty(0),
        torch.tensor(2.5, dtype=torch.float64),
        torch.randn(4).to(torch.bfloat16),
        torch.randn(6, 2).T,  # not contiguous
    ]
    refs = [sender.put(tensor) for tensor in tensors]
    recipient.receive(sender.pack(refs))
    for ref, tensor in zip(refs, tensors, strict=True):
        assert torch.equal(recipient.open(ref), tensor)
        assert recipient.open(ref).dtype == tensor.dtype
        assert sender.open(ref) is tensor


def test_a_tensor_for_several_nodes_of_a_shard_is_packed_once():
    store, x, y = PackedStore(0), torch.randn(1000), torch.randn(10)
    output = ShardOutput(
        packets=[
            packet(0, (1, 2, 3), x=store.put(x)),
            packet(1, (2, 4), x=store.put(x), y=store.put(y)),
        ]
    )
    wanted = refs_for_shards(output, OWNER, me=0)
    assert sorted(wanted) == [1, 2]  # nothing for itself
    sizes = {shard: len(store.pack(refs).entries) for shard, refs in wanted.items()}
    assert sizes == {1: 2, 2: 2}
    assert store.pack(wanted[1]).data.nbytes == 4032 + 64  # whole lines of 64 bytes
    assert store.pack([]) is None


def test_kept_tensors_do_not_keep_a_whole_buffer():
    sender, recipient = PackedStore(0), PackedStore(1)
    refs = [sender.put(torch.randn(100)) for _ in range(3)]
    recipient.receive(sender.pack(refs))
    kept = recipient.to_private(recipient.open(refs[1]))
    assert kept.untyped_storage().nbytes() == 400
    own = torch.randn(3)
    assert recipient.to_private(own) is own
    recipient.clear()
    with pytest.raises(KeyError):
        recipient.open(refs[1])


def test_the_driver_gets_models_and_sums_alone():
    store = PackedStore(0)
    ref = store.put(torch.ones(2))
    report = ShardReport([], [], [("mlp", ref)], {}, {})
    assert refs_for_driver("finish", report) == [ref]
    assert refs_for_driver("model", ([ref], {})) == [ref]
    assert refs_for_driver("released", {0: 1}) == []
    assert refs_for_shards(report, OWNER, me=0) == {}
