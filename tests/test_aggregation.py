"""Aggregation against a slow reference, by hand, and by the laws of curvature weights."""

import networkx as nx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import aggregation as reference
from torch import Tensor

from peerage import aggregation
from peerage.aggregation import (
    curvature_weighted,
    data_weights,
    metropolis_weights,
    uniform_weights,
    unit,
    weighted_mean,
)

PIECE = 8  # instead of tens of thousands, so that few entries cross several boundaries


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(aggregation, "PIECE", PIECE)


def numbers(k: int, d: int, seed: int) -> Tensor:
    return torch.randn(k, d, generator=torch.Generator().manual_seed(seed))


def curvatures(k: int, d: int, seed: int) -> Tensor:
    """Positive numbers of very different sizes, and columns of zeros."""
    generator = torch.Generator().manual_seed(seed)
    h = torch.rand(k, d, generator=generator) * 10 ** (
        6 * torch.rand(k, d, generator=generator) - 4
    )
    h[torch.rand(k, d, generator=generator) < 0.2] = 0.0
    h[:, torch.rand(d, generator=generator) < 0.2] = 0.0
    return h


def shares(k: int, seed: int) -> list[float]:
    examples = torch.randint(1, 100, (k,), generator=torch.Generator().manual_seed(seed))
    return data_weights(examples.tolist()).tolist()


@st.composite
def problems(draw: st.DrawFn) -> tuple[Tensor, Tensor, list[float]]:
    k, d = draw(st.integers(1, 6)), draw(st.integers(1, 4 * PIECE + 1))
    seed = draw(st.integers(0, 2**32))
    return numbers(k, d, seed), curvatures(k, d, seed + 1), shares(k, seed + 2)


def assert_close(found: Tensor, expected: list[float] | Tensor) -> None:
    torch.testing.assert_close(found, torch.as_tensor(expected), rtol=2e-5, atol=2e-6)


# Against the reference


@given(problems())
@settings(deadline=None, max_examples=100)
def test_weighted_mean_against_the_reference(problem):
    x, _, weights = problem
    assert_close(weighted_mean(x, weights), reference.weighted_mean(x.tolist(), weights))


@given(problems())
@settings(deadline=None, max_examples=100)
def test_curvature_weighted_against_the_reference(problem):
    x, h, otherwise = problem
    expected = reference.curvature_weighted(x.tolist(), h.tolist(), otherwise)
    assert_close(curvature_weighted(x, h, otherwise), expected)


@given(problems())
@settings(deadline=None, max_examples=50)
def test_a_matrix_and_a_list_of_vectors_give_the_same_bits(problem):
    x, h, weights = problem
    rows, tensor = [row.clone() for row in x], torch.tensor(weights)
    assert torch.equal(weighted_mean(x, tensor), weighted_mean(rows, weights))
    matrix = curvature_weighted(x, h, tensor)
    assert torch.equal(matrix, curvature_weighted(rows, tuple(h), weights))


@pytest.mark.parametrize("d", [PIECE - 1, PIECE, PIECE + 1, 2 * PIECE, 2 * PIECE + 1])
def test_entries_do_not_depend_on_the_piece_they_lie_in(d, monkeypatch):
    x, h, weights = numbers(3, d, 0), curvatures(3, d, 1), shares(3, 2)
    in_pieces = weighted_mean(x, weights), curvature_weighted(x, h, weights)
    monkeypatch.setattr(aggregation, "PIECE", 10 * d)
    at_once = weighted_mean(x, weights), curvature_weighted(x, h, weights)
    # The last few entries of a piece go through another kernel than the rest.
    assert_close(in_pieces[0], at_once[0])
    assert_close(in_pieces[1], at_once[1])


def test_the_true_size_of_pieces(monkeypatch):
    monkeypatch.undo()
    d = aggregation.PIECE + 3
    x, h, weights = numbers(2, d, 0), curvatures(2, d, 1), [0.25, 0.75]
    assert_close(weighted_mean(x, weights), 0.25 * x[0] + 0.75 * x[1])
    ends = slice(d - 5, d)
    threshold_apart = h.clone()
    threshold_apart[:, ends] += 1.0
    found = curvature_weighted(x, threshold_apart, weights)[ends]
    expected = (x * threshold_apart).sum(0) / threshold_apart.sum(0)
    assert_close(found, expected[ends])


# The laws of curvature weights


@given(problems())
@settings(deadline=None, max_examples=50)
def test_equal_curvature_gives_the_uniform_mean(problem):
    x, h, otherwise = problem
    equal = (h[:1] + 0.1).expand_as(h)
    assert_close(curvature_weighted(x, equal, otherwise), x.mean(0))


@given(problems())
@settings(deadline=None, max_examples=50)
def test_no_curvature_at_all_gives_the_other_weights(problem):
    x, h, otherwise = problem
    found = curvature_weighted(x, torch.zeros_like(h), otherwise)
    assert torch.equal(found, weighted_mean(x, otherwise))


@given(problems(), st.integers(0, 5))
@settings(deadline=None, max_examples=50)
def test_a_dominant_curvature_wins(problem, winner):
    x, h, otherwise = problem
    winner %= len(x)
    dominant = h.clone()
    dominant[winner] = 1e12
    assert_close(curvature_weighted(x, dominant, otherwise), x[winner])


@given(problems(), st.sampled_from([1e-30, 1e-20, 1e-12, 1e-6, 0.3, 2.0, 1e6, 1e30]))
@settings(deadline=None, max_examples=100)
def test_the_scale_of_curvature_does_not_matter(problem, c):
    x, h, otherwise = problem
    assert_close(curvature_weighted(x, c * h, otherwise), curvature_weighted(x, h, otherwise))


@given(problems(), st.integers(-60, 60))
@settings(deadline=None, max_examples=50)
def test_a_power_of_two_changes_no_bit(problem, exponent):
    x, h, otherwise = problem
    assert torch.equal(
        curvature_weighted(x, 2.0**exponent * h, otherwise), curvature_weighted(x, h, otherwise)
    )


@given(problems())
@settings(deadline=None, max_examples=50)
def test_the_result_lies_between_the_inputs(problem):
    x, h, otherwise = problem
    found = curvature_weighted(x, h, otherwise)
    margin = 1e-5
    assert (found >= x.min(0).values - margin).all()
    assert (found <= x.max(0).values + margin).all()


@given(problems(), st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=50)
def test_the_order_of_neighbours_does_not_matter(problem, random):
    x, h, otherwise = problem
    order = list(range(len(x)))
    random.shuffle(order)
    weights = [otherwise[j] for j in order]
    assert_close(
        curvature_weighted(x[order], h[order], weights), curvature_weighted(x, h, otherwise)
    )
    assert_close(weighted_mean(x[order], weights), weighted_mean(x, otherwise))


@given(problems())
@settings(deadline=None, max_examples=50)
def test_inputs_stay_as_they_are(problem):
    x, h, otherwise = problem
    before = x.clone(), h.clone()
    curvature_weighted(x, h, otherwise)
    weighted_mean(x, otherwise)
    assert torch.equal(x, before[0])
    assert torch.equal(h, before[1])


def test_a_model_alone_keeps_its_values():
    x = numbers(1, 20, 0)
    assert torch.equal(weighted_mean(x, [1.0]), x[0])
    assert_close(curvature_weighted(x, curvatures(1, 20, 0), [1.0]), x[0])


# By hand


def test_all_zero_curvature_falls_back():
    x = torch.tensor([[0.0] * 5, [4.0] * 5])
    h = torch.tensor([[3e-12, 3e-30, 0.0, 6e-6, 6e7], [1e-12, 1e-30, 0.0, 2e-6, 0.0]])
    assert_close(curvature_weighted(x, h, [0.5, 0.5]), [1.0, 1.0, 2.0, 1.0, 0.0])


@pytest.mark.parametrize("h", [1e-39, 1e-45, 3e38])
def test_sums_that_32_bits_lose_say_nothing(h):
    x = torch.tensor([[0.25, 1.0], [0.75, 3.0], [0.5, 2.0]])
    found = curvature_weighted(x, torch.tensor([[h, 1.0], [h, 1.0], [h, 1.0]]), [0.5, 0.25, 0.25])
    assert_close(found, [0.4375, 2.0])


def test_products_that_are_too_large_say_nothing():
    x, h = torch.tensor([[100.0], [300.0]]), torch.tensor([[1e38], [1e38]])
    assert_close(curvature_weighted(x, h, [0.5, 0.5]), [200.0])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_curvature_that_is_no_number_says_nothing(bad):
    x, h = torch.tensor([[0.0, 0.0], [4.0, 4.0]]), torch.tensor([[bad, 3.0], [1.0, 1.0]])
    found = curvature_weighted(x, h, [0.5, 0.5])
    assert torch.isfinite(found).all()
    assert found[0] == 2.0


def test_unit():
    assert_close(unit(torch.tensor([3.0, 0.0, -4.0])), [0.6, 0.0, -0.8])
    x = numbers(1, 100, 0)[0]
    assert_close(unit(x), reference.unit(x.tolist()))


@pytest.mark.parametrize("values", [[0.0, 0.0], [float("nan"), 1.0], [float("inf"), 1.0]])
def test_the_unit_of_nothing_is_nothing(values):
    assert unit(torch.tensor(values)).tolist() == [0.0, 0.0]


def test_the_norm_is_taken_in_double_precision():
    # The squares overflow and underflow in single precision.
    assert_close(unit(torch.tensor([3e30, 4e30])), [0.6, 0.8])
    assert_close(unit(torch.tensor([3e-30, 4e-30])), [0.6, 0.8])


# Weights


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=8))
@settings(deadline=None, max_examples=50)
def test_data_weights_are_shares_of_the_examples(examples):
    weights = data_weights(examples)
    total = sum(examples)
    shares = [n / total for n in examples] if total else [1 / len(examples)] * len(examples)
    assert weights.tolist() == pytest.approx(shares)
    assert float(weights.sum()) == pytest.approx(1.0)


def test_uniform_weights():
    assert uniform_weights(4).tolist() == [0.25] * 4


@given(st.lists(st.integers(0, 20), min_size=1, max_size=8), st.integers(0, 7))
@settings(deadline=None, max_examples=50)
def test_metropolis_weights_against_the_reference(degrees, own):
    own %= len(degrees)
    weights = metropolis_weights(degrees, own)
    assert weights.tolist() == pytest.approx(reference.metropolis(degrees, own), abs=1e-6)
    assert weights.min() >= 0
    assert float(weights.sum()) == pytest.approx(1.0)


def test_metropolis_weights_are_symmetric_and_doubly_stochastic():
    graph = nx.barbell_graph(4, 2)
    w = torch.zeros(len(graph), len(graph))
    for node in graph:
        group = sorted([node, *graph[node]])
        degrees = [graph.degree[j] for j in group]
        w[node, group] = metropolis_weights(degrees, group.index(node))
    assert_close(w, w.T)
    assert_close(w.sum(0), torch.ones(len(graph)))
    assert w.min() >= 0


@pytest.mark.parametrize("graph", [nx.cycle_graph(6), nx.star_graph(5), nx.empty_graph(3)])
def test_metropolis_weights_of_an_all_reduce_are_uniform(graph):
    degrees = [graph.degree[node] for node in graph]
    for node in graph:
        assert_close(metropolis_weights(degrees, node), uniform_weights(len(graph)))


def test_metropolis_weights_with_a_sender_that_is_no_neighbour():
    # On a ring, a third for each of two neighbours; with one more sender, a quarter for each.
    assert_close(metropolis_weights([2, 2, 2], 0), [1 / 3, 1 / 3, 1 / 3])
    assert_close(metropolis_weights([2, 2, 2, 2], 0), [1 / 4, 1 / 4, 1 / 4, 1 / 4])
    assert_close(metropolis_weights([1, 9, 1, 1], 0), [1 - 0.1 - 0.25 - 0.25, 0.1, 0.25, 0.25])
    # What did not arrive is left to the node's own model.
    assert_close(metropolis_weights([2, 2], 0), [2 / 3, 1 / 3])


@pytest.mark.parametrize("weights", [[1.0], [0.5, 0.25, 0.25]])
def test_one_weight_for_each_vector(weights):
    with pytest.raises(ValueError, match=f"{len(weights)} weights for 2 vectors"):
        weighted_mean(numbers(2, 3, 0), weights)
    with pytest.raises(ValueError, match=f"{len(weights)} weights for 2 vectors"):
        curvature_weighted(numbers(2, 3, 0), curvatures(2, 3, 0), weights)


def test_nothing_has_no_mean():
    with pytest.raises(ValueError, match="0 weights for 0 vectors"):
        weighted_mean([], [])
