"""The models in the folder of a run, of a network of real peers, or of one peer.

A model is the one that metrics evaluate, `Algorithm.evaluated(node)`, at the last checkpoint. Real
peers also keep the best one that they evaluated, in a file.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from peerage.algorithm import Algorithm
from peerage.engine.evaluated import ONLY
from peerage.engine.shard import saves_evaluated
from peerage.errors import CheckpointError, InputError
from peerage.experiment.experiment import Experiment
from peerage.models.files import fit_model
from peerage.models.start import Architecture
from peerage.records import checkpoint
from peerage.records.checkpoint import Checkpoint
from peerage.records.rows import Row, is_until, read_metrics, value_at
from peerage.runs.kept_models import KeptModel, find_model
from peerage.runs.watch import choose
from peerage.vectors import Weights, named_tensors

METRICS = ("validation_accuracy", "accuracy")  # by which models are compared, the first that exists


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
    of_peers: bool = False  # whether real peers wrote the folders
    _checkpoints: dict[Path, Checkpoint] = field(default_factory=dict, repr=False)

    def choose(
        self, which: int | str | None, name: str | None = None, version: str | None = None
    ) -> SavedModel:
        """The model of a node, of the `best` node, the `mean`, or the only model (None).

        `name` is that of an evaluated model; by default it is the first of a node. `version` is
        `last` (the default), or `best` for the best model that a real peer evaluated.
        """
        only = next(iter(self.places)) if len(self.places) == 1 < self.nodes else None
        if only is not None and which not in (None, only, str(only)):
            raise InputError(
                f"{self.folder} holds only the model of node {only}, got --node {which}; "
                "remove --node"
            )
        if version == "best":
            return self._best_kept(which, name)
        if which == "mean":
            return self.mean(name)
        if which == "best":
            return self.best(name)
        if which is not None:
            return self.model(_number(which), name)
        if only is not None:
            return self.model(only, name)
        if len(self.kept) != 1:
            raise InputError(
                f"{self.folder} holds {len(self.kept)} models; choose one with --node 0, "
                "--node best or --node mean"
            )
        return self.model(self.kept[0], name)

    def model(self, node: int, name: str | None = None) -> SavedModel:
        """The evaluated model of a node; for a client, that of the hub.

        A client alone has the model that it received last.
        """
        self._check_node(node)
        if node in self.places and self._owner(node) not in self.places:
            found = find_model(self.places[node], "last", name)
            if found is not None:
                return self._from_file(node, found, self.places[node])
        owner = self._model_owner(node)
        return self._saved(node, self._weights(owner, name), name, self._last_accuracy(owner, name))

    def _check_node(self, node: int) -> None:
        if not 0 <= node < self.nodes:
            raise InputError(
                f"{self.folder} has no node {node}; its nodes are 0 to {self.nodes - 1}"
            )

    def best(self, name: str | None = None) -> SavedModel:
        """The model with the highest last accuracy, on held-out data if there are any."""
        rows = self._last_rows(self.kept)
        if name is not None:  # a hub and its clients may have models of different names
            rows = {node: row for node, row in rows.items() if name in self._names(node)}
        for key in METRICS:
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

    # Models that peers keep

    def _best_kept(self, which: int | str | None, name: str | None) -> SavedModel:
        """The best model that a peer evaluated, or the best of all peers."""
        if not self.of_peers:
            raise InputError(
                f"--best requires the folder of a real peer, and {self.folder} is a simulation, "
                "which keeps no earlier models; use --node best for the best of its last models"
            )
        if which == "mean":
            raise InputError(
                "--best has no mean, as the models are of different rounds; use --last"
            )
        if which in (None, "best"):
            nodes = list(self.places)
        else:
            nodes = [_number(which)]
            self._check_node(nodes[0])
        if which is None and len(nodes) > 1:
            raise InputError(
                f"{self.folder} holds {len(nodes)} peers; choose one with --node 0 or --node best"
            )
        found = {
            node: kept
            for node in nodes
            if node in self.places
            if (kept := find_model(self.places[node], "best", name)) is not None
        }
        if not found:
            raise InputError(
                f"{self.folder} holds no best model; the peer needs an evaluated round and --keep "
                "best or both, so use --last"
            )
        best = max(found, key=lambda node: (max(found[node].accuracies.values()), -node))
        return self._from_file(best, found[best], self.places[best])

    def _last_accuracy(self, node: int, name: str | None) -> dict[str, Any]:
        """The accuracy of the last model of a peer, if it was evaluated after its last change."""
        row = self._last_rows([node]).get(node) if self.of_peers else None
        if row is None or row["round"] != self._checkpoint(node).round:
            return {}
        if self.experiment.evaluated_at == "exchange" and not row.get("final"):
            return {}
        values = {key: _value(row, name, key) for key in METRICS}
        known = {key: value for key, value in values.items() if value is not None}
        return dict([next(iter(known.items()))]) if known else {}

    def _from_file(self, node: int, kept: KeptModel, place: Path) -> SavedModel:
        kinds = {kind.name: kind for kind in self.architectures}
        if kept.architecture not in kinds:
            raise InputError(
                f"{place} holds a model of the unknown architecture {kept.architecture!r}, of an "
                "algorithm that is not here; restore its file"
            )
        weights = fit_model(kept.tensors, kinds[kept.architecture], place)
        return self._saved(node, weights, kept.name or None, kept.facts)

    # Nodes

    @property
    def kept(self) -> list[int]:
        """The nodes whose models are in the folder."""
        return sorted({self._model_owner(node) for node in self.places})

    def _owner(self, node: int) -> int:
        """The node that keeps the model of a node: itself, or the hub."""
        return node if self.hub is None or self.clients_keep_models else self.hub

    def _model_owner(self, node: int) -> int:
        """The same; raises an error if that node's checkpoint is not here."""
        model_owner = self._owner(node)
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
            **({} if found and "round" in found else {"round": self._round(node)}),
            "rounds_planned": self.experiment.rounds,
            "architecture": architecture.name,
            "parameters": architecture.layout.size,
            **({} if name is None else {"model_name": name}),
            **(found or {}),
        }
        return SavedModel(architecture, model.params, model.buffers, self.example, facts)

    def _round(self, node: int) -> int:
        return self._checkpoint(self._model_owner(node)).round

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

    def _last_rows(self, nodes: Sequence[int]) -> dict[int, Row]:
        """The last evaluated row of each of these nodes' models, up to its checkpoint."""
        last = {node: self._checkpoint(node) for node in nodes}
        files = dict.fromkeys(self.places[node] / "metrics.jsonl" for node in nodes)
        rows = [row for file in files for row in read_metrics(file) if "accuracy" in row]
        return {
            row["node"]: row
            for row in rows
            if row["scope"] == "node" and row["node"] in last
            if is_until(row, last[row["node"]].round, last[row["node"]].final)
        }


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
