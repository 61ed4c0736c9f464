"""Members that send valid messages with harmful content, according to a plan.

In processes, the variable POISON has the plans of all members; peers that load an algorithm of this
file follow them. Within a test, `poison` changes the peers of this process.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch

from peerage import DecAvg, DecHW
from peerage.engine.router import Packet
from peerage.net.peer.exchanges import Exchanges

POISON = "PEERAGE_TEST_POISON"
ALGORITHM = f"{__file__}:Watched"
CURVED = f"{__file__}:WatchedDecHW"

# Node -> round, from 0 and as text, or "all" -> tensor -> the value of all its entries. `examples`
# is not a tensor but the claim in the envelope.
Plans = Mapping[str, Mapping[str, Mapping[str, float]]]


@dataclass(frozen=True)
class Watched(DecAvg):
    """As DecAvg; processes that load it follow the plans."""


@dataclass(frozen=True)
class WatchedDecHW(DecHW):
    """As DecHW; processes that load it follow the plans."""


@contextmanager
def poisoning(plans: Plans) -> Iterator[None]:
    """Peers that are started inside follow the plans."""
    with mock.patch.dict(os.environ, {POISON: json.dumps(plans)}):
        yield


@contextmanager
def poison(plans: Plans) -> Iterator[None]:
    """Peers of this process that run inside follow the plans."""
    with mock.patch.object(Exchanges, "_send_packet", follower(plans)):
        yield


def follower(plans: Plans) -> Any:
    send = Exchanges._send_packet

    def send_poisoned(self: Exchanges, packet: Packet, round: int, *more: Any) -> int:
        plan = plans.get(str(self.peer.me), {})
        return send(self, changed(packet, plan.get(str(round), plan.get("all", {}))), round, *more)

    return send_poisoned


def changed(packet: Packet, values: Mapping[str, float]) -> Packet:
    payload = {
        name: torch.full_like(tensor, values[name]) if name in values else tensor
        for name, tensor in packet.payload.items()
    }
    examples = int(values.get("examples", packet.examples))
    envelope = replace(packet.envelope, examples=examples)
    return replace(packet, payload=payload, envelope=envelope)


if POISON in os.environ:
    Exchanges._send_packet = follower(json.loads(os.environ[POISON]))  # type: ignore[method-assign]
