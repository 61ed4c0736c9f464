"""EL-Local: in every round, each node sends its model to a few others that it draws privately.

Nobody knows who chose whom, so a node cannot wait for certain senders. `node.swap` ends when all
have chosen. Run `python examples/el_local.py`.

de Vos, Farhadkhani, Guerraoui, Kermarrec, Pires, Sharma, 2023. arXiv:2310.01972.
"""

from dataclasses import dataclass

import torch

import peerage as pg


@dataclass(frozen=True)
class ELLocal(pg.Algorithm[None]):
    """Average the own model with the models of those that happened to choose this node."""

    local: pg.LocalSGD = pg.LocalSGD()
    sends: int = 4  # number of recipients

    async def round(self, node: pg.Node[None]) -> None:
        await node.train(self.local)
        others = [j for j in range(node.num_nodes) if j != node.id]
        order = torch.randperm(len(others), generator=node.rng)[: self.sends]
        model = {"x": node.params, "b": node.buffers}
        inbox = await node.swap({others[i]: model for i in order.tolist()})
        inbox = inbox.alike(node.architecture)
        node.params = torch.stack([node.params, *inbox["x"]]).mean(0)
        node.buffers = torch.stack([node.buffers, *inbox["b"]]).mean(0)


def main() -> None:
    algorithms: list[pg.Algorithm[None]] = [pg.DecAvg(weights="uniform"), ELLocal(sends=2)]
    for algorithm in algorithms:
        experiment = pg.Experiment(
            algorithm=algorithm,
            dataset="digits",
            nodes=20,
            topology="ring",  # of plain averaging; EL-Local ignores it
            partition="dirichlet:alpha=0.3",
            rounds=15,
            local=pg.LocalSGD(epochs=1, lr=0.05, momentum=0.9),
            init=pg.Init(start="shared"),
            evaluation=pg.Evaluation(every=15, at="end"),
        )
        result = pg.run(experiment)
        print(f"{result.summary['label']:24} {result.accuracy:.1%} mean accuracy over the nodes")


if __name__ == "__main__":
    main()
