"""DFML whose aggregator of one round receives all models and then waits until it is killed."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from time import sleep
from typing import ClassVar

from torch import Tensor

from peerage import DFML, Compute, Inbox, Node, Weights
from peerage.algorithms.mutual_learning import Peak
from peerage.work.context import LocalContext

ALGORITHM = f"{__file__}:DoomedDFML"
FILE = "PEERAGE_TEST_DOOMED"  # the variable with the path of a file, which the aggregator makes
ROUND = 2  # of its death, from 0


@dataclass(frozen=True)
class WaitForDeath(Compute[None]):
    phase: ClassVar[str] = "waiting"

    def run(self, local: LocalContext) -> None:
        Path(os.environ[FILE]).touch()
        while True:
            sleep(1)


@dataclass(frozen=True)
class DoomedDFML(DFML):
    """Participants note sums of their models after their own training and at the end of a round."""

    async def round(self, node: Node[Peak]) -> None:
        await super().round(node)
        node.note(model=total(node.params), peak=total(node.state.model.params))

    async def train(self, node: Node[Peak]) -> None:
        before = node.state.model.params
        await super().train(node)
        node.note(trained=total(node.params), peak_before=total(before))

    async def aggregate(self, node: Node[Peak], inbox: Inbox) -> Mapping[int, Weights]:
        if node.round == ROUND:
            assert len(inbox.messages) == self.num_senders(node.num_nodes)
            await WaitForDeath()
        return await super().aggregate(node, inbox)


def total(vector: Tensor) -> float:
    return float(vector.double().abs().sum())
