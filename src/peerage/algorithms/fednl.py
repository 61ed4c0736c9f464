"""FedNL: a hub that takes Newton steps with Hessians that it learns piece by piece (P2).

Safaryan, Islamov, Qian, Richtarik, 2021. arXiv:2106.02969.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from peerage.algorithm import Cost, Dimensions, Node
from peerage.errors import InputError, check_choice
from peerage.hub import HubAlgorithm, Payload
from peerage.requests import Inbox, TensorSpec
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

NEVER = -1  # the round of a message that has not come yet
ROWS_PER_PASS = 20  # of Hessians in the time of a pass of training; measured in the study p2-fig7


@dataclass(frozen=True)
class Learned:
    """At the hub, the mean H over the clients heard so far; at a client, its H_k.

    The hub says in every round which message of each client was the last to arrive. A client adds
    what it sent to its H_k only then: what was lost is in neither H, and is learned again.
    """

    h: Tensor  # [C, p, p]
    rounds: Tensor  # of the last message: at the hub [n], that came; at a client [1], that it sent
    examples: int  # that h stands for
    values: Tensor  # [C, R] at a client, what it sent last and the hub may not have,
    vectors: Tensor  # [C, R, p] as eigenvalues and eigenvectors


@dataclass(frozen=True)
class FedNL(HubAlgorithm[Learned]):
    """Newton steps for logistic regression, with Hessians learned from low-rank differences.

    Every class against the rest is a problem of its own. At the hub's x, a client computes its
    gradient g_k, its Hessian A_k and how far that is from what was learned, l_k = |A_k - H_k|. It
    sends g_k, l_k and S_k, the `rank` largest eigenvalues of A_k - H_k with their vectors. The hub
    takes x - (H + l I)^-1 g, and then H + a S. With option 1, it takes x - [H]^-1 g, where
    eigenvalues of H below the penalty are lifted to it. The first message of a client that starts
    from its exact Hessian has the upper triangle of that, as H_k, in the place of S_k.

    g and l are means over the clients that were heard in a round, and H is the mean of the H_k of
    all that ever were, both weighted by examples.
    """

    lossless_messages: ClassVar[bool] = True  # the hub and a client add up the same differences
    rank: int = 2  # of what is learned of a Hessian in a round
    option: int = 2  # of the paper, how H is made safe: 1 by projection, 2 by l I
    penalty: float = 1e-3  # lambda in (lambda / 2) |x|^2
    # The step a: 1, or 1 - sqrt(1 - delta), where delta is the share of A_k - H_k that S_k has.
    learn: Literal["full", "contractive"] = "full"
    norm: Literal["frobenius", "spectral"] = "frobenius"  # of which l_k is; for option 2
    # H_k: the first Hessian, or nothing, from where option 1 needs a large penalty.
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
            "rounds": TensorSpec((dimensions.nodes - 1,), torch.int64),
            "g": TensorSpec((classes, size)),
            "l": TensorSpec((classes,)),
            "triangle": TensorSpec((classes, size * (size + 1) // 2)),
            "values": TensorSpec((classes, self.rank)),
            "vectors": TensorSpec((classes, self.rank, size)),
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
            h, rounds = torch.zeros(classes, size, size), torch.full((node.hub,), NEVER)
        else:  # there is no H_k yet
            h, rounds = torch.empty(classes, 0, size), torch.tensor([NEVER])
        return Learned(h, rounds, 0, *nothing(h))

    def broadcast(self, node: Node[Learned]) -> Payload:
        return {**super().broadcast(node), "rounds": node.state.rounds}

    async def answer(self, node: Node[Learned], hub_message: Mapping[str, Tensor]) -> Payload:
        g, a = await Derivatives(node.params, node.buffers, self.penalty)
        arrived = int(hub_message["rounds"][node.id])
        if arrived == NEVER and self.start == "exact":
            self.remember(node, a, *nothing(a))
            return self.message(torch.zeros(len(a)), g=g, triangle=upper(a))
        h = self.known(node.state, arrived, a)
        values, vectors, distance = await Compress(a, h, self.rank)
        learned = self.step(values, distance) * values
        self.remember(node, h, learned, vectors)
        l_k = distance if self.norm == "frobenius" else values[:, 0].abs()
        return self.message(l_k, g=g, values=learned, vectors=vectors)

    def message(self, l_k: Tensor, **payload: Tensor) -> Payload:
        return payload if self.option == 1 else {**payload, "l": l_k}

    def known(self, own: Learned, arrived: int, a: Tensor) -> Tensor:
        """H_k as it is in the mean of the hub."""
        if arrived == NEVER:
            return torch.zeros_like(a)
        if arrived != int(own.rounds):  # the last message was lost
            return own.h
        return add_pairs(own.h, own.values, own.vectors)

    def step(self, values: Tensor, distance: Tensor) -> Tensor:
        """[C, 1] the step a of every class."""
        if self.learn == "full":
            return torch.ones(len(values), 1)
        share = values.square().sum(1) / distance.square().clamp(min=1e-30)
        return 1 - (1 - share.clamp(max=1)).sqrt()[:, None]

    def remember(self, node: Node[Learned], h: Tensor, values: Tensor, vectors: Tensor) -> None:
        rounds = torch.tensor([node.round])
        node.state = Learned(h, rounds, node.num_examples, values, vectors)

    def merge(self, node: Node[Learned], inbox: Inbox) -> None:
        if not any(message.examples for message in inbox.messages):
            return  # there is nothing to learn, and no mean to take
        h, examples = self.joined(node.state, inbox)
        x = to_rows(node.layout, node.params)
        node.params = to_vector(x - self.direction(h, inbox))
        rounds = node.state.rounds.clone()
        rounds[list(inbox.senders)] = node.round
        node.state = replace(
            node.state, h=self.learned(h, inbox, examples), rounds=rounds, examples=examples
        )

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

    def joined(self, own: Learned, inbox: Inbox) -> tuple[Tensor, int]:
        """H with the clients that are heard for the first time, and what it then stands for."""
        new = [m for m in inbox.messages if int(own.rounds[m.sender]) == NEVER]
        if not new:
            return own.h, own.examples
        examples = own.examples + sum(message.examples for message in new)
        h = own.h * (own.examples / examples)
        if self.start == "exact":
            total = torch.zeros_like(new[0].payload["triangle"])
            for m in new:
                total.add_(m.payload["triangle"], alpha=m.examples / examples)
            h += from_upper(total, h.shape[-1])
        return h, examples

    def learned(self, h: Tensor, inbox: Inbox, examples: int) -> Tensor:
        """H + a S, over the clients that have sent some."""
        old = [m for m in inbox.messages if "values" in m.payload]
        if not old:
            return h
        values = [m.payload["values"] * (m.examples / examples) for m in old]
        vectors = [m.payload["vectors"] for m in old]
        return add_pairs(h, torch.cat(values, dim=1), torch.cat(vectors, dim=1))


def nothing(h: Tensor) -> tuple[Tensor, Tensor]:
    """No eigenvalues and vectors."""
    return h.new_empty(len(h), 0), h.new_empty(len(h), 0, h.shape[-1])
