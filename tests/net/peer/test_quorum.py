"""Networks of peers that are cut, lied to, or kept waiting: who continues, and in which round."""

import asyncio
import json
import logging
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.memory import MemoryNetwork, MemoryTransport
from support.networking import BROKEN, QUICK, PeerHarness, network_of, run_harness

from peerage import DecAvg, FedAvg, LocalSGD
from peerage.engine.prepare import prepare
from peerage.errors import InputError
from peerage.net.peer.deadlines import LEAST
from peerage.net.peer.network import Timeouts, check_quorum, parse_quorum
from peerage.net.peer.peer import Peer
from peerage.net.peer.recorder import PAUSED
from peerage.net.peer.reported_status import Status
from peerage.net.peer.responder import Responder
from peerage.net.wire.header import Rejected, done
from peerage.records.rows import read_metrics
from peerage.runs.summary import missed_rounds
from peerage.testing import toy

FIVE = {"nodes": 5, "partition": "iid", "topology": "complete"}


def cut(harness: PeerHarness, *part: int) -> None:
    """Cut all links between these peers and the others."""
    everybody = range(len(harness.network.members))
    harness.memory.cut = {
        (a, b) for a in everybody for b in everybody if (a in part) != (b in part)
    }


async def in_state(harness: PeerHarness, me: int, start: str) -> None:
    async with asyncio.timeout(BROKEN):
        while not harness.peers[me].state.startswith(start):
            await asyncio.sleep(0.01)


def lines(caplog: pytest.LogCaptureFixture, text: str) -> list[str]:
    return [record.message for record in caplog.records if text in record.message]


def rounds_in(folder: Path) -> list[int]:
    return [row["round"] for row in read_metrics(folder / "metrics.jsonl")]


# Revoked certificates


@pytest.mark.slow
def test_revoked_members_are_neither_waited_for_nor_counted(tmp_path, caplog):
    """Two of four are no quorum; when the certificate of a third is revoked, they are."""

    async def act(harness: PeerHarness) -> None:
        await harness.until(0, 2)
        cut(harness, 0, 1)
        for me in range(4):
            await in_state(harness, me, "waiting for node-")
        harness.memory.revoked = frozenset({3})
        for me in (2, 3):
            await harness.kill(me)
            del harness.tasks[me]
        await harness.until(0, 9)
        await harness.until(1, 9)
        harness.memory.cut, harness.memory.revoked = set(), frozenset()
        harness.start(2)
        harness.start(3)

    four = toy(DecAvg(), rounds=60, nodes=4, partition="iid", topology="complete")
    peers = run_harness(four, tmp_path, act, timeouts=QUICK)
    text = "the certificate of node-3 was revoked; it is neither waited for nor counted"
    assert len(lines(caplog, text)) == 2  # one of each peer that went on
    assert {peer.state for peer in peers} == {"finished"}
    alone = [row for row in peers[0].rows if row["round"] in (5, 6)]
    assert [row["heard"] for row in alone] == [[1, 2], [1, 2]]  # node-2 is missing, node-3 is not
    assert peers[0].rows[-1]["heard"] == [3, 3]


# Cuts


@pytest.mark.slow
@pytest.mark.parametrize("rejoin", ["own", "neighbour"])
def test_a_minority_waits_and_returns_to_the_round_of_the_majority(rejoin, tmp_path, caplog):
    """No node learns: the model of a peer shows whose it continued with."""
    found: dict[str, Any] = {}

    async def act(harness: PeerHarness) -> None:
        for me in (0, 1):
            harness.peers[me].rejoin = rejoin
        await harness.until(0, 4)
        cut(harness, 0, 1)
        for me in (0, 1):
            await in_state(harness, me, "waiting for node-")
        found["rounds"] = [harness.peers[me].finished for me in (0, 1)]
        await harness.until(2, 12)
        found["paused"] = json.loads((tmp_path / "0" / PAUSED).read_text())
        assert [harness.peers[me].finished for me in (0, 1)] == found["rounds"]
        node = harness.peers[0].shard.members[0].node
        node.params = node.params + 100  # to be told from the others
        harness.memory.cut = set()
        await harness.until(0, 12)
        found["far"] = float(harness.peers[0].shard.members[0].node.params.max()) > 50

    caplog.set_level(logging.INFO, "peerage.peer")
    experiment = toy(DecAvg(LocalSGD(lr=0.0)), rounds=60, **FIVE)
    peers = run_harness(experiment, tmp_path, act)
    assert found["paused"] == {"state": "waiting for node-2, node-3, node-4"}
    assert [peer.finished for peer in peers] == [60] * 5
    assert [peer.state for peer in peers] == ["finished"] * 5
    assert len(lines(caplog, "in contact with 2 of 5 peers, 3 needed: round")) == 2
    assert len(lines(caplog, "fell behind: skipping from round")) >= 2
    for me in (0, 1):
        rows = read_metrics(tmp_path / str(me) / "metrics.jsonl")
        missed = set(range(61)) - {row["round"] for row in rows}
        assert peers[me].recorder.skipped == len(missed) >= 5
        assert sum(row.get("skipped", 0) for row in rows) == len(missed)
        assert all(len(row.get("out_of_contact", [])) <= 2 for row in rows)
    assert rounds_in(tmp_path / "2") == list(range(61))
    alone = [row.get("out_of_contact") for row in peers[2].rows]
    assert alone[12] == [0, 1]
    assert alone[1] is alone[60] is None  # all were there
    adopted = lines(caplog, "continuing with the median of the models of node-")
    assert bool(adopted) == (rejoin == "neighbour")


@pytest.mark.slow
def test_the_smaller_part_waits_for_the_larger_one_that_is_behind(tmp_path):
    """With quorum 2, two of five run ahead. The three do not follow, and miss no round."""

    async def act(harness: PeerHarness) -> None:
        held = asyncio.Event()
        real = Peer._run_round

        async def hold(self: Peer, round: int) -> None:
            if self.me in (2, 3, 4) and round >= 6:
                await held.wait()
            await real(self, round)

        for me in (2, 3, 4):
            harness.peers[me]._run_round = hold.__get__(harness.peers[me])
        await harness.until(0, 4)
        cut(harness, 0, 1)
        await harness.until(0, 20)
        harness.memory.cut = set()
        await asyncio.sleep(1.0)  # time to follow, if they did
        assert max(harness.peers[me].round for me in (2, 3, 4)) <= 6
        held.set()

    peers = run_harness(toy(DecAvg(), rounds=40, **FIVE), tmp_path, act, quorum=2)
    assert [peer.finished for peer in peers] == [40] * 5
    assert [peer.recorder.skipped for peer in peers] == [0] * 5
    assert all(rounds_in(tmp_path / str(me)) == list(range(41)) for me in range(5))


class Stub:
    """Another peer, which only answers in which round it is."""

    def __init__(self, settings_hash: str, round: int) -> None:
        self.status = Status(settings_hash, "one", round, "running", True)

    async def answer(self, question: bytes, identity: int) -> bytes:
        return json.dumps(asdict(self.status)).encode()


def resynchronised(
    rounds: list[int], later: list[int], folder: Path
) -> tuple[list[str], int, Peer]:
    """States of a peer in round 20 of five, and the round in which it goes on.

    The others are in `rounds`, and after a while in `later`.
    """

    async def main() -> tuple[list[str], int, Peer]:
        experiment = toy(DecAvg(), rounds=60, **FIVE)
        memory = MemoryNetwork()
        peer = Peer(
            network_of(experiment), 4, prepare(experiment), MemoryTransport(memory, 4), folder
        )
        folder.mkdir()
        others = [Stub(peer.tracker.settings_hash, round) for round in rounds]
        memory.receivers.update(enumerate(others))  # type: ignore[arg-type]
        peer.state = "running"
        peer.tracker.note_message(0, rounds[0])  # one neighbour is heard
        task = asyncio.create_task(peer.synchroniser.resynchronise(20))
        await asyncio.sleep(0.3)
        states = [peer.state]
        if not task.done():
            states.append(json.loads((folder / PAUSED).read_text())["state"])
        for other, round in zip(others, later, strict=True):
            other.status = replace(other.status, round=round)
        async with asyncio.timeout(BROKEN):
            next_round = await task
        assert not (folder / PAUSED).exists()
        return [*states, peer.state], next_round, peer

    return asyncio.run(main())


def test_a_restarted_peer_asks_all_others_for_their_round():
    """One has answered before the start. Of another, an old message has arrived."""

    async def main() -> int:
        experiment = toy(DecAvg(), rounds=60, **FIVE)
        memory = MemoryNetwork()
        peer = Peer(network_of(experiment), 4, prepare(experiment), MemoryTransport(memory, 4))
        stubs = enumerate(Stub(peer.tracker.settings_hash, 50) for _ in range(4))
        memory.receivers.update(stubs)  # type: ignore[arg-type]
        peer.tracker.awaited = False
        await peer.tracker.ask([0])
        peer.tracker.note_message(1, 21)
        return await peer.synchroniser.catch_up(20)

    assert asyncio.run(main()) == 50


@pytest.mark.parametrize(
    ("rounds", "later", "next_round"),
    [
        ([50, 50, 50, 20], [50, 50, 50, 20], 50),
        ([50, 50, 20, 20], [50, 50, 20, 20], 20),  # two of four others are not enough
        ([50, 20, 20, 20], [50, 20, 20, 20], 20),
        ([59, 59, 20, 20], [59, 59, 20, 20], 20),
        ([10, 10, 20, 20], [10, 10, 20, 20], 20),
        ([10, 10, 10, 20], [10, 10, 18, 20], 20),  # it waits for the others,
        ([10, 10, 10, 10], [50, 50, 50, 50], 50),  # and may be behind them then
    ],
)
def test_the_round_in_which_a_peer_goes_on(rounds, later, next_round, tmp_path, caplog):
    states, found, peer = resynchronised(rounds, later, tmp_path / "peer")
    waited = rounds != later
    assert states == (["waiting for the others to catch up"] * 2 if waited else ["running"]) + [
        "running"
    ]
    assert (found, peer.recorder.skipped) == (next_round, next_round - 20)
    assert len(lines(caplog, "ahead of the others: round 21 waits for node-0")) == waited
    assert len(lines(caplog, "fell behind: skipping from round 21 to 51")) == (next_round == 50)


@pytest.mark.slow
def test_clients_pause_without_their_hub(tmp_path, caplog):
    async def act(harness: PeerHarness) -> None:
        await harness.until(3, 5)
        await harness.kill(3)
        for me in range(3):
            await in_state(harness, me, "waiting for node-3")
        reached = [harness.peers[me].finished for me in range(3)]
        await asyncio.sleep(1.0)  # five searches
        assert [harness.peers[me].finished for me in range(3)] == reached
        harness.start(3)

    peers = run_harness(toy(FedAvg(), nodes=3, partition="iid", rounds=30), tmp_path, act)
    assert [peer.finished for peer in peers] == [30] * 4
    assert len(lines(caplog, "no contact with the hub: round ")) == 3


@pytest.mark.slow
def test_all_peers_restart_and_go_on_together(tmp_path):
    async def act(harness: PeerHarness) -> None:
        await harness.until(0, 5)
        for me in range(5):
            await harness.kill(me)
        reached = [harness.peers[me].finished for me in range(5)]
        for me in (0, 1):
            harness.start(me)
        await asyncio.sleep(3.0)  # longer than they would wait for a missing peer
        assert [harness.peers[me].state for me in (0, 1)] == ["waiting for others"] * 2
        assert [harness.peers[me].finished for me in (0, 1)] <= reached[:2]
        for me in (2, 3, 4):
            harness.start(me)

    peers = run_harness(toy(DecAvg(), rounds=20, **FIVE), tmp_path, act)  # they wait 300 s
    assert [peer.finished for peer in peers] == [20] * 5
    assert all(rounds_in(tmp_path / str(me)) == list(range(21)) for me in range(5))


# Lies


class Liar(MemoryTransport):
    """A member that sends no model, and tells everybody that it is in the last round."""

    last = 0

    async def send(self, header: Any, payload: Any, deadline: float) -> None:
        lie = {"run": header.run, "round": self.last, "sender": self.me, "sent": 0}
        await super().send(done(**lie, recipient=header.recipient), b"", deadline)


def lied_to(rounds: int, tmp_path: Path, monkeypatch: Any, **changes: Any) -> list[Peer]:
    """A network whose last peer lies about its round."""
    real = Responder.status
    nodes = changes["nodes"]

    def status(self: Responder, identity: int, incarnation: str) -> Status:
        honest = real(self, identity, incarnation)
        return replace(honest, round=rounds - 1) if self.tracker.me == nodes - 1 else honest

    async def act(harness: PeerHarness) -> None:
        harness.peers[nodes - 1].transport.__class__ = Liar
        Liar.last = rounds - 1
        async with asyncio.timeout(BROKEN):
            await asyncio.wait([harness.tasks[me] for me in range(nodes - 1)])
        await harness.kill(nodes - 1)
        del harness.tasks[nodes - 1], harness.peers[nodes - 1]

    monkeypatch.setattr(Responder, "status", status)
    return run_harness(toy(DecAvg(), rounds=rounds, **changes), tmp_path, act)


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [3, 4])
def test_one_peer_that_lies_cannot_make_the_others_skip_rounds(nodes, tmp_path, monkeypatch):
    settings = {"nodes": nodes, "partition": "iid", "topology": "complete"}
    peers = lied_to(30, tmp_path, monkeypatch, **settings)
    for peer in peers:
        assert (peer.finished, peer.state, peer.recorder.skipped) == (30, "finished", 0)
        assert rounds_in(tmp_path / str(peer.me)) == list(range(31))
        assert peer.counters["missing"] > 0  # the lies arrived


@pytest.mark.slow
def test_a_peer_that_was_made_to_skip_most_rounds_has_not_finished(tmp_path, monkeypatch):
    """With two peers, there is only one to ask."""
    settings = {"nodes": 2, "partition": "iid", "topology": "complete"}
    [peer] = lied_to(200, tmp_path, monkeypatch, **settings)
    assert peer.state == "skipped rounds"
    rows = read_metrics(tmp_path / "0" / "metrics.jsonl")
    assert peer.recorder.skipped == 200 - (len(rows) - 1) > 100
    assert missed_rounds(rows, peer.scheduled_rounds).endswith("-199")


# Silent and refused members


@pytest.mark.slow
def test_a_silent_member_gets_less_and_less_time(tmp_path, caplog):
    """It can be reached and answers, and sends nothing: the others wait less, and log it once."""

    async def act(harness: PeerHarness) -> None:
        async def send(header: Any, payload: Any, deadline: float) -> None:
            await asyncio.Event().wait()

        harness.peers[3].transport.send = send
        async with asyncio.timeout(BROKEN):
            await asyncio.wait([harness.tasks[me] for me in range(3)])
        await harness.kill(3)
        del harness.tasks[3], harness.peers[3]

    settings = {"nodes": 4, "partition": "iid", "topology": "complete", "rounds": 6}
    timeouts = Timeouts(start=300.0, message=4.0, idle=1.0)
    peers = run_harness(toy(DecAvg(), **settings), tmp_path, act, timeouts=timeouts)
    for peer in peers:
        assert peer.finished == 6
        assert max(row["heard"][0] for row in peer.rows[1:]) == 2
        assert peer.deadlines.seconds(3) <= LEAST
    found = Counter(line.partition(",")[0] for line in lines(caplog, "continuing round"))
    assert found["node-3 did not send a message in time"] == 3


class OtherExperiment:
    """A peer that stays, runs another experiment, and never ends a call with a message."""

    def accept(self, raw: bytes, identity: int) -> Any:
        raise Rejected("full", "perhaps later")  # so that the sender tries again and again

    async def answer(self, question: bytes, identity: int) -> bytes:
        return json.dumps(asdict(Status("another", "one", 0, "running", True))).encode()


@pytest.mark.slow
def test_a_refused_peer_is_never_waited_for(tmp_path, caplog):
    settings = {"nodes": 4, "partition": "iid", "topology": "complete", "rounds": 4}
    patient = replace(QUICK, message=10 * BROKEN)

    async def together() -> list[Peer]:
        harness = PeerHarness(toy(DecAvg(), **settings), tmp_path, timeouts=patient)
        harness.memory.receivers[3] = OtherExperiment()  # type: ignore[assignment]
        for me in range(3):
            harness.start(me)
        return await harness.finish()

    for peer in asyncio.run(together()):
        assert [row["heard"] for row in peer.rows[1:]] == [[2, 2]] * 4
        assert peer.tracker.view(0).size == 3
    assert len(lines(caplog, "ignoring node-3, which runs another experiment")) == 3


# Values


@pytest.mark.parametrize(("text", "quorum"), [("majority", "majority"), ("1", 1), ("4", 4)])
def test_quorums(text, quorum):
    assert parse_quorum(text) == quorum
    check_quorum(quorum, 4)


@pytest.mark.parametrize("text", ["0", "5", "-1", "2.0", "most", "", "9" * 5000])
def test_quorums_that_cannot_be(text):
    message = "quorum must be majority or 1 to 4, the number of peers, got"
    with pytest.raises(InputError, match=message):
        check_quorum(parse_quorum(text), 4)


@pytest.mark.parametrize("value", [True, 2.0, None, [2]])
def test_quorums_of_the_wrong_type(value):
    with pytest.raises(InputError, match="quorum must be majority or 1 to 4"):
        check_quorum(value, 4)


def test_a_model_is_not_changed_by_a_quorum(tmp_path):
    """A network that loses nothing ends with the same bits, whatever its quorum is."""

    async def act(harness: PeerHarness) -> None:
        pass

    settings = {"nodes": 3, "partition": "iid", "topology": "complete", "rounds": 3}
    ends = []
    for quorum in ("majority", 1, 3):
        folder = tmp_path / str(quorum)
        peers = run_harness(toy(DecAvg(), **settings), folder, act, quorum=quorum)
        ends.append([peer.shard.members[peer.me].node.params for peer in peers])
    for other in ends[1:]:
        assert all(torch.equal(a, b) for a, b in zip(ends[0], other, strict=True))
