"""What one peer knows about the rest of the network, from their own words."""

import asyncio
import json
import logging
import secrets
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from peerage.engine.shard import BEFORE
from peerage.engine.world import World
from peerage.errors import InputError
from peerage.net.peer.network import Network, differing, sealed
from peerage.net.peer.progress import State, View, has_begun
from peerage.net.wire.header import Rejected
from peerage.net.wire.transport import ASKING, Transport, Unreachable

LOOK = 0.2  # seconds between two looks at the others
AGAIN = 1.0  # seconds until a peer that was told nothing says again that it waits, at first
REMIND = 15.0  # seconds between two words about who is missing

log = logging.getLogger("peerage.peer")


@dataclass(frozen=True)
class Status:
    """What a peer says about itself."""

    seal: str  # of the experiment
    life: str  # another one after every restart
    round: int
    state: str
    awaited: bool  # whether it has not begun, or began with this life of whoever asks

    @classmethod
    def parse(cls, raw: bytes) -> "Status | None":
        try:
            said = json.loads(raw)
            round, awaited = int(said["round"]), bool(said["awaited"])
            return cls(str(said["seal"]), str(said["life"]), round, str(said["state"]), awaited)
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return None

    @property
    def begun(self) -> bool:
        return has_begun(self.state)

    @property
    def running(self) -> bool:
        return not self.state.startswith(State.STOPPED)


class Others:
    """Who is there, in which round, and whether they do the same as this peer."""

    def __init__(
        self,
        network: Network,
        me: int,
        world: World,
        transport: Transport,
        essence: Mapping[str, str],
    ) -> None:
        self.network, self.me, self.world, self.transport = network, me, world, transport
        self.essence, self.seal = dict(essence), sealed(essence)
        self.life = secrets.token_hex(8)
        self.everybody = [peer for peer in range(world.nodes) if peer != me]
        self.rounds: dict[int, int] = {}  # peer -> the last that it was known to be in
        self.met: dict[int, str] = {}  # peers that were there before the first round, their lives
        self.awaited = True  # whether the others began with us
        self.hurried = False  # whether we began because others had, before we had met everybody
        self.finished: set[int] = set()  # peers that said that they have played all rounds
        self._talking: set[int] = set()  # those who sent messages
        self._lives: dict[int, str] = {}  # of those who asked, the last
        self.strange: dict[int, str] = {}  # peers with another experiment, and what differs

    def hear(self, peer: int, round: int) -> None:
        """A peer sent something of a round, and may be in a later one by now."""
        self._talking.add(peer)
        self._note(peer, max(round, self.rounds.get(peer, BEFORE)))

    def greet(self, peer: int, life: str) -> None:
        """A peer asks; after a restart it may be in an earlier round than before."""
        if self._lives.get(peer, life) != life:
            self.rounds.pop(peer, None)
            self.finished.discard(peer)
        self._lives[peer] = life

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
            mismatched=frozenset(self.strange),
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
        question = json.dumps({"ask": "finished", "life": self.life}).encode()
        while peer not in self.finished and self.transport.reachable(peer):
            try:
                await self.transport.ask(peer, question, ASKING)
                return
            except Unreachable:  # it may be busy: it would wait for this peer for ever
                await asyncio.sleep(LOOK)
            except Rejected:
                return

    async def announce(
        self, round: int, strangers: Iterable[int], open: Callable[[], Iterable[int]]
    ) -> None:
        """Tell peers again and again that this one waits for the end of their round.

        Strangers, whose listener it is not, are told at once. The others know, unless they or this
        peer were restarted since: they are told if they are still `open` after a while.
        """
        question, peers, wait = {"ask": "done", "round": round}, strangers, AGAIN
        while True:
            await asyncio.gather(*(self._answer(peer, question) for peer in peers))
            await asyncio.sleep(wait)
            peers, wait = open(), min(2 * wait, REMIND)

    async def ask(self, peers: Iterable[int] | None = None) -> dict[int, Status]:
        """What those say about themselves that answer and take part, all asked at once."""
        asked = [peer for peer in peers or self.everybody if peer not in self.strange]
        answers = await asyncio.gather(*map(self._status, asked))
        return {p: answer for p, answer in zip(asked, answers, strict=True) if answer is not None}

    async def meet(self, seconds: float) -> None:
        """Wait until everybody is there, or patience is over; refuse another experiment."""
        now = asyncio.get_running_loop().time
        deadline, reminder = now() + seconds, now() + REMIND / 5
        missing = set(self.everybody)
        while missing and self.awaited and not self.hurried and now() < deadline:
            # Those of whom messages come have begun, and need not have when they were asked.
            for peer, status in (await self.ask(missing | self._talking)).items():
                missing.discard(peer)
                self.met[peer] = status.life
                # Those who began without us do not wait, and neither do we.
                self.awaited = self.awaited and status.awaited
                # Who began with us has met everybody; one whom we did not may be gone again.
                self.hurried = self.hurried or status.begun
            missing -= self.strange.keys()
            if missing and now() > reminder:
                reminder = now() + REMIND
                log.info("waiting for %s", self.names(missing))
            if missing and self.awaited and not self.hurried:
                await asyncio.sleep(LOOK)
        if len(self.strange) > len(self.met):
            peer, what = next(iter(self.strange.items()))
            raise InputError(
                f"{self.name(peer)} runs another experiment: {what}; give all peers the same files"
            )
        if missing and self.met and self.awaited and not self.hurried:
            log.warning("beginning without %s", self.names(missing))

    def began_with(self, peer: int, life: str) -> bool:
        """Whether a peer, in this life, is one of those who began together."""
        if self.hurried:
            self.met.setdefault(peer, life)
        return self.met.get(peer) == life

    def name(self, peer: int) -> str:
        return self.network.members[peer].name

    def names(self, peers: Iterable[int], addresses: bool = True) -> str:
        members = [self.network.members[peer] for peer in sorted(peers)]
        known = [(member.name, f" ({member.address})" * addresses) for member in members[:5]]
        listed = ", ".join(name + address for name, address in known)
        return f"{listed} and {len(members) - 5} more" if len(members) > 5 else listed

    async def _status(self, peer: int) -> Status | None:
        """None if the peer cannot be asked, or does something else."""
        raw = await self._answer(peer, {"ask": "status", "life": self.life})
        status = None if raw is None else Status.parse(raw)
        if status is None:
            return None
        if status.seal != self.seal:
            self.strange[peer] = await self._difference(peer)
            log.error("%s runs another experiment: %s", self.name(peer), self.strange[peer])
            return None
        self._note(peer, status.round)
        return status

    async def _difference(self, peer: int) -> str:
        """What the other peer's experiment has different."""
        raw = await self._answer(peer, {"ask": "essence"})
        try:
            theirs = {str(key): str(value) for key, value in json.loads(raw or b"{}").items()}
        except (ValueError, AttributeError, RecursionError):
            theirs = {}
        keys = differing(self.essence, theirs) if theirs else []
        return "; ".join(keys[:5])[:1000] or "something"

    async def _answer(self, peer: int, question: Mapping[str, Any]) -> bytes | None:
        try:
            return await self.transport.ask(peer, json.dumps(question).encode(), ASKING)
        except (Unreachable, Rejected):
            return None
