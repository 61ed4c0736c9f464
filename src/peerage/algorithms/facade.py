"""FACADE: one shared core and k heads; nodes find their cluster by trying the heads (P3).

Biswas, Kermarrec, Sharma, Trinca, de Vos, 2024. arXiv:2410.02541.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from peerage.aggregation import uniform_weights, weighted_mean
from peerage.algorithm import Algorithm, Cost, Dimensions, Node
from peerage.errors import InputError, check_at_least
from peerage.requests import Inbox, TensorSpec
from peerage.vectors import Layout
from peerage.work.training import LocalSGD

ALL = -1  # the index of a head that stands for every head, while heads are tied


@dataclass(frozen=True)
class Heads:
    """The state of a node; its core is in `node.params` and `node.buffers`."""

    heads: Tensor  # [k, h]
    buffers: Tensor  # [k, bh] their running statistics
    selected: int  # the head that the node chose and trained last, or ALL


@dataclass(frozen=True)
class Facade(Algorithm[Heads]):
    """Train the best of k heads on a shared core; average cores, and heads of the same index.

    With one head, or while heads are tied, this is plain averaging with equal weights.
    """

    personal: ClassVar[bool] = True  # a model fits the cluster of its node
    evaluated_at: ClassVar[Literal["after-training", "after-aggregation"]] = "after-aggregation"

    local: LocalSGD = LocalSGD()
    k: int = 2  # heads, at least as many as there are clusters
    choice_batches: int | None = None  # batches that heads are tried on; none: as in training
    warmup: int = 0  # rounds at the beginning in which all heads are tied
    own_head: Literal["always", "if_selected"] = "always"  # the text and the code; Eq. 4
    # The head that is evaluated: chosen anew after aggregation, or the one trained in this round.
    eval_head: Literal["train", "last"] = "train"
    # Heads start equal on all nodes, or each node draws its own. The core, a single head and tied
    # heads are those of the node's initial model.
    head_init: Literal["shared", "own"] = "shared"
    all_reduce: bool = True  # whether all nodes average once more after the last round

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("k", self.k, 1, " head")
        check_at_least("choice_batches", self.choice_batches, 1)
        check_at_least("warmup", self.warmup, 0, " rounds")
        if self.head_init == "own" and self.warmup:
            raise InputError(
                f"head_init=own has no effect with warmup={self.warmup}, where tied heads start "
                "from the initial model; use --init independent instead"
            )

    def check_layout(self, layout: Layout) -> None:
        layout.check_parts("facade")

    def caveats(self) -> Iterator[str]:
        if self.k > 1 and self.local.keep_optimizer:
            yield (
                "facade with keep_optimizer continues the momentum of one head with another when "
                "the choice changes; leave out keep_optimizer to avoid this"
            )

    def init(self, node: Node[Heads]) -> Heads:
        tied = self.k == 1 or self.warmup > 0
        private = self.head_init == "own"
        models = [
            node.weights if tied else node.initial(f"head {j}", private=private)
            for j in range(self.k)
        ]
        head, statistics = node.layout.part("head"), node.buffer_layout.part("head")
        return Heads(
            torch.stack([model.params[head] for model in models]),
            torch.stack([model.buffers[statistics] for model in models]),
            selected=0,
        )

    def message_schema(self, dimensions: Dimensions) -> dict[str, TensorSpec]:
        layout, statistics = dimensions.layout, dimensions.buffer_layout
        h, bh = layout.part_size("head"), statistics.part_size("head")
        return {
            "core": TensorSpec((layout.part_size("core"),)),
            "head": TensorSpec((h,)),
            "core_b": TensorSpec((statistics.part_size("core"),)),
            "head_b": TensorSpec((bh,)),
            "index": TensorSpec((1,), torch.int64),
            "heads": TensorSpec((self.k, h)),  # these two only in the final step
            "heads_b": TensorSpec((self.k, bh)),
        }

    def cost(self, round: int, dimensions: Dimensions, examples: float) -> Cost:
        share = dimensions.layout.part_size("head") / dimensions.layout.size
        state = self.k * share
        if self.k == 1 or round < self.warmup:
            return Cost(vectors=1.0, state=state)
        tried = self.choice_examples()
        data = 1.0 if tried is None else min(1.0, tried / max(examples, 1.0))
        # The core runs once for all heads. The choice for evaluation is part of evaluation.
        return Cost(vectors=1.0, forward=data * (1 - share + state), state=state)

    async def round(self, node: Node[Heads]) -> None:
        tied = node.round < self.warmup
        index, losses = (ALL, []) if tied else await self.choose(node, "heads")
        self.put_head(node, index)
        await node.train(self.local)
        if not tied:
            node.note(head=index, **{f"head_loss_{j}": loss for j, loss in enumerate(losses)})
        head, statistics = node.layout.part("head"), node.buffer_layout.part("head")
        inbox = await node.exchange(
            **self.core_of(node),
            head=node.params[head],
            head_b=node.buffers[statistics],
            index=torch.tensor([index]),
        )
        inbox = inbox.alike(node.architecture)
        self.average_cores(node, inbox)
        old = node.state
        node.state = Heads(
            torch.stack([self.average_head(inbox, j, "head", old.heads) for j in range(self.k)]),
            torch.stack(
                [self.average_head(inbox, j, "head_b", old.buffers) for j in range(self.k)]
            ),
            index,
        )
        await self.show_head(node)

    async def final(self, node: Node[Heads]) -> None:
        """All nodes average: cores, and each head over the nodes that chose it last."""
        if not self.all_reduce:
            await self.show_head(node)  # the last round may not have been one with evaluation
            return
        mine = node.state
        inbox = await node.exchange(
            to=[other for other in range(node.num_nodes) if other != node.id],
            **self.core_of(node),
            head=mine.heads[max(mine.selected, 0)],
            head_b=mine.buffers[max(mine.selected, 0)],
            index=torch.tensor([mine.selected]),
        )
        inbox = inbox.alike(node.architecture)
        self.average_cores(node, inbox)
        groups = [senders_of(inbox, j) for j in range(self.k)]
        stored = inbox
        if not all(groups):  # no node chose some head: average what all have stored of it
            stored = await node.exchange(
                to=inbox.others().senders, heads=mine.heads, heads_b=mine.buffers
            )

        def mean(j: int, name: str, names: str) -> Tensor:
            if groups[j]:
                vectors = [inbox[name][i] for i in groups[j]]
            else:
                vectors = [matrix[j] for matrix in stored[names]]
            return weighted_mean(vectors, uniform_weights(len(vectors)))

        node.state = Heads(
            torch.stack([mean(j, "head", "heads") for j in range(self.k)]),
            torch.stack([mean(j, "head_b", "heads_b") for j in range(self.k)]),
            mine.selected,
        )
        await self.show_head(node)

    def choice_examples(self) -> int | None:
        """How many examples heads are tried on; None means all, as in training by epochs."""
        batches = self.local.steps if self.choice_batches is None else self.choice_batches
        return None if batches is None else batches * self.local.batch_size

    async def choose(self, node: Node[Heads], stream: str) -> tuple[int, list[float]]:
        """The head with the lowest loss on local examples, and the losses of all.

        Ties are broken at random. A single head is not tried, so it has no loss.
        """
        if self.k == 1:
            return 0, []
        losses = await node.losses(
            list(node.state.heads),
            self.choice_examples(),
            part="head",
            buffers=list(node.state.buffers),
            stream=stream,
        )
        losses = losses.nan_to_num(nan=torch.inf, posinf=torch.inf)
        best = torch.nonzero(losses == losses.min()).flatten()
        place = torch.randint(len(best), (1,), generator=node.rng) if len(best) > 1 else 0
        return int(best[place]), losses.tolist()

    async def show_head(self, node: Node[Heads]) -> None:
        """Put the head that is evaluated over the core; training begins with its own choice."""
        if not node.evaluation_due:
            return
        index = node.state.selected
        if self.eval_head == "train" and index != ALL:
            index, _ = await self.choose(node, "evaluated heads")
        self.put_head(node, index)

    def put_head(self, node: Node[Heads], index: int) -> None:
        """Make a stored head that of the node's model; tied heads are all equal."""
        row = max(index, 0)
        params, buffers = node.params.clone(), node.buffers.clone()
        params[node.layout.part("head")] = node.state.heads[row]
        buffers[node.buffer_layout.part("head")] = node.state.buffers[row]
        node.params, node.buffers = params, buffers

    def core_of(self, node: Node[Heads]) -> dict[str, Tensor]:
        """The tensors of a message that belong to the core."""
        statistics = node.buffers[node.buffer_layout.part("core")]
        return {"core": node.params[node.layout.part("core")], "core_b": statistics}

    def average_cores(self, node: Node[Heads], inbox: Inbox) -> None:
        w = inbox.uniform_weights()
        params, buffers = node.params.clone(), node.buffers.clone()
        params[node.layout.part("core")] = inbox.mean("core", w)
        buffers[node.buffer_layout.part("core")] = inbox.mean("core_b", w)
        node.params, node.buffers = params, buffers

    def average_head(self, inbox: Inbox, j: int, name: str, stored: Tensor) -> Tensor:
        """The mean of the heads j that arrived and of the node's own head j, [h] or [bh]."""
        sent = senders_of(inbox, j)
        own = inbox.senders.index(inbox.owner)
        vectors = {i: inbox[name][i] for i in sent}
        if own not in vectors and (self.own_head == "always" or not vectors):
            vectors[own] = stored[j]
        return weighted_mean([vectors[i] for i in sorted(vectors)], uniform_weights(len(vectors)))


def senders_of(inbox: Inbox, j: int) -> list[int]:
    """The positions of the messages with head j."""
    return [i for i, index in enumerate(inbox["index"]) if int(index) in (j, ALL)]
