"""FedNL: Newton steps at a hub, with Hessians learned incrementally (P2).

Safaryan, Islamov, Qian, Richtarik, 2021. arXiv:2106.02969.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from peerage.algorithm import Cost, Dimensions, Node
from peerage.errors import InputError, check_choice
from peerage.hub import HubAlgorithm, Payload
from peerage.requests import Inbox, Message, TensorSpec
from peerage.vectors import Layout
from peerage.work.newton import (
    Compress,
    Derivatives,
    add_pairs,
    from_upper,
    problems,
    solve_projected,
    solve_shifted,
    to_rows,
    to_vector,
    upper,
)

NEVER = -1  # round of the last message of a client that has sent none
ROWS_PER_PASS = 20  # Hessian rows in the time of a training epoch, from the study p2-fig7


@dataclass(frozen=True)
class Learned:
    """At the hub, the mean H over the clients that have answered so far; at a client, its H_k.

    In every round the hub states the round of each client's last message. Only then does a client
    add what it sent to its H_k. So a lost update is in neither H, and is learned again.
    """

    h: Tensor  # [C, p, p]
    rounds: Tensor  # round of the last message received [n] (hub) or sent [1] (client)
    examples: int  # number of examples behind h
    values: Tensor  # [C, R] at a client, eigenvalues of its last update, perhaps lost
    vectors: Tensor  # [C, R, p] and its eigenvectors


@dataclass(frozen=True)
class FedNL(HubAlgorithm[Learned]):
    """Newton steps for logistic regression, with Hessians learned from low-rank differences.

    Each class against the rest is a separate problem. At the hub's x, a client computes its
    gradient g_k, its Hessian A_k and the distance l_k = |A_k - H_k|. It sends g_k, l_k and S_k, the
    `rank` largest eigenvalues of A_k - H_k with their vectors. The hub updates x to
    x - (H + l I)^-1 g and H to H + a S. With option 1, x becomes x - [H]^-1 g, where [H] raises
    eigenvalues of H below the penalty to it. With start=exact, the first message of a client has
    the upper triangle of its Hessian, which becomes H_k, instead of S_k.

    g and l are means over the answers of a round. H is the mean of H_k over all clients that have
    ever answered. Both are weighted by examples.

    >>> import peerage as pg
    >>> experiment = pg.Experiment(algorithm=pg.FedNL(rank=2))
    >>> experiment == pg.Experiment(algorithm="fednl:rank=2")
    True
    """

    lossless_messages: ClassVar[bool] = True  # the hub and a client add up the same differences
    rank: int = 2  # of the update of a Hessian in one round
    option: int = 2  # of the paper, how H is made positive definite: 1 by projection, 2 by l I
    penalty: float = 1e-3  # lambda in (lambda / 2) |x|^2
    # The factor a: 1, or 1 - sqrt(1 - delta), where delta is the share of A_k - H_k in S_k.
    learn: Literal["full", "contractive"] = "full"
    norm: Literal["frobenius", "spectral"] = "frobenius"  # of l_k; for option 2
    # H_k starts as the first Hessian or as zero, which needs a large penalty with option 1.
    start: Literal["exact", "zero"] = "exact"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rank < 1:
            raise InputError(f"rank must be at least 1, got {self.rank}")
        if not 0 < self.penalty < float("inf"):
            raise InputError(f"penalty must be a number above 0, got {self.penalty}")
        check_choice("option", self.option, (1, 2))
        if self.option == 1 and self.norm != "frobenius":
            raise InputError(f"option 1 has no l and so no norm; leave norm={self.norm} out")

    def check_layout(self, layout: Layout) -> None:
        _, size = problems(layout)
        if self.rank > size:
            raise InputError(
                f"rank {self.rank} is more than the {size} rows of a Hessian of this model; "
                f"use {size} or less"
            )

    def message_schema(self, dimensions: Dimensions) -> dict[str, TensorSpec]:
        classes, size = problems(dimensions.layout)
        return {
            **super().message_schema(dimensions),
            "rounds": TensorSpec((dimensions.nodes - 1,), torch.int64, low=NEVER),
            "g": TensorSpec((classes, size)),
            "l": TensorSpec((classes,), low=0.0),
            "triangle": TensorSpec((classes, size * (size + 1) // 2)),
            "values": TensorSpec((classes, self.rank)),
            "vectors": TensorSpec((classes, self.rank, size), low=-1.0, high=1.0),  # of norm 1
        }

    def cost(self, round: int, dimensions: Dimensions, examples: float) -> Cost:
        _, size = problems(dimensions.layout)
        first = round == 0 and self.start == "exact"
        return Cost(
            vectors=1.0 + ((size + 1) / 2 if first else self.rank),
            passes=size / ROWS_PER_PASS,
            state=float(size),
        )

    def init(self, node: Node[Learned]) -> Learned:
        classes, size = problems(node.layout)
        if node.id == node.hub:
            h, rounds = torch.zeros(classes, size, size), torch.full((node.num_nodes - 1,), NEVER)
        else:  # without H_k yet
            h, rounds = torch.empty(classes, 0, size), torch.tensor([NEVER])
        return Learned(h, rounds, 0, *no_pairs(h))

    def extend_state(self, known: Learned, fresh: Learned) -> Learned:
        more = fresh.rounds[len(known.rounds) :]  # none at a client
        return replace(known, rounds=torch.cat([known.rounds, more]))

    def broadcast(self, node: Node[Learned]) -> Payload:
        return {**super().broadcast(node), "rounds": node.state.rounds}

    async def answer(self, node: Node[Learned], hub_message: Mapping[str, Tensor]) -> Payload:
        g, a = await Derivatives(node.params, node.buffers, self.penalty)
        arrived = int(hub_message["rounds"][place(node, node.id)])
        if arrived == NEVER and self.start == "exact":
            self.remember(node, a, *no_pairs(a))
            return self.message(torch.zeros(len(a)), g=g, triangle=upper(a))
        h = self.acknowledged(node.state, arrived, a)
        values, vectors, distance = await Compress(a, h, self.rank)
        learned = self.step(values, distance) * values
        self.remember(node, h, learned, vectors)
        l_k = distance if self.norm == "frobenius" else values[:, 0].abs()
        return self.message(l_k, g=g, values=learned, vectors=vectors)

    def message(self, l_k: Tensor, **payload: Tensor) -> Payload:
        return payload if self.option == 1 else {**payload, "l": l_k}

    def acknowledged(self, state: Learned, arrived: int, a: Tensor) -> Tensor:
        """H_k as it is in the hub's mean."""
        if arrived == NEVER:
            return torch.zeros_like(a)
        if arrived != int(state.rounds):  # the last message was lost
            return state.h
        return add_pairs(state.h, state.values, state.vectors)

    def step(self, values: Tensor, distance: Tensor) -> Tensor:
        """[C, 1] the factor a of every class."""
        if self.learn == "full":
            return torch.ones(len(values), 1)
        share = values.square().sum(1) / distance.square().clamp(min=1e-30)
        return 1 - (1 - share.clamp(max=1)).sqrt()[:, None]

    def remember(self, node: Node[Learned], h: Tensor, values: Tensor, vectors: Tensor) -> None:
        rounds = torch.tensor([node.round])
        node.state = Learned(h, rounds, node.num_examples, values, vectors)

    def merge(self, node: Node[Learned], inbox: Inbox) -> None:
        if not any(message.examples for message in inbox.messages):
            return  # there is no mean without examples
        places = [place(node, sender) for sender in inbox.senders]
        new = node.state.rounds[places] == NEVER
        h, examples = self.with_new_clients(
            node.state, [m for m, is_new in zip(inbox.messages, new, strict=True) if is_new]
        )
        x = to_rows(node.layout, node.params)
        node.params = to_vector(x - self.direction(h, inbox))
        rounds = node.state.rounds.clone()
        rounds[places] = node.round
        h = self.with_updates(h, inbox, examples)
        node.state = replace(node.state, h=h, rounds=rounds, examples=examples)

    def direction(self, h: Tensor, inbox: Inbox) -> Tensor:
        """[C, p] the Newton directions of all classes."""
        tau = inbox.data_weights()
        g = torch.tensordot(tau, inbox.stack("g"), 1)
        if self.option == 1:
            steps = [solve_projected(*each, self.penalty) for each in zip(h, g, strict=True)]
        else:
            l_bar = torch.tensordot(tau, inbox.stack("l"), 1)
            steps = [solve_shifted(*each, self.penalty) for each in zip(h, l_bar, g, strict=True)]
        return torch.stack(steps)

    def with_new_clients(self, state: Learned, new: Sequence[Message]) -> tuple[Tensor, int]:
        """H including the clients that answer for the first time, and its number of examples."""
        if not new:
            return state.h, state.examples
        examples = state.examples + sum(message.examples for message in new)
        h = state.h * (state.examples / examples)
        if self.start == "exact":
            total = torch.zeros_like(new[0].payload["triangle"])
            for m in new:
                total.add_(m.payload["triangle"], alpha=m.examples / examples)
            h += from_upper(total, h.shape[-1])
        return h, examples

    def with_updates(self, h: Tensor, inbox: Inbox, examples: int) -> Tensor:
        """H + a S, over the clients that sent an S_k."""
        old = [m for m in inbox.messages if "values" in m.payload]
        if not old:
            return h
        values = [m.payload["values"] * (m.examples / examples) for m in old]
        vectors = [m.payload["vectors"] for m in old]
        return add_pairs(h, torch.cat(values, dim=1), torch.cat(vectors, dim=1))


def place(node: Node[Learned], client: int) -> int:
    """The place of a client among all of them."""
    assert node.hub is not None
    return client - (client > node.hub)


def no_pairs(h: Tensor) -> tuple[Tensor, Tensor]:
    """Empty eigenvalues and eigenvectors."""
    return h.new_empty(len(h), 0), h.new_empty(len(h), 0, h.shape[-1])
