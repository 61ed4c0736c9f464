"""The table that `peerage up` shows while peers run."""

import io

from rich.console import Console

from peerage.cli.net import table_of
from peerage.net.deploy.process import PeerProcess, PeerProgress
from peerage.records.rows import MetricWriter


def test_the_live_table_shows_own_metrics(tmp_path):
    seen = PeerProgress("node-0", "running", own={"wrong": None, "[red]": None})
    peer = PeerProcess(0, seen, tmp_path)
    row = {"scope": "node", "round": 1, "node": 0, "heard": [1, 1], "accuracy": 0.5}
    with MetricWriter(tmp_path / "metrics.jsonl") as writer:
        writer.append(row | {"wrong": 0.125})
        writer.append(row | {"round": 2})  # not evaluated
    peer.look()
    file = io.StringIO()
    Console(file=file, width=100).print(table_of([seen]))
    lines = file.getvalue().splitlines()
    assert lines[1].replace("┃", " ").split() == [
        "peer", "state", "round", "accuracy", "wrong", "[red]", "received",
    ]  # fmt: skip
    assert [one.strip() for one in lines[3].split("│")[3:8]] == [
        "2",
        "50.0 %",
        "0.125",
        "-",
        "1 of 1",
    ]
