"""Your own data, model, graph and algorithm in one file: `python examples/own_everything.py`."""

from dataclasses import dataclass

import networkx as nx
import torch
from torch import Tensor, nn

import peerage as pg
from peerage.aggregation import weighted_mean
from peerage.work.training import LocalSGD


def spirals(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Three noisy spiral arms in the plane: examples [N, 2] and the arm that each belongs to."""
    rng = torch.Generator().manual_seed(seed)
    arm = torch.arange(count) % 3
    radius = torch.rand(count, generator=rng)
    angle = 4 * radius + 2 * torch.pi / 3 * arm + 0.15 * torch.randn(count, generator=rng)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1), arm


class SmallNet(nn.Module):
    """A module that maps a batch of examples to logits."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
        self.head = nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(x))
        return logits


@dataclass(frozen=True)
class Lazy(pg.Algorithm[None]):
    """Move a fraction gamma of the way towards the mean of the neighbourhood."""

    local: LocalSGD = LocalSGD()
    gamma: float = 0.5  # 0 is local training, 1 is plain averaging

    async def round(self, node: pg.Node[None]) -> None:
        await node.train(self.local)
        inbox = await node.exchange(x=node.params)
        mean = weighted_mean(inbox["x"], inbox.data_weights())
        node.params = node.params + self.gamma * (mean - node.params)


def main() -> None:
    dataset = pg.in_memory(*spirals(1200, seed=1), *spirals(600, seed=2), name="spirals")
    graph = nx.karate_club_graph()  # 34 people and who knows whom
    algorithms: list[pg.Algorithm[None]] = [pg.Local(), pg.DecAvg(), Lazy(gamma=0.7)]
    for algorithm in algorithms:
        experiment = pg.Experiment(
            algorithm=algorithm,
            dataset=dataset,
            model=SmallNet,
            topology=graph,
            nodes=len(graph),
            partition="dirichlet:alpha=0.5",
            rounds=10,
            local=LocalSGD(epochs=5, lr=0.1, momentum=0.9),
            init=pg.Init(start="shared"),
            evaluation=pg.Evaluation(every=5, at="end"),
        )
        result = pg.run(experiment)
        print(f"{result.summary['label']:32} {result.accuracy:.1%} mean accuracy over the nodes")


if __name__ == "__main__":
    main()
