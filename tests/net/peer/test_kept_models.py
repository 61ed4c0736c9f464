"""The models that peers keep: the best and the last, in their folders alone."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from support.command_line import error_line, peerage
from support.machines import Machines
from support.networking import run_peers

import peerage as pg
from peerage.algorithms import ALGORITHMS
from peerage.data.datasets import Digits
from peerage.engine.world import World
from peerage.errors import InputError
from peerage.files import write_json
from peerage.models import MODELS
from peerage.net.peer.network import Timeouts
from peerage.net.peer.peer import Peer
from peerage.net.peer.setup_file import model_facts
from peerage.records import checkpoint
from peerage.runs.kept_models import Keep, find_model
from peerage.runs.saved import open_run
from peerage.testing import toy

CALM = Timeouts(start=600.0, message=600.0, idle=30.0)


def digits(**changes: Any) -> pg.Experiment:
    settings: dict[str, Any] = {
        "algorithm": "decavg",
        "model": "logistic",
        "nodes": 2,
        "topology": "complete",
        "partition": "iid",
        "rounds": 3,
        "local": {"epochs": 1, "batch_size": 90},
    }
    return pg.Experiment(**settings | changes)


def with_facts(peers: list[Peer]) -> list[Path]:
    """The folders of the peers, with the file that `peerage node` adds."""
    folders = []
    for peer in peers:
        assert peer.recorder.folder is not None
        folders.append(peer.recorder.folder)
        write_json(folders[-1] / "setup.json", model_facts(peer.network.experiment, peer.world))
    return folders


def accuracy(module: torch.nn.Module, world: World, node: int) -> float:
    test = world.test_of(node)
    with torch.no_grad():
        return float((module.eval()(test.x).argmax(1) == test.y).double().mean())


def series(peer: Peer, key: str = "accuracy") -> list[float]:
    return [row[key] for row in peer.rows if key in row]


# The folder of a peer is enough


@pytest.mark.slow  # all algorithms
@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_folder_of_every_peer_gives_its_best_and_its_last_model(name, tmp_path):
    experiment = toy(ALGORITHMS[name](), rounds=2)
    peers = run_peers(experiment, tmp_path / "peers")
    simulated = pg.run(experiment)
    for peer, folder in zip(peers, with_facts(peers), strict=True):
        alone = tmp_path / f"alone-{peer.me}"
        shutil.move(folder, alone)
        if not (peer.world.is_evaluated(peer.me) or peer.world.models_at_hub):
            continue  # a hub whose clients have the models
        found = {kind: open_run(alone).choose(None, version=kind) for kind in ("last", "best")}
        wanted = simulated.state_dict(peer.me)
        got = found["last"].state_dict()
        assert all(torch.equal(got[key], value) for key, value in wanted.items())
        assert found["last"].facts["round"] == 2
        best = found["best"].facts
        assert best["accuracy"] == accuracy(found["best"].module(), peer.world, peer.me)
        if peer.world.is_evaluated(peer.me):
            assert best["accuracy"] == max(series(peer))
        kept = load_file(alone / "models" / find_file(alone, "last"))
        assert all(torch.equal(kept[key], value) for key, value in wanted.items())


def find_file(folder: Path, kind: str) -> str:
    """The file of a peer's first model."""
    found = find_model(folder, kind)
    assert found is not None
    return f"{kind}-{found.name}.safetensors" if found.name else f"{kind}.safetensors"


@pytest.mark.slow  # processes
def test_a_client_of_a_hub_has_the_final_model_in_its_folder(tmp_path):
    experiment = digits(algorithm="fedavg", topology="star:centre=last")
    with Machines(tmp_path, experiment, CALM) as machines:
        for me in range(3):
            machines.start(me)
        assert machines.wait() == [0, 0, 0], machines.log(0)
        log = machines.log(0)
    assert "checkpoints need at most 0.3 MB, model files included" in log
    shutil.move(tmp_path / "node-0", tmp_path / "a" / "b" / "c" / "alone")
    for kept in ("node-1", "node-2", "certs", "network.toml", "experiment.toml"):
        target = tmp_path / kept
        shutil.rmtree(target) if target.is_dir() else target.unlink()
    simulated = pg.run(experiment)
    data = Digits().load(Path())
    said = {}
    for which in ("last", "best"):
        out = tmp_path / f"{which}.safetensors"
        done = peerage(f"model {tmp_path}/a/b/c/alone --{which} --out {out} --json")
        assert done.code == 0, done.err
        said[which] = json.loads(done.lines[-1])
        module = MODELS["logistic"]().build(data.shape, 10)
        module.load_state_dict(load_file(out))
        right = module.eval()(data.test_x).argmax(1) == data.test_y
        assert float(right.double().mean()) == said[which]["accuracy"]
    assert said["last"]["round"] == 3
    assert said["last"]["accuracy"] == simulated.accuracy
    final = simulated.state_dict(0)
    got = load_file(tmp_path / "last.safetensors")
    assert all(torch.equal(got[key], value) for key, value in final.items())
    # The hub evaluated the same models, on the same test set.
    by_round = [row["accuracy"] for row in simulated.rows if row["scope"] == "network"]
    assert said["best"]["accuracy"] == max(by_round)
    assert said["best"]["round"] == by_round.index(max(by_round))
    done = peerage(f"model {tmp_path}/a/b/c/alone --best --out {tmp_path}/again.pt")
    percent = f"{100 * max(by_round):.1f} %"
    assert done.out.endswith(f"650 parameters, accuracy {percent} on the test set\n")


def test_an_algorithm_whose_file_is_not_here_does_not_matter(tmp_path):
    code = tmp_path / "mine.py"
    code.write_text(
        "from dataclasses import dataclass\n"
        "import peerage as pg\n\n\n"
        "@dataclass(frozen=True)\n"
        "class Mine(pg.DecAvg):\n"
        "    strength: float = 0.5\n"
    )
    experiment = digits(algorithm=f"{code}:Mine:strength=0.25", rounds=1, model="mlp:hidden=5")
    peers = run_peers(experiment, tmp_path / "peers")
    folders = with_facts(peers)
    code.unlink()
    found = open_run(folders[1]).choose(None)
    assert found.architecture.name == "mlp"
    assert found.facts["parameters"] == 64 * 5 + 5 + 5 * 10 + 10


# Which model is the best


def test_the_best_model_is_the_one_that_was_evaluated(tmp_path):
    """With evaluation after training, it is not the one after aggregation."""
    experiment = digits(partition="shards", evaluation={"at": "exchange"})
    peers = run_peers(experiment, tmp_path / "peers")
    for peer, folder in zip(peers, with_facts(peers), strict=True):
        best = open_run(folder).choose(None, version="best")
        values = series(peer)
        assert best.facts["accuracy"] == max(values)
        assert best.facts["round"] == values.index(max(values))  # the first of equals
        assert accuracy(best.module(), peer.world, peer.me) == max(values)
        if best.facts["round"] > 0:
            assert best.facts["evaluated"] == "after-training"
        last = open_run(folder).choose(None, version="last").facts
        assert last["round"] == 3
        assert "accuracy" not in last  # nobody evaluated it
    done = peerage(f"model {tmp_path}/peers --node best --best --out {tmp_path}/m.pt")
    assert "of node " in done.out, done.err
    assert "(after training), 650 parameters, accuracy " in done.out


def test_the_best_model_is_chosen_on_held_out_examples(tmp_path):
    experiment = digits(evaluation={"at": "end", "validation": 0.3})
    peers = run_peers(experiment, tmp_path / "peers")
    [folder, _] = with_facts(peers)
    values = series(peers[0], "validation_accuracy")
    done = peerage(f"model {folder} --best --out {tmp_path}/m.safetensors")
    percent = f"{100 * max(values):.1f} %"
    assert done.out.endswith(f"parameters, accuracy {percent} on held-out examples\n"), done.err


def test_convolutions_are_in_the_order_of_the_plain_module(tmp_path):
    """A checkpoint holds them in another order, and says so."""
    experiment = digits(model="digits-cnn", rounds=1, evaluation={"at": "end"})
    peers = run_peers(experiment, tmp_path / "peers")
    [folder, _] = with_facts(peers)
    data = Digits().load(Path())
    for kind in ("best", "last"):
        module = MODELS["digits-cnn"]().build(data.shape, 10)
        module.load_state_dict(load_file(folder / "models" / f"{kind}.safetensors"))
        right = module.eval()(data.test_x).argmax(1) == data.test_y
        found = find_model(folder, kind)
        assert found is not None
        assert float(right.double().mean()) == found.accuracies["accuracy"]
    [part] = (folder / "checkpoint").glob("*/*.safetensors")
    with safe_open(part, framework="pt") as file:
        assert "channels-last" in file.metadata()["layout"]
        assert "peerage model" in file.metadata()["model"]


@pytest.mark.parametrize(
    ("keep", "files"),
    [("best", ["best"]), ("last", ["last"]), ("both", ["best", "last"])],
)
def test_a_peer_keeps_what_it_is_asked_to(keep, files, tmp_path, monkeypatch):
    monkeypatch.setattr("support.networking.Peer", lambda *a, **k: Peer(*a, **k, keep=Keep(keep)))
    [peer, _] = run_peers(digits(rounds=1), tmp_path / "peers")
    [folder, _] = with_facts([peer, _])
    assert sorted(path.stem for path in (folder / "models").iterdir()) == files
    assert open_run(folder).choose(None, version="last").facts["round"] == 1
    if keep == "last":
        with pytest.raises(InputError, match="holds no best model; the peer needs an evaluated"):
            open_run(folder).choose(None, version="best")


def test_what_cannot_be_kept():
    with pytest.raises(InputError, match="keep must be one of best, last, both; got 'first'"):
        Keep("first")
    with pytest.raises(InputError, match="keep-every must be at least 1 round, got 0"):
        Keep(every=0)


def test_a_simulation_keeps_no_best_model(tmp_path):
    pg.run(digits(rounds=1, engine={"name": "serial"}), tmp_path / "run")
    said = error_line(peerage(f"model {tmp_path}/run --node 0 --best --out {tmp_path}/m.pt"))
    assert said.startswith("--best requires the folder of a real peer, and ")
    said = error_line(peerage(f"model {tmp_path}/run --best --last --out {tmp_path}/m.pt"))
    assert said == "--best and --last exclude each other; give one of them"


# Damage, and going back


@pytest.mark.slow  # processes
def test_peers_go_on_from_the_checkpoint_before_a_damaged_one_and_from_a_kept_one(tmp_path):
    experiment = digits(rounds=5)
    simulated = pg.run(experiment)

    def run(*more: str) -> None:
        for me in range(2):
            machines.start(me, more=["--keep-every", "2", *more])
        assert machines.wait() == [0, 0], machines.log(0)
        summaries = [json.loads((f / "summary.json").read_text()) for f in machines.folders]
        assert [s["rounds"] for s in summaries] == [5, 5]
        for me, folder in enumerate(machines.folders):
            found = open_run(folder).choose(None).state_dict()
            wanted = simulated.state_dict(me)
            assert all(torch.equal(found[key], value) for key, value in wanted.items())
            assert [row["round"] for row in machines.rows(me)] == list(range(6))

    with Machines(tmp_path, experiment, CALM) as machines:
        run()
        for folder in machines.folders:
            kept = [path.name for path in checkpoint.finished(folder)]
            assert kept == ["round-000002", "round-000004", "round-000005"]
            part = folder / "checkpoint" / "round-000005" / "part-0.safetensors"
            part.write_bytes(part.read_bytes()[:-8])
        run()
        for me in range(2):
            assert "is corrupted; continuing from round-000004" in machines.log(me)
        for folder in machines.folders:
            done = peerage(f"rewind {folder} --round 2")
            assert done.out.startswith(f"{folder} is back at round 2, 2 later checkpoints removed")
            assert [path.name for path in checkpoint.finished(folder)] == ["round-000002"]
            assert not (folder / "models" / "last.safetensors").exists()
        run()


def test_a_round_without_a_checkpoint(tmp_path):
    [peer, _] = run_peers(digits(), tmp_path / "peers")
    folder = peer.recorder.folder
    said = error_line(peerage(f"rewind {folder} --round 1"))
    assert said == (
        f"{folder} has no checkpoint of round 1, only of: 2, 3; choose one of these, and use "
        "--keep-every to keep more"
    )
    said = error_line(peerage(f"rewind {tmp_path} --round 1"))
    assert said == f"{tmp_path} is not the folder of a peer; give one that `peerage node` made"


def test_a_damaged_model_file_does_not_stop_a_peer(tmp_path, caplog):
    experiment = digits(rounds=1)
    [peer, _] = run_peers(experiment, tmp_path / "peers")
    file = tmp_path / "peers" / "0" / "models" / "best.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with_facts([peer])
    said = error_line(peerage(f"model {file.parents[1]} --best --out {tmp_path}/m.pt"))
    assert said == f"model file {file} is corrupted; remove it"
    with caplog.at_level(logging.WARNING, logger="peerage.peer"):
        run_peers(experiment, tmp_path / "peers")
    assert f"removing model file {file}, which is damaged" in caplog.text


def test_disk_use_is_bounded():
    assert Keep().most_bytes(100, 10, 3) == 3 * 10 + 3 * 3
    assert Keep("best", every=10).most_bytes(100, 10, 3) == 13 * 10 + 2 * 3
