"""A hub without data: it takes the shape of examples and the classes from its clients.

The hub of a network does not train. It needs the shape and the classes to build its model, and a
test set only if it is to evaluate it.
"""

import asyncio
import json
import logging
from collections import Counter
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch

from peerage.data import Dataset
from peerage.data.schema import Schema
from peerage.engine.world import World
from peerage.errors import InputError
from peerage.experiment import Experiment
from peerage.files import read_json
from peerage.net.peer.network import Network
from peerage.net.peer.peer_tracker import POLL_INTERVAL, REMIND
from peerage.net.peer.private_data import prepare_own
from peerage.net.wire.header import Header, Rejected
from peerage.net.wire.transport import QUERY_TIMEOUT, Receiver, Transport, Unreachable

MAX_VALUES = 1 << 26  # numbers in an example; a client that states more is not believed
MAX_AXES = 3

log = logging.getLogger("peerage.peer")


@dataclass(frozen=True)
class ExampleFacts:
    """What a model is built from: the shape of an example, and the classes."""

    shape: tuple[int, ...]
    classes: tuple[str, ...]

    @classmethod
    def of_world(cls, world: World) -> "ExampleFacts":
        return cls(tuple(world.test.example), tuple(world.classes))

    @classmethod
    def of_schema(cls, schema: Schema | None) -> "ExampleFacts | None":
        """Those of a schema that names features and classes."""
        if schema is None or not schema.feature or not schema.classes:
            return None
        return cls((len(schema.feature),), schema.classes)

    @classmethod
    def parse(cls, raw: bytes) -> "ExampleFacts | None":
        """Those that a client states; None if they cannot be true."""
        try:
            fields = json.loads(raw)
            return cls.checked(fields["shape"], fields["classes"])
        except (ValueError, KeyError, TypeError, RecursionError):
            return None

    @classmethod
    def checked(cls, shape: Any, classes: Any) -> "ExampleFacts | None":
        if not isinstance(shape, list) or not all(type(n) is int and n > 0 for n in shape):
            return None
        if not 0 < len(shape) <= MAX_AXES or prod(shape) > MAX_VALUES:
            return None
        if not isinstance(classes, list) or not all(type(name) is str for name in classes):
            return None
        return cls(tuple(shape), tuple(classes)) if classes else None

    def encode(self) -> bytes:
        return json.dumps({"shape": list(self.shape), "classes": list(self.classes)}).encode()

    def __str__(self) -> str:
        return f"examples of shape {self.shape} and {len(self.classes)} classes"


def recorded_facts(folder: Path) -> ExampleFacts | None:
    """Those with which the hub ran before, from its folder."""
    file = folder / "setup.json"
    if not file.exists():
        return None
    known = read_json(file)
    return ExampleFacts.checked(known["example"]["shape"], known["classes"])


async def ask_clients(network: Network, me: int, transport: Transport) -> ExampleFacts:
    """What most clients have; what most of those that answer have after the start timeout.

    The transport only asks: clients begin to meet the hub when it knows its model.
    """
    everyone = range(len(network.members))
    clients = [peer for peer in everyone if peer != me and network.can_talk(me, peer)]
    now = asyncio.get_running_loop().time
    deadline, reminder = now() + network.timeouts.start, now()
    while True:
        stated = await asyncio.gather(*(_ask(transport, client) for client in clients))
        known = Counter(facts for facts in stated if facts is not None)
        if known:
            facts, count = known.most_common(1)[0]
            if 2 * count > len(clients) or now() > deadline:
                return facts
        if now() >= reminder:
            reminder = now() + REMIND
            log.info("no data here: waiting for the clients to state the shape of theirs")
        await asyncio.sleep(POLL_INTERVAL)


class NotReady(Receiver):
    """Asks all callers to try again later."""

    def accept(self, raw: bytes, identity: int) -> tuple[Header, int]:
        raise Rejected("early", "the hub does not know its model yet")

    def chunk(self, header: Header, offset: int, data: bytes) -> None:
        raise Rejected("early", "the hub does not know its model yet")

    async def complete(self, header: Header) -> None:
        raise Rejected("early", "the hub does not know its model yet")

    async def answer(self, question: bytes, identity: int) -> bytes:
        raise Rejected("early", "the hub does not know its model yet")

    async def report(self) -> bytes:
        raise Rejected("early", "the hub does not know its model yet")

    async def report_of(self, name: str) -> bytes:
        raise Rejected("early", "the hub does not know its model yet")


async def _ask(transport: Transport, client: int) -> ExampleFacts | None:
    try:
        raw = await transport.ask(client, json.dumps({"ask": "data"}).encode(), QUERY_TIMEOUT)
    except (Unreachable, Rejected):
        return None
    return ExampleFacts.parse(raw)


def prepare_without_data(experiment: Experiment, me: int, facts: ExampleFacts) -> World:
    """The world of a hub without a test set, which does not evaluate its model."""
    blank = torch.zeros((2, *facts.shape)), torch.zeros(2, dtype=torch.int64)
    data = Dataset("no data", *blank, *blank, facts.classes)
    evaluation = experiment.evaluation.model_copy(update={"samples": None})
    # Zeros need not be in the ranges of a schema, and there are only two examples to draw from.
    changes = {"data_schema": None, "evaluation": evaluation}
    world = prepare_own(experiment.model_copy(update=changes), me, data)
    return replace(world, tested=False)


def check_flags(data: str | None, test: str | None) -> str | None:
    """The data set on which a hub evaluates its model; it has no use for two."""
    if data is not None and test is not None:
        raise InputError("the hub does not train, so it takes --data or --test, not both")
    return data if test is None else test
