"""Metrics that grow, are replaced, or are damaged; compared with the reader of reports."""

import json
import os
from pathlib import Path

import pytest
from support.dashboards import lines, make_run, rows_of_round

from peerage.records.rows import RunRecord
from peerage.ui.metrics import NODE, MetricsFile, last_row
from peerage.ui.peers import PeersMetrics


def test_all_values_are_those_of_the_record(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "run", rounds=12)
    file = MetricsFile(folder / "metrics.jsonl")
    file.refresh()
    record = RunRecord.load(folder)
    assert file.network == list(record.network)
    assert (file.rounds, file.damage) == (12, "")
    for place, row in enumerate(record.network):
        assert file.node_values(place, "loss")[0] == record.node_values("loss", row["round"])
    own = [row for row in record.nodes if row["node"] == 1]
    assert list(file.node_rows(1, range(13))) == own


def test_only_complete_rounds_count_and_growth_is_followed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    assert file.refresh() == 0  # there is no file yet
    text = "".join(lines(range(4)))
    seen = []
    for end in range(0, len(text), 37):
        path.write_text(text[:end]) if not path.exists() else append(path, text[end - 37 : end])
        file.refresh()
        seen.append(len(file.network))
        assert seen[-1] == text[:end].count('"network"') or not text[:end].endswith("\n")
    append(path, text[end:])
    file.refresh()
    assert [row["round"] for row in file.network] == [0, 1, 2, 3]
    assert seen == sorted(seen)
    assert file.node_values(3, "accuracy")[0] == {0: 0.03, 1: 0.04, 2: 0.05}


def append(path: Path, text: str) -> None:
    with open(path, "a") as file:
        file.write(text)


def test_a_resumed_run_writes_its_last_rounds_again(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "run", rounds=5)
    path = folder / "metrics.jsonl"
    file = MetricsFile(path)
    before = file.refresh()
    path.with_name("new").write_text("".join(lines(range(3))))
    os.replace(path.with_name("new"), path)
    assert file.refresh() > before
    assert file.rounds == 2


def test_the_final_row_replaces_that_of_the_last_round(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "run", rounds=2)
    final = [row | {"accuracy": 0.9, "final": True} for row in rows_of_round(2)]
    append(folder / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in final))
    file = MetricsFile(folder / "metrics.jsonl")
    file.refresh()
    assert [row["accuracy"] for row in file.network] == pytest.approx([0.01, 0.02, 0.9])
    assert file.node_values(2, "accuracy")[0] == {0: 0.9, 1: 0.9, 2: 0.9}


@pytest.mark.parametrize("text", ["no rows\n", '{"scope": "network", broken\n', "\0\0\0\n"])
def test_damage_is_told_and_breaks_nothing(tmp_path: Path, text: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(text)
    file = MetricsFile(path)
    file.refresh()
    assert "metrics.jsonl" in file.damage
    assert (file.network, last_row(path)) == ([], {})


def test_a_damaged_row_of_a_node_leaves_the_others(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "run")
    path = folder / "metrics.jsonl"
    path.write_text(path.read_text().replace('"node": 1, "accuracy": 0.03', '"node": 1, "acc'))
    file = MetricsFile(path)
    file.refresh()
    assert file.node_values(2, "accuracy")[0] == {0: 0.02, 2: 0.04}
    assert "cannot be read" in file.damage
    assert len(list(file.rows_of(1, NODE))) == 3


def test_rows_of_peers_that_go_on_are_joined(tmp_path: Path) -> None:
    peers = tmp_path / "peers"
    for node, name in enumerate(["ann", "bob"]):
        (peers / name).mkdir(parents=True)
        (peers / name / "peer.json").write_text(json.dumps({"run": "r", "node": node}))
        rows = [
            {
                "scope": "node",
                "round": round,
                "node": node,
                "bytes": 10,
                "accuracy": 0.1 * round + 0.2 * node,
                "missing": [1] if node == 0 else [],
            }
            for round in range(3 - node)
        ]
        (peers / name / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    append(peers / "bob" / "metrics.jsonl", '{"scope": "node", "rou')
    file = PeersMetrics(tmp_path)
    version = file.refresh()
    assert [(row["round"], row["nodes"], row["bytes_total"]) for row in file.network] == [
        (0, 2, 20),
        (1, 2, 40),
        (2, 1, 50),
    ]
    assert [row["accuracy"] for row in file.network] == pytest.approx([0.1, 0.2, 0.2])
    assert file.refresh() == version
    assert [(one["name"], one["round"], one["missing"]) for one in file.states()] == [
        ("ann", 2, [1]),
        ("bob", 1, []),
    ]
