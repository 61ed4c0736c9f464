"""The head choice of nodes: when it settled, how many chose which head, and its pictures."""

import json
from typing import Any

import pytest
from support.clustered import clustered, heads

from peerage.report import fairness_figures, fairness_tables
from peerage.report.head_choice import (
    Settlement,
    has_head_choices,
    head_choices,
    head_losses,
    histograms,
    number_of_heads,
    settlement,
)

NODES = [0, 1, 0, 1]  # clusters of four nodes


def run(choices: dict[int, list[int | None]], k: int = 2, **changes: Any) -> Any:
    """A run with these heads by round and node; None: no choice."""
    accuracies = {(round, False): [0.5] * 4 for round in choices}
    notes = {round: heads(chosen, k) for round, chosen in choices.items()}
    return clustered(NODES, accuracies, notes=notes, **changes)


SETTLED = {
    0: [None] * 4,
    2: [None] * 4,  # tied heads
    4: [0, 1, 0, 1],  # settled for a moment
    6: [0, 0, 0, 1],
    8: [1, 0, 1, 0],
    10: [1, 0, 1, 0],
}


def test_settled_means_until_the_end() -> None:
    assert settlement(run(SETTLED)) == Settlement(settled=8, separated=8)
    assert settlement(run(SETTLED | {12: [1, 0, 1, 1]})) == Settlement(None, None)
    assert settlement(run({1: [0, 0, 0, 0]})) == Settlement(None, None)
    assert settlement(run({1: [0, 1, 0, 1]})) == Settlement(1, 1)


def test_more_heads_than_clusters_may_be_separated_only() -> None:
    choices = {1: [0, 0, 1, 2], 2: [0, 2, 1, 2], 3: [1, 2, 0, 2]}
    assert settlement(run(choices, k=3)) == Settlement(settled=None, separated=2)
    # A cluster that gives up one of its heads settles later.
    assert settlement(run(choices | {4: [1, 2, 1, 2]}, k=3)) == Settlement(4, 2)


def test_heads_may_change_between_clusters_while_settled() -> None:
    assert settlement(run({1: [0, 1, 0, 1], 2: [1, 0, 1, 0]})) == Settlement(1, 1)


def test_absent_nodes_do_not_choose() -> None:
    assert settlement(run({1: [0, 1, None, 1], 2: [0, None, 0, None]})) == Settlement(1, 1)


def test_no_clusters_or_no_notes() -> None:
    silent = clustered(NODES, {(1, False): [0.5] * 4})
    assert settlement(silent) is None
    assert not has_head_choices(silent)
    assert number_of_heads(silent) == 0
    assert head_losses(silent) == {}


def test_histograms() -> None:
    record = run(SETTLED, k=3)
    assert list(head_choices(record)) == [4, 6, 8, 10]
    assert number_of_heads(record) == 3
    assert histograms(record)[6] == [[2, 0, 0], [1, 1, 0]]
    assert histograms(record)[8] == [[0, 2, 0], [2, 0, 0]]


def test_the_final_row_does_not_hide_the_last_choice() -> None:
    accuracies = {(1, False): [0.5] * 4, (1, True): [0.6] * 4}
    record = clustered(NODES, accuracies, notes={1: heads([0, 1, 0, 1])})
    assert head_choices(record) == {1: {0: 0, 1: 1, 2: 0, 3: 1}}


def test_losses_are_means_over_the_nodes_of_a_cluster() -> None:
    found = head_losses(run(SETTLED))
    assert found[0][0] == ([4, 6, 8, 10], pytest.approx([0.5, 0.5, 1.0, 1.0]))
    assert found[1][0] == ([4, 6, 8, 10], pytest.approx([1.0, 0.75, 0.5, 0.5]))


def test_tables_and_json() -> None:
    titles, line = fairness_tables.lines([run(SETTLED)])
    row = dict(zip(titles, line, strict=True))
    assert (row["separated from round"], row["settled from round"]) == ("8", "8")
    never = run({1: [0, 0, 0, 0]}, name="other")
    titles, _, line = fairness_tables.lines([run(SETTLED), never])
    assert dict(zip(titles, line, strict=True))["settled from round"] == "never"
    table = json.loads(json.dumps(fairness_tables.for_json(run(SETTLED))))["head_choice"]
    assert (table["settled"], table["separated"]) == (8, 8)
    assert dict(zip(table["rounds"], table["histograms"], strict=True))[10] == [[0, 2], [2, 0]]


def test_the_picture_of_choices() -> None:
    [axes] = fairness_figures.head_choice(run(SETTLED)).axes
    [mesh] = axes.collections
    table = mesh.get_array().reshape(4, 5)  # nodes by cluster, rounds 2 to 10
    assert table.filled(-1).tolist() == [
        [-1, 0, 0, 1, 1],
        [-1, 0, 0, 1, 1],
        [-1, 1, 0, 0, 0],
        [-1, 1, 1, 0, 0],
    ]
    assert axes.get_title(loc="left") == "settled from round 8 on (dashed line)"
    between, settled = axes.get_lines()
    assert set(between.get_ydata()) == {2}
    assert set(settled.get_xdata()) == {7.0}  # the left border of round 8


def test_pictures_of_unsettled_runs() -> None:
    for choices, title in (
        ({1: [0, 0, 0, 0]}, "never settled"),
        (
            {1: [0, 2, 1, 2], 3: [0, 2, 1, 2]},
            "never settled; clusters separated from round 1 on",
        ),
    ):
        [axes] = fairness_figures.head_choice(run(choices, k=3)).axes
        assert axes.get_title(loc="left") == title


def test_the_picture_of_losses() -> None:
    left, right = fairness_figures.head_loss_curves(run(SETTLED)).axes
    assert [axes.get_title() for axes in (left, right)] == ["cluster 0", "cluster 1"]
    assert [list(line.get_ydata()) for line in right.get_lines()[:2]] == [
        pytest.approx([1.0, 0.75, 0.5, 0.5]),
        pytest.approx([0.5, 0.75, 1.0, 1.0]),
    ]


def sweep(k: int, seed: int, value: float) -> Any:
    algorithm = {"name": "facade", "k": k}
    changes = {"experiment": {"algorithm": algorithm, "seed": seed}}
    return clustered([0, 1], {(1, False): [value, value - 0.2]}, **changes)


def test_sweeps_over_the_number_of_heads() -> None:
    records = [sweep(k, seed, 0.5 + 0.1 * k + 0.02 * seed) for k in (3, 1, 2) for seed in (0, 1)]
    [found] = fairness_tables.head_sweeps(records)
    assert {k: len(runs) for k, runs in found.items()} == {3: 2, 1: 2, 2: 2}
    [axes] = fairness_figures.head_sweep(found).axes
    majority, minority, fair = (container.lines[0] for container in axes.containers)
    assert list(majority.get_xdata()) == [1, 2, 3]
    assert list(majority.get_ydata()) == pytest.approx([0.61, 0.71, 0.81])
    assert list(minority.get_ydata()) == pytest.approx([0.41, 0.51, 0.61])
    assert list(fair.get_ydata()) == pytest.approx(
        [2 / 3 * mean + 1 / 3 * 0.8 for mean in (0.51, 0.61, 0.71)]
    )
    assert fairness_tables.head_sweeps(records[:2]) == []  # one number of heads is no sweep


def test_a_report_shows_the_pictures_of_heads() -> None:
    titles = [shown.title for shown in fairness_figures.shown([run(SETTLED)])]
    assert titles == ["Head choice", "Losses of heads"]
    one = run({1: [0, 0, 0, 0]}, k=1)
    assert [shown.title for shown in fairness_figures.shown([one])] == ["Head choice"]
