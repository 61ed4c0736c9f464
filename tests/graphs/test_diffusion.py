"""The diffusion model: against a naive loop, closed forms, and the laws of P4 section 4."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image
from scipy import stats

from peerage.errors import InputError
from peerage.graphs import diffusion
from peerage.graphs.diffusion import (
    Diffusion,
    Simulation,
    deviations,
    diffuse,
    fit_exponent,
    variance_around_consensus,
)
from peerage.graphs.graph import Graph, StaticGraph
from peerage.graphs.mixing import gain, mixing_matrix, second_eigenvalue
from peerage.graphs.topology import (
    BarabasiAlbert,
    Complete,
    DynamicRegular,
    ErdosRenyi,
    Regular,
    Ring,
    Star,
    Topology,
)
from peerage.randomness import numpy_stream
from peerage.report.diffusion import deviation_curves
from peerage.report.figures import save

TRIANGLES = StaticGraph.from_edges(
    60, [(3 * i + a, 3 * i + b) for i in range(20) for a, b in [(0, 1), (0, 2), (1, 2)]]
)
ONE_WAY = StaticGraph.from_edges(3, [(0, 1), (1, 2)], directed=True)


def gaussian(seed: int, t: int, shape: tuple[int, int]) -> NDArray[np.float64]:
    """The noise of a round in double precision."""
    count = shape[0] * shape[1]
    u = numpy_stream(seed, "diffusion noise", t).random(count + count % 2, dtype=np.float32)
    u = u.astype(np.float64)
    z = np.sqrt(-2 * np.log(1 - u[::2])) * np.exp(2j * np.pi * u[1::2])
    return np.stack([z.real, z.imag], axis=1).reshape(-1)[:count].reshape(shape)


def naive(
    graph: Graph, parameters: int, rounds: int, init: float, noise: float, seed: int
) -> NDArray[np.float64]:
    """sigma_ap and sigma_an [rounds + 1, 2] by the definition."""
    a = mixing_matrix(graph).toarray()
    shape = (graph.nodes, parameters)
    x = init * numpy_stream(seed, "diffusion start").standard_normal(shape, dtype=np.float32)
    x = x.astype(np.float64)
    found = [(x.std(axis=1).mean(), x.std(axis=0).mean())]
    for t in range(1, rounds + 1):
        x = a @ x + noise * gaussian(seed, t, shape)
        found.append((x.std(axis=1).mean(), x.std(axis=0).mean()))
    return np.array(found)


def made(sigma_an: list[float] | NDArray[np.float64]) -> Diffusion:
    values = np.array(sigma_an, dtype=np.float64)
    return Diffusion(Ring().build(5, 0), 4, 1.0, 1e-3, "normal", 0, np.ones_like(values), values)


# The model


@pytest.mark.parametrize(
    ("topology", "nodes", "parameters", "noise"),
    [
        (Ring(), 9, 5, 1e-3),
        (Star(), 12, 2, 0.3),
        (Complete(), 7, 33, 1e-8),
        (ErdosRenyi(p=0.5), 25, 7, 1e-9),
        (Regular(k=30), 32, 6, 1e-12),
        (BarabasiAlbert(m=2), 40, 16, 0.0),
    ],
)
def test_every_round_agrees_with_the_definition(
    topology: Topology, nodes: int, parameters: int, noise: float
) -> None:
    graph = topology.build(nodes, 1)
    result = diffuse(graph, parameters=parameters, rounds=12, init=2.5, noise=noise, seed=4)
    expected = naive(graph, parameters, 12, 2.5, noise, 4)
    np.testing.assert_allclose(result.sigma_ap, expected[:, 0], rtol=1e-5)
    np.testing.assert_allclose(result.sigma_an, expected[:, 1], rtol=1e-5)


def test_noise_far_below_the_precision_of_the_values_is_not_drowned() -> None:
    graph = Regular(k=32).build(256, 0)
    result = diffuse(graph, rounds=25, init=5 / math.sqrt(3), noise=1e-8, start="uniform")
    assert result.sigma_an[-1] == pytest.approx(result.limit_an, rel=0.05)
    assert np.spacing(np.float32(result.sigma_ap[-1])) > 1e-8  # of the values as such


def test_a_complete_graph_agrees_after_one_round() -> None:
    result = diffuse(Complete().build(20, 0), noise=0.0, rounds=5)
    assert result.sigma_an[0] > 0.9
    assert (result.sigma_an[1:] < 1e-7).all()
    np.testing.assert_allclose(result.sigma_ap[2:], result.sigma_ap[1], rtol=1e-6)


@pytest.mark.parametrize("topology", [Ring(), Star(), ErdosRenyi(p=0.4)])
def test_without_noise_the_slowest_mode_is_what_remains(topology: Topology) -> None:
    graph = topology.build(15, 3)
    result = diffuse(graph, noise=0.0, rounds=60)
    late = result.sigma_an[-10:]
    pace = (late[-1] / late[0]) ** (1 / 9)
    assert pace == pytest.approx(abs(second_eigenvalue(graph)), rel=2e-3)


def test_the_start_has_the_deviation_that_was_asked_for() -> None:
    graph = Ring().build(500, 0)
    for start, bound in (("normal", math.inf), ("uniform", math.sqrt(3))):
        simulation = Simulation(graph, 200, 0.0, start)  # type: ignore[arg-type]
        x = simulation.x + simulation.centre
        assert x.std() == pytest.approx(1, abs=0.01)
        assert abs(x.mean()) < 0.02
        assert np.abs(x).max() <= bound + 1e-6
    five = diffuse(graph, rounds=1, init=5 / math.sqrt(3), start="uniform")
    assert five.sigma_an[0] == pytest.approx(5 / math.sqrt(3), rel=0.02)


@settings(deadline=None, max_examples=20)
@given(st.floats(1e-20, 1e20))
def test_only_the_ratio_of_noise_and_start_matters(scale: float) -> None:
    graph = Star().build(6, 0)
    one = diffuse(graph, rounds=4, parameters=3, init=1.0, noise=0.25)
    other = diffuse(graph, rounds=4, parameters=3, init=scale, noise=0.25 * scale)
    np.testing.assert_allclose(other.sigma_an, scale * one.sigma_an, rtol=1e-6)
    np.testing.assert_allclose(other.sigma_ap, scale * one.sigma_ap, rtol=1e-6)


def test_a_seed_decides_everything_and_rounds_are_only_added() -> None:
    graph = ErdosRenyi(p=0.3).build(30, 0)
    short, long, other = (
        diffuse(graph, rounds=rounds, seed=seed) for rounds, seed in ((3, 7), (8, 7), (3, 8))
    )
    np.testing.assert_array_equal(short.sigma_an, long.sigma_an[:4])
    assert short.sigma_an[1] != other.sigma_an[1]


def test_blocks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = BarabasiAlbert(m=3).build(101, 0)
    whole = diffuse(graph, parameters=7, rounds=10, noise=1e-4)
    for numbers, rows in ((1, 4096), (7 * 10, 4096), (1 << 17, 33)):
        monkeypatch.setattr(diffusion, "BLOCK_NUMBERS", numbers)
        monkeypatch.setattr(diffusion, "BLOCK_ROWS", rows)
        cut = diffuse(graph, parameters=7, rounds=10, noise=1e-4)
        np.testing.assert_allclose(cut.sigma_ap, whole.sigma_ap, rtol=1e-6)
        np.testing.assert_allclose(cut.sigma_an, whole.sigma_an, rtol=1e-5)


def test_noise_is_gaussian_however_its_stream_is_cut() -> None:
    whole, cut = np.empty((2, 100_001), dtype=np.float32)
    diffusion._fill_normal(whole, 3.0, numpy_stream(0, "test"))
    rng = numpy_stream(0, "test")
    for piece in np.split(cut, [2, 5000, 5002, 70_000]):
        diffusion._fill_normal(piece, 3.0, rng)
    # The last few numbers of a piece go through another kernel than the rest.
    np.testing.assert_allclose(cut, whole, rtol=1e-5, atol=1e-5)
    assert stats.kstest(whole / 3, "norm").pvalue > 0.01
    assert stats.kurtosis(whole) == pytest.approx(0, abs=5 * math.sqrt(24 / 1e5))
    assert np.corrcoef(whole[:-1:2], whole[1::2])[0, 1] == pytest.approx(0, abs=0.02)


def test_watchers_get_every_round() -> None:
    received: list[tuple[int, float, float]] = []
    result = diffuse(Ring().build(8, 0), rounds=3, watch=lambda *row: received.append(row))
    assert received == list(zip(range(4), result.sigma_ap, result.sigma_an, strict=True))


# Deviations


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 60), st.integers(1, 9), st.floats(-6, 6), st.floats(0, 6), st.integers(0, 99))
def test_deviations_are_those_of_numpy(
    nodes: int, parameters: int, size: float, offset: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    common = 10.0 ** (size + offset) * rng.standard_normal(parameters)
    x = (common + 10.0**size * rng.standard_normal((nodes, parameters))).astype(np.float32)
    expected = (x.std(axis=1, dtype=np.float64).mean(), x.std(axis=0, dtype=np.float64).mean())
    scale = 1e-6 * float(abs(x).max())  # the means over parameters are in single precision
    found = deviations(x)
    assert found[0] == pytest.approx(expected[0], rel=1e-5, abs=scale)
    assert found[1] == pytest.approx(expected[1], rel=1e-5, abs=1e-30)


def test_deviations_over_nodes_survive_large_values_many_nodes_and_outliers() -> None:
    x = np.random.default_rng(0).standard_normal((200_000, 3))
    x[0] += 1000  # far from the mean, in the first block
    x = (1e6 * np.array([1.0, -3.0, 7.0]) + x).astype(np.float32)
    expected = x.std(axis=0, dtype=np.float64).mean()
    assert deviations(x)[1] == pytest.approx(expected, rel=1e-5)


# Limits


@pytest.mark.parametrize(
    "topology", [Regular(k=8), ErdosRenyi(degree=12.0), BarabasiAlbert(m=2)], ids=lambda t: str(t)
)
def test_parameters_shrink_by_the_gain_of_the_graph(topology: Topology) -> None:
    graph, d = topology.build(400, 0), 800
    result = diffuse(graph, parameters=d, rounds=60, noise=1e-4)
    limit = result.limit_ap
    assert limit == pytest.approx(1 / gain(graph), rel=1e-4)
    # The consensus is one sample of d numbers: its deviation has a share of 1 / sqrt(2 d) of error.
    assert abs(result.sigma_ap[-1] / limit - 1) < 4 / math.sqrt(2 * d) + 1 / d
    if isinstance(topology, BarabasiAlbert):
        assert result.sigma_ap[-1] > 1.3 / math.sqrt(400)  # it is not the square root there


def test_noise_adds_to_the_parameters_of_a_single_node() -> None:
    result = diffuse(Ring().build(1, 0), parameters=20_000, rounds=8, noise=0.5)
    assert result.limit_ap == pytest.approx(math.sqrt(1 + 8 * 0.25))
    assert result.sigma_ap[-1] == pytest.approx(math.sqrt(3), rel=0.03)
    assert (result.limit_an, result.stabilisation) == (0.0, 0)
    assert (result.sigma_an == 0).all()


def test_around_consensus_regular_graphs_have_the_sum_over_eigenvalues() -> None:
    n = 12
    cosines = np.cos(2 * np.pi * np.arange(1, n) / n)
    expected = (1 / (1 - ((1 + 2 * cosines) / 3) ** 2)).sum() / n
    found = variance_around_consensus(Ring().build(n, 0))
    assert found == (pytest.approx(expected), True)
    assert variance_around_consensus(Complete().build(10, 0)) == (pytest.approx(0.9), True)


@pytest.mark.parametrize("graph", [Star().build(9, 0), BarabasiAlbert(m=2).build(30, 0), TRIANGLES])
def test_around_consensus_other_graphs_have_the_sum_over_rounds(graph: Graph) -> None:
    a = mixing_matrix(graph).toarray()
    centred = np.eye(graph.nodes) - np.linalg.matrix_power(a, 10_000).astype(bool) / (
        3 if graph is TRIANGLES else graph.nodes
    )
    total, power = 0.0, np.eye(graph.nodes)
    for _ in range(500):
        total += ((centred @ power) ** 2).sum() / graph.nodes
        power = power @ a
    found = variance_around_consensus(graph)
    assert found == (pytest.approx(total, rel=1e-9), True)


def test_the_nodes_of_irregular_graphs_reach_their_limit_too() -> None:
    result = diffuse(BarabasiAlbert(m=2).build(200, 0), parameters=400, rounds=80)
    assert result.limit_an_exact
    assert result.plateau == pytest.approx(result.limit_an, rel=0.01)
    assert result.limit_an == pytest.approx(1.2e-3, rel=0.1)


def test_components_stay_apart() -> None:
    result = diffuse(TRIANGLES, parameters=4000, rounds=10, noise=1e-2)
    consensus = (1 + 10 * 1e-4) / 3
    assert result.limit_ap == pytest.approx(math.sqrt(consensus + 1e-4 * 2 / 3))
    assert result.limit_an == pytest.approx(math.sqrt(0.95 * consensus + 1e-4 * 2 / 3))
    assert result.sigma_an[-1] == pytest.approx(result.limit_an, rel=0.03)
    assert result.sigma_ap[-1] == pytest.approx(result.limit_ap, rel=0.03)


def test_large_graphs_have_a_bound_from_below(monkeypatch: pytest.MonkeyPatch) -> None:
    for graph in (Regular(k=8).build(300, 0), BarabasiAlbert(m=4).build(300, 0), TRIANGLES):
        exact = variance_around_consensus(graph)
        monkeypatch.setattr(diffusion, "EXACT_NODES", 10)
        bound = variance_around_consensus(graph)
        monkeypatch.undo()
        assert exact
        assert bound
        assert not bound.exact
        assert 0.9 * exact.variance < bound.variance <= exact.variance * (1 + 1e-12)


def test_links_in_one_direction_only_have_no_known_limit() -> None:
    result = diffuse(ONE_WAY, rounds=4)
    assert (result.limit_ap, result.limit_an, result.limit_an_exact) == (None, None, False)
    assert json.loads(json.dumps(result.as_dict()))["limit_an"] is None
    assert len(deviation_curves(result).axes[0].get_lines()) == 2


# Stabilisation


def test_stable_means_within_a_tenth_of_the_plateau() -> None:
    falling = np.maximum(0.5 ** np.arange(51), 1e-3)
    assert made(falling).plateau == pytest.approx(1e-3)
    assert made(falling).stabilisation == 10  # 2^-9 is 1.95e-3, 2^-10 is 0.98e-3
    noisy = falling * (1 + 0.03 * np.random.default_rng(0).standard_normal(51))
    assert made(noisy).stabilisation == 10


def test_what_still_falls_is_not_stable() -> None:
    assert made(0.9 ** np.arange(51)).stabilisation is None
    assert made(np.arange(1.0, 101) ** -0.25).stabilisation is None  # as on a long ring
    assert made([1.0, 0.5, 0.25, 0.125]).stabilisation is None
    assert diffuse(Ring().build(64, 0), rounds=50).stabilisation is None
    # Another run of fifty rounds would not lower this by a tenth.
    assert made(0.999 ** np.arange(51)).stabilisation == 0


def test_agreement_is_stable() -> None:
    assert made([1.0, 0.5, 0.0, 0.0, 0.0, 0.0]).stabilisation == 2
    assert made([1.0, 1e-3]).stabilisation is None  # one round tells nothing


def test_well_mixing_graphs_stabilise_soon() -> None:
    result = diffuse(Regular(k=32).build(256, 0), noise=1e-3)
    first = result.stabilisation
    assert first is not None
    assert 3 <= first <= 8
    assert result.sigma_an[first] <= 1.1 * result.plateau < result.sigma_an[first - 1]


# Exponents, input, output


def test_exponents_by_hand() -> None:
    # ln y = 0, 1, 1 at ln n = 0, 1, 2: slope 1/2, residuals -1/6, 1/3, -1/6.
    e = math.e
    slope, error = fit_exponent([1, e, e**2], [1, e, e])
    assert slope == pytest.approx(0.5)
    assert error == pytest.approx(math.sqrt(1 / 6 / 1 / 2))
    sizes = np.array([256, 1000, 8192, 20])
    assert fit_exponent(sizes, 3 * sizes**-0.434) == pytest.approx((-0.434, 0), abs=1e-9)


@pytest.mark.parametrize(
    ("sizes", "values"),
    [([1, 2], [1, 2]), ([1, 2, 2], [1, 2, 3]), ([1, 2, 3], [1, 2]), ([1, 2, 3], [1, 0, 2])],
)
def test_exponents_need_three_sizes_and_positive_values(
    sizes: list[float], values: list[float]
) -> None:
    with pytest.raises(InputError, match="an exponent needs"):
        fit_exponent(sizes, values)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"parameters": 1}, "parameters must be at least 2, got 1"),
        ({"rounds": 0}, "rounds must be at least 1, got 0"),
        ({"init": 0.0}, "init must be a number above 0, got 0.0"),
        ({"init": math.nan}, "init must be a number above 0, got nan"),
        ({"noise": -1.0}, "noise must lie between 0 and 1e+12 times init, got -1.0"),
        ({"noise": math.inf}, "noise must lie between 0 and 1e+12 times init, got inf"),
        ({"start": "gauss"}, "start must be one of normal, uniform; got 'gauss'"),
    ],
)
def test_impossible_values_are_rejected(options: dict[str, float], message: str) -> None:
    with pytest.raises(InputError) as error:
        diffuse(Ring().build(5, 0), **options)  # type: ignore[arg-type]
    assert str(error.value) == message


def test_changing_graphs_are_rejected() -> None:
    with pytest.raises(InputError, match="requires a static graph"):
        diffuse(DynamicRegular().build(10, 0))


def test_results_fit_into_json() -> None:
    result = diffuse(Regular(k=4).build(50, 0), rounds=20)
    table = json.loads(json.dumps(result.as_dict()))
    assert table["sigma_an"] == result.sigma_an.tolist()
    assert len(table["sigma_ap"]) == 21
    assert (table["nodes"], table["rounds"], table["parameters"]) == (50, 20, 32)
    assert table["limit_an"] == result.limit_an
    assert table["stabilisation"] == result.stabilisation


@pytest.mark.slow
def test_the_figure_shows_both_deviations_limits_and_the_mark(tmp_path: Path) -> None:
    result = diffuse(Regular(k=8).build(100, 0), rounds=30)
    axes = deviation_curves(result).axes[0]
    lines = [np.asarray(line.get_ydata(), dtype=float) for line in axes.get_lines()]
    np.testing.assert_allclose(lines[0], result.sigma_ap)
    np.testing.assert_allclose(lines[1], [result.limit_ap] * 2)
    np.testing.assert_allclose(lines[2], result.sigma_an)
    np.testing.assert_allclose(lines[3], [result.limit_an] * 2)
    assert axes.get_yscale() == "log"
    assert f"stable from\nround {result.stabilisation}" in [text.get_text() for text in axes.texts]
    for name in ("a.png", "b.png", "a.svg"):
        save(deviation_curves(result), tmp_path / name)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    with Image.open(tmp_path / "a.png") as image:
        assert image.size == (896, 592)


def test_agreement_can_be_drawn_on_a_logarithmic_axis(tmp_path: Path) -> None:
    for graph in (Complete().build(30, 0), Ring().build(1, 0)):
        save(deviation_curves(diffuse(graph, noise=0.0, rounds=4)), tmp_path / "zero.png")
