"""The model files of a real peer: its best evaluated model, and its last one.

`models/best.safetensors` and `models/last.safetensors` in the folder of a peer hold state
dictionaries with the names and shapes of the plain module, so any program can load them. Their
metadata says round and accuracy. If an algorithm evaluates several models, each has its own file,
such as `best-NAME.safetensors`.
"""

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from peerage.engine.evaluated import Scores
from peerage.engine.shard import Shard
from peerage.errors import CheckpointError, InputError, check_choice
from peerage.experiment.experiment import EVALUATION_TIMES
from peerage.files import disk_errors, write_bytes
from peerage.records import checkpoint
from peerage.records.metrics import VALIDATION
from peerage.runs.watch import choose
from peerage.vectors import Weights, hash_tensors, named_tensors

FOLDER = "models"
KINDS = {"best": ("best",), "last": ("last",), "both": ("best", "last")}  # files by --keep
TIMES = {stored: shown for shown, stored in EVALUATION_TIMES.items()}

log = logging.getLogger("peerage.peer")


@dataclass(frozen=True)
class Keep:
    """What a peer keeps besides its newest checkpoints."""

    models: str = "both"  # model files: best, last or both
    every: int | None = None  # rounds between checkpoints that are never removed

    def __post_init__(self) -> None:
        check_choice("keep", self.models, KINDS)
        if self.every is not None and self.every < 1:
            raise InputError(f"keep-every must be at least 1 round, got {self.every}")

    def most_bytes(self, rounds: int, checkpoint_size: int, model_size: int) -> int:
        """The most that checkpoints and model files need, with one of each being written."""
        checkpoints = checkpoint.KEPT + 1 + (0 if self.every is None else rounds // self.every)
        return checkpoints * checkpoint_size + (len(KINDS[self.models]) + 1) * model_size


@dataclass(frozen=True)
class KeptModel:
    """A model file, and what its metadata says."""

    tensors: dict[str, Tensor]
    name: str
    architecture: str
    round: int
    accuracies: dict[str, float]  # by key of the metric: of held-out data, or of the test set
    evaluated: str | None  # when in the round it was evaluated

    @property
    def facts(self) -> dict[str, Any]:
        """Round and accuracy, as `SavedRun.best` names them."""
        rounds = {f"{key}_round": self.round for key in self.accuracies}
        when = {} if self.evaluated is None else {"evaluated": self.evaluated}
        return {"round": self.round, **self.accuracies, **rounds, **when}


# Writing


@dataclass
class ModelKeeper:
    """Writes the model files of one peer.

    A client whose hub keeps the only model writes the one that it received last, and evaluates it
    on its own data.
    """

    folder: Path  # of the peer
    shard: Shard
    node: int
    keep: Keep
    origin: Mapping[str, str]  # metadata of all files
    remedy: str  # if the disk is full
    best: float = -math.inf  # accuracy of the best model so far
    _evaluated: tuple[Mapping[str, Weights], Mapping[str, Scores]] | None = None
    _received: tuple[Weights, int] | None = None  # from the hub, and its number of rounds
    _modules: dict[str, nn.Module] = field(default_factory=dict)  # by architecture

    def open(self) -> None:
        """Remember the best accuracy so far, and watch evaluations from now on."""
        self.shard.on_evaluated = self._note
        for file in damaged_files(self.folder):
            log.warning("removing model file %s, which is damaged", file)
            file.unlink(missing_ok=True)
        found = find_model(self.folder, "best")
        if found is not None:
            self.best = max(found.accuracies.values(), default=-math.inf)

    @property
    def kinds(self) -> tuple[str, ...]:
        return KINDS[self.keep.models]

    @property
    def is_client(self) -> bool:
        """Whether the hub keeps the model of this peer."""
        return self.shard.world.model_owner(self.node) != self.node

    @property
    def size(self) -> int:
        """The bytes of one version of all models of this peer."""
        world = self.shard.world
        kinds = [world.assignment[self.node]]
        if not self.is_client and world.is_evaluated(self.node):
            kinds = [
                model.architecture for model in self.shard.evaluated_models(self.node).values()
            ]
        layouts = [(world.layouts[kind], world.buffer_layouts[kind]) for kind in kinds]
        return 4 * sum(layout.size + buffers.size for layout, buffers in layouts)

    def _note(self, node: int, models: Mapping[str, Weights], scores: Mapping[str, Scores]) -> None:
        self._evaluated = dict(models), dict(scores)

    def receive(self, model: Weights, rounds: int) -> None:
        """Note the hub's model after `rounds` rounds."""
        self._received = model, rounds

    def forget(self) -> None:
        """Forget the models of a round that failed."""
        self._evaluated = self._received = None

    def save(self, round: int, final: bool = False, due: bool = True) -> None:
        """Write the models after `round` rounds; `due` says whether models are evaluated now."""
        evaluated, self._evaluated = self._evaluated, None
        if self.is_client:
            self._save_received(due)
            return
        if not self.shard.world.is_evaluated(self.node):  # a hub beside clients with models
            return
        if evaluated is not None and "best" in self.kinds:
            early = self.shard.world.experiment.evaluated_at == "exchange" and round and not final
            when = TIMES["exchange" if early else "end"]
            self._save_best(*evaluated, round, when)
        if "last" in self.kinds:
            models = self.shard.evaluated_models(self.node)
            known = {} if evaluated is None else _scores_of(models, *evaluated)
            self._write("last", models, known, round, TIMES["end"])

    def _save_received(self, due: bool) -> None:
        received, self._received = self._received, None
        if received is None:
            return
        model, rounds = received
        models, scores = {"": model}, {}
        if due and "best" in self.kinds:
            scores = {"": self.shard.score_model(self.node, model)}
            self._save_best(models, scores, rounds, TIMES["end"])
        if "last" in self.kinds:
            self._write("last", models, scores, rounds, TIMES["end"])

    def _save_best(
        self,
        models: Mapping[str, Weights],
        scores: Mapping[str, Scores],
        round: int,
        when: str,
    ) -> None:
        """Write the models if the first of them is better than all before."""
        accuracy = _accuracy(scores[next(iter(models))])[1]
        if accuracy > self.best:  # false for NaN
            self._write("best", models, scores, round, when)
            self.best = accuracy

    def _write(
        self,
        kind: str,
        models: Mapping[str, Weights],
        scores: Mapping[str, Scores],
        round: int,
        when: str,
    ) -> None:
        home = self.folder / FOLDER
        with disk_errors(home, self.remedy):
            home.mkdir(exist_ok=True)
        for name, model in models.items():
            state = self._state_dict(model)
            metadata = {
                "format": "pt",  # marks tensors of PyTorch
                **self.origin,
                "node": str(self.node),
                "round": str(round),
                "architecture": model.architecture,
                "names": json.dumps(list(models)),
                "sha256": hash_tensors(state),
            }
            if name in scores:
                key, accuracy = _accuracy(scores[name])
                metadata |= {key: repr(accuracy), "evaluated": when}
            write_bytes(
                _file(self.folder, kind, name), safetensors.torch.save(state, metadata), self.remedy
            )
        current = {_file(self.folder, kind, name) for name in models}
        for old in set(_files(self.folder, kind)) - current:
            old.unlink(missing_ok=True)

    def _state_dict(self, model: Weights) -> dict[str, Tensor]:
        """The model by the names of its module, which is built once for each architecture."""
        kind = self.shard.world.architectures[model.architecture]
        if kind.name not in self._modules:
            self._modules[kind.name] = kind.specimen()
        module = self._modules[kind.name]
        module.load_state_dict(kind.state_dict(model.params, model.buffers), strict=False)
        return named_tensors(module)


def _accuracy(scores: Scores) -> tuple[str, float]:
    """The accuracy by which models are compared: on held-out data if there are any."""
    key = f"{VALIDATION}accuracy" if f"{VALIDATION}accuracy" in scores else "accuracy"
    return key, float(scores[key])


def _scores_of(
    models: Mapping[str, Weights],
    evaluated: Mapping[str, Weights],
    scores: Mapping[str, Scores],
) -> dict[str, Scores]:
    """The scores of the models that have not changed since they were evaluated."""
    return {
        name: scores[name]
        for name, model in models.items()
        if name in evaluated
        and torch.equal(model.params, evaluated[name].params)
        and torch.equal(model.buffers, evaluated[name].buffers)
    }


# Reading


def find_model(folder: Path, kind: str, name: str | None = None) -> KeptModel | None:
    """The `best` or `last` model of a peer, or that with a name; None if it has no such file."""
    files = _files(folder, kind)
    if not files:
        return None
    _, first = _read(files[0])
    chosen = choose(
        {known: known for known in json.loads(first["names"])}, name, int(first["node"])
    )
    tensors, metadata = _read(_file(folder, kind, chosen))
    keys = [key for key in (f"{VALIDATION}accuracy", "accuracy") if key in metadata]
    return KeptModel(
        tensors,
        chosen,
        metadata["architecture"],
        int(metadata["round"]),
        {key: float(metadata[key]) for key in keys},
        metadata.get("evaluated"),
    )


def damaged_files(folder: Path) -> list[Path]:
    """The model files of a peer that cannot be read."""

    def is_damaged(file: Path) -> bool:
        try:
            _read(file)
        except CheckpointError:
            return True
        return False

    return list(filter(is_damaged, _files(folder)))


def remove_models_after(folder: Path, round: int) -> None:
    """Remove the model files of a peer that are of later rounds, or damaged."""
    damaged = damaged_files(folder)
    for file in _files(folder):
        if file in damaged or int(_read(file)[1]["round"]) > round:
            file.unlink()


def _read(file: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a model file, whose hash is verified, and its metadata."""
    try:
        with safe_open(file, framework="pt") as opened:
            tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
            metadata: dict[str, str] = opened.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read model file {file}: {error}; remove it") from None
    if hash_tensors(tensors) != metadata.get("sha256"):
        raise CheckpointError(f"model file {file} is corrupted; remove it")
    return tensors, metadata


def _files(folder: Path, kind: str = "") -> list[Path]:
    return sorted((folder / FOLDER).glob(f"{kind}*.safetensors"))


def _file(folder: Path, kind: str, name: str) -> Path:
    return folder / FOLDER / f"{kind}{'-' if name else ''}{name}.safetensors"
