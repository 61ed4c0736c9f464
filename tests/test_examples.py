"""The example files: short, run as they are, and the same on every engine and between peers."""

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from support.networking import OverSockets, run_peers

import peerage as pg
from peerage.experiment.outside import load_class
from peerage.testing import check_algorithm, toy

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))
# The class in each file, and the laws that do not apply to it.
ALGORITHMS: dict[str, tuple[str, tuple[str, ...]]] = {
    # Models of different architectures cannot share their mass.
    "push_sum": ("PushSum", ("architectures",)),
    # It sends to those from which it receives, so it needs an undirected graph.
    "choco": ("Choco", ("architectures", "directed")),
    # It takes single steps of its own, on batches that depend on the number of a node.
    "gradient_tracking": (
        "GradientTracking",
        ("isolated", "relabelling", "architectures", "directed"),
    ),
    # It divides by the learning rate, and nobody is without neighbours where there is a hub.
    "scaffold": ("Scaffold", ("isolated", "consensus")),
    # The choice of recipients depends on the number of a node, and is not limited to neighbours.
    "el_local": ("ELLocal", ("isolated", "relabelling")),
}


def definitions(name: str) -> dict[str, Any]:
    path = next(path for path in EXAMPLES if path.stem == name)
    return runpy.run_path(str(path))


def experiment(name: str, **changes: Any) -> pg.Experiment:
    """A short experiment with the algorithm or the model of an example."""
    found = definitions(name)
    if name == "fine_tuning":
        torch.manual_seed(0)
        return found["experiment"](found["Frozen"](), nodes=4, rounds=2).model_copy(update=changes)
    algorithm = found[ALGORITHMS[name][0]]()
    if name == "push_sum":
        changes = {"topology": "ring", **changes}
    return toy(algorithm, **changes)


def test_there_are_at_least_six_examples_and_none_is_long():
    assert len(EXAMPLES) >= 6
    assert {path.stem for path in EXAMPLES} == {*ALGORITHMS, "fine_tuning", "own_everything"}
    for path in EXAMPLES:
        assert len(path.read_text().splitlines()) <= 80, path.name


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_and_learns(path, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(path), run_name="__main__")
    shares = [float(share) for share in re.findall(r"([\d.]+)%", capsys.readouterr().out)]
    assert len(shares) >= 2
    assert min(shares) > 35  # ten classes, or three in own_everything


@pytest.mark.slow
@pytest.mark.parametrize("name", [*ALGORITHMS, "fine_tuning"])
def test_an_example_has_the_same_bits_everywhere(name, tmp_path):
    serial = pg.run(experiment(name, engine=pg.Engine(name="serial")))
    pool = pg.run(experiment(name, engine=pg.Engine(name="pool", workers=2)))
    assert pool.digest == serial.digest
    peers = run_peers(experiment(name), transports=OverSockets(tmp_path))
    for peer, wanted in zip(peers, serial.parameters, strict=True):
        kept = peer.shard.members[peer.me].node.params
        assert not kept.numel() or torch.equal(kept, wanted)  # clients of a hub keep nothing
        assert not peer.counters


@pytest.mark.slow
@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_example_keeps_the_laws(name):
    cls, exceptions = ALGORITHMS[name]
    path = next(path for path in EXAMPLES if path.stem == name)
    check_algorithm(load_class(path, cls)(), exceptions=exceptions)
