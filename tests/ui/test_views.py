"""What the pages get: curves, frames, nodes, comparisons and downloads."""

import base64
import json
import re
from pathlib import Path

import matplotlib
import pytest
from matplotlib.colors import to_hex
from support.dashboards import ask, dashboard, make_run

from peerage.records.rows import RunRecord
from peerage.report import export, figures
from peerage.ui import app as ui_app
from peerage.ui.guard import Guard


@pytest.fixture
def home(tmp_path: Path) -> Path:
    make_run(tmp_path, "run", rounds=6)
    return tmp_path


@pytest.fixture
def app(home: Path) -> Guard:
    return dashboard(home).app()


def test_the_overview_has_the_numbers_of_the_run(app: Guard) -> None:
    run = ask(app, "/api/run", {"path": "run"}).json
    assert (run["status"], run["rounds"], run["planned"]) == ("finished", 6, 6)
    assert (run["accuracy"], run["best"]) == pytest.approx((0.07, 0.07))
    assert (run["bytes"], run["seconds"]) == (600, 7.0)
    curve = run["curves"][0]
    assert (curve["key"], curve["x"]) == ("accuracy", [0, 1, 2, 3, 4, 5, 6])
    assert curve["y"] == pytest.approx([0.01 + 0.01 * round for round in range(7)])
    assert curve["high"] == pytest.approx([0.02 + 0.01 * round for round in range(7)])
    assert run["phases"] == {"train": 0.5, "exchange": 0.25, "other": 0.25}
    assert run["commands"][0].endswith("run/experiment.toml")


def test_frames_hold_one_byte_per_node(app: Guard) -> None:
    frames = ask(app, "/api/frames", {"path": "run"}).json["frames"]
    assert [frame["round"] for frame in frames] == list(range(7))
    # Accuracies of 0.06, 0.07 and 0.08 in steps of 1 / 250.
    assert list(base64.b64decode(frames[-1]["accuracy"])) == [15, 18, 20]


def test_the_graph_is_inside_the_picture(app: Guard) -> None:
    graph = ask(app, "/api/graph", {"path": "run"}).json
    assert (graph["count"], graph["edges"], graph["examples"]) == (3, [[0, 1], [1, 2]], [5, 6, 7])
    assert all(0 <= value <= 1 for place in graph["places"] for value in place)


def test_a_node_has_its_own_curves_and_data(app: Guard) -> None:
    node = ask(app, "/api/node", {"path": "run", "node": 1}).json
    assert node["curves"][0]["y"] == pytest.approx([0.01 * (round + 1) for round in range(7)])
    assert (node["labels"], node["classes"], node["neighbours"]) == ([5, 1], ["cat", "dog"], [0, 2])
    assert node["messages"] == {"mean": 200.0}
    assert ask(app, "/api/node", {"path": "run", "node": 3}).status == 400


def test_many_rounds_are_thinned_out(tmp_path: Path) -> None:
    make_run(tmp_path, "long", rounds=1000)
    app = dashboard(tmp_path).app()
    curve = ask(app, "/api/run", {"path": "long"}).json["curves"][0]
    assert (len(curve["x"]), curve["x"][0], curve["x"][-1]) == (400, 0, 1000)
    frames = ask(app, "/api/frames", {"path": "long"}).json["frames"]
    assert (len(frames), frames[-1]["round"]) == (120, 1000)


def test_damaged_folders_are_shown_as_such(home: Path, app: Guard) -> None:
    (home / "run" / "metrics.jsonl").write_text('{"scope": "network", "rou\n')
    run = ask(app, "/api/run", {"path": "run"}).json
    assert (run["status"], run["curves"]) == ("damaged", [])
    (home / "run" / "setup.json").write_text("{")
    for address in ("/api/run", "/api/graph", "/api/frames"):
        assert ask(app, address, {"path": "run"}).status == 200
    assert ask(app, "/api/details", {"path": "run"}).status == 400
    assert ask(app, "/api/run", {"path": "none"}).status == 404


def test_events_send_a_finished_run_once(app: Guard) -> None:
    answer = ask(app, "/api/events", {"path": "run"})
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = answer.text.split("\n\n")[:-1]
    assert len(events) == 1
    assert json.loads(events[0].removeprefix("data: "))["rounds"] == 6


def test_runs_that_differ_in_their_seed_are_one_curve(home: Path) -> None:
    make_run(home, "other-seed", rounds=6, seed=1)
    make_run(home, "longer", rounds=8)
    app = dashboard(home).app()
    paths = [("path", "run"), ("path", "other-seed"), ("path", "longer")]
    found = ask(app, "/api/compare", paths).json
    assert [curve["seeds"] for curve in found["curves"]] == [2, 1]
    assert found["curves"][0]["low"] == pytest.approx(found["curves"][0]["high"])  # equal seeds
    assert len(found["lines"]) == 3
    (home / "longer" / "metrics.jsonl").write_text("nothing\nat all\n")
    found = ask(app, "/api/compare", paths).json
    assert (len(found["lines"]), len(found["failures"])) == (2, 1)


@pytest.mark.slow
def test_downloads_are_the_files_of_reports(home: Path, app: Guard) -> None:
    record = RunRecord.load(home / "run")
    table = ask(app, "/download", {"path": "run", "what": "table.csv"})
    assert table.text == export.TEXTS[".csv"]([record])
    report = ask(app, "/download", {"path": "run", "what": "report.html"})
    assert report.headers["content-disposition"] == 'attachment; filename="run-report.html"'
    assert b"<!doctype html>" in report.body.lower()
    assert ask(app, "/download", {"path": "run", "what": "../x"}).status == 400
    figure = ask(app, "/figure", {"path": "run", "name": "allocation"})
    assert (figure.status, figure.headers["content-type"]) == (200, "image/svg+xml")
    assert ask(app, "/figure", {"path": "run", "name": "head-choice"}).status == 400


def test_colours_are_those_of_the_reports() -> None:
    text = (Path(ui_app.__file__).parent / "static" / "colours.js").read_text()
    arrays = {
        name: re.findall(r"#\w{6}", body)
        for name, body in re.findall(r"const (\w+) = \[([^\]]*)\]", text)
    }
    assert arrays["COLOURS"] == list(figures.COLOURS)
    viridis = matplotlib.colormaps["viridis"]
    assert arrays["VIRIDIS"] == [to_hex(viridis(step / 16)) for step in range(17)]
    phases = dict(re.findall(r'(\w+): "(#\w{6})"', text))
    assert phases == {phase: colour for phase, (colour, _) in figures.BAR_STYLES.items()}
