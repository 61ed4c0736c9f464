"""DecAvg; a process with the variable LIAR says that it is in that round, and sends no models."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

from peerage import DecAvg
from peerage.net.peer.responder import Responder
from peerage.net.peer.traffic import Outbox
from peerage.net.wire.header import Header, done

LIAR = "PEERAGE_TEST_LIAR"
ALGORITHM = f"{__file__}:Watched"


@dataclass(frozen=True)
class Watched(DecAvg):
    """As DecAvg; processes that load it may lie."""


@contextmanager
def lying(round: int) -> Iterator[None]:
    """Peers that are started inside lie."""
    with mock.patch.dict(os.environ, {LIAR: str(round)}):
        yield


def lie(round: int) -> None:
    """Let all peers of this process lie about their round from now on."""
    put, status = Outbox.put, Responder.status

    def put_lie(self: Outbox, header: Header, *_: Any, **__: Any) -> None:
        to = {"sender": header.sender, "recipient": header.recipient}
        put(self, done(run=header.run, round=round, sent=0, **to))

    def false_status(self: Responder, identity: int, incarnation: str) -> Any:
        return replace(status(self, identity, incarnation), round=round)

    Outbox.put, Responder.status = put_lie, false_status  # type: ignore[method-assign]


if LIAR in os.environ:
    lie(int(os.environ[LIAR]))
