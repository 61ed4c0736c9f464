"""Dec. FedAvg and Dec. FedProx: a changing client averages models by architecture (P1 baselines).

Participants are those of DFML: see `rotating_hub`. The aggregator averages the models of one
architecture, W = sum d_n W_n / sum d_n, and returns the mean to all participants with it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from peerage.aggregation import data_weights, weighted_mean
from peerage.algorithm import Cost, Dimensions, Node
from peerage.algorithms.mutual_learning import ONE_EPOCH
from peerage.algorithms.rotating_hub import RotatingHub, model_in, per_link
from peerage.errors import InputError
from peerage.requests import Inbox
from peerage.vectors import Weights
from peerage.work.losses import Proximal
from peerage.work.training import LocalSGD


@dataclass(frozen=True)
class DecFedAvg(RotatingHub[None]):
    """A random client averages its own model and those of senders, by architecture.

    >>> import peerage as pg
    >>> experiment = pg.Experiment(algorithm=pg.DecFedAvg(senders=4.0))
    >>> experiment == pg.Experiment(algorithm="dec-fedavg:senders=4")
    True
    """

    local: LocalSGD = ONE_EPOCH

    def cost(self, round: int, dimensions: Dimensions, examples: float) -> Cost:
        senders = self.num_senders(dimensions.nodes)
        return Cost(vectors=per_link(2 * senders, dimensions.nodes), held_models=senders)

    def work(self) -> LocalSGD:
        return self.local

    async def train(self, node: Node[None]) -> None:
        await node.train(self.work())

    async def aggregate(self, node: Node[None], inbox: Inbox) -> Mapping[int, Weights]:
        models = {node.id: node.weights, **{m.sender: model_in(m) for m in inbox.messages}}
        examples = {node.id: node.num_examples, **{m.sender: m.examples for m in inbox.messages}}
        merged = self.merge(node, models, examples)
        self.adopt(node, merged.pop(node.id))
        return dict(sorted(merged.items()))

    def merge(
        self, node: Node[None], models: Mapping[int, Weights], examples: Mapping[int, int]
    ) -> dict[int, Weights]:
        """The new model of every participant, from their models and numbers of examples."""
        means: dict[int, Weights] = {}
        for architecture in {model.architecture for model in models.values()}:
            group = sorted(key for key, m in models.items() if m.architecture == architecture)
            mean = weighted_model_mean(
                [models[key] for key in group], [examples[key] for key in group]
            )
            means |= dict.fromkeys(group, mean)
        return means


@dataclass(frozen=True)
class DecFedProx(DecFedAvg):
    """Dec. FedAvg with a pull towards the model before local training.

    >>> import peerage as pg
    >>> experiment = pg.Experiment(algorithm=pg.DecFedProx(mu=0.1))
    >>> experiment == pg.Experiment(algorithm="dec-fedprox:mu=0.1")
    True
    """

    mu: float = 0.01  # strength of the pull; P1 does not state it

    def __post_init__(self) -> None:
        super().__post_init__()
        Proximal(self.mu)  # raises an error if the value is invalid
        if self.local.correct is not None:
            raise InputError("dec-fedprox corrects gradients itself; leave local.correct out")

    def work(self) -> LocalSGD:
        return replace(self.local, correct=Proximal(self.mu))


def weighted_model_mean(models: list[Weights], examples: list[int]) -> Weights:
    """The mean of models of one architecture, weighted by examples; a single one is unchanged."""
    if len(models) == 1:
        return models[0]
    w = data_weights(examples)
    params = weighted_mean([model.params for model in models], w)
    buffers = weighted_mean([model.buffers for model in models], w)
    return Weights(params, buffers, models[0].architecture)
