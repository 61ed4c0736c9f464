"""What one peer knows about the rest of the network, from their own words."""

import asyncio
import json
import logging
import secrets
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from peerage.engine.shard import PRE_ROUND
from peerage.engine.world import World
from peerage.errors import InputError
from peerage.net.peer.network import Network, differing, settings_hash
from peerage.net.peer.progress import State, View, has_begun
from peerage.net.wire.header import Rejected
from peerage.net.wire.transport import QUERY_TIMEOUT, Transport, Unreachable

POLL_INTERVAL = 0.2  # seconds between two looks at the others
RETRY_DELAY = 1.0  # seconds until a peer that was told nothing says again that it waits, at first
REMIND = 15.0  # seconds between two words about who is missing

log = logging.getLogger("peerage.peer")


@dataclass(frozen=True)
class Status:
    """What a peer says about itself."""

    settings_hash: str  # of the experiment
    incarnation: str  # another one after every restart
    round: int
    state: str
    awaited: bool  # whether it has not begun, or began with this life of whoever asks

    @classmethod
    def parse(cls, raw: bytes) -> "Status | None":
        try:
            said = json.loads(raw)
            round, awaited = int(said["round"]), bool(said["awaited"])
            names = (str(said["settings_hash"]), str(said["incarnation"]))
            return cls(*names, round, str(said["state"]), awaited)
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return None

    @property
    def begun(self) -> bool:
        return has_begun(self.state)

    @property
    def running(self) -> bool:
        return not self.state.startswith(State.STOPPED)


class PeerTracker:
    """Who is there, in which round, and whether they do the same as this peer."""

    def __init__(
        self,
        network: Network,
        me: int,
        world: World,
        transport: Transport,
        shared_settings: Mapping[str, str],
    ) -> None:
        self.network, self.me, self.world, self.transport = network, me, world, transport
        self.shared_settings, self.settings_hash = (
            dict(shared_settings),
            settings_hash(shared_settings),
        )
        self.incarnation = secrets.token_hex(8)
        self.everybody = [peer for peer in range(world.nodes) if peer != me]
        self.rounds: dict[int, int] = {}  # peer -> the last that it was known to be in
        self.met: dict[int, str] = {}  # peers that were there before the first round, their lives
        self.awaited = True  # whether the others began with us
        self.hurried = False  # whether we began because others had, before we had met everybody
        self.finished: set[int] = set()  # peers that said that they have played all rounds
        self._talking: set[int] = set()  # those who sent messages
        self._incarnations: dict[int, str] = {}  # of those who asked, the last
        self.mismatched_peers: dict[
            int, str
        ] = {}  # peers with another experiment, and what differs

    def hear(self, peer: int, round: int) -> None:
        """A peer sent something of a round, and may be in a later one by now."""
        self._talking.add(peer)
        self._note(peer, max(round, self.rounds.get(peer, PRE_ROUND)))

    def greet(self, peer: int, incarnation: str) -> None:
        """A peer asks; after a restart it may be in an earlier round than before."""
        if self._incarnations.get(peer, incarnation) != incarnation:
            self.rounds.pop(peer, None)
            self.finished.discard(peer)
        self._incarnations[peer] = incarnation

    def _note(self, peer: int, round: int) -> None:
        self.rounds[peer] = min(round, self.world.rounds - 1)

    def view(self, round: int) -> View:
        """What is known now, for decisions of this peer about a round."""
        present, hub = self.world.faults.present, self.world.hub
        return View(
            round=round,
            rounds=dict(self.rounds),
            scheduled=frozenset(p for p in self.everybody if present(p, max(round, 0))),
            reachable=frozenset(filter(self.transport.reachable, self.everybody)),
            finished=frozenset(self.finished.intersection(self.everybody)),
            mismatched=frozenset(self.mismatched_peers),
            hub=None if hub == self.me else hub,
            ahead=self.network.ahead,
            awaited=self.awaited,
        )

    async def say_finished(self, seconds: float) -> None:
        """Tell every peer that can be reached, and has not finished, that this one has."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await asyncio.gather(*map(self._say_finished, self.everybody))

    async def _say_finished(self, peer: int) -> None:
        question = json.dumps({"ask": "finished", "incarnation": self.incarnation}).encode()
        while peer not in self.finished and self.transport.reachable(peer):
            try:
                await self.transport.ask(peer, question, QUERY_TIMEOUT)
                return
            except Unreachable:  # it may be busy: it would wait for this peer for ever
                await asyncio.sleep(POLL_INTERVAL)
            except Rejected:
                return

    async def announce(
        self, round: int, strangers: Iterable[int], open: Callable[[], Iterable[int]]
    ) -> None:
        """Tell peers again and again that this one waits for the end of their round.

        Strangers, whose listener it is not, are told at once. The others know, unless they or this
        peer were restarted since: they are told if they are still `open` after a while.
        """
        question, peers, wait = {"ask": "done", "round": round}, strangers, RETRY_DELAY
        while True:
            await asyncio.gather(*(self._answer(peer, question) for peer in peers))
            await asyncio.sleep(wait)
            peers, wait = open(), min(2 * wait, REMIND)

    async def ask(self, peers: Iterable[int] | None = None) -> dict[int, Status]:
        """What those say about themselves that answer and take part, all asked at once."""
        asked = [peer for peer in peers or self.everybody if peer not in self.mismatched_peers]
        answers = await asyncio.gather(*map(self._status, asked))
        return {p: answer for p, answer in zip(asked, answers, strict=True) if answer is not None}

    async def wait_for_start(self, seconds: float) -> None:
        """Wait until everybody is there, or patience is over; refuse another experiment."""
        now = asyncio.get_running_loop().time
        deadline, reminder = now() + seconds, now() + REMIND / 5
        missing = set(self.everybody)
        while missing and self.awaited and not self.hurried and now() < deadline:
            # Those of whom messages come have begun, and need not have when they were asked.
            for peer, status in (await self.ask(missing | self._talking)).items():
                missing.discard(peer)
                self.met[peer] = status.incarnation
                # Those who began without us do not wait, and neither do we.
                self.awaited = self.awaited and status.awaited
                # Who began with us has met everybody; one whom we did not may be gone again.
                self.hurried = self.hurried or status.begun
            missing -= self.mismatched_peers.keys()
            if missing and now() > reminder:
                reminder = now() + REMIND
                log.info("waiting for %s", self.names(missing))
            if missing and self.awaited and not self.hurried:
                await asyncio.sleep(POLL_INTERVAL)
        if len(self.mismatched_peers) > len(self.met):
            peer, what = next(iter(self.mismatched_peers.items()))
            raise InputError(
                f"{self.name(peer)} runs another experiment: {what}; give all peers the same files"
            )
        if missing and self.met and self.awaited and not self.hurried:
            log.warning("beginning without %s", self.names(missing))

    def began_with(self, peer: int, incarnation: str) -> bool:
        """Whether a peer, in this life, is one of those who began together."""
        if self.hurried:
            self.met.setdefault(peer, incarnation)
        return self.met.get(peer) == incarnation

    def name(self, peer: int) -> str:
        return self.network.members[peer].name

    def names(self, peers: Iterable[int], addresses: bool = True) -> str:
        members = [self.network.members[peer] for peer in sorted(peers)]
        known = [(member.name, f" ({member.address})" * addresses) for member in members[:5]]
        listed = ", ".join(name + address for name, address in known)
        return f"{listed} and {len(members) - 5} more" if len(members) > 5 else listed

    async def _status(self, peer: int) -> Status | None:
        """None if the peer cannot be asked, or does something else."""
        raw = await self._answer(peer, {"ask": "status", "incarnation": self.incarnation})
        status = None if raw is None else Status.parse(raw)
        if status is None:
            return None
        if status.settings_hash != self.settings_hash:
            self.mismatched_peers[peer] = await self._difference(peer)
            log.error(
                "%s runs another experiment: %s", self.name(peer), self.mismatched_peers[peer]
            )
            return None
        self._note(peer, status.round)
        return status

    async def _difference(self, peer: int) -> str:
        """What the other peer's experiment has different."""
        raw = await self._answer(peer, {"ask": "settings"})
        try:
            theirs = {str(key): str(value) for key, value in json.loads(raw or b"{}").items()}
        except (ValueError, AttributeError, RecursionError):
            theirs = {}
        keys = differing(self.shared_settings, theirs) if theirs else []
        return "; ".join(keys[:5])[:1000] or "something"

    async def _answer(self, peer: int, question: Mapping[str, Any]) -> bytes | None:
        try:
            return await self.transport.ask(peer, json.dumps(question).encode(), QUERY_TIMEOUT)
        except (Unreachable, Rejected):
            return None
