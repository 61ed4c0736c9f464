"""Single clients after local training without any aggregation (Fig. 1 and 2)."""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from peerage.data.datasets import DATASETS
from peerage.data.partition import stratified
from peerage.engine.prepare import prepare
from peerage.engine.world import World
from peerage.experiment.experiment import Experiment, display_name
from peerage.isolation import exclusive_torch
from peerage.papers.calibrate import examples, parameters
from peerage.papers.p2.settings import SGD
from peerage.randomness import numpy_stream
from peerage.vectors import Layout
from peerage.work.context import LocalContext
from peerage.work.curvature import Curvature
from peerage.work.evaluation import score
from peerage.work.training import Train

COLUMNS = 25  # weights per output in Fig. 1
PIXELS = 60  # largest width and height of a picture
PASSES = 3  # multiplications per weight and example: one forward, two backward


@dataclass(frozen=True)
class Client:
    """One client of a network, trained for some epochs from the initial model of the hub.

    `curves` are its test accuracy and loss; `kept` selects what a figure needs besides.
    """

    data: str
    model: str
    partition: str
    nodes: int
    epochs: int
    lr: float
    client: int | None = None  # its number; None: the client with most examples
    labels: str = ""  # replaces its part of the partition by examples of these classes

    name: ClassVar[str] = "client"

    @property
    def experiment(self) -> Experiment:
        return Experiment(
            algorithm="fedavg",
            dataset=self.data,
            model=self.model,
            partition=self.partition,
            nodes=self.nodes,
            local={"epochs": 1, "keep_optimizer": True, **SGD, "lr": self.lr},
        )

    @property
    def dataset(self) -> str:
        return display_name(self.experiment.dataset, DATASETS)

    @property
    def products(self) -> float:
        seen = self.epochs * examples(self.experiment) / self.nodes
        return PASSES * seen * parameters(self.experiment)

    def realise(self, seed: int) -> dict[str, Any]:
        experiment = self.experiment.model_copy(update={"seed": seed})
        world = prepare(experiment)
        local = self.local(world)
        hub = self.nodes
        params, buffers = world.architecture(hub).initial(seed, hub)
        curves: dict[str, list[float]] = {"accuracy": [], "loss": []}
        with exclusive_torch():
            for epoch in range(self.epochs + 1):
                if epoch:  # the optimiser keeps its state, so this equals one long training
                    trained = Train(experiment.work, params, buffers, {}).run(local)
                    params, buffers = trained.params, trained.buffers
                result = score(local.model(params, buffers), world.test)
                curves["accuracy"].append(result.accuracy)
                curves["loss"].append(result.loss)
            kept = self.kept(local, params, buffers)
        counts = torch.bincount(world.train.y[local.indices], minlength=len(world.label_counts[0]))
        return {"setup": {"examples": counts.tolist(), **kept}, "curves": curves}

    def local(self, world: World) -> LocalContext:
        sizes = [len(part) for part in world.parts]
        client = int(np.argmax(sizes)) if self.client is None else self.client
        indices = self.share_of_labels(world) if self.labels else world.parts[client]
        name = world.assignment[client]
        models = {name: world.architectures[name].build_flat()}
        return LocalContext(
            client, 0, world.seed, world.train, indices, name, models, persistent_tensors={}
        )

    def share_of_labels(self, world: World) -> Tensor:
        """The mean number of examples of a client, from these classes only."""
        labels = world.train.y.numpy()
        wanted = np.flatnonzero(np.isin(labels, [int(label) for label in self.labels.split("+")]))
        count = min(len(labels) // self.nodes, len(wanted))
        rng = numpy_stream(world.seed, f"examples of {self.labels}")
        return torch.from_numpy(wanted[stratified(labels[wanted], count, rng)])

    def kept(self, local: LocalContext, params: Tensor, buffers: Tensor) -> dict[str, Any]:
        raise NotImplementedError


@dataclass(frozen=True)
class LastLayer(Client):
    """Fig. 1: the first 25 weights of each output."""

    name: ClassVar[str] = "last-layer"

    def kept(self, local: LocalContext, params: Tensor, buffers: Tensor) -> dict[str, Any]:
        layout = local.models[local.architecture].layout
        weights = layer(layout, params, layout.head[-1])
        return {"weights": rounded(weights[:, :COLUMNS])}


@dataclass(frozen=True)
class LayerCurvature(Client):
    """Fig. 2: the curvature of all weights relative to the largest, layer by layer."""

    name: ClassVar[str] = "layer-curvature"

    def kept(self, local: LocalContext, params: Tensor, buffers: Tensor) -> dict[str, Any]:
        layout = local.models[local.architecture].layout
        h = Curvature(params, buffers, "batch", self.experiment.work.batch_size).run(local)
        found = {}
        most = float(h.max()) or 1.0
        for name in reversed(layout.layers):  # from the output inwards, as in the figure
            values = layer(layout, h, name) / most
            found[name] = {
                "shape": list(values.shape),
                "mean": float(f"{values.mean():.4g}"),
                "small": float((values < 0.01).mean()),  # share of the weights
                "picture": rounded(largest_of_blocks(values)),
            }
        return {"layers": found}


def layer(layout: Layout, vector: Tensor, name: str) -> NDArray[np.float32]:
    """The weights of a layer, [outputs, inputs]."""
    weights: NDArray[np.float32] = layout.view(vector, f"{name}.weight").flatten(1).numpy()
    return weights


def largest_of_blocks(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """A smaller picture: the largest value of each block.

    >>> largest_of_blocks(np.eye(120, dtype=np.float32)).shape
    (60, 60)
    """
    for axis in (0, 1):
        count = values.shape[axis]
        block = -(-count // PIXELS)
        values = np.maximum.reduceat(values, np.arange(0, count, block), axis=axis)
    return values


def rounded(values: NDArray[np.float32]) -> list[list[float]]:
    """Four digits, more than a colour can show."""
    return [[float(f"{value:.4g}") for value in row] for row in values]
