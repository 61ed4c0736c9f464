"""The example notebook runs from top to bottom in a real kernel, and shows what it should."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.processes import TIMEOUT

NOTEBOOK = Path(__file__).parent.parent / "examples" / "first-hour.ipynb"


def test_the_notebook_is_kept_without_outputs():
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert code
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """The outputs of every cell by its id, after a run in an empty folder."""
    pytest.importorskip("ipykernel")
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    where = {"metadata": {"path": str(tmp_path_factory.mktemp("notebook"))}}
    nbclient.NotebookClient(notebook, timeout=TIMEOUT, resources=where).execute()
    return {cell.id: cell.get("outputs", []) for cell in notebook.cells}


def results(outputs: list[dict[str, Any]], kind: str) -> list[str]:
    return [one["data"][kind] for one in outputs if kind in one.get("data", {})]


@pytest.mark.slow
def test_the_notebook_runs_and_shows_results(cells):
    assert "Experiment: dechw on digits" in results(cells["experiment"], "text/html")[0]
    assert "<polyline" in results(cells["result"], "text/html")[-1]
    assert results(cells["compared"], "text/html")[-1].count("<polyline") == 3
    assert results(cells["figure"], "image/png")
    assert results(cells["gossip"], "image/png")
    assert results(cells["saved"], "text/plain")[-1] == "True"


@pytest.mark.slow
def test_a_run_in_a_notebook_has_one_bar_and_no_lines(cells):
    bars = [page for page in results(cells["compared"], "text/html") if "<progress" in page]
    assert len(bars) == 3  # one for each run, in its last state
    assert all(re.search(r'value="3" max="3".*round 3/3', bar) for bar in bars)
    streams = [
        one for outputs in cells.values() for one in outputs if one["output_type"] == "stream"
    ]
    assert streams == []
