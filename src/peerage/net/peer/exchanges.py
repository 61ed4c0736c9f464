"""The exchanges of one peer: its messages go out, those of others come in.

A round has one exchange or several. In each of them the node sends its messages, and the peer waits
for those that the node asked for. `deadlines` says how long, `progress` for whom.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

from peerage.engine.router import Packet, ShardOutput, check_finite
from peerage.errors import InputError
from peerage.graphs.faults import LinkFaults
from peerage.net.peer.replay import check_relayed
from peerage.net.peer.traffic import Outbox
from peerage.net.wire.header import Header
from peerage.net.wire.payload import encode

if TYPE_CHECKING:
    from peerage.net.peer.peer import Peer

OUTLIER = 100  # times the median of the others: a number of examples that is logged

log = logging.getLogger("peerage.peer")


class Exchanges:
    """Sends and receives the messages of one peer, round by round."""

    def __init__(self, peer: "Peer") -> None:
        self.peer = peer
        self.received = (0, 0)  # messages received in the last exchange, and expected
        self.missing: list[int] = []  # peers whose message of the last exchange is missing
        self.missing_by_peer: Counter[int] = Counter()  # messages that did not arrive
        self.packets: list[list[Packet]] = []  # received in each exchange of this round
        self.outboxes: dict[int, Outbox] = {}
        self._outliers: set[int] = set()  # senders whose number of examples was logged
        self._unheard: set[tuple[int, str]] = set()  # peers and reasons that were logged

    def begin_round(self) -> None:
        self.received, self.missing, self.packets = (0, 0), [], []

    @property
    def senders(self) -> set[int]:
        """The senders of the messages used in this round."""
        return {packet.sender for packets in self.packets for packet in packets}

    def outbox(self, peer: int) -> Outbox:
        if peer not in self.outboxes:
            me, network = self.peer, self.peer.network
            self.outboxes[peer] = Outbox(
                me.transport, network.timeouts.message, network.ahead, me.counters, me.sent_bytes
            )
        return self.outboxes[peer]

    async def run(self, round: int, begin: Callable[[], ShardOutput]) -> int:
        """Send and receive messages until the node has finished; return the bytes it sent."""
        peer = self.peer
        peer.mailbox.begin_round(round)
        peer.round = round
        link_faults = peer.world.link_faults(round, final=round == peer.world.rounds)
        sequences = peer.endings.sent(round)  # messages so far, by recipient
        asked: Counter[int] = Counter()  # messages asked for so far, by sender
        sent = 0
        output = await peer.compute(begin)
        while True:
            check_finite(round, [output])
            if self.packets:
                await peer.compute(check_relayed, peer.shard, peer.me, output.packets)
            if peer.shard.members[peer.me].train_examples:
                peer.recovery.trained()
            if peer.world.noise.active:  # otherwise nothing is counted
                await peer.write(peer.recorder.remember_releases)
            for packet in output.packets:
                sent += self._send_packet(packet, round, sequences, link_faults)
            if peer.me not in output.waiting:
                break
            packets = await self._gather(round, output.waiting[peer.me], asked, link_faults)
            self.packets.append(packets)
            output = await peer.compute(peer.shard.resume, {peer.me: packets})
        peer.endings.finish(round, peer.world.out_neighbours(round)[peer.me])
        return sent

    def _send_packet(
        self, packet: Packet, round: int, sequences: Counter[int], link_faults: LinkFaults
    ) -> int:
        """Put a packet into the outboxes; return its bytes, once per recipient (`SentBytes`)."""
        peer = self.peer
        peer.expected.check_own(packet.architecture, packet.payload)
        self._check_partners(packet.to)
        message: tuple[Header, memoryview] | None = None
        sent = 0
        for recipient in packet.to:
            if not link_faults.link_up(peer.me, recipient):
                continue
            counted = peer.transport.reachable(recipient) or recipient in peer.tracker.finished
            sequence = sequences[recipient]
            sequences[recipient] += 1
            if link_faults.message_lost(peer.me, recipient, sequence):
                sent += packet.bytes
                continue  # counted as sent; the recipient draws the same loss and does not wait
            if message is None:
                message = encode(
                    packet,
                    run=peer.network.run,
                    round=round,
                    recipient=recipient,
                    sequence=sequence,
                    wire=peer.network.wire,
                    pack=peer.network.pack,
                )
            header = replace(message[0], recipient=recipient, sequence=sequence)
            self.outbox(recipient).put(header, message[1], packet.bytes, counted=counted)
            sent += packet.bytes if counted else 0
        return sent

    async def _gather(
        self, round: int, senders: tuple[int, ...], asked: Counter[int], link_faults: LinkFaults
    ) -> list[Packet]:
        """Return the next message of every sender that can send one."""
        peer = self.peer
        self._check_partners(senders)
        expected, refused = [], peer.tracker.refused_peers()
        for sender in senders:
            sequence = asked[sender]
            asked[sender] += 1
            arrives = link_faults.link_up(sender, peer.me) and not link_faults.message_lost(
                sender, peer.me, sequence
            )
            if arrives and sender not in refused:
                expected.append(sender)
            else:
                peer.mailbox.take([sender])  # it will not come
        start = perf_counter()
        await self._wait(round, expected)
        peer.shard.seconds["wait"] += perf_counter() - start
        self.missing = sorted(set(peer.mailbox.missing(expected)) - peer.tracker.finished)
        self._log_unheard(round, self.missing)
        found = peer.mailbox.take(expected)
        if peer.model_client is not None and peer.world.hub in found:
            peer.model_client.receive(found[peer.world.hub], round)
        self._log_outliers(found)
        # A sender that is done and sent nothing is not missing.
        self.received = len(found), len(found) + len(self.missing)
        if self.missing:
            peer.counters["missing"] += len(self.missing)
            self.missing_by_peer.update(self.missing)
        return [found[sender] for sender in sorted(found)]

    async def _wait(self, round: int, senders: list[int]) -> None:
        """Wait until each sender has sent its next message or is no longer worth waiting for."""
        peer = self.peer
        out_neighbours, now = peer.world.out_neighbours(round), asyncio.get_running_loop().time
        pending = partial(peer.mailbox.pending, senders)
        uninformed = [other for other in pending() if peer.me not in out_neighbours[other]]
        until: dict[int, float] = {}  # sender -> its deadline

        def worth_waiting_for(senders: list[int]) -> list[int]:
            worth = peer.tracker.view(round).worth_waiting_for(senders)
            return [sender for sender in worth if now() < until[sender]]

        async with _in_background(peer.tracker.announce(round, uninformed, pending)):
            while True:
                begun = now()
                peer.deadlines.begin(round, begun)
                until |= {sender: begun + peer.deadlines.seconds(sender) for sender in senders}
                latest = begun + peer.network.timeouts.message
                await peer.mailbox.wait(round, senders, latest, worth_waiting_for)
                if not pending() or not await peer.synchroniser.pause(round):
                    break
                if peer.revisions.is_due(round):  # it decides whom this peer waits for
                    break
        silent, reachable = pending(), peer.tracker.reachable_peers()
        heard = [sender for sender in senders if sender not in silent]
        running = [sender for sender in silent if sender not in peer.tracker.finished]
        missed = [s for s in running if s not in reachable or now() >= until[s]]
        peer.deadlines.end(round, heard, missed, now())

    def _log_outliers(self, found: Mapping[int, Packet]) -> None:
        """Log senders that state far more examples than the others, once for each of them."""
        own = self.peer.shard.members[self.peer.me].node.num_examples
        counts = {self.peer.me: own} | {s: packet.examples for s, packet in found.items()}
        for sender in found.keys() - self._outliers:
            others = [n for other, n in counts.items() if other != sender and n]
            usual = median(others) if others else None
            if usual is not None and counts[sender] > OUTLIER * usual:
                self._outliers.add(sender)
                log.warning(
                    "%s states %d examples, more than %d times the median of the others, %g; if "
                    "this is wrong, set examples or max_examples in the network file",
                    *(self.peer.tracker.name(sender), counts[sender], OUTLIER, usual),
                )

    def _log_unheard(self, round: int, missing: list[int]) -> None:
        """Log which peers were not heard, once for each peer and reason."""
        peer = self.peer
        pending = peer.mailbox.pending(missing)
        for other in missing:
            if other not in pending:
                reason = "could not deliver a message"
            elif not peer.transport.reachable(other):
                reason = "is unreachable"
            elif peer.mailbox.has_passed(other):
                reason = "is in a later round"
            else:
                reason = "did not send a message in time"
            if (other, reason) not in self._unheard:
                self._unheard.add((other, reason))
                name = peer.tracker.name(other)
                log.warning("%s %s, continuing round %d without it", name, reason, round + 1)

    def _check_partners(self, others: Sequence[int]) -> None:
        """Raise InputError for a partner that cannot be reached, as both peers dial out."""
        peer = self.peer
        for other in others:
            if other != peer.me and not peer.network.can_talk(peer.me, other):
                raise InputError(
                    f"{peer.tracker.name(peer.me)} and {peer.tracker.name(other)} both dial out, "
                    "and this algorithm lets them exchange messages; make one of them reachable, "
                    "and let its method may_meet say so"
                )


@asynccontextmanager
async def _in_background(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run this coroutine during the block, and cancel it at the end."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
