"""MNIST itself, if it was fetched: its numbers, and runs of the network of the paper on it."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import peerage as pg
from peerage.data import Dataset, cache_folder, status
from peerage.data.datasets import Mnist

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        status("mnist") != "ready",
        reason=f"MNIST is {status('mnist')} in the cache; fetch it with: peerage data get mnist",
    ),
]

SERIAL = {"name": "serial"}
POOL = {"name": "pool", "workers": 2}


@pytest.fixture(scope="module")
def mnist() -> Dataset:
    return Mnist().load(cache_folder())


def pixels(name: str, count: int) -> np.ndarray:
    """The first images of an IDX file, read by hand."""
    content = (cache_folder() / "mnist" / name).read_bytes()
    magic, _, height, width = struct.unpack(">4i", content[:16])
    assert (magic, height, width) == (2051, 28, 28)
    raw = np.frombuffer(content, np.uint8, count * 784, offset=16)
    return raw.reshape(count, 1, 28, 28)


def test_mnist_has_its_shapes_and_labels(mnist: Dataset) -> None:
    assert mnist.train_x.shape == (60000, 1, 28, 28)
    assert mnist.test_x.shape == (10000, 1, 28, 28)
    assert mnist.classes == tuple("0123456789")
    # The first ten labels and the sizes of the classes are common knowledge.
    assert mnist.train_y[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    assert mnist.test_y[:10].tolist() == [7, 2, 1, 0, 4, 1, 4, 9, 5, 9]
    counts = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert torch.bincount(mnist.train_y).tolist() == counts


def test_mnist_is_normalised_with_its_own_moments(mnist: Dataset) -> None:
    assert mnist.train_x.mean().item() == pytest.approx(0, abs=1e-3)
    assert mnist.train_x.std().item() == pytest.approx(1, abs=1e-3)
    for name, x in (("train", mnist.train_x), ("t10k", mnist.test_x)):
        expected = (pixels(f"{name}-images-idx3-ubyte", 20) / 255 - 0.1307) / 0.3081
        np.testing.assert_allclose(x[:20].numpy(), expected, rtol=1e-5, atol=1e-6)


def experiment(mnist: Dataset, algorithm: str, engine: dict[str, Any]) -> pg.Experiment:
    """Eight peers with two hundred images each."""
    return pg.Experiment(
        algorithm=algorithm,
        dataset=mnist,
        model="mnist-cnn",
        nodes=8,
        topology="er:p=0.5",
        partition="balanced-iid:items=200",
        rounds=2,
        local={"epochs": 4, "batch_size": 20, "lr": 0.05, "momentum": 0.5},
        init={"start": "shared"},
        evaluation={"samples": 500, "every": 2},
        engine=engine,
    )


@pytest.mark.parametrize("algorithm", ["decavg", "dechw"])
def test_peers_learn_mnist_and_engines_agree(mnist: Dataset, algorithm: str) -> None:
    serial = pg.run(experiment(mnist, algorithm, SERIAL))
    pool = pg.run(experiment(mnist, algorithm, POOL))
    assert serial.digest == pool.digest
    assert all(bool(params.isfinite().all()) for params in serial.parameters)
    assert [len(params) for params in serial.parameters] == [21840] * 8
    first, last = (row for row in serial.rows if row["scope"] == "network" and "loss" in row)
    assert first["accuracy"] < 0.25  # ten classes
    assert last["accuracy_min"] > 0.6
    assert last["loss"] < first["loss"] / 2


def test_mnist_runs_by_name_and_is_verified(tmp_path: Path) -> None:
    by_name = pg.Experiment(
        dataset="mnist",
        nodes=8,
        topology="ring",
        partition="balanced-iid:items=50",
        rounds=1,
        local={"epochs": 1, "batch_size": 50},
        evaluation={"samples": 100},
        engine=POOL,
    )
    result = pg.run(by_name, tmp_path / "run")
    assert result.summary["dataset"] == "mnist"
    assert result.experiment.table()["model"] == {"name": "mnist-cnn", "dropout": False}
    assert pg.verify(tmp_path / "run").same
