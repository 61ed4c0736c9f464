"""Peers in one process, over a network in memory: the same mathematics as the simulator."""

import asyncio
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.memory import MemoryNetwork, MemoryTransport
from support.networking import (
    BROKEN,
    QUICK,
    OverSockets,
    PeerHarness,
    network_of,
    run_harness,
    run_peers,
)
from torch import Tensor

import peerage as pg
from peerage import ALGORITHMS, DESA, EL, DecAvg, DecHW, Experiment, FedAvg, LocalSGD
from peerage.data import Dataset
from peerage.engine.prepare import prepare
from peerage.engine.world import World
from peerage.errors import DiskError, InputError
from peerage.net.peer.account import ACCOUNT
from peerage.net.peer.peer import Peer
from peerage.net.peer.private_data import prepare_own
from peerage.net.peer.secret_noise import SecretNoise
from peerage.net.wire.header import Rejected
from peerage.records import checkpoint
from peerage.records.rows import read_metrics
from peerage.testing import blobs, toy, unequal_parts


def models(peers: list[Peer]) -> list[Tensor]:
    kept = [peer.shard.members[peer.me].node.params for peer in peers]
    return [params for params in kept if params.numel()]


def simulated(experiment: Experiment) -> list[Tensor]:
    """The models after the last round, or after the final step if there is one."""
    world = prepare(experiment)
    ended = pg.run(experiment).parameters
    return [ended[node] for node in dict.fromkeys(map(world.model_owner, range(len(ended))))]


EVERY = {name: cls() for name, cls in ALGORITHMS.items()} | {
    "desa": DESA(ipc=2, iterations=3),
    "fedavg chosen": FedAvg(clients=2),
    "dechw star": DecHW(theta=2),
    "el local": EL(mode="local", sends=2),
}


@pytest.mark.parametrize("name", EVERY)
def test_a_network_ends_with_the_bits_of_the_simulator(name, monkeypatch, tmp_path):
    monkeypatch.setenv("PEERAGE_DATA", str(tmp_path))
    experiment = toy(EVERY[name])
    peers = run_peers(experiment)
    for found, wanted in zip(models(peers), simulated(experiment), strict=True):
        assert torch.equal(found, wanted)
    assert [dict(peer.counters) for peer in peers] == [{}] * len(peers)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALGORITHMS)
def test_eight_peers_over_real_connections_end_with_the_same_bits(name, monkeypatch, tmp_path):
    monkeypatch.setenv("PEERAGE_DATA", str(tmp_path))
    experiment = toy(EVERY[name], nodes=8, partition="iid", rounds=2)

    def ready(me: int) -> World:  # as real peers do, with their own data only
        return prepare(experiment).restrict_to_node(me)

    peers = run_peers(experiment, transports=OverSockets(tmp_path), worlds=ready)
    for found, wanted in zip(models(peers), simulated(experiment), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize(
    "changes",
    [
        {"faults": {"loss": 0.3}},
        {"faults": {"links": 0.5}},
        {"faults": {"nodes": 0.6}},
        {"faults": {"leave": "2@2"}},
        {"faults": {"join": "2@3"}},
        {"topology": "star"},
        {"topology": "dynamic-regular:k=2"},
        {"topology": "dynamic-regular:k=2", "faults": {"join": "2@3", "leave": "0@3"}},
        {"init": {"gain": "estimated"}},
        {"noise": {"sigma": 0.1, "clip": 1.0}},
    ],
    ids=str,
)
def test_faults_graphs_gains_and_noise_are_those_of_the_simulator(changes):
    experiment = toy(DecAvg(), **changes)
    result = pg.run(experiment)
    for peer, wanted in zip(run_peers(experiment), result.parameters, strict=True):
        found = peer.shard.members[peer.me].node.params
        assert torch.equal(found, wanted)


def test_bytes_and_accuracies_are_those_of_the_simulator():
    experiment = toy(DecHW())
    result = pg.run(experiment)
    peers = run_peers(experiment)
    for row in result.rows:
        if row["scope"] == "network":
            own_rows = [peer.rows[row["round"]] for peer in peers]
            assert sum(one["bytes"] for one in own_rows) == row["bytes"]
            accuracy = sum(one["accuracy"] for one in own_rows) / len(own_rows)
            assert accuracy == pytest.approx(row["accuracy"])


def test_where_the_time_of_a_round_went():
    for peer in run_peers(toy(DecHW())):
        for row in peer.rows[1:]:
            total = row["seconds"]["total"]
            phases = {name: value for name, value in row["seconds"].items() if name != "total"}
            assert {phases[name] > 0 for name in ("train", "curvature", "wait", "evaluate")} == {
                True
            }
            assert sum(phases.values()) <= total


@pytest.mark.slow
def test_bytes_that_leave_after_the_last_row_are_in_it(tmp_path, monkeypatch):
    """A row is written as soon as a round is over, and messages of it may still be on their way."""
    real = MemoryTransport.send

    async def send(self, header, payload, seconds):
        await asyncio.sleep(0.05)
        return await real(self, header, payload, seconds)

    monkeypatch.setattr(MemoryTransport, "send", send)
    for peer in run_peers(toy(DecAvg(), rounds=2), tmp_path):
        assert peer.rows == read_metrics(tmp_path / str(peer.me) / "metrics.jsonl")
        counted = sum(row["wire_bytes"] for row in peer.rows)
        assert counted == peer.transport.counters["bytes_sent"] > 0


# Data of one's own


def part_of(me: int) -> Dataset:
    """The data of one node of the toy experiment."""
    whole = blobs()
    part = list(unequal_parts()[me])
    return replace(whole, train_x=whole.train_x[part], train_y=whole.train_y[part])


@pytest.mark.parametrize("algorithm", [DecHW(), FedAvg()])
def test_peers_with_data_of_their_own_end_with_the_bits_of_a_simulation(algorithm):
    experiment = toy(algorithm)
    hub = len(unequal_parts())

    def ready(me: int) -> World:
        data = part_of(0 if me == hub else me)
        if me == hub:  # it has none, and only the test set counts
            return prepare(experiment)
        return prepare_own(experiment, me, data)

    peers = run_peers(experiment, worlds=ready)
    for found, wanted in zip(models(peers), simulated(experiment), strict=True):
        assert torch.equal(found, wanted)


def test_a_peer_whose_data_lacks_a_class_needs_to_know_how_many_there_are():
    whole = blobs()
    few = pg.in_memory(whole.train_x[:20], whole.train_y[:20] % 2, whole.test_x, whole.test_y % 2)
    experiment = toy(DecHW())
    assert prepare_own(experiment, 1, few).label_counts.shape == (5, 2)
    world = prepare_own(experiment, 1, few, classes=3)
    assert world.label_counts.shape == (5, 3)
    assert world.setup["examples"] == [0, 20, 0, 0, 0]
    with pytest.raises(InputError, match="has 2 classes, but --classes is 1"):
        prepare_own(experiment, 1, few, classes=1)


# Crashes


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [DecAvg(), DecHW(), FedAvg()])
def test_a_peer_that_was_killed_comes_back(algorithm, tmp_path):
    async def act(harness: PeerHarness) -> None:
        await harness.until(1, 6)
        await harness.kill(1)
        await harness.until(0, 12)  # the others go on
        harness.start(1)

    peers = run_harness(toy(algorithm, rounds=40), tmp_path, act)
    assert [peer.rows[-1]["round"] for peer in peers] == [40] * len(peers)
    rounds = [row["round"] for row in peers[1].rows]
    assert rounds[0] >= 12  # it did not run the rounds that it had missed
    assert rounds == list(range(rounds[0], 41))
    assert peers[1].rows[-1]["heard"][0] > 0


@pytest.mark.slow
@pytest.mark.parametrize("rejoin", ["own", "neighbour"])
def test_a_peer_that_lost_its_disk_can_take_a_neighbours_model(rejoin, tmp_path):
    found = {}

    async def act(harness: PeerHarness) -> None:
        await harness.until(1, 6)
        await harness.kill(1)
        shutil.rmtree(tmp_path / "1")
        await harness.until(0, 15)
        harness.start(1, rejoin=rejoin)
        found["start"] = harness.peers[1].shard.members[1].node.params
        await harness.until(1, 15)
        found["model"] = harness.peers[1].shard.members[1].node.params

    peers = run_harness(toy(DecAvg(), rounds=60, local=LocalSGD(lr=0.0)), tmp_path, act)
    # No node learns: after its return, the model is its own start, or the consensus of the others.
    other = peers[0].shard.members[0].node.params
    far = torch.dist(found["start"], other)
    near = torch.dist(found["model"], other)
    assert (near < 0.3 * far) == (rejoin == "neighbour")
    assert peers[1].rows[-1]["round"] == 60


def test_pieces_of_a_model_are_asked_for_in_the_right_way():
    experiment = toy(DecAvg(), rounds=1)
    [peer, *_] = run_peers(experiment)

    async def ask(**question: object) -> bytes:
        return await peer.answer(json.dumps(question).encode(), 1)

    header = json.loads(asyncio.run(ask(ask="model")))
    assert header["sender"] == 0
    assert header["recipient"] == 1
    checksum = header["checksum"]
    whole = asyncio.run(ask(ask="piece", of=checksum, offset=0))
    assert len(whole) == header["size"]
    assert asyncio.run(ask(ask="piece", of=checksum, offset=10)) == whole[10:]
    odd = [
        {"of": checksum ^ 1, "offset": 0},
        {"of": checksum, "offset": -1},
        {"of": checksum, "offset": True},
    ]
    for question in (*odd, {"of": checksum}, {"offset": 0}):
        with pytest.raises(Rejected):
            asyncio.run(ask(ask="piece", **question))


@pytest.mark.slow
def test_a_killed_hub_comes_back_with_its_model(tmp_path):
    async def act(harness: PeerHarness) -> None:
        await harness.until(5, 6)
        await harness.kill(5)
        await asyncio.sleep(0.1)
        harness.start(5)

    peers = run_harness(toy(FedAvg(), rounds=30), tmp_path, act)
    rounds = [row["round"] for row in peers[5].rows]
    assert rounds[-1] == 30
    assert rounds[0] <= 8  # its clients waited, and did not run rounds without it
    received = [row["heard"] for row in peers[5].rows]
    assert received.count([5, 5]) >= len(received) - 2


@pytest.mark.slow
def test_a_peer_that_never_comes_is_not_waited_for(tmp_path):
    async def act(harness: PeerHarness) -> None:
        await harness.kill(3)
        del harness.tasks[3], harness.peers[3]

    quick = replace(QUICK, start=0.3)
    peers = run_harness(toy(DecAvg(), rounds=5), tmp_path, act, timeouts=quick)
    assert [peer.rows[-1]["round"] for peer in peers] == [5] * 4


@pytest.mark.slow
def test_two_halves_continue_and_join_again(tmp_path):
    halves = ({0, 1}, {2, 3, 4})

    async def act(harness: PeerHarness) -> None:
        await harness.until(0, 5)
        harness.memory.cut = {
            (a, b) for a in range(5) for b in range(5) if (a in {0, 1}) != (b in {0, 1})
        }
        await harness.until(0, 10)
        await harness.until(3, 10)
        harness.memory.cut = set()

    experiment = toy(DecAvg(), rounds=60, topology="complete")
    peers = run_harness(experiment, tmp_path, act, quorum=2)
    assert [peer.rows[-1]["round"] for peer in peers] == [60] * 5
    received = [[row["heard"][0] for row in peer.rows] for peer in peers]
    for half in halves:
        for me in half:
            assert len(half) - 1 in received[me]  # only its own half
            assert received[me][-1] == 4  # and everybody in the end


@pytest.mark.slow
def test_a_client_that_was_cut_off_from_its_hub_resynchronises(tmp_path):
    async def act(harness: PeerHarness) -> None:
        await harness.until(5, 3)
        harness.memory.cut = {(1, 5), (5, 1)}
        await harness.until(5, 12)  # the others go on
        harness.memory.cut = set()

    peers = run_harness(toy(FedAvg(), rounds=60), tmp_path, act)
    assert [peer.finished for peer in peers] == [60] * 6
    rounds = [row["round"] for row in peers[1].rows]
    assert len(rounds) < 61  # it left some out,
    assert peers[1].rows[-1]["heard"] == [1, 1]  # and was one of them again
    assert peers[5].rows[-1]["heard"] == [5, 5]


def test_half_precision_and_packing_change_little_and_save_bytes():
    experiment = toy(DecHW(), rounds=3)
    plain, small = run_peers(experiment), run_peers(experiment, wire="bf16", pack=True)
    sent = [sum(row["wire_bytes"] for row in peers[0].rows) for peers in (plain, small)]
    assert sent[1] < 0.9 * sent[0]  # headers count as well, and models are tiny here
    for exact, rounded in zip(models(plain), models(small), strict=True):
        assert not torch.equal(exact, rounded)
        assert torch.allclose(exact, rounded, atol=0.05)


def test_int8_changes_little_and_saves_more_than_half_precision():
    experiment = toy(DecAvg(), rounds=3, model="mlp:hidden=64")  # more than a block
    plain, half, small = (run_peers(experiment, wire=wire) for wire in ("fp32", "bf16", "int8"))
    sent = [sum(row["wire_bytes"] for row in peers[0].rows) for peers in (plain, half, small)]
    assert sent[2] < sent[1] < sent[0]
    for exact, rounded in zip(models(plain), models(small), strict=True):
        assert len(exact) > 256
        assert not torch.equal(exact, rounded)
        assert torch.allclose(exact, rounded, atol=0.1)


@pytest.mark.parametrize("wire", ["bf16", "int8"])
def test_an_algorithm_that_adds_up_on_both_ends_rejects_rounded_messages(wire):
    with pytest.raises(InputError, match="requires lossless messages; use wire fp32"):
        network_of(toy(EVERY["fednl"]), wire=wire)


def test_another_experiment_is_rejected_with_what_differs(tmp_path):
    async def together() -> None:
        post = MemoryNetwork()
        with ThreadPoolExecutor(1) as executor:
            runs = []
            for me, rate in enumerate((0.1, 0.2)):
                experiment = toy(DecAvg(LocalSGD(lr=rate)), nodes=2, partition="iid")
                transport = MemoryTransport(post, me)
                network = network_of(experiment)
                peer = Peer(network, me, prepare(experiment), transport, executor=executor)
                runs.append(peer.run())
            found = await asyncio.gather(*runs, return_exceptions=True)
        texts = [str(error) for error in found if isinstance(error, InputError)]
        assert texts
        assert "runs another experiment: local.lr is 0.1 here and 0.2 there" in texts[0] or (
            "runs another experiment: local.lr is 0.2 here and 0.1 there" in texts[0]
        )

    asyncio.run(together())


@pytest.mark.slow
def test_a_full_disk_ends_training_and_not_answering(tmp_path, monkeypatch):
    """The others continue and learn why; the peer ends with the reason once they have left."""
    real = checkpoint.save
    states = []

    def save(engine: Peer, folder: Path, round: int, remedy: str, **marks: bool) -> None:
        if folder.name == "1" and round == 4:
            raise DiskError("disk is full while writing a checkpoint")
        real(engine, folder, round, remedy, **marks)

    async def act(harness: PeerHarness) -> None:
        await harness.until(0, 10)
        asked = json.dumps({"ask": "status", "incarnation": ""}).encode()
        states.append(json.loads(await harness.peers[1].answer(asked, 0))["state"])

    monkeypatch.setattr(checkpoint, "save", save)
    with pytest.raises(DiskError, match="disk is full"):
        run_harness(toy(DecAvg(), rounds=15), tmp_path, act)
    assert states == ["stopped: disk is full while writing a checkpoint"]
    ends = [read_metrics(tmp_path / str(me) / "metrics.jsonl")[-1]["round"] for me in range(5)]
    assert ends == [15, 4, 15, 15, 15]


# Out of step


@pytest.mark.slow
def test_peers_do_not_wait_for_one_that_left_before_the_start(tmp_path):
    """Nodes 0 and 1 had answers from all and began; node 2 had none from 1, which has left."""

    async def act(harness: PeerHarness) -> None:
        harness.memory.cut = {(2, 1)}
        await harness.until(0, 0)
        await harness.kill(1)
        del harness.tasks[1], harness.peers[1]
        async with asyncio.timeout(BROKEN):  # far less than a timeout
            await asyncio.wait(harness.tasks.values())

    experiment = toy(DecAvg(), rounds=6, nodes=3, partition="iid", topology="complete")
    patient = replace(QUICK, start=10 * BROKEN, message=10 * BROKEN)
    peers = run_harness(experiment, tmp_path, act, timeouts=patient)
    assert [peer.finished for peer in peers] == [6, 6]
    assert peers[0].rows[-1]["heard"] == [1, 2]


def test_peers_that_join_late_wait_for_the_running_peers():
    """Four of five are absent at first; they must not hold each other up, nor run ahead."""
    experiment = toy(DecAvg(), rounds=7, faults={"join": "1@5, 2@5, 3@5, 4@5"})
    result = pg.run(experiment)
    for peer, wanted in zip(run_peers(experiment), result.parameters, strict=True):
        assert torch.equal(peer.shard.members[peer.me].node.params, wanted)


@pytest.mark.slow
def test_peers_that_never_join_do_not_delay_the_others():
    peers = run_peers(toy(DecAvg(), rounds=4, faults={"join": "1@9, 2@9"}))
    assert [peer.finished for peer in peers] == [4, 0, 0, 4, 4]


def test_a_folder_belongs_to_one_peer_of_one_experiment(tmp_path):
    run_peers(toy(DecAvg(), rounds=2), tmp_path)
    before = (tmp_path / "0" / "metrics.jsonl").read_bytes()
    with pytest.raises(InputError, match="belongs to a peer of another run or experiment"):
        run_peers(toy(DecAvg(), rounds=3), tmp_path)
    assert (tmp_path / "0" / "metrics.jsonl").read_bytes() == before
    assert [peer.finished for peer in run_peers(toy(DecAvg(), rounds=2), tmp_path)] == [2] * 5


def test_a_peer_that_runs_another_experiment_is_ignored(caplog):
    """Three of four agree and run without the fourth, which reports the difference."""

    async def together() -> tuple[list[Peer], list[object]]:
        post, peers = MemoryNetwork(), []
        with ThreadPoolExecutor(1) as executor:
            for me in range(4):
                rate = 0.2 if me == 3 else 0.1
                local = LocalSGD(lr=rate)
                experiment = toy(DecAvg(local), nodes=4, partition="iid", topology="complete")
                network, transport = network_of(experiment), MemoryTransport(post, me)
                peers.append(Peer(network, me, prepare(experiment), transport, executor=executor))
            runs = [peer.run() for peer in peers]
            return peers, await asyncio.gather(*runs, return_exceptions=True)

    peers, found = asyncio.run(together())
    assert isinstance(found[3], InputError)
    assert "local.lr is 0.2 here and 0.1 there" in str(found[3])
    assert [peer.finished for peer in peers] == [peers[0].world.rounds] * 3 + [0]
    assert "node-3, which runs another experiment: local.lr is 0.1 here and 0.2" in caplog.text


@pytest.mark.slow
def test_full_disks_on_all_machines_stop_all_peers(tmp_path, monkeypatch):
    """Peers that have stopped must not keep each other alive."""

    def save(engine: Peer, folder: Path, round: int, remedy: str, **marks: bool) -> None:
        raise DiskError("disk is full while writing a checkpoint")

    async def act(harness: PeerHarness) -> None:
        pass

    monkeypatch.setattr(checkpoint, "save", save)
    with pytest.raises(DiskError, match="disk is full"):
        run_harness(toy(DecAvg(), rounds=15), tmp_path, act)


@pytest.mark.slow
def test_peers_do_not_wait_for_one_that_has_stopped(tmp_path, monkeypatch):
    real = checkpoint.save

    def save(engine: Peer, folder: Path, round: int, remedy: str, **marks: bool) -> None:
        if folder.name == "1" and round == 2:
            raise DiskError("disk is full while writing a checkpoint")
        real(engine, folder, round, remedy, **marks)

    async def act(harness: PeerHarness) -> None:
        async with asyncio.timeout(BROKEN):  # far less than a timeout
            await asyncio.wait([task for me, task in harness.tasks.items() if me != 1])

    monkeypatch.setattr(checkpoint, "save", save)
    patient = replace(QUICK, message=10 * BROKEN)
    with pytest.raises(DiskError, match="disk is full"):
        run_harness(toy(DecAvg(), rounds=8), tmp_path, act, timeouts=patient)


# Noise


NOISY = {"sigma": 0.1, "clip": 1.0}


def test_a_model_under_noise_is_not_handed_out():
    peers = run_peers(toy(DecAvg(), rounds=1, noise=NOISY))
    with pytest.raises(Rejected):
        asyncio.run(peers[0].answer(json.dumps({"ask": "model"}).encode(), 1))


def test_secret_noise_differs_and_is_counted_across_restarts(tmp_path):
    experiment = toy(DecAvg(), rounds=3, noise=NOISY)

    def with_secret_noise(me: int) -> World:
        return prepare(experiment).restrict_to_node(me, SecretNoise())

    public = run_peers(experiment)
    secret = run_peers(experiment, tmp_path, worlds=with_secret_noise)
    assert not torch.equal(models(public)[0], models(secret)[0])
    assert secret[0].shard.released() == public[0].shard.released() == {0: 3}
    # A message of a fourth round was sent before the power failed.
    account = tmp_path / "0" / ACCOUNT
    account.write_text(account.read_text().replace('"messages": 3', '"messages": 4'))
    again = run_peers(experiment, tmp_path, worlds=with_secret_noise)
    assert again[0].shard.released() == {0: 4}


# Messages that pass all checks


class Empty(DecAvg):
    """One node sends messages without tensors, in the first rounds."""

    async def round(self, node):
        if node.id == 0 and node.round < 6:
            await node.send(node.out_neighbours)
            await node.receive()
        else:
            await super().round(node)


def test_a_peer_whose_messages_break_rounds_is_found_and_ignored():
    experiment = toy(Empty(), rounds=12, topology="complete", nodes=4, partition="iid")
    peers = run_peers(experiment)
    for peer in peers[1:]:
        assert peer.finished == 12
        assert peer.assembler.blocked_peers.keys() == {0}
        assert peer.counters["poisoned round"] == 1
        assert peer.rows[-1]["heard"] == [2, 2]  # the honest ones
        assert sum(row.get("troubles", {}).get("poisoned round", 0) for row in peer.rows) == 1


class EmptyAtLast(DecAvg):
    """One node sends a message without tensors in the second round."""

    async def round(self, node):
        if node.id == 0 and node.round == 1:
            await node.send(node.out_neighbours)
            await node.receive()
        else:
            await super().round(node)


@pytest.mark.parametrize("optimizer", [{"momentum": 0.9}, {"optimizer": "adamw"}])
def test_a_round_that_failed_leaves_nothing_with_the_optimiser(optimizer):
    work = LocalSGD(epochs=1, keep_optimizer=True, **optimizer)
    kept = []
    for rounds in (1, 2):
        experiment = toy(EmptyAtLast(work), rounds=rounds, nodes=2, partition="iid")
        peer = run_peers(experiment)[1]
        assert peer.counters["poisoned round"] == rounds - 1
        member = peer.shard.members[1]
        kept.append({"params": member.node.params, **member.persistent_tensors})
    assert len(kept[0]) > 1
    assert kept[0].keys() == kept[1].keys()
    assert all(torch.equal(kept[0][name], kept[1][name]) for name in kept[0])


# A hub that is another one in every round


class Rotating(DecAvg):
    """In every round, one present node, drawn from the public coin, averages for all."""

    async def round(self, node):
        await node.train(self.local)
        there = [peer for peer, near in enumerate(node.graph) if near]
        hub = there[int(torch.randint(len(there), (1,), generator=node.coin))]
        others = [peer for peer in there if peer != node.id]
        if node.id == hub:
            inbox = await node.receive(others)
            models = [node.params, *inbox["x"]]
            node.params = torch.stack(models).mean(0)
            await node.send(others, x=node.params)
        else:
            await node.send(hub, x=node.params)
            inbox = await node.receive(hub)
            if len(inbox):
                node.params = inbox["x"][0]


@pytest.mark.parametrize("faults", [{}, {"join": "1@3", "leave": "4@5"}], ids=str)
def test_hubs_can_rotate_over_the_present_peers(faults, tmp_path):
    experiment = toy(Rotating(), rounds=8, topology="complete", faults=faults)
    result = pg.run(experiment)
    for peer, wanted in zip(run_peers(experiment), result.parameters, strict=True):
        assert torch.equal(peer.shard.members[peer.me].node.params, wanted)


@pytest.mark.slow
def test_a_rotating_hub_that_is_gone_costs_its_round_only(tmp_path):
    async def act(harness: PeerHarness) -> None:
        await harness.until(1, 6)
        await harness.kill(1)
        await harness.until(0, 20)  # it would have been the hub in some of these
        harness.start(1)

    peers = run_harness(toy(Rotating(), rounds=60, topology="complete"), tmp_path, act)
    assert [peer.finished for peer in peers] == [60] * 5
    ends = [peer.shard.members[peer.me].node.params for peer in peers]
    assert all(torch.equal(ends[0], end) for end in ends[1:])  # all have the hub's model
