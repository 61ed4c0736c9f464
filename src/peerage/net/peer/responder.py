"""Answers the questions of other peers."""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from peerage.net.peer.endings import Endings
from peerage.net.peer.hub_data import ExampleFacts
from peerage.net.peer.model_transfer import ModelServer
from peerage.net.peer.peer_tracker import PeerTracker
from peerage.net.peer.progress import has_begun
from peerage.net.peer.reported_status import Status
from peerage.net.wire.header import Rejected
from peerage.requests import PRE_ROUND


class Responder:
    """Answers questions about the state, rounds, experiment, shapes and model of one peer."""

    def __init__(
        self,
        tracker: PeerTracker,
        endings: Endings,
        model_server: ModelServer,
        counters: Counter[str],
        progress: Callable[[], tuple[int, str]],
    ) -> None:
        self.tracker, self.endings, self.model_server = tracker, endings, model_server
        self.counters = counters
        self.progress = progress  # the round and the state of this peer

    def answer(self, question: bytes, identity: int) -> bytes:
        try:
            asked = dict(json.loads(question))
        except (ValueError, TypeError, RecursionError):
            asked = {}
        if asked.get("ask") == "status":
            answer = asdict(self.status(identity, str(asked.get("incarnation"))))
            self.tracker.note_question(identity, Status.of_fields(asked.get("status")))
            return json.dumps(answer).encode()
        if asked.get("ask") == "finished":
            self.tracker.note_incarnation(identity, str(asked.get("incarnation")))
            self.tracker.finished.add(identity)
            return b"{}"
        if asked.get("ask") == "done" and self._is_round(asked.get("round")):
            self.endings.announced(identity, asked["round"])
            failure = self.tracker.failure_to_reach(identity)
            return json.dumps({} if failure is None else {"unreachable": failure}).encode()
        if asked.get("ask") == "data":
            return ExampleFacts.of_world(self.tracker.world).encode()
        if asked.get("ask") == "settings":
            return json.dumps(self.tracker.shared_settings).encode()
        offer = self.model_server.answer(asked, identity)
        if offer is None:
            self.counters["malformed"] += 1
            raise Rejected("malformed", "unknown question")
        return offer

    def status(self, identity: int, incarnation: str) -> Status:
        """The status of this peer, for this incarnation of another one."""
        self.tracker.note_incarnation(identity, incarnation)
        round, state = self.progress()
        awaited = not has_begun(state) or self.tracker.began_with(identity, incarnation)
        tracker = self.tracker
        known = (tracker.settings_hash, tracker.incarnation)
        unreachable = tracker.failure_to_reach(identity)
        revision = tracker.network.revision
        return Status(*known, round, state, awaited, tracker.versions, unreachable, revision)

    def _is_round(self, value: Any) -> bool:
        return type(value) is int and PRE_ROUND <= value < self.tracker.world.steps
