"""Dec. HeteroFL, Dec. FedRolex, Dec. Federated Dropout: models of different widths (P1 baselines).

All models are width-scaled versions of one network. Participants are those of DFML: see
`rotating_hub`. W_g is as wide as the largest of them. Each participant n owns as many channels of
every group of W_g as its own model has: the indices X_n. The aggregator averages every entry of
W_g over the participants that own it, with equal weights, and returns W_g[X_n] to n. Running
statistics follow their channels. The largest participant owns all of W_g, so an entry that no other
one owns keeps its value.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor

from peerage.algorithm import Node
from peerage.algorithms.dec_fedavg import DecFedAvg, weighted_model_mean
from peerage.vectors import Layout, Weights

if TYPE_CHECKING:
    from peerage.models.scaled import ChannelGroups

Sizes = Mapping[str, int]  # group -> number of its channels
Indices = Mapping[str, Tensor]  # group -> channels of W_g, in the order of the client's own


@dataclass(frozen=True)
class PartialTraining(DecFedAvg):
    """A random client averages its own model and those of senders, of different widths."""

    width_scaled: ClassVar[bool] = True

    def indices_of(self, node: Node[None], client: int, own: Sizes, whole: Sizes) -> Indices:
        """X_n of a client in this round; `own` are the sizes of its model, `whole` those of W_g."""
        raise NotImplementedError

    def merge(
        self, node: Node[None], models: Mapping[int, Weights], examples: Mapping[int, int]
    ) -> dict[int, Weights]:
        clients = sorted(models)
        if len({model.architecture for model in models.values()}) == 1:
            mean = weighted_model_mean([models[n] for n in clients], [1] * len(clients))
            return dict.fromkeys(clients, mean)
        largest = max(models.values(), key=lambda model: model.params.numel()).architecture
        groups = node.channels[largest]
        owned = [
            self.indices_of(node, n, node.channels[models[n].architecture].sizes, groups.sizes)
            for n in clients
        ]
        names = [models[n].architecture for n in clients]
        params, buffers = (
            average_owned(
                vectors, [layouts[name] for name in names], layouts[largest], groups, owned
            )
            for vectors, layouts in (
                ([models[n].params for n in clients], node.layouts),
                ([models[n].buffers for n in clients], node.buffer_layouts),
            )
        )
        return {n: Weights(params[i], buffers[i], names[i]) for i, n in enumerate(clients)}


@dataclass(frozen=True)
class DecHeteroFL(PartialTraining):
    """A random client averages models of different widths; each owns the first channels.

    After Diao, Ding, Tarokh, 2021. arXiv:2010.01264. Their code averages a row of the classifier
    only over clients that have this label, and scales activations; P1 mentions neither.

    >>> import peerage as pg
    >>> experiment = pg.Experiment(algorithm=pg.DecHeteroFL(senders=4.0))
    >>> experiment == pg.Experiment(algorithm="dec-heterofl:senders=4")
    True
    """

    def indices_of(self, node: Node[None], client: int, own: Sizes, whole: Sizes) -> Indices:
        return {group: torch.arange(size) for group, size in own.items()}


@dataclass(frozen=True)
class DecFedRolex(PartialTraining):
    """Dec. HeteroFL whose first channel moves by one in every round; by default the same result.

    After Alam et al., 2022. arXiv:2212.01548. W_g is made anew from the participants of a round,
    and the shift is common to all of them. So it only renames channels: the models are those of
    Dec. HeteroFL in every round. With sorted indices they are not.

    >>> import peerage as pg
    >>> experiment = pg.Experiment(algorithm=pg.DecFedRolex(indices="sorted"))
    >>> experiment == pg.Experiment(algorithm="dec-fedrolex:indices=sorted")
    True
    """

    # X_n in round t = 0, 1, ...: t, t + 1, ... (the paper), or -t, 1 - t, ... (FedRolex's code),
    # modulo the channels of W_g.
    direction: Literal["text", "code"] = field(default="text", kw_only=True)
    indices: Literal["wrapped", "sorted"] = field(default="wrapped", kw_only=True)

    def indices_of(self, node: Node[None], client: int, own: Sizes, whole: Sizes) -> Indices:
        start = node.round if self.direction == "text" else -node.round
        moved = {group: (start + torch.arange(size)) % whole[group] for group, size in own.items()}
        if self.indices == "wrapped":
            return moved
        return {group: x.sort().values for group, x in moved.items()}


@dataclass(frozen=True)
class DecFedDropout(PartialTraining):
    """A random client averages models of different widths; each owns random channels.

    After Federated Dropout: Caldas et al., 2018. arXiv:1812.07210.

    >>> import peerage as pg
    >>> experiment = pg.Experiment(algorithm=pg.DecFedDropout(senders=4.0))
    >>> experiment == pg.Experiment(algorithm="dec-fed-dropout:senders=4")
    True
    """

    def indices_of(self, node: Node[None], client: int, own: Sizes, whole: Sizes) -> Indices:
        # A stream for each client, so that its channels do not depend on lost messages.
        seeds = torch.randint(2**62, (node.num_nodes,), generator=node.coin_at(node.round))
        stream = torch.Generator().manual_seed(int(seeds[client]))
        return {
            group: torch.randperm(whole[group], generator=stream)[:size].sort().values
            for group, size in own.items()
        }


def average_owned(
    vectors: Sequence[Tensor],
    layouts: Sequence[Layout],
    whole: Layout,
    groups: "ChannelGroups",
    owned: Sequence[Indices],
) -> list[Tensor]:
    """The vectors of all clients after each entry of W_g was averaged over those that own it.

    `layouts` are those of the vectors, and `whole` is that of W_g, whose channels are `groups`.
    Clients with the same channels get the same tensor.
    """
    total, owners = vectors[0].new_zeros(whole.size), vectors[0].new_zeros(whole.size)
    for vector, layout, x in zip(vectors, layouts, owned, strict=True):
        for slot, own in zip(whole.slots, layout.slots, strict=True):
            for there, here in groups.blocks(slot.name, slot.shape, x):
                slot.view(total)[there] += own.view(vector)[here]  # every position at most once
                slot.view(owners)[there] += 1
    mean = total.div_(owners)
    parts: list[Tensor] = []
    for i, (layout, x) in enumerate(zip(layouts, owned, strict=True)):
        known = next((parts[j] for j in range(i) if same_channels(owned[j], x)), None)
        parts.append(part_of(mean, layout, whole, groups, x) if known is None else known)
    return parts


def same_channels(a: Indices, b: Indices) -> bool:
    return all(torch.equal(channels, b[group]) for group, channels in a.items())


def part_of(
    mean: Tensor, layout: Layout, whole: Layout, groups: "ChannelGroups", owned: Indices
) -> Tensor:
    """W_g[X_n] as a vector of this layout."""
    part = mean.new_empty(layout.size)
    for slot, own in zip(whole.slots, layout.slots, strict=True):
        for there, here in groups.blocks(slot.name, slot.shape, owned):
            own.view(part)[here] = slot.view(mean)[there]
    return part
