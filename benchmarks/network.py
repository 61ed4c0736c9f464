"""A large model between two processes: our transport against a bare gRPC stream of the same bytes.

Run `python benchmarks/network.py [--repeats N] [--megabytes N]`: both go over loopback with the
same certificates and chunks, and alternate; the median of the ratios of neighbours counts. The
bare stream throws away what it receives. Ours keeps the payload and, in the last row, also checks
its hash, layout and numbers as a peer does. Memory is the most that the receiving process has held
during a transfer, beyond what it held before and the payload itself.

Four runs with grpcio 1.85.1 on two shared (and busy) cores of an AVX-512 Xeon: 0.71 to 0.95 of
the bare stream's 520 to 700 MB/s, only 0.39 to 0.56 with all checks after the transfer (most of
them SHA-256), and 4 to 10 chunks of 1 MiB beyond the payload. `holds` is about the transport, not
about the checks.
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

from peerage.environment import environment
from peerage.net.certs import Authority
from peerage.net.grpc import GrpcTransport
from peerage.net.identity import Identity, server_name
from peerage.net.traffic import Incoming
from peerage.net.transport import CHUNK
from peerage.net.wire import Expected, Header, Parcel, decode, encode, parse_header

NAMES = {"sender": 0, "receiver": 1}
MEGABYTE = 1 << 20
RATE_BOUND = 0.5
MEMORY_BOUND = 16  # chunks
DEADLINE = 120.0
BARE = "/bare.Stream/Deliver"


class Keeper:
    """Keeps one payload; `checks` says whether it looks into it, as a peer does."""

    def __init__(self, limit: int) -> None:
        self.expected = Expected("run", 1, frozenset((0, 1)), {"model": {"x": (None,)}}, limit)
        self.checks = False
        self.payload: Incoming | None = None

    def accept(self, raw: bytes, identity: int) -> tuple[Header, int]:
        header = parse_header(raw, self.expected, identity)
        self.payload = Incoming(header)
        return header, 0

    def chunk(self, header: Header, offset: int, data: bytes) -> None:
        if self.checks:
            self.payload.add(data)
        else:
            self.payload.data[offset : offset + len(data)] = data

    async def complete(self, header: Header) -> None:
        if self.checks:
            seal = self.payload.hash.hexdigest()
            await asyncio.to_thread(decode, header, self.payload.data, self.expected, seal)

    async def answer(self, question: bytes, identity: int) -> bytes:
        """Forget the last payload, and tell how much memory there is and was at most."""
        if question == b"peak":
            return str(status("VmHWM")).encode()
        self.payload = None
        self.checks = question == b"check"
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        return str(status("VmRSS")).encode()


def status(key: str) -> int:
    """Bytes, from what the system says about this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


def receiver(folder: Path, limit: int, pipe: Connection) -> None:
    async def serve() -> None:
        identity = Identity.load(folder, "receiver")
        transport = GrpcTransport(identity, NAMES, {}, bind="127.0.0.1:0")
        await transport.start(Keeper(limit))
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


async def measure(folder: Path, size: int, ports: tuple[int, int], repeats: int) -> dict[str, Any]:
    identity = Identity.load(folder, "sender")
    addresses = {1: f"127.0.0.1:{ports[0]}"}
    transport = GrpcTransport(identity, NAMES, addresses, bind="127.0.0.1:0")
    options = [("grpc.ssl_target_name_override", server_name("receiver"))]
    credentials = grpc.ssl_channel_credentials(*pem(identity))
    tensor = torch.randn(size // 4, generator=torch.Generator().manual_seed(0))
    parcel = Parcel(0, (1,), 1, 1, "model", {"x": tensor}, size)
    header, payload = encode(parcel, run="run", round=0, recipient=1, place=0)
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
            if repeat:  # the first warms up
                for kind, value in took.items():
                    rows[kind].append(value)
    await transport.stop()
    return summary(rows, len(payload))


def summary(rows: dict[str, list[float]], size: int) -> dict[str, Any]:
    ratios = {
        kind: [bare / ours for bare, ours in zip(rows["bare"], rows[kind], strict=True)]
        for kind in ("ours", "checked")
    }
    return {
        "megabytes per second": {
            kind: round(size / MEGABYTE / statistics.median(rows[kind]))
            for kind in ("bare", "ours", "checked")
        },
        "ratio": {kind: round(statistics.median(found), 2) for kind, found in ratios.items()},
        "spread": {kind: round(max(f) - min(f), 2) for kind, f in ratios.items()},
        "chunks beyond the payload": round(max(rows["chunks"]), 1),
    }


def transfer(repeats: int, megabytes: int = 100) -> dict[str, Any]:
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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--megabytes", type=int, default=100)
    arguments = parser.parse_args()
    found = transfer(arguments.repeats, arguments.megabytes)
    holds = (
        found["ratio"]["checked"] >= RATE_BOUND
        and found["chunks beyond the payload"] <= MEMORY_BOUND
    )
    print(json.dumps({**found, "holds": holds, "environment": environment()}, indent=2))


if __name__ == "__main__":
    main()
