"""One list of phases: what engines record is what reports show."""

import importlib
import pkgutil
from collections.abc import Iterator

import peerage.work
from peerage.records.phases import PHASES, in_order, no_time
from peerage.report import figures
from peerage.requests import Compute


def kinds_of_work() -> Iterator[type]:
    """All local work of the package."""
    for module in pkgutil.iter_modules(peerage.work.__path__, "peerage.work."):
        importlib.import_module(module.name)
    left = [Compute]
    while left:
        kind = left.pop()
        left += kind.__subclasses__()
        if kind.__module__.startswith("peerage."):
            yield kind


def test_all_work_of_the_package_has_a_phase_of_the_list() -> None:
    phases = {kind.phase for kind in kinds_of_work()}
    assert {"train", "curvature", "losses", "synthesis", "compute"} == phases
    assert phases <= set(PHASES)


def test_names_differ_and_each_has_its_own_colour() -> None:
    assert len(set(PHASES)) == len(PHASES)
    styles = [tuple(figures.BAR_STYLES[name]) for name in [*PHASES, "other"]]
    assert len(set(styles)) == len(styles)


def test_rows_have_the_same_phases_whatever_was_done() -> None:
    """Also those of older versions: files of runs are compared with each other."""
    recorded = {"train", "curvature", "losses", "compute", "combine", "exchange", "evaluate"}
    assert no_time() == dict.fromkeys(recorded | {"wait"}, 0.0)


def test_phases_are_in_the_order_of_a_round_and_unknown_ones_before_the_rest() -> None:
    assert in_order(["other", "wait", "b", "losses", "a", "train", "a"]) == [
        "train",
        "losses",
        "wait",
        "a",
        "b",
        "other",
    ]
    assert in_order([]) == []
