"""Dec. FML: each client learns with a small meme model; only memes travel (a baseline of P1).

Shen et al., 2020, Federated Mutual Learning. arXiv:2006.16765. A participant trains its own model
and its meme together on its own data, with the loss 1/2 supervision + 1/2 divergence from the
other. Memes have one architecture and one start on all nodes, and a changing client averages them:
see `rotating_hub`. A node's own model is never sent, so it may have any architecture.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from peerage.algorithm import Cost, Dimensions, Node
from peerage.algorithms.dec_fedavg import weighted_model_mean
from peerage.algorithms.mutual_learning import ONE_EPOCH
from peerage.algorithms.rotating_hub import RotatingHub, model_in, per_link
from peerage.errors import InputError
from peerage.requests import Inbox
from peerage.vectors import Weights
from peerage.work.mutual import MutualKL
from peerage.work.together import check_work
from peerage.work.training import LocalSGD

MEME = "meme"


@dataclass(frozen=True)
class DecFML(RotatingHub[Weights]):
    """Train its model and a meme together; a random client averages the memes of senders.

    >>> import peerage as pg
    >>> experiment = pg.Experiment(algorithm=pg.DecFML(alpha=0.3))
    >>> experiment == pg.Experiment(algorithm="dec-fml:alpha=0.3")
    True
    """

    personal: ClassVar[bool] = True  # a node's own model is never sent

    local: LocalSGD = ONE_EPOCH
    # The meme: a model such as mlp:hidden=8, or an architecture of the experiment by its name,
    # such as mlp-1. By default the smallest of the experiment.
    meme: str | None = field(default=None, kw_only=True)
    alpha: float = field(default=0.5, kw_only=True)  # weight of the divergence; the rest: labels
    weights: Literal["uniform", "data"] = field(default="uniform", kw_only=True)  # of memes

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.alpha <= 1:
            raise InputError(f"alpha must lie in [0, 1], got {self.alpha}")
        check_work(self.local)

    def further_models(self) -> Mapping[str, str]:
        return {} if self.meme is None else {MEME: self.meme}

    def cost(self, round: int, dimensions: Dimensions, examples: float) -> Cost:
        senders = self.num_senders(dimensions.nodes)
        # If the meme is as large as the node's own model, which is not known here.
        passes = float(self.local.epochs or 1)
        vectors = per_link(2 * senders, dimensions.nodes)
        return Cost(vectors, passes, state=1.0, held_models=senders)

    def init(self, node: Node[Weights]) -> Weights:
        return node.initial(MEME, architecture=self.meme_architecture(node))

    def meme_architecture(self, node: Node[Any]) -> str:
        """The name of the meme's architecture."""
        if self.meme is None:
            return min(node.layouts, key=lambda name: (node.layouts[name].size, name))
        return self.meme if self.meme in node.layouts else MEME

    def evaluated(self, node: Node[Weights]) -> Mapping[str, Weights]:
        return {"own": node.weights, MEME: node.state}

    async def train(self, node: Node[Weights]) -> None:
        meme = node.num_nodes  # a number that no node has
        models = {node.id: node.weights, meme: node.state}
        loss = MutualKL(gamma=1 - self.alpha, alpha=self.alpha)
        trained = (await node.train_together(self.local, models, loss)).models
        node.params, node.buffers = trained[node.id].params, trained[node.id].buffers
        node.state = trained[meme]

    def shared(self, node: Node[Weights]) -> Weights:
        return node.state

    async def aggregate(self, node: Node[Weights], inbox: Inbox) -> Mapping[int, Weights]:
        memes = inbox.alike(node.state.architecture).messages
        numbers = [node.num_examples, *(message.examples for message in memes)]
        equal = [1] * len(numbers)
        mean = weighted_model_mean(
            [node.state, *map(model_in, memes)], numbers if self.weights == "data" else equal
        )
        self.adopt(node, mean)
        return {message.sender: mean for message in memes}

    def adopt(self, node: Node[Weights], model: Weights) -> None:
        node.state = model
