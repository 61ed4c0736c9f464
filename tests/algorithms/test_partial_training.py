"""Partial training by numbers: Dec. HeteroFL, Dec. FedRolex and Dec. Federated Dropout (P1)."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.command_line import TINY, error_line, peerage
from support.networks import network
from torch import Tensor

import peerage as pg
from peerage import DecFedAvg, DecFedDropout, DecFedRolex, DecHeteroFL, LocalSGD, Weights, testing
from peerage.algorithms.partial_training import PartialTraining
from peerage.engine.prepare import prepare
from peerage.errors import InputError
from peerage.models.scaled import channel_groups
from peerage.testing import check_law, simulate, toy
from peerage.vectors import FlatModel, Layout

PIXELS = (3, 8, 8)
FAMILIES = {
    "mlp": ["mlp:hidden=8x6", "mlp:hidden=5x6", "mlp:hidden=4x2"],
    "cnn": ["dfml-cnn:channels=8+12", "dfml-cnn:channels=6+7", "dfml-cnn:channels=3+2"],
    "resnet": [f"preact-resnet:widths={widths}" for widths in ("6+8", "4+8", "2+3")],
    "vit": [f"vit:width={width},depth=1" for width in (192, 128, 32)],
}
ALL: dict[str, PartialTraining] = {
    "heterofl": DecHeteroFL(),
    "fedrolex": DecFedRolex(),
    "sorted": DecFedRolex(indices="sorted"),
    "dropout": DecFedDropout(),
}


class Network:
    """Clients with these models; their values are random, or one number for each client."""

    def __init__(
        self,
        names: Sequence[str],
        values: Sequence[float] = (),
        shape: tuple[int, ...] = PIXELS,
        classes: int = 10,
    ) -> None:
        self.built = {
            name: FlatModel(network(name, shape, classes)) for name in dict.fromkeys(names)
        }
        stream = torch.Generator().manual_seed(1)
        self.models: dict[int, Weights] = {}
        for client, name in enumerate(names):
            sizes = len(self.built[name].params), len(self.built[name].buffers)
            vectors = [
                torch.full((size,), float(values[client]))
                if values
                else torch.randn(size, generator=stream)
                for size in sizes
            ]
            self.models[client] = Weights(*vectors, name)

    def node(self, round: int = 0) -> Any:
        """The aggregator, client 0."""
        own = self.models[0]
        node: pg.Node[None] = pg.Node(
            id=0,
            num_nodes=len(self.models),
            num_examples=10,
            label_proportions=torch.ones(1),
            architecture=own.architecture,
            layout=self.built[own.architecture].layout,
            params=own.params,
            buffers=own.buffers,
            seed=3,
            layouts={name: model.layout for name, model in self.built.items()},
            buffer_layouts={name: model.buffer_layout for name, model in self.built.items()},
            channels={name: channel_groups(model.module) for name, model in self.built.items()},
        )
        node.begin_round(round, ())
        return node

    def merge(self, algorithm: PartialTraining, round: int = 0) -> dict[int, Weights]:
        examples = {client: 10 + client for client in self.models}  # must not matter
        return algorithm.merge(self.node(round), self.models, examples)

    def indices(self, algorithm: PartialTraining, client: int, round: int = 0) -> dict[str, Any]:
        node = self.node(round)
        whole = max(
            (groups.sizes for groups in node.channels.values()), key=lambda s: sum(s.values())
        )
        own = node.channels[self.models[client].architecture].sizes
        found = algorithm.indices_of(node, client, own, whole)
        return {group: x.tolist() for group, x in found.items()}

    def views(self, model: Weights) -> dict[str, Tensor]:
        kind = self.built[model.architecture]
        return kind.layout.views(model.params) | kind.buffer_layout.views(model.buffers)


def blank_node(nodes: int) -> Any:
    """A node of which only the number matters."""
    nothing = torch.empty(0)
    return pg.Node(0, nodes, 1, torch.ones(1), "", Layout(()), nothing, nothing, seed=0)


def mixed(family: str) -> Network:
    """Five clients, two of them with the largest model."""
    large, medium, small = FAMILIES[family]
    return Network([medium, large, small, large, small])


def require_equal(found: dict[int, Weights], expected: dict[int, Weights]) -> None:
    assert found.keys() == expected.keys()
    for client, model in expected.items():
        assert torch.equal(found[client].params, model.params)
        assert torch.equal(found[client].buffers, model.buffers)


# Dec. HeteroFL


@pytest.mark.parametrize("family", FAMILIES)
def test_heterofl_averages_the_overlapping_corners_of_all_tensors(family):
    """A second implementation, which knows shapes only: smaller tensors lie at index 0."""
    clients = mixed(family)
    tensors = {client: clients.views(model) for client, model in clients.models.items()}
    merged = clients.merge(DecHeteroFL())
    for name, largest in tensors[1].items():
        total, owners = torch.zeros_like(largest), torch.zeros_like(largest)
        corners = {n: tuple(map(slice, named[name].shape)) for n, named in tensors.items()}
        for client, corner in corners.items():
            total[corner] += tensors[client][name]
            owners[corner] += 1
        for client, corner in corners.items():
            found = clients.views(merged[client])[name]
            torch.testing.assert_close(found, (total / owners)[corner])


def test_owners_are_counted_for_each_entry():
    """A net of two layers with rates 1, 1 and 1/2 and the values 1, 4 and 10."""
    names = ["mlp:hidden=4", "mlp:hidden=4", "mlp:hidden=2"]
    clients = Network(names, [1, 4, 10], shape=(3,), classes=2)
    merged = clients.merge(DecHeteroFL())
    for client in (0, 1):
        found = {name: view.tolist() for name, view in clients.views(merged[client]).items()}
        assert found == {
            "hidden1.weight": [[5] * 3, [5] * 3, [2.5] * 3, [2.5] * 3],
            "hidden1.bias": [5, 5, 2.5, 2.5],
            "head.weight": [[5, 5, 2.5, 2.5]] * 2,
            "head.bias": [5, 5],
        }
    assert merged[2].params.tolist() == [5.0] * len(clients.models[2].params)
    assert merged[2].architecture == "mlp:hidden=2"


def test_the_largest_participant_gives_the_shape():
    """The largest architecture of the network is absent."""
    clients = Network(["mlp:hidden=1", "mlp:hidden=2"], [1, 3], shape=(1,), classes=1)
    clients.built["mlp:hidden=9"] = FlatModel(network("mlp:hidden=9", (1,), 1))
    for algorithm in ALL.values():
        for round in range(3):
            merged = clients.merge(algorithm, round)
            assert merged[0].params.tolist() == [2, 2, 2, 2]
            assert sorted(merged[1].params.tolist()) == [2, 2, 2, 2, 3, 3, 3]


def test_running_statistics_follow_their_channels():
    small, large = "preact-resnet:widths=2+3", "preact-resnet:widths=4+8"
    clients = Network([large, small], [1, 3])
    merged = clients.merge(DecHeteroFL())
    sizes = {slot.name: slot.size for slot in clients.built[small].buffer_layout.slots}
    assert sizes["norm.running_var"] == 3
    for name, view in clients.built[large].buffer_layout.views(merged[0].buffers).items():
        assert view.tolist() == [2.0] * sizes[name] + [1.0] * (len(view) - sizes[name])
    assert merged[1].buffers.unique().tolist() == [2]


@pytest.mark.parametrize("name", ["sorted", "dropout"])
def test_tensors_of_one_group_have_the_same_channels(name):
    """Values 1 and 3: an entry of the large model that the small one owns is 2, others are 1."""
    small, large = "preact-resnet:widths=2+3", "preact-resnet:widths=4+8"
    clients, algorithm = Network([large, small], [1, 3]), ALL[name]
    views = clients.views(clients.merge(algorithm, round=2)[0])
    owned = clients.indices(algorithm, client=1, round=2)
    assert owned["block2_1"] != [0, 1, 2]

    def channels(name: str, axis: int = 0) -> list[int]:
        averaged = (views[name] == 2).movedim(axis, 0).flatten(1 if views[name].dim() > 1 else 0)
        found = averaged.any(1) if averaged.dim() > 1 else averaged
        return [int(index) for index in found.nonzero()]

    for tensor in ("weight", "bias", "running_mean", "running_var"):
        assert channels(f"norm.{tensor}") == owned["block2_1"]
        assert channels(f"block2_1.norm1.{tensor}") == owned["conv1"]
    # A shortcut connects the groups of the input and of the output of its block.
    assert channels("block2_1.shortcut.weight") == owned["block2_1"]
    assert channels("block2_1.shortcut.weight", axis=1) == owned["conv1"]
    assert channels("block2_2.conv2.weight") == owned["block2_1"]
    assert channels("block1_2.conv2.weight", axis=1) == owned["block1_2.conv1"]
    assert channels("head.weight", axis=1) == owned["block2_1"]
    assert views["head.bias"].unique().tolist() == [2]


@pytest.mark.parametrize("algorithm", ALL.values(), ids=ALL)
@pytest.mark.parametrize("family", FAMILIES)
def test_entries_that_no_other_client_owns_keep_the_value_of_the_largest(family, algorithm):
    large, medium, small = FAMILIES[family]
    clients = Network([small, large, medium])
    before, after = clients.models[1], clients.merge(algorithm, round=5)[1]
    unchanged = int((before.params == after.params).sum())
    others = [len(clients.models[client].params) for client in (0, 2)]
    assert len(before.params) - sum(others) <= unchanged <= len(before.params) - max(others)


# Dec. FedRolex


ROUNDS = (0, 1, 2, 5, 7, 8, 31, 499)


@pytest.mark.parametrize("direction", ["text", "code"])
@pytest.mark.parametrize("family", FAMILIES)
def test_fedrolex_is_heterofl_in_every_round(family, direction):
    """Bit by bit: the same numbers are added in the same order, at other positions."""
    clients, rolex = mixed(family), DecFedRolex(direction=direction)
    expected = clients.merge(DecHeteroFL())
    for round in ROUNDS:
        require_equal(clients.merge(rolex, round), expected)
    static = clients.indices(DecHeteroFL(), client=2)
    assert clients.indices(rolex, client=2, round=0) == static
    assert clients.indices(rolex, client=2, round=1) != static


@pytest.mark.parametrize("family", FAMILIES)
def test_fedrolex_with_sorted_indices_differs(family):
    clients, rolex = mixed(family), DecFedRolex(indices="sorted")
    expected = clients.merge(DecHeteroFL())
    require_equal(clients.merge(rolex, round=0), expected)
    for round in (1, 5):
        assert not torch.equal(clients.merge(rolex, round)[2].params, expected[2].params)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [7, 0, 1]),
        ({"indices": "sorted"}, [0, 1, 7]),
        ({"direction": "code"}, [1, 2, 3]),  # roll(arange(8), 7)
        ({"direction": "code", "indices": "sorted"}, [1, 2, 3]),
    ],
)
def test_the_indices_of_fedrolex(options, expected):
    rolex = DecFedRolex(**options)
    clients = Network(["mlp:hidden=8", "mlp:hidden=3"], shape=(2,))
    for round in (7, 15):
        assert clients.indices(rolex, client=1, round=round) == {"hidden1": expected}
    rolled = torch.arange(8).roll(1)[:3].tolist()
    assert clients.indices(DecFedRolex(direction="code"), 1, round=1) == {"hidden1": rolled}
    assert sorted(clients.indices(rolex, client=0, round=7)["hidden1"]) == [*range(8)]


# Dec. Federated Dropout


def test_dropout_draws_ascending_channels_for_each_round_client_and_group():
    names = ["mlp:hidden=40x40", "mlp:hidden=20x20", "mlp:hidden=20x20"]
    clients, dropout = Network(names, shape=(2,)), DecFedDropout()
    drawn = [
        x
        for round in (0, 1)
        for client in (1, 2)
        for x in clients.indices(dropout, client, round).values()
    ]
    assert len({tuple(x) for x in drawn}) == len(drawn) == 8
    for x in drawn:
        assert x == sorted(set(x))
        assert len(x) == 20
        assert 0 <= x[0] < x[-1] < 40
    assert clients.indices(dropout, 0) == {"hidden1": [*range(40)], "hidden2": [*range(40)]}
    assert clients.indices(dropout, 1, 1) == clients.indices(dropout, 1, 1)
    counts = torch.zeros(40)
    for round in range(400):
        counts[clients.indices(dropout, 1, round)["hidden2"]] += 1
    assert float(counts.min()) > 140  # of 400 / 2
    assert float(counts.max()) < 260


def test_dropout_does_not_depend_on_lost_messages():
    names = ["mlp:hidden=8", "mlp:hidden=3", "mlp:hidden=3", "mlp:hidden=3"]
    clients, dropout = Network(names, [0, 0, 0, 1], shape=(2,)), DecFedDropout()
    whole = clients.merge(dropout)[0].params
    del clients.models[1]
    # The coin is drawn for all nodes, whoever has answered.
    node = clients.node()
    node.num_nodes = len(names)
    some = dropout.merge(node, clients.models, dict.fromkeys(clients.models, 1))[0].params
    assert torch.equal(whole > 0, some > 0)


# All models alike


@pytest.mark.parametrize("algorithm", ALL.values(), ids=ALL)
def test_models_of_one_width_have_their_plain_mean(algorithm):
    for name in ("preact-resnet:widths=2+3", "digits-cnn"):  # the second one has no channel groups
        clients = Network([name] * 3, shape=(1, 8, 8))
        node = blank_node(3)
        node.begin_round(4, ())
        merged = algorithm.merge(node, clients.models, {0: 1, 1: 2, 2: 30})
        expected = DecFedAvg().merge(node, clients.models, dict.fromkeys(range(3), 7))
        require_equal(merged, expected)


@pytest.mark.parametrize("algorithm", ALL.values(), ids=ALL)
def test_two_architectures_of_one_width_have_it_too(algorithm):
    clients = Network(["dfml-cnn:channels=2+3", "dfml-cnn:channels=2+3,norm=channel"])
    mean = (clients.models[0].params + clients.models[1].params) / 2
    for model in clients.merge(algorithm, round=1).values():
        torch.testing.assert_close(model.params, mean)


# In a network


WIDTHS = ["mlp:hidden=8", "mlp:hidden=4", "mlp:hidden=6"]
STILL = LocalSGD(epochs=1, lr=0.0)


def test_participants_get_their_part_and_others_keep_their_model():
    algorithm = DecHeteroFL(STILL)
    experiment = toy(algorithm, model=WIDTHS, topology="complete", rounds=1)
    ended = simulate(experiment)
    world = prepare(experiment)
    assert {name: dict(groups.sizes) for name, groups in world.channels.items()} == {
        "mlp-0": {"hidden1": 8},
        "mlp-1": {"hidden1": 4},
        "mlp-2": {"hidden1": 6},
    }
    assert prepare(toy(DecFedAvg(), model=WIDTHS)).channels == {}
    graph = tuple(tuple(j for j in range(5) if j != i) for i in range(5))
    node = blank_node(5)
    node.begin_round(0, graph)
    hub, senders = algorithm.participants(node)
    members = sorted((hub, *senders))
    starts = {n: Weights(ended.start[n], torch.empty(0), world.assignment[n]) for n in range(5)}
    node.layouts, node.buffer_layouts = world.layouts, world.buffer_layouts
    node.channels = world.channels
    expected = starts | algorithm.merge(node, {n: starts[n] for n in members}, {})
    for n in range(5):
        assert torch.equal(ended.end[n], expected[n].params)
        assert torch.equal(ended.end[n], ended.start[n]) == (n not in members)


def test_runs_of_fedrolex_and_heterofl_have_one_digest():
    work = LocalSGD(epochs=1)
    static, rolling, ordered = (
        pg.run(toy(algorithm, model=WIDTHS, rounds=5)).digest
        for algorithm in (DecHeteroFL(work), DecFedRolex(work), DecFedRolex(work, indices="sorted"))
    )
    assert rolling == static
    assert ordered != static


MIXED_LAWS = ("short-inbox", "unchanged", "traffic", "declared")
POOLED_LAWS = ("engines", "lost-messages", "clusters", "resuming")


@pytest.mark.parametrize(
    "law", [*MIXED_LAWS, *(pytest.param(law, marks=pytest.mark.slow) for law in POOLED_LAWS)]
)
@pytest.mark.parametrize(
    "cls", [DecHeteroFL, DecFedRolex, DecFedDropout], ids=lambda cls: cls.__name__
)
def test_laws_hold_for_several_widths(cls, law, monkeypatch):
    monkeypatch.setattr(testing, "model_for", lambda algorithm: WIDTHS)
    options = {"indices": "sorted"} if cls is DecFedRolex else {}
    check_law(law, cls(LocalSGD(epochs=2), **options))


@pytest.mark.slow
def test_heterofl_learns_with_batch_norm_and_dropout_does_not():
    """As P1 reports: random parts of other models fit together badly."""
    y = torch.arange(120) % 3
    noise = torch.randn(120, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    x = noise + (y.view(-1, 1, 1, 1) - 1)
    experiment = pg.Experiment(
        dataset=pg.in_memory(x[:90], y[:90], x[90:], y[90:]),
        model=["preact-resnet:widths=4+8", "preact-resnet:widths=2+4"],
        nodes=4,
        topology="complete",
        partition="balanced-iid",
        rounds=12,
        init={"start": "shared"},
    )
    work = LocalSGD(epochs=2, batch_size=5, lr=0.02, momentum=0.9)
    accuracies = [
        pg.run(experiment.model_copy(update={"algorithm": algorithm})).rows[-1]["accuracy"]
        for algorithm in (DecHeteroFL(work), DecFedDropout(work))
    ]
    assert accuracies[0] > 0.85
    assert accuracies[1] < accuracies[0] - 0.15


# Errors


@pytest.mark.parametrize(
    ("models", "text"),
    [
        (
            ["mlp:hidden=8", "mlp:hidden=8x4"],
            "'mlp-1' is no narrower version of 'mlp-0': only one of the two models has "
            "hidden2.bias, so they differ in more than their width; use one family",
        ),
        (
            ["mlp:hidden=8x4", "mlp:hidden=4x8"],
            "'mlp-1' is no narrower version of 'mlp-0': it has 8 channels in hidden2, more than "
            "the 4 there",
        ),
        # Each of the small ones is part of the largest, but none of them of the other.
        (["mlp:hidden=9x9", "mlp:hidden=8x4", "mlp:hidden=4x8"], "in hidden2, more than the 4"),
        (
            ["mlp:hidden=8", "digits-cnn"],
            "'digits-cnn-1' has no other widths: model Sequential has no width-scaled versions",
        ),
        (["dfml-cnn:channels=2+3", "mlp:hidden=8"], "are different families"),
    ],
)
@pytest.mark.parametrize("name", ["dec-heterofl", "dec-fedrolex", "dec-fed-dropout"])
def test_other_architectures_are_rejected(name, models, text, tmp_path):
    tiny = TINY.replace("--model logistic", " ".join(f"--model {model}" for model in models))
    line = error_line(peerage(f"run {tiny} --algorithm {name} --out", tmp_path / "run"))
    assert "the algorithm requires models that differ in width alone, but " in line
    assert text in line


def test_options_are_checked():
    with pytest.raises(InputError, match="direction must be one of text, code"):
        DecFedRolex(direction="left")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="indices must be one of wrapped, sorted"):
        DecFedRolex(indices="random")  # type: ignore[arg-type]
