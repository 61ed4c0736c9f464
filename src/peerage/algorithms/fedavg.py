"""FedAvg: a hub averages the models of its clients (the baseline of P2).

McMahan, Moore, Ramage, Hampson, Aguera y Arcas, 2017. arXiv:1602.05629.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from peerage.algorithm import Cost, Dimensions, Node
from peerage.hub import HubAlgorithm, Payload
from peerage.requests import Inbox
from peerage.work.training import LocalSGD


@dataclass(frozen=True)
class FedAvg(HubAlgorithm[None]):
    """Clients train the hub's model; the hub averages the results, weighted by examples.

    >>> import peerage as pg
    >>> experiment = pg.Experiment(algorithm=pg.FedAvg(clients=5))
    >>> experiment == pg.Experiment(algorithm="fedavg:clients=5")
    True
    """

    local: LocalSGD = LocalSGD()

    def cost(self, round: int, dimensions: Dimensions, examples: float) -> Cost:
        return Cost(vectors=1.0)

    def work(self) -> LocalSGD:
        return self.local

    async def answer(self, node: Node[None], hub_message: Mapping[str, Tensor]) -> Payload:
        await node.train(self.work())
        return {"x": node.params, "b": node.buffers}

    def merge(self, node: Node[None], inbox: Inbox) -> None:
        tau = inbox.data_weights()
        node.params, node.buffers = inbox.mean("x", tau), inbox.mean("b", tau)
