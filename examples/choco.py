"""CHOCO-SGD: neighbours keep copies of each other's models and exchange small updates of them.

A message holds the largest tenth of the entries by which the copy at the neighbour is wrong. If a
neighbour was not reached, its copy may be wrong, so it gets the whole model. This needs
acknowledgements. Run `python examples/choco.py`.

Koloskova, Stich, Jaggi, 2019. arXiv:1902.00340.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

import peerage as pg
from peerage.algorithm import Dimensions
from peerage.requests import TensorSpec


@dataclass(frozen=True)
class Copies:
    """Models by neighbour: its own as this node knows it, and this node's as the other has it."""

    theirs: dict[int, Tensor]
    mine: dict[int, Tensor]
    reached: list[int]  # neighbours that had the message before the last


@dataclass(frozen=True)
class Choco(pg.Algorithm[Copies]):
    """Gossip on copies of the neighbours' models that are kept up to date by sparse messages."""

    acknowledge: ClassVar[bool] = True

    local: pg.LocalSGD = pg.LocalSGD()
    share: float = 0.1  # of the entries in a message
    gamma: float = 0.5  # how far to move towards the neighbours

    def init(self, node: pg.Node[Copies]) -> Copies:
        return Copies({}, {}, [])

    def message_schema(self, dimensions: Dimensions) -> dict[str, TensorSpec]:
        sparse = {"v": TensorSpec((None,)), "i": TensorSpec((None,), torch.int64)}
        return {"x": TensorSpec((dimensions.layout.size,)), **sparse}

    async def round(self, node: pg.Node[Copies]) -> None:
        await node.train(self.local)
        theirs, mine = dict(node.state.theirs), dict(node.state.mine)
        for j in node.neighbours:
            if j in mine and j in node.state.reached:
                error = node.params - mine[j]
                i = error.abs().topk(max(1, int(self.share * len(error)))).indices
                await node.send(j, v=error[i], i=i)
                mine[j] = mine[j].index_add(0, i, error[i])
            else:
                await node.send(j, x=node.params)
                mine[j] = node.params
        for message in (await node.receive()).messages:
            j, p = message.sender, message.payload
            if "x" in p:
                theirs[j] = p["x"]
            elif j in theirs:
                theirs[j] = theirs[j].index_add(0, p["i"], p["v"])
        both = [j for j in node.neighbours if j in theirs]
        pull = sum((theirs[j] - mine[j] for j in both), torch.zeros_like(node.params))
        node.params = node.params + self.gamma / (len(both) + 1) * pull
        node.state = Copies(theirs, mine, sorted(node.reached))


if __name__ == "__main__":
    for algorithm in ("decavg", Choco()):
        result = pg.run(pg.Experiment(algorithm=algorithm, nodes=12, topology="ring", rounds=20,
                        init=pg.Init(start="shared"), faults={"loss": 0.1}))  # fmt: skip
        sent = result.rows[-1]["bytes_total"] / 1e6
        print(f"{result.summary['label']:16} {result.accuracy:.1%} accuracy, {sent:.1f} MB sent")
