"""Noise on messages in whole runs: what is perturbed, counted and reported."""

import json
import math
import warnings
from contextlib import suppress
from dataclasses import dataclass

import dp_accounting
import networkx as nx
import pytest
import torch
from support.command_line import TINY, peerage

import peerage as pg
from peerage import HWA, DecAvg, DecHW, Experiment, FedAvg, FedCurv, LocalSGD
from peerage.algorithm import Dimensions
from peerage.algorithms.rotating_hub import RotatingHub
from peerage.errors import PeerageWarning
from peerage.privacy import Noise
from peerage.requests import TensorSpec
from peerage.runs.privacy_plan import planned_messages
from peerage.testing import NODES, Stopped, simulate, stop_in_round_three, toy

STILL = LocalSGD(lr=0.0)  # no node learns: all changes are noise
PRIVATE = Noise(sigma=0.5, clip=0.25)


@pytest.fixture
def unwarned():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PeerageWarning)
        yield


def test_a_mean_of_perturbed_models_has_the_noise_of_a_mean(unwarned):
    settings = {"topology": "complete", "init": {"start": "shared"}, "model": "mlp:hidden=200x50"}
    ended = simulate(
        toy(DecAvg(STILL, weights="uniform"), noise={"sigma": 0.2}, rounds=1, **settings)
    )
    for start, end in zip(ended.start, ended.end, strict=True):
        assert float((end - start).std()) == pytest.approx(0.2 / math.sqrt(NODES), rel=0.03)
    # All nodes used the same five messages, their own one as the others got it.
    assert all(torch.equal(ended.end[0], end) for end in ended.end)


def test_the_hubs_own_messages_are_sent_as_they_are(unwarned):
    ended = simulate(toy(FedAvg(STILL), noise={"sigma": 0.2}, rounds=1))
    sent = [(sender, tensor) for name, sender, tensor, _ in ended.tap.sent if name == "x"]
    start = ended.start[-1]
    assert [torch.equal(tensor, start) for sender, tensor in sent if sender == NODES] == [True]
    assert not any(torch.equal(tensor, start) for sender, tensor in sent if sender != NODES)


def test_a_node_without_messages_is_unchanged(unwarned):
    alone = {"topology": nx.empty_graph(NODES), "rounds": 2}
    plain, noisy = (simulate(toy(DecAvg(), noise={"sigma": s}, **alone)) for s in (0.0, 1.0))
    assert all(torch.equal(a, b) for a, b in zip(plain.end, noisy.end, strict=True))


@pytest.mark.parametrize(("algorithm", "name"), [(DecHW(), "h"), (HWA(), "h"), (FedCurv(), "f")])
def test_curvature_stays_above_zero(algorithm, name, unwarned):
    ended = simulate(toy(algorithm, noise={"sigma": 3.0}, rounds=1))
    clients = [t for n, sender, t, _ in ended.tap.sent if n == name and sender != NODES]
    assert len(clients) == NODES
    assert all(float(tensor.min()) == 0.0 for tensor in clients)
    assert all(torch.isfinite(params).all() for params in ended.end)


@pytest.mark.parametrize("algorithm", [DecAvg(), DecHW(), FedAvg(clients=3), HWA()])
def test_messages_stay_near_the_received_mean(algorithm):
    """With clip, the part of a message that data decides about is short."""
    noise = {"sigma": 1e-6, "clip": 0.01}
    ended = simulate(toy(algorithm, noise=noise, init={"start": "shared"}, rounds=1))
    start = ended.start[0]
    moved = [t - start for n, s, t, _ in ended.tap.sent if n == "x" and s != NODES]
    assert moved
    assert all(float(step.norm()) < 0.0101 for step in moved)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [DecAvg(), DecHW(), FedAvg(clients=3)])
def test_engines_agree_and_runs_can_be_resumed(algorithm, tmp_path):
    experiment = toy(algorithm, noise=PRIVATE, rounds=4)
    serial = pg.run(experiment)
    pooled = pg.run(Experiment(**dict(experiment) | {"engine": {"name": "pool", "workers": 2}}))
    assert serial.digest == pooled.digest
    with suppress(Stopped):
        pg.run(experiment, tmp_path / "run", checkpoint_every=2, watch=stop_in_round_three)
    resumed = pg.resume(tmp_path / "run", experiment=experiment)
    assert resumed.digest == serial.digest
    assert resumed.summary["privacy"] == serial.summary["privacy"]


@pytest.mark.slow
def test_every_message_of_a_client_is_accounted_for():
    summary = pg.run(toy(FedAvg(clients=2), noise=PRIVATE, rounds=3)).summary["privacy"]
    assert sum(summary["messages"]) == 2 * 3
    assert len(summary["messages"]) == NODES
    # By the accountant directly: a Gaussian mechanism per message, of sensitivity 2 clip.
    for count, epsilon in zip(summary["messages"], summary["epsilons"], strict=True):
        if count:
            event = dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(1.0), count)
            accountant = dp_accounting.pld.PLDAccountant()
            accountant.compose(event)
            assert epsilon == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-3)
        else:
            assert epsilon == 0.0
    assert summary["epsilon"] == max(summary["epsilons"])
    assert f"epsilon {summary['epsilon']:.4g} at delta 1e-05" in summary["guarantee"]


def test_one_message_to_many_neighbours_is_one_release():
    summary = pg.run(toy(DecHW(), topology="complete", noise=PRIVATE, rounds=3)).summary["privacy"]
    assert summary["messages"] == [3] * NODES


@pytest.mark.parametrize(
    "algorithm",
    [
        *(cls() for cls in pg.ALGORITHMS.values() if cls is not pg.DESA),
        pg.DESA(ipc=2, iterations=3),
        pg.DFMLNeighbours(keep="own"),
        pg.DAC(peers=2, final_mean=True),
        pg.EL(mode="local"),
    ],
    ids=lambda algorithm: type(algorithm).__name__,
)
def test_no_node_releases_more_messages_than_planned(algorithm, monkeypatch, tmp_path):
    monkeypatch.setenv("PEERAGE_DATA", str(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PeerageWarning)
        experiment = toy(algorithm, noise=Noise(sigma=1e-3, clip=1.0), rounds=2)
        released = pg.run(experiment).summary["privacy"]["messages"]
    assert max(released) <= planned_messages(experiment)
    if not isinstance(algorithm, RotatingHub | pg.DFMLNeighbours | pg.Facade):
        assert max(released) == planned_messages(experiment)  # these may send fewer


def test_what_nodes_find_out_before_the_first_round_is_not_perturbed():
    changes = {"init": {"gain": "estimated"}, "noise": PRIVATE, "rounds": 1}
    summary = pg.run(toy(DecAvg(), **changes)).summary["privacy"]
    assert summary["messages"] == [1] * NODES


@pytest.mark.parametrize(
    ("noise", "sentence"),
    [({"sigma": 0.1}, "not clipped"), ({"clip": 1.0}, "have no noise")],
)
def test_without_a_guarantee_the_run_says_so(noise, sentence):
    with pytest.warns(PeerageWarning, match=sentence):
        summary = pg.run(toy(DecAvg(), noise=noise, rounds=1)).summary
    assert summary["privacy"]["guarantee"].startswith("No differential privacy: messages ")
    assert "epsilon" not in summary["privacy"]


def test_a_run_without_noise_reports_no_privacy():
    assert "privacy" not in pg.run(toy(DecAvg(), rounds=1)).summary
    assert "noise" not in Experiment().table()


@pytest.mark.parametrize("noise", [{"sigma": 0.5}, {"sigma": 0.5, "clip": 2.0, "delta": 1e-6}])
def test_noise_survives_the_file(noise):
    experiment = Experiment(noise=noise)
    again = Experiment.from_toml(experiment.to_toml())
    assert again.noise == experiment.noise
    assert again.to_toml() == experiment.to_toml()


@pytest.mark.slow
def test_the_command_line_prints_what_is_protected(tmp_path):
    line = f"run {TINY} --rounds 2 --noise 0.5 --clip 0.25 --delta 1e-6 --out"
    done = peerage(line, tmp_path / "run")
    assert done.code == 0, done.err
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["privacy"]["messages"] == [2] * 4
    text = " ".join(done.out.split())
    assert f"epsilon {summary['privacy']['epsilon']:.4g} at delta 1e-06" in text
    assert "noise 0.5, clip 0.25" in summary["label"]


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        ("--noise -1", "sigma must be a number of at least 0, got -1.0"),
        ("--noise 1 --clip 0", "clip must be a number above 0, got 0.0"),
        ("--noise 1 --clip 1 --delta 1", "delta must lie in (0, 1), got 1.0"),
        ("--delta 1e-6", "requires differential privacy; also set sigma above 0 and a clip"),
    ],
)
def test_bad_input_is_reported(flags, error, tmp_path):
    done = peerage(f"run {TINY} {flags} --out", tmp_path / "run")
    assert done.code == 2
    assert error in done.err
    assert len(done.err.splitlines()) == 1
    assert not (tmp_path / "run").exists()


@dataclass(frozen=True)
class Numbered(pg.Algorithm[None]):
    """Sends a whole number beside its model."""

    local: pg.LocalSGD = pg.LocalSGD(steps=1)

    def message_schema(self, dimensions: Dimensions) -> dict[str, TensorSpec]:
        return {"x": TensorSpec((dimensions.layout.size,)), "head": TensorSpec((1,), torch.int64)}

    async def round(self, node: pg.Node[None]) -> None:
        inbox = await node.exchange(x=node.params, head=torch.tensor([node.id]))
        sent = {m.sender: int(m.payload["head"]) for m in inbox.messages}
        node.note(right=all(sender == head for sender, head in sent.items()))


@pytest.mark.slow
def test_whole_numbers_in_messages_get_no_noise_with_a_warning():
    experiment = pg.Experiment(
        algorithm=Numbered(), nodes=3, topology="ring", rounds=1, noise=Noise(sigma=10, clip=1.0)
    )
    with pytest.warns(PeerageWarning, match="integer tensors in messages, here head"):
        result = pg.run(experiment)
    notes = [row["notes"] for row in result.rows if row["scope"] == "node" and "notes" in row]
    assert notes
    assert all(note["right"] == 1.0 for note in notes)
