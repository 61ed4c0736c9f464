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
from peerage.engine.prepare import load_dataset, name_architectures, with_model
from peerage.engine.shard import saves_evaluated
from peerage.engine.world import constants_of, describe_example
from peerage.errors import CheckpointError, InputError
from peerage.experiment.experiment import Experiment
from peerage.experiment.toml import PYTHON_OBJECT
from peerage.files import read_json, read_toml
from peerage.models.start import Architecture
from peerage.records import checkpoint
from peerage.records import rows as records
from peerage.records.checkpoint import Checkpoint
from peerage.records.rows import Row, read_metrics
from peerage.runs.run import check_constants, check_same
from peerage.vectors import named_tensors

Vectors = tuple[Tensor, Tensor]  # params [d], buffers [b]


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
    architectures: Sequence[Architecture]  # nodes take them in turn
    example: Tensor  # [1, *shape] zeros: an input that fits
    nodes: int  # including a hub
    hub: int | None
    places: Mapping[int, Path]  # node -> folder with its checkpoint and metrics
    origin: Mapping[str, Any]  # names of run, algorithm and data set, and a hash
    _checkpoints: dict[Path, Checkpoint] = field(default_factory=dict, repr=False)

    def choose(self, which: int | str | None) -> SavedModel:
        """The model of a node, of the `best` node, the `mean`, or the only model (None)."""
        only = next(iter(self.places)) if len(self.places) == 1 < self.nodes else None
        if only is not None and which not in (None, only, str(only)):
            raise InputError(
                f"{self.folder} holds only the model of node {only}, got --node {which}; "
                "remove --node"
            )
        if which == "mean":
            return self.mean()
        if which == "best":
            return self.best()
        if which is not None:
            return self.model(_number(which))
        if len(self.kept) != 1:
            raise InputError(
                f"{self.folder} holds {len(self.kept)} models; choose one with --node 0, "
                "--node best or --node mean"
            )
        return self.model(self.kept[0])

    def model(self, node: int) -> SavedModel:
        """The evaluated model of a node; for a client, that of the hub."""
        if not 0 <= node < self.nodes:
            raise InputError(
                f"{self.folder} has no node {node}; its nodes are 0 to {self.nodes - 1}"
            )
        return self._saved(node, self._vectors(self._model_owner(node)))

    def best(self) -> SavedModel:
        """The model with the highest last accuracy, on held-out data if there are any."""
        rows = self._last_rows()
        for key in ("validation_accuracy", "accuracy"):
            known = {node: row[key] for node, row in rows.items() if row.get(key) is not None}
            if known:
                node = max(known, key=lambda node: (known[node], -node))
                found = {key: known[node], f"{key}_round": rows[node]["round"]}
                return self._saved(node, self._vectors(node), found)
        raise InputError(f"{self.folder} has no recorded accuracy; choose a node by its number")

    def mean(self) -> SavedModel:
        """The mean of the models of the last round, unless they are personal."""
        remedy = "choose --node best or the number of a node"
        name = self.origin["algorithm"]
        if self.algorithm is None:
            raise InputError(
                f"algorithm {name} is a Python object, so it is unknown whether its models have a "
                f"mean; {remedy}, or give the experiment in Python"
            )
        if self.algorithm.personal:
            raise InputError(
                f"algorithm {name} gives every node a personal model, and such models have no "
                f"meaningful mean; {remedy}"
            )
        rounds = {node: self._checkpoint(node).round for node in self.kept}
        newest = max(rounds.values())
        faults = self.experiment.faults
        nodes = [node for node in self.kept if faults.present(node, max(newest - 1, 0))]
        kinds = dict.fromkeys(self._architecture(node).name for node in nodes)
        if len(kinds) > 1:
            raise InputError(f"models of {' and '.join(kinds)} have no mean; {remedy}")
        late = next((node for node in nodes if rounds[node] < newest), None)
        if late is not None:
            raise InputError(
                f"a mean requires models of one round, but the checkpoint of node {late} is of "
                f"round {rounds[late]} and the newest of round {newest}; {remedy}"
            )
        mean = _mean(self._vectors(node) for node in nodes)
        return self._saved(nodes[0], mean, {"node": "mean", "nodes": nodes})

    # Nodes

    @property
    def kept(self) -> list[int]:
        """The nodes whose models are in the folder."""
        return sorted({self._model_owner(node) for node in self.places})

    def _model_owner(self, node: int) -> int:
        """The node whose checkpoint holds the model of a node: itself, or the hub."""
        model_owner = node if self.hub is None else self.hub
        if model_owner not in self.places:
            hub = "the hub, " if model_owner == self.hub else ""
            raise InputError(
                f"{self.folder} does not hold the model of {hub}node {model_owner}; give the "
                "folder of that peer"
            )
        return model_owner

    def _architecture(self, node: int) -> Architecture:
        return self.architectures[node % len(self.architectures)]

    def _saved(
        self, node: int, vectors: Vectors, found: Mapping[str, Any] | None = None
    ) -> SavedModel:
        architecture = self._architecture(node)
        facts = {
            **self.origin,
            "node": node,
            "round": self._checkpoint(self._model_owner(node)).round,
            "rounds_planned": self.experiment.rounds,
            "architecture": architecture.name,
            "parameters": architecture.layout.size,
            **(found or {}),
        }
        return SavedModel(architecture, *vectors, self.example, facts)

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

    def _vectors(self, node: int) -> Vectors:
        """(evaluated parameters [d], buffers [b]) of a node that keeps a model."""
        saved = self._checkpoint(node)
        file = saved.folder / saved.parts[str(node)]
        try:
            with safe_open(file, framework="pt") as tensors:
                held = {
                    name: tensors.get_tensor(f"{node}.{name}")
                    for name in ("params", "evaluated", "buffers")
                    if f"{node}.{name}" in tensors.keys()  # noqa: SIM118 (no mapping)
                }
        except (OSError, SafetensorError) as error:  # an active run removes old checkpoints
            raise CheckpointError(f"cannot read {file}: {error}; try again") from None
        expected = self.algorithm is not None and saves_evaluated(self.algorithm)
        if expected and "evaluated" not in held:
            raise CheckpointError(
                f"{file} was written by a version that did not save the evaluated parameters of "
                f"algorithm {self.origin['algorithm']}; run the experiment again"
            )
        return held.get("evaluated", held["params"]), held.get("buffers", torch.empty(0))

    def _last_rows(self) -> dict[int, Row]:
        """The last evaluated row of each model in the folder, up to its checkpoint."""
        last = {node: self._checkpoint(node).round for node in self.kept}
        files = dict.fromkeys(self.places[node] / "metrics.jsonl" for node in self.kept)
        rows = [row for file in files for row in read_metrics(file) if "accuracy" in row]
        return {
            row["node"]: row
            for row in rows
            if row["scope"] == "node" and row["round"] <= last.get(row["node"], -1)
        }


class RunRecord(records.RunRecord):
    """The records of a run, finished or not, with the models of its last checkpoint."""

    def state_dict(self, node: int, *, experiment: Experiment | None = None) -> dict[str, Tensor]:
        """The evaluated model of a node, as `Result.state_dict` returns it.

        For an unfinished run, it is the model of the last checkpoint. `experiment` is needed only
        if the run's model is a Python object.
        """
        return open_run(self.folder, experiment=experiment).model(node).state_dict()

    def module(self, node: int, *, experiment: Experiment | None = None) -> nn.Module:
        """The model of `state_dict` as a module in evaluation mode."""
        return open_run(self.folder, experiment=experiment).model(node).module()


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
    return _open(folder, str(table["run"]), experiment_file, places, setups, experiment)


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
    )


def _read(table: dict[str, Any], folder: Path) -> Experiment:
    """The experiment, with defaults for Python objects on which no model depends."""
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


def _mean(vectors: Iterable[Vectors]) -> Vectors:
    """The means of parameters and of buffers, summed in double precision."""
    count, params, buffers = 0, torch.zeros(1).double(), torch.zeros(1).double()
    for x, b in vectors:
        count, params, buffers = count + 1, params + x, buffers + b
    return (params / count).float(), (buffers / count).float()


def _number(which: int | str) -> int:
    try:
        return int(which)
    except ValueError:
        raise InputError(
            f"--node must be the number of a node, best or mean, got {which!r}"
        ) from None
