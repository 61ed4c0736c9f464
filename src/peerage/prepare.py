"""From an experiment to a world: load, split, wire and check, before anything is written."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from peerage.data import Dataset, cache_folder, hold_out, label_counts
from peerage.data.datasets import DATASETS
from peerage.errors import InputError, PeerageWarning
from peerage.experiment import Experiment, display_name
from peerage.graph import Graph
from peerage.initialise import Architecture, own_architecture
from peerage.local import Examples
from peerage.mixing import describe
from peerage.models import MODELS, default_model
from peerage.privacy import check_accounting
from peerage.randomness import numpy_stream
from peerage.rewiring import with_assortativity
from peerage.sim.world import World
from peerage.topology import Complete


@dataclass(frozen=True)
class Prepared:
    """A world, the experiment with nothing left open, and what reports show of both."""

    experiment: Experiment
    world: World
    setup: dict[str, Any]


def prepare(experiment: Experiment, dataset: Dataset | None = None) -> Prepared:
    """Everything a run needs; `dataset` spares loading it once more."""
    for caveat in (*experiment.algorithm.caveats(), *experiment.noise.caveats()):
        warnings.warn(caveat, PeerageWarning, stacklevel=3)
    check_accounting(experiment.noise)
    dataset = dataset or load_dataset(experiment)
    if not experiment.model:
        name = default_model(display_name(experiment.dataset, DATASETS), dataset.shape)
        experiment = experiment.model_copy(update={"model": (MODELS[name](),)})
    architectures = build_architectures(experiment, dataset)
    for architecture in architectures.values():
        experiment.algorithm.fits(architecture.layout)
    names = list(architectures)
    parts, validation = split(experiment, dataset)
    if experiment.algorithm.with_hub:  # one node more, without data
        parts, validation = [[*each, np.empty(0, dtype=np.int64)] for each in (parts, validation)]
    graph = build_graph(experiment, len(parts))
    gain = experiment.init.gain
    counts = label_counts(dataset.train_y.numpy(), parts, len(dataset.classes))
    world = World(
        algorithm=experiment.algorithm,
        seed=experiment.seed,
        rounds=experiment.rounds,
        graph=graph,
        train=Examples(dataset.train_x, dataset.train_y),
        test=test_examples(experiment, dataset),
        parts=[torch.from_numpy(part) for part in parts],
        validation=[torch.from_numpy(part) for part in validation],
        label_counts=torch.from_numpy(counts),
        architectures=architectures,
        assignment=[names[node % len(names)] for node in range(len(parts))],
        shared_start=experiment.init.start == "shared",
        gains=gain.factors(graph).tolist(),
        evaluate_at=experiment.evaluation.at,
        faults=experiment.faults,
        noise=experiment.noise,
        prelude=gain if hasattr(gain, "estimate") else None,
        spread=experiment.evaluation.spread,
        cache=work_cache(),
    )
    setup = {
        "allocation": counts[: world.peers].tolist(),  # of those who have data, without a hub
        "classes": list(dataset.classes),
        "examples": [len(part) for part in parts[: world.peers]],
        "edges": [list(edge) for edge in graph.edges()],
        "topology": describe(graph).as_dict(),
        "parameters": [world.layout(node).size for node in range(world.nodes)],
        "test_examples": len(world.test),
        **({"constants": constants} if (constants := constants_of(world)) else {}),
    }
    return Prepared(experiment, world, setup)


def constants_of(world: World) -> dict[str, str]:
    """The hash of the frozen parameters of every architecture that has any."""
    hashes = {name: kind.constants_hash for name, kind in world.architectures.items()}
    return {name: known for name, known in hashes.items() if known is not None}


def alone(prepared: Prepared, node: int, secret: int | None = None) -> Prepared:
    """The same for one node, which holds no training data but its own, and may have a secret."""
    world = prepared.world
    own, held = world.parts[node], world.validation[node]
    place = torch.arange(len(own) + len(held))
    parts, validation = ([own[:0]] * world.nodes for _ in range(2))
    parts[node], validation[node] = place[: len(own)], place[len(own) :]
    train = world.train.subset(torch.cat([own, held]))
    mine = replace(world, train=train, parts=parts, validation=validation, secret=secret)
    return replace(prepared, world=mine)


def work_cache() -> Path | None:
    """Beside the data sets; nowhere for a user without a home folder, who can still run."""
    try:
        return cache_folder()
    except RuntimeError:
        return None


def load_dataset(experiment: Experiment) -> Dataset:
    if isinstance(experiment.dataset, Dataset):
        return experiment.dataset
    loaded: Dataset = experiment.dataset.load(cache_folder())
    return loaded


def build_graph(experiment: Experiment, nodes: int) -> Graph:
    """The graph of the experiment; of a single node that has the data of all, one without edges."""
    if experiment.pooled and not experiment.algorithm.with_hub:
        return Complete().build(nodes, experiment.seed)
    graph: Graph = experiment.topology.build(nodes, experiment.seed)
    return with_assortativity(graph, experiment.assortativity, experiment.seed)


def split(experiment: Experiment, dataset: Dataset) -> tuple[list[Any], list[Any]]:
    """(training, validation) indices of every node."""
    labels, classes = dataset.train_y.numpy(), len(dataset.classes)
    rng = numpy_stream(experiment.seed, "partition")
    if dataset.groups is not None and hasattr(experiment.partition, "split_groups"):
        groups = dataset.groups.numpy()
        parts = experiment.partition.split_groups(groups, experiment.nodes, rng)
    else:
        parts = experiment.partition.split(labels, experiment.nodes, classes, rng)
    if experiment.pooled:
        parts = [np.concatenate(parts)]
    fraction = experiment.evaluation.validation
    if fraction == 0:
        return parts, [np.empty(0, dtype=np.int64)] * len(parts)
    streams = [numpy_stream(experiment.seed, "validation", node) for node in range(len(parts))]
    pairs = [hold_out(p, labels, fraction, r) for p, r in zip(parts, streams, strict=True)]
    return [train for train, _ in pairs], [held for _, held in pairs]


def test_examples(experiment: Experiment, dataset: Dataset) -> Examples:
    whole = Examples(dataset.test_x, dataset.test_y)
    wanted = experiment.evaluation.samples
    if wanted is None or wanted == len(whole):
        return whole
    if wanted > len(whole):
        raise InputError(
            f"--eval-samples {wanted} is more than the {len(whole)} test examples of "
            f"{dataset.name}; use {len(whole)} or fewer"
        )
    order = numpy_stream(experiment.seed, "test").permutation(len(whole))[:wanted]
    return whole.subset(torch.from_numpy(np.sort(order)))


def build_architectures(experiment: Experiment, dataset: Dataset) -> dict[str, Architecture]:
    architectures = {}
    shared = experiment.init.start == "shared"
    for i, model in enumerate(experiment.model):
        name = display_name(model, MODELS) + (f"-{i}" if len(experiment.model) > 1 else "")
        if isinstance(model, nn.Module) or not hasattr(model, "build"):
            architecture = own_architecture(
                model, name, experiment.init.scheme, experiment.init.bias, experiment.seed
            )
        else:
            build: Callable[[], nn.Module] = partial(
                model.build, dataset.shape, len(dataset.classes)
            )
            architecture = Architecture(
                name,
                build,
                experiment.init.scheme,
                bias=experiment.init.bias,
                seed=experiment.seed,
            )
        check_fit(architecture, dataset)
        # A start that cannot be drawn should be known before anything is written.
        architecture.initial(experiment.seed, None if shared else 0, gain=1.0)
        architectures[name] = architecture
    return architectures


def check_fit(architecture: Architecture, dataset: Dataset) -> None:
    """Try two examples: a model that does not fit the data should say so before the run."""
    module = architecture.specimen().eval()
    if not list(module.parameters()):
        raise InputError(f"model {architecture.name!r} has no parameters to learn")
    if not architecture.layout.size:
        raise InputError(
            f"all parameters of model {architecture.name!r} are frozen (requires_grad=False); "
            "leave at least one layer to train"
        )
    examples = dataset.train_x[:2]
    wanted = (len(examples), len(dataset.classes))
    try:
        with torch.no_grad():
            shape = tuple(module(examples).shape)
    except (RuntimeError, ValueError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(
            f"model {architecture.name!r} does not fit data of shape {dataset.shape}: {reason}; "
            "choose another --model (see `peerage list models`)"
        ) from None
    if shape != wanted:
        raise InputError(
            f"model {architecture.name!r} gives {shape[1:]} outputs for an example of "
            f"{dataset.name}, which has {wanted[1]} classes; change its output layer"
        )
