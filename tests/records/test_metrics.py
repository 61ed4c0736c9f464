"""One definition of every metric: what rows, summaries, targets and collected rows follow from."""

from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from peerage.engine.lockstep import RoundReport
from peerage.engine.shard import NodeReport
from peerage.experiment.until import STOP_METRICS
from peerage.net.deploy.collect import report_of
from peerage.records.metrics import BY_KEY, METRICS, SCORES
from peerage.runs.summary import network_row, node_row
from peerage.work.evaluation import Score

NODE = ["accuracy", "loss", "train_loss", "validation_accuracy", "validation_loss"]
TIMES = {"total": 1.0}


def report(nodes: int) -> RoundReport:
    """Node i has 10 i + 1 as its first metric, 10 i + 2 as its second, and so on."""
    values = [{key: 10.0 * i + k for k, key in enumerate(NODE, 1)} for i in range(nodes)]
    reports = [NodeReport(i, found) for i, found in enumerate(values)]
    return RoundReport(reports, 7, {"consensus": 0.25}, TIMES)


def test_a_score_has_a_field_for_every_metric_of_a_model() -> None:
    assert [field.name for field in fields(Score)] == [metric.key for metric in SCORES]
    assert len(BY_KEY) == len(METRICS)


def test_the_row_of_a_node_has_its_metrics_in_the_order_of_the_definition() -> None:
    row = node_row(3, report(2).nodes[1])
    assert list(row) == ["scope", "round", "node", *NODE]
    assert [row[key] for key in NODE] == [11.0, 12.0, 13.0, 14.0, 15.0]
    assert list(node_row(3, NodeReport(1))) == ["scope", "round", "node"]


def test_the_row_of_the_network_has_statistics_of_scores_and_means_of_the_rest() -> None:
    row = network_row(3, report(3), 50, 3)
    assert list(row) == [
        *("scope", "round", "nodes", "train_loss", "bytes", "bytes_total"),
        *("accuracy", "accuracy_std", "accuracy_min", "accuracy_max"),
        *("loss", "loss_std", "loss_min", "loss_max"),
        *("consensus", "validation_accuracy", "validation_loss", "seconds"),
    ]
    found = [row[f"accuracy{ending}"] for ending in ("", "_std", "_min", "_max")]
    assert found == pytest.approx([11.0, np.sqrt(200 / 3), 1.0, 21.0])
    assert (row["train_loss"], row["validation_loss"], row["consensus"]) == (13.0, 15.0, 0.25)


def test_nodes_without_a_metric_do_not_count() -> None:
    some = [NodeReport(0, {"accuracy": 0.5, "loss": 1.0}), NodeReport(1, {"train_loss": 3.0})]
    row = network_row(1, RoundReport(some, 0, {}, TIMES), 0, 2)
    assert (row["accuracy"], row["accuracy_min"], row["train_loss"]) == (0.5, 0.5, 3.0)
    assert "validation_loss" not in row
    assert "consensus" not in row


def test_every_metric_of_a_node_survives_the_collection_of_peers() -> None:
    """A peer writes its own row; the report of the network has all that is in it."""
    known = report(2)
    rows: list[dict[str, Any]] = [node_row(3, node) for node in known.nodes]
    for row in rows:
        row |= {"bytes": 1, "seconds": TIMES}
    collected = report_of(rows)
    assert [node.metrics for node in collected.nodes] == [node.metrics for node in known.nodes]
    measured = {metric.key for metric in METRICS if metric.source != "network"}
    assert measured == set(collected.nodes[0].metrics)


def test_a_run_can_end_by_every_metric_and_by_the_lowest_accuracy() -> None:
    assert set(STOP_METRICS) == {*BY_KEY, "accuracy_min"}
    higher = {key for key, metric in STOP_METRICS.items() if metric.better == "higher"}
    assert higher == {"accuracy", "accuracy_min", "validation_accuracy"}
    assert {key for key, metric in STOP_METRICS.items() if metric.scale == "fraction"} == higher


def test_labels_of_axes() -> None:
    assert {metric.key: metric.label for metric in METRICS} == {
        "accuracy": "test accuracy",
        "loss": "test loss",
        "train_loss": "training loss",
        "consensus": "consensus distance",
        "validation_accuracy": "validation accuracy",
        "validation_loss": "validation loss",
    }
