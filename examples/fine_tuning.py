"""Fine-tuning: nodes share a pretrained backbone with BatchNorm and train only the head.

The frozen parameters are constants of the model: equal on all nodes, neither trained nor sent, but
part of every exported model. Run `python examples/fine_tuning.py`.
"""

import torch
from torch import Tensor, nn

import peerage as pg


class Network(nn.Module):
    """A backbone for 8 x 8 images, and a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(),
        )  # fmt: skip
        self.head = nn.Linear(32 * 16, 10)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.backbone(x))
        return logits


class Frozen(Network):
    """The network with a backbone that stays as it is, including its running statistics."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in self.backbone.parameters():
            parameter.requires_grad = False

    def train(self, mode: bool = True) -> "Frozen":
        super().train(mode)
        self.backbone.eval()
        return self


def experiment(model: nn.Module, **changes: object) -> pg.Experiment:
    settings: dict[str, object] = {
        "algorithm": pg.DecAvg(),
        "dataset": "digits",
        "model": model,
        "nodes": 10,
        "topology": "ring",
        "partition": "dirichlet:alpha=0.3",
        "rounds": 5,
        "local": pg.LocalSGD(epochs=2, lr=0.05, momentum=0.9),
        "init": pg.Init(start="shared"),
        "evaluation": pg.Evaluation(every=5, at="end"),
    }
    return pg.Experiment(**settings | changes)


def pretrained() -> Frozen:
    """A frozen copy of a network that one node trained on all data, for one epoch."""
    torch.manual_seed(0)
    whole = experiment(Network(), nodes=1, topology="complete", partition="iid", rounds=1)
    model = Frozen()
    model.load_state_dict(pg.run(whole).state_dict(0))
    nn.init.zeros_(model.head.weight)
    return model


def main() -> None:
    torch.manual_seed(0)
    for name, model in {"all layers": Network(), "only the head": pretrained()}.items():
        result = pg.run(experiment(model))
        sent = result.rows[-1]["bytes_total"] / 1e6
        print(f"{name:16} {result.accuracy:.1%} mean accuracy, {sent:.1f} MB sent")


if __name__ == "__main__":
    main()
