"""Trained models from a folder: of a run, of a network of real peers, or of one of its peers.

A model is the one that metrics evaluate, `Algorithm.evaluated(node)`, as it was when the last
checkpoint was written. Building it needs no data: `setup.json` says what an example looks like.
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
    """A model from a checkpoint, and where it comes from."""

    architecture: Architecture
    params: Tensor  # [d]
    buffers: Tensor  # [b]
    example: Tensor  # [1, *shape] zeros: an input that fits
    facts: dict[str, Any]

    def module(self) -> nn.Module:
        """The model, in evaluation mode."""
        return self.architecture.module(self.params, self.buffers)

    def state_dict(self) -> dict[str, Tensor]:
        """The model by name, for `load_state_dict` of a module like it."""
        return named_tensors(self.module())


@dataclass(frozen=True)
class SavedRun:
    """The last checkpoints in a folder, and what it takes to build models from them."""

    folder: Path
    experiment: Experiment  # with the defaults in place of Python objects that no model needs
    algorithm: Algorithm[Any] | None  # None: a Python object that the folder cannot hold
    architectures: Sequence[Architecture]  # nodes take them in turn
    example: Tensor  # [1, *shape] zeros: an input that fits
    nodes: int  # also a hub
    hub: int | None
    places: Mapping[int, Path]  # node -> folder with its checkpoint and metrics
    origin: Mapping[str, Any]  # names of run, algorithm and data set, and a hash
    _checkpoints: dict[Path, Checkpoint] = field(default_factory=dict, repr=False)

    def choose(self, which: int | str | None) -> SavedModel:
        """The model of a node, of the `best` one, the `mean`, or the only one there is (None)."""
        only = next(iter(self.places)) if len(self.places) == 1 < self.nodes else None
        if only is not None and which not in (None, only, str(only)):
            raise InputError(
                f"{self.folder} holds the model of node {only} only, got --node {which}; leave "
                "--node out"
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
        """The evaluated model of a node; of a client, the one that the hub keeps."""
        if not 0 <= node < self.nodes:
            raise InputError(
                f"{self.folder} has no node {node}; its nodes are 0 to {self.nodes - 1}"
            )
        return self._saved(node, self._vectors(self._keeper(node)))

    def best(self) -> SavedModel:
        """The model with the highest last recorded accuracy, on held-out data if there are any."""
        rows = self._last_rows()
        for key in ("validation_accuracy", "accuracy"):
            known = {node: row[key] for node, row in rows.items() if row.get(key) is not None}
            if known:
                node = max(known, key=lambda node: (known[node], -node))
                found = {key: known[node], f"{key}_round": rows[node]["round"]}
                return self._saved(node, self._vectors(node), found)
        raise InputError(f"{self.folder} has no recorded accuracy; choose a node by its number")

    def mean(self) -> SavedModel:
        """The mean of the models of the last round, where the algorithm says that it has one."""
        remedy = "choose --node best or the number of a node"
        name = self.origin["algorithm"]
        if self.algorithm is None:
            raise InputError(
                f"algorithm {name} is a Python object, which cannot be asked whether its models "
                f"have a mean; {remedy}, or give the experiment in Python"
            )
        if self.algorithm.personal:
            raise InputError(
                f"algorithm {name} gives every node a model of its own, and such models have no "
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
                f"a mean needs models of one round, and the checkpoint of node {late} is of round "
                f"{rounds[late]}, the newest of round {newest}; {remedy}"
            )
        mean = _mean(self._vectors(node) for node in nodes)
        return self._saved(nodes[0], mean, {"node": "mean", "nodes": nodes})

    # Nodes

    @property
    def kept(self) -> list[int]:
        """The nodes whose models are here."""
        return sorted({self._keeper(node) for node in self.places})

    def _keeper(self, node: int) -> int:
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
            "round": self._checkpoint(self._keeper(node)).round,
            "rounds_planned": self.experiment.rounds,
            "architecture": architecture.name,
            "parameters": architecture.layout.size,
            **(found or {}),
        }
        return SavedModel(architecture, *vectors, self.example, facts)

    # Files

    def _checkpoint(self, node: int) -> Checkpoint:
        """The last one of a node, read once."""
        place = self.places[node]
        if place not in self._checkpoints:
            saved = checkpoint.load(place)
            if saved is None:
                raise CheckpointError(f"{place} has no checkpoint yet; let it finish a round first")
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
        except (OSError, SafetensorError) as error:  # a run that goes on removes old checkpoints
            raise CheckpointError(f"cannot read {file}: {error}; try again") from None
        expected = self.algorithm is not None and saves_evaluated(self.algorithm)
        if expected and "evaluated" not in held:
            raise CheckpointError(
                f"{file} was written by a version that did not save the evaluated parameters of "
                f"algorithm {self.origin['algorithm']}; run the experiment again"
            )
        return held.get("evaluated", held["params"]), held.get("buffers", torch.empty(0))

    def _last_rows(self) -> dict[int, Row]:
        """The last evaluation of every kept model, up to its checkpoint."""
        last = {node: self._checkpoint(node).round for node in self.kept}
        files = dict.fromkeys(self.places[node] / "metrics.jsonl" for node in self.kept)
        rows = [row for file in files for row in read_metrics(file) if "accuracy" in row]
        return {
            row["node"]: row
            for row in rows
            if row["scope"] == "node" and row["round"] <= last.get(row["node"], -1)
        }


class RunRecord(records.RunRecord):
    """A run as its folder tells it, finished or not, with the models of its last checkpoint."""

    def state_dict(self, node: int, *, experiment: Experiment | None = None) -> dict[str, Tensor]:
        """The evaluated model of a node by name, as `Result.state_dict` returns it.

        Of a run that is not finished, it is the model of the last checkpoint. `experiment` is
        needed only if the run's own has a Python object for its model.
        """
        return open_run(self.folder, experiment=experiment).model(node).state_dict()

    def module(self, node: int, *, experiment: Experiment | None = None) -> nn.Module:
        """As `state_dict`, as a module in evaluation mode."""
        return open_run(self.folder, experiment=experiment).model(node).module()


def open_run(
    folder: str | Path, *, experiment: Experiment | None = None, network: Path | None = None
) -> SavedRun:
    """The models in the folder of a run, of a network, or of one real peer.

    `experiment` is needed if the run's own has a Python object for its model; `network` is the
    network file of a peer, if it is neither in its folder nor in one of the two above.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(
            f"there is no folder {str(folder)!r}; give one that `peerage run`, `peerage up` or "
            "`peerage node` made"
        )
    claims = [
        *folder.glob("peer.json"),
        *folder.glob("*/peer.json"),
        *folder.glob("peers/*/peer.json"),
    ]
    if not claims:
        name = folder.absolute().name
        return _open(folder, name, folder / "experiment.toml", {}, [folder], experiment)
    source = _network_file(folder, claims[0].parent) if network is None else network
    table = read_toml(source)
    peers = {claim.parent: read_json(claim) for claim in claims}
    places = {int(p["node"]): at for at, p in peers.items() if p.get("run") == table.get("run")}
    if not places:
        raise InputError(
            f"{source} is the network file of run {table.get('run')}, and {folder} of another; "
            "give the right one with --network"
        )
    file = source.parent / str(table.get("experiment"))
    setups = [folder, *places.values()]
    return _open(folder, str(table["run"]), file, places, setups, experiment)


def _network_file(folder: Path, peer: Path) -> Path:
    above = [peer.absolute(), *peer.absolute().parents[:2]]
    found = next((home for home in above if (home / "network.toml").exists()), None)
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
    """From the experiment's file, the places of peers (none: a run), and where setups may lie."""
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
    """The experiment, as far as models depend on it: the rest may have been Python objects."""
    models = table.get("model", [])
    if any(map(_is_object, models if isinstance(models, list) else [models])):
        raise InputError(
            f"the model of {folder} is a Python object, which a file cannot hold; from Python, use "
            "peerage.RunRecord.load(folder).state_dict(node, experiment=...)"
        )
    init = {key: value for key, value in table.get("init", {}).items() if not _is_object(value)}
    return Experiment(**{k: v for k, v in table.items() if not _is_object(v)} | {"init": init})


def _setup(
    folders: Iterable[Path], folder: Path, experiment: Experiment, complete: bool
) -> dict[str, Any]:
    """What the folder says of its data; an older one does not, and the data must be loaded."""
    files = [one / "setup.json" for one in folders]
    found = [read_json(file) for file in files if file.exists()]
    setup = next((one for one in found if "example" in one), found[0] if found else {})
    if "example" in setup:
        return setup
    if not complete:
        raise InputError(
            f"{folder} is of an older version, and its experiment has Python objects; from Python, "
            "use peerage.RunRecord.load(folder).state_dict(node, experiment=...)"
        )
    data = load_dataset(experiment)
    return {
        **setup,
        "classes": data.classes,
        "example": describe_example(data.shape, torch.float32),
    }


def _is_object(value: Any) -> bool:
    """Whether this stands in a file for a Python object."""
    return isinstance(value, Mapping) and value.get("name") == PYTHON_OBJECT


def _name(value: Any) -> str:
    table = value if isinstance(value, Mapping) else {"name": value}
    return str(table.get("value") if _is_object(table) else table.get("name"))


def _mean(vectors: Iterable[Vectors]) -> Vectors:
    """The mean of parameters and of buffers, added up in double precision."""
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
