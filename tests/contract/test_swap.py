"""Nodes that choose privately whom they send to, and nodes that learn who was reached."""

from dataclasses import dataclass
from typing import Any, ClassVar

import networkx as nx
import pytest
import torch
from support.networking import InMemory, OverSockets, run_peers

import peerage as pg
from peerage import Algorithm, DecAvg, Experiment, Node
from peerage.errors import PeerageError
from peerage.records.rows import Row
from peerage.testing import toy


@dataclass(frozen=True)
class Choosy(DecAvg):
    """Epidemic learning: each node sends its model to some others, which only it has drawn."""

    sends: int = 2
    swaps: int = 1
    near: bool = False  # whether partners are neighbours only

    async def round(self, node: Node[None]) -> None:
        await node.train(self.local)
        for _ in range(self.swaps):
            among = [j for j in range(node.num_nodes) if j != node.id]
            if self.near:
                among = list(node.neighbours)
            order = torch.randperm(len(among), generator=node.rng).tolist()
            model = {"x": node.params, "b": node.buffers}
            chosen = {among[i]: model for i in order[: self.sends]}
            inbox = await node.swap(chosen, among=among if self.near else None)
            node.note(received=len(inbox), senders=sum(2**j for j in inbox.senders))
            node.params = torch.stack([node.params, *inbox["x"]]).mean(0)


def received(rows: list[Row]) -> list[list[float]]:
    """How many messages each node received, round by round."""
    found: dict[int, list[float]] = {}
    for row in rows:
        if row["scope"] == "node" and "notes" in row:
            found.setdefault(row["round"], []).append(row["notes"]["received"])
    return list(found.values())


def check_peers(experiment: Experiment, **options: Any) -> None:
    """Real peers end with the bits of the simulation."""
    result = pg.run(experiment)
    for peer, wanted in zip(run_peers(experiment, **options), result.parameters, strict=True):
        assert torch.equal(peer.shard.members[peer.me].node.params, wanted)
        assert not peer.counters


def test_every_chosen_node_receives_the_message(engine):
    result = pg.run(toy(Choosy(sends=2), engine=engine))
    counts = received(result.rows)
    assert [sum(each) for each in counts] == [10, 10, 10]
    assert len({tuple(each) for each in counts}) > 1  # the choices are private and differ


def test_a_node_that_nobody_chose_receives_nothing(engine):
    result = pg.run(toy(Choosy(sends=0), engine=engine))
    assert received(result.rows) == [[0.0] * 5] * 3
    assert result.rows[-1]["bytes_total"] == 0  # the markers have no payload


def test_only_payloads_count_as_traffic():
    result = pg.run(toy(Choosy(sends=1)))
    size = 4 * result.parameters[0].numel()
    assert result.rows[-1]["bytes_total"] == 3 * 5 * size


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"algorithm": Choosy(swaps=3)},
        {"algorithm": Choosy(near=True, sends=1)},
        {"algorithm": Choosy(near=True), "topology": "dynamic-regular:k=2"},
        {"faults": {"loss": 0.3}},
        {"faults": {"links": 0.5}},
        {"faults": {"nodes": 0.6}},
        {"faults": {"join": "2@3", "leave": "0@3"}},
        {"noise": {"sigma": 0.01, "clip": 5.0}},
    ],
    ids=str,
)
def test_all_engines_and_real_peers_agree(changes, engine):
    settings = {"algorithm": Choosy(), "engine": engine, **changes}
    check_peers(toy(**settings), transports=InMemory())


@pytest.mark.slow
def test_real_peers_agree_over_sockets(tmp_path):
    experiment = toy(Choosy(), faults={"loss": 0.3})
    check_peers(experiment, transports=OverSockets(tmp_path))


def test_simulated_loss_loses_payloads_and_stops_nobody():
    result = pg.run(toy(Choosy(sends=4), faults={"loss": 0.5}, rounds=6))
    total = sum(map(sum, received(result.rows)))
    assert 0 < total < 6 * 20


@dataclass(frozen=True)
class Mixed(DecAvg):
    """A swap between an exchange and messages to one node."""

    async def round(self, node: Node[None]) -> None:
        await node.train(self.local)
        inbox = await node.exchange(x=node.params)
        following = (node.id + 1) % node.num_nodes
        swapped = await node.swap({following: {"x": 2 * node.params}})
        await node.send(following, x=3 * node.params)
        last = await node.receive((node.id - 1) % node.num_nodes)
        node.params = inbox.mean("x", inbox.uniform_weights())
        assert torch.equal(3 * swapped["x"][0], 2 * last["x"][0])
        node.params = (node.params + swapped["x"][0] / 2) / 2


def test_swaps_mix_with_messages_to_known_nodes(engine):
    check_peers(toy(Mixed(), rounds=2, engine=engine), transports=InMemory())


@dataclass(frozen=True)
class Deadlock(DecAvg):
    async def round(self, node: Node[None]) -> None:
        if node.id == 0:
            await node.receive(1)
        elif node.id == 1:
            await node.swap({0: {"x": node.params}}, among=[2])


@dataclass(frozen=True)
class Waiting(DecAvg):
    """Node 0 waits for node 1, which waits in a swap for node 0."""

    async def round(self, node: Node[None]) -> None:
        if node.id == 0:
            await node.receive(1)
            await node.receive(1)
        elif node.id == 1:
            await node.swap({}, among=[0])


def test_a_recipient_outside_among_is_refused():
    with pytest.raises(PeerageError, match="node 1 swaps with node 0, which is not in `among`"):
        pg.run(toy(Deadlock()))


def test_a_swap_that_cannot_end_is_named():
    with pytest.raises(PeerageError, match="nodes 0, 1 wait for messages that no node will send"):
        pg.run(toy(Waiting()))


# Who was reached


@dataclass(frozen=True)
class Counting(DecAvg):
    """Records which neighbours acknowledge the message of the round before."""

    acknowledge: ClassVar[bool] = True

    async def round(self, node: Node[None]) -> None:
        await node.train(self.local)
        inbox = await node.exchange(x=node.params, b=node.buffers)
        node.note(
            reached=sum(2**j for j in node.reached),
            received=sum(2**j for j in inbox.others().senders),
        )
        # So that digests differ if acknowledgements do.
        node.params = inbox.mean("x", inbox.uniform_weights()) + 1e-3 * len(node.reached)


def notes(rows: list[Row], name: str) -> dict[tuple[int, int], set[int]]:
    """{(round, node): the nodes in its note}."""
    return {
        (row["round"], row["node"]): {j for j in range(5) if int(row["notes"][name]) >> j & 1}
        for row in rows
        if row["scope"] == "node" and "notes" in row
    }


def test_without_loss_all_neighbours_are_reached_after_the_first_round(engine):
    rows = pg.run(toy(Counting(), engine=engine)).rows
    for (round, node), reached in notes(rows, "reached").items():
        assert reached == (set() if round == 1 else {(node - 1) % 5, (node + 1) % 5})


def test_only_who_received_and_answered_is_reached(engine):
    experiment = toy(Counting(), engine=engine, faults={"loss": 0.4}, rounds=8)
    rows = pg.run(experiment).rows
    reached, inboxes = notes(rows, "reached"), notes(rows, "received")
    assert any(inboxes[round - 1, j] ^ {node} for (round, node), js in reached.items() for j in js)
    for (round, node), found in reached.items():
        answered = {j for j in inboxes[round, node] if node in inboxes.get((round - 1, j), ())}
        assert found == answered


@pytest.mark.parametrize(
    "changes",
    [{}, {"faults": {"loss": 0.4}}, {"faults": {"join": "2@3", "leave": "0@4"}}],
    ids=str,
)
def test_real_peers_acknowledge_as_the_simulator_does(changes, engine):
    check_peers(toy(Counting(), rounds=5, engine=engine, **changes), transports=InMemory())


def test_acknowledgements_survive_an_interruption(tmp_path):
    experiment = toy(Counting(), rounds=4, faults={"loss": 0.3})
    whole = pg.run(experiment)

    def stop(row: Row) -> None:
        if row["round"] == 3:
            raise KeyboardInterrupt

    with pytest.raises(PeerageError, match="interrupted"):
        pg.run(experiment, tmp_path / "run", checkpoint_every=1, watch=stop)
    assert pg.resume(tmp_path / "run", experiment=experiment).digest == whole.digest


@dataclass(frozen=True)
class Unasked(DecAvg):
    async def round(self, node: Node[None]) -> None:
        node.note(reached=len(node.reached))


def test_an_algorithm_must_ask_for_acknowledgements():
    with pytest.raises(PeerageError, match="set acknowledge"):
        pg.run(toy(Unasked()))


# Other rounds


@dataclass(frozen=True)
class Replay(Algorithm[None]):
    """Records what each node drew from the coin of the first and of the next round."""

    async def round(self, node: Node[None]) -> None:
        following = node.graph_at(node.round + 1)[node.id]
        node.note(
            degree=len(node.neighbours),
            first=torch.rand(1, generator=node.coin_at(0)),
            coin=torch.rand(1, generator=node.coin),
            following=sum(2**j for j in following),
            near=sum(2**j for j in node.neighbours),
        )


def test_a_node_can_read_coins_and_graphs_of_other_rounds(engine):
    experiment = toy(
        Replay(), engine=engine, topology="dynamic-regular:k=2", faults={"join": "2@3"}
    )
    found: dict[tuple[int, int], dict[str, float]] = {
        (row["round"], row["node"]): row["notes"]
        for row in pg.run(experiment).rows
        if row["scope"] == "node" and "notes" in row
    }
    for (round, node), note in found.items():
        assert note["first"] == found[1, 0]["coin"]
        if (round + 1, node) in found:
            assert note["following"] == found[round + 1, node]["near"]
    assert (1, 2) not in found
    assert (3, 2) in found


@dataclass(frozen=True)
class Early(Algorithm[None]):
    async def round(self, node: Node[None]) -> None:
        node.graph_at(-1)


def test_a_graph_before_the_first_round_is_refused():
    with pytest.raises(PeerageError, match="no graph of round -1"):
        pg.run(toy(Early(), topology=nx.path_graph(5)))
