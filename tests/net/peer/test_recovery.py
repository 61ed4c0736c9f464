"""Messages that pass all checks and make training fail: who is banned, and what is undone."""

import asyncio
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from support.networking import BROKEN, PeerHarness, run_harness, run_peers
from support.poisoners import poison

from peerage import Algorithm, DecAvg, FedAvg, LocalSGD, Node
from peerage.algorithms.dec_fedavg import DecFedAvg
from peerage.errors import Diverged
from peerage.net.peer.peer import Peer
from peerage.privacy import Noise
from peerage.records import checkpoint
from peerage.records.rows import read_metrics
from peerage.testing import toy

pytestmark = pytest.mark.slow  # repeating rounds takes time

HUGE = {"x": 3e38}
SETTINGS = {"nodes": 4, "topology": "complete", "partition": "iid", "rounds": 6}


def banned(peers: list[Peer]) -> list[set[int]]:
    return [peer.tracker.banned_peers for peer in peers]


def finite(peer: Peer) -> bool:
    return bool(torch.isfinite(peer.shard.members[peer.me].node.params).all())


def test_one_huge_message_ends_nobody():
    calm = run_peers(toy(DecAvg(), **SETTINGS))[0].rows[-1]["accuracy"]
    with poison({"3": {"1": HUGE}}):
        peers = run_peers(toy(DecAvg(), **SETTINGS))
    assert banned(peers[:3]) == [{3}] * 3
    for peer in peers[:3]:
        assert peer.finished == 6
        assert peer.counters["poisoned round"] == 1
        # Round 2 was undone; its messages are all that is lost.
        assert [row["round"] for row in peer.rows] == [0, 1, 3, 4, 5, 6]
        assert [row["heard"] for row in peer.rows[2:]] == [[2, 2]] * 4
        assert peer.recorder.skipped == sum(row.get("skipped", 0) for row in peer.rows) == 1
        assert peer.state == "finished"
        assert peer.rows[-1]["accuracy"] >= calm - 0.2
        assert finite(peer)


def test_bytes_of_a_round_that_was_undone_are_in_the_next_row():
    experiment = toy(DecAvg(), **SETTINGS)
    calm = sum(row["bytes"] for row in run_peers(experiment)[0].rows)
    with poison({"3": {"1": HUGE}}):
        peer = run_peers(experiment)[0]
    assert peer.rows[2]["bytes"] > peer.rows[1]["bytes"]  # of rounds 2 and 3
    size = peer.rows[1]["bytes"] // 3
    lost = peer.counters["refused sender"]  # node 3 does not ban anybody, and gets all messages
    assert sum(row["bytes"] for row in peer.rows) == calm - lost * size
    assert sum(row["wire_bytes"] for row in peer.rows) == peer.transport.counters["bytes_sent"]


def test_nobody_is_framed():
    """Node 3 poisons, behaves, and poisons again: only it is banned, and at once."""
    with poison({"3": {"1": HUGE, "4": HUGE}, "2": {}}):
        peers = run_peers(toy(DecAvg(), **SETTINGS | {"rounds": 8}))
    assert banned(peers) == [{3}] * 3 + [set()]


def test_two_poisoners_of_one_round_are_both_found():
    with poison({"3": {"1": HUGE}, "2": {"1": {"x": 2e38}}}):
        peers = run_peers(toy(DecAvg(), **SETTINGS))
    assert banned(peers)[:2] == [{2, 3}] * 2
    assert [peer.counters["poisoned round"] for peer in peers[:2]] == [1, 1]


@dataclass(frozen=True)
class Product(Algorithm[None]):
    """Node 0 multiplies what the others send, once per round; only two factors overflow."""

    local: LocalSGD = LocalSGD()

    async def round(self, node: Node[None]) -> None:
        await node.train(self.local)
        large = torch.full_like(node.params, 1e30 if node.round == 2 else 1.0)
        if node.id:
            await node.send(0, x=large)
            await node.receive(0)
        else:
            factor = torch.ones_like(node.params)
            for x in (await node.receive((1, 2, 3)))["x"]:
                factor = factor * x
            node.params = node.params + factor * 1e-30


def test_messages_that_fail_only_in_combination_ban_nobody(caplog):
    peers = run_peers(toy(Product(), **SETTINGS))
    assert banned(peers) == [set()] * 4
    assert peers[0].counters["poisoned round"] == 1
    assert [row["round"] for row in peers[0].rows] in ([0, 1, 2, 4, 5, 6], [0, 1, 2, 3, 5, 6])
    assert "no message made it fail alone, so all are left out and nobody is banned" in caplog.text


def test_own_training_that_diverges_is_still_an_error():
    with pytest.raises(Diverged, match="became NaN or infinite in round 1; lower --lr"):
        run_peers(toy(DecAvg(LocalSGD(lr=1e30)), **SETTINGS))


@dataclass(frozen=True)
class TooFast(DecAvg):
    """The learning rate is too high from the third round on."""

    async def round(self, node: Node[None]) -> None:
        lr = 1e30 if node.round >= 2 else 0.1
        await node.train(LocalSGD(lr=lr))
        inbox = await node.exchange(x=node.params, b=node.buffers)
        node.params = inbox.mean("x", inbox.uniform_weights())


def test_own_training_that_diverges_later_blames_nobody(caplog):
    with pytest.raises(Diverged, match="became NaN or infinite in round 3; lower --lr"):
        run_peers(toy(TooFast(), **SETTINGS))
    assert "ignoring" not in caplog.text


def test_the_last_round_is_checked_too():
    with poison({"3": {"5": HUGE}}):
        peers = run_peers(toy(DecAvg(), **SETTINGS))
    assert banned(peers[:3]) == [{3}] * 3
    for peer in peers[:3]:
        assert peer.rows[-1]["round"] == 5
        assert peer.shard.members[peer.me].node.params.abs().max() < 1e3


def test_a_hub_does_not_pass_on_a_poisoned_model():
    with poison({"3": {"1": HUGE}}):
        peers = run_peers(toy(FedAvg(), **SETTINGS))
    hub = peers[-1]
    assert banned(peers) == [set()] * 4 + [{3}]
    assert hub.rows[-1]["round"] == 6
    assert hub.rows[-1]["accuracy"] >= hub.rows[1]["accuracy"]


def test_an_aggregator_does_not_pass_on_a_poisoned_model():
    """Its recipients would ban it, although it is honest."""
    with poison({"3": {"all": HUGE}}):
        peers = run_peers(toy(DecFedAvg(senders=3), **SETTINGS | {"rounds": 8}))
    assert all(found <= {3} for found in banned(peers))
    assert {3} in banned(peers[:3])
    assert all(finite(peer) for peer in peers[:3])


def test_messages_that_were_released_count_although_the_round_is_undone(tmp_path):
    noisy = Noise(sigma=1e-3, clip=1.0)
    with poison({"3": {"1": HUGE}}):
        peers = run_peers(toy(DecAvg(), noise=noisy, **SETTINGS), tmp_path)
    for peer in peers[:3]:
        assert peer.tracker.banned_peers == {3}
        assert peer.shard.released() == {peer.me: 6}


def test_files_of_a_round_that_was_undone_are_gone(tmp_path):
    with poison({"3": {"1": HUGE}}):
        peers = run_peers(toy(DecAvg(), **SETTINGS), tmp_path)
    for me in range(3):
        assert read_metrics(tmp_path / str(me) / "metrics.jsonl") == peers[me].rows
        rounds = list(map(checkpoint.round_of, checkpoint.finished(tmp_path / str(me))))
        assert rounds == [5, 6]
        assert not any(a > b for a, b in pairwise(rounds))


def test_a_peer_that_was_killed_with_a_poisoned_checkpoint_goes_back(tmp_path, caplog):
    """The messages are gone with the process, but the checkpoint before is still there."""
    experiment = toy(DecAvg(), **SETTINGS | {"rounds": 30})

    async def kill_after_poison(harness: PeerHarness) -> None:
        killed = harness.peers[0]
        save = killed.recorder.save_checkpoint

        def save_and_stop(round: int, *more: bool) -> None:
            save(round, *more)
            if round == 4:
                raise RuntimeError("killed")

        killed.recorder.save_checkpoint = save_and_stop  # type: ignore[method-assign]
        await asyncio.wait([harness.tasks[0]], timeout=BROKEN)
        assert str(harness.tasks[0].exception()) == "killed"
        await harness.kill(0)
        harness.start(0)

    with poison({"3": {"3": HUGE}}):
        peers = run_harness(experiment, tmp_path, kill_after_poison)
    assert "going back to round-000003, as training from the newest fails" in caplog.text
    assert peers[0].tracker.banned_peers == set()
    assert peers[0].rows[-1]["round"] == 30
    assert finite(peers[0])
    rounds = [row["round"] for row in read_metrics(tmp_path / "0" / "metrics.jsonl")]
    assert 4 not in rounds
