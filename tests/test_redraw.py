"""`tools/redraw.py`: figures of committed results, drawn again from their JSON."""

import json
import sys
from pathlib import Path

import pytest
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
from redraw import redraw

ROOT = Path(__file__).parents[1]
NAME = "p2-fig3-paper-standard"


@pytest.fixture
def copy(tmp_path):
    for suffix in (".json", ".md"):
        path = ROOT / "docs/results/p2" / f"{NAME}{suffix}"
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path / f"{NAME}.json"


def test_the_committed_figure_is_what_its_json_gives(copy):
    shown = redraw(copy)
    stored = json.loads(copy.read_text())
    page = copy.with_suffix(".md").read_text()
    assert all(table.markdown() in page for table in shown.tables)
    committed = ROOT / "docs/results/p2" / f"{NAME}.png"
    with Image.open(copy.with_suffix(".png")) as new, Image.open(committed) as old:
        assert new.size == old.size
    curve = next(c for c in stored["curves"] if (c["dataset"], c["method"]) == ("mnist", "HWA"))
    drawn = shown.figure.axes[0].get_lines()[3].get_ydata()
    assert list(drawn) == pytest.approx(curve["accuracy"][1:])


def test_another_number_than_that_of_the_page_is_refused(copy):
    stored = json.loads(copy.read_text())
    stored["runs"][0]["accuracy"] -= 0.01
    copy.write_text(json.dumps(stored))
    with pytest.raises(SystemExit, match=r"Fig\. 3: accuracy in the last round"):
        redraw(copy)
    assert not copy.with_suffix(".png").exists()
