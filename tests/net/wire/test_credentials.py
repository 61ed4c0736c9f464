"""A replaced authority between two transports that stay connected, without a restart."""

import asyncio
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from support.networking import BROKEN, CALM_LIMITS, run_skipping

from peerage.net.trust.certs import Authority
from peerage.net.trust.identity import Identity
from peerage.net.trust.rotation import finish, rotate
from peerage.net.wire.grpc import GrpcTransport

pytestmark = pytest.mark.slow  # real connections

NAMES = {"node-0": 0, "node-1": 1}
PUBLIC = ("revoked.pem", "authority.pem")


class Answering:
    """A receiver of which only `answer` is called."""

    async def answer(self, question: bytes, identity: int) -> bytes:
        return b"%d asked %s" % (identity, question)


def test_a_rotated_authority_is_taken_up_without_a_restart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority = Authority.create(tmp_path / "certs", "trial")
    sites = {name: tmp_path / f"site-{name}" for name in NAMES}
    for name, site in sites.items():
        authority.issue(name, into=site)

    def give(*files: str, to: tuple[str, ...] = tuple(NAMES)) -> None:
        for name in to:
            for file in files or (f"{name}.pem",):
                shutil.copy(tmp_path / "certs" / file, sites[name] / f"{file}.new")
                (sites[name] / f"{file}.new").replace(sites[name] / file)

    async def test() -> None:
        options: dict[str, Any] = {"bind": "127.0.0.1:0", "limits": CALM_LIMITS}
        server = GrpcTransport(Identity.load(sites["node-1"], "node-1"), NAMES, {}, **options)
        await server.start(Answering())  # type: ignore[arg-type]
        addresses = {1: f"127.0.0.1:{server.port}"}
        identity = Identity.load(sites["node-0"], "node-0")
        client = GrpcTransport(identity, NAMES, addresses, **options)

        async def ask() -> None:
            assert await client.ask(1, b"why", BROKEN) == b"0 asked why"

        async def logged(text: str, count: int) -> None:
            end = time.monotonic() + BROKEN
            while caplog.text.count(text) < count:
                assert time.monotonic() < end
                await asyncio.sleep(0.05)
            await ask()

        await ask()
        rotate(tmp_path / "certs")
        give(*PUBLIC)
        await logged("trusting 2 authorities", 2)
        for count, name in enumerate(NAMES, 1):  # in between they have different authorities
            give(to=(name,))
            await logged("using the new certificate", count)
        finish(tmp_path / "certs")
        give(*PUBLIC)
        await logged("trusting 1 authority", 2)
        await client.stop()
        # A client that connects anew is served by the new authority only.
        client = GrpcTransport(identity, NAMES, addresses, **options)
        await ask()
        await client.stop()
        await server.stop()

    run_skipping(test())
    assert "cannot connect" not in caplog.text
