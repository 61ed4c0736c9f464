"""One round of DFML with the architectures of P1: serial, pool and gRPC have the same bits."""

from typing import Any

import pytest
import torch
from support.networking import OverSockets, run_peers

import peerage as pg
from peerage import DFML, WSM, LocalSGD
from peerage.engine.prepare import prepare

pytestmark = [pytest.mark.slow, pytest.mark.own_engine]
IMAGES = 500
LOCAL = LocalSGD(epochs=1, batch_size=64, lr=0.01, momentum=0.9, weight_decay=5e-4, loss=WSM())
# All others send their models, so every architecture learns from every other.
MIXES = {
    "two ViTs, four ResNets and four CNNs": (["ten-architectures"], 10),  # Fig. 6
    "EfficientNet B0 and B1": (["efficientnet:variant=b0", "efficientnet:variant=b1"], 2),
}


def random_images() -> pg.Dataset:
    """Images of the shape of CIFAR-10, so that nothing has to be fetched."""
    stream = torch.Generator().manual_seed(0)
    count = IMAGES + 20
    x = torch.randn(count, 3, 32, 32, generator=stream)
    y = torch.arange(count) % 10
    return pg.in_memory(x[:IMAGES], y[:IMAGES], x[IMAGES:], y[IMAGES:])


@pytest.mark.parametrize("name", MIXES)
def test_a_round_has_the_same_bits_on_all_engines(name, tmp_path):
    models, nodes = MIXES[name]
    # The distillation counts in the only round.
    algorithm = DFML(LOCAL, epochs_mutual=1, alpha_min=0.5, alpha_max=0.5, senders=nodes - 1)
    settings: dict[str, Any] = {
        "algorithm": algorithm,
        "dataset": random_images(),
        "model": models,
        "nodes": nodes,
        "topology": "complete",
        "rounds": 1,
        "evaluation": {"at": "end"},
    }
    serial = pg.Experiment(**settings, engine={"name": "serial"})
    wanted = pg.run(serial)
    [last] = [row for row in wanted.rows if row["scope"] == "network" and row["round"] == 1]
    assert last["nodes"] == nodes
    assert len({len(params) for params in wanted.parameters}) == nodes  # all are different

    pool = pg.run(pg.Experiment(**settings, engine={"name": "pool", "workers": 2}))
    assert pool.digest == wanted.digest

    world = prepare(serial)  # one for all peers, as models are large
    peers = run_peers(serial, transports=OverSockets(tmp_path), worlds=lambda me: world)
    for peer, params, buffers in zip(peers, wanted.parameters, wanted.buffers, strict=True):
        node = peer.shard.members[peer.me].node
        assert torch.equal(node.params, params)
        assert torch.equal(node.buffers, buffers)
        assert torch.equal(node.state.model.params, params)  # alpha is at its maximum
        assert not peer.counters  # nothing was rejected or lost
