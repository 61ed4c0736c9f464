"""Cut links and absent nodes of every round, and networks that are still running."""

import base64
import fcntl
import json
from pathlib import Path
from typing import Any

import pytest
from support.command_line import TINY, peerage
from support.dashboards import ask, dashboard, make_run

from peerage.graphs.faults import Faults, LinkFaults
from peerage.ui.remote import POINTS, Curve, drawing


def frames(home: Path, path: str) -> list[dict[str, Any]]:
    return list(ask(dashboard(home).app(), "/api/frames", {"path": path}).json["frames"])


@pytest.mark.slow  # a real run
def test_cut_links_are_those_over_which_a_simulation_sent_nothing(tmp_path: Path) -> None:
    """Every link that is up carries one message in each direction."""
    line = f"run {TINY} --rounds 6 --engine serial --link-activity 0.5 --leave 2@5 --seed 3"
    done = peerage(f"{line} --algorithm decavg --out {tmp_path}/run")
    assert done.code == 0, done.err
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    sent = {row["round"]: row["bytes"] for row in rows if row["scope"] == "network"}
    found = {frame["round"]: frame for frame in frames(tmp_path, "run")}
    up = {round: 4 - len(found[round]["cut"]) for round in range(1, 7)}
    assert len(set(up.values())) > 1
    one = next(sent[round] // up[round] for round in up if up[round])
    assert {round: up[round] * one for round in up} == {round: sent[round] for round in up}
    assert {round: frame["gone"] for round, frame in found.items()} == {
        **{round: [] for round in range(5)},
        5: [2],
        6: [2],
    }
    absent = base64.b64decode(found[6]["accuracy"])[2]
    assert absent == 255


def test_faults_that_cannot_be_read_break_nothing(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "run")
    text = (folder / "experiment.toml").read_text()
    (folder / "experiment.toml").write_text(text + "[faults]\nlinks = 7\n")
    assert [frame["cut"] for frame in frames(tmp_path, "run")] == [[]] * 4


def test_both_directions_of_a_link_must_be_up(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "run", rounds=9)
    text = (folder / "experiment.toml").read_text()
    (folder / "experiment.toml").write_text(text + "[faults]\nlinks = 0.5\ndirected = true\n")
    faults = Faults(links=0.5, directed=True)
    for frame in frames(tmp_path, "run")[1:]:
        links = LinkFaults(faults, 0, frame["round"] - 1)
        up = [(u, v) for u, v in ((0, 1), (1, 2)) if links.link_up(u, v) and links.link_up(v, u)]
        assert sorted(map(tuple, frame["cut"])) == sorted({(0, 1), (1, 2)} - set(up))


def test_the_last_heads_are_kept_after_the_last_round(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "run", rounds=2)
    text = (folder / "metrics.jsonl").read_text()
    marked = [
        line.replace("}", ', "notes": {"head": 1.0}}') if '"node"' in line else line
        for line in text.splitlines()
    ]
    later = [line.replace('"round": 2', '"round": 3') for line in text.splitlines()[-4:]]
    (folder / "metrics.jsonl").write_text("\n".join([*marked, *later]) + "\n")
    found = frames(tmp_path, "run")
    assert [list(base64.b64decode(frame["head"])) for frame in found] == [[1, 1, 1]] * 4


@pytest.fixture
def network(tmp_path: Path) -> Path:
    """The folder of a network of two peers that goes on, as `peerage up` makes it."""
    folder = make_run(tmp_path, "net", nodes=2, status="running", rounds=90, accuracy=None)
    (folder / "network.toml").write_text("")
    (folder / "metrics.jsonl").write_text("")  # it is filled at the end
    for node, last in ((0, 9), (1, 4)):
        peer = folder / "peers" / f"node-{node}"
        peer.mkdir(parents=True)
        (peer / "peer.json").write_text(json.dumps({"run": "net", "node": node}))
        rows = [
            {"scope": "node", "round": round, "node": node, "bytes": 5, "accuracy": 0.1 * node}
            | ({"missing": [1]} if round > 4 else {})
            for round in range(last + 1)
        ]
        (peer / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_a_network_that_goes_on_shows_the_rows_of_its_peers(network: Path) -> None:
    home = network.parent
    app = dashboard(home).app()
    with open(network / ".lock", "w") as lock, open(network / "peers/node-0/.lock", "w") as peer:
        fcntl.flock(lock, fcntl.LOCK_EX)
        fcntl.flock(peer, fcntl.LOCK_EX)
        (entry,) = ask(app, "/api/list").json["entries"]
        assert (entry["status"], entry["facts"]["rounds"]) == ("running", 9)
        assert entry["facts"]["accuracy"] == pytest.approx(0.05)
        run = ask(app, "/api/run", {"path": "net"}).json
    assert (run["rounds"], run["frame"]["round"]) == (9, 9)
    assert (run["frame"]["gone"], run["frame"]["cut"]) == ([1], [[0, 1]])
    states = [(one["name"], one["state"], one["round"]) for one in run["peers"]]
    assert states == [("node-0", "running", 9), ("node-1", "not running", 4)]
    assert ask(app, "/api/graph", {"path": "net"}).json["names"] == ["node-0", "node-1"]


def test_a_slow_peer_is_not_gone(network: Path) -> None:
    rows = (network / "peers/node-0/metrics.jsonl").read_text().splitlines()[:7]
    (network / "peers/node-0/metrics.jsonl").write_text("\n".join(rows) + "\n")
    run = ask(dashboard(network.parent).app(), "/api/run", {"path": "net"}).json
    # Both have ended round 4; node 0 is two rounds ahead.
    assert (run["rounds"], run["frame"]["round"], run["frame"]["gone"]) == (6, 4, [])


def status(name: str, **facts: Any) -> dict[str, Any]:
    return {"name": name, "heard": [], "missing": [], "accuracy": None, **facts}


def test_links_of_a_remote_network_are_those_that_its_peers_name() -> None:
    peers = [
        status("a", heard=["b"], missing=["c"]),
        status("b", heard=["a", "unknown"]),
        {"name": "c", "error": "connection refused"},
    ]
    found = drawing(peers)
    assert (found["edges"], found["cut"], found["gone"]) == ([(0, 1), (0, 2)], [(0, 2)], [2])
    assert found["names"] == ["a", "b", "c"]


def test_the_curve_of_a_remote_network_grows_and_stays_bounded() -> None:
    curve = Curve()
    curve.add([status("a"), {"name": "b", "error": "gone"}])
    assert curve.points()["x"] == []
    curve.add([status("a", round=3, accuracy=0.2), status("b", round=4, accuracy=0.4)])
    curve.add([status("a", round=5, accuracy=float("nan"))])
    assert curve.points() == {"x": [3.0], "y": [pytest.approx(0.3)], "low": [0.2], "high": [0.4]}
    for round in range(3000):
        curve.add([status("a", round=round, accuracy=0.5)])
    assert len(curve.points()["x"]) <= 2 * POINTS
    assert curve.points()["x"][-1] == 2999
