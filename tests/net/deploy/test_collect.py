"""The folders of peers become one of the whole network, which can be verified and reported."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
from safetensors.torch import save_file
from support.command_line import blank_pictures, error_line, peerage
from torch import Tensor

import peerage as pg
from peerage.engine.prepare import prepare
from peerage.errors import CheckpointError
from peerage.net.deploy.collect import RecordCollector, totals
from peerage.net.deploy.process import PeerProcess, PeerProgress
from peerage.net.peer.account import ACCOUNT, PrivacyAccount
from peerage.privacy import Noise, epsilon
from peerage.records import checkpoint
from peerage.records.rows import MetricWriter, Row, RunRecord, read_metrics
from peerage.report.html import notes, page
from peerage.report.peers import FEW, table, traffic
from peerage.report.tables import cells, compare


def experiment(**changes: Any) -> pg.Experiment:
    settings: dict[str, Any] = {
        "nodes": 3,
        "topology": "complete",
        "partition": "iid",
        "model": "logistic",
        "local": {"epochs": 1, "batch_size": 90},
        "rounds": 3,
        "engine": {"name": "serial"},
    }
    return pg.Experiment(**settings | changes)


@dataclass
class Kept:
    """One node's model, for a checkpoint."""

    node: int
    params: Tensor

    def save(self, folder: Path) -> tuple[dict[str, Any], dict[str, str]]:
        save_file({f"{self.node}.params": self.params.clone()}, folder / "part")
        return {str(self.node): {}}, {str(self.node): "part"}


class Imitation:
    """A network whose peers have recorded what a simulation gives."""

    def __init__(self, home: Path, settings: pg.Experiment) -> None:
        self.home, self.result = home, pg.run(settings)
        self.world = prepare(settings)
        self.peers = []
        (home / "peers").mkdir(parents=True)
        (home / "experiment.toml").write_text(self.world.experiment.to_toml())
        (home / "network.toml").write_text("")
        network = [row for row in self.result.rows if row["scope"] == "network"]
        for node in range(settings.nodes):
            peer = PeerProcess(
                node, PeerProgress(f"node-{node}", "finished"), home / "peers" / f"node-{node}"
            )
            peer.starts = 1
            peer.folder.mkdir()
            self.peers.append(peer)
            own = [row for row in self.result.rows if row.get("node") == node]
            if own[0]["round"] > 0:  # one that joins later says so in the beginning
                own.insert(0, {"scope": "node", "round": 0, "node": node})
            for row in own:
                sent = network[row["round"]]["bytes"] if node == 0 else 0
                row |= {"bytes": sent, "wire_bytes": sent + 7, "seconds": {"total": 0.5}}
            self.record(node, own)
            kept = Kept(node, self.result.parameters[node])
            checkpoint.save(kept, peer.folder, settings.rounds)

    def rows(self, node: int) -> list[Row]:
        return read_metrics(self.peers[node].folder / "metrics.jsonl")

    def record(self, node: int, rows: list[Row]) -> None:
        file = self.peers[node].folder / "metrics.jsonl"
        file.unlink(missing_ok=True)
        with MetricWriter(file) as writer:
            for row in rows:
                writer.append(row)

    def collect(self, status: str = "finished", wire: str = "fp32") -> dict[str, Any]:
        collector = RecordCollector(self.home, self.world, wire, perf_counter())
        return collector.write(self.peers, status)


@pytest.fixture(autouse=True)
def no_pictures() -> Iterator[None]:
    with blank_pictures(True):
        yield


@pytest.fixture
def network(tmp_path: Path) -> Imitation:
    return Imitation(tmp_path / "up", experiment())


# Verifying


@pytest.mark.parametrize(
    "changes",
    [{}, {"evaluation": {"spread": True, "validation": 0.2}}, {"faults": {"join": "2@2"}}],
    ids=["plain", "much measured", "joining"],
)
def test_a_network_with_the_numbers_of_a_simulation_is_verified(changes, tmp_path):
    network = Imitation(tmp_path / "up", experiment(**changes))
    assert network.collect()["digest"] == network.result.digest
    same = pg.Verdict(True, network.result.digest, network.result.digest)
    assert pg.verify(tmp_path / "up") == same


def test_a_peer_that_missed_a_round_is_named(network):
    network.record(1, [row for row in network.rows(1) if row["round"] != 2])
    network.collect()
    verdict = pg.verify(network.home)
    assert not verdict.same
    assert verdict.difference == "node 1 recorded nothing for round 2"


def test_a_number_that_is_another_is_named(network):
    rows = network.rows(2)
    rows[1]["accuracy"] = 0.125
    network.record(2, rows)
    network.collect()
    done = peerage("verify", network.home)
    assert done.code == 1
    assert "was not reproduced: node 2, round 1: accuracy was 0.125, is now 0." in done.err


def test_models_that_are_others_are_found(network):
    checkpoint.save(Kept(1, network.result.parameters[1] + 1), network.peers[1].folder, 3)
    network.collect()
    verdict = pg.verify(network.home)
    assert verdict.difference == "the final parameters differ, although all metrics agree"


def test_a_network_with_noise_cannot_be_verified(tmp_path):
    network = Imitation(tmp_path / "up", experiment(noise={"sigma": 0.01, "clip": 1.0}))
    network.collect()
    with pytest.raises(CheckpointError, match="cannot be verified: its peers drew noise from"):
        pg.verify(network.home)
    assert "peerage verify" not in page([RunRecord.load(network.home)])


def test_a_network_that_rounded_its_messages_cannot_be_verified(network):
    network.collect(wire="bf16")
    message = error_line(peerage("verify", network.home))
    assert message.endswith("its messages were rounded to bf16, unlike those of a simulation")


# Not to be mistaken for a simulation


def test_a_network_is_not_resumed_as_a_simulation(network):
    network.collect("interrupted")
    with pytest.raises(CheckpointError, match="is a network of real peers, which cannot be resume"):
        pg.resume(network.home)
    message = error_line(peerage("resume", network.home))
    assert message.endswith(f"run it again with `peerage up {network.home / 'experiment.toml'}`")
    assert not (network.home / "checkpoint").exists()
    taken = error_line(peerage("run --out", network.home))
    assert taken == f"output folder '{network.home}' already holds a run; choose another --out"
    assert f"`peerage up {network.home}" in error_line(peerage("verify", network.home))


# Gathering


def test_sums_are_over_all_incarnations_of_a_peer(network):
    """A restarted peer counts its bytes and errors from zero; its rows do not."""
    rows = network.rows(0)
    for row, troubles in zip(rows, [{}, {"late": 2}, {"late": 1, "missing": 4}, {}], strict=True):
        row |= {"bytes": 10, "wire_bytes": 12} | ({"troubles": troubles} if troubles else {})
    network.record(0, rows)
    network.peers[0].starts = 2
    summary = network.collect()
    sums = {"bytes_sent": 40, "wire_bytes": 48, "counters": {"late": 3, "missing": 4}}
    assert summary["peers"][0] == {
        "name": "node-0",
        "state": "finished",
        "starts": 2,
        "rounds": 3,
        **sums,
    }
    assert summary["counters"] == sums["counters"]
    assert summary["wire_bytes"] == 48 + 2 * 4 * 7
    assert summary["bytes_sent"] == RunRecord.load(network.home).network[-1]["bytes_total"] == 40


def test_times_are_means_over_peers_and_those_of_the_slowest_in_total(network):
    for node, seconds in enumerate([{"train": 0.25, "wait": 0.5}, {"train": 0.75}, {}]):
        rows = network.rows(node)
        rows[1]["seconds"] = {**seconds, "total": 1.0 + node}
        network.record(node, rows)
    network.collect()
    before, row, *_ = RunRecord.load(network.home).network
    assert before["seconds"] == {"total": 0.5}  # of peers that measured no phases
    assert row["seconds"] == pytest.approx({"train": 1 / 3, "wait": 1 / 6, "total": 3.0})


def test_rows_of_older_peers_have_fewer_numbers():
    row = {"scope": "node", "round": 2, "node": 0, "bytes": 5}
    assert totals([row]) == {"rounds": 2, "bytes_sent": 5, "wire_bytes": 0, "counters": {}}
    assert totals([]) == {"rounds": 0, "bytes_sent": 0, "wire_bytes": 0, "counters": {}}


def test_rounds_that_some_peers_did_not_finish_do_not_count(network):
    network.record(1, network.rows(1)[:-1])
    network.record(2, network.rows(2)[:-2])
    summary = network.collect("interrupted")
    assert summary["rounds"] == 1
    assert [peer["rounds"] for peer in summary["peers"]] == [3, 2, 1]
    record = RunRecord.load(network.home)
    assert [row["nodes"] for row in record.network] == [3, 3]
    assert record.summary["digest"] is None
    assert network.collect()["rounds"] == 3  # but they do when all have come to their ends


def test_numbers_that_are_not_finite(network):
    """A model that diverges may still be evaluated; its loss is null in the peer's file."""
    rows = network.rows(1)
    rows[-1] |= {"loss": None, "train_loss": None, "notes": {"curvature": None}}
    network.record(1, rows)
    network.collect()
    record = RunRecord.load(network.home)
    last = record.network[-1]
    assert (last["loss"], last["train_loss"], last["nodes"]) == (None, None, 3)
    assert record.nodes[-2]["node"] == 1
    assert record.nodes[-2]["notes"] == {"curvature": None}
    assert record.network[-2]["loss"] is not None


def test_messages_under_noise_are_counted_where_they_were_sent(tmp_path):
    noise = Noise(sigma=1.0, clip=0.5)
    network = Imitation(tmp_path / "up", experiment(noise={"sigma": 1.0, "clip": 0.5}))
    for peer, count in zip(network.peers, (3, 7), strict=False):
        PrivacyAccount(peer.folder / ACCOUNT, "up", peer.seen.name, noise).record(count)
        rows = [row | {"epsilon": epsilon(noise, count)} for row in network.rows(peer.number)]
        network.record(peer.number, rows)
    assert network.collect("interrupted")["privacy"]["messages"] == [3, 7, 0]
    record = RunRecord.load(network.home)
    assert {row["epsilon"] for row in record.network} == {epsilon(noise, 7)}
    found = {(row["node"], row.get("epsilon")) for row in record.nodes}
    assert found == {(0, epsilon(noise, 3)), (1, epsilon(noise, 7)), (2, None)}


# Reports


def test_reports_show_what_went_over_the_wire(network):
    rows = network.rows(1)
    rows[2]["troubles"] = {"late": 1, "missing": 12}
    network.record(1, rows)
    network.peers[1].starts = 2
    network.collect()
    record = RunRecord.load(network.home)
    assert table(record)[2] == [
        "node-1",
        "finished",
        "3",
        "2",
        "0 B",
        "28 B",
        "12 missing, 1 late",
    ]
    sent = "3 real peers sent 93.6 kB of payload, 93.7 kB on the wire"
    assert traffic([record]) == {"DecHW": f"{sent}; errors: 12 missing, 1 late."}
    assert f"DecHW: {sent}; errors: 12 missing, 1 late." in notes([record])
    titles, [texts] = cells(compare([record]))
    assert texts[titles.index("sent in total")] == "93.6 kB (93.7 kB on the wire)"
    text = page([record])
    assert "<h2>Peers</h2>" in text
    assert "12 missing, 1 late</td>" in text
    assert f"peerage up {network.home / 'experiment.toml'}" in text
    done = peerage("report", network.home)
    assert done.code == 0
    assert f"{sent}; errors: 12 missing, 1 late." in " ".join(done.out.split())
    assert re.search(r"node-1 +│ finished +│ +3 │ +2 │ +0 B │ +28 B │", done.out)
    assert re.search(r"node-1 +│ 12 missing, 1 late", done.out)  # the table has two parts


def test_peers_of_a_large_network_have_no_rows_of_their_own(network):
    network.peers *= FEW // 3
    network.collect()
    assert len(table(RunRecord.load(network.home))) == 1 + FEW // 3 * 3
    network.peers *= 2
    network.collect()
    record = RunRecord.load(network.home)
    assert table(record) == []
    assert "<h2>Peers</h2>" not in page([record])
    assert "126 real peers sent" in traffic([record])["DecHW"]


def test_simulated_runs_have_no_peers(tmp_path):
    record = RunRecord.load(pg.run(experiment(), tmp_path / "run").folder)
    assert traffic([record]) == {}
    assert table(record) == []
    assert "<h2>Peers" not in page([record])
    assert compare([record])[0]["wire_bytes"] is None
