"""The bytes of messages that are stated before the start are those that are sent."""

from typing import Any

import numpy as np
import pytest
import torch

import peerage as pg
from peerage.algorithms.fednl import FedNL
from peerage.engine.prepare import prepare
from peerage.engine.router import Packet
from peerage.net.deploy.message_sizes import MessageSizes, message_bytes
from peerage.net.wire.header import WIRES
from peerage.net.wire.payload import encode
from peerage.requests import Envelope, TensorSpec
from peerage.testing import toy


def sizes_of(wire: str = "fp32", **settings: Any) -> tuple[MessageSizes, MessageSizes | None]:
    """From the data, and without them."""
    experiment = pg.Experiment(**({"algorithm": "decavg", "topology": "ring"} | settings))
    of_world = MessageSizes.of_world(prepare(experiment), wire)
    return of_world, MessageSizes.of_experiment(experiment, wire)


@pytest.mark.parametrize("wire", WIRES)
def test_the_stated_bytes_are_those_of_the_payload(wire):
    """Beside its tensors, a payload has a layout of at most 100 bytes per tensor."""
    tensors = {
        "x": torch.randn(1000),
        "few": torch.randn(255),
        "one": torch.tensor(1.0),
        "who": torch.arange(300),
        "half": torch.ones(300, dtype=torch.bfloat16),
    }
    stated = message_bytes(
        {name: TensorSpec(tuple(x.shape), x.dtype) for name, x in tensors.items()}, wire
    )
    packet = Packet(Envelope(1, 1, 1, "net"), (0,), tensors, 0)
    header, _ = encode(packet, run="demo", round=0, recipient=0, sequence=0, wire=wire)
    assert 0 < header.size - stated <= 8 + 100 * (len(tensors) + 1)


def test_tensors_of_variable_length_are_not_counted():
    assert message_bytes({"x": TensorSpec((10,)), "y": TensorSpec((None, 3))}, "fp32") == 40


def test_the_same_with_and_without_data():
    by_data, without = sizes_of(nodes=4, model="logistic", wire="int8")
    assert by_data == without
    assert by_data.by_wire == {
        "fp32": {"logistic": 2600},
        "bf16": {"logistic": 1300},
        "int8": {"logistic": 650 + 3 * 4},
    }
    assert (by_data.links, by_data.per_round) == (8, 8 * 662)


def test_a_mix_of_models_on_a_directed_graph(tmp_path):
    """Node 0 sends to two others, node 1 to one, and node 2 to one."""
    (tmp_path / "edges.txt").write_text("0 1\n0 2\n1 2\n2 0\n")
    topology = f"edge-list:path={tmp_path / 'edges.txt'},directed=true"
    sizes, _ = sizes_of(nodes=3, model=["logistic", "mlp:hidden=8"], topology=topology)
    logistic, mlp = 4 * 650, 4 * (64 * 8 + 8 + 8 * 10 + 10)
    assert list(sizes.by_wire["fp32"].values()) == [logistic, mlp]
    assert (sizes.links, sizes.per_round) == (4, 2 * logistic + mlp + logistic)
    assert str(sizes).count("a message of ") == 2


def test_an_algorithm_with_lossless_messages_has_one_format():
    world = prepare(toy(FedNL()))
    sizes = MessageSizes.of_world(world, "fp32")
    assert list(sizes.by_wire) == ["fp32"]
    assert "int8" not in str(sizes)


def test_only_the_data_say_how_large_messages_are(tmp_path):
    np.savez(tmp_path / "mine.npz", x=np.zeros((40, 5), dtype=np.float32), y=np.arange(40) % 2)
    path = tmp_path / "mine.npz"
    by_data, without = sizes_of(nodes=2, model="logistic", dataset=f"npz:path={path}")
    assert without is None
    assert by_data.by_wire["fp32"] == {"logistic": 4 * (5 * 2 + 2)}
