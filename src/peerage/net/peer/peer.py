"""One peer: runs a node with its own data and exchanges messages with other peers.

The simulator's `Shard` trains, aggregates, evaluates and saves. A network that loses no message
therefore ends with the same bits as a simulation. A peer resumes, waits for the others, catches up
and runs its rounds. `exchanges` sends and receives the messages of a round. `progress` decides
which peers it waits for and which rounds it skips, `synchroniser` waits and asks, `recorder` writes
its files, and `responder` answers other peers.
"""

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any

from torch import Tensor

from peerage.engine.router import Packet, ShardOutput, check_combined
from peerage.engine.shard import InProcessStore, Shard, ShardReport
from peerage.engine.world import World, constants_of
from peerage.errors import DiskError, InputError, PeerageError, TooManyOpenFiles
from peerage.net.peer.account import ACCOUNT, EpsilonReached, PrivacyAccount
from peerage.net.peer.assembler import MessageAssembler
from peerage.net.peer.deadlines import Deadlines
from peerage.net.peer.endings import Endings
from peerage.net.peer.exchanges import Exchanges
from peerage.net.peer.finish_notice import FinishNotice
from peerage.net.peer.mailbox import Mailbox
from peerage.net.peer.model_transfer import ModelClient, ModelServer
from peerage.net.peer.network import Network, check_rejoin
from peerage.net.peer.peer_tracker import POLL_INTERVAL, PeerTracker
from peerage.net.peer.progress import State, final_state
from peerage.net.peer.recorder import PeerRecorder
from peerage.net.peer.recovery import Recovery
from peerage.net.peer.relay import StatusRelay
from peerage.net.peer.replay import check_kept
from peerage.net.peer.report import report_on
from peerage.net.peer.responder import Responder
from peerage.net.peer.revisions import Revisions, RevisionSource
from peerage.net.peer.synchroniser import OutOfContact, Synchroniser
from peerage.net.peer.traffic import SentBytes, message_policy
from peerage.net.wire.header import DATA, Header, MessagePolicy, Rejected
from peerage.net.wire.transport import Receiver, Transport
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
        check_own_examples(self.expected, network, me, self.shard)
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
        self.round = PRE_ROUND  # the current round
        self.state: str = State.STARTING
        self.warnings: list[str] = []  # logged when it listens; an error before that is one line
        self.contacts: frozenset[int] = frozenset()  # peers that were reachable after the round
        self.out_of_contact: list[int] = []  # members, when the quorum was last checked
        self.last_round: tuple[list[int], list[int]] = ([], [])  # peers heard, and missing ones
        self.sent_bytes = SentBytes(self.tracker.finished)
        self.exchanges = Exchanges(self)
        self.recovery = Recovery(self)
        self.endings = Endings(network.run, me, self.exchanges.outbox, network.ahead)
        self.responder = Responder(
            self.tracker,
            self.endings,
            self.model_server,
            self.counters,
            lambda: (self.round, self.state),
        )
        self.synchroniser = Synchroniser(self)
        self.revisions = Revisions(self, revisions)
        self.relay = StatusRelay(self)

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
                self.offer(first - 1)  # a new member may ask for it at once
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
            # A copy, as a question may open another one.
            for peer, outbox in list(self.exchanges.outboxes.items()):
                if self.transport.reachable(peer) and peer not in self.tracker.mismatched_peers:
                    await outbox.flush(timeouts.message)
                outbox.forget()
            last = self.world.is_present(self.me, self.world.rounds - 1)
            notice = FinishNotice(self.tracker)
            if last and self.state == State.FINISHED:
                await notice.tell(timeouts.message)
                if self.model_client is not None:
                    await self.model_client.fetch(self.tracker, self.expected, timeouts.message)
                    await self.compute(self.recorder.save_models, self.world.rounds)
            await self.model_server.wait_for_downloads(self.transport, timeouts.message)
            if last and self.state == State.FINISHED:
                with suppress(asyncio.CancelledError):  # by a signal; all rounds are done
                    await notice.wait_for_lost(timeouts.stay)
            self.recorder.add_late_counts(self.sent_bytes.difference)
        except EpsilonReached as reached:
            await self._serve_while_stopped(reached)
            self.recorder.add_late_counts(self.sent_bytes.difference)
        except OutOfContact:
            self.state = State.ALONE
            self.recorder.show_pause(None)
        except DiskError as error:
            await self._serve_while_stopped(error)
            raise
        finally:
            self.tracker.close()
            await self.transport.stop()  # first, as a question may open another outbox
            for outbox in self.exchanges.outboxes.values():
                await outbox.close()
            self.recorder.close()
        return self.shard.members[self.me].node.params

    def renew(self, network: Network, world: World, shard: Shard) -> None:
        """Use a higher revision of the network file, between two rounds."""
        self.network, self.world, self.shard = network, world, shard
        self.expected = message_policy(network, self.me, world)
        self.assembler.expect(self.expected)
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
            self.exchanges.begin_round()
            self.recovery.begin(PRE_ROUND, self.shard.pre_round)
            try:
                sent = await self.exchanges.run(PRE_ROUND, self.shard.pre_round)
                self.recovery.succeeded()
            except (DiskError, InputError, OutOfContact):
                raise
            except Exception as error:
                await self.recovery.recover(error)
        await self.record_initial_model(sent)

    async def record_initial_model(self, sent: int) -> None:
        """Evaluate the model before round 1, and write the row, with the bytes sent so far."""
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
                while await self._run_round(round):
                    pass
            round += 1
            if self.exchanges.missing and round < self.world.steps:
                round = await self.synchroniser.resynchronise(round)
        self.endings.begin_round(round)

    async def _run_round(self, round: int) -> bool:
        """Run a round; return whether it must be run again, as earlier messages made it fail."""
        start, shard = perf_counter(), self.shard
        self.exchanges.begin_round()
        evaluate, final = round + 1 in self.evaluated_rounds, round == self.world.rounds
        self.state = State.RUNNING

        if self.model_client is not None and round + 1 == self.world.steps:
            await self.model_client.announce()

        def begin() -> ShardOutput:
            return shard.final(round) if final else shard.begin(round, evaluate)

        self.recovery.begin(round, begin)
        try:
            sent = await self.exchanges.run(round, begin)
            report = await self.compute(self.shard.finish)
            check_combined(round, report.broken)
            if self.exchanges.senders and self.recovery.is_last(round):
                await self.compute(check_kept, shard, self.me, True)
        except EpsilonReached:
            self.recovery.cancel()
            self.recorder.restore_release_count()
            raise
        except (DiskError, InputError, OutOfContact):
            raise
        except Exception as error:  # Diverged, or whatever an algorithm raises
            return await self.recovery.recover(error)
        self.recovery.succeeded()
        done = round if final else round + 1
        self._record(done, report, sent, perf_counter() - start, final)
        self.offer(round)
        # In the executor: a slow disk must not delay answers to other peers.
        await self.write(self.recorder.save_checkpoint, done, final, evaluate or final)
        return False

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
        self.contacts = self.tracker.reachable_peers()
        self.last_round = sorted(self.exchanges.senders), self.exchanges.missing
        sent = self.sent_bytes.settle(sent)
        received = self.exchanges.received
        contact = *self.last_round, self.out_of_contact
        self.recorder.record(round, report, sent, received, seconds, final, *contact)

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

    def offer(self, round: int) -> None:
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

    async def report_of(self, name: str) -> bytes:
        return await self.relay.report_of(name)

    # Helpers

    async def write(self, write: Callable[..., None], *arguments: Any) -> None:
        """Write files, and try again while this process or machine has too many open files."""
        for attempt in count():
            try:
                await self.compute(write, *arguments)
                return
            except TooManyOpenFiles as error:
                if attempt == 0:
                    log.warning("%s; trying again until it works", error)
                await asyncio.sleep(WRITE_DELAY)

    async def compute(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """Run work of the node in the executor, so that the event loop can answer others."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.executor, work, *arguments)


def check_own_examples(expected: MessagePolicy, network: Network, me: int, shard: Shard) -> None:
    """Raise InputError if other peers would reject what this one states about its data."""
    try:
        expected.check_examples(me, shard.members[me].node.num_examples)
    except Rejected as error:
        name = network.members[me].name
        raise InputError(f"{error}; correct the data of {name} or the network file") from None


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
