"""One peer: a node of the simulator, alone with its data, whose messages travel.

Training, combining, evaluating and saving are those of the simulator's `Shard`, so a network in
which nothing is lost ends with the same bits. What is here is everything else: whom to wait for and
how long, what to do about peers that are gone, and how to come back.
"""

import asyncio
import json
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from peerage.engine.prepare import Prepared, constants_of
from peerage.engine.router import Parcel, Step, check_combined, check_finite
from peerage.engine.shard import BEFORE, NodeReport, References, Shard, ShardReport
from peerage.errors import DiskError, Diverged, InputError, PeerageError
from peerage.files import read_json, write_json
from peerage.graphs.faults import Way
from peerage.net.peer.assembler import Reception
from peerage.net.peer.endings import Endings
from peerage.net.peer.mailbox import Mailbox
from peerage.net.peer.model_transfer import Offers, fetch
from peerage.net.peer.network import Network, check_rejoin
from peerage.net.peer.peer_tracker import LOOK, MEETING, STARTING, STOPPED, Others
from peerage.net.peer.quarantine import Doubts
from peerage.net.peer.traffic import Outbox, expected_of
from peerage.net.wire.header import REASONS, Header, Rejected
from peerage.net.wire.payload import encode
from peerage.net.wire.transport import Receiver, Transport, Unreachable
from peerage.privacy import COUNT
from peerage.records import checkpoint
from peerage.records.rows import MetricWriter, Row, amend_last, truncate_after
from peerage.runs.summary import node_row

KEPT = 1 << 28  # bytes of messages in the mailbox, unless a few have more
FILE = "part-0.safetensors"
PAUSED = "paused.json"  # in the folder of a peer that waits because it has lost all others
AGAIN = "start the peer again"

log = logging.getLogger("peerage.peer")
Watch = Callable[[Row], None]


class Peer(Receiver):
    """Plays the rounds of one node."""

    def __init__(
        self,
        network: Network,
        me: int,
        prepared: Prepared,
        transport: Transport,
        folder: Path | None = None,
        *,
        executor: Executor | None = None,
        watch: Watch | None = None,
        rejoin: str = "own",
    ) -> None:
        check_rejoin(rejoin)
        self.rejoin = rejoin  # with which model a peer that missed rounds goes on
        self.network, self.me, self.transport, self.folder = network, me, transport, folder
        self.world = prepared.world
        self.executor, self.watch = executor, watch
        self.shard = Shard(self.world, [me], References())
        self.expected = expected_of(network, me, self.world)
        self.judged = prepared.experiment.evaluation.judged(self.world.rounds)
        self.counters: Counter[str] = Counter()  # what went wrong, by reason
        largest = self.expected.max_bytes
        self.mailbox = Mailbox(network.ahead, max(KEPT, 4 * largest), 4 * largest, self.counters)
        self.others = Others(network, me, self.world, transport, essence_of(network, prepared))
        self.reception = Reception(self.expected, self.mailbox, self.counters, self.others.hear)
        self.offers = Offers(network.run)
        self.doubts = Doubts()
        self.round = BEFORE  # that is being played
        self.finished = 0  # rounds
        self.state = STARTING
        self.heard: tuple[int, int] = (0, 0)  # in the last step: how many, of how many
        self.bytes_total = 0
        self.alive = 0  # peers that could be reached after the last round
        self.rows: list[Row] = []
        self._listened: set[int] = set()  # whose messages are in this round
        self._outboxes: dict[int, Outbox] = {}
        self.endings = Endings(network.run, me, self._outbox, network.ahead)
        self._writer: MetricWriter | None = None
        self._noted: Counter[str] = Counter()  # troubles and bytes that are in the rows already

    # The life of a peer

    async def run(self) -> Tensor:
        """Play all rounds; the parameters [d] in the end."""
        await self.transport.start(self)
        try:
            first = self._resume()
            # Who comes back does not wait for others that may have finished long ago.
            patience = self.network.patience
            self.state = MEETING
            await self.others.meet(patience.gone if first else patience.start)
            first = await self._catch_up(first)
            if first == 0:
                await self._begin()
            await self._rounds(first)
            self.state = "finished"
            for peer, outbox in self._outboxes.items():
                if self.transport.reachable(peer):
                    await outbox.flush(patience.step)
            if self.world.faults.present(self.me, self.world.rounds - 1):
                await self.others.say_finished(patience.step)
            self._add_late_news()
        except DiskError as error:
            await self._stuck(error)
            raise
        finally:
            await self.transport.stop()  # first: whoever asks may open another outbox
            for outbox in self._outboxes.values():
                await outbox.close()
            if self._writer is not None:
                self._writer.close()
        return self.shard.members[self.me].node.params

    def _resume(self) -> int:
        """Take up the last checkpoint, if there is one; the round to go on with."""
        if self.folder is None:
            return 0
        self.folder.mkdir(parents=True, exist_ok=True)
        self._claim(self.folder / "peer.json")
        self._show_pause(None)
        saved = checkpoint.load(self.folder)
        if saved is not None:
            self.shard.restore(str(saved.folder), saved.trees, saved.parts, saved.round)
            self.finished = saved.round
        self._recall()
        metrics = self.folder / "metrics.jsonl"
        if metrics.exists():
            truncate_after(metrics, saved.round if saved else -1)
        self._writer = MetricWriter(metrics, AGAIN)
        return saved.round if saved else 0

    def _claim(self, file: Path) -> None:
        """A folder belongs to one peer of one run: another must not go on with its checkpoint."""
        mine = {"run": self.network.run, "node": self.me, "seal": self.others.seal}
        if file.exists() and read_json(file) != mine:
            raise InputError(
                f"{file.parent} belongs to a peer of another run or experiment; "
                "choose another --out, or remove it"
            )
        write_json(file, mine, AGAIN)

    async def _catch_up(self, first: int) -> int:
        """The round to begin with: where the others are, if they are further."""
        newest = self.others.newest()
        if self.others.awaited or newest <= first:
            return first
        log.info("the others are in round %d, we were in %d", newest + 1, first + 1)
        keeps = self.world.keeper(self.me) == self.me != self.world.hub
        shared = keeps and not self.world.algorithm.personal
        if self.rejoin == "neighbour" and shared and newest > first + self.network.ahead:
            await self._adopt(newest)
        return self.others.newest()

    async def _adopt(self, round: int) -> None:
        """Take over the model of the first neighbour that offers one of the same kind."""
        node = self.shard.members[self.me].node
        for peer in self.world.neighbours(round)[self.me]:
            try:
                offer = await fetch(self.transport, peer, self.expected, self.network.patience.step)
            except (Unreachable, Rejected) as error:
                log.info("no model from %s: %s", self.others.name(peer), error)
                continue
            if offer.architecture == node.architecture:
                node.params, node.buffers = offer.payload["x"], offer.payload["b"]
                log.info("going on with the model of %s", self.others.name(peer))
                return

    async def _begin(self) -> None:
        """What comes before the first round."""
        sent = 0
        if self.world.prelude is not None:
            self.state = "playing"
            sent = await self._converse(BEFORE, self.shard.prelude)
        self._record(0, await self._compute(self.shard.measure), sent, 0.0)

    async def _rounds(self, first: int) -> None:
        round, self.state = first, "playing"
        while round < self.world.rounds:
            self.endings.enter(round)
            if await self._pause(round):
                round = await self._fall_in(round)
                self.endings.enter(round)
            if not self.world.faults.present(self.me, round):
                if round + 1 >= self.world.faults.left.get(self.me, self.world.rounds + 1):
                    return
                await self._until(round)
            else:
                await self._play(round)
            round += 1
            if self.heard[0] < self.heard[1] and round < self.world.rounds:
                round = await self._fall_in(round)
        self.endings.enter(round)

    async def _pause(self, round: int) -> bool:
        """Wait while this peer is in contact with none of the others; whether it had to."""
        lost = self.others.lost(round)
        if not lost:
            return False
        before = self.state
        self.mailbox.enter(round)
        self.round, self.alive = round, 0
        self.state = f"waiting for {self.others.names(lost, addresses=False)}"
        log.warning(
            "in contact with none of the others: round %d waits for %s",
            round + 1,
            self.others.names(lost),
        )
        self._show_pause(self.state)
        while not await self._found(round):
            await asyncio.sleep(LOOK)
        log.info("in contact with others again, continuing with round %d", round + 1)
        self.state = before
        self._show_pause(None)
        return True

    async def _found(self, round: int) -> bool:
        """Whether a peer that was in contact with none of the others can go on."""
        if self.others.lost(round):
            return False
        return bool(self.others.finished or await self.others.ask(self.others.in_contact()))

    def _show_pause(self, state: str | None) -> None:
        """For `peerage up`, which looks at the folders of its peers."""
        if self.folder is None:
            return
        if state is None:
            (self.folder / PAUSED).unlink(missing_ok=True)
        else:
            write_json(self.folder / PAUSED, {"state": state}, AGAIN)

    async def _fall_in(self, round: int) -> int:
        """The round to go on with after messages did not come: perhaps we are out of step.

        Halves of a network that was cut go on at their own speeds. Who is behind then leaves rounds
        out. Who is alone in front waits, as nobody follows a single one: he might lie.
        """
        others, ahead = self.others, self.network.ahead
        if others.newest() > round + ahead:  # nobody waits for us any more
            log.warning("skipping from round %d to %d", round + 1, others.newest() + 1)
            return others.newest()
        now, seen = asyncio.get_running_loop().time, BEFORE
        patient = now()
        while BEFORE < others.newest() < round - ahead:
            if others.newest() > seen:
                seen, patient = others.newest(), now() + self.network.patience.step
            if now() > patient:
                break
            self.state = "waiting for the others to come up"
            await asyncio.sleep(LOOK)
            await others.ask(filter(self.transport.reachable, others.everybody))
        return round

    async def _until(self, round: int) -> None:
        """Sit a round out, but do not run ahead of those who play it."""
        self.state, self.heard = "absent", (0, 0)
        self.mailbox.enter(round)
        self.round = round
        playing = [p for p in self.others.everybody if self.world.faults.present(p, round)]
        last = round + 1 == self.world.rounds
        while playing and not last and self.others.newest(playing) <= round:
            answers = await self.others.ask(playing)
            unreachable = not answers and not any(map(self.transport.reachable, playing))
            if unreachable and not await self._pause(round):
                return
            await asyncio.sleep(LOOK)

    async def _play(self, round: int) -> None:
        start, self.heard = perf_counter(), (0, 0)
        self._listened = set()
        member = self.shard.members[self.me]
        node = member.node
        # Tensors are never changed in place, so to remember them is to be able to go back.
        before = node.params, node.buffers, node.state, dict(member.memory)
        evaluate = round + 1 in self.judged
        self.state = "playing"
        try:
            sent = await self._converse(round, lambda: self.shard.begin(round, evaluate))
            report = await self._compute(self.shard.finish)
            if report.broken and self._listened:  # messages of finite numbers may still overflow
                raise PeerageError("the messages combined to NaN or infinite parameters")
            check_combined(round, report.broken)
            self.doubts.succeeded()
        except (DiskError, Diverged, InputError):
            raise
        except Exception as error:
            if not self._listened:
                raise
            # Messages fit by name and shape, and still the algorithm could make nothing of them.
            log.error("round %d failed and is left out: %r", round + 1, error)
            self.counters["poisoned round"] += 1
            self._doubt(self._listened)
            node.params, node.buffers, node.state = before[:3]
            released = {COUNT: member.memory[COUNT]} if COUNT in member.memory else {}
            member.memory.clear()
            member.memory.update({**before[3], **released})  # what was sent stays sent
            return
        self._record(round + 1, report, sent, perf_counter() - start)
        self._offer(round)
        await self._compute(self._save, round + 1)  # a disk may be slow, and others ask

    def _doubt(self, heard: set[int]) -> None:
        self.doubts.failed(heard)
        for peer in self.doubts.guilty - self.reception.shunned.keys():
            log.error("nothing of %s is used any more", self.others.name(peer))
            self.reception.shunned[peer] = "its messages broke rounds here"

    async def _converse(self, round: int, begin: Callable[[], Step]) -> int:
        """Carry messages until the node has finished; how many bytes it sent."""
        self.mailbox.enter(round)
        self.round = round
        way = self.world.way(round)
        places = self.endings.sent(round)  # messages so far, by recipient
        asked: Counter[int] = Counter()  # by sender
        sent = 0
        step = await self._compute(begin)
        while True:
            check_finite(round, [step])
            self._remember_releases()
            for parcel in step.parcels:
                sent += self._post(parcel, round, places, way)
            if self.me not in step.waiting:
                break
            parcels = await self._gather(round, step.waiting[self.me], asked, way)
            step = await self._compute(self.shard.resume, {self.me: parcels})
        self.endings.finish(round, self.world.listeners(round)[self.me])
        return sent

    def _post(self, parcel: Parcel, round: int, places: Counter[int], way: Way | None) -> int:
        """Hand a parcel to the outboxes; its bytes, once for every recipient that it goes to."""
        self.expected.check_own(parcel.architecture, parcel.payload)
        message: tuple[Header, memoryview] | None = None
        sent = 0
        for recipient in parcel.to:
            if way is not None and not way.open(self.me, recipient):
                continue
            sent += parcel.bytes
            place = places[recipient]
            places[recipient] += 1
            if way is not None and way.lost(self.me, recipient, place):
                continue  # it was sent, and the recipient knows that it will not come
            if message is None:
                message = encode(
                    parcel,
                    run=self.network.run,
                    round=round,
                    recipient=recipient,
                    place=place,
                    wire=self.network.wire,
                    pack=self.network.pack,
                )
            header = replace(message[0], recipient=recipient, place=place)
            self._outbox(recipient).put(header, message[1])
        return sent

    async def _gather(
        self, round: int, senders: tuple[int, ...], asked: Counter[int], way: Way | None
    ) -> list[Parcel]:
        """The next message of every sender from whom one can come."""
        hoped = []
        for sender in senders:
            place = asked[sender]
            asked[sender] += 1
            open = way is None or (
                way.open(sender, self.me) and not way.lost(sender, self.me, place)
            )
            if open and self.doubts.admits(sender):
                hoped.append(sender)
            else:
                self.mailbox.skip(sender)
        start = perf_counter()
        await self._wait(round, hoped)
        self.shard.seconds["wait"] += perf_counter() - start
        missing = len(set(self.mailbox.missing(hoped)) - self.others.finished)
        found = self.mailbox.take(hoped)
        # A sender that is done and sent nothing is not missing: there was nothing to hear.
        self.heard = len(found), len(found) + missing
        self._listened |= found.keys()
        if missing:
            self.counters["missing"] += missing
        return [found[sender] for sender in sorted(found)]

    async def _wait(self, round: int, senders: list[int]) -> None:
        """Until each has sent its next message or is not to be waited for any more."""
        listeners, now = self.world.listeners(round), asyncio.get_running_loop().time
        open = partial(self.mailbox.pending, senders)
        strangers = [peer for peer in open() if self.me not in listeners[peer]]
        async with _beside(self.others.announce(round, strangers, open)):
            while True:
                deadline = now() + self.network.patience.step
                await self.mailbox.wait(round, senders, deadline, self._gone)
                if not self.mailbox.pending(senders) or not await self._pause(round):
                    return

    def _gone(self, peer: int) -> bool:
        """Whether there is no point in waiting; without a hub, its clients have nothing to do."""
        if peer in self.others.finished:  # whatever it sent came before it said so
            return True
        if self.transport.reachable(peer):
            return False
        return peer != self.world.hub or bool(self.others.lost(self.round))

    async def _stuck(self, error: DiskError) -> None:
        """Say why, and go on answering others for as long as any of them plays.

        They are told that nothing comes in their rounds, so that nobody waits for it.
        """
        self.state = f"{STOPPED}{error}"
        log.error("%s; this peer trains no more, and still answers", error)
        told = self.round + 1
        self.endings.enter(self.world.rounds)
        while any(status.playing for status in (await self.others.ask()).values()):
            newest = self.others.newest()
            self.mailbox.enter(max(newest, self.mailbox.round))
            for round in range(max(told, newest), min(newest + 2, self.world.rounds)):
                self.endings.finish(round, self.world.listeners(round)[self.me])
                told = round + 1
            await asyncio.sleep(LOOK)

    # What it writes down

    def _record(self, round: int, report: ShardReport, sent: int, seconds: float) -> None:
        [mine] = report.nodes or [NodeReport(self.me)]
        self.alive = sum(map(self.transport.reachable, self.others.everybody))
        self.bytes_total += sent
        self.finished = round
        row = node_row(round, mine)
        row |= {"bytes": sent, "heard": list(self.heard)}
        row |= {"seconds": _spent(report.seconds, seconds), **self._news()}
        self.rows.append(row)
        if self._writer is not None:
            self._writer.append(row)
        if self.watch is not None:
            self.watch(row)

    def _news(self) -> dict[str, Any]:
        """Bytes on the wire and troubles since the last row."""
        now = Counter({**self.troubles(), "wire": self.transport.counters["bytes_sent"]})
        new = now - self._noted
        self._noted = now
        wire = new.pop("wire", 0)
        return {"wire_bytes": wire} | ({"troubles": dict(sorted(new.items()))} if new else {})

    def _add_late_news(self) -> None:
        """Count in the last row what left, or went wrong, after it was written."""
        news = self._news()
        if not self.rows or not any(news.values()):
            return
        last = self.rows[-1]
        last["wire_bytes"] += news["wire_bytes"]
        troubles = Counter(last.get("troubles", {})) + Counter(news.get("troubles", {}))
        last |= {"troubles": dict(sorted(troubles.items()))} if troubles else {}
        if self._writer is not None:
            amend_last(self._writer.path, last, AGAIN)

    def troubles(self) -> dict[str, int]:
        """What went wrong, by reason; the transport knows of those who never got this far."""
        strangers = {
            key: n for key, n in dict(self.transport.refused).items() if key not in REASONS
        }
        return {key: n for key, n in {**dict(self.counters), **strangers}.items() if n}

    def _offer(self, round: int) -> None:
        """Keep the model as it is for those who miss rounds; what noise was to hide stays here."""
        node = self.shard.members[self.me].node
        if self.world.keeper(self.me) != self.me or self.world.noise.active:
            return
        payload = {"x": node.params, "b": node.buffers}
        degree = len(node.neighbours)
        parcel = Parcel(self.me, (), node.num_examples, degree, node.architecture, payload, 0)
        self.offers.keep(parcel, round)

    def _save(self, round: int) -> None:
        if self.folder is not None:
            checkpoint.save(self, self.folder, round, AGAIN)

    def save(self, folder: Path) -> tuple[dict[str, Any], dict[str, str]]:
        """As an engine does, for `checkpoint.save`."""
        trees = self.shard.save(str(folder / FILE))
        return trees, dict.fromkeys(trees, FILE)

    def _remember_releases(self) -> None:
        """Count messages under noise on disk before they are sent: a crash must not undo that."""
        count = self.shard.released().get(self.me, 0)
        if self.folder is not None and count:
            write_json(self.folder / "released.json", {"messages": count}, AGAIN)

    def _recall(self) -> None:
        """Messages of a round that was not finished were sent nevertheless."""
        assert self.folder is not None
        file = self.folder / "released.json"
        if file.exists():
            memory = self.shard.members[self.me].memory
            memory[COUNT] = torch.tensor(read_json(file)["messages"])

    # What others send

    def accept(self, raw: bytes, identity: int) -> tuple[Header, int]:
        if identity in self.others.strange:
            self.reception.shunned.setdefault(identity, "it runs another experiment")
        return self.reception.accept(raw, identity)

    def chunk(self, header: Header, offset: int, data: bytes) -> None:
        self.reception.chunk(header, offset, data)

    async def complete(self, header: Header) -> None:
        await self.reception.complete(header)

    async def answer(self, question: bytes, identity: int) -> bytes:
        try:
            asked = dict(json.loads(question))
        except (ValueError, TypeError, RecursionError):
            asked = {}
        if asked.get("ask") == "status":
            return json.dumps(self.status(identity, str(asked.get("life")))).encode()
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

    def status(self, identity: int, life: str) -> dict[str, Any]:
        """What a peer says about itself to another one, in that life of it."""
        self.others.greet(identity, life)
        begun = self.state not in (STARTING, MEETING)
        return {
            "seal": self.others.seal,
            "life": self.others.life,
            "round": self.round,
            "state": self.state,
            "awaited": not begun or self.others.began_with(identity, life),
        }

    # Small things

    def _is_round(self, value: Any) -> bool:
        return type(value) is int and BEFORE <= value < self.world.rounds

    @property
    def accuracy(self) -> float | None:
        """When it was judged last."""
        return next((row["accuracy"] for row in reversed(self.rows) if "accuracy" in row), None)

    def _outbox(self, peer: int) -> Outbox:
        if peer not in self._outboxes:
            network = self.network
            self._outboxes[peer] = Outbox(
                self.transport, network.patience.step, network.ahead, self.counters
            )
        return self._outboxes[peer]

    async def _compute(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """Work of the node, beside the event loop, which goes on answering others."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.executor, lambda: work(*arguments))


@asynccontextmanager
async def _beside(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Do this meanwhile, and no longer."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _spent(phases: dict[str, float], total: float) -> dict[str, float]:
    """To the microsecond, and without what took no time: a row is written in every round."""
    spent = {phase: round(seconds, 6) for phase, seconds in phases.items() if seconds}
    return {**spent, "total": round(total, 6)}


def essence_of(network: Network, prepared: Prepared) -> dict[str, str]:
    """Everything that must be the same on all peers, also what they find in their own data."""
    world = prepared.world
    sizes = {name: kind.layout.size for name, kind in world.architectures.items()}
    hashes = constants_of(world.architectures)
    constants = {"constants": json.dumps(hashes)} if hashes else {}
    return {
        **network.essence,
        "models": json.dumps(sizes),
        **constants,
        "classes": ", ".join(map(str, prepared.setup["classes"])),
        "example": str(world.test.example),
    }
