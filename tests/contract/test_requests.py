"""What an algorithm may await, on both engines: small algorithms that record what they see.

They note numbers in the first entries of their parameters, which is what a run gives back.
"""

import asyncio
from dataclasses import dataclass
from typing import Any, ClassVar

import networkx as nx
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.networking import run_peers
from torch import Tensor, nn

from peerage import Algorithm, Compute, DecAvg, Node, PeerageError, RunRecord, run
from peerage.aggregation import weighted_mean
from peerage.engine.prepare import prepare
from peerage.testing import NODES, blobs, toy, unequal_parts
from peerage.work.context import LocalContext
from peerage.work.training import LocalSGD


def note(node: Node[Any], *values: float) -> None:
    """Write numbers down after those that were noted before; the last entry counts them."""
    node.state = (*(node.state or ()), *map(float, values))
    node.params = torch.zeros_like(node.params)
    node.params[: len(node.state)] = torch.tensor(node.state)
    node.params[-1] = len(node.state)


def states_after(algorithm: Algorithm[Any], **changes: Any) -> list[list[float]]:
    """What every node has noted at the end of a run."""
    settings = {"rounds": 1, "topology": "complete"}
    result = run(toy(algorithm, **(settings | changes)))
    return [x[: int(x[-1])].tolist() for x in result.parameters]


def others(node: int) -> list[int]:
    return [peer for peer in range(NODES) if peer != node]


def number(value: float) -> Tensor:
    return torch.tensor(float(value))


# Messages


@dataclass(frozen=True)
class Ordered(Algorithm[Any]):
    """Even nodes send everything before they receive; odd nodes take turns."""

    async def round(self, node: Node[Any]) -> None:
        inboxes = []
        for i in range(3):
            await node.send(node.neighbours, x=number(10 * node.id + i))
            if node.id % 2:
                inboxes.append(await node.receive())
        while len(inboxes) < 3:
            inboxes.append(await node.receive())
        note(node, *(x for inbox in inboxes for x in inbox["x"]))


def test_messages_between_two_nodes_arrive_in_order(engine):
    for node, seen in enumerate(states_after(Ordered(), engine=engine)):
        assert seen == [10 * peer + i for i in range(3) for peer in others(node)]


@dataclass(frozen=True)
class Private(Algorithm[Any]):
    """A message of its own for every neighbour; they are opened one by one, the last one first."""

    async def round(self, node: Node[Any]) -> None:
        for peer in node.neighbours:
            await node.send(peer, x=number(10 * node.id + peer))
        for peer in reversed(node.neighbours):
            inbox = await node.receive(peer)
            assert inbox.senders == (peer,)
            note(node, *inbox["x"])


def test_every_recipient_can_get_a_message_of_its_own(engine):
    for node, seen in enumerate(states_after(Private(), engine=engine)):
        assert seen == [10 * peer + node for peer in reversed(others(node))]


@dataclass(frozen=True)
class Headers(Algorithm[Any]):
    """Notes what messages say about their senders."""

    async def round(self, node: Node[Any]) -> None:
        inbox = await node.exchange(x=number(node.id))
        assert inbox.senders == tuple(sorted((*node.neighbours, node.id)))
        assert inbox.others().senders == node.neighbours
        assert len(inbox.alike("mlp")) == len(inbox)
        assert len(inbox.alike("another")) == 0
        assert inbox.stack("x").tolist() == list(inbox.senders)
        for message in inbox.messages:
            note(node, message.sender, message.examples, message.degree)


def test_messages_say_what_weights_need(engine):
    path = nx.path_graph(NODES)
    for node, seen in enumerate(states_after(Headers(), engine=engine, topology=path)):
        senders = sorted([node, *path[node]])
        assert seen == [v for s in senders for v in (s, len(unequal_parts()[s]), path.degree[s])]


@dataclass(frozen=True)
class SitsOut(Algorithm[Any]):
    """Node r takes no part in round r."""

    async def round(self, node: Node[Any]) -> None:
        if node.id == node.round:
            return
        inbox = await node.exchange(x=number(node.id))
        note(node, *inbox.senders)


def test_a_node_that_sits_out_leaves_a_short_inbox(engine):
    # What is sent to the absent node is gone: it does not turn up in the round after.
    for node, seen in enumerate(states_after(SitsOut(), engine=engine, rounds=2)):
        rounds = [[peer for peer in range(NODES) if peer != r] for r in range(2) if r != node]
        assert seen == [float(peer) for round in rounds for peer in round]


@dataclass(frozen=True)
class ReceivesOnce(Algorithm[Any]):
    """The centre of a star sends one message and is asked for two."""

    async def round(self, node: Node[Any]) -> None:
        if node.id == 0:
            await node.send(node.neighbours, x=number(5))
            return
        first, second = await node.receive(0), await node.receive(0)
        note(node, len(first), len(second))


def test_a_sender_that_has_finished_is_not_waited_for(engine):
    assert states_after(ReceivesOnce(), engine=engine, topology="star")[1:] == [[1, 0]] * (
        NODES - 1
    )


@dataclass(frozen=True)
class Gossip(Algorithm[Any]):
    """Three exchanges in one round."""

    async def round(self, node: Node[Any]) -> None:
        x = torch.tensor([float(node.id), 1.0])
        for _ in range(3):
            inbox = await node.exchange(x=x)
            x = weighted_mean(inbox["x"], inbox.metropolis_weights())
        note(node, *x)


def test_several_exchanges_in_a_round(engine):
    path = nx.path_graph(NODES)
    w = np.zeros((NODES, NODES))
    for i, j in path.edges:
        w[i, j] = w[j, i] = 1 / (1 + max(path.degree[i], path.degree[j]))
    w += np.diag(1 - w.sum(1))
    expected = w @ w @ w @ np.arange(NODES)
    seen = np.array(states_after(Gossip(), engine=engine, topology=path))
    np.testing.assert_allclose(seen, np.column_stack([expected, np.ones(NODES)]), rtol=1e-6)


@dataclass(frozen=True)
class RotatingHub(Algorithm[Any]):
    """Node r collects a number from all in round r and answers each with its own share."""

    async def round(self, node: Node[Any]) -> None:
        hub = node.round % node.num_nodes
        if node.id == hub:
            inbox = await node.receive()
            total = sum(inbox["x"])
            for message in inbox.messages:
                await node.send(message.sender, share=total * message.payload["x"])
            note(node, total)
        else:
            await node.send(hub, x=number(node.id))
            note(node, *(await node.receive(hub))["share"])


def test_a_hub_that_rotates(engine):
    for node, seen in enumerate(states_after(RotatingHub(), engine=engine, rounds=2)):
        totals = [sum(others(0)), sum(others(1))]
        assert seen == [t if node == hub else t * node for hub, t in enumerate(totals)]


@dataclass(frozen=True)
class Partners(Algorithm[Any]):
    """Exchanges with chosen nodes only, neighbours or not."""

    async def round(self, node: Node[Any]) -> None:
        partner = (0, 2, 1, 4, 3)[node.id]
        chosen = () if partner == node.id else (partner,)
        note(node, *(await node.exchange(to=chosen, x=number(node.id))).senders)


def test_an_exchange_with_chosen_nodes(engine):
    seen = states_after(Partners(), engine=engine, topology=nx.empty_graph(NODES))
    assert seen == [[0], [1, 2], [1, 2], [3, 4], [3, 4]]


# Randomness


@dataclass(frozen=True)
class Coins(Algorithm[Any]):
    async def round(self, node: Node[Any]) -> None:
        note(node, *torch.rand(2, generator=node.coin), *torch.rand(2, generator=node.rng))


def test_the_coin_is_public_and_the_other_stream_private(engine):
    seen = np.array(states_after(Coins(), engine=engine, rounds=2)).reshape(NODES, 2, 4)
    coins, own = seen[:, :, :2], seen[:, :, 2:]
    assert (coins == coins[0]).all()
    assert len(np.unique(coins[0])) == 4  # other draws in every round, and within a round
    assert len(np.unique(own)) == own.size
    assert not np.isin(own, coins).any()


def test_streams_depend_on_the_seed_and_on_nothing_else(engine):
    draws = states_after(Coins(), engine=engine)
    assert (
        states_after(Coins(), engine=engine, topology="ring", dataset="digits", partition="iid")
        == draws
    )
    assert states_after(Coins(), engine=engine, seed=1) != draws


# What a node knows


@dataclass(frozen=True)
class Knows(Algorithm[Any]):
    async def round(self, node: Node[Any]) -> None:
        assert node.layout.size == len(node.params)
        note(node, node.round, node.rounds, node.num_nodes, node.num_examples)
        note(node, *node.label_proportions, *node.neighbours)


def test_what_a_node_knows_about_itself(engine):
    labels = blobs().train_y
    for node, seen in enumerate(states_after(Knows(), engine=engine, rounds=2)):
        part = labels[list(unequal_parts()[node])]
        shares = [float((part == c).float().mean()) for c in range(3)]
        for round in range(2):
            expected = [round, 2, NODES, len(part), *shares, *others(node)]
            assert seen[round * 11 : round * 11 + 11] == pytest.approx(expected)


@dataclass(frozen=True)
class Neighbours(Algorithm[Any]):
    async def round(self, node: Node[Any]) -> None:
        inbox = await node.exchange(x=number(node.id))
        assert inbox.others().senders == node.neighbours == node.graph[node.id]
        note(node, *node.neighbours)


def test_dynamic_graphs_change_the_neighbours_in_every_round(engine):
    changes = {"topology": "dynamic-regular:k=2", "rounds": 4}
    graph = prepare(toy(Neighbours(), **changes)).graph
    rounds = [graph.neighbours(round) for round in range(4)]
    assert len(set(rounds)) > 1
    for node, seen in enumerate(states_after(Neighbours(), engine=engine, **changes)):
        assert seen == [peer for near in rounds for peer in near[node]]


# Work on the own data


@dataclass(frozen=True)
class EvaluatesNeighbours(Algorithm[Any]):
    """Two candidates on all examples, and one candidate twice on some of them."""

    async def round(self, node: Node[Any]) -> None:
        zero = torch.zeros_like(node.params)
        both = await node.losses([node.params, zero])
        again = await node.losses([node.params, node.params], examples=3)
        note(node, *both, *again)


def test_candidate_losses_equal_a_direct_computation(engine):
    data = blobs()
    settings = {"model": "logistic", "init": {"start": "shared"}, "rounds": 1}
    experiment = toy(EvaluatesNeighbours(), engine=engine, **settings)
    start, _ = prepare(experiment).architectures["logistic"].initial(0, None, 1.0)
    weight, bias = start[:12].view(3, 4), start[12:]
    for node, params in enumerate(run(experiment).parameters):
        part = list(unequal_parts()[node])
        direct = F.cross_entropy(data.train_x[part] @ weight.T + bias, data.train_y[part])
        expected = [float(direct), float(np.log(3))]
        assert params[:2].tolist() == pytest.approx(expected, rel=1e-6)
        assert params[2] == params[3] != params[0]


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))


@dataclass(frozen=True)
class Evaluates(Algorithm[Any]):
    """Trains, and evaluates the models of all nodes on its own data."""

    with_buffers: bool = True
    as_inbox: bool = True

    async def round(self, node: Node[Any]) -> None:
        await node.train(LocalSGD(epochs=3, batch_size=4))
        b = {"b": node.buffers} if self.with_buffers else {}
        inbox = await node.exchange(x=node.params, **b)
        buffers = inbox["b"] if self.with_buffers else None
        losses = (
            await node.losses(inbox)
            if self.as_inbox
            else await node.losses(inbox["x"], buffers=buffers)
        )
        own = inbox.senders.index(node.id)
        node.note(**{f"of_{sender}": float(loss) for sender, loss in enumerate(losses)})
        node.note(own=float(losses[own]))


@pytest.mark.parametrize("as_inbox", [True, False])
def test_a_neighbours_model_is_evaluated_with_its_own_statistics(engine, as_inbox, tmp_path):
    """All evaluate the same models: on equal data, they find equal losses."""
    settings = {"model": normalised, "topology": "complete", "rounds": 1, "partition": Everything()}
    experiment = toy(Evaluates(as_inbox=as_inbox), engine=engine, **settings)
    result = run(experiment, tmp_path / "run")
    notes = RunRecord.load(tmp_path / "run").notes
    found = [[notes(f"of_{j}")[i][1][0] for j in range(NODES)] for i in range(NODES)]
    assert len(set(found[0])) == NODES  # of different models
    for i, row in enumerate(found):
        assert row == pytest.approx(found[0], rel=1e-5)
        assert row[i] == notes("own")[i][1][0]
    data = blobs()
    for node, loss in enumerate(found[0]):
        with torch.no_grad():
            direct = F.cross_entropy(result.module(node)(data.train_x), data.train_y)
        assert loss == pytest.approx(float(direct), rel=1e-5)


@dataclass(frozen=True)
class Everything:
    """All nodes have all examples."""

    def split(self, labels: Any, nodes: int, classes: int, rng: Any) -> list[Any]:
        return [np.arange(len(labels))] * nodes


@pytest.mark.parametrize("as_inbox", [True, False])
def test_a_model_without_its_statistics_is_not_evaluated(engine, as_inbox):
    experiment = toy(Evaluates(False, as_inbox), engine=engine, model=normalised)
    match = r"node . cannot evaluate a candidate with 0 running statistics: .* has 10; send b="
    with pytest.raises(PeerageError, match=match):
        run(experiment)
    run(toy(Evaluates(False, as_inbox), engine=engine))  # a model without any needs none


@pytest.mark.parametrize(
    ("as_inbox", "found"),
    [
        (True, r"the model of node .: it has architecture 'mlp-.', not 'mlp-.'; use inbox.alike"),
        (False, r"a candidate with \d\d parameters: its model 'mlp-.' has \d\d; choose candid"),
    ],
)
def test_a_model_of_another_architecture_is_not_evaluated(engine, as_inbox, found):
    models = ["mlp:hidden=8", "mlp:hidden=4"]
    experiment = toy(Evaluates(as_inbox=as_inbox), engine=engine, model=models)
    with pytest.raises(PeerageError, match=f"node . cannot evaluate {found}"):
        run(experiment)


@dataclass(frozen=True)
class Forgets(Algorithm[Any]):
    async def round(self, node: Node[Any]) -> None:
        await node.losses([node.params, node.params], buffers=[node.buffers])


def test_every_candidate_needs_its_buffers(engine):
    with pytest.raises(PeerageError, match=r"node \d has 2 candidates but the buffers of 1"):
        run(toy(Forgets(), engine=engine, model=normalised))


@dataclass(frozen=True)
class MeanExample(Compute[Tensor]):
    """A kind of local work that the library does not have."""

    phase: ClassVar[str] = "looking"
    factor: float

    def run(self, local: LocalContext) -> Tensor:
        x, _ = local.data.take(local.indices)
        return self.factor * x.mean(0)


@dataclass(frozen=True)
class EvaluatesLocally(Algorithm[Any]):
    async def round(self, node: Node[Any]) -> None:
        note(node, *(await MeanExample(2.0)))


def test_a_new_kind_of_local_work_is_a_class(engine):
    x = blobs().train_x
    for node, seen in enumerate(states_after(EvaluatesLocally(), engine=engine)):
        assert seen == pytest.approx((2 * x[list(unequal_parts()[node])].mean(0)).tolist())


def test_time_is_recorded_under_the_phase_of_the_work(engine):
    rows = run(toy(EvaluatesLocally(), engine=engine)).rows
    spent = [row["seconds"].get("looking", 0.0) for row in rows if row["scope"] == "network"]
    assert spent[0] == 0.0
    assert min(spent[1:]) > 0.0


def test_nodes_of_different_architectures_share_a_network(engine):
    # With a learning rate of zero DecAvg on a complete graph makes equal models equal at once.
    models = ["mlp:hidden=8", "mlp:hidden=4"]
    settings = {"topology": "complete", "model": models, "engine": engine, "rounds": 1}
    experiment = toy(DecAvg(LocalSGD(lr=0.0)), **settings)
    world = prepare(experiment)
    starts = [world.architectures[world.assignment[i]].initial(0, i, 1.0)[0] for i in range(NODES)]
    result = run(experiment)
    for kind in ([0, 2, 4], [1, 3]):
        sizes = torch.tensor([float(len(unequal_parts()[node])) for node in kind])
        mean = (sizes / sizes.sum()) @ torch.stack([starts[node] for node in kind])
        for node in kind:
            torch.testing.assert_close(result.parameters[node], mean)
    assert [len(x) for x in result.parameters] == [67, 35, 67, 35, 67]


@dataclass(frozen=True)
class Returns(Algorithm[Any]):
    """Node 0 gives node 1 its model back, with an architecture that is not that of node 0."""

    architecture: str = "mlp-1"

    async def round(self, node: Node[Any]) -> None:
        if node.id == 1:
            await node.send(0, x=node.params + 1)
            [answer] = (await node.receive(0)).alike(node.architecture).messages
            assert (answer.sender, answer.examples) == (0, len(unequal_parts()[0]))
            node.params = answer.payload["x"]
        if node.id == 0:
            [message] = (await node.receive(1)).messages
            await node.send(1, architecture=self.architecture, x=message.payload["x"] * 2)


RETURNS = {"topology": "complete", "model": ["mlp:hidden=8", "mlp:hidden=4"], "rounds": 1}


def test_the_architecture_of_a_message_is_that_of_its_payload(engine):
    experiment = toy(Returns(), engine=engine, **RETURNS)
    start, _ = prepare(experiment).architecture(1).initial(0, 1, 1.0)
    assert torch.equal(run(experiment).parameters[1], (start + 1) * 2)
    peers = run_peers(experiment)  # the recipients check shapes, which differ between architectures
    assert torch.equal(peers[1].shard.members[1].node.params, (start + 1) * 2)


def test_an_architecture_that_no_node_has_is_rejected(engine):
    with pytest.raises(PeerageError, match="payload of architecture 'mlp', which no node has; use"):
        run(toy(Returns("mlp"), engine=engine, **RETURNS))


# Metrics


@dataclass(frozen=True)
class ShowsZero(Algorithm[Any]):
    """Trains, but shows the zero model to the metrics."""

    async def round(self, node: Node[Any]) -> None:
        await node.train(LocalSGD(epochs=1))

    def evaluated(self, node: Node[Any]) -> Tensor:
        return torch.zeros_like(node.params)


def test_metrics_evaluate_the_model_that_the_algorithm_shows(engine):
    row = run(toy(ShowsZero(), engine=engine)).rows[-1]
    assert row["loss"] == pytest.approx(np.log(3))
    assert row["consensus"] == 0.0


@dataclass(frozen=True)
class CertainAtTheEnd(Algorithm[Any]):
    """Knows nothing when it sends, and takes everything for the last class afterwards."""

    async def round(self, node: Node[Any]) -> None:
        await node.train(LocalSGD(epochs=1))
        node.params = torch.zeros_like(node.params)
        await node.exchange(x=node.params)
        node.params = torch.zeros_like(node.params)
        node.params[-1] = 9.0


@pytest.mark.parametrize(
    ("at", "loss"), [("exchange", np.log(3)), ("end", np.log(np.exp(9) + 2) - 9 / 3)]
)
def test_models_are_evaluated_at_the_exchange_or_at_the_end(engine, at, loss):
    changes = {"engine": engine, "evaluation": {"at": at}, "model": "logistic"}
    rows = run(toy(CertainAtTheEnd(), **changes)).rows
    assert rows[-1]["loss"] == pytest.approx(loss)


# What goes wrong


@dataclass(frozen=True)
class OnlyReceives(Algorithm[Any]):
    async def round(self, node: Node[Any]) -> None:
        await node.receive()


def test_waiting_for_a_message_that_no_node_sends_is_an_error(engine):
    said = "nodes 0, 1, 2, 3, 4 wait for messages that no node will send"
    with pytest.raises(PeerageError, match=said):
        run(toy(OnlyReceives(), engine=engine))


@dataclass(frozen=True)
class SendsTo(Algorithm[Any]):
    to: int

    async def round(self, node: Node[Any]) -> None:
        if node.id == 3:
            await node.send(self.to, x=node.params)


@pytest.mark.parametrize("to", [3, 5, -1])
def test_sending_to_oneself_or_to_no_node_is_an_error(engine, to):
    with pytest.raises(PeerageError, match=f"node 3 sent to {to}, which is not another node"):
        run(toy(SendsTo(to), engine=engine))


@dataclass(frozen=True)
class Misfit(Algorithm[Any]):
    double: bool

    async def round(self, node: Node[Any]) -> None:
        node.params = node.params.double() if self.double else node.params[:-1]


@pytest.mark.parametrize(
    ("double", "found"), [(False, r"shape \(66,\)"), (True, "type torch.float64")]
)
def test_parameters_that_do_not_fit_the_model_are_an_error(engine, double, found):
    with pytest.raises(
        PeerageError, match=f"gave node . parameters of .*{found}.* needs \\(67,\\)"
    ):
        run(toy(Misfit(double), engine=engine))


@dataclass(frozen=True)
class AwaitsAnythingElse(Algorithm[Any]):
    async def round(self, node: Node[Any]) -> None:
        await asyncio.sleep(0)


def test_awaiting_what_is_no_request_is_an_error(engine):
    with pytest.raises(PeerageError, match="awaited None, which is not a request"):
        run(toy(AwaitsAnythingElse(), engine=engine))


@dataclass(frozen=True)
class Buggy(Algorithm[Any]):
    async def round(self, node: Node[Any]) -> None:
        await node.exchange(x=node.params)
        if node.id == 2 and node.round == 1:
            raise ZeroDivisionError("an error of the author")


@pytest.mark.own_engine
def test_an_error_of_the_author_keeps_its_type_and_says_where():
    with pytest.raises(ZeroDivisionError, match="an error of the author") as caught:
        run(toy(Buggy(), engine={"name": "serial"}))
    assert caught.value.__notes__ == ["at node 2 in round 1"]


@pytest.mark.slow
@pytest.mark.own_engine
def test_an_error_in_a_worker_brings_the_traceback_of_the_worker():
    with pytest.raises(RuntimeError, match=r"ZeroDivisionError in worker [01]: an error") as caught:
        run(toy(Buggy(), engine={"name": "pool", "workers": 2}))
    [trace] = caught.value.__notes__
    assert "at node 2 in round 1" in trace
    assert 'raise ZeroDivisionError("an error of the author")' in trace


@dataclass(frozen=True)
class ChangesInPlace(Algorithm[Any]):
    whose: str

    async def round(self, node: Node[Any]) -> None:
        inbox = await node.exchange(x=node.params)
        if self.whose == "own":
            node.params += 1.0
        else:
            inbox.others()["x"][0][0] = 0.0


@pytest.mark.parametrize("whose", ["own", "others"])
def test_changing_a_sent_tensor_is_an_error(engine, whose):
    with pytest.raises(PeerageError, match=r"changed tensor 'x' of node . in place after sending"):
        run(toy(ChangesInPlace(whose), engine=engine))
