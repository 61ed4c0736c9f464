"""Build the world of an experiment: load and split data, build graph and models, check all."""

import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from peerage import specs
from peerage.data import Dataset, cache_folder, hold_out, label_counts
from peerage.data.clusters import divide, shift_test, shift_training
from peerage.data.datasets import DATASETS
from peerage.data.tensors import label_caveats
from peerage.engine.fitting import check_fit, check_widths, common_dtype
from peerage.engine.world import World
from peerage.errors import InputError, PeerageWarning
from peerage.experiment.experiment import Experiment, display_name
from peerage.graphs.graph import Graph
from peerage.graphs.rewiring import with_assortativity
from peerage.graphs.topology import Complete
from peerage.models import MODELS, default_model
from peerage.models.files import fit_model, read_model
from peerage.models.start import Architecture, Split, own_architecture
from peerage.privacy import check_accounting
from peerage.randomness import numpy_stream
from peerage.vectors import Weights
from peerage.work.context import Examples

EMPTY = np.empty(0, dtype=np.int64)

T = TypeVar("T")


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
    if experiment.data_schema is not None:
        dataset = experiment.data_schema.conform(dataset)
        for caveat in experiment.data_schema.caveats(dataset):
            warnings.warn(caveat, PeerageWarning, stacklevel=3)
    for caveat in label_caveats(dataset, share=share):
        warnings.warn(caveat, PeerageWarning, stacklevel=3)
    experiment = with_model(experiment, dataset.shape)
    dataset, parts = split(experiment, dataset)
    architectures, dtype = build_architectures(experiment, dataset)
    for architecture in architectures.values():
        experiment.algorithm.check_layout(architecture.layout)
        experiment.work.check_layout(architecture.layout)
    names = list(architectures)[: len(experiment.model)]  # others belong to no node
    if experiment.algorithm.width_scaled:
        check_widths([architectures[name] for name in names])
    experiment.algorithm.check_start(experiment.init.start)
    starts = read_starts(experiment, [architectures[name] for name in names])
    parts, validation = split_validation(experiment, dataset, parts)
    if experiment.algorithm.with_hub:  # one node more, without data
        hub = experiment.hub_among(len(parts) + 1)
        parts, validation = (with_hub(each, hub, EMPTY) for each in (parts, validation))
    graph = build_graph(experiment, len(parts))
    check_weights(experiment, graph)
    experiment.algorithm.check_network(experiment.nodes, graph.directed, names)
    counts = label_counts(dataset.train_y.numpy(), parts, len(dataset.classes))
    clusters = node_clusters(experiment, len(parts))
    # A peer with private data needs the test set of its own cluster only.
    used = {cluster for cluster, part in zip(clusters, parts, strict=False) if len(part)}
    needed = used if share else set(clusters)
    world = World(
        experiment=experiment,
        graph=graph,
        train=Examples(dataset.train_x.to(dtype), dataset.train_y),
        tests=test_sets(experiment, dataset, dtype, needed),
        parts=[torch.from_numpy(part) for part in parts],
        validation=[torch.from_numpy(part) for part in validation],
        label_counts=torch.from_numpy(counts),
        classes=dataset.classes,
        architectures=architectures,
        assignment=[names[node % len(names)] for node in range(len(parts))],
        gains=experiment.init.gain.factors(graph).tolist(),
        clusters=clusters,
        starts=starts,
        cache=work_cache(),
    )
    for caveat in integer_caveats(world):
        warnings.warn(caveat, PeerageWarning, stacklevel=3)
    return world


def with_hub(of_nodes: Sequence[T], hub: int | None, its: T) -> list[T]:
    """One value per node, from those of the nodes with data and that of the hub, if there is one.

    >>> with_hub([5, 6, 7], 1, 0)
    [5, 0, 6, 7]
    """
    return list(of_nodes) if hub is None else [*of_nodes[:hub], its, *of_nodes[hub:]]


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


def split(experiment: Experiment, dataset: Dataset) -> tuple[Dataset, list[Any]]:
    """The data set, with the shifts of the clusters if there are any, and each node's examples."""
    clusters, seed = experiment.clusters, experiment.seed
    split = partial(split_examples, experiment, dataset)
    if clusters is None:
        parts = split(np.arange(len(dataset.train_y)), experiment.nodes)
    else:
        parts = divide(clusters, dataset, seed, split)
        dataset, parts = shift_training(clusters, dataset, parts, seed)
    return dataset, [np.concatenate(parts)] if experiment.pooled else parts


def split_examples(
    experiment: Experiment, dataset: Dataset, indices: Any, nodes: int, cluster: int | None = None
) -> list[Any]:
    """The examples of every node; of those at the indices if a cluster has its own split.

    The partition of a cluster gets its labels numbered from 0, so that no class is empty.
    """
    labels, classes, groups = dataset.train_y.numpy(), len(dataset.classes), dataset.groups
    rng = numpy_stream(experiment.seed, "partition", *([] if cluster is None else [cluster]))
    if cluster is not None:
        known, labels = np.unique(labels[indices], return_inverse=True)
        classes, groups = len(known), None if groups is None else groups[indices]
    if groups is not None and hasattr(experiment.partition, "split_groups"):
        parts = experiment.partition.split_groups(groups.numpy(), nodes, rng)
    else:
        parts = experiment.partition.split(labels, nodes, classes, rng)
    return parts if cluster is None else [indices[part] for part in parts]


def split_validation(
    experiment: Experiment, dataset: Dataset, parts: list[Any]
) -> tuple[list[Any], list[Any]]:
    """(training, validation) indices of every node."""
    fraction = experiment.evaluation.validation
    if fraction == 0:
        return parts, [np.empty(0, dtype=np.int64)] * len(parts)
    labels = dataset.train_y.numpy()
    streams = [numpy_stream(experiment.seed, "validation", node) for node in range(len(parts))]
    pairs = [hold_out(p, labels, fraction, r) for p, r in zip(parts, streams, strict=True)]
    return [train for train, _ in pairs], [held_out for _, held_out in pairs]


def node_clusters(experiment: Experiment, nodes: int) -> list[int | None]:
    """The cluster of every node; None for one that serves all clusters: a hub, or a pooled node."""
    if experiment.clusters is None:
        return []
    if experiment.pooled:
        return [None] * nodes
    return with_hub(experiment.clusters.assign(experiment.seed), experiment.hub, None)


def test_sets(
    experiment: Experiment, dataset: Dataset, dtype: torch.dtype, needed: set[int | None]
) -> list[Examples]:
    """The test set of each cluster, shifted if it is needed; one test set without clusters."""
    x, y = test_examples(experiment, dataset)
    common = Examples(x.to(dtype), y)
    if experiment.clusters is None:
        return [common]
    found = []
    for cluster in range(len(experiment.clusters.sizes)):
        own_x, own_y = x, y
        if not needed or None in needed or cluster in needed:
            own_x, own_y = shift_test(experiment.clusters, dataset, x, y, cluster)
        if not dtype.is_floating_point and not torch.equal(own_x, own_x.trunc()):
            raise InputError(
                f"the shift of {experiment.clusters.describe(cluster)} turned integers into "
                f"fractions, which model {display_name(experiment.model[0], MODELS)!r} cannot look "
                "up; use another shift"
            )
        found.append(common if own_x is x else Examples(own_x.to(dtype), own_y))
    return found


def test_examples(experiment: Experiment, dataset: Dataset) -> tuple[Tensor, Tensor]:
    """The test examples and their labels, or `evaluation.samples` of them."""
    x, y = dataset.test_x, dataset.test_y
    count = experiment.evaluation.samples
    if count is None or count == len(y):
        return x, y
    if count > len(y):
        raise InputError(
            f"--eval-samples {count} is more than the {len(y)} test examples of "
            f"{dataset.name}; use {len(y)} or fewer"
        )
    order = numpy_stream(experiment.seed, "test").permutation(len(y))[:count]
    chosen = torch.from_numpy(np.sort(order))
    return x[chosen], y[chosen]


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
    start = 0 if experiment.init.start == "independent" else None
    architectures = name_architectures(experiment, dataset.shape, len(dataset.classes))
    dtypes = {}
    for name, architecture in architectures.items():
        dtypes[name] = check_fit(architecture, dataset)
        # Raises an error now, before anything is written, if initial weights cannot be drawn.
        architecture.initial(experiment.seed, start, gain=1.0)
    return architectures, common_dtype(architectures, dtypes, dataset)


def read_starts(experiment: Experiment, kinds: Iterable[Architecture]) -> dict[str, Weights]:
    """The model in the file with which all nodes start, by architecture; empty without a file."""
    init = experiment.init
    if init.file is None or init.sha256 is None:
        return {}
    path = Path(init.file)
    tensors = read_model(path, init.sha256)
    return {kind.name: fit_model(tensors, kind, path) for kind in kinds}


def name_architectures(
    experiment: Experiment, shape: tuple[int, ...], classes: int
) -> dict[str, Architecture]:
    """The architectures of an experiment by name; nodes take them in turn.

    After those of the nodes come further ones that the algorithm uses.
    """
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
            architecture = package_architecture(experiment, name, build, head)
        architectures[name] = architecture
    for name, text in experiment.algorithm.further_models().items():
        if text not in architectures:
            model = specs.parse(text, "model", MODELS)
            build = partial(model.build, shape, classes)
            architectures[name] = package_architecture(experiment, name, build)
    return architectures


def package_architecture(
    experiment: Experiment, name: str, build: Callable[[], nn.Module], head: tuple[str, ...] = ()
) -> Architecture:
    """The architecture of a model that the package builds."""
    init = experiment.init
    return Architecture(name, build, init.scheme, bias=init.bias, seed=experiment.seed, head=head)
