"""DESA: nodes distil knowledge on synthetic anchors and never send a model (a baseline of P0).

Huang, Srinivas, Zhang, Li, 2024. arXiv:2405.11525. On the fixed graph of P0, all nodes share the
anchors, and logits come from neighbours only.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from peerage.algorithm import Algorithm, Cost, Dimensions, Node
from peerage.errors import InputError
from peerage.requests import Inbox, TensorSpec
from peerage.vectors import head_layer
from peerage.work.losses import (
    Loss,
    ModelLoss,
    ProportionLoss,
    distillation,
    supervised_contrastive,
    with_features,
)
from peerage.work.synthesis import Logits, Synthesis, Synthesise, channels_to_end
from peerage.work.training import LocalSGD

# Class -> its anchors [ipc, *shape], or their logits [ipc, C]. Tensors are named by class, because
# nodes may know different classes: a class may have no examples, and messages may be lost.
ByClass = dict[str, Tensor]


@dataclass(frozen=True)
class DESA(Algorithm[ByClass]):
    """Learn from local data, shared synthetic anchors and the neighbours' logits on the anchors.

    In the first round, every node makes `ipc` synthetic examples of each of its classes and sends
    them to all nodes. The anchors of a class are their means over these nodes. Every round then
    begins with an exchange of logits on the anchors between neighbours, which train on them. Models
    are evaluated after this training. Only logits are sent, so architectures may differ.

    >>> import peerage as pg
    >>> experiment = pg.Experiment(algorithm=pg.DESA(ipc=5))
    >>> experiment == pg.Experiment(algorithm="desa:ipc=5")
    True
    """

    personal: ClassVar[bool] = True
    local: LocalSGD = LocalSGD(batch_size=32, lr=0.01)
    ipc: int = 50  # anchors per class
    iterations: int = 1000  # of synthesis
    batch: int = 256  # real examples of a class in an iteration of synthesis
    width: int = 32  # of the random networks in synthesis
    augment: bool = True  # shift, flip and brighten images in synthesis
    lambda_own: float = 1.0  # weight of the loss on the local data
    lambda_kd: float = 1.0  # weight of distillation: the anchors' labels and the neighbours' logits
    lambda_reg: float = 1.0  # weight of the contrast between local features and those of anchors
    alpha: float = 0.9  # share of the neighbours' logits in distillation; the rest is the labels
    temperature: float = 20.0  # of distillation
    contrast_temperature: float = 0.07
    kl_reduction: Literal["batchmean", "mean"] = "batchmean"  # mean: also over classes, as upstream

    def __post_init__(self) -> None:
        super().__post_init__()
        self.synthesis()  # these two raise errors if values are invalid
        self.own_loss()
        for name in ("lambda_own", "lambda_kd", "lambda_reg"):
            value = getattr(self, name)
            if not 0 <= value < float("inf"):
                raise InputError(f"{name} must be a number of at least 0, got {value}")
        for name in ("temperature", "contrast_temperature"):
            if not 0 < getattr(self, name) < float("inf"):
                raise InputError(f"{name} must be a number above 0, got {getattr(self, name)}")
        if not 0 <= self.alpha <= 1:
            raise InputError(f"alpha must lie in [0, 1], got {self.alpha}")

    def synthesis(self) -> Synthesis:
        return Synthesis(self.ipc, self.iterations, self.batch, self.width, self.augment)

    def own_loss(self) -> Loss:
        if isinstance(self.local.loss, ModelLoss | ProportionLoss):
            raise InputError(
                f"desa takes the loss on the local data from `local`, got {self.local.loss}; "
                "use a loss of logits and labels, such as CrossEntropy()"
            )
        return self.local.loss

    def message_schema(self, dimensions: Dimensions) -> dict[str, TensorSpec]:
        numbers = range(dimensions.classes)
        images = {f"image{c}": TensorSpec((self.ipc, *dimensions.example)) for c in numbers}
        return images | {f"class{c}": TensorSpec((self.ipc, dimensions.classes)) for c in numbers}

    def cost(self, round: int, dimensions: Dimensions, examples: float) -> Cost:
        anchors = self.ipc * dimensions.classes
        made = self.iterations * (1 + 3 * anchors / max(examples, 1))  # forwards and backwards
        return Cost(
            vectors=0.0,
            passes=float(self.local.epochs or 1),  # as many anchors as examples
            forward=made if round == 0 else 0.0,
            state=anchors * prod(dimensions.example) / dimensions.layout.size,
        )

    def max_messages(self, round: int | None, nodes: int) -> int:
        return 2 if round == 0 else 1  # first the anchors

    def may_meet(self, a: int, b: int) -> bool:
        return True  # once, for the anchors

    def init(self, node: Node[ByClass]) -> ByClass:
        return {}

    async def round(self, node: Node[ByClass]) -> None:
        if node.round == 0:
            node.state = await self.anchors(node)
        z = await self.logits(node)
        inbox = await node.exchange(**z)
        if not node.state:
            await node.train(self.local)
        else:
            work = replace(self.local, loss=AnchoredLoss(self))
            targets = distillation_targets(node.state, z, inbox.others())
            await node.train(work, squares=False, **targets)

    async def anchors(self, node: Node[ByClass]) -> ByClass:
        """The anchors of every class: the elementwise means over the nodes that have it."""
        made = await Synthesise(self.synthesis())
        others = [other for other in range(node.num_nodes) if other != node.id]
        inbox = await node.exchange(to=others, **{f"image{c}": x for c, x in made.items()})
        names = {name for m in inbox.messages for name in m.payload}
        known = sorted(int(name.removeprefix("image")) for name in names)
        return {f"class{c}": torch.stack(tensors_named(f"image{c}", inbox)).mean(0) for c in known}

    async def logits(self, node: Node[ByClass]) -> ByClass:
        """The logits of the node's model on the anchors."""
        if not node.state:
            return {}
        anchors = torch.cat(list(node.state.values()))
        z = await Logits(node.params, node.buffers, anchors)  # [A, C]
        return dict(zip(node.state, torch.split(z, self.ipc), strict=True))


@dataclass(frozen=True)
class AnchoredLoss(ModelLoss):
    """The training loss of DESA, for a local batch and an equal number of anchors.

    lambda_own CE(own) + lambda_kd ((1 - alpha) CE(anchors) + alpha T^2 KL(neighbours || own model))
    + lambda_reg SupCon(own features, features of the anchors). Anchors without logits from a
    neighbour have no KL term.
    """

    options: DESA

    def prepare(
        self, module: nn.Module, tensors: Mapping[str, Tensor], rng: torch.Generator
    ) -> Callable[[Tensor, Tensor], Tensor]:
        o, own, head = self.options, self.options.own_loss(), head_layer(module)
        anchors = channels_to_end(tensors["anchors"])  # the same memory order as local batches

        def loss(x: Tensor, y: Tensor) -> Tensor:
            chosen = torch.randperm(len(anchors), generator=rng)[: len(y)]
            x_a = anchors.index_select(0, chosen).movedim(-1, 1)
            y_a, z_bar, taught = (tensors[key][chosen] for key in ("labels", "teacher", "taught"))
            z, f = with_features(module, head, x)
            z_a, f_a = with_features(module, head, x_a)
            kl = (taught * distillation(z_a, z_bar, o.temperature)).mean()
            if o.kl_reduction == "mean":
                kl = kl / z_a.shape[1]
            kd = (1 - o.alpha) * F.cross_entropy(z_a, y_a) + o.alpha * kl
            reg = supervised_contrastive(f, y, f_a.detach(), y_a, o.contrast_temperature)
            return o.lambda_own * own(z, y) + o.lambda_kd * kd + o.lambda_reg * reg

        return loss


def distillation_targets(anchors: ByClass, z: ByClass, others: Inbox) -> dict[str, Tensor]:
    """All anchors, their labels [A], the neighbours' mean logits [A, C], and which have any [A]."""
    received = {name: tensors_named(name, others) for name in anchors}
    means = [
        torch.stack(received[name]).mean(0) if received[name] else torch.zeros_like(z[name])
        for name in anchors
    ]
    counts = torch.tensor([len(images) for images in anchors.values()])
    labels = torch.tensor([int(name.removeprefix("class")) for name in anchors])
    taught = torch.tensor([float(bool(received[name])) for name in anchors])
    return {
        "anchors": torch.cat(list(anchors.values())),
        "labels": labels.repeat_interleave(counts),
        "teacher": torch.cat(means),
        "taught": taught.repeat_interleave(counts),
    }


def tensors_named(name: str, inbox: Inbox) -> list[Tensor]:
    """The tensor of this name from every message that contains it."""
    return [m.payload[name] for m in inbox.messages if name in m.payload]
