"""Percentages in the README and beside its pictures are those of docs/results/pictures.json."""

import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from peerage.experiment.catalogue import recipes

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
import pictures

ROOT = Path(__file__).parents[1]
STORED: dict[str, dict[str, Any]] = json.loads((ROOT / pictures.NUMBERS).read_text())

# Sentences of each document, with places for numbers: picture/run, and which number.
SENTENCES = {
    "README.md": [
        "DecHW climbs to {demo/dechw:.0f} %, plain averaging stays near {demo/decavg:.0f} %",
        "{heads/facade/1} % instead of {heads/el/1} % with plain averaging",
        "DFML climbs to {mutual/dfml:.0f} %, Dec. FedAvg to {mutual/dec-fedavg:.0f} %",
        "average the models of their neighbours ({network/decavg} %, mean over the nodes)",
        "weight parameters by curvature ({network/dechw} %, seed 0)",
    ],
    "docs/pictures.md": [
        "DecHW climbs to {demo/dechw:.0f} %, plain averaging stays near {demo/decavg:.0f} %",
        "plain averaging is at {demo/decavg} % and DecHW at {demo/dechw} %",
        "{demo/decavg, seed 1} against {demo/dechw, seed 1} % with seed 1",
        "{demo/decavg, seed 2} against {demo/dechw, seed 2} % with seed 2",
        "shared* start reaches {demo/decavg, shared} % after",
        "{demo/dechw/MB:.0f} MB instead of {demo/decavg/MB:.0f} MB for all nodes",
        "from {demo/dechw/min} to {demo/dechw/max} % with DecHW",
        "Plain averaging has {network/decavg} %, and DecHW {network/dechw} % (seed 0)",
        "between {network/decavg/min} and {network/decavg/max} % with plain averaging",
        "between {network/dechw/min} and {network/dechw/max} % with DecHW",
        "ends with an accuracy of {heads/facade/1} %, and with plain averaging (`el`) of "
        "{heads/el/1} %; the majority has {heads/facade/0} % with both",
        "the minority has {heads/facade, seed 3/1} %.",
        "DFML climbs to {mutual/dfml:.0f} %, Dec. FedAvg to {mutual/dec-fedavg:.0f} %",
        "the clients of DFML have {mutual/dfml} %",
        "architecture only, {mutual/dec-fedavg} % (seed 0)",
        "clients have {mutual/dfml, alpha 0} %",
        "(`--epochs 11`) has {mutual/dec-fedavg, 11 epochs} %",
    ],
    "docs/lessons.md": ["of {mutual/dec-fedavg} % ([pictures](pictures.md"],
}


def stated(place: str) -> str:
    """A number as text: the accuracy in percent, or another one that the last word names."""
    place, _, digits = place.partition(":")
    picture, run, *which = place.split("/")
    found = STORED[picture][run]
    kind = which[0] if which else "mean"
    value = {
        "mean": 100 * found["accuracy"],
        "min": 100 * found["accuracy_min"],
        "max": 100 * found["accuracy_max"],
        "MB": found["bytes_total"] / 1e6,
        **{name: 100 * accuracy for name, accuracy in found.get("clusters", {}).items()},
    }[kind]
    return format(value, digits or ".1f")


def sentences(document: str) -> list[str]:
    return [
        re.sub(r"\{(.*?)\}", lambda match: stated(match[1]), sentence)
        for sentence in SENTENCES[document]
    ]


@pytest.mark.parametrize("document", SENTENCES)
def test_the_numbers_are_those_of_the_runs(document: str) -> None:
    text = " ".join((ROOT / document).read_text().split())
    assert [sentence for sentence in sentences(document) if sentence not in text] == []


@pytest.mark.parametrize("document", ["README.md", "docs/pictures.md"])
def test_no_percentage_is_without_a_run(document: str) -> None:
    text = " ".join((ROOT / document).read_text().split())
    for sentence in sentences(document):
        text = text.replace(sentence, "")
    assert re.findall(r"[^ ]+ [^ ]+ \d[\d.]* ?%", text) == []


def test_the_stored_runs_are_those_of_the_tool() -> None:
    commands = {
        picture: {title: f"peerage run {words}" for title, words in runs.items()}
        for picture, runs in pictures.RUNS.items()
    }
    assert {
        picture: {title: run["command"] for title, run in runs.items()}
        for picture, runs in STORED.items()
    } == commands
    for runs in STORED.values():
        for run in runs.values():
            assert re.fullmatch("[0-9a-f]{64}", run["digest"])
            assert shlex.split(run["command"])[2] in recipes()
