"""One peer: runs a node with its own data and exchanges messages with other peers.

The simulator's `Shard` trains, aggregates, evaluates and saves. A network that loses no message
therefore ends with the same bits as a simulation. A peer resumes, waits for the others, catches up
and runs its rounds. `progress` decides which peers it waits for and which rounds it skips,
`synchroniser` waits and asks, `recorder` writes its files, and `responder` answers other peers.
"""

import asyncio
import json
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any

from torch import Tensor

from peerage.engine.router import Packet, ShardOutput, check_combined, check_finite
from peerage.engine.shard import InProcessStore, Shard, ShardReport
from peerage.engine.world import World, constants_of
from peerage.errors import DiskError, Diverged, InputError, PeerageError, TooManyOpenFiles
from peerage.graphs.faults import LinkFaults
from peerage.net.peer.account import ACCOUNT, EpsilonReached, PrivacyAccount
from peerage.net.peer.assembler import MessageAssembler
from peerage.net.peer.deadlines import Deadlines
from peerage.net.peer.endings import Endings
from peerage.net.peer.mailbox import Mailbox
from peerage.net.peer.model_transfer import ModelClient, ModelServer
from peerage.net.peer.network import Network, check_rejoin
from peerage.net.peer.peer_tracker import POLL_INTERVAL, PeerTracker
from peerage.net.peer.progress import State, final_state
from peerage.net.peer.quarantine import Quarantine
from peerage.net.peer.recorder import PeerRecorder
from peerage.net.peer.report import report_on
from peerage.net.peer.responder import Responder
from peerage.net.peer.revisions import Revisions, RevisionSource
from peerage.net.peer.synchroniser import Synchroniser
from peerage.net.peer.traffic import Outbox, SentBytes, message_policy
from peerage.net.wire.header import DATA, Header
from peerage.net.wire.payload import encode
from peerage.net.wire.transport import Receiver, Transport
from peerage.privacy import RELEASE_COUNT
from peerage.records.rows import Row
from peerage.requests import PRE_ROUND
from peerage.runs.kept_models import Keep
from peerage.runs.privacy_plan import planned_messages, privacy_plan

WRITE_DELAY = 1.0  # seconds until a file is written again if too many files are open
MAILBOX_BYTES = 1 << 28  # bytes of messages in the mailbox; more if four messages need it

log = logging.getLogger("peerage.peer")


class Peer(Receiver):
    """Runs the rounds of one node."""

    def __init__(
        self,
        network: Network,
        me: int,
        world: World,
        transport: Transport,
        folder: Path | None = None,
        *,
        executor: Executor | None = None,
        rejoin: str | None = None,
        account: PrivacyAccount | None = None,
        notes: Sequence[str] = (),
        keep: Keep = Keep(),
        revisions: RevisionSource | None = None,
    ) -> None:
        check_rejoin(rejoin or "own")
        if account is None:
            path = None if folder is None else folder / ACCOUNT
            account = PrivacyAccount(
                path, network.run, network.members[me].name, world.noise_of(me)
            )
        # The model to continue with after missed rounds, own or neighbour. By default a new member
        # begins with that of a neighbour: its own would be far behind those of the others.
        self.rejoin = rejoin or "own"
        self._adopts_first = (rejoin or "neighbour") == "neighbour" and network.added_by_revision(
            me
        )
        self.notes = notes  # lines to log at the start
        self.network, self.me, self.transport = network, me, transport
        self.world = world
        self.executor = executor
        self.shard = Shard(self.world, [me], InProcessStore())
        self.expected = message_policy(network, me, self.world)
        self.evaluated_rounds = world.experiment.evaluation.evaluated_rounds(world.rounds)
        self.counters: Counter[str] = Counter()  # errors by reason
        self.recorder = PeerRecorder(
            folder, me, self.shard, transport, self.counters, account, keep
        )
        share = 4 * self.expected.max_bytes
        self.mailbox = Mailbox(network.ahead, max(MAILBOX_BYTES, share), share, self.counters)
        settings = shared_settings_of(network, world)
        self.tracker = PeerTracker(network, me, world, transport, settings)
        self.deadlines = Deadlines(network.timeouts.message)
        self.assembler = MessageAssembler(
            self.expected, self.mailbox, self.counters, self._note_header
        )
        self.model_server = ModelServer(network.run, world.models_at_hub and me == world.hub)
        # Of a client whose hub keeps the model.
        owner = world.model_owner(me)
        self.model_client = (
            None if owner == me or folder is None else ModelClient(owner, self.recorder, transport)
        )
        self.quarantine = Quarantine()
        self.round = PRE_ROUND  # the current round
        self.state: str = State.STARTING
        self.warnings: list[str] = []  # logged when it listens; an error before that is one line
        self.received = (0, 0)  # messages received in the last exchange, and expected
        self.missing: list[int] = []  # peers whose message of the last exchange is missing
        self.missing_by_peer: Counter[int] = Counter()  # messages that did not arrive
        self.contacts: frozenset[int] = frozenset()  # peers that were reachable after the round
        self.last_round: tuple[list[int], list[int]] = ([], [])  # peers heard, and missing ones
        self._round_senders: set[int] = set()  # the senders of the messages used in this round
        self._unheard: set[tuple[int, str]] = set()  # peers and reasons that were logged
        self._outboxes: dict[int, Outbox] = {}
        self.sent_bytes = SentBytes(self.tracker.finished)
        self.endings = Endings(network.run, me, self._outbox, network.ahead)
        self.responder = Responder(
            self.tracker,
            self.endings,
            self.model_server,
            self.counters,
            lambda: (self.round, self.state),
        )
        self.synchroniser = Synchroniser(self)
        self.revisions = Revisions(self, revisions)

    async def run(self) -> Tensor:
        """Run all rounds and return the final parameters, [d]."""
        await self.transport.start(self)
        try:
            self.recorder.resume(self.owner())
            self._log_privacy()
            for note in self.notes:
                log.info("%s", note)
            first = self.recorder.steps
            if first > 0:
                self._offer(first - 1)  # a new member may ask for it at once
            timeouts = self.network.timeouts
            self.state = State.MEETING
            for text in self.warnings:
                log.warning("%s", text)
            await self.tracker.wait_for_start(timeouts.start, first)
            first = await self.synchroniser.catch_up(first)
            self._adopts_first = self._adopts_first and self.recorder.steps == 0
            if first == 0:
                await self._run_pre_round()
            await self._run_rounds(first)
            self.state = final_state(self.recorder.skipped, len(self.scheduled_rounds))
            for peer, outbox in list(self._outboxes.items()):  # a question may open another
                if self.transport.reachable(peer) and peer not in self.tracker.mismatched_peers:
                    await outbox.flush(timeouts.message)
                outbox.forget()
            last = self.world.is_present(self.me, self.world.rounds - 1)
            if last and self.state == State.FINISHED:
                await self.tracker.say_finished(timeouts.message)
                if self.model_client is not None:
                    await self.model_client.fetch(self.tracker, self.expected, timeouts.message)
                    await self.compute(self.recorder.save_models, self.world.rounds)
            await self.model_server.wait_for_downloads(self.transport, timeouts.message)
            self.recorder.add_late_counts(self.sent_bytes.difference)
        except EpsilonReached as reached:
            await self._serve_while_stopped(reached)
            self.recorder.add_late_counts(self.sent_bytes.difference)
        except DiskError as error:
            await self._serve_while_stopped(error)
            raise
        finally:
            await self.transport.stop()  # first, as a question may open another outbox
            for outbox in self._outboxes.values():
                await outbox.close()
            self.recorder.close()
        return self.shard.members[self.me].node.params

    def renew(self, network: Network, world: World, shard: Shard) -> None:
        """Use a higher revision of the network file, between two rounds."""
        self.network, self.world, self.shard = network, world, shard
        self.expected = self.assembler.expected = message_policy(network, self.me, world)
        self.mailbox.share = 4 * self.expected.max_bytes
        self.mailbox.max_bytes = max(MAILBOX_BYTES, self.mailbox.share)
        self.evaluated_rounds = world.experiment.evaluation.evaluated_rounds(world.rounds)
        self.tracker.use(network, world, shared_settings_of(network, world))
        self.recorder.renew(shard, self.owner())
        self._log_privacy()

    def owner(self) -> dict[str, Any]:
        """What a folder of this peer says about its owner."""
        owner = {"run": self.network.run, "node": self.me, "seal": self.tracker.settings_hash}
        revision = self.network.revision
        return {**owner, "revision": revision} if revision > 1 else owner

    async def _run_pre_round(self) -> None:
        """Run the exchange before round 1, if there is one, and evaluate the initial model."""
        sent = 0
        if self.world.pre_round is not None:
            self.state = State.RUNNING
            sent = await self._run_exchanges(PRE_ROUND, self.shard.pre_round)
        self._record(0, await self.compute(self.shard.evaluate_models), sent, 0.0)
        await self.compute(self.recorder.save_models, 0)

    async def _run_rounds(self, first: int) -> None:
        round, self.state = first, State.RUNNING
        while True:
            await self.revisions.take_up(round)
            if round >= self.world.steps:  # after the last round, perhaps a final step
                break
            self.endings.begin_round(round)
            if await self.synchroniser.pause(round):
                if self.revisions.is_due(round):
                    continue
                round = await self.synchroniser.resynchronise(round)
                self.endings.begin_round(round)
            if not self.world.is_present(self.me, round):
                if round + 1 >= self.world.faults.left.get(self.me, self.world.rounds + 1):
                    return
                await self.synchroniser.sit_out(round)
            else:
                if self._adopts_first and round > 0:
                    await self.synchroniser.adopt_a_model(round)
                self._adopts_first = False
                await self._run_round(round)
            round += 1
            if self.received[0] < self.received[1] and round < self.world.steps:
                round = await self.synchroniser.resynchronise(round)
        self.endings.begin_round(round)

    async def _run_round(self, round: int) -> None:
        start, self.received, self.missing = perf_counter(), (0, 0), []
        self._round_senders = set()
        member = self.shard.members[self.me]
        node = member.node
        # Tensors are never changed in place, so these references are enough to undo the round.
        before = node.params, node.buffers, node.state, dict(member.persistent_tensors)
        evaluate, final = round + 1 in self.evaluated_rounds, round == self.world.rounds
        self.state = State.RUNNING

        if self.model_client is not None and round + 1 == self.world.steps:
            await self.model_client.announce()

        def begin() -> ShardOutput:
            return self.shard.final(round) if final else self.shard.begin(round, evaluate)

        try:
            sent = await self._run_exchanges(round, begin)
            report = await self.compute(self.shard.finish)
            if report.broken and self._round_senders:  # finite messages may overflow
                raise PeerageError("aggregating the messages gave NaN or infinite parameters")
            check_combined(round, report.broken)
            self.quarantine.succeeded()
        except EpsilonReached:
            node.params, node.buffers, node.state = before[:3]
            member.persistent_tensors.clear()
            member.persistent_tensors.update(before[3])
            self.recorder.restore_release_count()
            raise
        except (DiskError, Diverged, InputError):
            raise
        except Exception as error:
            if not self._round_senders:
                raise
            # The messages passed every check, and the algorithm still failed on them.
            log.error("round %d failed and was skipped: %r", round + 1, error)
            self.counters["poisoned round"] += 1
            self._quarantine_senders(self._round_senders)
            node.params, node.buffers, node.state = before[:3]
            if self.recorder.models is not None:
                self.recorder.models.forget()
            # Messages that were released before the failure still count.
            tensors = member.persistent_tensors
            released = {key: count for key, count in tensors.items() if key == RELEASE_COUNT}
            tensors.clear()
            tensors.update(before[3] | released)
            return
        done = round if final else round + 1
        self._record(done, report, sent, perf_counter() - start, final)
        self._offer(round)
        # In the executor: a slow disk must not delay answers to other peers.
        await self._write(self.recorder.save_checkpoint, done, final, evaluate or final)

    def _quarantine_senders(self, senders: set[int]) -> None:
        self.quarantine.failed(senders)
        for peer in self.quarantine.banned_peers - self.assembler.blocked_peers.keys():
            self.tracker.banned_peers.add(peer)
            reason = self.assembler.blocked_peers[peer] = "its messages made rounds fail here"
            log.error("ignoring %s from now on: %s", self.tracker.name(peer), reason)

    async def _run_exchanges(self, round: int, begin: Callable[[], ShardOutput]) -> int:
        """Send and receive messages until the node has finished; return the bytes it sent."""
        self.mailbox.begin_round(round)
        self.round = round
        link_faults = self.world.link_faults(round, final=round == self.world.rounds)
        sequences = self.endings.sent(round)  # messages so far, by recipient
        asked: Counter[int] = Counter()  # messages asked for so far, by sender
        sent = 0
        output = await self.compute(begin)
        while True:
            check_finite(round, [output])
            if self.world.noise.active:  # otherwise nothing is counted
                await self._write(self.recorder.remember_releases)
            for packet in output.packets:
                sent += self._send_packet(packet, round, sequences, link_faults)
            if self.me not in output.waiting:
                break
            packets = await self._gather(round, output.waiting[self.me], asked, link_faults)
            output = await self.compute(self.shard.resume, {self.me: packets})
        self.endings.finish(round, self.world.out_neighbours(round)[self.me])
        return sent

    def _send_packet(
        self, packet: Packet, round: int, sequences: Counter[int], link_faults: LinkFaults
    ) -> int:
        """Put a packet into the outboxes; return its bytes, once per recipient (`SentBytes`)."""
        self.expected.check_own(packet.architecture, packet.payload)
        message: tuple[Header, memoryview] | None = None
        sent = 0
        for recipient in packet.to:
            if not link_faults.link_up(self.me, recipient):
                continue
            counted = self.transport.reachable(recipient) or recipient in self.tracker.finished
            sequence = sequences[recipient]
            sequences[recipient] += 1
            if link_faults.message_lost(self.me, recipient, sequence):
                sent += packet.bytes
                continue  # counted as sent; the recipient draws the same loss and does not wait
            if message is None:
                message = encode(
                    packet,
                    run=self.network.run,
                    round=round,
                    recipient=recipient,
                    sequence=sequence,
                    wire=self.network.wire,
                    pack=self.network.pack,
                )
            header = replace(message[0], recipient=recipient, sequence=sequence)
            self._outbox(recipient).put(header, message[1], packet.bytes, counted=counted)
            sent += packet.bytes if counted else 0
        return sent

    async def _gather(
        self, round: int, senders: tuple[int, ...], asked: Counter[int], link_faults: LinkFaults
    ) -> list[Packet]:
        """Return the next message of every sender that can send one."""
        expected = []
        for sender in senders:
            sequence = asked[sender]
            asked[sender] += 1
            arrives = link_faults.link_up(sender, self.me) and not link_faults.message_lost(
                sender, self.me, sequence
            )
            refused = sender in self.tracker.mismatched_peers
            if arrives and not refused and self.quarantine.admits(sender):
                expected.append(sender)
            else:
                self.mailbox.take([sender])  # it will not come
        start = perf_counter()
        await self._wait(round, expected)
        self.shard.seconds["wait"] += perf_counter() - start
        self.missing = sorted(set(self.mailbox.missing(expected)) - self.tracker.finished)
        self._log_unheard(round, self.missing)
        found = self.mailbox.take(expected)
        if self.model_client is not None and self.world.hub in found:
            self.model_client.receive(found[self.world.hub], round)
        # A sender that is done and sent nothing is not missing.
        self.received = len(found), len(found) + len(self.missing)
        self._round_senders |= found.keys()
        if self.missing:
            self.counters["missing"] += len(self.missing)
            self.missing_by_peer.update(self.missing)
        return [found[sender] for sender in sorted(found)]

    async def _wait(self, round: int, senders: list[int]) -> None:
        """Wait until each sender has sent its next message or is no longer worth waiting for."""
        out_neighbours, now = self.world.out_neighbours(round), asyncio.get_running_loop().time
        pending = partial(self.mailbox.pending, senders)
        uninformed = [peer for peer in pending() if self.me not in out_neighbours[peer]]
        until: dict[int, float] = {}  # sender -> its deadline

        def worth_waiting_for(senders: list[int]) -> list[int]:
            worth = self.tracker.view(round).worth_waiting_for(senders)
            return [sender for sender in worth if now() < until[sender]]

        async with _in_background(self.tracker.announce(round, uninformed, pending)):
            while True:
                begun = now()
                self.deadlines.begin(round, begun)
                until |= {sender: begun + self.deadlines.seconds(sender) for sender in senders}
                latest = begun + self.network.timeouts.message
                await self.mailbox.wait(round, senders, latest, worth_waiting_for)
                if not pending() or not await self.synchroniser.pause(round):
                    break
                if self.revisions.is_due(round):  # it decides whom this peer waits for
                    break
        silent = pending()
        for sender in senders:
            if sender not in silent:
                self.deadlines.heard(sender)
            elif now() >= until[sender]:
                self.deadlines.missed(sender)

    def _log_unheard(self, round: int, missing: list[int]) -> None:
        """Log which peers were not heard, once for each peer and reason."""
        pending = self.mailbox.pending(missing)
        for peer in missing:
            if peer not in pending:
                reason = "could not deliver a message"
            elif not self.transport.reachable(peer):
                reason = "is unreachable"
            elif self.mailbox.has_passed(peer):
                reason = "is in a later round"
            else:
                reason = "did not send a message in time"
            if (peer, reason) not in self._unheard:
                self._unheard.add((peer, reason))
                name = self.tracker.name(peer)
                log.warning("%s %s, continuing round %d without it", name, reason, round + 1)

    async def _serve_while_stopped(self, error: PeerageError) -> None:
        """Log the error, and answer other peers for as long as any of them runs.

        They are told that this peer sends nothing more, so that they do not wait for it.
        """
        if self.state == State.RUNNING and not self.endings.is_over(self.round):
            self.endings.finish(self.round, self.world.out_neighbours(self.round)[self.me])
        self.state = f"{State.STOPPED}{error}"
        level = logging.WARNING if isinstance(error, EpsilonReached) else logging.ERROR
        log.log(level, "%s; training has stopped, but this peer still answers others", error)
        told = self.round + 1
        self.endings.begin_round(self.world.steps)
        while any(status.running for status in (await self.tracker.ask()).values()):
            newest = self.tracker.view(self.round).confirmed_round()
            self.mailbox.begin_round(max(newest, self.mailbox.round))
            for round in range(max(told, newest), min(newest + 2, self.world.steps)):
                self.endings.finish(round, self.world.out_neighbours(round)[self.me])
                told = round + 1
            await asyncio.sleep(POLL_INTERVAL)

    # Records

    def _log_privacy(self) -> None:
        """Log the planned epsilon, and what the data has spent already."""
        experiment = self.world.experiment
        if self.recorder.account.noise.private:
            log.info("%s", privacy_plan(experiment))
            for line in self.recorder.account.statements(planned_messages(experiment)):
                log.info("%s", line)

    def _record(
        self, round: int, report: ShardReport, sent: int, seconds: float, final: bool = False
    ) -> None:
        self.contacts = frozenset(filter(self.transport.reachable, self.tracker.other_peers))
        self.last_round = sorted(self._round_senders), self.missing
        sent = self.sent_bytes.settle(sent)
        self.recorder.record(round, report, sent, self.received, seconds, final)

    @property
    def alive(self) -> int:
        """The number of peers that were reachable after the last round."""
        return len(self.contacts)

    @property
    def rows(self) -> list[Row]:
        return self.recorder.rows

    @property
    def finished(self) -> int:
        """The number of finished rounds."""
        return self.recorder.finished

    @property
    def scheduled_rounds(self) -> list[int]:
        """The numbers of the rounds in which this peer takes part, counted from 1."""
        present = self.world.is_present
        return [round + 1 for round in range(self.world.rounds) if present(self.me, round)]

    def _offer(self, round: int) -> None:
        """Offer the model to peers that missed rounds, unless noise is to keep it private."""
        node = self.shard.members[self.me].node
        if self.world.hub not in (None, self.me) or (
            self.world.noise.active and self.world.hub is None
        ):
            return
        payload = {"x": node.params, "b": node.buffers}
        self.model_server.keep(Packet(node.envelope(), (), payload, 0), round)

    # Incoming calls

    def accept(self, raw: bytes, identity: int) -> tuple[Header, int]:
        if identity in self.tracker.mismatched_peers:
            self.assembler.blocked_peers.setdefault(
                identity, "it runs another experiment or version"
            )
        return self.assembler.accept(raw, identity)

    def chunk(self, header: Header, offset: int, data: bytes) -> None:
        self.assembler.chunk(header, offset, data)

    async def complete(self, header: Header) -> None:
        try:
            await self.assembler.complete(header)
        finally:
            self._note_header(header)

    def _note_header(self, header: Header) -> None:
        """Note in which round the sender is, and how long its message took; late ones count."""
        self.tracker.note_message(header.sender, header.round)
        if header.kind == DATA:
            now = asyncio.get_running_loop().time()
            self.deadlines.arrived(header.sender, header.round, now)

    async def answer(self, question: bytes, identity: int) -> bytes:
        return self.responder.answer(question, identity)

    async def report(self) -> bytes:
        return report_on(self).encode()

    # Helpers

    async def _write(self, write: Callable[..., None], *arguments: Any) -> None:
        """Write files, and try again while this process or machine has too many open files."""
        for attempt in count():
            try:
                await self.compute(write, *arguments)
                return
            except TooManyOpenFiles as error:
                if attempt == 0:
                    log.warning("%s; trying again until it works", error)
                await asyncio.sleep(WRITE_DELAY)

    def _outbox(self, peer: int) -> Outbox:
        if peer not in self._outboxes:
            timeout, ahead = self.network.timeouts.message, self.network.ahead
            self._outboxes[peer] = Outbox(
                self.transport, timeout, ahead, self.counters, self.sent_bytes
            )
        return self._outboxes[peer]

    async def compute(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """Run work of the node in the executor, so that the event loop can answer others."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.executor, work, *arguments)


@asynccontextmanager
async def _in_background(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run this coroutine during the block, and cancel it at the end."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def shared_settings_of(network: Network, world: World) -> dict[str, str]:
    """The settings that must be equal on all peers, including those that depend on their data."""
    sizes = {name: kind.layout.size for name, kind in world.architectures.items()}
    hashes = constants_of(world.architectures)
    constants = {"constants": json.dumps(hashes)} if hashes else {}
    return {
        **network.shared_settings,
        "models": json.dumps(sizes),
        **constants,
        "classes": ", ".join(map(str, world.classes)),
        "example": str(world.test.example),
    }
