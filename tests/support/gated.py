"""DecHW in a network whose peers wait for each other's deaths and returns, however fast they are.

In its first life, a victim stops in a round and stays there until it is killed. In the round of the
meeting, all wait until every victim lives again. A simulation has no gates and waits for nothing.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import sleep
from typing import Any, ClassVar
from unittest import mock

from peerage import Compute, DecHW, Node
from peerage.work.context import LocalContext

GATES = "PEERAGE_TEST_GATES"
ALGORITHM = f"{__file__}:Gated"


@contextmanager
def gates(folder: Path, victims: Mapping[int, int], meeting: int) -> Iterator[None]:
    """The gates of all peers that are started within: victim -> round, and the round to meet in."""
    folder.mkdir()
    plan = {"folder": str(folder), "victims": dict(victims), "meeting": meeting}
    with mock.patch.dict(os.environ, {GATES: json.dumps(plan)}):
        yield


@dataclass(frozen=True)
class Authenticator(Compute[None]):
    phase: ClassVar[str] = "gate"
    node: int
    round: int

    def run(self, local: LocalContext) -> None:
        if GATES not in os.environ:
            return
        plan = json.loads(os.environ[GATES])
        folder, victims = Path(plan["folder"]), plan["victims"]
        (folder / f"{self.node} {os.getpid()}").touch()

        def lives(node: object) -> int:
            return len(list(folder.glob(f"{node} *")))

        while lives(self.node) == 1 and self.round >= victims.get(str(self.node), float("inf")):
            sleep(0.05)  # until it is killed
        while self.round >= plan["meeting"] and any(lives(victim) < 2 for victim in victims):
            sleep(0.05)


@dataclass(frozen=True)
class Gated(DecHW):
    """DecHW behind gates."""

    async def round(self, node: Node[Any]) -> None:
        await Authenticator(node.id, node.round)
        await super().round(node)
