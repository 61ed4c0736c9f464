"""Pictures of graphs: real files, equal for equal graphs, with the numbers of the report."""

from pathlib import Path

import pytest
from PIL import Image

from peerage.errors import DiskError, InputError
from peerage.graphs.graph import Graph, StaticGraph
from peerage.graphs.mixing import describe
from peerage.graphs.topology import DynamicRegular, ErdosRenyi, Ring, Star
from peerage.report.graphs import caption, plot

PIECES = StaticGraph.from_edges(6, [(0, 1), (1, 2), (3, 4)])


@pytest.mark.slow
@pytest.mark.parametrize(
    "graph",
    [
        ErdosRenyi(p=0.3).build(20, 0),
        Star().build(12, 0),
        Ring().build(1, 0),
        Ring().build(200, 0),
        DynamicRegular().build(10, 0),
        PIECES,
    ],
    ids=["er", "star", "one", "large", "dynamic", "pieces"],
)
def test_every_graph_can_be_drawn(graph: Graph, tmp_path: Path) -> None:
    plot(graph, tmp_path / "graph.png")
    with Image.open(tmp_path / "graph.png") as image:
        assert image.size == (1500, 840)
        assert len(image.convert("RGB").getcolors(1 << 24) or []) > 50


@pytest.mark.slow
def test_equal_graphs_give_equal_files_in_both_formats(tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg", "a.PNG", "b.PNG"):
        plot(ErdosRenyi(p=0.5).build(8, 0), str(tmp_path / name))
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert (tmp_path / "a.PNG").read_bytes() == (tmp_path / "b.PNG").read_bytes()
    assert (tmp_path / "a.svg").read_text().startswith("<?xml")


def test_captions_show_the_main_numbers() -> None:
    assert caption(describe(Ring().build(20, 0))) == (
        "gain 4.472, degree 2, diameter 10\n"
        "spectral gap 0.03263, relaxation time 30.65, mixing time 29"
    )
    assert caption(describe(PIECES)) == (
        "3 components with gains 1.000 to 1.698, mean degree 1 (0 to 2)\n"
        "spectral gap 0, relaxation time infinite, mixing time infinite"
    )


@pytest.mark.parametrize("name", ["graph.pdf", "graph", "graph.png.txt"])
def test_other_formats_are_rejected(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as error:
        plot(PIECES, tmp_path / name)
    assert str(error.value) == f"cannot draw into {name!r}; use a name ending in .png or .svg"


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"the folder .*missing does not exist; create it first"):
        plot(PIECES, tmp_path / "missing" / "graph.png")
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(DiskError, match=r"cannot write .*folder\.png: Is a directory"):
        plot(PIECES, tmp_path / "folder.png")
