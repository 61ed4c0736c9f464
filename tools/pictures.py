"""Runs what the pictures of the README show, and keeps the numbers as JSON.

    python tools/pictures.py            # all of them; takes several minutes
    python tools/pictures.py network    # one of demo, heads, mutual and network

The numbers are in docs/results/pictures.json, each with the command that makes its run. A test
compares the README and docs/pictures.md with them. `network` is also drawn, in docs/images; the
others are drawn by `make demo`, tools/heads.py and tools/mutual.py.
"""

import json
import shlex
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from peerage.files import compact_json
from peerage.records.rows import RunRecord
from peerage.report import figures

NETWORK = Path("docs/images/network.png")
NUMBERS = Path("docs/results/pictures.json")
DPI = 110  # keeps the file small
SPARSE = "--nodes 30 --topology small-world:k=4,p=0.2"
RUNS = {
    "demo": {
        "decavg": "demo --algorithm decavg",
        "dechw": "demo",
        "decavg, seed 1": "demo --algorithm decavg --seed 1",
        "dechw, seed 1": "demo --seed 1",
        "decavg, seed 2": "demo --algorithm decavg --seed 2",
        "dechw, seed 2": "demo --seed 2",
        "decavg, shared": "demo --algorithm decavg --init shared",
    },
    "heads": {
        "el": "facade-quick --algorithm el",
        "facade": "facade-quick",
        "facade, seed 3": "facade-quick --seed 3",
    },
    "mutual": {
        "dec-fedavg": "dfml-quick --algorithm dec-fedavg",
        "dfml": "dfml-quick",
        "dfml, alpha 0": "dfml-quick --algorithm dfml:alpha_max=0",
        "dec-fedavg, 11 epochs": "dfml-quick --algorithm dec-fedavg --epochs 11",
    },
    "network": {
        "decavg": f"demo --algorithm decavg {SPARSE}",
        "dechw": f"demo {SPARSE}",
    },
}
KEPT = ("accuracy", "accuracy_min", "accuracy_max", "bytes_total")  # of the last round


def numbers(record: RunRecord, command: str) -> dict[str, Any]:
    """What the documents state about a run, with its command and digest."""
    last = record.network[-1]
    clusters = record.group_curves("accuracy", "cluster")
    groups = {str(name): values[-1] for name, (_, values) in clusters.items()}
    return {
        "command": command,
        "digest": record.summary["digest"],
        **{key: last[key] for key in KEPT},
        **({"clusters": groups} if groups else {}),
    }


def run(words: str, folder: Path) -> RunRecord:
    command = [sys.executable, "-m", "peerage", "run", *shlex.split(words), "--out", str(folder)]
    subprocess.run([*command, "--quiet"], check=True, stdout=subprocess.DEVNULL)
    return RunRecord.load(folder)


def measure(name: str, home: Path) -> dict[str, Any]:
    """Make the runs of a picture, and return their numbers."""
    records = {title: run(words, home / title) for title, words in RUNS[name].items()}
    if name == "network":
        figures.save(figures.graph(list(records.values())), NETWORK, DPI)
    return {
        title: numbers(record, f"peerage run {RUNS[name][title]}")
        for title, record in records.items()
    }


if __name__ == "__main__":
    found = json.loads(NUMBERS.read_text()) if NUMBERS.exists() else {}
    for name in sys.argv[1:] or RUNS:
        with TemporaryDirectory() as home:
            found[name] = measure(name, Path(home))
        NUMBERS.write_text(compact_json(found) + "\n")
