"""What one peer answers when others ask."""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from peerage.engine.shard import BEFORE
from peerage.net.peer.endings import Endings
from peerage.net.peer.model_transfer import Offers
from peerage.net.peer.peer_tracker import Others, Status
from peerage.net.peer.progress import has_begun
from peerage.net.wire.header import Rejected


class Responder:
    """Answers questions about the state, the rounds, the experiment and the model of one peer."""

    def __init__(
        self,
        others: Others,
        endings: Endings,
        offers: Offers,
        counters: Counter[str],
        progress: Callable[[], tuple[int, str]],
    ) -> None:
        self.others, self.endings, self.offers = others, endings, offers
        self.counters = counters
        self.progress = progress  # the round and the state of this peer

    def answer(self, question: bytes, identity: int) -> bytes:
        try:
            asked = dict(json.loads(question))
        except (ValueError, TypeError, RecursionError):
            asked = {}
        if asked.get("ask") == "status":
            return json.dumps(asdict(self.status(identity, str(asked.get("life"))))).encode()
        if asked.get("ask") == "finished":
            self.others.greet(identity, str(asked.get("life")))
            self.others.finished.add(identity)
            return b"{}"
        if asked.get("ask") == "done" and self._is_round(asked.get("round")):
            self.endings.announced(identity, asked["round"])
            return b"{}"
        if asked.get("ask") == "essence":
            return json.dumps(self.others.essence).encode()
        offer = self.offers.answer(asked, identity)
        if offer is None:
            self.counters["malformed"] += 1
            raise Rejected("malformed", "the question is not one that a peer answers")
        return offer

    def status(self, identity: int, life: str) -> Status:
        """What a peer says about itself to another one, in that life of it."""
        self.others.greet(identity, life)
        round, state = self.progress()
        awaited = not has_begun(state) or self.others.began_with(identity, life)
        return Status(self.others.seal, self.others.life, round, state, awaited)

    def _is_round(self, value: Any) -> bool:
        return type(value) is int and BEFORE <= value < self.others.world.rounds
