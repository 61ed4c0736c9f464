"""One peer: a node of the simulator, alone with its data, whose messages travel.

Training, combining, evaluating and saving are those of the simulator's `Shard`, so a network in
which nothing is lost ends with the same bits. What is here is everything else: whom to wait for and
how long, what to do about peers that are gone, and how to come back.
"""

import asyncio
import json
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

from torch import Tensor

from peerage import checkpoint
from peerage.errors import DiskError, Diverged, InputError
from peerage.faults import Way
from peerage.net.mailbox import Mailbox
from peerage.net.network import Network, check_rejoin, differing, sealed
from peerage.net.payload import decode, encode
from peerage.net.traffic import ASKING, Incoming, Outbox, expected_of
from peerage.net.transport import ANSWER_LIMIT, Receiver, Transport, Unreachable
from peerage.net.wire import DONE, Header, Rejected, done, header_bytes, parse_header
from peerage.prepare import Prepared
from peerage.records import MetricWriter, Row, truncate_after
from peerage.running import node_row
from peerage.sim.post import Parcel, Step
from peerage.sim.shard import BEFORE, NodeReport, References, Shard, ShardReport

LOOK = 0.2  # seconds between two looks at the others
POISONED = 3  # rounds in a row that may fail before the peer gives up
PARTIAL = 1 << 28  # bytes of messages that are on their way in
FILE = "part-0.safetensors"
MEETING = "waiting for others"

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
        self.essence = {
            **network.essence,
            "classes": str(self.world.label_counts.shape[1]),
            "example": str(self.world.test.example),
        }
        self.seal = sealed(self.essence)
        self.mailbox = Mailbox(network.ahead, 4 * self.expected.max_bytes)
        self.judged = prepared.experiment.evaluation.judged(self.world.rounds)
        self.counters: Counter[str] = Counter()  # what went wrong, by reason
        self.round = BEFORE  # that is being played
        self.rounds: dict[int, int] = {}  # peer -> the last that it was known to be in
        self.state = "starting"
        self.life = secrets.token_hex(8)  # another one after every restart
        self.met: dict[int, str] = {}  # peers that were there before the first round, their lives
        self.awaited = True  # whether the others began with us
        self.heard: tuple[int, int] = (0, 0)  # in the last step: how many, of how many
        self.bytes_total = 0
        self.alive = 0  # peers that could be reached after the last round
        self.rows: list[Row] = []
        self._incoming: dict[tuple[int, int, int], Incoming] = {}
        self._outboxes: dict[int, Outbox] = {}
        self._writer: MetricWriter | None = None
        self._poisoned = 0
        self._kept: tuple[Parcel, int] | None = None
        self._offered: tuple[Header, memoryview] | None = None

    # The life of a peer

    async def run(self) -> Tensor:
        """Play all rounds; the parameters [d] in the end."""
        await self.transport.start(self)
        try:
            first = self._resume()
            # Who comes back does not wait for others that may have finished long ago.
            patience = self.network.patience
            await self._meet(patience.gone if first else patience.start)
            first = await self._catch_up(first)
            if first == 0:
                await self._begin()
            await self._rounds(first)
            self.state = "finished"
            for peer, outbox in self._outboxes.items():
                if self.transport.reachable(peer):
                    await outbox.flush(self.network.patience.step)
        except DiskError as error:
            await self._stuck(error)
            raise
        finally:
            for outbox in self._outboxes.values():
                await outbox.close()
            await self.transport.stop()
            if self._writer is not None:
                self._writer.close()
        return self.shard.members[self.me].node.params

    def _resume(self) -> int:
        """Take up the last checkpoint, if there is one; the round to go on with."""
        if self.folder is None:
            return 0
        self.folder.mkdir(parents=True, exist_ok=True)
        saved = checkpoint.load(self.folder)
        if saved is not None:
            self.shard.restore(str(saved.folder), saved.trees, saved.parts)
        metrics = self.folder / "metrics.jsonl"
        if metrics.exists():
            truncate_after(metrics, saved.round if saved else -1)
        self._writer = MetricWriter(metrics)
        return saved.round if saved else 0

    async def _meet(self, seconds: float) -> None:
        """Wait until everybody is there, or patience is over; refuse another experiment."""
        self.state = MEETING
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        missing = set(self.others)
        while missing and self.awaited and loop.time() < deadline:
            for peer, answer in (await self._ask_all(missing)).items():
                missing.discard(peer)
                self.met[peer] = answer["life"]
                # Those who began without us do not wait, and neither do we.
                self.awaited = self.awaited and answer["awaited"]
            if missing and self.awaited:
                await asyncio.sleep(LOOK)
        if missing and self.awaited:
            log.warning("beginning without %s", ", ".join(self._name(peer) for peer in missing))

    async def _ask_all(self, peers: Iterable[int]) -> dict[int, dict[str, Any]]:
        """What those say about themselves that answer, all asked at once."""
        asked = sorted(peers)
        answers = await asyncio.gather(*(self._status(peer) for peer in asked))
        return {p: answer for p, answer in zip(asked, answers, strict=True) if answer is not None}

    @property
    def others(self) -> list[int]:
        return [peer for peer in range(self.world.nodes) if peer != self.me]

    async def _status(self, peer: int) -> dict[str, Any] | None:
        """What another peer says about itself; None if it cannot be asked."""
        question = json.dumps({"ask": "status", "life": self.life}).encode()
        try:
            answer = json.loads(await self.transport.ask(peer, question, ASKING))
            round, state, seal = int(answer["round"]), str(answer["state"]), str(answer["seal"])
            life, awaited = str(answer["life"]), bool(answer["awaited"])
        except (Unreachable, Rejected, ValueError, KeyError, TypeError):
            return None
        if seal != self.seal:
            await self._complain(peer)
        self._hear_of(peer, round)
        return {"round": round, "state": state, "life": life, "awaited": awaited}

    async def _complain(self, peer: int) -> None:
        """Name what the other peer's experiment has different."""
        question = json.dumps({"ask": "essence"}).encode()
        try:
            theirs = json.loads(await self.transport.ask(peer, question, ASKING))
            keys = differing(self.essence, {str(k): str(v) for k, v in theirs.items()})
        except (Unreachable, Rejected, ValueError, AttributeError):
            keys = []
        what = "; ".join(keys[:5]) or "something"
        raise InputError(
            f"{self._name(peer)} runs another experiment: {what}; give all peers the same files"
        )

    async def _catch_up(self, first: int) -> int:
        """The round to begin with: where the others are, if they are further."""
        if self.awaited or self.newest <= first:
            return first
        log.info("the others are in round %d, we were in %d", self.newest + 1, first + 1)
        keeps = self.world.keeper(self.me) == self.me != self.world.hub
        if self.rejoin == "neighbour" and keeps and self.newest > first + self.network.ahead:
            await self._adopt()
        return self.newest

    async def _adopt(self) -> None:
        """Take over the model of the first neighbour that offers one of the same kind."""
        node = self.shard.members[self.me].node
        for peer in self.world.neighbours(self.newest)[self.me]:
            try:
                offer = await self._fetch(peer)
            except (Unreachable, Rejected) as error:
                log.info("no model from %s: %s", self._name(peer), error)
                continue
            if offer.architecture == node.architecture:
                node.params, node.buffers = offer.payload["x"], offer.payload["b"]
                log.info("going on with the model of %s", self._name(peer))
                return

    async def _fetch(self, peer: int) -> Parcel:
        """The model that a peer had after its last round, piece by piece."""
        raw = await self.transport.ask(peer, json.dumps({"ask": "model"}).encode(), ASKING)
        header = parse_header(raw, self.expected, peer)
        incoming = Incoming(header)
        while incoming.here < header.size:
            question = {"ask": "piece", "of": header.checksum, "offset": incoming.here}
            piece = await self.transport.ask(peer, json.dumps(question).encode(), ASKING)
            if not 0 < len(piece) <= header.size - incoming.here:
                raise Rejected("truncated", f"a piece of {len(piece)} bytes")
            incoming.add(piece)
        parcel = decode(header, incoming.data, self.expected, incoming.checksum)
        if not {"x", "b"} <= parcel.payload.keys():
            raise Rejected("name", "the model has no parameters")
        return parcel

    async def _begin(self) -> None:
        """What comes before the first round."""
        sent = 0
        if self.world.prelude is not None:
            self.state = "playing"
            sent = await self._converse(BEFORE, self.shard.prelude)
        self._record(0, await self._compute(self.shard.measure), sent, 0.0)

    async def _rounds(self, first: int) -> None:
        round = first
        while round < self.world.rounds:
            if not self.world.faults.present(self.me, round):
                if round + 1 >= self.world.faults.left.get(self.me, self.world.rounds + 1):
                    return
                await self._until(round)
            else:
                await self._play(round)
            round += 1
            if self.heard[0] < self.heard[1]:
                round = await self._fall_in(round)

    async def _fall_in(self, round: int) -> int:
        """The round to go on with after messages did not come: perhaps we are out of step.

        Halves of a network that was cut go on at their own speeds. Who is behind then leaves rounds
        out. Who is alone in front waits, as nobody follows a single one: he might lie.
        """
        ahead = self.network.ahead
        if self.newest > round + ahead:  # nobody waits for us any more
            log.warning("skipping from round %d to %d", round + 1, self.newest + 1)
            return self.newest
        loop, seen = asyncio.get_running_loop(), BEFORE
        patient = loop.time()
        while BEFORE < self.newest < round - ahead:
            if self.newest > seen:
                seen, patient = self.newest, loop.time() + self.network.patience.step
            if loop.time() > patient:
                break
            self.state = "waiting for the others to come up"
            await asyncio.sleep(LOOK)
            await self._ask_all(filter(self.transport.reachable, self.others))
        return round

    async def _until(self, round: int) -> None:
        """Sit a round out, but do not run ahead of the others."""
        self.state = "absent"
        self.mailbox.enter(round)
        self.round = round
        while self.newest <= round:
            if not await self._ask_all(self.others):
                return
            await asyncio.sleep(LOOK)

    async def _play(self, round: int) -> None:
        start, self.heard = perf_counter(), (0, 0)
        member = self.shard.members[self.me]
        node = member.node
        # Tensors are never changed in place, so to remember them is to be able to go back.
        before = node.params, node.buffers, node.state, dict(member.memory)
        evaluate = round + 1 in self.judged
        self.state = "playing"
        try:
            sent = await self._converse(round, lambda: self.shard.begin(round, evaluate))
            report = await self._compute(self.shard.finish)
            self._poisoned = 0
        except (DiskError, Diverged, InputError):
            raise
        except Exception as error:
            # Messages fit by name and shape, and still the algorithm could make nothing of them.
            self._poisoned += 1
            self.counters["poisoned round"] += 1
            if self._poisoned >= POISONED:
                raise
            log.error("round %d failed and is left out: %s", round + 1, error)
            node.params, node.buffers, node.state = before[:3]
            member.memory.clear()
            member.memory.update(before[3])
            return
        self._record(round + 1, report, sent, perf_counter() - start)
        self._keep(round)
        await self._compute(self._save, round + 1)  # a disk may be slow, and others ask

    async def _converse(self, round: int, begin: Callable[[], Step]) -> int:
        """Carry messages until the node has finished; how many bytes it sent."""
        self.mailbox.enter(round)
        self.round = round
        way = self.world.way(round)
        places: Counter[int] = Counter()  # messages so far, by recipient
        asked: Counter[int] = Counter()  # by sender
        sent = 0
        step = await self._compute(begin)
        while True:
            if step.diverged:
                raise Diverged(
                    f"the loss or the parameters became NaN or infinite in round {round + 1}; "
                    "lower --lr (or the gain) and run again"
                )
            for parcel in step.parcels:
                sent += self._post(parcel, round, places, way)
            if self.me not in step.waiting:
                break
            parcels = await self._gather(round, step.waiting[self.me], asked, way)
            step = await self._compute(self.shard.resume, {self.me: parcels})
        for listener in self.world.listeners(round)[self.me]:
            self._outbox(listener).put(
                done(
                    run=self.network.run,
                    round=round,
                    sender=self.me,
                    recipient=listener,
                    sent=places[listener],
                )
            )
        return sent

    def _post(self, parcel: Parcel, round: int, places: Counter[int], way: Way | None) -> int:
        """Hand a parcel to the outboxes; its bytes, once for every recipient that it goes to."""
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
            if way is None or (way.open(sender, self.me) and not way.lost(sender, self.me, place)):
                hoped.append(sender)
            else:
                self.mailbox.skip(sender)
        deadline = asyncio.get_running_loop().time() + self.network.patience.step
        found = await self.mailbox.collect(round, hoped, deadline, self._gone)
        self.heard = len(found), len(hoped)
        if len(found) < len(hoped):
            self.counters["missing"] += len(hoped) - len(found)
        return [found[sender] for sender in sorted(found)]

    def _gone(self, peer: int) -> bool:
        """Whether there is no point in waiting; without a hub, its clients have nothing to do."""
        return peer != self.world.hub and not self.transport.reachable(peer)

    async def _stuck(self, error: DiskError) -> None:
        """Say why, and go on answering others for as long as they are there."""
        self.state = f"stopped: {error}"
        log.error("%s; this peer trains no more, and still answers", error)
        while await self._ask_all(self.others):
            await asyncio.sleep(LOOK)

    # What it writes down

    def _record(self, round: int, report: ShardReport, sent: int, seconds: float) -> None:
        [mine] = report.nodes or [NodeReport(self.me, None)]
        self.alive = sum(map(self.transport.reachable, self.others))
        self.bytes_total += sent
        row = node_row(round, mine)
        row |= {"bytes": sent, "heard": list(self.heard), "seconds": {"total": seconds}}
        self.rows.append(row)
        if self._writer is not None:
            self._writer.append(row)
        if self.watch is not None:
            self.watch(row)

    def _offer(self) -> tuple[Header, memoryview] | None:
        """The model after the last round, for those who missed rounds and ask for one."""
        if self._kept is not None and self._offered is None:
            parcel, round = self._kept
            self._offered = encode(parcel, run=self.network.run, round=round, recipient=0, place=0)
        return self._offered

    def _keep(self, round: int) -> None:
        """Remember the model as it is; it is written down only if somebody asks."""
        node = self.shard.members[self.me].node
        if self.world.keeper(self.me) != self.me:
            return
        payload = {"x": node.params, "b": node.buffers}
        degree = len(node.neighbours)
        parcel = Parcel(self.me, (), node.num_examples, degree, node.architecture, payload, 0)
        self._kept, self._offered = (parcel, round), None

    def _save(self, round: int) -> None:
        if self.folder is not None:
            checkpoint.save(self, self.folder, round)

    def save(self, folder: Path) -> tuple[dict[str, Any], dict[str, str]]:
        """As an engine does, for `checkpoint.save`."""
        trees = self.shard.save(str(folder / FILE))
        return trees, dict.fromkeys(trees, FILE)

    # What others send

    def accept(self, raw: bytes, identity: int) -> tuple[Header, int]:
        try:
            header = parse_header(raw, self.expected, identity)
            self._hear_of(identity, header.round)
            self.mailbox.check(header)
        except Rejected as refusal:
            self.counters[refusal.reason] += 1
            raise
        if header.kind == DONE:
            return header, 0
        key = (header.sender, header.round, header.place)
        known = self._incoming.get(key)
        if known is None or known.header != header:
            self._make_room(header.size)
            known = self._incoming[key] = Incoming(header)
        return header, known.here

    def _make_room(self, size: int) -> None:
        """Broken transfers that nobody went on with must not fill the memory."""
        while (
            self._incoming and size + sum(i.header.size for i in self._incoming.values()) > PARTIAL
        ):
            del self._incoming[next(iter(self._incoming))]  # its sender will be told to try again

    def chunk(self, header: Header, offset: int, data: bytes) -> None:
        known = self._incoming.get((header.sender, header.round, header.place))
        if known is None or known.header != header:
            raise self._refuse("full", "what was here of the message had to make room for others")
        if offset != known.here:
            raise self._refuse("truncated", f"bytes from {offset} on do not continue what is here")
        if offset + len(data) > header.size:
            raise self._refuse(
                "oversized", f"more bytes than the {header.size} that were announced"
            )
        known.add(data)

    async def complete(self, header: Header) -> None:
        known = self._incoming.pop((header.sender, header.round, header.place), None)
        try:
            if header.kind == DONE:
                self.mailbox.put(header, None)
                return
            if known is None:
                raise Rejected("full", "what was here of the message had to make room for others")
            if known.here < header.size:
                raise Rejected("truncated", f"{known.here} bytes came instead of {header.size}")
            parcel = await self._aside(
                lambda: decode(header, known.data, self.expected, known.checksum)
            )
            self.mailbox.put(header, parcel)
        except Rejected as refusal:
            self.counters[refusal.reason] += 1
            raise

    async def answer(self, question: bytes, identity: int) -> bytes:
        try:
            asked = dict(json.loads(question))
        except (ValueError, TypeError, RecursionError):
            asked = {}
        if asked.get("ask") == "status":
            begun = self.state not in ("starting", MEETING)
            awaited = not begun or self.met.get(identity) == asked.get("life")
            return json.dumps({**self.status(), "awaited": awaited}).encode()
        if asked.get("ask") == "essence":
            return json.dumps(self.essence).encode()
        if asked.get("ask") == "model":
            offer = self._offer()
            if offer is not None:
                return header_bytes(replace(offer[0], recipient=identity))
        if asked.get("ask") == "piece" and self._offered is not None:
            header, payload = self._offered
            offset = asked.get("offset")
            if asked.get("of") == header.checksum and type(offset) is int and offset >= 0:
                return bytes(payload[offset : offset + ANSWER_LIMIT])
        raise self._refuse("malformed", "the question is not one that a peer answers")

    def status(self) -> dict[str, Any]:
        """What a peer says about itself to others."""
        return {
            "seal": self.seal,
            "life": self.life,
            "round": self.round,
            "state": self.state,
        }

    def _refuse(self, reason: str, text: str) -> Rejected:
        self.counters[reason] += 1
        return Rejected(reason, text)

    # Small things

    def _hear_of(self, peer: int, round: int) -> None:
        last = self.world.rounds - 1
        self.rounds[peer] = min(round, last)  # which may be less than before, after a restart

    @property
    def newest(self) -> int:
        """The round that two of the others have reached who are there; one alone is not believed.

        Where there are no three others, or where there is a hub, one must do.
        """
        hub = self.world.hub
        if hub is not None and hub != self.me:
            return self.rounds.get(hub, BEFORE)
        known = sorted(
            round for peer, round in self.rounds.items() if self.transport.reachable(peer)
        )
        return known[-2] if len(known) > 2 else max(known, default=BEFORE)

    @property
    def finished(self) -> int:
        """Rounds."""
        return int(self.rows[-1]["round"]) if self.rows else 0

    @property
    def accuracy(self) -> float | None:
        """When it was judged last."""
        return next((row["accuracy"] for row in reversed(self.rows) if "accuracy" in row), None)

    def _outbox(self, peer: int) -> Outbox:
        if peer not in self._outboxes:
            patience = self.network.patience.step
            self._outboxes[peer] = Outbox(self.transport, patience, self.counters)
        return self._outboxes[peer]

    def _name(self, peer: int) -> str:
        return self.network.members[peer].name

    async def _compute(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """Work of the node, beside the event loop, which goes on answering others."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.executor, lambda: work(*arguments))

    async def _aside(self, work: Callable[[], Parcel]) -> Parcel:
        """Reading a large message must not hold up the loop."""
        return await asyncio.get_running_loop().run_in_executor(None, work)
