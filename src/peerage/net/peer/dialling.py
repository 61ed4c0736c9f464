"""Which peers can exchange messages if some of them open no port and only dial out."""

from collections.abc import Collection, Sequence
from itertools import combinations
from typing import Any

from peerage.algorithm import Algorithm
from peerage.errors import InputError
from peerage.graphs.graph import Graph

STAR = "choose a graph in which they are not neighbours, such as a star around a reachable peer"
OTHER_ALGORITHM = (
    "choose an algorithm in which only neighbours meet, such as decavg, or fedavg with a hub that "
    "is reachable"
)


def check_partners(
    algorithm: Algorithm[Any], graph: Graph, dialling: Collection[int], names: Sequence[str]
) -> None:
    """Raise InputError if two peers that dial out would have to exchange messages."""
    for a, b in combinations(sorted(dialling), 2):
        pair = f"{names[a]} and {names[b]}"
        if graph.dynamic:
            raise InputError(
                f"{pair} both dial out and cannot reach each other, but in a graph that changes by "
                f"round any two peers meet; make one of them reachable, or {STAR}"
            )
        near = graph.neighbours(0)
        if b in near[a] or a in near[b]:
            raise InputError(
                f"{pair} are neighbours, but both dial out and cannot reach each other; make one "
                f"of them reachable, or {STAR}"
            )
        if algorithm.may_meet(a, b):
            switch = "switch its step after the last round off, " if algorithm.has_final else ""
            raise InputError(
                f"{pair} both dial out and cannot reach each other, but in this algorithm peers "
                "that are not neighbours exchange messages as well; make one of them reachable, "
                f"{switch}or {OTHER_ALGORITHM}"
            )


def parse_numbers(text: str, nodes: int) -> tuple[int, ...]:
    """The numbers of the peers that dial out, from the command line.

    >>> parse_numbers("2, 0", 3)
    (0, 2)
    """
    words = [word.strip() for word in text.split(",") if word.strip()]
    for word in words:
        if not (word.isascii() and word.isdecimal() and len(word) < 10 and int(word) < nodes):
            raise InputError(
                f"--dials-out {word!r} is not the number of a peer; they are 0 to {nodes - 1}"
            )
    return tuple(sorted({int(word) for word in words}))
