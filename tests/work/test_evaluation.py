"""Scores against a direct computation, and a consensus distance that no order can change."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from peerage.vectors import FlatModel
from peerage.work.context import Examples
from peerage.work.evaluation import (
    CHUNK,
    ConsensusSums,
    Deviations,
    Movement,
    consensus_distance,
    movement,
    score,
)


def test_score_by_hand():
    model = FlatModel(nn.Linear(2, 2, bias=False))
    model.load(torch.tensor([1.0, 0.0, 0.0, 1.0]))  # the logits are the example itself
    x = torch.tensor([[3.0, 0.0], [0.0, 1.0], [2.0, 0.0], [0.0, 4.0]])
    found = score(model, Examples(x, torch.tensor([0, 1, 1, 1])))
    assert found.accuracy == 0.75
    losses = [math.log(1 + math.exp(-m)) for m in (3, 1, -2, 4)]
    assert found.loss == pytest.approx(np.mean(losses))


def test_score_over_several_chunks_and_in_evaluation_mode():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(12, 4))
    count = 2 * CHUNK + 7
    x, y = torch.randn(count, 3, 2, 2), torch.randint(4, (count,))
    found = score(FlatModel(module.train()), Examples(x, y))
    logits = module.eval()(x)
    # An example on the edge between two classes may fall to either, by rounding.
    accuracy = float((logits.argmax(1) == y).double().mean())
    assert found.accuracy == pytest.approx(accuracy, abs=1.5 / count)
    assert found.loss == pytest.approx(float(F.cross_entropy(logits, y).detach()), rel=1e-5)


# Consensus distance


def distance(x: Tensor) -> float:
    """By its definition, in double precision."""
    rows = x.double().numpy()
    return float(np.sqrt(((rows - rows.mean(0)) ** 2).sum(1).mean()))


def measured(
    x: Tensor, shards: list[list[int]], architecture: dict[int, str] | None = None
) -> float:
    """As the engine does it: every shard adds its nodes, then the sums are merged."""
    spreads = []
    for nodes in shards:
        spread = ConsensusSums()
        for node in nodes:
            spread.add(node, (architecture or {}).get(node, "net"), x[node])
        spreads.append(spread)
    sums = [(name, total) for spread in spreads for name, total in spread.sums.items()]
    squares: dict[str, dict[int, float]] = {}
    for spread in spreads:
        for name, values in spread.squares.items():
            squares.setdefault(name, {}).update(values)
    return consensus_distance(sums, squares)


def models(n: int, d: int, seed: int) -> Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed))


@given(st.integers(1, 8), st.integers(1, 40), st.integers(0, 2**32))
@settings(deadline=None, max_examples=60)
def test_consensus_distance_against_its_definition(n, d, seed):
    x = models(n, d, seed)
    assert measured(x, [list(range(n))]) == pytest.approx(distance(x), rel=1e-6, abs=1e-6)


@given(st.integers(2, 8), st.integers(0, 2**32), st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=60)
def test_consensus_distance_has_the_same_bits_in_any_order(n, seed, random):
    x, order = models(n, 30, seed), list(range(n))
    random.shuffle(order)
    cut = random.randint(1, n - 1)
    assert measured(x, [order[:cut], order[cut:]]) == measured(x, [list(range(n))])


def test_by_hand():
    assert measured(torch.tensor([[0.0, 0.0], [6.0, 8.0]]), [[0, 1]]) == 5.0


def test_equal_models_have_no_distance():
    x = models(1, 1000, 0).expand(5, -1)
    assert measured(x, [[0, 2, 4], [1, 3]]) < 1e-4


def test_architectures_are_kept_apart():
    x = torch.tensor([[0.0, 0.0], [100.0, 100.0], [6.0, 8.0], [100.0, 100.0]])
    kinds = {0: "a", 1: "b", 2: "a", 3: "b"}
    # Two nodes are 5 from their mean, two are 0: the root of the mean of 25, 25, 0, 0.
    assert measured(x, [[0, 1], [2, 3]], kinds) == pytest.approx(12.5**0.5)


def test_parameters_stay_as_they_are():
    x = models(1, 10, 0)
    before = x.clone()
    ConsensusSums().add(0, "net", x[0])
    double = x[0].double()
    ConsensusSums().add(0, "net", double)
    assert torch.equal(x, before)
    assert torch.equal(double, before[0].double())


# Deviations and movements


@given(st.integers(1, 6), st.floats(1e-7, 1.0), st.integers(0, 2**32))
@settings(deadline=None, max_examples=40)
def test_deviations_against_their_definitions(n, apart, seed):
    """Also where nodes are ten million times closer to each other than entries are."""
    x = models(1, 12, seed).double() + apart * models(n, 12, seed + 1).double()
    found = Deviations()
    for row in x:
        found.add("net", {"a": row[:8].view(2, 4), "b": row[8:]})
    layers = found.layers()
    for name, part in (("a", x[:, :8].numpy()), ("b", x[:, 8:].numpy())):
        assert layers[name]["ap"] == pytest.approx(part.std(axis=1).mean())
        assert layers[name]["an"] == pytest.approx(part.std(axis=0).mean(), rel=1e-4, abs=1e-14)


def test_deviations_keep_architectures_apart():
    found = Deviations()
    for kind, value in (("p", 0.0), ("q", 5.0), ("p", 2.0)):
        found.add(kind, {"w": torch.tensor([value, value + 2])})
    assert found.layers() == {"p.w": {"ap": 1.0, "an": 1.0}, "q.w": {"ap": 1.0, "an": 0.0}}


def test_movement_by_hand():
    """Training goes (3, 4), everything else (-4, 3): at right angles."""
    before, after = torch.tensor([1.0, 1.0]), torch.tensor([0.0, 8.0])
    middle = torch.tensor([10.0, 10.0])
    found = movement(before, after, [(middle, middle + torch.tensor([3.0, 4.0]))])
    assert (found.train, found.combine) == pytest.approx((5.0, 5.0))
    assert found.total == pytest.approx(50**0.5)
    assert found.cosine == pytest.approx(0.0, abs=1e-12)


def test_movement_without_training_has_no_direction_to_compare():
    found = movement(torch.zeros(2), torch.tensor([3.0, 4.0]), [])
    assert found == Movement(train=0.0, combine=5.0, total=5.0, cosine=0.0)
