"""Tells the other peers that this one has finished, also those that were just lost."""

import asyncio
import json
import logging
from contextlib import suppress
from itertools import count
from time import monotonic

from peerage.net.peer.peer_tracker import POLL_INTERVAL, PeerTracker
from peerage.net.wire.header import Rejected
from peerage.net.wire.transport import QUERY_TIMEOUT, Unreachable
from peerage.requests import PRE_ROUND

FEW_ATTEMPTS = 3  # to tell a distant member

log = logging.getLogger("peerage.peer")


class FinishNotice:
    """Untold, a slower peer would wait for this one until its timeout `alone`."""

    def __init__(self, tracker: PeerTracker) -> None:
        self.tracker = tracker
        self._told: dict[int, str] = {}  # peer -> its incarnation

    async def tell(self, seconds: float) -> None:
        """Tell every reachable, unfinished peer."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await asyncio.gather(*map(self._tell, self.tracker.other_peers))

    async def wait_for_lost(self, seconds: float) -> None:
        """Stay until the peers that were lost less than `seconds` ago are back, and tell them.

        They may just restart. It stays no longer than `seconds`.
        """
        lost = self._untold(since=monotonic() - seconds)
        if lost:
            log.info("finished; staying up to %g s for %s", seconds, self.tracker.names(lost))
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while lost := lost & self._untold():
                    await asyncio.gather(*map(self._tell, lost))
                    await asyncio.sleep(POLL_INTERVAL)

    def _untold(self, since: float = 0.0) -> frozenset[int]:
        """The members that do not know, and were in contact after this time.

        Those that have reached the last round are not meant: they may have finished and left.
        """
        tracker = self.tracker
        last, refused = tracker.world.rounds - 1, tracker.refused_peers()
        return frozenset(
            peer
            for peer, seen in tracker.last_contact.items()
            if seen > since
            and tracker.world.is_present(peer, last)
            and tracker.rounds.get(peer, PRE_ROUND) < tracker.world.steps - 1
            and peer not in tracker.finished | refused
            and self._told.get(peer) != tracker.incarnations.get(peer, "")
        )

    async def _tell(self, peer: int) -> None:
        tracker = self.tracker
        question = json.dumps({"ask": "finished", "incarnation": tracker.incarnation}).encode()
        # A distant member that has failed counts as in contact for long, so it is tried less often.
        attempts = range(FEW_ATTEMPTS) if peer in tracker.contacts.distant else count()
        for _ in attempts:
            if peer in tracker.finished or peer not in tracker.reachable_peers():
                return
            incarnation = tracker.incarnations.get(peer, "")
            try:
                async with tracker.contacts.connection(peer):
                    if peer not in tracker.finished:  # it may have told this peer meanwhile
                        await tracker.transport.ask(peer, question, QUERY_TIMEOUT)
                self._told[peer] = incarnation
                return
            except Unreachable:  # perhaps only busy
                await asyncio.sleep(POLL_INTERVAL)
            except Rejected:  # it does not want to know
                self._told[peer] = incarnation
                return
