"""Initial models: which nodes share a start, the size of its weights, and the effect of gains."""

from functools import partial
from math import sqrt

import networkx as nx
import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from peerage import Local
from peerage.engine.lockstep import Lockstep, SerialTeam
from peerage.engine.prepare import prepare
from peerage.errors import InputError
from peerage.graphs.gains import (
    GAINS,
    DegreeGain,
    ExponentGain,
    GraphGain,
    ManualGain,
    NoGain,
    SqrtGain,
)
from peerage.graphs.graph import StaticGraph
from peerage.graphs.topology import DynamicRegular
from peerage.models import MODELS
from peerage.models.start import Architecture, biases, he, own_architecture, redraw, weights
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
    world = prepare(toy(Local(), **changes))
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
        (DegreeGain(), 4.0),
        (ExponentGain(0.5), 4.0),
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


def star_and_ring_and_loner() -> StaticGraph:
    """Three components, with the ids mixed: a star of 4, a triangle, and a node by itself."""
    return StaticGraph.from_edges(8, [(0, 2), (0, 4), (0, 6), (1, 3), (3, 5), (5, 1)])


@pytest.mark.parametrize(
    ("gain", "of_star", "of_ring"),
    [
        (SqrtGain(per_component=True), 2.0, sqrt(3)),
        (ExponentGain(0.25, per_component=True), sqrt(2), 3**0.25),
        # Degrees plus one are 4, 2, 2, 2 in the star and three times 3 in the ring.
        (DegreeGain(per_component=True), 10 / sqrt(28), sqrt(3)),
        (GraphGain(per_component=True), 10 / sqrt(28), sqrt(3)),
    ],
)
def test_every_component_has_its_own_gain(gain, of_star, of_ring):
    a, b = of_star, of_ring
    factors = gain.factors(star_and_ring_and_loner())
    np.testing.assert_allclose(factors, [a, b, a, b, a, b, a, 1.0], rtol=1e-12)


@pytest.mark.parametrize(
    "gain",
    [SqrtGain(), ExponentGain(0.25), DegreeGain(), GraphGain()],
    ids=lambda g: type(g).__name__,
)
def test_a_graph_in_pieces_has_no_gain(gain):
    with pytest.raises(InputError, match=r"has 3 components.*graph:per_component=true"):
        gain.factors(star_and_ring_and_loner())
    with pytest.raises(InputError, match=r"the graph has no edges.*use --gain none"):
        gain.factors(StaticGraph.from_edges(4, []))
    assert gain.factors(StaticGraph.from_edges(1, [])).tolist() == [1.0]


def test_where_links_change_all_nodes_mix():
    pairs = DynamicRegular(k=1).build(4, 0)  # two nodes meet at a time, others in every round
    assert SqrtGain().factors(pairs).tolist() == [2.0] * 4
    assert DegreeGain().factors(pairs).tolist() == [2.0] * 4
    assert ExponentGain(1.0).factors(pairs).tolist() == [4.0] * 4


@pytest.mark.parametrize(
    "graph",
    [
        StaticGraph.from_edges(3, [(0, 1), (1, 2), (2, 0)], directed=True),
        StaticGraph.from_edges(3, [(0, 1), (1, 2)], weights=[1.0, 2.5]),
    ],
)
def test_degrees_do_not_determine_the_gain_of_other_graphs(graph):
    with pytest.raises(InputError, match="an undirected graph without weights; use --gain graph"):
        DegreeGain().factors(graph)


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 30), st.floats(0, 1), st.integers(0, 99))
def test_degrees_are_enough_for_the_gain_of_a_graph(nodes, p, seed):
    graph = StaticGraph.from_edges(nodes, list(nx.gnp_random_graph(nodes, p, seed=seed).edges))
    assume(nodes == 1 or graph.edges())
    exact, from_degrees, root = (
        kind(per_component=True).factors(graph) for kind in (GraphGain, DegreeGain, SqrtGain)
    )
    np.testing.assert_allclose(from_degrees, exact, rtol=1e-12)
    assert (from_degrees <= root * (1 + 1e-12)).all()
    assert (from_degrees >= 1 - 1e-12).all()


def test_every_gain_has_a_name():
    named = {
        "none": NoGain,
        "sqrt": SqrtGain,
        "graph": GraphGain,
        "degree": DegreeGain,
        "exponent": ExponentGain,
        "manual": ManualGain,
    }
    assert named.items() <= GAINS.items()


@pytest.mark.parametrize("a", [-0.1, 1.01, float("inf"), float("nan")])
def test_exponents_lie_between_no_gain_and_the_number_of_nodes(a):
    message = rf"a must lie in \[0, 1\], got {a}; 0.5 is exact on regular graphs"
    with pytest.raises(InputError, match=message):
        ExponentGain(a)
    assert ExponentGain(0.0).factors(ring(9)).tolist() == [1.0] * 9
    assert ExponentGain(1.0).factors(ring(9)).tolist() == [9.0] * 9


@pytest.mark.parametrize("g", [0.0, -1.0, float("inf"), float("nan")])
def test_manual_gains_are_positive_numbers(g):
    with pytest.raises(InputError, match="g must be a number above 0"):
        ManualGain(g)


@pytest.mark.parametrize("scheme", ["torch", "he", "he-normal"])
@pytest.mark.parametrize("bias", [None, "zero", "default", "scaled"])
def test_a_gain_multiplies_weights_and_scaled_biases_only(scheme, bias):
    architecture = Architecture("net", network, scheme, bias)
    plain, _ = architecture.initial(0, 1)
    scaled, _ = architecture.initial(0, 1, 3.0)
    views = architecture.layout.views(plain)
    assert set(views) == {f"{layer}.{kind}" for layer in (0, 1, 3) for kind in ("weight", "bias")}
    for name, view in views.items():
        amplified = name in ("0.weight", "3.weight")
        amplified |= bias == "scaled" and name in ("0.bias", "3.bias")
        expected = 3.0 * view if amplified else view
        assert torch.equal(architecture.layout.view(scaled, name), expected)


@pytest.mark.parametrize("name", ["gn-lenet", "cifar-cnn", "gain-mlp"])
@pytest.mark.parametrize("bias", [None, "scaled"])
@pytest.mark.parametrize("gain", [1.0, 0.3, sqrt(7), 8.76])
def test_a_gain_may_come_later(name, bias, gain):
    architecture = Architecture(name, partial(MODELS[name]().build, (3, 32, 32), 10), "he", bias)
    drawn, buffers = architecture.initial(2, 4)
    at_once, same_buffers = architecture.initial(2, 4, gain)
    before = drawn.clone()
    assert torch.equal(architecture.amplified(drawn, gain), at_once)
    assert torch.equal(drawn, before)  # what was drawn is not changed
    assert torch.equal(buffers, same_buffers)


def test_looking_at_an_architecture_draws_nothing_from_the_global_generator():
    before = torch.get_rng_state()
    architecture = Architecture("net", network)
    assert architecture.layout.size == architecture.amplified(torch.ones(75_320), 2.0).numel()
    assert architecture.buffer_layout.size == 0
    assert torch.equal(torch.get_rng_state(), before)


def test_a_gain_reaches_the_nodes_of_an_experiment():
    plain = starts_of(model="logistic", topology=nx.star_graph(NODES - 1))
    gained = starts_of(
        model="logistic", topology=nx.star_graph(NODES - 1), init={"gain": "manual:g=2"}
    )
    for x, y in zip(plain, gained, strict=True):
        torch.testing.assert_close(y[:12], 2 * x[:12])
        assert torch.equal(y[12:], x[12:])


# Schemes of weights


def drawn(name: str, shape: tuple[int, ...], classes: int, **options: str) -> dict[str, Tensor]:
    """The tensors of the second start of a network."""
    architecture = Architecture(name, partial(MODELS[name]().build, shape, classes), **options)
    return architecture.layout.views(architecture.initial(0, 2)[0])


# Fan-in of every layer: inputs, times the nine points of a kernel.
FAN_IN = {
    "gain-mlp": {"hidden1": 784, "hidden2": 512, "hidden3": 256, "head": 128},
    "cifar-cnn": {"conv1": 27, "conv2": 288, "conv3": 576, "hidden": 2048, "head": 128},
}
SHAPE = {"gain-mlp": (1, 28, 28), "cifar-cnn": (3, 32, 32)}


@pytest.mark.parametrize("name", FAN_IN)
def test_he_draws_uniform_weights_of_variance_two_over_fan_in(name):
    views = drawn(name, SHAPE[name], 10, scheme="he")
    for layer, fan_in in FAN_IN[name].items():
        weight, bound = views[f"{layer}.weight"], sqrt(6 / fan_in)
        count = weight.numel()
        # The mean of count squares, each with a mean of b^2 / 3 and a deviation of b^2 sqrt(4/45).
        spread = bound**2 * sqrt(4 / 45 / count)
        assert float(weight.square().mean()) == pytest.approx(2 / fan_in, abs=5 * spread)
        assert abs(float(weight.mean())) < 5 * sqrt(2 / fan_in / count)
        assert bound * (1 - 20 / count) < float(weight.abs().max()) <= bound * (1 + 1e-6)
        assert not views[f"{layer}.bias"].any()


@pytest.mark.parametrize("name", FAN_IN)
def test_he_normal_draws_normal_weights_of_the_same_variance(name):
    views = drawn(name, SHAPE[name], 10, scheme="he-normal")
    for layer, fan_in in FAN_IN[name].items():
        z = views[f"{layer}.weight"] / sqrt(2 / fan_in)
        count = z.numel()
        # Moments of the normal distribution: squares have a variance of 2, fourth powers of 96.
        assert float(z.square().mean()) == pytest.approx(1, abs=5 * sqrt(2 / count))
        assert float(z.pow(4).mean()) == pytest.approx(3, abs=5 * sqrt(96 / count))
        assert abs(float(z.mean())) < 5 / sqrt(count)
        assert not views[f"{layer}.bias"].any()


def test_he_draws_what_torch_draws_under_this_name():
    layer = {"he": nn.init.kaiming_uniform_, "he-normal": nn.init.kaiming_normal_}
    for scheme, reference in layer.items():
        module, expected = nn.Conv2d(7, 5, 3), torch.empty(5, 7, 3, 3)
        torch.manual_seed(0)
        he(module, scheme)
        torch.manual_seed(0)
        reference(expected, nonlinearity="relu")
        assert torch.equal(module.weight, expected)


def test_schemes_draw_the_same_values_as_before():
    """Committed results begin with these models."""
    sums = {"torch": (52.020073, 2117.301903), "he": (48.740889, 5119.123108)}
    for scheme, (total, absolute) in sums.items():
        architecture = Architecture("net", network, scheme)
        x = architecture.layout.canonical(architecture.initial(0, 2, 1.0)[0]).double()
        assert float(x.sum()) == pytest.approx(total, abs=1e-4)
        assert float(x.abs().sum()) == pytest.approx(absolute, abs=1e-4)


# Biases


def by_bias(scheme: str) -> dict[str | None, dict[str, Tensor]]:
    kinds = (None, "zero", "default", "scaled")
    made = {kind: Architecture("net", network, scheme, kind) for kind in kinds}
    return {kind: one.layout.views(one.initial(0, 1)[0]) for kind, one in made.items()}


@pytest.mark.parametrize("scheme", ["torch", "he", "he-normal"])
def test_biases_are_zero_or_torchs_or_scaled_and_do_not_change_the_weights(scheme):
    views = by_bias(scheme)
    own = by_bias("torch")[None]
    for name in ("0.bias", "3.bias"):
        assert not views["zero"][name].any()
        assert torch.equal(views["default"][name], own[name])
        left_open = views["default" if scheme == "torch" else "zero"][name]
        assert torch.equal(views[None][name], left_open)
    for kind in ("zero", "default", "scaled"):
        for name in ("0.weight", "3.weight"):
            assert torch.equal(views[kind][name], views[None][name])
        assert views[kind]["1.weight"].tolist() == [1.0] * 40  # of the norm layer
        assert views[kind]["1.bias"].tolist() == [0.0] * 40


def test_scaled_biases_of_torch_are_its_own_until_a_gain_comes():
    views = by_bias("torch")
    assert torch.equal(views["scaled"]["3.bias"], views["default"]["3.bias"])


@pytest.mark.parametrize("scheme", ["he", "he-normal"])
def test_scaled_biases_are_distributed_like_the_weights_beside_them(scheme):
    build = partial(nn.Linear, 6, 20_000)
    architecture = Architecture("wide", build, scheme, "scaled")
    bias = architecture.layout.views(architecture.initial(0, 1)[0])["bias"]
    fourth = 9 / 5 if scheme == "he" else 3  # the fourth moment over the squared variance
    spread = sqrt((fourth - 1) / 20_000)
    assert float(bias.square().mean()) * 3 == pytest.approx(1, abs=5 * spread)  # 2 / 6
    assert float(bias.pow(4).mean()) * 9 == pytest.approx(fourth, rel=0.1)
    if scheme == "he":
        assert 0.999 < float(bias.abs().max()) <= 1  # sqrt(6 / 6)


# Norm layers, and other things that have a bias


@pytest.mark.parametrize("bias", ["zero", "default", "scaled"])
@pytest.mark.parametrize("scheme", ["torch", "he", "he-normal"])
def test_norm_layers_keep_their_values(scheme, bias):
    def build() -> nn.Module:
        module = MODELS["gn-lenet"]().build((3, 8, 8), 10)
        norms = [module.get_submodule(f"norm{number}") for number in (1, 2, 3)]
        for parameter in (p for norm in norms for p in norm.parameters()):
            parameter.data.fill_(0.7)
        return module

    architecture = Architecture("gn-lenet", build, scheme, bias)
    views = architecture.layout.views(architecture.initial(0, 1, 4.0)[0])
    norms = {name: view for name, view in views.items() if name.startswith("norm")}
    assert len(norms) == 6
    for view in norms.values():
        torch.testing.assert_close(view, torch.full_like(view, 0.7))


def test_a_norm_layer_over_images_is_a_norm_layer_too():
    """Its weight has three dimensions, and is no kernel all the same."""
    module = nn.Sequential(nn.Conv2d(1, 2, 3), nn.LayerNorm([2, 4, 4]), nn.RMSNorm([4, 4]))
    assert list(weights(module)) == ["0.weight"]
    assert list(biases(module)) == ["0.bias"]
    he(module, "he", "scaled")
    assert module[1].weight.unique().tolist() == [1.0]
    assert module[1].bias.unique().tolist() == [0.0]
    assert module[2].weight.unique().tolist() == [1.0]


def test_a_bias_belongs_to_the_weight_beside_it():
    module = nn.ModuleDict(
        {
            "linear": nn.Linear(5, 3),
            "attention": nn.MultiheadAttention(8, 2),
            "kernel": nn.Conv1d(4, 6, 3, bias=False),
            "norm": nn.BatchNorm1d(3),
            "prelu": nn.PReLU(4),
            "pair": nn.Bilinear(2, 3, 4),
        }
    )
    fan_in = {name: inputs for name, (_, inputs) in biases(module).items()}
    assert fan_in == {
        "linear.bias": 5,
        "attention.in_proj_bias": 8,
        "attention.out_proj.bias": 8,
        "pair.bias": 6,
    }
    assert biases(nn.Linear(2, 1)).keys() == {"bias"}
    names = {name for name, _ in module.named_parameters()}
    assert set(weights(module)) | set(fan_in) == names - {
        "norm.weight",
        "norm.bias",
        "prelu.weight",
    }


def test_tied_weights_are_amplified_once():
    def build() -> nn.Module:
        first, second = nn.Linear(4, 4), nn.Linear(4, 4)
        second.weight = first.weight
        return nn.Sequential(first, second)

    architecture = Architecture("tied", build, bias="scaled")
    x, y = (architecture.initial(0, 0, gain)[0] for gain in (1.0, 3.0))
    assert torch.equal(y, 3 * x)


# The user's own module


def test_the_users_module_is_the_shared_start():
    module = network()
    architecture = own_architecture(module, "mine", "torch")
    named = dict(module.named_parameters())
    assert torch.equal(architecture.initial(0, None, 1.0)[0], architecture.layout.flatten(named))
    assert architecture.build() is not module  # the user's own stays as it is


def test_independent_starts_of_the_users_module_are_redrawn():
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


def test_the_users_model_takes_the_same_options():
    ours = Architecture("net", network, "he-normal", "scaled")
    for model in (network, network()):
        own = own_architecture(model, "mine", "he-normal", "scaled")
        assert own.amplifiable == ours.amplifiable
        assert float(own.initial(0, 0)[0].std()) == pytest.approx(
            float(ours.initial(0, 0)[0].std()), rel=0.02
        )
    assert torch.equal(
        own_architecture(network, "mine", "he").initial(1, 1)[0],
        Architecture("net", network, "he").initial(1, 1)[0],
    )


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
