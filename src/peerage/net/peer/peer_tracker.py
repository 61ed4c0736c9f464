"""Tracks the round and state of every other peer, as they report them."""

import asyncio
import json
import logging
import secrets
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from time import monotonic
from typing import Any

from peerage.engine.world import World
from peerage.errors import InputError
from peerage.net.peer.contacts import Contacts, near_members
from peerage.net.peer.network import Network, differing, remedy_for, settings_hash, unrevised
from peerage.net.peer.progress import State, View
from peerage.net.peer.reported_status import Status, unreachable_in
from peerage.net.peer.versions import REMEDY, Versions
from peerage.net.wire.header import Rejected, escaped
from peerage.net.wire.notices import Notices
from peerage.net.wire.server import short
from peerage.net.wire.transport import QUERY_TIMEOUT, CallerRefused, Transport, Unreachable
from peerage.requests import PRE_ROUND

POLL_INTERVAL = 0.2  # seconds between two status queries
RETRY_DELAY = 1.0  # seconds until a peer first repeats that it waits; doubles each time
REMIND = 15.0  # seconds between two log lines about missing peers

log = logging.getLogger("peerage.peer")


class PeerTracker:
    """Knows which peers are there, in which round, and whether they run the same experiment."""

    def __init__(
        self,
        network: Network,
        me: int,
        world: World,
        transport: Transport,
        shared_settings: Mapping[str, str],
    ) -> None:
        self.me, self.transport = me, transport
        self.members = network.members  # of the newest revision that is known
        self.incarnation = secrets.token_hex(8)
        self.versions = Versions.here()
        self.rounds: dict[int, int] = {}  # peer -> the round in which it was last seen
        self.present_at_start: dict[int, str] = {}  # peer -> its incarnation before round 1
        self.awaited = True  # whether the others began together with this peer
        self.started_early = False  # whether it did not wait for all, as another peer had begun
        self.finished: set[int] = set()  # peers that reported that they have run all rounds
        self.last_contact: dict[int, float] = {}  # peer -> when this one was last in contact
        # Peers with another experiment or version -> what they run, and what to do.
        self.mismatched_peers: dict[int, str] = {}
        self._remedies: dict[int, str] = {}
        self._cautioned: set[int] = set()  # peers whose other version of torch was logged
        self._revisions: dict[int, int] = {}  # peers with another revision, as it was logged
        self.banned_peers: set[int] = set()  # peers whose messages made rounds fail
        self._senders: set[int] = set()  # peers that have sent messages
        self.incarnations: dict[int, str] = {}  # peers that asked -> latest incarnation
        # Peers that asked -> their incarnation, and since when it asks.
        self._asked_since: dict[int, tuple[str, float]] = {}
        self.out_of_reach: dict[int, str] = {}  # peers that cannot reach this one -> why
        self.refusals: dict[int, str] = {}  # peers that reject this one's certificate -> why
        self._revoked: frozenset[int] = frozenset()  # as it was logged
        self._notices = Notices(log)
        self._compared: set[int] = set()  # peers that run the same experiment and version
        self._meeting = False  # whether it waits for the others to start
        self._keeping: asyncio.Task[None] | None = None  # contact with distant members
        self.contacts = Contacts(me, transport)
        self.use(network, world, shared_settings)

    def use(self, network: Network, world: World, shared_settings: Mapping[str, str]) -> None:
        """Use this network file, at the beginning or instead of a lower revision."""
        self.network, self.world = network, world
        self.shared_settings = dict(shared_settings)
        self.settings_hash = settings_hash(shared_settings)
        # Those that this one can exchange messages with; two that dial out never need each other.
        self.other_peers = [
            peer
            for peer in range(world.nodes)
            if peer != self.me and network.can_talk(self.me, peer)
        ]
        near = near_members(self.me, world, network)
        self.contacts.use(self.other_peers, near, world.nodes, network.timeouts.idle)
        self._compared.clear()
        self.finished.clear()  # a revision may have more rounds
        self._revisions.clear()

    def note_message(self, peer: int, round: int) -> None:
        """Note that a peer sent a message of a round; it may be in a later one by now."""
        self._senders.add(peer)
        self._note_life(peer)
        self._note(peer, max(round, self.rounds.get(peer, PRE_ROUND)))

    def note_incarnation(self, peer: int, incarnation: str) -> None:
        """Note the incarnation of a peer that asks; a restarted one may be in an earlier round."""
        if self.incarnations.get(peer, incarnation) != incarnation:
            self.rounds.pop(peer, None)
            self.finished.discard(peer)
            self._compared.discard(peer)
        self.incarnations[peer] = incarnation
        self._note_life(peer)

    def note_question(self, peer: int, status: Status | None) -> None:
        """Note the status that a peer gave with its question, so that this one need not ask too.

        Where anything differs, this peer asks, as it then learns what.
        """
        if status is None or status.versions is None or status.begun:
            return
        versions = self.versions.refusal(status.versions), self.versions.caution(status.versions)
        if versions == (None, None) and status.settings_hash == self.settings_hash:
            self._compared.add(peer)
            self._note_life(peer)
            if self._meeting:
                self._meet(peer, status)

    def _note_life(self, peer: int) -> None:
        """Note a sign of life; it counts once the peer is known to run the same experiment."""
        if peer in self._compared:
            self.contacts.note(peer)

    def failure_to_reach(self, peer: int) -> str | None:
        """Why a peer that asks this one cannot be reached, if it cannot; logged once per reason.

        A peer listens before it asks. So only attempts count that began after its first question.
        """
        if peer in self.contacts.distant:  # there is no connection to it
            return None
        incarnation = self.incarnations.get(peer, "")
        if peer not in self._asked_since or self._asked_since[peer][0] != incarnation:
            self._asked_since[peer] = incarnation, asyncio.get_running_loop().time()
        failure = self.transport.failure(peer, self._asked_since[peer][1])
        if failure is None:
            self._notices.settle(self.name(peer))
        else:
            text = f"cannot reach {self.names([peer])}, which asks this peer: {failure}; "
            text += (
                "check the log of that peer"
                if peer in self.network.dialling
                else "check its --bind and its firewall"
            )
            self._notices.warn(self.name(peer), failure, text)
        return failure

    def _note_reach(self, peer: int, failure: str | None) -> None:
        """Note whether a peer can reach this one, as it says."""
        key = f"{self.name(peer)} to this peer"
        if failure is None:
            self.out_of_reach.pop(peer, None)
            self._notices.settle(key)
            return
        self.out_of_reach[peer] = failure
        own = self.network.members[self.me]
        where, remedy = f" at {own.address}", "check --bind and the firewall"
        if own.dials_out:
            where, remedy = "", "check that this machine may connect to that peer for long"
        text = f"{self.name(peer)} cannot reach this peer{where}: {short(failure)}; {remedy}"
        self._notices.warn(key, failure, text)

    def _note(self, peer: int, round: int) -> None:
        self.rounds[peer] = min(round, self.world.steps - 1)

    def view(self, round: int) -> View:
        """What is known now, for this peer's decisions about a round."""
        hub = self.world.hub
        reachable = self.reachable_peers()
        return View(
            round=round,
            rounds=dict(self.rounds),
            scheduled=self._scheduled(round, reachable),
            reachable=reachable,
            finished=frozenset(self.finished.intersection(self.other_peers)),
            refused=self.refused_peers(),
            hub=None if hub == self.me else hub,
            ahead=self.network.ahead,
            awaited=self.awaited,
            present=self.world.is_present(self.me, round),
            quorum=self.network.quorum,
        )

    def refused_peers(self) -> frozenset[int]:
        """The peers that are neither waited for nor counted, whatever the schedule says."""
        return self.revoked_peers() | self.banned_peers | self.mismatched_peers.keys()

    def revoked_peers(self) -> frozenset[int]:
        """The other peers whose certificates were revoked; logs once when that changes."""
        before, self._revoked = self._revoked, self.transport.revoked() - {self.me}
        for peer in sorted(self._revoked - before):
            log.warning(
                "the certificate of %s was revoked; it is neither waited for nor counted until it "
                "has a new one",
                self.name(peer),
            )
        for peer in sorted(before - self._revoked):
            log.info("%s has a new certificate, and counts again", self.name(peer))
        return self._revoked

    def reachable_peers(self) -> frozenset[int]:
        """The peers that this one is in contact with."""
        found = self.contacts.look(self.finished)
        self.last_contact.update(dict.fromkeys(found, monotonic()))
        return found

    def _scheduled(self, round: int, reachable: frozenset[int]) -> frozenset[int]:
        """The other peers that take part in the round.

        Without those that left by schedule while this peer was down: it would wait for ever.
        """
        latest = max([round, *(self.rounds[p] for p in reachable if p in self.rounds)])
        left = self.world.faults.left
        return frozenset(
            peer
            for peer in self.other_peers
            if self.world.is_present(peer, round)
            and (peer in reachable or left.get(peer, latest + 2) > latest + 1)
        )

    def close(self) -> None:
        """Ask distant members no more."""
        if self._keeping is not None:
            self._keeping.cancel()

    async def announce(
        self, round: int, uninformed: Iterable[int], pending: Callable[[], Iterable[int]]
    ) -> None:
        """Tell peers repeatedly that this one waits for the end of their round.

        `uninformed` are the peers that do not have this one as an out-neighbour; they are told at
        once. The others know, unless they or this peer restarted: they are told if they are still
        `pending` after a while.
        """
        question, peers, wait = {"ask": "done", "round": round}, uninformed, RETRY_DELAY
        while True:
            await asyncio.gather(*(self._announce(peer, question) for peer in peers))
            await asyncio.sleep(wait)
            peers, wait = pending(), min(2 * wait, REMIND)

    async def _announce(self, peer: int, question: Mapping[str, Any]) -> None:
        raw = await self._answer(peer, question)
        if raw is not None:
            with suppress(ValueError, RecursionError):
                self._note_reach(peer, unreachable_in(json.loads(raw)))

    async def ask(self, peers: Iterable[int] | None = None) -> dict[int, Status]:
        """Ask peers for their status in parallel; returns those that answer and take part."""
        refused = self.revoked_peers() | self.mismatched_peers.keys()
        wanted = self.other_peers if peers is None else peers
        asked = [peer for peer in wanted if peer not in refused]
        answers = await asyncio.gather(*map(self._status, asked))
        return {p: answer for p, answer in zip(asked, answers, strict=True) if answer is not None}

    async def wait_for_start(self, seconds: float, first: int = 0) -> None:
        """Wait until all peers are there, or the time is over; `first` is the round to run next.

        A peer that asked this one and no longer answers was there and has left: it is not waited
        for. A restarted peer waits for a quorum, and only briefly for the rest: they may have
        finished or failed long ago. Raises InputError if most of them run another experiment or
        version, and at once if most of them reject the certificate of this peer. A single peer
        might lie, so it is only logged.
        """
        self._meeting = True
        self._keeping = asyncio.create_task(self._keep_contact())
        try:
            await self._wait_for_start(seconds, first)
        finally:
            self._meeting = False

    async def _wait_for_start(self, seconds: float, first: int) -> None:
        now = asyncio.get_running_loop().time
        deadline, reminder = now() + seconds, now() + REMIND / 5
        briefly = now() + min(seconds, self.network.timeouts.idle)

        def time_is_over() -> bool:
            if first >= self.world.steps:  # it has finished, and waits for no other peer
                return now() >= briefly
            met = first > 0 and now() >= briefly and self._has_quorum(first)
            return met or now() >= deadline

        left = self.world.faults.left
        missing = {peer for peer in self.other_peers if left.get(peer, first + 2) > first + 1}
        distant = set(self.contacts.distant)
        silent: dict[int, float] = {}  # peers that asked and do not answer -> since when
        while missing and self.awaited and not self.started_early and not time_is_over():
            # Senders are asked again: they have begun, perhaps after their last answer.
            # Distant members are asked in the background, or ask this peer.
            await self.ask((missing - distant) | self._senders)
            self._check_refusals()
            missing -= self.present_at_start.keys() | self.mismatched_peers.keys()
            missing -= self.revoked_peers()
            for peer in missing.intersection(self.incarnations):
                if now() > silent.setdefault(peer, now()) + self.network.timeouts.idle:
                    missing.discard(peer)
                    self.present_at_start[peer] = self.incarnations[peer]
                    log.warning("%s has left before the start", self.name(peer))
            if missing and now() > reminder:
                reminder = now() + REMIND
                log.info("waiting for %s to start", self.names(missing))
            if missing and self.awaited and not self.started_early:
                await asyncio.sleep(POLL_INTERVAL)
        self.check_experiment()
        if missing and self.present_at_start and self.awaited and not self.started_early:
            log.warning("starting without %s", self.names(missing))

    def _meet(self, peer: int, status: Status) -> None:
        """Note that a peer with the same experiment is there before this one begins."""
        self.present_at_start[peer] = status.incarnation
        # If another peer began without this one, neither waits for the other.
        self.awaited = self.awaited and status.awaited
        # A peer that has begun no longer waits; any still missing may have left.
        self.started_early = self.started_early or status.begun

    async def _keep_contact(self) -> None:
        """Ask distant members now and then, few at once."""
        while True:
            if self.contacts.distant:  # a revision may bring some
                self.reachable_peers()  # notes whether a near member was lost
                due = self.contacts.due(self.finished | self.mismatched_peers.keys())
                await asyncio.gather(*map(self._status, due))
            await asyncio.sleep(POLL_INTERVAL)

    def _has_quorum(self, round: int) -> bool:
        """Whether the peers that answered before the start form a quorum with this one."""
        return replace(self.view(round), reachable=frozenset(self.present_at_start)).may_run()

    def check_experiment(self) -> None:
        """Raise InputError if more peers run another experiment than are known to run this one.

        A client can do nothing without its hub, so for it the hub alone decides.
        """
        agreeing = (self.present_at_start.keys() | self._senders) - self.mismatched_peers.keys()
        hub = self.world.hub
        no_hub = hub in self.mismatched_peers
        if no_hub or len(self.mismatched_peers) > len(agreeing):
            peer = hub if no_hub and hub is not None else next(iter(self.mismatched_peers))
            other = self.mismatched_peers[peer]
            raise InputError(f"{self.name(peer)} runs {other}; {self._remedies[peer]}")

    def _check_refusals(self) -> None:
        """Raise InputError if most peers reject this one.

        A new member waits instead: the others may not have the new network file yet.
        """
        if self.network.added_by_revision(self.me):
            return
        if 2 * len(self.refusals) > len(self.other_peers):
            verb = "rejects" if len(self.refusals) == 1 else "reject"
            names = self.names(self.refusals, addresses=False)
            reason = next(iter(self.refusals.values()))
            raise InputError(f"{names} {verb} this peer: {reason}")

    def began_with(self, peer: int, incarnation: str) -> bool:
        """Whether this incarnation of a peer began together with this peer."""
        if self.started_early:
            self.present_at_start.setdefault(peer, incarnation)
        return self.present_at_start.get(peer) == incarnation

    def name(self, peer: int) -> str:
        return self.members[peer].name

    def names(self, peers: Iterable[int], addresses: bool = True) -> str:
        members = [self.members[peer] for peer in sorted(peers)]
        listed = ", ".join(m.name + f" ({m.place})" * addresses for m in members[:5])
        return f"{listed} and {len(members) - 5} more" if len(members) > 5 else listed

    async def _status(self, peer: int) -> Status | None:
        """The status of a peer; None if it does not answer, or runs another experiment."""
        question: dict[str, Any] = {"ask": "status", "incarnation": self.incarnation}
        if self._meeting:
            question["status"] = asdict(self._own_status())
        raw = await self._answer(peer, question)
        status = None if raw is None else Status.parse(raw)
        if status is None:
            return None
        other = await self._mismatch(peer, status)
        if other is not None:
            self.mismatched_peers[peer] = other
            log.error("ignoring %s, which runs %s", self.name(peer), other)
            return None
        caution = self.versions.caution(status.versions)
        if caution is not None and peer not in self._cautioned:
            self._cautioned.add(peer)
            log.warning("%s runs %s: last digits may differ", self.name(peer), caution)
        self._compared.add(peer)
        self._note_life(peer)
        self._note(peer, status.round)
        if status.state == State.FINISHED:
            self.finished.add(peer)
        self._note_reach(peer, status.unreachable)
        if self._meeting:
            self._meet(peer, status)
        return status

    def _own_status(self) -> Status:
        """What this peer states about itself while it waits for the others to start."""
        known = (self.settings_hash, self.incarnation, PRE_ROUND, State.MEETING, True)
        return Status(*known, self.versions, None, self.network.revision)

    async def _mismatch(self, peer: int, status: Status) -> str | None:
        """Which other version or experiment a peer runs; None if it can take part."""
        refusal = self.versions.refusal(status.versions)
        if refusal is not None:  # settings of another version may differ for that reason alone
            self._remedies[peer] = REMEDY
            return refusal
        if status.settings_hash == self.settings_hash:
            return None
        if status.revision != self.network.revision:
            return await self._other_revision(peer, status.revision)
        return f"another experiment: {await self._difference(peer)}"

    async def _other_revision(self, peer: int, revision: int) -> str | None:
        """As `_mismatch`, for a peer with another revision of the network file.

        Settings that revisions may change are not compared. Each revision is asked for once.
        """
        if self._revisions.get(peer) == revision:
            return None
        theirs = await self._their_settings(peer)
        keys = differing(unrevised(self.shared_settings), unrevised(theirs)) if theirs else []
        if keys:
            return f"another experiment: {self._describe(peer, theirs, keys)}"
        self._revisions[peer] = revision
        own, name = self.network.revision, self.name(peer)
        text = f"{name} has revision {revision} of the network file, this peer {own}; "
        self._notices.warn(f"{name} revision", "revision", text + "give all the newest one")
        return None

    async def _difference(self, peer: int) -> str:
        """How the other peer's experiment differs."""
        theirs = await self._their_settings(peer)
        keys = differing(self.shared_settings, theirs) if theirs else []
        return self._describe(peer, theirs, keys)

    async def _their_settings(self, peer: int) -> dict[str, str]:
        """The shared settings of another peer; empty if it does not say."""
        raw = await self._answer(peer, {"ask": "settings"})
        try:
            return {str(key): str(value) for key, value in json.loads(raw or b"{}").items()}
        except (ValueError, AttributeError, RecursionError):
            return {}

    def _describe(self, peer: int, theirs: Mapping[str, str], keys: list[str]) -> str:
        """The differences in words; remembers what to do about them."""
        self._remedies[peer] = remedy_for(self.shared_settings, theirs)
        return escaped("; ".join(keys[:5]), 1000) or "unknown difference"

    async def _answer(self, peer: int, question: Mapping[str, Any]) -> bytes | None:
        try:
            async with self.contacts.connection(peer):
                raw = await self.transport.ask(peer, json.dumps(question).encode(), QUERY_TIMEOUT)
            self.refusals.pop(peer, None)
            return raw
        except CallerRefused as error:
            self.refusals[peer] = error.details
            text = f"{self.name(peer)} rejects this peer: {error.details}"
            self._notices.warn(f"{self.name(peer)} rejects", error.details, text)
            return None
        except (Unreachable, Rejected):
            return None
