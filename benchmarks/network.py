"""Sending a large model between two processes: our transport and a bare gRPC stream.

Run `python benchmarks/network.py [--repeats N] [--megabytes N]`. Both use loopback with the same
certificates and chunks, and alternate; the result is the median ratio of consecutive transfers.
The bare stream discards what it receives. Ours keeps the payload and, for the claim, also checks
its checksum, layout and numbers as a peer does. Memory is the peak of the receiving process during
a transfer, minus its memory before and the payload itself.

Two runs with grpcio 1.85.1 on two cores of an AVX-512 Xeon: 0.71 and 0.69 of the bare stream's 880
and 970 MB/s, 0.64 and 0.59 with all checks (0.46 to 0.50 when the checksum was SHA-256), and 4 to
10 chunks of 1 MiB beyond the payload.
"""

import argparse
import asyncio
import json
import multiprocessing
import statistics
import tempfile
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter
from typing import Any

import grpc
import torch

from peerage.engine.router import Packet
from peerage.net.peer.assembler import PartialMessage
from peerage.net.trust.certs import Authority
from peerage.net.trust.identity import Identity, server_name
from peerage.net.wire.grpc import GrpcTransport
from peerage.net.wire.header import Header, MessagePolicy, parse_header
from peerage.net.wire.payload import decode, encode
from peerage.net.wire.transport import CHUNK
from peerage.requests import Envelope, TensorSpec

NAMES = {"sender": 0, "receiver": 1}
MEGABYTE = 1 << 20
RATE_BOUND = 0.5
CHUNKS_BOUND = 16
DEADLINE = 120.0
BARE = "/bare.Stream/Deliver"


class Receiver:
    """Keeps one payload; with `checks`, it validates the payload as a peer does."""

    def __init__(self, limit: int) -> None:
        schema = {"model": {"x": TensorSpec((None,))}}
        self.expected = MessagePolicy("run", 1, frozenset((0, 1)), schema, limit)
        self.checks = False
        self.payload: PartialMessage | None = None

    def accept(self, raw: bytes, identity: int) -> tuple[Header, int]:
        header = parse_header(raw, self.expected, identity)
        self.payload = PartialMessage(header)
        return header, 0

    def chunk(self, header: Header, offset: int, data: bytes) -> None:
        if self.checks:
            self.payload.add(data)
        else:
            self.payload.data[offset : offset + len(data)] = data

    async def complete(self, header: Header) -> None:
        if self.checks:
            await asyncio.to_thread(
                decode, header, self.payload.data, self.expected, self.payload.checksum
            )

    async def answer(self, question: bytes, identity: int) -> bytes:
        """Return the peak memory; or drop the payload, reset the peak and return the memory."""
        if question == b"peak":
            return str(status("VmHWM")).encode()
        self.payload = None
        self.checks = question == b"check"
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        return str(status("VmRSS")).encode()


def status(key: str) -> int:
    """Bytes under this key in /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


def receiver(folder: Path, limit: int, pipe: Connection) -> None:
    async def serve() -> None:
        identity = Identity.load(folder, "receiver")
        transport = GrpcTransport(identity, NAMES, {}, bind="127.0.0.1:0")
        await transport.start(Receiver(limit))
        server, port = await bare_server(identity)
        pipe.send((transport.port, port))
        await asyncio.to_thread(pipe.recv)
        await transport.stop()
        await server.stop(None)

    asyncio.run(serve())


def pem(identity: Identity) -> list[bytes]:
    paths = (identity.authority, identity.key, identity.certificate)
    return [path.read_bytes() for path in paths]


async def bare_server(identity: Identity) -> tuple[Any, int]:
    async def deliver(requests: Any, context: Any) -> bytes:
        async for _ in requests:
            pass
        return b""

    authority, *pair = pem(identity)
    service, method = BARE.strip("/").split("/")
    handler = {method: grpc.stream_unary_rpc_method_handler(deliver)}
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handler),))
    credentials = grpc.ssl_server_credentials([tuple(pair)], authority, require_client_auth=True)
    port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    return server, port


async def seconds(action: Callable[[], Awaitable[Any]]) -> float:
    start = perf_counter()
    await action()
    return perf_counter() - start


async def measure(
    folder: Path, size: int, ports: tuple[int, int], repeats: int
) -> dict[str, float]:
    identity = Identity.load(folder, "sender")
    addresses = {1: f"127.0.0.1:{ports[0]}"}
    transport = GrpcTransport(identity, NAMES, addresses, bind="127.0.0.1:0")
    options = [("grpc.ssl_target_name_override", server_name("receiver"))]
    credentials = grpc.ssl_channel_credentials(*pem(identity))
    tensor = torch.randn(size // 4, generator=torch.Generator().manual_seed(0))
    packet = Packet(Envelope(0, 1, 1, "model"), (1,), {"x": tensor}, size)
    header, payload = encode(packet, run="run", round=0, recipient=1, sequence=0)
    rows: dict[str, list[float]] = {"bare": [], "ours": [], "checked": [], "chunks": []}
    async with grpc.aio.secure_channel(f"127.0.0.1:{ports[1]}", credentials, options) as channel:
        stub = channel.stream_unary(BARE)

        async def bare() -> None:
            await stub(bytes(payload[at : at + CHUNK]) for at in range(0, len(payload), CHUNK))

        async def ours() -> None:
            await transport.send(header, payload, DEADLINE)

        for repeat in range(repeats + 1):
            took = {"bare": await seconds(bare)}
            for kind, question in (("ours", b"keep"), ("checked", b"check")):
                before = int(await transport.ask(1, question, DEADLINE))
                took[kind] = await seconds(ours)
                if kind == "ours":
                    peak = int(await transport.ask(1, b"peak", DEADLINE))
                    took["chunks"] = (peak - before - len(payload)) / CHUNK
            if repeat:  # the first is for warming up
                for kind, value in took.items():
                    rows[kind].append(value)
    await transport.stop()
    return summary(rows, len(payload))


def summary(rows: dict[str, list[float]], size: int) -> dict[str, float]:
    def ratios(kind: str) -> list[float]:
        return [bare / ours for bare, ours in zip(rows["bare"], rows[kind], strict=True)]

    checked = ratios("checked")
    return {
        "ratio": statistics.median(checked),
        "spread": max(checked) - min(checked),
        "base": size / MEGABYTE / statistics.median(rows["bare"]),  # MB/s
        "measured": size / MEGABYTE / statistics.median(rows["checked"]),
        "unchecked": statistics.median(ratios("ours")),
        "chunks": max(rows["chunks"]),
    }


def transfer(repeats: int, megabytes: int = 100) -> dict[str, float]:
    """Rates and memory; the ratio is for transfers with all checks."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "certs"
        authority = Authority.create(folder, "benchmark")
        for name in NAMES:
            authority.issue(name)
        size = megabytes * MEGABYTE
        process = context.Process(target=receiver, args=(folder, 2 * size, there))
        process.start()
        try:
            return asyncio.run(measure(folder, size, here.recv(), repeats))
        finally:
            here.send("stop")
            process.join()


def chunks(repeats: int) -> dict[str, float]:
    return {"ratio": transfer(repeats)["chunks"]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--megabytes", type=int, default=100)
    arguments = parser.parse_args()
    print(json.dumps(transfer(arguments.repeats, arguments.megabytes), indent=2))
