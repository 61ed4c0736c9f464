"""Initial models: who shares a start, how large its weights are, and what gains do to them."""

import networkx as nx
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from peerage import Local
from peerage.errors import InputError
from peerage.graph import StaticGraph
from peerage.initialise import (
    GAINS,
    Architecture,
    ExponentGain,
    GraphGain,
    ManualGain,
    NoGain,
    SqrtGain,
    amplify,
    he_uniform,
    own_architecture,
    redraw,
)
from peerage.prepare import prepare
from peerage.sim.lockstep import Lockstep, SerialTeam
from peerage.testing import NODES, toy


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 40, 5), nn.GroupNorm(4, 40), nn.Flatten(), nn.Linear(360, 200)
    )


NET = Architecture("net", network)


# Shared and independent starts


def test_the_shared_start_has_no_number_and_others_differ():
    shared, again = (NET.initial(0, None, 1.0)[0] for _ in range(2))
    assert torch.equal(shared, again)
    starts = [shared, *(NET.initial(0, node, 1.0)[0] for node in range(3))]
    starts.append(NET.initial(1, None, 1.0)[0])
    for i, x in enumerate(starts):
        for other in starts[:i]:
            assert not torch.equal(x, other)


def test_drawing_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    NET.initial(0, 3, 2.0)
    assert torch.equal(torch.get_rng_state(), before)


def test_values_are_those_that_torch_draws():
    architecture = Architecture("linear", lambda: nn.Linear(50, 40))
    params, buffers = architecture.initial(0, None, 1.0)
    assert buffers.shape == (0,)
    bound = 50**-0.5
    assert params.abs().max() <= bound
    assert params.std() == pytest.approx(bound / 3**0.5, rel=0.05)


def test_buffers_come_with_the_parameters():
    architecture = Architecture("norm", lambda: nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))
    params, buffers = architecture.initial(0, 5, 1.0)
    assert params[-6:].tolist() == [1, 1, 1, 0, 0, 0]
    assert buffers.tolist() == [0, 0, 0, 1, 1, 1]


def starts_of(**changes: object) -> list[Tensor]:
    world = prepare(toy(Local(), **changes)).world
    with Lockstep(world, SerialTeam(world)) as engine:
        return [engine.parameters(node) for node in range(NODES)]


def test_nodes_of_an_experiment_share_a_start_or_do_not():
    shared = starts_of(init={"start": "shared"})
    assert all(torch.equal(x, shared[0]) for x in shared)
    own = starts_of(init={"start": "independent"})
    assert len({tuple(x.tolist()) for x in own}) == NODES
    # Independent of what else the experiment says.
    assert all(map(torch.equal, own, starts_of(topology="complete", rounds=1)))


# Gains


def ring(n: int) -> StaticGraph:
    return StaticGraph.from_edges(n, [(i, (i + 1) % n) for i in range(n)])


def star(n: int) -> StaticGraph:
    return StaticGraph.from_edges(n, [(0, i) for i in range(1, n)])


@pytest.mark.parametrize(
    ("gain", "factor"),
    [
        (NoGain(), 1.0),
        (SqrtGain(), 4.0),
        (GraphGain(), 4.0),  # a regular graph, where the square root is exact
        (ExponentGain(0.25), 2.0),
        (ManualGain(3.5), 3.5),
    ],
)
def test_factors_on_a_ring_of_sixteen(gain, factor):
    np.testing.assert_allclose(gain.factors(ring(16)), np.full(16, factor), rtol=1e-9)


def test_the_gain_of_a_graph_is_one_over_the_norm_of_its_stationary_vector():
    graph = star(5)
    # Uniform averaging over the closed neighbourhood: weights in proportion to degree plus one.
    v = np.array([5.0, 2, 2, 2, 2])
    v /= v.sum()
    expected = 1 / np.linalg.norm(v)
    np.testing.assert_allclose(GraphGain().factors(graph), np.full(5, expected), rtol=1e-6)


def test_every_gain_has_a_name():
    assert set(GAINS.values()) == {NoGain, SqrtGain, GraphGain, ExponentGain, ManualGain}


@pytest.mark.parametrize("g", [0.0, -1.0, float("inf"), float("nan")])
def test_manual_gains_are_positive_numbers(g):
    with pytest.raises(InputError, match="g must be a number above 0"):
        ManualGain(g)


def test_gains_scale_matrices_and_kernels_only():
    plain, _ = NET.initial(0, 1, 1.0)
    scaled, _ = NET.initial(0, 1, 3.0)
    for name, view in NET.layout.views(plain).items():
        factor = 3.0 if view.dim() > 1 else 1.0
        torch.testing.assert_close(NET.layout.view(scaled, name), factor * view)


def test_amplify_keeps_biases_and_norm_layers():
    module = network()
    module[1].weight.data.fill_(0.7)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    amplify(module, 2.0)
    ratios = {
        name: float((p.detach() / before[name]).nanmean()) for name, p in module.named_parameters()
    }
    assert ratios["0.weight"] == ratios["3.weight"] == 2.0
    assert ratios["0.bias"] == ratios["3.bias"] == ratios["1.weight"] == 1.0


def test_a_gain_reaches_the_nodes_of_an_experiment():
    plain = starts_of(model="logistic", topology=nx.star_graph(NODES - 1))
    gained = starts_of(
        model="logistic", topology=nx.star_graph(NODES - 1), init={"gain": "manual:g=2"}
    )
    for x, y in zip(plain, gained, strict=True):
        torch.testing.assert_close(y[:12], 2 * x[:12])
        assert torch.equal(y[12:], x[12:])


# He initialisation


def test_he_draws_weights_of_variance_two_over_fan_in_and_no_biases():
    he = Architecture("net", network, scheme="he")
    views = he.layout.views(he.initial(0, 2, 1.0)[0])
    for name, fan_in in (("0.weight", 75), ("3.weight", 360)):
        weight = views[name]
        assert float(weight.var()) == pytest.approx(2 / fan_in, rel=0.05)
        assert float(weight.abs().max()) <= (6 / fan_in) ** 0.5  # uniform
        assert abs(float(weight.mean())) < 0.05 * (2 / fan_in) ** 0.5
    for name in ("0.bias", "3.bias", "1.bias"):
        assert not views[name].any()
    assert (views["1.weight"] == 1).all()  # of the norm layer


def test_he_keeps_what_is_no_weight_and_no_bias():
    module = nn.BatchNorm1d(4)
    module.weight.data.fill_(0.3)
    he_uniform(module)
    assert module.weight.tolist() == pytest.approx([0.3] * 4)


# The user's own module


def test_a_module_of_ones_own_is_the_shared_start():
    module = network()
    architecture = own_architecture(module, "mine", "torch")
    named = dict(module.named_parameters())
    assert torch.equal(architecture.initial(0, None, 1.0)[0], architecture.layout.flatten(named))
    assert architecture.build() is not module  # the user's own stays as it is


def test_independent_starts_of_ones_own_module_are_drawn_anew():
    module = network()
    before = [p.detach().clone() for p in module.parameters()]
    architecture = own_architecture(module, "mine", "torch")
    one, other, again = (architecture.initial(0, node, 1.0)[0] for node in (0, 1, 0))
    assert not torch.equal(one, other)
    assert torch.equal(one, again)
    assert float(one.std()) == pytest.approx(float(NET.initial(0, 0, 1.0)[0].std()), rel=0.05)
    assert all(map(torch.equal, module.parameters(), before))


def test_a_function_that_builds_is_called_for_every_start():
    architecture = own_architecture(network, "mine", "torch")
    assert torch.equal(architecture.initial(4, 2, 1.0)[0], NET.initial(4, 2, 1.0)[0])
    assert torch.equal(architecture.initial(4, None, 1.0)[0], NET.initial(4, None, 1.0)[0])


class Scale(nn.Module):
    """A layer that does not know how to draw its values again."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * x


def test_layers_that_cannot_be_drawn_again_are_named():
    module = nn.Sequential(Scale(), nn.Linear(4, 3))
    with pytest.raises(InputError, match="layer '0' of the model has no reset_parameters"):
        redraw(module)
    with pytest.raises(InputError, match="layer 'Scale' of the model has no reset_parameters"):
        redraw(Scale())
    architecture = own_architecture(module, "mine", "torch")
    assert architecture.initial(0, None, 1.0)[0][:4].tolist() == [1, 1, 1, 1]


def test_such_a_layer_needs_a_shared_start():
    module = nn.Sequential(Scale(), nn.Linear(4, 3))
    assert starts_of(model=module, init={"start": "shared"})[3][:4].tolist() == [1, 1, 1, 1]
    with pytest.raises(InputError, match="pass a function that builds the model instead"):
        starts_of(model=module, init={"start": "independent"})
