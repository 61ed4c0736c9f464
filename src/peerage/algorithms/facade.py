"""FACADE: one shared core and k heads; nodes find their cluster by trying the heads (P3).

Biswas, Kermarrec, Sharma, Trinca, de Vos, 2024. arXiv:2410.02541.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from peerage.aggregation import curvature_weighted, uniform_weights, unit, weighted_mean
from peerage.algorithm import Algorithm, Cost, Dimensions, Node
from peerage.algorithms.averaging import all_others
from peerage.algorithms.choosing import lowest, note_choice
from peerage.algorithms.dechw import accumulated
from peerage.errors import InputError, check_at_least
from peerage.requests import Inbox, TensorSpec
from peerage.vectors import Layout, Weights
from peerage.work.training import LocalSGD, TrainStats

ALL = -1  # the index of a head that stands for every head, while heads are tied


@dataclass(frozen=True)
class Heads:
    """The state of a node; its core is in `node.params` and `node.buffers`."""

    heads: Tensor  # [k, h]
    buffers: Tensor  # [k, bh] their running statistics
    selected: int  # the head that the node chose and trained last, or ALL
    # Defaults, so that checkpoints of versions without these fields can be resumed.
    next: int | None = None  # the head that the next round trains, if a test has chosen it
    curvature: Tensor | None = None  # [c] of the core so far, with core_weights=curvature


@dataclass(frozen=True)
class Facade(Algorithm[Heads]):
    """Train the best of k heads on a shared core; average cores, and heads of the same index.

    With one head, or while heads are tied, this is EL, if the cores have equal weights.

    The model of a node that a run returns and exports is the core with the head that `eval_head`
    names. With eval_head=test, it is the head that a fresh choice on training data finds, because
    no model may depend on test data; only the recorded scores do.

    With core_weights=curvature, which is in no paper, cores are averaged with the weights of DecHW
    (P0, Eq. 4-8) over the entries of the core. The curvature of a round is the sum of squared
    batch gradients of the round's own training, each before its step, in its last pass over the
    data if it has several. Training computes it without another pass. It is divided by its norm
    over the core and added to that of the rounds before. Entries without curvature and running
    statistics have equal weights.

    >>> import peerage as pg
    >>> experiment = pg.Experiment(algorithm=pg.Facade(k=3))
    >>> experiment == pg.Experiment(algorithm="facade:k=3")
    True
    """

    personal: ClassVar[bool] = True  # a model fits the cluster of its node
    evaluated_at: ClassVar[Literal["after-training", "after-aggregation"]] = "after-aggregation"
    nonnegative: ClassVar[frozenset[str]] = frozenset({"core_h"})

    local: LocalSGD = LocalSGD()
    k: int = 2  # heads, at least as many as there are clusters
    choice_batches: int | None = None  # batches that heads are tried on; none: as in training
    # All heads are tried on the same examples, or each on its own draw (the released code).
    choice_samples: Literal["same", "different"] = "same"
    # Batches that heads are tried on when models are evaluated; the next round then trains the
    # head found there, so the rounds of evaluation matter (the released code: 100). By default,
    # as many as in training, and each round chooses for itself.
    test_choice_batches: int | None = None
    warmup: int = 0  # rounds at the beginning in which all heads are tied
    own_head: Literal["always", "if_selected"] = "always"  # the text and the code; Eq. 4
    # The head that is evaluated: chosen anew on training data after aggregation, the one trained
    # in this round, or that with the lowest loss on the node's test set, which is slightly
    # optimistic (the released code).
    eval_head: Literal["train", "last", "test"] = "train"
    # Heads start equal on all nodes, or each node draws its own. The core, a single head and tied
    # heads are those of the node's initial model.
    head_init: Literal["shared", "own"] = "shared"
    core_weights: Literal["uniform", "curvature"] = "uniform"  # in the mean of cores
    all_reduce: bool = True  # whether all nodes average once more after the last round

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("k", self.k, 1, " head")
        for name in ("choice_batches", "test_choice_batches"):
            check_at_least(name, getattr(self, name), 1)
        check_at_least("warmup", self.warmup, 0, " rounds")
        if self.head_init == "own" and self.warmup:
            raise InputError(
                f"head_init=own has no effect with warmup={self.warmup}, where tied heads start "
                "from the initial model; use --init independent instead"
            )
        if self.test_choice_batches is not None and self.eval_head == "last":
            raise InputError(
                f"test_choice_batches={self.test_choice_batches} has no effect with "
                "eval_head=last, which chooses no head at a test; use eval_head=train or test"
            )

    def check_layout(self, layout: Layout) -> None:
        layout.check_parts("facade")

    def caveats(self) -> Iterator[str]:
        if self.k > 1 and self.local.keep_optimizer:
            yield (
                "facade with keep_optimizer continues the momentum of one head with another when "
                "the choice changes; leave out keep_optimizer to avoid this"
            )
        if self.k > 1 and self.choice_samples == "different" and self.choice_examples() is None:
            yield (
                "facade with choice_samples=different tries all heads on all examples of a node, "
                "so on the same ones; give choice_batches, or --steps"
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
            curvature=torch.zeros(node.layout.part_size("core")) if self.curved else None,
        )

    @property
    def curved(self) -> bool:
        """Whether curvature weights the cores."""
        return self.core_weights == "curvature"

    def message_schema(self, dimensions: Dimensions) -> dict[str, TensorSpec]:
        layout, statistics = dimensions.layout, dimensions.buffer_layout
        h, bh = layout.part_size("head"), statistics.part_size("head")
        core = TensorSpec((layout.part_size("core"),))
        return {
            "core": core,
            **({"core_h": replace(core, low=0.0, norm=1.0, growth=1.0)} if self.curved else {}),
            "head": TensorSpec((h,)),
            "core_b": TensorSpec((statistics.part_size("core"),)),
            "head_b": TensorSpec((bh,)),
            "index": TensorSpec((1,), torch.int64, low=ALL, high=self.k - 1),
            "heads": TensorSpec((self.k, h)),  # these two only in the final step
            "heads_b": TensorSpec((self.k, bh)),
        }

    def cost(self, round: int, dimensions: Dimensions, examples: float) -> Cost:
        share = dimensions.layout.part_size("head") / dimensions.layout.size
        curvature = 1 - share if self.curved else 0.0
        vectors, state = 1.0 + curvature, self.k * share + curvature
        if self.k == 1 or round < self.warmup:
            return Cost(vectors=vectors, state=state)
        tried = self.choice_examples()
        data = 1.0 if tried is None else min(1.0, tried / max(examples, 1.0))
        # On the same examples, the core runs once for all heads. The choice for evaluation is part
        # of evaluation.
        passes = 1 - share + self.k * share if self.choice_samples == "same" else float(self.k)
        return Cost(vectors=vectors, forward=data * passes, state=state)

    def max_messages(self, round: int | None, nodes: int) -> int:
        return 2 if round is None else 1

    async def round(self, node: Node[Heads]) -> None:
        tied = node.round < self.warmup
        index, losses = (ALL, []) if tied else await self.choose_for_training(node)
        self.put_head(node, index)
        stats = await node.train(self.local, squares=self.curved)
        if not tied:
            note_choice(node, index, losses)
        self.keep_trained(node, index, stats)
        head, statistics = node.layout.part("head"), node.buffer_layout.part("head")
        inbox = await node.exchange(
            **self.core_of(node),
            head=node.params[head],
            head_b=node.buffers[statistics],
            index=torch.tensor([index]),
        )
        inbox = inbox.alike(node.architecture)
        self.average_cores(node, inbox)
        old, every = node.state, range(self.k)
        node.state = replace(
            old,
            heads=torch.stack([self.average_head(inbox, j, "head", old.heads) for j in every]),
            buffers=torch.stack(
                [self.average_head(inbox, j, "head_b", old.buffers) for j in every]
            ),
        )
        await self.show_head(node)

    def may_meet(self, a: int, b: int) -> bool:
        return self.all_reduce

    async def final(self, node: Node[Heads]) -> None:
        """All nodes average: cores, and each head over the nodes that chose it last."""
        if not self.all_reduce:
            await self.show_head(node)  # the last round may not have been one with evaluation
            return
        mine = node.state
        inbox = await node.exchange(
            to=all_others(node),
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

        node.state = replace(
            mine,
            heads=torch.stack([mean(j, "head", "heads") for j in range(self.k)]),
            buffers=torch.stack([mean(j, "head_b", "heads_b") for j in range(self.k)]),
        )
        await self.show_head(node)

    def choice_examples(self, batches: int | None = None) -> int | None:
        """How many examples heads are tried on; None means all, as in training by epochs."""
        if batches is None:
            batches = self.local.steps if self.choice_batches is None else self.choice_batches
        return None if batches is None else batches * self.local.batch_size

    async def choose_for_training(self, node: Node[Heads]) -> tuple[int, list[float]]:
        """The head that this round trains, and the losses of all if it is chosen now."""
        if node.state.next is not None:
            return node.state.next, []
        # Initial models are always evaluated, so the first choice is one at a test.
        batches = self.test_choice_batches if node.round == 0 else None
        return await self.choose(node, "heads", batches)

    async def choose(
        self, node: Node[Heads], stream: str, batches: int | None = None
    ) -> tuple[int, list[float]]:
        """The head with the lowest loss on local examples, and the losses of all.

        Ties are broken at random. A single head is not tried, so it has no loss.
        """
        if self.k == 1:
            return 0, []
        heads, buffers = list(node.state.heads), list(node.state.buffers)
        if self.choice_samples == "same":
            groups = [range(self.k)]
        else:  # each call draws other examples
            groups = [range(j, j + 1) for j in range(self.k)]
        losses = [
            await node.losses(
                [heads[j] for j in group],
                self.choice_examples(batches),
                part="head",
                buffers=[buffers[j] for j in group],
                stream=stream,
            )
            for group in groups
        ]
        return lowest(torch.cat(losses), node.rng)

    async def show_head(self, node: Node[Heads]) -> None:
        """Put the head that is evaluated over the core."""
        if not node.evaluation_due:
            return
        index = node.state.selected
        if self.eval_head != "last" and index != ALL:
            index, _ = await self.choose(node, "evaluated heads", self.test_choice_batches)
            if self.test_choice_batches is not None:
                node.state = replace(node.state, next=index)
        self.put_head(node, index)

    def test_candidates(self, node: Node[Heads]) -> Sequence[Weights]:
        tried = self.eval_head == "test" and self.k > 1 and node.state.selected != ALL
        return [self.with_head(node, j) for j in range(self.k)] if tried else ()

    def put_head(self, node: Node[Heads], index: int) -> None:
        """Make a stored head that of the node's model."""
        model = self.with_head(node, index)
        node.params, node.buffers = model.params, model.buffers

    def with_head(self, node: Node[Heads], index: int) -> Weights:
        """The node's core with a stored head; tied heads are all equal."""
        row = max(index, 0)
        params, buffers = node.params.clone(), node.buffers.clone()
        params[node.layout.part("head")] = node.state.heads[row]
        buffers[node.buffer_layout.part("head")] = node.state.buffers[row]
        return Weights(params, buffers, node.architecture)

    def keep_trained(self, node: Node[Heads], index: int, stats: TrainStats) -> None:
        """Store the head of the node's model, as one or as all, and add the core's curvature."""
        old, rows = node.state, slice(None) if index == ALL else index
        heads, buffers, curvature = old.heads.clone(), old.buffers.clone(), old.curvature
        heads[rows] = node.params[node.layout.part("head")]
        buffers[rows] = node.buffers[node.buffer_layout.part("head")]
        if curvature is not None and stats.squares is not None:
            h = unit(stats.squares[node.layout.part("core")])
            curvature = accumulated(curvature, h)
        node.state = Heads(heads, buffers, index, None, curvature)

    def core_of(self, node: Node[Heads]) -> dict[str, Tensor]:
        """The tensors of a message that belong to the core."""
        statistics = node.buffers[node.buffer_layout.part("core")]
        tensors = {"core": node.params[node.layout.part("core")], "core_b": statistics}
        h = node.state.curvature
        return tensors if h is None else {**tensors, "core_h": h}

    def average_cores(self, node: Node[Heads], inbox: Inbox) -> None:
        w = inbox.uniform_weights()
        params, buffers = node.params.clone(), node.buffers.clone()
        params[node.layout.part("core")] = (
            curvature_weighted(inbox["core"], inbox["core_h"], otherwise=w)
            if self.curved
            else inbox.mean("core", w)
        )
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
