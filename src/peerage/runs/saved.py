"""Load trained models from the folder of a run, of a network of real peers, or of one peer.

A model is the one that metrics evaluate, `Algorithm.evaluated(node)`, at the last checkpoint.
Building it needs no data, as `setup.json` holds shape and type of an example.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from peerage.algorithm import Algorithm
from peerage.engine.evaluated import ONLY
from peerage.engine.prepare import load_dataset, name_architectures, with_model
from peerage.engine.shard import saves_evaluated
from peerage.engine.world import constants_of, describe_example
from peerage.errors import CheckpointError, InputError
from peerage.experiment.experiment import Experiment
from peerage.experiment.identity import model_code
from peerage.experiment.outside import CodeGate, check_unchanged, code_gate
from peerage.experiment.permission import allowed
from peerage.experiment.toml import PYTHON_OBJECT
from peerage.files import read_json, read_toml
from peerage.models.start import Architecture
from peerage.records import checkpoint
from peerage.records import rows as records
from peerage.records.checkpoint import Checkpoint
from peerage.records.rows import Row, is_until, read_metrics, value_at
from peerage.runs.run import check_constants, check_same, code_of_run
from peerage.runs.watch import choose
from peerage.vectors import Weights, named_tensors


@dataclass(frozen=True)
class SavedModel:
    """A model from a checkpoint, and its origin."""

    architecture: Architecture
    params: Tensor  # [d]
    buffers: Tensor  # [b]
    example: Tensor  # [1, *shape] zeros: an input that fits
    facts: dict[str, Any]

    def module(self) -> nn.Module:
        """The model, in evaluation mode."""
        return self.architecture.module(self.params, self.buffers)

    def state_dict(self) -> dict[str, Tensor]:
        """The model, for `load_state_dict` of a module of the same architecture."""
        return named_tensors(self.module())


@dataclass(frozen=True)
class SavedRun:
    """The last checkpoints in a folder, and all that is needed to build models from them."""

    folder: Path
    experiment: Experiment  # with defaults for Python objects on which no model depends
    algorithm: Algorithm[Any] | None  # None if it is a Python object, which no file can hold
    architectures: Sequence[Architecture]  # nodes take those of the experiment in turn
    example: Tensor  # [1, *shape] zeros: an input that fits
    nodes: int  # including a hub
    hub: int | None
    places: Mapping[int, Path]  # node -> folder with its checkpoint and metrics
    origin: Mapping[str, Any]  # names of run, algorithm and data set, and a hash
    clients_keep_models: bool = False  # in a network with a hub
    _checkpoints: dict[Path, Checkpoint] = field(default_factory=dict, repr=False)

    def choose(self, which: int | str | None, name: str | None = None) -> SavedModel:
        """The model of a node, of the `best` node, the `mean`, or the only model (None).

        `name` is that of an evaluated model; by default it is the first of a node.
        """
        only = next(iter(self.places)) if len(self.places) == 1 < self.nodes else None
        if only is not None and which not in (None, only, str(only)):
            raise InputError(
                f"{self.folder} holds only the model of node {only}, got --node {which}; "
                "remove --node"
            )
        if which == "mean":
            return self.mean(name)
        if which == "best":
            return self.best(name)
        if which is not None:
            return self.model(_number(which), name)
        if len(self.kept) != 1:
            raise InputError(
                f"{self.folder} holds {len(self.kept)} models; choose one with --node 0, "
                "--node best or --node mean"
            )
        return self.model(self.kept[0], name)

    def model(self, node: int, name: str | None = None) -> SavedModel:
        """The evaluated model of a node; for a client, that of the hub."""
        if not 0 <= node < self.nodes:
            raise InputError(
                f"{self.folder} has no node {node}; its nodes are 0 to {self.nodes - 1}"
            )
        return self._saved(node, self._weights(self._model_owner(node), name), name)

    def best(self, name: str | None = None) -> SavedModel:
        """The model with the highest last accuracy, on held-out data if there are any."""
        rows = self._last_rows()
        if name is not None:  # a hub and its clients may have models of different names
            rows = {node: row for node, row in rows.items() if name in self._names(node)}
        for key in ("validation_accuracy", "accuracy"):
            values = {node: _value(row, name, key) for node, row in rows.items()}
            known = {node: value for node, value in values.items() if value is not None}
            if known:
                node = max(known, key=lambda node: (known[node], -node))
                found = {key: known[node], f"{key}_round": rows[node]["round"]}
                return self._saved(node, self._weights(node, name), name, found)
        raise InputError(f"{self.folder} has no recorded accuracy; choose a node by its number")

    def mean(self, name: str | None = None) -> SavedModel:
        """The mean of the models of the last round, unless they are personal."""
        remedy = "choose --node best or the number of a node"
        algorithm = self.origin["algorithm"]
        if self.algorithm is None:
            raise InputError(
                f"algorithm {algorithm} is a Python object, so it is unknown whether its models "
                f"have a mean; {remedy}, or give the experiment in Python"
            )
        if self.algorithm.personal:
            raise InputError(
                f"algorithm {algorithm} gives every node a personal model, and such models have no "
                f"meaningful mean; {remedy}"
            )
        rounds = {node: self._checkpoint(node).round for node in self.kept}
        newest = max(rounds.values())
        faults = self.experiment.faults
        nodes = [node for node in self.kept if faults.present(node, max(newest - 1, 0))]
        if self.clients_keep_models:
            nodes = [node for node in nodes if node != self.hub]
        kinds = dict.fromkeys(self._chosen(node, name)[1] for node in nodes)
        if len(kinds) > 1:
            raise InputError(f"models of {' and '.join(kinds)} have no mean; {remedy}")
        late = next((node for node in nodes if rounds[node] < newest), None)
        if late is not None:
            raise InputError(
                f"a mean requires models of one round, but the checkpoint of node {late} is of "
                f"round {rounds[late]} and the newest of round {newest}; {remedy}"
            )
        mean = _mean(self._weights(node, name) for node in nodes)
        return self._saved(nodes[0], mean, name, {"node": "mean", "nodes": nodes})

    # Nodes

    @property
    def kept(self) -> list[int]:
        """The nodes whose models are in the folder."""
        return sorted({self._model_owner(node) for node in self.places})

    def _model_owner(self, node: int) -> int:
        """The node whose checkpoint holds the model of a node: itself, or the hub."""
        model_owner = node if self.hub is None or self.clients_keep_models else self.hub
        if model_owner not in self.places:
            hub = "the hub, " if model_owner == self.hub else ""
            raise InputError(
                f"{self.folder} does not hold the model of {hub}node {model_owner}; give the "
                "folder of that peer"
            )
        return model_owner

    def _architecture(self, node: int) -> Architecture:
        return self.architectures[node % len(self.experiment.model)]

    def _saved(
        self,
        node: int,
        model: Weights,
        name: str | None,
        found: Mapping[str, Any] | None = None,
    ) -> SavedModel:
        architecture = {kind.name: kind for kind in self.architectures}[model.architecture]
        facts = {
            **self.origin,
            "node": node,
            "round": self._checkpoint(self._model_owner(node)).round,
            "rounds_planned": self.experiment.rounds,
            "architecture": architecture.name,
            "parameters": architecture.layout.size,
            **({} if name is None else {"model_name": name}),
            **(found or {}),
        }
        return SavedModel(architecture, model.params, model.buffers, self.example, facts)

    # Files

    def _checkpoint(self, node: int) -> Checkpoint:
        """The last checkpoint of a node, read once."""
        place = self.places[node]
        if place not in self._checkpoints:
            saved = checkpoint.load(place)
            if saved is None:
                raise CheckpointError(f"{place} has no checkpoint yet; wait for its first one")
            self._checkpoints[place] = saved
        return self._checkpoints[place]

    def _weights(self, node: int, name: str | None = None) -> Weights:
        """The evaluated model of a node that keeps a model, or that with a name."""
        saved = self._checkpoint(node)
        file = saved.folder / saved.parts[str(node)]
        chosen, architecture = self._chosen(node, name)
        named = "models" in saved.trees[str(node)]
        prefix = f"{node}.model.{chosen}." if named else f"{node}."
        try:
            with safe_open(file, framework="pt") as tensors:
                held = {
                    key: tensors.get_tensor(prefix + key)
                    for key in ("params", "evaluated", "buffers")
                    if prefix + key in tensors.keys()  # noqa: SIM118 (no mapping)
                }
        except (OSError, SafetensorError) as error:  # an active run removes old checkpoints
            raise CheckpointError(f"cannot read {file}: {error}; try again") from None
        expected = self.algorithm is not None and saves_evaluated(self.algorithm)
        if expected and not named and "evaluated" not in held:
            raise CheckpointError(
                f"{file} was written by a version that did not save the evaluated parameters of "
                f"algorithm {self.origin['algorithm']}; run the experiment again"
            )
        params = held.get("evaluated", held["params"])
        return Weights(params, held.get("buffers", torch.empty(0)), architecture)

    def _chosen(self, node: int, name: str | None) -> tuple[str, str]:
        """The name and the architecture of a node's model with this name, or of its first one."""
        models = self._names(node)
        return choose({known: (known, kind) for known, kind in models.items()}, name, node)

    def _names(self, node: int) -> dict[str, str]:
        """The names of a node's models, and their architectures."""
        tree = self._checkpoint(node).trees[str(node)]
        models: dict[str, str] = tree.get("models", {ONLY: self._architecture(node).name})
        return models

    def _last_rows(self) -> dict[int, Row]:
        """The last evaluated row of each model in the folder, up to its checkpoint."""
        last = {node: self._checkpoint(node) for node in self.kept}
        files = dict.fromkeys(self.places[node] / "metrics.jsonl" for node in self.kept)
        rows = [row for file in files for row in read_metrics(file) if "accuracy" in row]
        return {
            row["node"]: row
            for row in rows
            if row["scope"] == "node" and row["node"] in last
            if is_until(row, last[row["node"]].round, last[row["node"]].final)
        }


class RunRecord(records.RunRecord):
    """The records of a run, finished or not, with the models of its last checkpoint."""

    def state_dict(
        self, node: int, name: str | None = None, *, experiment: Experiment | None = None
    ) -> dict[str, Tensor]:
        """The evaluated model of a node, or that with a name, as `Result.state_dict` returns it.

        For an unfinished run, it is the model of the last checkpoint. `experiment` is needed only
        if the run's model is a Python object.
        """
        return open_run(self.folder, experiment=experiment).model(node, name).state_dict()

    def module(
        self, node: int, name: str | None = None, *, experiment: Experiment | None = None
    ) -> nn.Module:
        """The model of `state_dict` as a module in evaluation mode."""
        return open_run(self.folder, experiment=experiment).model(node, name).module()


def open_run(
    folder: str | Path, *, experiment: Experiment | None = None, network: Path | None = None
) -> SavedRun:
    """The models in the folder of a run, of a network, or of one real peer.

    `experiment` is needed if the run's model is a Python object. `network` is the network file of a
    peer, if it is neither in its folder nor in one of the two above.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(
            f"there is no folder {str(folder)!r}; give one that `peerage run`, `peerage up` or "
            "`peerage node` made"
        )
    files = [
        *folder.glob("peer.json"),
        *folder.glob("*/peer.json"),
        *folder.glob("peers/*/peer.json"),
    ]
    if not files:
        name = folder.absolute().name
        return _open(folder, name, folder / "experiment.toml", {}, [folder], experiment)
    source = _network_file(folder, files[0].parent) if network is None else network
    table = read_toml(source)
    peers = {file.parent: read_json(file) for file in files}
    places = {int(p["node"]): at for at, p in peers.items() if p.get("run") == table.get("run")}
    if not places:
        raise InputError(
            f"{source} is the network file of run {table.get('run')}, but {folder} is of another "
            "run; give the right file with --network"
        )
    experiment_file = source.parent / str(table.get("experiment"))
    setups = [folder, *places.values()]
    arguments = (folder, str(table["run"]), experiment_file, places, setups, experiment)
    if (source.parent / "environment.json").exists():  # made on this machine by `peerage up`
        return _open(*arguments)
    known = frozenset().union(*map(allowed, places.values()))
    with code_gate(CodeGate.of_network(source, table, known)):
        return _open(*arguments)


def _network_file(folder: Path, peer: Path) -> Path:
    folders = [peer.absolute(), *peer.absolute().parents[:2]]
    found = next((one for one in folders if (one / "network.toml").exists()), None)
    if found is None:
        raise InputError(
            f"there is no network.toml in {folder} or above it; give the network file of this peer "
            "with --network"
        )
    return found / "network.toml"


def _open(
    folder: Path,
    run: str,
    file: Path,
    places: Mapping[int, Path],
    setups: Iterable[Path],
    given: Experiment | None,
) -> SavedRun:
    """Open a run, or a network with the folders of its peers in `places`."""
    table = read_toml(file)
    experiment = given or _read(table, folder)
    check_unchanged(code_of_run(file.parent), model_code(experiment))
    objects = [] if given else [k for k in ("algorithm", "dataset") if _is_object(table.get(k))]
    setup = _setup(setups, folder, experiment, complete=not objects)
    shape = tuple(setup["example"]["shape"])
    experiment = with_model(experiment, shape)
    if given is not None:
        check_same(file.parent, experiment)
    kinds = name_architectures(experiment, shape, len(setup["classes"]))
    check_constants(folder, setup, {"constants": constants_of(kinds) or None})
    nodes, hub = experiment.nodes_and_hub, bool(experiment.algorithm.with_hub)
    if not places:
        nodes = len(setup["parameters"])
        hub = nodes > len(setup["examples"])
    origin = {
        "run": run,
        "algorithm": _name(table.get("algorithm")),
        "dataset": _name(table.get("dataset")),
        "experiment": hashlib.sha256(file.read_bytes()).hexdigest(),
    }
    return SavedRun(
        folder,
        experiment,
        None if "algorithm" in objects else experiment.algorithm,
        list(kinds.values()),
        torch.zeros(1, *shape, dtype=getattr(torch, setup["example"]["dtype"])),
        nodes,
        nodes - 1 if hub else None,
        places or dict.fromkeys(range(nodes), folder),
        origin,
        "models_at" in setup,
    )


def _read(table: dict[str, Any], folder: Path) -> Experiment:
    """The experiment, with defaults for Python objects and metrics: no model depends on them."""
    if "metrics" in table.get("evaluation", {}):
        kept = {key: value for key, value in table["evaluation"].items() if key != "metrics"}
        table = {**table, "evaluation": kept}
    models = table.get("model", [])
    if any(map(_is_object, models if isinstance(models, list) else [models])):
        raise InputError(
            f"the model of {folder} is a Python object, which a file cannot hold; use "
            "peerage.RunRecord.load(folder).state_dict(node, experiment=...)"
        )
    init = {key: value for key, value in table.get("init", {}).items() if not _is_object(value)}
    clusters = table.get("clusters")
    if isinstance(clusters, Mapping) and _is_object(clusters.get("shift")):
        table = {**table, "clusters": None}
    return Experiment(**{k: v for k, v in table.items() if not _is_object(v)} | {"init": init})


def _setup(
    folders: Iterable[Path], folder: Path, experiment: Experiment, complete: bool
) -> dict[str, Any]:
    """The setup of a run; that of an older version has no example, so the data are loaded."""
    files = [one / "setup.json" for one in folders]
    found = [read_json(file) for file in files if file.exists()]
    setup = next((one for one in found if "example" in one), found[0] if found else {})
    if "example" in setup:
        return setup
    if not complete:
        raise InputError(
            f"{folder} is of an older version, and its experiment has Python objects; use "
            "peerage.RunRecord.load(folder).state_dict(node, experiment=...)"
        )
    data = load_dataset(experiment)
    return {
        **setup,
        "classes": data.classes,
        "example": describe_example(data.shape, torch.float32),
    }


def _is_object(value: Any) -> bool:
    """Whether a value from a file stands for a Python object."""
    return isinstance(value, Mapping) and value.get("name") == PYTHON_OBJECT


def _name(value: Any) -> str:
    table = value if isinstance(value, Mapping) else {"name": value}
    return str(table.get("value") if _is_object(table) else table.get("name"))


def _value(row: Row, name: str | None, key: str) -> Any:
    """A metric of a node's first model, or of that with a name; the row may not name the first."""
    other = name is not None and name in row.get("models", {})
    return value_at(row, f"models.{name}.{key}" if other else key)


def _mean(models: Iterable[Weights]) -> Weights:
    """The means of parameters and of buffers, summed in double precision."""
    count, params, buffers, kind = 0, torch.zeros(1).double(), torch.zeros(1).double(), ""
    for model in models:
        params, buffers = params + model.params, buffers + model.buffers
        count, kind = count + 1, model.architecture
    return Weights((params / count).float(), (buffers / count).float(), kind)


def _number(which: int | str) -> int:
    try:
        return int(which)
    except ValueError:
        raise InputError(
            f"--node must be the number of a node, best or mean, got {which!r}"
        ) from None
