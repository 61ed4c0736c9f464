"""FedProx: FedAvg with a proximal term in local training (a baseline of P2).

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, 2020. arXiv:1812.06127.
"""

from dataclasses import dataclass, replace

from peerage.algorithms.fedavg import FedAvg
from peerage.errors import InputError
from peerage.work.losses import Proximal
from peerage.work.training import LocalSGD


@dataclass(frozen=True)
class FedProx(FedAvg):
    """FedAvg with a pull towards the hub's model in every training step.

    >>> import peerage as pg
    >>> experiment = pg.Experiment(algorithm=pg.FedProx(mu=0.1))
    >>> experiment == pg.Experiment(algorithm="fedprox:mu=0.1")
    True
    """

    mu: float = 0.1  # strength of the pull

    def __post_init__(self) -> None:
        super().__post_init__()
        Proximal(self.mu)  # raises an error if the value is invalid
        if self.local.correct is not None:
            raise InputError("fedprox corrects gradients itself; leave local.correct out")

    def work(self) -> LocalSGD:
        return replace(self.local, correct=Proximal(self.mu))
