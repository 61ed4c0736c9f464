"""Hostile messages of every layer against one live peer, from outsiders and from members.

Each attacker is a process of its own, which writes what it has done to a file, again and again. A
*message* is one connection of an outsider, one frame, one call, or one frame in a tunnel; it counts
once the peer has answered, refused, ignored or disconnected it.
"""

import json
import random
import socket
import ssl
import struct
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from support.hostile import ANY, ODD, Mutation, as_others_read_it, dumps, mutations, noise
from support.http2 import (
    END_HEADERS,
    END_STREAM,
    LARGEST,
    PREFACE,
    Closed,
    Connection,
    Type,
    frame,
    grpc_message,
    header_block,
    request,
)
from support.outsiders import member_context

from peerage.engine.router import Packet
from peerage.files import write_json
from peerage.net.trust.identity import Identity, server_name
from peerage.net.wire.frames import Frame, Kind
from peerage.net.wire.header import header_bytes
from peerage.net.wire.payload import encode
from peerage.net.wire.server import OFFSET, SERVICE
from peerage.net.wire.transport import CHUNK
from peerage.requests import Envelope

HONEST = (0, 1, 2)
# The first sends messages, the second makes other calls, and the third dials out.
SENDER, CALLER, DIALLER = ATTACKERS = (3, 4, 5)
AT_ONCE = 8  # calls on a connection, which is what peers allow
FRAMES = 32  # on a connection, before all are known to have been read
FATAL = 0.3  # of the batches of frames end with one that should end the connection
REACTION = 0.3  # seconds to wait for it
REFRESH = 8  # batches of messages, after which the round of the peer is asked for
REPORT = 1.0  # seconds between two reports
LOOPBACKS = [f"127.0.0.{last}" for last in range(2, 250)]  # addresses that no peer has
FREE = {"round", "sequence", "examples", "degree", "number", "acknowledged"}  # a member may lie

ANSWERED, REFUSED, IGNORED, CLOSED = "answered", "refused", "ignored", "disconnected"


@dataclass(frozen=True)
class Settings:
    """What the attacker of one peer needs to know."""

    victim: int
    port: int
    certs: str
    foreign: str  # certificates with the same names, from another authority
    values: int  # parameters of the model
    budget: int
    seconds: float
    seed: int
    report: str


class Fuzzer:
    """Sends hostile messages to one peer."""

    def __init__(self, settings: Settings, who: str) -> None:
        self.settings, self.rng = settings, random.Random(f"{settings.seed} {who}")
        self.outcomes: Counter[str] = Counter()  # "layer: kind: outcome"
        self.wrong: list[str] = []  # messages that were accepted although a check forbids it
        self.connections: dict[int, Connection] = {}  # by the member that attacks
        self.contexts = {me: member_context(self._identity(me)) for me in ATTACKERS}
        self.round, self.sequence, self.batches = 0, 0, 0

    def _identity(self, me: int, folder: str | None = None) -> Identity:
        return Identity.within(Path(folder or self.settings.certs), f"node-{me}")

    def layers(self) -> dict[str, dict[Callable[[], None], int]]:
        """Who sends what, each with its percentage of the messages."""
        return {
            "outsiders": {self.certificates: 1, self.client_hellos: 3, self.bytes_before_tls: 4},
            "sender": {self.messages: 44, self.chunks: 4, self.offsets: 3},
            "caller": {
                self.tls_records: 1,
                self.http2_frames: 17,
                self.calls: 10,
                self.questions: 8,
            },
            "dialler": {self.tunnels: 5},
        }

    def run(self, who: str) -> None:
        """Send all messages of one attacker, or as many as there is time for."""
        layers = self.layers()[who]
        sent = dict.fromkeys(layers, 0)
        budget = -(-self.settings.budget * sum(layers.values()) // 100)
        end = time.monotonic() + self.settings.seconds
        while (before := self.outcomes.total()) < budget and time.monotonic() < end:
            layer = min(layers, key=lambda one: sent[one] / layers[one])
            layer()
            sent[layer] += max(self.outcomes.total() - before, 1)

    def note(self, kind: str, outcome: str) -> None:
        self.outcomes[f"{kind}: {outcome}"] += 1

    # Outsiders, each message on a connection of its own

    def bytes_before_tls(self) -> None:
        rng = self.rng
        kinds = {
            "noise": rng.randbytes(rng.choice([1, 5, 100, 2000])),
            "HTTP/1": b"GET / HTTP/1.1\r\nHost: peer\r\n\r\n" + noise(rng, b"x" * 50),
            "HTTP/2 without TLS": PREFACE + frame(Type.SETTINGS, 0, 0) + noise(rng, b"x" * 50),
            "nothing": b"",
            "TLS record of noise": b"\x16\x03\x01" + rng.randbytes(rng.choice([2, 50, 5000])),
            "TLS alert": b"\x15\x03\x03\x00\x02" + rng.randbytes(2),
            "SSL 2": b"\x80\x2e\x01\x00\x02" + rng.randbytes(44),
        }
        names = rng.choices(list(kinds), k=AT_ONCE)
        self._from_outsiders([(f"bytes: {name}", kinds[name]) for name in names])

    def client_hellos(self) -> None:
        """Mutations of the first message of a TLS client."""
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        context = self.contexts[SENDER]
        tls = context.wrap_bio(incoming, outgoing, server_hostname=self._name)
        with suppress(ssl.SSLWantReadError):
            tls.do_handshake()
        hello = outgoing.read()
        names = self.rng.choices(list(ANY), k=AT_ONCE)
        self._from_outsiders([(f"TLS hello: {n}", ANY[n](self.rng, hello)) for n in names])

    def _from_outsiders(self, messages: Sequence[tuple[str, bytes]]) -> None:
        where = ("127.0.0.1", self.settings.port)
        opened: list[tuple[str, socket.socket | None]] = []
        for kind, data in messages:
            one = None
            with suppress(OSError):
                source = (self.rng.choice(LOOPBACKS), 0)
                one = socket.create_connection(where, 60.0, source_address=source)
                one.sendall(data)
                one.shutdown(socket.SHUT_WR)
            opened.append((kind, one))
        for kind, each in opened:
            if each is not None:
                with suppress(ConnectionError), each:
                    while each.recv(1 << 12):
                        pass
            self.note(kind, CLOSED)

    def certificates(self) -> None:
        """Complete handshakes with no certificate, or with one of another authority."""
        authority = self._identity(SENDER).authority
        none = ssl.create_default_context(cafile=authority)
        other = ssl.create_default_context(cafile=authority)
        foreign = self._identity(SENDER, self.settings.foreign)
        other.load_cert_chain(foreign.certificate, foreign.key)
        for name, context in (("none", none), ("of another authority", other)):
            context.set_alpn_protocols(["h2"])
            outcome = CLOSED
            with suppress(OSError):
                source = self.rng.choice(LOOPBACKS)
                connection = Connection(self.settings.port, context, self._name, source)
                try:
                    stream = connection.call(_path("Status"), [b""])
                    outcome = ANSWERED if connection.finish(stream)[0].data else REFUSED
                finally:
                    connection.close()
            self.note(f"certificate: {name}", outcome)
            if outcome == ANSWERED:
                self.wrong.append(f"a caller with a certificate {name} was answered")

    # Members

    @property
    def _name(self) -> str:
        return server_name(f"node-{self.settings.victim}")

    def _connection(self, me: int) -> Connection:
        if me not in self.connections:
            self.connections[me] = Connection(
                self.settings.port, self.contexts[me], self._name, "127.0.0.1"
            )
        return self.connections[me]

    def _disconnect(self, me: int) -> None:
        if me in self.connections:
            self.connections.pop(me).close()

    def tls_records(self) -> None:
        """Bytes that are no valid records, after the handshake of a member."""
        rng, kind = self.rng, "TLS records"
        junk = rng.choice(
            [
                b"\x17\x03\x03" + struct.pack(">H", 100) + rng.randbytes(100),
                b"\x17\x03\x03\xff\xff" + rng.randbytes(50),
                b"\x16\x03\x03\x00\x04" + rng.randbytes(4),
                rng.randbytes(rng.choice([1, 5, 300])),
            ]
        )
        with suppress(OSError):
            connection = Connection(
                self.settings.port, self.contexts[CALLER], self._name, "127.0.0.1"
            )
            try:
                connection.flush()
                plain = socket.socket(fileno=connection.socket.detach())
                with plain:
                    plain.settimeout(60.0)
                    plain.sendall(junk)
                    plain.shutdown(socket.SHUT_WR)
                    while plain.recv(1 << 12):
                        pass
            finally:
                connection.close()
        self.note(kind, CLOSED)

    def http2_frames(self) -> None:
        """A ping follows each frame, so that the answers tell how many frames were read."""
        names, pongs = [], 0
        with suppress(OSError):
            connection = self._connection(CALLER)
            connection.pongs.clear()
            for number in range(FRAMES):
                name, raw = self._harmless_frame()
                names.append(f"HTTP/2: {name}")
                connection.write(raw + frame(Type.PING, 0, 0, struct.pack(">Q", number)))
            while connection.pongs[-1:] != [struct.pack(">Q", FRAMES - 1)]:
                connection.receive()
                pongs = sum(len(pong) == 8 and pong < bytes([1]) for pong in connection.pongs)
            pongs = FRAMES
        for name in names[:pongs]:
            self.note(name, IGNORED)
        if pongs == FRAMES and self.rng.random() < FATAL:
            self._fatal_frame()
        elif pongs < FRAMES:
            for name in names[pongs : pongs + 1]:
                self.note(name, CLOSED)
            self._disconnect(CALLER)

    def _fatal_frame(self) -> None:
        """One that ends the connection, or after which nothing can be read."""
        name, raw = self._odd_frame()
        outcome = CLOSED
        with suppress(OSError):
            connection = self._connection(CALLER)
            connection.socket.settimeout(REACTION)
            connection.write(raw)
            try:
                while True:
                    connection.receive()
            except Closed as error:
                outcome = IGNORED if str(error) == "no answer" else CLOSED
        self._disconnect(CALLER)
        self.note(f"HTTP/2: {name}", outcome)

    def _harmless_frame(self) -> tuple[str, bytes]:
        """One that a server may ignore."""
        rng = self.rng
        stream = rng.choice([0, 1, 2, 3, 7, 2**31 - 1, rng.randrange(2**31)])
        kinds = {
            "unknown type": frame(rng.randrange(10, 256), rng.randrange(256), stream, b"\xff" * 9),
            "ping": frame(Type.PING, rng.choice([0, 2, 254]), 0, b"\xff" + rng.randbytes(7)),
            "answer to no ping": frame(Type.PING, 1, 0, b"not sent"),
            "priority": frame(Type.PRIORITY, 0, 1, rng.randbytes(5)),
            "window of a closed stream": frame(Type.WINDOW_UPDATE, 0, 1, b"\x00\x00\x00\x01"),
            "reset of a closed stream": frame(Type.RST_STREAM, 0, 1, rng.randbytes(4)),
            "unknown setting": frame(
                Type.SETTINGS, 0, 0, struct.pack(">HI", rng.randrange(9, 99), 7)
            ),
        }
        name = rng.choice(list(kinds))
        return name, kinds[name]

    def _odd_frame(self) -> tuple[str, bytes]:
        rng = self.rng
        stream = rng.choice([0, 1, 2, 3, 7, 2**31 - 1, rng.randrange(2**31)])
        block = header_block(request(_path("Status")))
        kinds = {
            "any type": frame(rng.randrange(10), rng.randrange(256), stream, noise(rng, block)),
            "lying length": b"\xff\xff\xff" + rng.randbytes(6) + rng.randbytes(100),
            "settings of any value": frame(Type.SETTINGS, 0, 0, rng.randbytes(6)),
            "settings cut": frame(Type.SETTINGS, 0, 0, rng.randbytes(rng.randrange(1, 6))),
            "bad header block": frame(
                Type.HEADERS, END_HEADERS | END_STREAM, 2**31 - 1, rng.randbytes(60)
            ),
            "headers that never end": frame(Type.HEADERS, 0, 2**31 - 3, block),
            "padding beyond the frame": frame(Type.DATA, 8, 1, b"\xff" + b"x"),
            "window of 2^31": frame(Type.WINDOW_UPDATE, 0, 0, b"\x7f\xff\xff\xff"),
            "goaway": frame(Type.GOAWAY, 0, 0, rng.randbytes(8)),
            "noise": rng.randbytes(rng.choice([1, 9, 100])),
            "large": frame(rng.randrange(10), 0, stream, bytes(LARGEST + 1)),
        }
        name = rng.choice(list(kinds))
        return name, kinds[name]

    def calls(self) -> None:
        """Odd methods, metadata and lengths."""
        self._batch(CALLER, [self._odd_call() for _ in range(AT_ONCE)])

    def _odd_call(self) -> tuple[str, Any, bytes]:
        rng = self.rng
        method = rng.choice(["Deliver", "Offset", "Ask", "Status", "Hello", "Tunnel"])
        text = rng.choice([str(odd).encode("utf-8", "replace") for odd in ODD])
        text = text.replace(b"\0", b"0").replace(b"\r\n", b"%")[:2000]
        body = grpc_message(noise(rng, b"x" * 50))
        prefix = struct.pack(">BI", rng.choice([0, 1, 2, 255]), rng.choice([0, 1, 49, 2**32 - 1]))
        metadata = {
            "offset": (OFFSET.encode(), text),
            "timeout": (b"grpc-timeout", rng.choice([b"0n", b"1u", b"99999999H", b"-1S", text])),
            "encoding": (b"grpc-encoding", rng.choice([b"gzip", b"deflate", b"identity", text])),
            "binary": (b"odd-bin", rng.choice([b"AAA", b"=", b"!!!", text])),
            "long": (b"long", b"x" * rng.choice([4000, 9000, 20_000])),
            "reason": (b"peerage-reason", text),
            "upper case": (b"Upper", b"1"),
        }
        key = rng.choice(list(metadata))
        kinds = {
            "method": (
                request(rng.choice([text, b"", b"/", b"/" + text, _path(f"x{text!r}")])),
                body,
            ),
            f"metadata: {key}": (request(_path(method), [metadata[key]]), body),
            "message length": (request(_path(method)), prefix + body[5:]),
            "cut message": (request(_path(method)), body[: rng.randrange(len(body))]),
            "content type": ([*request(_path(method))[:-1], (b"content-type", text)], body),
            "no pseudo-headers": (request(_path(method))[rng.randrange(1, 5) :], body),
            "HTTP method": ([(b":method", rng.choice([b"GET", text])), *request(b"/")[1:]], body),
            "health": (request(b"/grpc.health.v1.Health/Check"), grpc_message(b"\xff" + text)),
        }
        name = rng.choice(list(kinds))
        return f"call: {name}", *kinds[name]

    def messages(self) -> None:
        """Mutations of a message for the next round, which the peer never waits for."""
        self._refresh()
        mutated = list(self._mutated(AT_ONCE))
        calls = [
            (f"message: {one.kind}", request(_path("Deliver")), _deliver(one)) for one in mutated
        ]
        answers = self._batch(SENDER, calls)
        for one, answered in zip(mutated, answers, strict=False):
            if not answered:
                continue
            if not self.is_valid(one):
                self.wrong.append(f"{one.kind}: {one.header[:2000]!r} {one.payload[:200].hex()}")
            self.sequence += 1  # that of the message is used

    def _refresh(self) -> None:
        """Ask the peer for its round, as members do."""
        self.batches += 1
        if self.batches % REFRESH == 1:
            with suppress(OSError, ValueError):
                connection = self._connection(SENDER)
                stream = connection.call(_path("Ask"), [b'{"ask": "status"}'])
                answer = connection.finish(stream)[0].data
                round = max(json.loads(answer[5:])["round"], 0) + 1
                self.round, self.sequence = round, self.sequence if round == self.round else 0

    def valid(self) -> tuple[bytes, bytes]:
        """A message that the peer accepts and never uses: it waits for the first of a round."""
        values = torch.linspace(-0.1, 0.1, self.settings.values)
        tensors = {"x": values, "b": torch.empty(0)}
        packet = Packet(Envelope(SENDER, 10, 5, "logistic", 0), (self.settings.victim,), tensors, 0)
        header, data = encode(
            packet,
            run="test",
            round=self.round,
            recipient=self.settings.victim,
            sequence=self.sequence + 1,
        )
        return header_bytes(header), bytes(data)

    def _mutated(self, count: int) -> Iterator[Mutation]:
        every = mutations(self.rng, *self.valid())
        while count:
            one = next(every)
            with suppress(ValueError, RecursionError, TypeError, KeyError, UnicodeDecodeError):
                if json.loads(one.header)["sequence"] == 0:
                    continue  # this could be a valid one that is used
            yield one
            count -= 1

    def is_valid(self, one: Mutation) -> bool:
        """Whether a message may be accepted, by other means than those of the peer."""
        stated, base = json.loads(one.header), json.loads(self.valid()[0])
        if stated.keys() != base.keys():
            return False
        inside = {"size", "checksum", "wire", "packed", "kind"}
        if any(stated[key] != base[key] for key in base.keys() - FREE - inside):
            return False
        if stated["kind"] == "done":
            return True
        if (stated["size"], stated["checksum"]) != (len(one.payload), zlib.crc32(one.payload)):
            return False
        tensors = as_others_read_it(one.header, one.payload)
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        good = {"x": (self.settings.values,), "b": (0,)}
        return shapes.items() <= good.items() and all(
            bool(torch.isfinite(tensor).all()) for tensor in tensors.values()
        )

    def chunks(self) -> None:
        """Parts of a message that are too small, too many, missing, or in another order."""
        self._refresh()
        calls = []
        for _ in range(AT_ONCE):
            header, payload = self.valid()
            size = self.rng.choice([1, 7, 100, len(payload) - 1])
            pieces = [payload[i : i + size] for i in range(0, len(payload), size)]
            kinds = {
                "crumbs": [header, *pieces],
                "other order": [header, *reversed(pieces)],
                "payload first": [payload, header],
                "header twice": [header, header, payload],
                "no payload": [header],
                "empty chunk": [header, b"", payload],
                "one more": [header, payload, payload],
                "nothing": [],
                "huge": [header, bytes(CHUNK)],
            }
            name = self.rng.choice(list(kinds))
            body = b"".join(map(grpc_message, kinds[name]))
            calls.append((f"chunks: {name}", request(_path("Deliver")), body))
        self._batch(SENDER, calls, wrong=True)

    def offsets(self) -> None:
        """Mutated headers, for the method that tells how much of a message has arrived."""
        self._refresh()
        calls = [
            (f"offset: {one.kind}", request(_path("Offset")), grpc_message(one.header))
            for one in self._mutated(AT_ONCE)
        ]
        self._batch(SENDER, calls)

    def questions(self) -> None:
        self._batch(CALLER, [self._odd_question() for _ in range(AT_ONCE)])

    def _odd_question(self) -> tuple[str, Any, bytes]:
        rng = self.rng
        if rng.random() < 0.001:  # the peer asks the attacker, and waits for it
            return "question: relayed", request(_path("Status")), grpc_message(b"node-5")
        if rng.random() < 0.3:
            name = rng.choice([b"", b"node-0", noise(rng, b"x" * 60), b"x" * 64, b"\xff"])
            return "question: report", request(_path("Status")), grpc_message(name)
        status = {
            "settings_hash": "0" * 64,
            "incarnation": "x",
            "round": 3,
            "state": "running",
            "awaited": True,
            "versions": None,
            "unreachable": None,
            "revision": 1,
        }
        status[rng.choice(list(status))] = rng.choice(ODD)
        asks = ["status", "finished", "done", "data", "settings", "model", "piece", "final model"]
        asked = rng.choice([*asks, rng.choice(ODD)])
        question = {"ask": asked, "status": status, "incarnation": rng.choice(ODD)}
        question |= {key: rng.choice(ODD) for key in ("round", "of", "offset")}
        raw = dumps(question)
        kinds = {
            "fields": raw,
            "nested": b"[" * rng.choice([10, 9999]) + b"{" * 99,
            "noise": noise(rng, raw),
            "mutated": ANY[rng.choice(list(ANY))](rng, raw),
            "large": bytes(1 << 17),
        }
        name = rng.choice(["fields"] * 4 + list(kinds))
        return f"question: {name}", request(_path("Ask")), grpc_message(kinds[name])

    def tunnels(self) -> None:
        """Frames of a peer that dials out, one in each tunnel."""
        rng, calls = self.rng, []
        for _ in range(AT_ONCE):
            number = rng.choice([0, 1, 2, 3, 2**31, 2**32 - 1])
            kinds = {
                "ping": Frame(Kind.PING, number).encode(),
                "result": Frame(Kind.RESULT, number, noise(rng, b"x" * 50)).encode(),
                "status": Frame(Kind.RESULT, number, dumps({"round": rng.choice(ODD)})).encode(),
                "failure": Frame(Kind.FAILURE, number, rng.choice([b"OK - x", b"", b"X"])).encode(),
                "unavailable": Frame(Kind.FAILURE, number, b"UNAVAILABLE - \x1b[2J").encode(),
                "other direction": Frame(rng.choice(list(Kind)), number, b"Ask ").encode(),
                "noise": noise(rng, b"x" * 50),
                "large": Frame(Kind.RESULT, 1, bytes(1 << 18)).encode(),
            }
            name = rng.choice(list(kinds))
            calls.append((f"tunnel: {name}", request(_path("Tunnel")), grpc_message(kinds[name])))
        self._batch(DIALLER, calls)

    def _batch(
        self, me: int, calls: Sequence[tuple[str, Any, bytes]], wrong: bool = False
    ) -> list[bool]:
        """Make these calls at once; return which were answered. `wrong` if none may be."""
        streams: list[int] = []
        answers: list[bool] = []
        with suppress(OSError):
            connection = self._connection(me)
            for _, headers, body in calls:
                stream = connection.begin(headers)
                streams.append(stream)
                connection.send(stream, body)
            for stream in streams:
                answers.append(bool(connection.finish(stream)[0].data))
        for (kind, *_), answered in zip(calls, answers, strict=False):
            self.note(kind, ANSWERED if answered else REFUSED)
            if wrong and answered:
                self.wrong.append(kind)
        if len(answers) < len(calls):
            self._disconnect(me)
            kind = calls[len(answers)][0]  # the others may not have been read
            self.note(kind, CLOSED)
        return answers


def _path(method: str) -> bytes:
    return f"/{SERVICE}/{method}".encode("utf-8", "replace")


def _deliver(one: Mutation) -> bytes:
    pieces = [one.payload[at : at + CHUNK] for at in range(0, len(one.payload), CHUNK)]
    return b"".join(map(grpc_message, [one.header, *pieces]))


def attack(settings: Settings) -> None:
    """What the process of an attacker runs: outsiders and members attack at the same time."""
    torch.set_num_threads(1)
    fuzzers = {who: Fuzzer(settings, who) for who in ("outsiders", "sender", "caller", "dialler")}
    with ThreadPoolExecutor(len(fuzzers)) as threads:
        running = [threads.submit(one.run, who) for who, one in fuzzers.items()]
        while wait(running, REPORT).not_done:
            _report(settings, list(fuzzers.values()), False)
        for one in running:
            one.result()
    _report(settings, list(fuzzers.values()), True)


def _report(settings: Settings, fuzzers: Sequence[Fuzzer], ended: bool) -> None:
    outcomes = sum((one.outcomes.copy() for one in fuzzers), Counter[str]())
    wrong = [text for one in fuzzers for text in one.wrong]
    write_json(Path(settings.report), {"outcomes": outcomes, "wrong": wrong, "ended": ended})
