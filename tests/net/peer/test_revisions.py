"""Members that join or leave a network, and rounds that are added: revisions of its file."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import torch
from support.memory import MemoryNetwork, MemoryTransport
from support.networking import PeerHarness, network_of, one_thread, run_harness, run_peers

import peerage as pg
from peerage import Algorithm, DecAvg, Experiment
from peerage.engine.prepare import prepare
from peerage.engine.world import World
from peerage.errors import InputError
from peerage.net.deploy.change import Change, change_network, parse_member
from peerage.net.peer import revisions
from peerage.net.peer.network import Member, Network
from peerage.net.peer.peer import Peer
from peerage.net.peer.peer_tracker import PeerTracker
from peerage.net.peer.revisions import NetworkFile, check_successor
from peerage.net.trust.certs import Authority
from peerage.net.trust.signature import REQUIRED, sign_network
from peerage.testing import blobs
from peerage.testing import toy as toy_problem


def toy(algorithm: Algorithm[Any], **changes: Any) -> Experiment:
    """A toy problem with any number of nodes."""
    return toy_problem(algorithm, **{"partition": "iid", **changes})


def linear(algorithm: Algorithm[Any], **settings: Any) -> Experiment:
    """The toy problem with a linear model, and with the default graph if none is given."""
    return Experiment(
        algorithm=algorithm, dataset=blobs(), model="logistic", partition="iid", **settings
    )


HUB_AT_3 = "star:number=3"
BEFORE = toy(DecAvg(), nodes=4, topology="complete", rounds=3)


def after(nodes: int = 4, rounds: int = 6, **changes: Any) -> Experiment:
    """The experiment of the second revision."""
    return toy(DecAvg(), nodes=nodes, topology="complete", rounds=rounds, **changes)


# The file


def test_a_network_file_without_a_revision_is_the_first(tmp_path: Path) -> None:
    network = network_of(BEFORE)
    (tmp_path / "experiment.toml").write_text(pg.Experiment(nodes=4).to_toml())
    file = tmp_path / "network.toml"
    file.write_text(network.to_toml("experiment.toml"))
    assert "revision" not in file.read_text()
    assert "revision" not in network.shared_settings
    assert Network.load(file).revision == 1
    again = replace(Network.load(file), revision=3, from_round=2)
    file.write_text(again.to_toml("experiment.toml"))
    assert Network.load(file) == again


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"revision": 0}, "revision must be at least 1, got 0"),
        ({"revision": 2}, "from_round is the first round of a revision above 1"),
        ({"from_round": 2}, "from_round is the first round of a revision above 1"),
        ({"revision": 2, "from_round": 4}, "from_round must lie in 1 to 3"),
    ],
)
def test_wrong_revisions_are_named(settings: dict[str, int], words: str) -> None:
    with pytest.raises(InputError, match=words):
        network_of(BEFORE, **settings)


def test_a_revision_may_change_members_rounds_and_topology() -> None:
    old = network_of(BEFORE)
    joined = after(5, faults={"join": "4@4", "leave": "0@5"})
    check_successor(old, network_of(joined, revision=2, from_round=4))
    ring = toy(DecAvg(), nodes=4, topology="ring", rounds=3)
    check_successor(old, network_of(ring, revision=7, from_round=1))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"run": "other"}, "run 'other' is not 'test'"),
        ({"revision": 1, "from_round": None}, "revision 1 is not above 1"),
        ({"wire": "bf16"}, "but wire is fp32 here and bf16 there"),
        ({"experiment": after(seed=9)}, "but seed is 0 here and 9 there"),
        ({"experiment": after(faults={"loss": 0.5})}, "but faults.loss is not set here"),
        ({"members": tuple(reversed(network_of(BEFORE).members))}, "their numbers must stay"),
    ],
)
def test_a_revision_that_changes_anything_else_is_refused(
    changes: dict[str, Any], words: str
) -> None:
    old = network_of(BEFORE)
    new = replace(old, **({"revision": 2, "from_round": 2} | changes))
    with pytest.raises(InputError, match=words):
        check_successor(old, new)


def test_the_hub_keeps_its_number() -> None:
    old = network_of(toy(pg.FedAvg(), nodes=3))
    members = (*old.members, Member("node-9", "127.0.0.1:9"))
    experiment = toy(pg.FedAvg(), nodes=4)
    new = replace(old, experiment=experiment, members=members, revision=2, from_round=2)
    with pytest.raises(InputError, match=r"node-9 instead of node-3.* topology to star:number=3"):
        check_successor(old, new)
    hub_stays = linear(pg.FedAvg(), nodes=4, rounds=3, topology=HUB_AT_3)
    old = replace(old, experiment=linear(pg.FedAvg(), nodes=3, rounds=3))
    check_successor(old, replace(new, experiment=hub_stays))


def test_a_new_member_waits_while_the_others_do_not_know_it() -> None:
    """They may not have the new network file yet; an old member that is rejected ends."""
    network = network_of(after(5, faults={"join": "4@4"}), revision=2, from_round=4)
    world = prepare(network.experiment)
    for me in (4, 0):
        transport = MemoryTransport(MemoryNetwork(), me)
        tracker = PeerTracker(network, me, world, transport, network.shared_settings)
        tracker.refusals |= dict.fromkeys((1, 2, 3), "'node-4' is not a member of this network")
        with nullcontext() if me == 4 else pytest.raises(InputError, match="reject this peer"):
            asyncio.run(tracker.wait_for_start(0.5))


# Peers that are started again


@pytest.mark.slow
def test_raised_rounds_continue_from_the_last_checkpoint(tmp_path: Path) -> None:
    run_peers(BEFORE, tmp_path)
    peers = run_peers(after(), tmp_path, revision=2, from_round=4)
    whole = run_peers(after())
    for peer, undisturbed in zip(peers, whole, strict=True):
        assert [row["round"] for row in peer.rows] == [4, 5, 6]
        assert peer.state == "finished"
        models = (each.shard.members[each.me].node.params for each in (peer, undisturbed))
        assert torch.equal(*models)
    with pytest.raises(InputError, match="revision 2 of the network file, and this is revision 1"):
        run_peers(BEFORE, tmp_path)


@pytest.mark.slow
def test_the_step_after_the_last_round_comes_after_the_new_last_one(tmp_path: Path) -> None:
    algorithm = pg.DPSGD()
    assert algorithm.has_final
    run_peers(toy(algorithm, rounds=2), tmp_path)
    longer = toy(algorithm, rounds=4)
    peers = run_peers(longer, tmp_path, revision=2, from_round=3)
    rows = [(row["round"], bool(row.get("final"))) for row in peers[0].rows]
    assert rows == [(3, False), (4, False), (4, True)]


@pytest.mark.slow
def test_a_fifth_peer_joins_a_finished_network_with_the_model_of_a_neighbour(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_peers(BEFORE, tmp_path)
    joined = after(5, faults={"join": "4@4"})
    with caplog.at_level("INFO", "peerage.peer"):
        peers = run_peers(joined, tmp_path, revision=2, from_round=4)
    assert [row["round"] for row in peers[4].rows] == [0, 4, 5, 6]
    assert all(row["heard"] == [4, 4] for peer in peers for row in peer.rows if row["round"])
    assert "continuing with the median of the models of node-0, node-1" in caplog.text
    assert [peer.state for peer in peers] == ["finished"] * 5


@pytest.mark.slow
def test_removed_peers_are_not_waited_for_and_not_counted(tmp_path: Path) -> None:
    """Two of four stay, which were no quorum before."""
    run_peers(BEFORE, tmp_path)
    left = after(faults={"leave": "1@4, 3@4"})

    async def together() -> list[Any]:
        harness = PeerHarness(left, tmp_path, revision=2, from_round=4)
        for me in (0, 2):
            harness.start(me)
        return await harness.finish()

    peers = asyncio.run(together())
    for peer in peers:
        assert [row["heard"] for row in peer.rows] == [[1, 1]] * 3
        assert peer.state == "finished"


@pytest.mark.slow
def test_peers_with_different_revisions_work_together(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    experiment = after(rounds=40)

    async def act(harness: PeerHarness) -> None:
        await harness.until(1, 5)
        await harness.kill(1)
        harness.network = replace(harness.network, revision=2, from_round=4)
        harness.start(1)

    peers = run_harness(experiment, tmp_path, act)
    assert all(not peer.tracker.mismatched_peers for peer in peers)
    assert "node-0 has revision 1 of the network file, this peer 2" in caplog.text
    assert peers[1].rows[-1]["heard"] == [3, 3]


@dataclass(frozen=True)
class CountsNodes(DecAvg):
    """An algorithm with an entry per node in its state that does not extend it."""

    def init(self, node: Any) -> torch.Tensor:
        return torch.zeros(node.num_nodes)


@pytest.mark.slow
def test_a_state_for_another_number_of_nodes_is_refused(tmp_path: Path) -> None:
    run_peers(toy(CountsNodes(), nodes=3, rounds=1), tmp_path)
    with pytest.raises(InputError, match=r"another number of nodes than 4.* extend_state"):
        run_peers(toy(CountsNodes(), nodes=4, rounds=2), tmp_path, revision=2, from_round=2)


ENTRY_PER_NODE = [(pg.DAC(peers=2), "complete"), (pg.FedAvg(), None), (pg.FedNL(), None)]


@pytest.mark.slow
@pytest.mark.parametrize(("algorithm", "graph"), ENTRY_PER_NODE)
def test_peers_join_where_there_is_a_hub_or_an_entry_per_node(
    algorithm: Algorithm[Any], graph: str | None, tmp_path: Path
) -> None:
    """All are started again, with one peer more; the hub keeps its number, 3."""
    before = linear(algorithm, nodes=3, rounds=2, **({"topology": graph} if graph else {}))
    run_peers(before, tmp_path)
    new = before.nodes_and_hub  # the number of the new peer
    settings = {"topology": graph or HUB_AT_3, "faults": {"join": f"{new}@3"}}
    joined = linear(algorithm, nodes=4, rounds=5, **settings)
    peers = run_peers(joined, tmp_path, revision=2, from_round=3)
    assert [peer.state for peer in peers] == ["finished"] * len(peers)
    assert peers[new].rows[-1]["round"] == 5
    if graph is None:
        assert peers[3].world.hub == 3
        assert peers[3].last_round == ([0, 1, 2, 4], [])
        assert peers[new].last_round == ([3], [])
    else:
        state = peers[0].shard.members[0].node.state
        assert state.value.shape == state.seen.shape == (4,)
        assert state.seen[:3].all()  # kept from the first two rounds
        assert peers[new].shard.members[new].node.state.seen[:3].any()


# Peers that run


class Announced:
    """A source of revisions that a test sets."""

    def __init__(self) -> None:
        self.new: Network | None = None

    def look(self, present: Network) -> Network | None:
        return self.new if self.new and self.new.revision > present.revision else None

    def prepare(self, network: Network) -> World:
        return prepare(network.experiment)


def run_revised(
    experiment: Experiment,
    home: Path,
    act: Callable[[PeerHarness, Announced], Awaitable[None]],
) -> dict[int, Peer]:
    """Start all peers, let `act` announce a revision, and run them to the end."""

    async def together() -> dict[int, Peer]:
        harness, source = PeerHarness(experiment, home), Announced()
        for me in range(len(harness.network.members)):
            harness.start(me, revisions=source)
        await act(harness, source)
        await harness.finish()
        return harness.peers

    with one_thread():
        return asyncio.run(together())


@pytest.mark.slow
def test_a_running_peer_keeps_its_state_when_it_takes_up_a_revision(tmp_path: Path) -> None:
    local = {"momentum": 0.9, "keep_optimizer": True}

    async def act(harness: PeerHarness, source: Announced) -> None:
        await harness.until(0, 2)
        source.new = network_of(after(rounds=40, local=local), revision=2, from_round=20)

    peers = run_revised(after(rounds=30, local=local), tmp_path, act)
    whole = run_peers(after(rounds=40, local=local))
    for me, undisturbed in enumerate(whole):
        models = (each.shard.members[me].node.params for each in (peers[me], undisturbed))
        assert torch.equal(*models)
        assert peers[me].network.revision == 2
        assert [row["round"] for row in peers[me].rows] == list(range(41))


@pytest.mark.slow
def test_a_peer_joins_a_running_network_and_another_one_leaves_it(tmp_path: Path) -> None:
    changed = after(5, rounds=90, faults={"join": "4@70", "leave": "3@70"})

    async def act(harness: PeerHarness, source: Announced) -> None:
        await harness.until(0, 2)
        source.new = network_of(changed, revision=2, from_round=70)
        while any(harness.peers[me].revisions.next is None for me in range(4)):
            await asyncio.sleep(0.001)
        harness.experiment, harness.network = changed, source.new
        harness.start(4)

    peers = run_revised(after(rounds=80), tmp_path, act)
    rounds = {me: [row["round"] for row in peer.rows] for me, peer in peers.items()}
    assert rounds[0] == rounds[1] == rounds[2] == list(range(91))
    assert rounds[3] == list(range(70))
    assert rounds[4] == list(range(70, 91))
    assert all(row["heard"] == [3, 3] for p in peers.values() for row in p.rows if row["round"])
    assert {peer.state for peer in peers.values()} == {"finished"}
    assert peers[4].scheduled_rounds == list(range(70, 91))


@pytest.mark.slow
@pytest.mark.parametrize(("algorithm", "graph"), ENTRY_PER_NODE)
def test_peers_join_a_running_network_with_a_hub_or_an_entry_per_node(
    algorithm: Algorithm[Any], graph: str | None, tmp_path: Path
) -> None:
    """No message is rejected, although some peers take up the revision before others."""
    before = linear(algorithm, nodes=3, rounds=60, **({"topology": graph} if graph else {}))
    new = before.nodes_and_hub
    settings = {"topology": graph or HUB_AT_3, "faults": {"join": f"{new}@50"}}
    changed = linear(algorithm, nodes=4, rounds=70, **settings)

    async def act(harness: PeerHarness, source: Announced) -> None:
        await harness.until(0, 2)
        source.new = network_of(changed, revision=2, from_round=50)
        while any(harness.peers[me].revisions.next is None for me in range(new)):
            await asyncio.sleep(0.001)
        harness.experiment, harness.network = changed, source.new
        harness.start(new)

    peers = run_revised(before, tmp_path, act)
    assert {peer.state for peer in peers.values()} == {"finished"}
    # A message that comes before its recipient has begun is delivered later.
    rejected = [{**peer.counters, "early": 0} for peer in peers.values()]
    assert rejected == [{"early": 0}] * (new + 1)
    assert [row["round"] for row in peers[new].rows] == list(range(50, 71))
    if graph is None:
        assert peers[3].last_round == ([0, 1, 2, 4], [])


@pytest.mark.slow
def test_peers_without_a_quorum_continue_when_the_others_are_removed(tmp_path: Path) -> None:
    left = after(rounds=60, faults={"leave": "2@3, 3@3"})

    async def act(harness: PeerHarness, source: Announced) -> None:
        await harness.until(0, 5)
        await harness.kill(2)
        await harness.kill(3)
        while not all(harness.peers[me].state.startswith("waiting for node-2") for me in (0, 1)):
            await asyncio.sleep(0.005)
        del harness.tasks[2], harness.tasks[3]
        source.new = network_of(left, revision=2, from_round=3)

    peers = run_revised(after(rounds=50), tmp_path, act)
    for me in (0, 1):
        assert peers[me].rows[-1]["round"] == 60
        assert peers[me].rows[-1]["heard"] == [1, 1]
        assert peers[me].state == "finished"


@pytest.mark.slow
def test_a_revision_that_cannot_be_used_is_logged_and_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def act(harness: PeerHarness, source: Announced) -> None:
        def fail(network: Network) -> World:
            raise InputError("the data are gone")

        source.prepare = fail  # type: ignore[method-assign]
        await harness.until(0, 2)
        source.new = network_of(after(rounds=40), revision=2, from_round=5)
        while harness.peers[0].revisions.next is None and harness.peers[0].finished < 20:
            await asyncio.sleep(0.001)
        source.new = None

    peers = run_revised(after(rounds=30), tmp_path, act)
    assert "cannot use revision 2 of the network file: the data are gone" in caplog.text
    assert all(peer.rows[-1]["round"] == 30 for peer in peers.values())


def test_a_changed_file_is_read_again_only_if_it_is_valid(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority.create(tmp_path / "certs", "tests")
    (tmp_path / "certs" / REQUIRED).touch()
    experiment = pg.Experiment(nodes=4, topology="ring", rounds=5)
    (tmp_path / "experiment.toml").write_text(experiment.to_toml())
    path = tmp_path / "network.toml"
    first = network_of(experiment)
    path.write_text(first.to_toml("experiment.toml"))
    sign_network(authority, path)

    def never(network: Network) -> World:
        raise AssertionError

    file = NetworkFile(path, tmp_path / "certs", lambda: Network.load(path), never)
    assert file.look(first) is None
    wanted = Change(4, [parse_member("node-4=127.0.0.1:9")], ["node-1"], rounds=8)
    changed = change_network(path, wanted, certs=authority.folder)
    assert file.look(first) is None  # other files have changed
    changed.network.rename(path)
    assert file.look(first) is None  # not its signature yet
    assert file.look(first) is None
    assert not caplog.text  # it may be on its way
    monkeypatch.setattr(revisions, "monotonic", lambda: monotonic() + revisions.COPY_TIME)
    assert file.look(first) is None
    assert "has changed since it was signed" in caplog.text
    caplog.clear()
    assert file.look(first) is None
    assert not caplog.text  # logged once
    assert changed.signature is not None
    changed.signature.rename(path.with_suffix(".sig"))
    new = file.look(first)
    assert new is not None
    assert (new.revision, new.from_round, new.experiment.rounds) == (2, 4, 8)
    assert new.experiment.faults.join == "4@4"
    assert new.experiment.faults.leave == "1@4"
    path.touch()
    assert file.look(new) is None
