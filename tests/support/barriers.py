"""DecHW whose peers wait until some of them were killed and restarted, however fast they are.

After its first start, a victim stops in its round until it is killed. In the round of the barrier,
all peers wait until every victim has restarted. A simulation has no barriers and does not wait.
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

BARRIERS = "PEERAGE_TEST_BARRIERS"
ALGORITHM = f"{__file__}:BarrierDecHW"


@contextmanager
def barriers(folder: Path, victims: Mapping[int, int], barrier: int) -> Iterator[None]:
    """For peers started inside: victim -> round in which it stops, and the round of the barrier."""
    folder.mkdir()
    plan = {"folder": str(folder), "victims": dict(victims), "barrier": barrier}
    with mock.patch.dict(os.environ, {BARRIERS: json.dumps(plan)}):
        yield


@dataclass(frozen=True)
class WaitAtBarrier(Compute[None]):
    phase: ClassVar[str] = "barrier"
    node: int
    round: int

    def run(self, local: LocalContext) -> None:
        if BARRIERS not in os.environ:
            return
        plan = json.loads(os.environ[BARRIERS])
        folder, victims = Path(plan["folder"]), plan["victims"]
        (folder / f"{self.node} {os.getpid()}").touch()

        def starts(node: object) -> int:
            return len(list(folder.glob(f"{node} *")))

        while starts(self.node) == 1 and self.round >= victims.get(str(self.node), float("inf")):
            sleep(0.05)  # until it is killed
        while self.round >= plan["barrier"] and any(starts(victim) < 2 for victim in victims):
            sleep(0.05)


@dataclass(frozen=True)
class BarrierDecHW(DecHW):
    """DecHW that waits at the barriers before every round."""

    async def round(self, node: Node[Any]) -> None:
        await WaitAtBarrier(node.id, node.round)
        await super().round(node)
