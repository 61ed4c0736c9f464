"""The memory of a node by hand, and activations beside those of a real backward pass."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from support.networks import network
from torch import Tensor, nn

from peerage.graphs.graph import adjacency_matrix
from peerage.graphs.topology import Complete, Star
from peerage.runs.node_memory import NodeMemory, activation_bytes


def memory(parameters: Sequence[float], **options: Any) -> NodeMemory:
    own = np.array(parameters, dtype=np.float64)
    return NodeMemory(own, 10 * own, np.full(len(own), 7.0), **options)


def test_messages_of_all_neighbours() -> None:
    links = adjacency_matrix(Star().build(3, 0))
    # Model, gradients and momentum: 12 bytes per parameter, and 10 of activations.
    assert memory([1, 2, 3]).of_nodes(links).tolist() == [22 + 14, 44 + 7, 66 + 7]
    assert memory([1, 2, 3], optimizer_floats=2).of_nodes(links).tolist()[0] == 26 + 14


def test_an_aggregator_holds_the_largest_models() -> None:
    links = adjacency_matrix(Complete().build(4, 0))
    found = memory([1, 2, 3, 4], held=2).of_nodes(links)
    assert found.tolist() == [22 + 4 * 7, 44 + 4 * 7, 66 + 4 * 6, 88 + 4 * 5]
    # With more senders than neighbours, all of them send.
    assert memory([1, 2, 3, 4], held=9).of_nodes(links)[0] == 22 + 4 * 9


def test_an_aggregator_trains_all_models_at_once() -> None:
    links = adjacency_matrix(Complete().build(4, 0))
    found = memory([1, 2, 3, 4], held=2, together=True).of_nodes(links)
    # Models as they came, in training and with momentum: 12 bytes per parameter, activations of
    # all, and the gradients of one.
    assert found[0] == (1 + 4 + 3) * (12 + 10) + 4 * 4
    assert found[3] == (4 + 3 + 2) * (12 + 10) + 4 * 4
    every = memory([1, 2, 3, 4], together=True).of_nodes(links)
    assert every.tolist() == [10 * (12 + 10) + 4 * 4] * 4


@pytest.mark.parametrize("name", ["dfml-cnn:channels=4+8", "preact-resnet:widths=4+8", "mlp"])
def test_activations_are_what_a_backward_pass_needs(name: str) -> None:
    with torch.device("meta"):
        found = activation_bytes(network(name, (3, 16, 16)), (3, 16, 16), batch=5)
    module, kept = network(name, (3, 16, 16)), dict[int, Tensor]()
    own = {parameter.data_ptr() for parameter in module.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = module(torch.randn(5, 3, 16, 16))
    real = sum(t.untyped_storage().nbytes() for key, t in kept.items() if key not in own)
    del output
    assert found == pytest.approx(real, rel=0.1)  # kernels differ in what they keep beside


def test_activations_that_depend_on_values_are_unknown() -> None:
    class Choosing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else -x

    assert activation_bytes(Choosing(), (3,), batch=2) is None
