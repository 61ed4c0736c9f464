"""The baselines of P3 by numbers: D-PSGD, EL, DePRL and DAC, with results by hand."""

from collections.abc import Mapping
from math import exp
from typing import Any

import networkx as nx
import pytest
import torch
from torch import Tensor, nn

import peerage as pg
from peerage import DAC, DPSGD, EL, Algorithm, DePRL, LocalSGD, Message, Node
from peerage.algorithm import Dimensions
from peerage.algorithms.dac import Similarities, draw
from peerage.errors import InputError
from peerage.requests import Envelope, Inbox, Receive, Send
from peerage.testing import NODES, toy
from peerage.vectors import Layout
from peerage.work.candidates import Losses
from peerage.work.training import Train, Trained, TrainStats

PATH = ((1,), (0, 2), (1,))
NORMED = nn.Sequential(nn.Linear(1, 1, bias=False), nn.BatchNorm1d(1), nn.Linear(1, 1, bias=False))


def vector(*values: float) -> Tensor:
    return torch.tensor([float(value) for value in values])


def make_node(id: int = 0, nodes: int = 3, x: Tensor | None = None, b: Tensor | None = None) -> Any:
    """A node of a path; its model has a core (all but the last parameter) and a head."""
    layout = Layout.of([("core", torch.zeros(2)), ("head.w", torch.zeros(1))], ("head",))
    statistics = Layout.of(
        [("core.mean", torch.zeros(1)), ("head.mean", torch.zeros(1))], ("head",)
    )
    node: Node[Any] = Node(
        id=id,
        num_nodes=nodes,
        num_examples=10,
        label_proportions=torch.ones(1),
        architecture="net",
        layout=layout,
        params=vector(0, 0, 0) if x is None else x,
        buffers=vector(0, 0) if b is None else b,
        seed=0,
        layouts={"net": layout},
        buffer_layouts={"net": statistics},
    )
    node.begin_round(0, PATH[:nodes] if nodes <= 3 else [()] * nodes)
    return node


def message(
    sender: int, architecture: str = "net", examples: int = 10, **payload: Tensor
) -> Message:
    return Message(Envelope(sender, examples, len(PATH[sender % 3]), architecture), payload)


def whole(sender: int, *values: float, architecture: str = "net", **more: Tensor) -> Message:
    x, b = vector(*values), vector(values[0], values[0])
    return message(sender, architecture, x=x, b=b, **more)


class Played:
    """One round of a node that has been trained to its present model, with scripted answers."""

    def __init__(
        self,
        algorithm: Algorithm[Any],
        node: Node[Any],
        inboxes: list[list[Message]],
        losses: Tensor | None = None,
        step: str = "round",
    ) -> None:
        self.trained: list[LocalSGD] = []
        self.sent: list[tuple[tuple[int, ...], Mapping[str, Tensor]]] = []  # with a payload
        self.losses: list[Losses] = []
        inboxes = list(inboxes)
        coroutine = getattr(algorithm, step)(node)
        answer: Any = None
        while True:
            try:
                request = coroutine.send(answer)
            except StopIteration:
                assert not inboxes
                return
            answer = None
            if isinstance(request, Train):
                self.trained.append(request.work)
                answer = Trained(request.params, request.buffers, TrainStats(0.0, 1, None))
            elif isinstance(request, Losses):
                self.losses.append(request)
                answer = losses
            elif isinstance(request, Receive):
                answer = tuple(inboxes.pop(0))
            elif isinstance(request, Send) and request.message.payload:
                self.sent.append((request.to, request.message.payload))


# D-PSGD


@pytest.mark.parametrize(
    ("weights", "expected"),
    [("uniform", [3.0, 3.0, 3.0]), ("metropolis", [2.0, 2.0, 2.0])],  # 6/2; a third over the edge
)
def test_dpsgd_averages_by_the_graph(weights, expected):
    node = make_node(0)
    Played(DPSGD(weights=weights), node, [[whole(1, 6, 6, 6)]])
    assert node.params.tolist() == pytest.approx(expected)
    assert node.buffers.tolist() == pytest.approx(expected[:2])


def test_dpsgd_is_decavg_without_the_data():
    ours = pg.run(toy(DPSGD(weights="metropolis", final_mean=False)))
    known = pg.run(toy(pg.DecAvg(weights="metropolis")))
    assert ours.digest == known.digest
    with pytest.raises(InputError, match="weights must be one of uniform, metropolis; got 'data'"):
        DPSGD(weights="data")  # type: ignore[arg-type]


# EL


def test_el_oracle_is_the_mean_of_three():
    node = make_node(1, x=vector(3, 3, 3), b=vector(3, 3))
    Played(EL(), node, [[whole(0, 0, 3, 6), whole(2, 6, 0, 9)]])
    assert node.params.tolist() == pytest.approx([3, 2, 6])
    assert node.buffers.tolist() == pytest.approx([3, 3])


def test_el_local_sends_to_a_few_and_averages_what_arrives():
    node = make_node(1, 9, x=vector(3, 3, 3), b=vector(3, 3))
    arrived = [whole(0, 0, 3, 6), message(2), whole(4, 6, 0, 9), whole(7, 9, 9, architecture="big")]
    played = Played(EL(mode="local", sends=3), node, [arrived])
    [(to, payload)] = played.sent
    assert len(set(to)) == 3
    assert 1 not in to
    assert payload["x"].tolist() == [3, 3, 3]
    assert node.params.tolist() == pytest.approx([3, 2, 6])
    assert node.buffers.tolist() == pytest.approx([3, 3])


def test_el_local_keeps_its_model_if_nothing_arrives_and_draws_anew_in_each_round():
    recipients = set()
    for round in range(20):
        node = make_node(1, 9, x=vector(3, 1, 2))
        node.begin_round(round, [()] * 9)
        played = Played(EL(mode="local"), node, [[]])
        assert node.params.tolist() == [3, 1, 2]
        assert len(played.sent[0][0]) == 4
        recipients |= set(played.sent[0][0])
    assert recipients == set(range(9)) - {1}


def test_el_rejects_options_that_it_would_ignore():
    with pytest.raises(InputError, match="sends=3 belongs to mode=local"):
        EL(sends=3)
    with pytest.raises(InputError, match="sends must be at least 1, got 0"):
        EL(mode="local", sends=0)


# The mean of all models at the end


@pytest.mark.parametrize("algorithm", [DPSGD(), EL(), EL(mode="local"), DAC(final_mean=True)])
def test_the_last_step_averages_all_models_of_an_architecture(algorithm):
    node = make_node(0, x=vector(3, 3, 3), b=vector(3, 3))
    others = [whole(1, 5, 3, 6), whole(2, 6, 0, 9, architecture="big")]
    played = Played(algorithm, node, [others], step="final")
    assert [to for to, _ in played.sent] == [(1, 2)]  # node 2 is not a neighbour
    assert node.params.tolist() == [4, 3, 4.5]
    assert node.buffers.tolist() == [4, 4]


@pytest.mark.parametrize(
    "algorithm", [DPSGD(final_mean=False), EL(final_mean=False), DePRL(final_mean=False), DAC()]
)
def test_it_can_be_left_out(algorithm):
    assert not algorithm.has_final
    result = pg.run(toy(algorithm, rounds=2))
    assert not any(row.get("final") for row in result.rows)
    assert result.rows[-1]["round"] == 2


@pytest.mark.parametrize("algorithm", [DPSGD(), EL(), DePRL()])
def test_a_run_ends_with_equal_models_or_cores(algorithm):
    result = pg.run(toy(algorithm))
    size = 5 * 8 if isinstance(algorithm, DePRL) else None  # four inputs and a bias, eight units
    for params in result.parameters[1:]:
        assert torch.equal(params[:size], result.parameters[0][:size])
    if size is not None:
        assert not torch.equal(result.parameters[1][size:], result.parameters[0][size:])
    assert result.rows[-1]["final"]


def test_models_are_evaluated_after_aggregation():
    for algorithm in (DPSGD(), EL(), DePRL(), DAC()):
        assert pg.Experiment(algorithm=algorithm).evaluated_at == "end"


# DePRL


def core(sender: int, *values: float, architecture: str = "net") -> Message:
    return message(sender, architecture, core=vector(*values), core_b=vector(values[0]))


def test_deprl_shares_the_core_and_keeps_the_head():
    node = make_node(1, x=vector(3, 3, 7), b=vector(3, 8))
    arrived = [core(0, 0, 6), core(2, 9, 0)]
    played = Played(DePRL(LocalSGD(steps=4)), node, [arrived])
    assert [(work.only, work.steps) for work in played.trained] == [("head", 4), ("core", 4)]
    [(_, payload)] = played.sent
    assert {name: t.tolist() for name, t in payload.items()} == {"core": [3, 3], "core_b": [3]}
    assert node.params.tolist() == pytest.approx([4, 3, 7])
    assert node.buffers.tolist() == pytest.approx([4, 8])  # statistics follow their part


def test_deprl_alone_or_among_other_architectures_keeps_its_model():
    for arrived in ([], [core(0, 5, architecture="big")]):
        node = make_node(1, x=vector(3, 3, 7), b=vector(3, 8))
        Played(DePRL(), node, [arrived])
        assert (node.params.tolist(), node.buffers.tolist()) == ([3, 3, 7], [3, 8])


def test_deprl_averages_cores_only_at_the_end():
    node = make_node(0, x=vector(3, 3, 7), b=vector(3, 8))
    Played(DePRL(weights="metropolis"), node, [[core(1, 0, 6), core(2, 9, 0)]], step="final")
    assert node.params.tolist() == pytest.approx([4, 3, 7])


def test_deprl_phases_of_different_length():
    assert DePRL(LocalSGD(steps=10), core_steps=1).phase("core").steps == 1
    work = DePRL(LocalSGD(epochs=3), core_steps=2)
    assert (work.phase("head").epochs, work.phase("core").steps) == (3, 2)
    assert work.phase("core").epochs is None
    assert DePRL(LocalSGD(steps=10), core_epochs=1).phase("core").epochs == 1
    for options, text in [
        ({"core_epochs": 1, "core_steps": 1}, "exclude each other"),
        ({"core_steps": 0}, "core_steps must be at least 1, got 0"),
        ({"local": LocalSGD(only="head")}, "trains both parts in turn, got only=head"),
    ]:
        with pytest.raises(InputError, match=text):
            DePRL(**options)


def test_deprl_declares_the_core_and_its_cost():
    dimensions = Dimensions.of(NORMED, nodes=4, classes=1, example=(1,))
    schema = DePRL().message_schema(dimensions)
    assert {name: spec.shape for name, spec in schema.items()} == {"core": (3,), "core_b": (2,)}
    cost = DePRL(LocalSGD(steps=10, batch_size=8), core_steps=5).cost(0, dimensions, examples=80)
    assert (cost.vectors, cost.passes) == (3 / 4, 0.5)


def test_deprl_rejects_a_model_without_a_core():
    with pytest.raises(InputError, match="deprl requires a model with a core and a head"):
        pg.run(toy(DePRL(), model="logistic"))


# DAC


def known(*values: float, seen: tuple[int, ...] = ()) -> Similarities:
    return Similarities(vector(*values), torch.tensor([j in seen for j in range(len(values))]))


def test_the_temperature_of_dac_rises():
    dac = DAC()
    assert dac.temperature(0) == 1
    assert dac.temperature(5) == pytest.approx(60 / (1 + exp(-1)) - 29)
    assert dac.temperature(1000) == 31
    assert DAC(a=0).temperature(7) == 1


def test_dac_draws_by_the_softmax_of_scaled_similarities():
    dac, counts = DAC(peers=1, a=2.0, b=1.0), [0, 0, 0]
    state = known(0, 0.5, 0, seen=(0, 1))
    rounds, scale = range(100, 4100), 3.0  # the temperature is 3 there
    for round in rounds:
        node = make_node(0)
        node.state = state
        node.begin_round(round, PATH)
        [peer] = dac.choose(node)
        counts[peer] += 1
    share = exp(scale * 0.5) / (exp(scale * 0.5) + 1)
    assert counts[0] == 0
    assert counts[1] / len(rounds) == pytest.approx(share, abs=0.03)


def test_draws_are_distinct_and_filled_up_uniformly():
    rng = torch.Generator().manual_seed(1)
    p = torch.tensor([0.0, 1.0, 0.0, 0.0])
    found = [draw(p, 2, rng) for _ in range(60)]
    assert all(first == 1 for first, _ in found)
    assert {second for _, second in found} == {0, 2, 3}
    assert sorted(draw(torch.full((3,), 1 / 3), 5, rng)) == [0, 1, 2]
    assert draw(torch.empty(0), 4, rng) == []
    many = [draw(torch.full((6,), 1 / 6), 3, rng) for _ in range(20)]
    assert all(len(set(one)) == 3 for one in many)


def test_dac_asks_replies_and_averages_what_it_fetched():
    node = make_node(0, x=vector(3, 3, 3), b=vector(3, 3))
    dac = DAC(LocalSGD(), peers=2, examples=5)
    node.state = known(0, 0.25, 9, seen=(0, 1))  # node 2 is an estimate
    requests = [message(2, ask=torch.ones(1, dtype=torch.bool))]
    replies = [whole(1, 6, 0, 0, s=vector(0, 0, 8)), whole(2, 0, 0, 9, s=vector(0, 4, 0))]
    played = Played(dac, node, [requests, replies], losses=vector(0.5, 0.25))
    (asked, ask), (answered, reply) = played.sent
    assert (sorted(asked), set(ask)) == ([1, 2], {"ask"})
    assert answered == (2,)
    assert reply["x"].tolist() == [3, 3, 3]
    assert reply["s"].tolist() == [0, 0.25, 0]  # only what it measured
    assert played.losses[0].examples == 5
    assert node.state.value.tolist() == [0, 2, 4]
    assert node.state.seen.tolist() == [True, True, True]
    assert node.params.tolist() == pytest.approx([3, 1, 4])
    assert node.buffers.tolist() == pytest.approx([3, 3])


def test_dac_weights_by_data():
    node = make_node(0, x=vector(4, 4, 4), b=vector(4, 4))
    dac = DAC(weights="data", two_hop=False)
    node.state = dac.init(node)
    reply = message(1, examples=30, x=vector(0, 8, 4), b=vector(0, 0))
    played = Played(dac, node, [[], [reply]], losses=vector(1.0))
    assert node.params.tolist() == [1, 7, 4]
    assert node.buffers.tolist() == [1, 1]
    assert len(played.sent) == 1  # nobody asked for its model


def test_lost_messages_and_other_architectures_do_no_harm_to_dac():
    other = whole(1, 9, 9, architecture="big", s=vector(0, 0, 5))
    for replies in ([], [other]):
        node = make_node(0, x=vector(4, 4, 4))
        node.state = state = known(0, 2, 0, seen=(0, 1))
        Played(DAC(), node, [[], replies])
        assert node.params.tolist() == [4, 4, 4]
        assert node.state is state


def inbox_of(*similarities: tuple[float, ...]) -> Inbox:
    """Replies of nodes 1, 2, ... that contain these similarities."""
    replies = [whole(1 + k, 0, 0, 0, s=vector(*s)) for k, s in enumerate(similarities)]
    return Inbox(tuple(replies), 0)


def test_two_hops_take_the_value_of_the_most_similar_peer_that_knows():
    # Nodes 3 to 6 are unseen, but 6 was seen. Node 1 is more similar (loss 0.5) than node 2.
    replies = inbox_of((1, 0, 0, 7, 0, 0, 9), (1, 0, 0, 5, 6, 0, 9))
    learnt = DAC().learn(known(0, 0, 0, 2, 0, 0, 3, seen=(0, 6)), replies, [0.5, 1.0])
    assert learnt.value.tolist() == [0, 2, 1, 7, 6, 0, 3]
    assert learnt.seen.tolist() == [True, True, True, False, False, False, True]
    without = DAC(two_hop=False).learn(known(0, 0, 0, 0, 0, 0, 3, seen=(0, 6)), replies, [0.5, 1])
    assert without.value.tolist() == [0, 2, 1, 0, 0, 0, 3]


def test_similarities_stay_finite():
    nan, inf = float("nan"), float("inf")
    start = known(0, 3, 0, 0, 0, seen=(0, 1))
    learnt = DAC().learn(start, inbox_of((0, 0, 0, nan, inf), (0, 0, 0, 0, 0)), [nan, 0.0])
    assert learnt.value.tolist() == pytest.approx([0, 0, 1e6, 0, 0])
    assert learnt.seen.tolist() == [True, False, True, False, False]
    assert start.value.tolist() == [0, 3, 0, 0, 0]  # states are values


def test_a_node_without_examples_judges_nobody():
    node = make_node(0)
    node.num_examples = 0
    node.state = state = DAC().init(node)
    played = Played(DAC(), node, [[], [whole(1, 2, 2, 2, s=vector(0, 0, 1))]])
    assert played.losses == []
    assert node.state is state
    assert node.params.tolist() == [1, 1, 1]


def test_dac_declares_what_it_sends():
    dimensions = Dimensions.of(NORMED, nodes=4, classes=1, example=(1,))
    assert set(DAC().message_schema(dimensions)) == {"x", "b", "ask", "s"}
    assert set(DAC(two_hop=False).message_schema(dimensions)) == {"x", "b", "ask"}
    cost = DAC(peers=3, examples=20).cost(0, dimensions, examples=80)
    assert (cost.vectors, cost.forward, cost.state) == (2.0, 0.75, 1.0)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"peers": 0}, "peers must be at least 1, got 0"),
        ({"examples": 0}, "examples must be at least 1, got 0"),
        ({"a": -1.0}, "a must be a number of at least 0"),
        ({"b": float("inf")}, "b must be a number of at least 0"),
    ],
)
def test_dac_rejects_bad_options(options, text):
    with pytest.raises(InputError, match=text):
        DAC(**options)


# Networks


@pytest.mark.parametrize("algorithm", [EL(mode="local", sends=2), DAC(peers=2), DePRL()])
def test_a_network_that_loses_all_messages_only_trains(algorithm):
    lost = pg.run(toy(algorithm, faults={"loss": 1.0 - 1e-12}))
    personal = isinstance(algorithm, DePRL)
    trained = DePRL(final_mean=False) if personal else pg.Local()
    alone = pg.run(toy(trained, topology=nx.empty_graph(NODES)))
    for node in range(NODES):
        assert torch.equal(lost.parameters[node], alone.parameters[node])
