"""The models of a node that are evaluated, by name, and their last scores."""

import re
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from peerage.algorithm import Algorithm, Node
from peerage.errors import PeerageError, did_you_mean
from peerage.vectors import Weights

ONLY = ""  # the name of a model that `Algorithm.evaluated` returns without one
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")  # part of keys in rows and checkpoints

Scores = dict[str, float]  # by key of a metric
Fingerprint = tuple[str, tuple[tuple["weakref.ref[Tensor]", int], ...]]


def models_of(algorithm: Algorithm[Any], node: Node[Any]) -> dict[str, Weights]:
    """The evaluated models of a node by name, the headline first."""
    found = algorithm.evaluated(node)
    if not isinstance(found, Mapping):
        return {ONLY: _weights(node, ONLY, found)}
    if not found:
        raise PeerageError(f"evaluated returned no model for node {node.id}; return at least one")
    for name in found:
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise PeerageError(
                f"evaluated returned a model named {name!r} for node {node.id}; use letters, "
                "digits, hyphens and underscores"
            )
    return {name: _weights(node, name, model) for name, model in found.items()}


def _weights(node: Node[Any], name: str, model: Any) -> Weights:
    """The model as a value; raises an error if it fits no architecture of the run."""
    which = f"model {name!r} of node {node.id}" if name else f"the model of node {node.id}"
    if isinstance(model, Tensor):
        model = Weights(model, node.buffers, node.architecture)
    if not isinstance(model, Weights):
        raise PeerageError(
            f"evaluated returned {type(model).__name__} as {which}; return parameters, Weights, or "
            "a mapping of them"
        )
    if model.architecture not in node.layouts:
        hint = did_you_mean(model.architecture, node.layouts)
        raise PeerageError(f"{which} has the unknown architecture {model.architecture!r}; {hint}")
    layouts = (node.layouts[model.architecture], node.buffer_layouts[model.architecture])
    sizes = [layout.size for layout in layouts]
    given = [model.params.numel(), model.buffers.numel()]
    if given != sizes:
        raise PeerageError(
            f"{which} has {given[0]} parameters and {given[1]} running statistics; architecture "
            f"{model.architecture!r} needs {sizes[0]} and {sizes[1]}"
        )
    return model


def candidates_of(algorithm: Algorithm[Any], node: Node[Any]) -> list[Weights]:
    """The models whose lowest test loss determines the headline's scores; often none."""
    return [_weights(node, ONLY, model) for model in algorithm.test_candidates(node)]


@dataclass
class ScoreCache:
    """The scores of a node's models when they were last evaluated, by name.

    A model is unchanged if its tensors are the same objects and nothing changed them in place.
    """

    known: dict[str, tuple[Fingerprint, Any]] = field(default_factory=dict)

    def find(self, name: str, model: Weights) -> Any:
        """The scores of this model, or None if it may have changed."""
        fingerprint, scores = self.known.get(name, (None, None))
        if fingerprint is None:
            return None
        architecture, tensors = fingerprint
        now = (model.params, model.buffers)
        same = all(
            seen() is tensor and version == tensor._version
            for (seen, version), tensor in zip(tensors, now, strict=True)
        )
        return scores if same and architecture == model.architecture else None

    def keep(self, name: str, model: Weights, scores: Any) -> None:
        """Remember the scores, without keeping the tensors in memory."""
        tensors = tuple((weakref.ref(x), x._version) for x in (model.params, model.buffers))
        self.known[name] = (model.architecture, tensors), scores
