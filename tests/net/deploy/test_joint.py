"""The folders that sites have shared become one report about their network."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.command_line import blank_pictures, error_line, peerage
from support.networking import network_of, run_peers

import peerage as pg
from peerage.engine.prepare import prepare
from peerage.engine.world import World
from peerage.files import read_json, write_json
from peerage.net.deploy.collect import RecordCollector
from peerage.net.deploy.joint import joint_record
from peerage.net.deploy.process import PeerProcess, PeerProgress
from peerage.net.peer.peer import Peer
from peerage.net.peer.setup_file import setup_facts
from peerage.records.rows import MetricWriter, RunRecord, read_metrics
from peerage.report.html import notes, page
from peerage.report.peer_figures import ALL_HEARD, NOT_RUN, SOME_MISSING, round_table, worst_of
from peerage.report.peers import table, unheard
from peerage.runs.summary import missed_rounds, totals

NODES, ROUNDS = 3, 3


def experiment(**changes: Any) -> pg.Experiment:
    settings: dict[str, Any] = {
        "algorithm": "decavg",
        "nodes": NODES,
        "topology": "complete",
        "partition": "iid",
        "model": "logistic",
        "local": {"epochs": 1, "batch_size": 90},
        "rounds": ROUNDS,
    }
    return pg.Experiment(**settings | changes)


def write_files(peer: Peer, private: bool = False) -> None:
    """Write what `peerage node` writes besides the rows and checkpoints."""
    folder = peer.recorder.folder
    assert folder is not None
    facts = setup_facts(peer.network, peer.me, peer.world, private=private, signed=True)
    write_json(folder / "setup.json", facts)
    rows = read_metrics(folder / "metrics.jsonl")
    summary = {"state": peer.state, **totals(rows), "rounds": peer.finished}
    summary |= {"missed": missed_rounds(rows, peer.scheduled_rounds)}
    write_json(folder / "summary.json", summary)


@pytest.fixture(scope="module")
def world() -> World:
    return prepare(experiment())


@pytest.fixture(scope="module")
def made(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("made")
    for peer in run_peers(experiment(), home, worlds=lambda me: world):
        write_files(peer)
    return home


@pytest.fixture
def sites(made: Path, tmp_path: Path) -> list[Path]:
    """Copies of the folders of the peers, as the sites have sent them: records only."""
    records = ("peer.json", "setup.json", "metrics.jsonl", "summary.json")
    for node in range(NODES):
        folder = tmp_path / f"site-{node}"
        folder.mkdir()
        for name in records:
            shutil.copy(made / str(node) / name, folder)
    return [tmp_path / f"site-{node}" for node in range(NODES)]


def change(file: Path, key: str, edit: Callable[[Any], Any]) -> None:
    content = read_json(file)
    write_json(file, {**content, key: edit(content.get(key))})


def rewrite(folder: Path, edit: Callable[[dict[str, Any]], dict[str, Any] | None]) -> None:
    rows = [edit(row) for row in read_metrics(folder / "metrics.jsonl")]
    (folder / "metrics.jsonl").unlink()
    with MetricWriter(folder / "metrics.jsonl") as writer:
        for row in filter(None, rows):
            writer.append(row)


# One record


def test_the_joint_record_has_the_rows_that_a_collected_network_has(made, sites, world, tmp_path):
    peers = [
        PeerProcess(node, PeerProgress(f"node-{node}", "finished"), made / str(node))
        for node in range(NODES)
    ]
    home = tmp_path / "up"
    home.mkdir()
    (home / "experiment.toml").write_text(world.experiment.to_toml())
    RecordCollector(home, world, "fp32", 0.0).write(peers, "finished")
    collected, joint = RunRecord.load(home), joint_record(sites)
    assert joint.network == collected.network
    assert joint.nodes == collected.nodes
    assert joint.experiment == collected.experiment
    kept = collected.setup.keys()
    assert {key: joint.setup[key] for key in kept} == collected.setup
    same = ("status", "label", "accuracy", "bytes_sent", "wire_bytes", "rounds_planned", "dataset")
    assert {key: joint.summary[key] for key in same} == {
        key: collected.summary[key] for key in same
    }
    assert joint.environment.items() >= {"torch": collected.environment["torch"]}.items()


def test_rows_say_who_was_heard(sites):
    rows = [row for row in joint_record(sites).peers if row["node"] == 1]
    assert [row.get("senders") for row in rows] == [None, [0, 2], [0, 2], [0, 2]]
    assert not any("missing" in row for row in rows)


def test_missing_members_are_named(sites):
    record = joint_record(sites[:2])
    assert record.status == "finished"
    assert record.summary["peers"][2] == {"name": "node-2", "state": "no folder"}
    [found] = [note for note in notes([record]) if "no folder" in note]
    assert found == ("There is no folder of node-2: all numbers are about the other 2 of 3 peers.")
    assert record.setup["examples"][2] is None
    assert [row["nodes"] for row in record.network] == [2] * (ROUNDS + 1)
    with blank_pictures(True):
        assert "no folder" in page([record])


def test_missing_messages_and_rounds_are_shown(sites):
    def lost(row: dict[str, Any]) -> dict[str, Any] | None:
        if row["round"] == 2:
            return None
        if row["round"] == 3:
            row |= {"missing": [2], "heard": [1, 2], "skipped": 1, "paused": 4.5}
        return row

    rewrite(sites[0], lost)
    record = joint_record(sites)
    assert unheard(record) == [["node-0", "node-2", "3"]]
    [line] = [line for line in table(record) if line[0] == "node-0"]
    assert line[1] == (
        "finished, missed rounds 2, of them 1 skipped to catch up, paused for 4.50 s in rounds 3"
    )
    heard = [ALL_HEARD] * ROUNDS
    assert round_table(record).tolist() == [[ALL_HEARD, NOT_RUN, SOME_MISSING], heard, heard]
    assert worst_of(round_table(record), 2).tolist()[0] == [NOT_RUN, SOME_MISSING]


def test_epsilon_of_every_site_is_shown(tmp_path):
    settings = experiment(noise={"sigma": 1.0, "clip": 1.0}, nodes=2, rounds=1)
    known = prepare(settings)
    for peer in run_peers(settings, tmp_path, worlds=lambda me: known):
        write_files(peer)
    record = joint_record([tmp_path / "0", tmp_path / "1"])
    spent = [row["epsilon"] for row in record.peers if row["round"] == 1]
    place = table(record)[0].index("epsilon")
    assert [line[place] for line in table(record)[1:]] == [f"{value:.4g}" for value in spent]
    assert any(f"at most {max(spent):.4g} at delta" in note for note in notes([record]))


def test_differing_versions_and_unsigned_files_are_warned_about(sites):
    change(sites[1] / "setup.json", "environment", lambda old: {**old, "torch": "1.0"})
    change(sites[2] / "setup.json", "signed", lambda old: False)
    record = joint_record(sites)
    here = record.environment["torch"].split(" ")[0]
    assert record.environment["torch"] == f"{here} (node-0, node-2); 1.0 (node-1)"
    warned = notes([record])
    assert any("versions of torch: " in note and "1.0 at node-1" in note for note in warned)
    assert "The network file was not signed at node-2." in warned


def test_how_many_private_examples_are_of_which_class_is_not_recorded(world):
    network = network_of(experiment())
    facts = setup_facts(network, 1, world, private=True, signed=True)
    assert "allocation" not in facts
    assert facts["examples"] == len(world.parts[1])
    assert str(world.setup["allocation"][1]) not in json.dumps(facts)


# The command


@pytest.mark.slow
def test_one_command_reports_on_all_sites(sites, tmp_path):
    done = peerage("report --out", tmp_path / "joint.html", *sites)
    assert done.code == 0, done.err
    assert re.search(r"node-2 +│ finished +│ +3 │", done.out)
    text = (tmp_path / "joint.html").read_text()
    for title in ("Accuracy of each peer", "Rounds of each peer", "Data of each node", "Graph"):
        assert f"<h3>{title}</h3>" in text
    assert "Reproduce" not in text


def test_a_folder_that_is_not_a_peers_is_refused(sites, tmp_path):
    (tmp_path / "run").mkdir()
    line = error_line(peerage("report", *sites, tmp_path / "run"))
    assert line == (
        f"{tmp_path / 'run'} is not the folder of a peer, as it has no peer.json; give folders "
        "that `peerage node` made"
    )


def test_folders_of_different_runs_are_refused(sites):
    change(sites[1] / "peer.json", "run", lambda old: "other")
    line = error_line(peerage("report", *sites))
    assert line == (
        f"{sites[0]} is of run test and {sites[1]} of run other; give folders of one network"
    )


def test_folders_with_different_settings_are_refused(sites):
    change(sites[1] / "setup.json", "experiment", lambda old: old.replace("seed = 0", "seed = 7"))
    line = error_line(peerage("report", *sites))
    assert "have the same run but different settings: seed is 0 here and 7 there" in line


def test_revisions_of_one_network_belong_together(sites):
    change(sites[0] / "peer.json", "revision", lambda old: 2)
    change(
        sites[0] / "setup.json", "experiment", lambda old: old.replace("rounds = 3", "rounds = 9")
    )
    change(sites[0] / "setup.json", "facts", lambda old: {**old, "rounds": 9})
    record = joint_record(sites)
    assert record.summary["rounds_planned"] == 9
    assert any("2 at node-0 and 1 at node-1, node-2" in note for note in notes([record]))
    change(sites[0] / "setup.json", "peers", lambda old: ["node-0", "node-2", "node-1"])
    assert "which lists other members under the same numbers" in error_line(
        peerage("report", *sites)
    )


def test_two_folders_of_one_node_are_refused(sites, tmp_path):
    shutil.copytree(sites[1], tmp_path / "again")
    line = error_line(peerage("report", *sites, tmp_path / "again"))
    assert line == f"{sites[1]} and {tmp_path / 'again'} are both of node-1; give one of them"


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("peer.json", "node", 9),
        ("peer.json", "node", "x"),
        ("setup.json", "peers", ["node-0", "\x1b[31m", "node-2"]),
        ("setup.json", "facts", {}),
        ("setup.json", "experiment", "["),
        ("setup.json", "environment", 3),
        ("summary.json", "rounds", None),
    ],
)
def test_damaged_records_are_refused_in_one_line(name, key, value, sites):
    change(sites[1] / name, key, lambda old: value)
    assert "damaged" in error_line(peerage("report", *sites))


def test_damaged_rows_are_refused_in_one_line(sites):
    rewrite(sites[1], lambda row: {**row, "seconds": None})
    assert "damaged" in error_line(peerage("report", *sites))


def test_folders_of_an_earlier_version_are_refused(sites):
    file = sites[1] / "setup.json"
    write_json(file, {key: value for key, value in read_json(file).items() if key != "facts"})
    assert "was made by an earlier version" in error_line(peerage("report", *sites))


def test_a_peer_that_was_started_again_has_not_finished(sites):
    with MetricWriter(sites[0] / "metrics.jsonl") as writer:
        writer.append({**read_metrics(sites[0] / "metrics.jsonl")[-1], "round": ROUNDS + 1})
    record = joint_record(sites)
    assert table(record)[1][1] == "not finished"
    assert "Not finished, with 3 rounds planned: node-0 after round 4." in notes([record])
