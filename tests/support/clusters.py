"""A small experiment with two clusters, for tests of groups of nodes."""

from typing import Any

import peerage as pg

FOUR = {
    "algorithm": "decavg",
    "dataset": "digits",
    "model": "logistic",
    "nodes": 4,
    "partition": "iid",
    "topology": "ring",
    "clusters": "3/1:rotate",
    "rounds": 2,
    "local": {"epochs": 1},
    "evaluation": {"at": "end"},
    "engine": {"name": "serial"},
}


def experiment(**changes: Any) -> pg.Experiment:
    return pg.Experiment(**FOUR | changes)
