"""FedNL against a second, slow and obvious implementation in float64, and against the optimum."""

from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.optimize import minimize
from torch import Tensor

from peerage import Experiment, FedNL, resume, run
from peerage.algorithms.fednl import NEVER
from peerage.engine.lockstep import Lockstep, SerialTeam
from peerage.engine.prepare import prepare
from peerage.errors import InputError
from peerage.testing import CLASSES, EXAMPLES, NODES, Parts, Stopped, blobs, unequal_parts
from peerage.work.newton import (
    Compress,
    add_pairs,
    from_upper,
    krylov,
    largest,
    leading,
    solve_projected,
    solve_shifted,
    to_rows,
    upper,
)

Matrix = NDArray[np.float64]

DATA = blobs()
P = 5  # numbers of a problem: four inputs and the bias
EQUAL = tuple(tuple(range(start, EXAMPLES, 4)) for start in range(4))  # four clients
ALIKE = (tuple(range(EXAMPLES)),) * 4  # with the same data: any of them represent all


def experiment(algorithm: FedNL, parts: tuple[tuple[int, ...], ...], **more: Any) -> Experiment:
    settings: dict[str, Any] = {
        "dataset": DATA,
        "model": "logistic",
        "nodes": len(parts),
        "partition": Parts(parts),
        "init": {"start": "shared"},
        "engine": {"name": "serial"},
    }
    return Experiment(algorithm=algorithm, **(settings | more))


@dataclass
class Trace:
    """The hub's rows [C, p] before the first round and after every one, and bytes of rounds."""

    rows: list[Matrix]
    bytes: list[int]
    engine: Lockstep


def trace(algorithm: FedNL, parts: Any, rounds: int, watch: Any = None, **more: Any) -> Trace:
    world = prepare(experiment(algorithm, parts, rounds=rounds, **more))
    team = SerialTeam(world)
    with Lockstep(world, team) as engine:
        hub = world.nodes - 1
        found = Trace([rows_of(engine, hub)], [], engine)
        for round in range(rounds):
            found.bytes.append(engine.round(round, evaluate=False).bytes)
            found.rows.append(rows_of(engine, hub))
            if watch:
                watch([team.shard.members[node].node for node in range(world.nodes)])
    return found


def rows_of(engine: Lockstep, hub: int) -> Matrix:
    return to_rows(engine.world.layout(hub), engine.parameters(hub)).double().numpy()


# The slow and obvious implementation


def derivatives(x: Matrix, y: Matrix, w: Matrix, penalty: float) -> tuple[Matrix, Matrix]:
    """Of one problem, example by example."""
    g, h = penalty * w, penalty * np.eye(len(w))
    for a, label in zip(x, y, strict=True):
        s = 1 / (1 + np.exp(-(a @ w)))
        g = g + (s - label) * a / len(x)
        h = h + s * (1 - s) * np.outer(a, a) / len(x)
    return g, h


def truncated(d: Matrix, rank: int) -> Matrix:
    u, s, vt = np.linalg.svd(d)
    return (u[:, :rank] * s[:rank]) @ vt[:rank]


def problem(indices: Any, c: int) -> tuple[Matrix, Matrix]:
    x = DATA.train_x[list(indices)].double().numpy()
    return np.hstack([x, np.ones((len(x), 1))]), (DATA.train_y[list(indices)] == c).double().numpy()


def reference(o: FedNL, parts: Any, start: Matrix, rounds: int) -> list[Matrix]:
    """FedNL as in the paper, every class and client one after the other, nothing lost."""
    weights = np.array([len(part) for part in parts]) / sum(len(part) for part in parts)
    norm = {"frobenius": None, "spectral": 2}[o.norm]
    trajectory = [np.zeros_like(start) for _ in range(rounds + 1)]
    for c, w in enumerate(start):
        data = [problem(part, c) for part in parts]
        h = [
            derivatives(*d, w, o.penalty)[1] if o.start == "exact" else 0 * np.eye(P) for d in data
        ]
        trajectory[0][c] = w
        for round in range(rounds):
            both = [derivatives(*d, w, o.penalty) for d in data]
            g = sum(t * g for t, (g, _) in zip(weights, both, strict=True))
            ds = [a - h_k for (_, a), h_k in zip(both, h, strict=True)]
            big = sum(t * h_k for t, h_k in zip(weights, h, strict=True))
            if o.option == 2:
                shift = sum(t * np.linalg.norm(d, norm) for t, d in zip(weights, ds, strict=True))
                big = big + shift * np.eye(P)
            else:
                values, vectors = np.linalg.eigh(big)
                big = (vectors * np.maximum(values, o.penalty)) @ vectors.T
            w = w - np.linalg.solve(big, g)
            trajectory[round + 1][c] = w
            for k, d in enumerate(ds):
                s, a = truncated(d, o.rank), 1.0
                if o.learn == "contractive" and np.any(d):
                    a = 1 - np.sqrt(max(0, 1 - (s**2).sum() / (d**2).sum()))
                h[k] = h[k] + a * s
    return trajectory


@pytest.mark.parametrize(
    "algorithm",
    [
        FedNL(penalty=0.01),
        FedNL(rank=1, penalty=0.01),
        FedNL(rank=P, penalty=0.01),
        FedNL(option=1, penalty=0.01),
        FedNL(option=1, rank=P, penalty=0.01),
        FedNL(option=1, start="zero", penalty=0.5),
        FedNL(norm="spectral", penalty=0.01),
        FedNL(start="zero", penalty=0.01),
        FedNL(start="zero", norm="spectral", learn="contractive", penalty=0.01),
        FedNL(rank=3, learn="contractive", penalty=0.01),
    ],
    ids=str,
)
def test_it_is_the_algorithm_of_the_paper(algorithm):
    found = trace(algorithm, unequal_parts(), rounds=6).rows
    expected = reference(algorithm, unequal_parts(), found[0], rounds=6)
    for round in range(7):
        np.testing.assert_allclose(found[round], expected[round], rtol=2e-3, atol=2e-4)


# The optimum


def optimum(indices: Any, penalty: float) -> Matrix:
    def one(c: int) -> Matrix:
        x, y = problem(indices, c)

        def loss(w: Matrix) -> tuple[float, Matrix]:
            margins = np.where(y > 0, 1, -1) * (x @ w)
            value = np.logaddexp(0, -margins).mean() + penalty / 2 * w @ w
            return value, derivatives(x, y, w, penalty)[0]

        return minimize(loss, np.zeros(P), jac=True, method="BFGS", options={"gtol": 1e-10}).x

    with np.errstate(all="ignore"):
        return np.stack([one(c) for c in range(CLASSES)])


def distances(rows: list[Matrix], best: Matrix) -> list[float]:
    return [float(np.linalg.norm(each - best)) for each in rows]


def newton(x: Matrix, y: Matrix, w: Matrix, penalty: float) -> Matrix:
    g, h = derivatives(x, y, w, penalty)
    return w - np.linalg.solve(h, g)


def test_the_first_step_is_that_of_newton_on_all_examples_together():
    found = trace(FedNL(penalty=0.01), unequal_parts(), rounds=1).rows
    for c in range(CLASSES):
        expected = newton(*problem(range(EXAMPLES), c), found[0][c], 0.01)
        np.testing.assert_allclose(found[1][c], expected, rtol=1e-3, atol=1e-4)


def test_with_whole_differences_a_step_is_newtons_with_the_hessian_of_the_round_before():
    found = trace(FedNL(option=1, rank=P, penalty=0.01), unequal_parts(), rounds=6).rows
    for round in range(1, 6):
        for c in range(CLASSES):
            x, y = problem(range(EXAMPLES), c)
            h = derivatives(x, y, found[round - 1][c], 0.01)[1]
            expected = found[round][c] - np.linalg.solve(
                h, derivatives(x, y, found[round][c], 0.01)[0]
            )
            np.testing.assert_allclose(found[round + 1][c], expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "algorithm",
    [
        FedNL(rank=1, penalty=0.05),
        FedNL(rank=2, penalty=0.05),
        FedNL(rank=2, penalty=0.05, start="zero"),
        FedNL(rank=1, penalty=0.05, norm="spectral"),
        FedNL(rank=2, penalty=0.05, option=1),
        FedNL(rank=2, penalty=0.5, option=1, start="zero"),
        FedNL(rank=3, penalty=0.05, learn="contractive"),
    ],
    ids=str,
)
@pytest.mark.parametrize("parts", [EQUAL, unequal_parts()], ids=["equal", "unequal"])
def test_it_reaches_the_optimum_faster_and_faster(algorithm, parts):
    best = optimum(range(EXAMPLES), algorithm.penalty)
    far = distances(trace(algorithm, parts, rounds=16).rows, best)
    assert far[-1] < 1e-6 * far[0]
    # Superlinear: the ratio of distances that follow each other falls, until rounding is all.
    ratios = [b / a for a, b in pairwise(far) if b > 1e-5]
    assert ratios[-1] < 0.15
    assert ratios[-1] < ratios[-2] < ratios[-3] < ratios[-4]


# What the hub and its clients know of each other


def agree(nodes: list[Any]) -> None:
    """The hub's H is the mean of the H_k, with what has arrived and with nothing else."""
    hub = nodes[-1].state
    known = [c for c in nodes[:-1] if int(hub.rounds[c.id]) != NEVER]
    total = torch.zeros_like(hub.h)
    for client in known:
        own = client.state
        arrived = int(own.rounds) == int(hub.rounds[client.id])
        h_k = add_pairs(own.h, own.values, own.vectors) if arrived else own.h
        total += client.num_examples * h_k
    assert hub.examples == sum(client.num_examples for client in known)
    torch.testing.assert_close(hub.h * hub.examples, total, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("start", ["exact", "zero"])
@pytest.mark.parametrize(
    "more", [{}, {"faults": {"loss": 0.4}}, {"faults": {"links": 0.6}}], ids=["", "loss", "links"]
)
@pytest.mark.parametrize("clients", [None, 2])
def test_hub_and_clients_agree_on_what_was_learned(start, more, clients):
    algorithm = FedNL(clients=clients, start=start, penalty=0.05)
    found = trace(algorithm, unequal_parts(), 12, agree, **more)
    assert np.isfinite(found.rows).all()


def test_clients_that_join_late_or_leave():
    faults = {"join": "1@3", "leave": "2@4"}
    trace(FedNL(penalty=0.05), unequal_parts(), 8, agree, faults=faults)


@pytest.mark.parametrize("more", [{"faults": {"loss": 0.4}}, {"faults": {"links": 0.6}}])
@pytest.mark.parametrize("start", ["exact", "zero"])
def test_lost_messages_delay_but_do_not_mislead(more, start):
    """Clients with the same data: the gradient is right, and all depends on H."""
    best = optimum(range(EXAMPLES), 0.05)
    far = distances(trace(FedNL(start=start, penalty=0.05), ALIKE, 40, **more).rows, best)
    assert far[-1] < 1e-6 * far[0]


def test_with_some_clients_at_a_time_it_comes_near_the_optimum():
    best = optimum(range(EXAMPLES), 0.05)
    alike = distances(trace(FedNL(clients=2, penalty=0.05), ALIKE, 40).rows, best)
    assert alike[-1] < 1e-6 * alike[0]
    # With other data at every client, it goes on to move with those that are drawn.
    different = distances(trace(FedNL(clients=3, penalty=0.05), EQUAL, 40).rows, best)
    assert max(different[20:]) < 0.3 * different[0]


def test_lost_messages_from_clients_with_different_data():
    best = optimum(range(EXAMPLES), 0.05)
    found = trace(FedNL(penalty=0.05), EQUAL, 40, faults={"loss": 0.2})
    assert max(distances(found.rows, best)[20:]) < 0.3 * np.linalg.norm(found.rows[0] - best)


@pytest.mark.parametrize("start", ["exact", "zero"])
def test_clients_without_examples_change_nothing(start):
    algorithm = FedNL(start=start, penalty=0.05)
    with_empty = trace(algorithm, (EQUAL[0], (), EQUAL[1]), 6, agree).rows
    without = trace(algorithm, EQUAL[:2], 6).rows
    np.testing.assert_allclose(with_empty[-1], without[-1], rtol=1e-4, atol=1e-5)


def test_a_round_with_empty_clients_only_leaves_the_model_alone():
    found = trace(FedNL(clients=1, penalty=0.05), (EQUAL[0], (), ()), 8, agree).rows
    still = [np.array_equal(a, b) for a, b in pairwise(found)]
    assert any(still)
    assert not all(still)


@pytest.mark.parametrize("option", [1, 2])
@pytest.mark.parametrize("start", ["exact", "zero"])
def test_bytes_by_hand(option, start):
    found = trace(
        FedNL(option=option, rank=2, start=start, penalty=0.5), unequal_parts(), rounds=3
    ).bytes
    model = 4 * CLASSES * P
    down = model + 8 * NODES  # x, and the round in which each client was last received
    distance = 4 * CLASSES * (option == 2)
    triangle, factors = 4 * CLASSES * P * (P + 1) // 2, 4 * CLASSES * 2 * (P + 1)
    later = NODES * (down + model + distance + factors)
    first = NODES * (down + model + distance + (triangle if start == "exact" else factors))
    assert found == [first, later, later]


# Engines, checkpoints


@pytest.mark.slow
def test_engines_agree_and_a_run_can_be_resumed(tmp_path):
    def made(**engine: Any) -> Experiment:
        return experiment(
            FedNL(clients=4, penalty=0.05),
            unequal_parts(),
            rounds=6,
            engine=engine,
            faults={"loss": 0.2},
        )

    def stop(row: Any) -> None:
        if row["round"] == 4:
            raise Stopped

    digest = run(made(name="serial")).digest
    assert run(made(name="pool", workers=2)).digest == digest
    with suppress(Stopped):
        run(made(name="serial"), tmp_path / "run", checkpoint_every=3, watch=stop)
    resumed = resume(
        tmp_path / "run", experiment=made(name="serial"), engine={"name": "pool", "workers": 2}
    )
    assert resumed.digest == digest


@pytest.mark.slow
def test_images_and_a_command_line():
    settings: dict[str, Any] = {"dataset": "digits", "model": "logistic", "nodes": 3, "rounds": 8}
    result = run(Experiment(algorithm="fednl:rank=3", partition="iid", **settings))
    accuracies = [row["accuracy"] for row in result.rows if row["scope"] == "network"]
    assert accuracies[-1] > 0.9


def test_more_examples_than_fit_one_product(monkeypatch):
    whole = trace(FedNL(), unequal_parts(), rounds=3).rows
    monkeypatch.setattr("peerage.work.newton.ROWS", 3)
    np.testing.assert_allclose(
        trace(FedNL(), unequal_parts(), rounds=3).rows, whole, rtol=1e-3, atol=1e-4
    )


# Matrices


def symmetric(size: int, seed: int) -> Tensor:
    a = torch.randn(size, size, generator=torch.Generator().manual_seed(seed))
    return (a + a.T) / 2


def turned(values: list[float], size: int, seed: int = 0) -> Tensor:
    """A symmetric matrix with these eigenvalues, and otherwise 0."""
    q = torch.linalg.qr(symmetric(size, seed)).Q[:, : len(values)]
    a = (q * torch.tensor(values)) @ q.T
    return (a + a.T) / 2


@settings(deadline=None, max_examples=15)
@given(st.integers(150, 220), st.integers(1, 8), st.integers(0, 10**6))
def test_krylov_finds_what_the_full_decomposition_finds(size, rank, seed):
    matrix = symmetric(size, seed) ** 3  # a few eigenvalues stand out
    matrix = (matrix + matrix.T) / 2
    found, expected = leading(matrix, rank), largest(matrix.double(), rank)
    scale = float(expected[0][0].abs())
    torch.testing.assert_close(
        found[0].abs().double(), expected[0].abs(), rtol=0, atol=1e-5 * scale
    )
    residual = matrix.double() @ found[1].double().T - found[1].double().T * found[0]
    assert float(residual.norm(dim=0).max()) < 1e-5 * scale
    torch.testing.assert_close(found[1] @ found[1].T, torch.eye(rank), rtol=0, atol=1e-5)


SPECTRA = {
    "one": [3.0],
    "two alike": [3.0, 3.0, 1.0],
    "both signs": [3.0, -3.0, 2.0, -2.0, 1.0],
    "low rank": [5.0 - i / 4 for i in range(20)],
    "all alike": [2.0] * 200,
    "flat": [1.0 - i / 1000 for i in range(200)],
    "falling": [0.9**i for i in range(200)],
    "nothing": [],
}


@pytest.mark.parametrize("name", SPECTRA)
@pytest.mark.parametrize("rank", [1, 2, 5])
def test_truncation_is_as_good_as_can_be(name, rank):
    """What is left of a matrix has the norm of the eigenvalues that are left out."""
    spectrum = [*SPECTRA[name], *[0.0] * (200 - len(SPECTRA[name]))]
    matrix = turned(SPECTRA[name], 200)
    values, vectors = leading(matrix, rank)
    left = matrix - (vectors.T * values) @ vectors
    best = sum(sorted(value**2 for value in spectrum)[: 200 - rank]) ** 0.5
    assert float(left.double().norm()) == pytest.approx(best, rel=1e-4, abs=1e-4)


def test_krylov_is_used_where_it_pays_and_gives_up_where_it_does_not():
    assert krylov(turned(SPECTRA["falling"], 200), 2) is not None
    assert krylov(torch.eye(200), 2) is None
    same = [krylov(turned(SPECTRA["falling"], 200), 2) for _ in range(2)]
    assert torch.equal(same[0][1], same[1][1])  # its start is not random


def test_compression_of_differences():
    known = torch.stack([symmetric(6, 1), symmetric(6, 2)])
    d = torch.stack([turned([4.0, -5.0, 1.0], 6), turned([0.0], 6)])
    values, vectors, norms = Compress(known + d, known, 2).run(None)
    torch.testing.assert_close(values, torch.tensor([[-5.0, 4.0], [0, 0]]), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(norms, torch.tensor([42**0.5, 0]), rtol=1e-4, atol=1e-4)
    left = known + d - add_pairs(known, values, vectors)
    assert float(left[0].norm()) == pytest.approx(1.0, rel=1e-3)


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 4), st.integers(1, 9))
def test_triangles_come_back_as_matrices(classes, size):
    matrices = torch.stack([symmetric(size, seed) for seed in range(classes)])
    assert upper(matrices).shape == (classes, size * (size + 1) // 2)
    assert torch.equal(from_upper(upper(matrices), size), matrices)


def test_projection_lifts_small_eigenvalues():
    h, g = torch.diag(torch.tensor([2.0, 0.1, -3.0])), torch.ones(3)
    torch.testing.assert_close(solve_projected(h, g, 0.5), torch.tensor([0.5, 2.0, 2.0]))


def test_a_shift_is_enough_or_else_eigenvalues_are_lifted():
    h, g = torch.diag(torch.tensor([2.0, 0.1, -3.0])), torch.ones(3)
    enough = solve_shifted(h, torch.tensor(4.0), g, 0.5)
    torch.testing.assert_close(enough, torch.tensor([1 / 6, 1 / 4.1, 1.0]))
    # 3.2 leaves 0.2, and 1 leaves -2: both are far from what the penalty promises.
    for shift in (3.2, 1.0):
        lifted = solve_shifted(h, torch.tensor(shift), g, 0.5)
        expected = torch.tensor([1 / (2 + shift), 1 / (0.1 + shift), 2.0])
        torch.testing.assert_close(lifted, expected)


# Errors


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"rank": 0}, "rank must be at least 1, got 0"),
        ({"penalty": 0.0}, "penalty must be a number above 0, got 0.0"),
        ({"penalty": float("nan")}, "penalty must be a number above 0, got nan"),
        ({"penalty": float("inf")}, "penalty must be a number above 0, got inf"),
        ({"option": 3}, "option must be one of 1, 2; got 3"),
        ({"norm": "nuclear"}, "norm must be one of frobenius, spectral; got 'nuclear'"),
        ({"start": "warm"}, "start must be one of exact, zero; got 'warm'"),
        ({"learn": "slow"}, "learn must be one of full, contractive; got 'slow'"),
        ({"option": 1, "norm": "spectral"}, "leave norm=spectral out"),
        ({"clients": 0}, "clients must be at least 1"),
    ],
)
def test_bad_options(options, error):
    with pytest.raises(InputError, match=error):
        FedNL(**options)


@pytest.mark.parametrize("text", ["fednl:option=3", "fednl:norm=nuclear", "fednl:rank=two"])
def test_bad_options_on_the_command_line(text):
    with pytest.raises(InputError) as caught:
        Experiment(algorithm=text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["fednl:option=1", "fednl:option=2,rank=3,learn=contractive"])
def test_options_on_the_command_line(text):
    assert isinstance(Experiment(algorithm=text).algorithm, FedNL)


def test_other_models_are_rejected():
    with pytest.raises(InputError, match=r"layers hidden1, head; use --model logistic"):
        run(experiment(FedNL(), unequal_parts(), model="mlp:hidden=8"))


def test_a_rank_above_the_size_of_the_problem_is_rejected():
    run(experiment(FedNL(rank=P), unequal_parts(), rounds=1))
    with pytest.raises(InputError, match="rank 6 is more than the 5 rows"):
        run(experiment(FedNL(rank=P + 1), unequal_parts(), rounds=1))


def test_it_has_no_local_training_settings():
    with pytest.raises(InputError, match="has no local training settings"):
        experiment(FedNL(), unequal_parts(), local={"lr": 0.1})
