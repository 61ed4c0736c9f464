"""Build the world of an experiment: load and split data, build graph and models, check all."""

import warnings
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from peerage.data import Dataset, cache_folder, hold_out, label_counts
from peerage.data.datasets import DATASETS
from peerage.data.tensors import label_caveats
from peerage.engine.fitting import check_fit, common_dtype
from peerage.engine.world import World
from peerage.errors import InputError, PeerageWarning
from peerage.experiment.experiment import Experiment, display_name
from peerage.graphs.graph import Graph
from peerage.graphs.rewiring import with_assortativity
from peerage.graphs.topology import Complete
from peerage.models import MODELS, default_model
from peerage.models.start import Architecture, Split, own_architecture
from peerage.privacy import check_accounting
from peerage.randomness import numpy_stream
from peerage.work.context import Examples


def prepare(
    experiment: Experiment, dataset: Dataset | None = None, *, share: bool = False
) -> World:
    """The world of an experiment; give `dataset` if it is already loaded.

    With `share`, the data are those of one peer, which may lack classes that others have.
    """
    for caveat in (*experiment.algorithm.caveats(), *experiment.noise.caveats()):
        warnings.warn(caveat, PeerageWarning, stacklevel=3)
    check_accounting(experiment.noise)
    dataset = dataset or load_dataset(experiment)
    for caveat in label_caveats(dataset, share=share):
        warnings.warn(caveat, PeerageWarning, stacklevel=3)
    experiment = with_model(experiment, dataset.shape)
    architectures, dtype = build_architectures(experiment, dataset)
    for architecture in architectures.values():
        experiment.algorithm.check_layout(architecture.layout)
        experiment.work.check_layout(architecture.layout)
    names = list(architectures)
    parts, validation = split(experiment, dataset)
    if experiment.algorithm.with_hub:  # one node more, without data
        parts, validation = [[*each, np.empty(0, dtype=np.int64)] for each in (parts, validation)]
    graph = build_graph(experiment, len(parts))
    check_weights(experiment, graph)
    counts = label_counts(dataset.train_y.numpy(), parts, len(dataset.classes))
    world = World(
        experiment=experiment,
        graph=graph,
        train=Examples(dataset.train_x.to(dtype), dataset.train_y),
        test=test_examples(experiment, dataset, dtype),
        parts=[torch.from_numpy(part) for part in parts],
        validation=[torch.from_numpy(part) for part in validation],
        label_counts=torch.from_numpy(counts),
        classes=dataset.classes,
        architectures=architectures,
        assignment=[names[node % len(names)] for node in range(len(parts))],
        gains=experiment.init.gain.factors(graph).tolist(),
        cache=work_cache(),
    )
    for caveat in integer_caveats(world):
        warnings.warn(caveat, PeerageWarning, stacklevel=3)
    return world


def integer_caveats(world: World) -> Iterable[str]:
    """A warning about integer tensors in messages, to which no noise is added."""
    if not world.noise.active:
        return
    names = {
        name
        for kind in world.architectures.values()
        for name, spec in world.algorithm.message_schema(world.dimensions(kind)).items()
        if not spec.dtype.is_floating_point
    }
    if names:
        yield (
            "noise and clip do not change integer tensors in messages, here "
            f"{', '.join(sorted(names))}; they have no privacy"
        )


def work_cache() -> Path | None:
    """The folder of the data sets; None if the user has no home folder."""
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
    """The graph of the experiment; without edges if one node has all the data."""
    if experiment.pooled and not experiment.algorithm.with_hub:
        return Complete().build(nodes, experiment.seed)
    graph: Graph = experiment.topology.build(nodes, experiment.seed)
    return with_assortativity(graph, experiment.assortativity, experiment.seed)


def check_weights(experiment: Experiment, graph: Graph) -> None:
    """Raise an error for Metropolis weights on a directed graph."""
    if graph.directed and getattr(experiment.algorithm, "weights", None) == "metropolis":
        raise InputError(
            "weights=metropolis requires an undirected graph, but this one is directed; "
            "use weights=uniform, data or graph"
        )


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
    return [train for train, _ in pairs], [held_out for _, held_out in pairs]


def test_examples(experiment: Experiment, dataset: Dataset, dtype: torch.dtype) -> Examples:
    test_set = Examples(dataset.test_x.to(dtype), dataset.test_y)
    count = experiment.evaluation.samples
    if count is None or count == len(test_set):
        return test_set
    if count > len(test_set):
        raise InputError(
            f"--eval-samples {count} is more than the {len(test_set)} test examples of "
            f"{dataset.name}; use {len(test_set)} or fewer"
        )
    order = numpy_stream(experiment.seed, "test").permutation(len(test_set))[:count]
    return test_set.subset(torch.from_numpy(np.sort(order)))


def with_model(experiment: Experiment, shape: tuple[int, ...]) -> Experiment:
    """The experiment with a model, by default the one for its data set or example shape."""
    if experiment.model:
        return experiment
    name = default_model(display_name(experiment.dataset, DATASETS), shape)
    return experiment.model_copy(update={"model": (MODELS[name](),)})


def build_architectures(
    experiment: Experiment, dataset: Dataset
) -> tuple[dict[str, Architecture], torch.dtype]:
    """The architectures of all nodes, tested on the data, and the type of examples they take."""
    shared = experiment.init.start == "shared"
    architectures = name_architectures(experiment, dataset.shape, len(dataset.classes))
    dtypes = {}
    for name, architecture in architectures.items():
        dtypes[name] = check_fit(architecture, dataset)
        # Raises an error now, before anything is written, if initial weights cannot be drawn.
        architecture.initial(experiment.seed, None if shared else 0, gain=1.0)
    return architectures, common_dtype(architectures, dtypes, dataset)


def name_architectures(
    experiment: Experiment, shape: tuple[int, ...], classes: int
) -> dict[str, Architecture]:
    """The architectures of an experiment by name; nodes take them in turn."""
    architectures = {}
    for i, given in enumerate(experiment.model):
        split = given if isinstance(given, Split) else Split(given)
        model: Any = split.model
        head = split.head_modules
        name = display_name(model, MODELS) + (f"-{i}" if len(experiment.model) > 1 else "")
        if isinstance(model, nn.Module) or not hasattr(model, "build"):
            architecture = own_architecture(
                model, name, experiment.init.scheme, experiment.init.bias, experiment.seed, head
            )
        else:
            build: Callable[[], nn.Module] = partial(model.build, shape, classes)
            architecture = Architecture(
                name,
                build,
                experiment.init.scheme,
                bias=experiment.init.bias,
                seed=experiment.seed,
                head=head,
            )
        architectures[name] = architecture
    return architectures
