"""Fairness between clusters: by hand on small counts, by laws, and against fairlearn."""

import json
from dataclasses import replace
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from support.clustered import EVEN, SKEWED, clustered

from peerage.report import fairness_figures, fairness_tables
from peerage.report.fairness import (
    bytes_to,
    common_target,
    demographic_parity,
    equalised_odds,
    fair_accuracy,
    fair_accuracy_curve,
    fairness_over_rounds,
    fairness_over_seeds,
    highest_fair_accuracy,
    jain,
    over_pairs,
    worst_share,
)

# By hand


def test_two_classes() -> None:
    # Predicted: (4, 4) and (6, 2) of 8. True positives: 3/4, 3/4 and 4/4, 2/4. False: 1/4, 1/4 and
    # 2/4, 0/4.
    assert demographic_parity(EVEN, SKEWED) == pytest.approx(0.25)
    assert demographic_parity(EVEN, SKEWED, reduction="sum") == pytest.approx(0.5)
    assert equalised_odds(EVEN, SKEWED) == pytest.approx(0.5)
    assert equalised_odds(EVEN, SKEWED, terms="tpr") == pytest.approx(0.25)
    assert equalised_odds(EVEN, SKEWED, reduction="sum", terms="tpr") == pytest.approx(0.5)


def test_clusters_with_their_own_labels() -> None:
    a = [[2, 2, 0], [0, 0, 0], [1, 0, 3]]  # without class 1
    b = [[0, 0, 0], [0, 4, 0], [0, 2, 2]]  # without class 0
    assert demographic_parity(a, b) == pytest.approx((3 / 8 + 4 / 8 + 1 / 8) / 3)
    # Only class 2 has true positive rates in both, but all have false positive rates.
    assert equalised_odds(a, b, terms="tpr") == pytest.approx(1 / 4)
    assert equalised_odds(a, b) == pytest.approx(1 / 4 + (1 / 4 + 1 / 4 + 0) / 3)


def test_what_is_not_defined_is_none() -> None:
    left, right = [[5, 0], [0, 0]], [[0, 0], [0, 5]]
    assert equalised_odds(left, right) is None  # no class in common
    assert demographic_parity(left, right) == 1.0
    assert demographic_parity(left, [[0, 0], [0, 0]]) is None
    assert equalised_odds([[5]], [[4]]) == 0.0  # a single class has no false positives


def test_pairs_of_three_clusters() -> None:
    confusions = [EVEN, SKEWED, EVEN]
    assert over_pairs(demographic_parity, confusions) == pytest.approx((0.25, 0.5 / 3))
    assert over_pairs(demographic_parity, confusions[:2]) == pytest.approx((0.25, 0.25))
    disjoint = [[[5, 0], [0, 0]], [[0, 0], [0, 5]], [[4, 1], [0, 5]]]
    # The first and second have no class in common; TPR + FPR of the other pairs.
    largest, mean = over_pairs(equalised_odds, disjoint)
    pairs = [equalised_odds(disjoint[0], disjoint[2]), equalised_odds(disjoint[1], disjoint[2])]
    assert (largest, mean) == pytest.approx((max(pairs), sum(pairs) / 2))
    assert over_pairs(equalised_odds, disjoint[:2]) == (None, None)


def test_fair_accuracy_by_hand() -> None:
    assert fair_accuracy([0.9, 0.6]) == pytest.approx(2 / 3 * 0.75 + 1 / 3 * 0.7)
    assert fair_accuracy([0.9, 0.6], weight=1 / 3) == pytest.approx(1 / 3 * 0.75 + 2 / 3 * 0.7)
    assert fair_accuracy([0.9, 0.6, 0.8]) == pytest.approx(2 / 3 * 2.3 / 3 + 1 / 3 * 0.7)


def test_the_worst_nodes() -> None:
    values = [0.9, 0.1, 0.3, *[0.8] * 27]
    assert worst_share(values) == pytest.approx((0.1 + 0.3 + 0.8) / 3)
    assert worst_share([*values, 0.7]) == pytest.approx((0.1 + 0.3 + 0.7 + 0.8) / 4)  # of 31
    assert worst_share([0.4, 0.5]) == 0.4
    assert worst_share([float(k) for k in range(70)]) == 3.0  # the lowest 7


def test_jain() -> None:
    assert jain([0.3] * 5) == pytest.approx(1.0)
    assert jain([1.0, 0.0, 0.0, 0.0]) == pytest.approx(1 / 4)
    assert jain([0.6, 0.8]) == pytest.approx(1.4**2 / (2 * 1.0))
    assert jain([0.0, 0.0]) == 1.0


# Laws


@st.composite
def counts(draw: st.DrawFn, clusters: int = 2) -> list[np.ndarray[Any, Any]]:
    """Confusion counts of clusters, each with at least one example of every class."""
    classes = draw(st.integers(2, 5))
    cells = st.lists(st.integers(0, 9), min_size=classes**2, max_size=classes**2)
    found = [np.array(draw(cells)).reshape(classes, classes) for _ in range(clusters)]
    return [one + np.eye(classes, dtype=int) for one in found]


MEASURES = [
    demographic_parity,
    equalised_odds,
    lambda a, b: demographic_parity(a, b, reduction="sum"),
    lambda a, b: equalised_odds(a, b, reduction="sum", terms="tpr"),
]


@settings(max_examples=40)
@given(counts(), st.randoms(use_true_random=False))
def test_laws_of_gaps(pair: list[np.ndarray[Any, Any]], random: Any) -> None:
    a, b = pair
    classes = len(a)
    order = random.sample(range(classes), classes)
    moved = [one[np.ix_(order, order)] for one in pair]
    for measure in MEASURES:
        value = measure(a, b)
        assert measure(a, a) == 0.0
        assert measure(a, 3 * a) == pytest.approx(0.0, abs=1e-12)  # more nodes of the same kind
        assert measure(b, a) == pytest.approx(value)
        assert measure(*moved) == pytest.approx(value)
        assert value >= 0.0
    assert demographic_parity(a, b) <= 2 / classes + 1e-12
    assert equalised_odds(a, b) <= 2.0
    assert equalised_odds(a, b, terms="tpr") <= equalised_odds(a, b) + 1e-12


@given(st.lists(st.floats(0, 1), min_size=1, max_size=40))
def test_laws_of_nodes_and_clusters(values: list[float]) -> None:
    assert 1 / len(values) - 1e-9 <= jain(values) <= 1 + 1e-9
    mean = sum(values) / len(values)
    assert min(values) - 1e-9 <= worst_share(values) <= mean + 1e-9
    assert worst_share(values, 1.0) == pytest.approx(mean)
    assert fair_accuracy(values) <= 2 / 3 * mean + 1 / 3 + 1e-9
    assert fair_accuracy([mean]) == pytest.approx(2 / 3 * mean + 1 / 3)


# A second implementation


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_fairlearn_agrees_class_by_class(seed: int) -> None:
    from fairlearn.metrics import (
        MetricFrame,
        false_positive_rate,
        selection_rate,
        true_positive_rate,
    )

    rng = np.random.default_rng(seed)
    pair = rng.integers(0, 30, size=(2, 6, 6)) + np.eye(6, dtype=int)
    cluster, label, predicted = np.repeat(
        np.argwhere(pair >= 0), pair.ravel(), axis=0
    ).T  # one column per example
    gaps = []
    for c in range(6):  # one against the rest
        frame = MetricFrame(
            metrics={"dp": selection_rate, "tpr": true_positive_rate, "fpr": false_positive_rate},
            y_true=(label == c).astype(int),
            y_pred=(predicted == c).astype(int),
            sensitive_features=cluster,
        )
        gaps.append(frame.difference(method="between_groups"))
    parity = [gap["dp"] for gap in gaps]
    odds = [gap["tpr"] + gap["fpr"] for gap in gaps]
    assert demographic_parity(*pair) == pytest.approx(np.mean(parity))
    assert demographic_parity(*pair, reduction="sum") == pytest.approx(np.sum(parity))
    assert equalised_odds(*pair) == pytest.approx(np.mean(odds))
    assert equalised_odds(*pair, terms="tpr") == pytest.approx(np.mean([g["tpr"] for g in gaps]))


# Records


RUN = {
    (0, False): [0.1, 0.1, 0.1],
    (2, False): [0.7, 0.9, 0.6],
    (4, False): [0.8, 0.8, 0.2],
    (4, True): [0.7, 0.7, 0.4],
}


def test_every_evaluation_of_a_run() -> None:
    found = fairness_over_rounds(clustered([0, 0, 1], RUN))
    assert [(one.round, one.final) for one in found] == list(RUN)
    last = found[-1]
    assert last.accuracies == pytest.approx((0.7, 0.4))
    assert last.sizes == (2, 1)
    assert last.accuracy == pytest.approx(0.6)  # over nodes, not over clusters
    assert last.gap == pytest.approx(0.3)
    assert (last.parity, last.parity_mean) == pytest.approx((0.25, 0.25))
    assert (last.odds, last.odds_mean) == pytest.approx((0.5, 0.5))
    assert last.fair_accuracy == pytest.approx(2 / 3 * 0.55 + 1 / 3 * 0.7)
    assert (last.worst_node, last.worst_tenth) == (0.4, 0.4)
    assert last.jain == pytest.approx(1.8**2 / (3 * (0.49 + 0.49 + 0.16)))
    # In round 2, clusters have 0.8 and 0.6: the highest.
    assert highest_fair_accuracy(found) == (2, pytest.approx(2 / 3 * 0.7 + 1 / 3 * 0.8))
    third = fairness_over_rounds(clustered([0, 0, 1], RUN), weight=1 / 3)[-1]
    assert third.fair_accuracy == pytest.approx(1 / 3 * 0.55 + 2 / 3 * 0.7)


def test_the_order_of_rows_does_not_matter() -> None:
    record = clustered([0, 0, 1], RUN)
    backwards = replace(record, groups=record.groups[::-1], nodes=record.nodes[::-1])
    assert fairness_over_rounds(backwards) == fairness_over_rounds(record)


def test_runs_without_two_clusters_have_no_fairness() -> None:
    record = clustered([0, 0, 1], RUN)
    assert fairness_over_rounds(replace(record, setup={})) == []
    assert fairness_over_rounds(clustered([0, 0], {(0, False): [0.5, 0.6]})) == []
    assert fairness_over_seeds([replace(record, setup={})]) is None
    assert fairness_over_seeds([]) is None


def test_an_absent_cluster_and_a_diverged_node() -> None:
    run = {(1, False): [0.5, 0.7, None], (2, False): [0.5, nan, 0.3], (3, False): [0.5, None, 0.3]}
    absent, diverged, without = fairness_over_rounds(clustered([0, 0, 1], run))
    assert absent.accuracies == (pytest.approx(0.6), None)
    assert absent.sizes == (2, 0)
    assert absent.fair_accuracy is absent.parity is absent.odds is absent.gap is None
    assert absent.accuracy == pytest.approx(0.6)  # of the nodes that are present
    assert diverged.accuracies == (None, 0.3)
    assert diverged.fair_accuracy is diverged.worst_node is diverged.jain is None
    assert diverged.parity == pytest.approx(0.25)  # a model that diverged predicts something
    assert without.sizes == (1, 1)
    assert without.fair_accuracy == pytest.approx(2 / 3 * 0.4 + 1 / 3 * 0.8)
    assert without.worst_node == 0.3


def test_the_model_of_a_hub_counts_for_every_node() -> None:
    record = clustered([0, 0, 1, None], {(1, False): [0.8, 0.8, 0.2, 0.6]})
    hub_only = replace(record, nodes=record.nodes[-1:])  # the hub has the only model
    [found] = fairness_over_rounds(hub_only)
    assert (found.accuracy, found.worst_node) == (pytest.approx(0.6), 0.2)
    assert found.jain == pytest.approx(1.8**2 / (3 * (0.64 + 0.64 + 0.04)))
    # If clients keep models, that of the hub does not count.
    [both] = fairness_over_rounds(record)
    assert both == found


# Several seeds, and several methods


def two_seeds() -> list[Any]:
    last = {(0, False): [0.1, 0.1], (2, False): [0.9, 0.5], (2, True): [0.8, 0.6]}
    other = {(0, False): [0.1, 0.1], (2, False): [0.5, 0.9], (2, True): [0.6, 0.8]}
    return [
        clustered([0, 1], values, experiment={"seed": seed})
        for seed, values in enumerate((last, other))
    ]


def test_seeds_are_averaged_before_or_after() -> None:
    found = fairness_over_seeds(two_seeds())
    assert found is not None
    assert found.accuracies == ((pytest.approx(0.7), pytest.approx(0.1)),) * 2
    assert found.accuracy == (pytest.approx(0.7), pytest.approx(0.0))
    # Clusters that are ahead in turn have no gap on average, but one in every seed.
    assert found.fair_accuracy_of_means == pytest.approx(2 / 3 * 0.7 + 1 / 3)
    assert found.fair_accuracy.mean == pytest.approx(2 / 3 * 0.7 + 1 / 3 * 0.8)
    assert found.highest_of_means == (2, pytest.approx(2 / 3 * 0.7 + 1 / 3))
    assert found.highest.mean == pytest.approx(2 / 3 * 0.7 + 1 / 3 * 0.8)
    assert found.parity_by_seed == pytest.approx((0.25, 0.25))
    assert found.parity == (pytest.approx(0.25), pytest.approx(0.0))
    curve = fair_accuracy_curve(two_seeds())
    assert curve.rounds == [0, 2]
    assert curve.means[-1] == pytest.approx(2 / 3 * 0.7 + 1 / 3)
    assert curve.stds == pytest.approx([0.0, 0.0])


def test_a_seed_without_the_last_evaluation() -> None:
    long, short = two_seeds()
    short = replace(short, groups=tuple(row for row in short.groups if row["round"] == 0))
    found = fairness_over_seeds([long, short])
    assert found is not None
    assert found.accuracy.mean == pytest.approx(0.1)  # the last that both have


def test_bytes_to_the_lowest_final_accuracy() -> None:
    slow = clustered([0, 1], {(0, False): [0.1, 0.1], (9, False): [0.6, 0.4]})
    fast = clustered([0, 1], {(0, False): [0.1, 0.1], (3, False): [0.7, 0.5], (9, True): [0.9] * 2})
    assert common_target([[slow], [fast]]) == pytest.approx(0.5)
    assert (bytes_to([slow], 0.5), bytes_to([fast], 0.5)) == (9000, 3000)
    assert bytes_to([fast], 0.9) == 10_000  # with the step after the last round
    assert bytes_to([slow], 0.9) is None
    # Seeds are averaged first, so a method reaches its own mean.
    assert common_target([two_seeds()]) == pytest.approx(0.7)
    assert bytes_to(two_seeds(), 0.7) == 2000
    assert common_target([]) is None
    assert bytes_to([], 0.5) is None
    zero = clustered([0, 1], {(0, False): [0.0, 0.0]})
    assert common_target([[zero]]) == 0.0


# Tables


def rows_of(records: list[Any]) -> list[dict[str, str]]:
    titles, *lines = fairness_tables.lines(records)
    return [dict(zip(titles, line, strict=True)) for line in lines]


def test_the_table_of_one_run() -> None:
    [row] = rows_of([clustered([0, 0, 1], RUN, name="el")])
    assert row == {
        "run": "EL",
        "parity": "0.2500",
        "odds": "0.5000",
        "fair accuracy": "60.0 %",
        "highest (round)": "73.3 % (2)",
        "worst node": "40.0 %",
        "worst 10 %": "40.0 %",
        "Jain": "0.9474",
    }


def test_methods_side_by_side() -> None:
    other = clustered([0, 1], {(0, False): [0.1, 0.1], (2, True): [0.9, 0.7]}, name="el")
    facade, el = rows_of([*two_seeds(), other])
    assert (facade["seeds"], el["seeds"]) == ("2", "1")
    assert facade["parity"] == "0.2500 ± 0.0000"
    assert el["parity"] == "0.2500"
    assert (facade["fair accuracy"], facade["fair, by seed"]) == ("80.0 %", "73.3 ± 0.0 %")
    assert el["fair accuracy"] == el["fair, by seed"] == "80.0 %"
    assert (facade["sent until 70.0 %"], el["sent until 70.0 %"]) == ("2.00 kB", "3.00 kB")


def test_three_clusters_show_the_mean_over_pairs() -> None:
    record = clustered([0, 1, 2], {(1, False): [0.5, 0.6, 0.7]}, confusions=(EVEN, SKEWED, EVEN))
    [row] = rows_of([record])
    assert (row["parity"], row["mean parity"]) == ("0.2500", "0.1667")
    assert (row["odds"], row["mean odds"]) == ("0.5000", "0.3333")


def test_runs_without_clusters_have_no_table() -> None:
    plain = replace(clustered([0, 0, 1], RUN), setup={})
    assert fairness_tables.lines([plain]) == []
    assert fairness_tables.terminal_table([plain], 80) is None
    assert fairness_tables.markdown([plain]) == ""
    assert fairness_tables.numbers([plain]) == [{}]
    assert fairness_tables.for_json(plain) == {}
    assert fairness_figures.shown([plain]) == []
    # Beside a run with clusters, it has no values.
    record = clustered([0, 0, 1], RUN)
    filled, empty = fairness_tables.numbers([record, plain])
    assert list(filled) == list(empty)
    assert filled["fair_accuracy"] == pytest.approx(0.6)
    assert empty["fair_accuracy"] is None
    assert "bytes_to_target" not in filled  # a target needs a comparison
    other = clustered([0, 0, 1], RUN, name="el")
    assert [row["bytes_to_target"] for row in fairness_tables.numbers([record, plain, other])] == [
        2000,
        None,
        2000,
    ]
    assert [row["run"] for row in fairness_tables.summaries([record, plain])] == ["facade"]


@pytest.mark.parametrize("width", [60, 200])
def test_terminals_of_any_width_show_all_cells(width: int) -> None:
    records = [clustered([0, 0, 1], RUN), clustered([0, 0, 1], RUN, name="el")]
    console = Console(width=width)
    with console.capture() as captured:
        console.print(fairness_tables.terminal_table(records, width))
    _, *lines = fairness_tables.lines(records)
    assert all(cell in captured.get() for line in lines for cell in line)
    assert max(map(len, captured.get().splitlines())) <= width


def test_json_holds_every_evaluation() -> None:
    table = json.loads(json.dumps(fairness_tables.for_json(clustered([0, 0, 1], RUN))))["fairness"]
    assert [one["round"] for one in table["evaluations"]] == [0, 2, 4, 4]
    assert table["evaluations"][-1]["fair_accuracy"] == pytest.approx(0.6)
    assert (table["highest_round"], table["highest_fair_accuracy"]) == (2, pytest.approx(0.7333333))


# Figures


def test_curves_of_fair_accuracy() -> None:
    records = [clustered([0, 0, 1], RUN), clustered([0, 0, 1], RUN, name="el")]
    [axes] = fairness_figures.fair_accuracy_curves(records).axes
    for line, record in zip(axes.get_lines(), records, strict=True):
        expected = [one.fair_accuracy for one in fairness_over_rounds(record)]
        assert list(line.get_xdata()) == [0, 2, 4]  # the final evaluation replaces that of round 4
        assert list(line.get_ydata()) == pytest.approx([*expected[:2], expected[3]])


def test_bars_and_boxes() -> None:
    other = clustered([0, 1], {(0, False): [0.1, 0.1], (2, True): [0.9, 0.7]}, name="el")
    methods = fairness_tables.methods([*two_seeds(), other])
    [axes] = fairness_figures.fair_accuracy_bars(methods).axes
    assert [bar.get_width() for bar in axes.patches] == pytest.approx([0.8] * 4)
    left, right = fairness_figures.parity_and_odds(methods).axes
    assert len(left.patches) == len(right.patches) == 1  # a box needs two seeds
    titles = [shown.title for shown in fairness_figures.shown([*two_seeds(), other])]
    assert titles == ["Fair accuracy, final and highest", "Demographic parity and equalised odds"]


def test_a_single_run_needs_no_bars() -> None:
    assert fairness_figures.shown([clustered([0, 0, 1], RUN)]) == []


def test_figures_of_runs_whose_values_are_unknown() -> None:
    record = clustered([0, 1], {(1, False): [nan, 0.5]}, confusions=([[5, 0], [0, 0]], EVEN))
    methods = fairness_tables.methods([record, replace(record, experiment={"other": 1})])
    assert len(methods) == 2
    fairness_figures.fair_accuracy_bars(methods)
    fairness_figures.parity_and_odds(methods)
    fairness_figures.fair_accuracy_curves([record])


def test_a_report_of_a_real_run(tmp_path: Path) -> None:
    from support.clusters import experiment

    import peerage as pg
    from peerage.records.rows import RunRecord
    from peerage.report.export import export

    pg.run(experiment(), tmp_path / "run")
    record = RunRecord.load(tmp_path / "run")
    found = fairness_over_rounds(record)
    assert [one.round for one in found] == [0, 1, 2]
    assert found[-1].accuracy == pytest.approx(record.network[-1]["accuracy"])
    assert found[-1].worst_node == min(record.node_values("accuracy", 2).values())
    for kind, mark in ((".md", "Fairness between clusters"), (".csv", "fair_accuracy")):
        export([record], tmp_path / f"out{kind}")
        assert mark in (tmp_path / f"out{kind}").read_text()
