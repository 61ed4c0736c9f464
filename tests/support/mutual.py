"""Mutual learning at a hub that rotates: models of several architectures, for all engines."""

from dataclasses import dataclass

import torch
from torch import nn

from peerage import Algorithm, LocalSGD, MutualKL, Node, Weights

BAD = 99  # the key of a model that is not finite


@dataclass(frozen=True)
class RotatingMutual(Algorithm[None]):
    """Every hub trains its own model and those of its senders together, and returns them."""

    local: LocalSGD = LocalSGD(epochs=1, batch_size=4, lr=0.05, momentum=0.9)
    hubs: int = 1
    teachers: bool = False  # the last sender is a teacher
    bad: bool = False
    private_loss: bool = False  # cannot be pickled

    async def round(self, node: Node[None]) -> None:
        await node.train(self.local)
        order = torch.randperm(node.num_nodes, generator=node.coin).tolist()
        group = next(
            order[i :: self.hubs] for i in range(self.hubs) if node.id in order[i :: self.hubs]
        )
        hub, *senders = group
        if node.id != hub:
            await node.send(hub, x=node.params, b=node.buffers)
            for message in (await node.receive(hub)).messages:
                node.params, node.buffers = message.payload["x"], message.payload["b"]
            return
        inbox = await node.receive(senders)
        models = {
            m.sender: Weights(m.payload["x"], m.payload["b"], m.architecture)
            for m in inbox.messages
        }
        teachers = dict([models.popitem()]) if self.teachers and models else {}
        pupils = {node.id: node.weights, **models}
        if self.bad:
            pupils[BAD] = Weights(node.params * float("nan"), node.buffers, node.architecture)
        loss = MutualKL(gamma=0.5, alpha=0.5)
        trained = await node.train_together(
            self.local,
            pupils,
            (lambda *given: loss(*given)) if self.private_loss else loss,
            teachers,
        )
        for sender in models:
            model = trained.models[sender]
            await node.send(
                sender, architecture=model.architecture, x=model.params, b=model.buffers
            )
        own = trained.models[node.id]
        node.params, node.buffers = own.params, own.buffers


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Dropout(0.3), nn.Linear(7, 3))


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


SETTINGS = {"model": [plain, normed], "topology": "complete", "rounds": 3}
EVERY = {
    "one hub": RotatingMutual(),
    "two hubs": RotatingMutual(hubs=2),
    "steps and a teacher": RotatingMutual(
        LocalSGD(steps=3, batch_size=5, lr=0.01, optimizer="adamw"), teachers=True
    ),
    "a model that is not finite": RotatingMutual(bad=True),
    "a loss that cannot be pickled": RotatingMutual(private_loss=True),
}
