"""Serves the dashboard until it is interrupted."""

import asyncio
import contextlib
import errno
import socket
import threading
import webbrowser
from collections.abc import Callable
from importlib import import_module
from secrets import token_urlsafe

import uvicorn

from peerage.errors import InputError
from peerage.ui.app import Dashboard
from peerage.ui.guard import check_address

GOODBYE = 1  # seconds for open streams at the end


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(128)
    except (OSError, OverflowError) as error:
        listener.close()
        if getattr(error, "errno", None) == errno.EADDRINUSE:
            raise InputError(
                f"port {port} is in use; choose another --port, or 0 for any"
            ) from None
        raise InputError(
            f"cannot listen on {host} port {port}: {error}; change --host or --port"
        ) from None
    return listener


def address(host: str, port: int, token: str) -> str:
    """The address to open, with the token."""
    name = f"[{host}]" if ":" in host else host
    return f"http://{name}:{port}/?token={token}"


def serve(
    build: Callable[[str, int, str], Dashboard],
    host: str,
    port: int,
    token: str | None,
    browser: bool,
    announce: Callable[[str], None],
) -> None:
    """Serve until an interrupt; `announce` gets the address as soon as it answers."""
    check_address(host, token)
    token = token or token_urlsafe(24)
    with contextlib.closing(bind(host, port)) as listener:
        port = listener.getsockname()[1]
        place = address(host, port, token)
        announce(place)
        if browser:
            threading.Thread(target=webbrowser.open, args=(place,), daemon=True).start()
        threading.Thread(target=_warm_up, daemon=True).start()
        asyncio.run(_serve(build, host, port, token, listener))


async def _serve(
    build: Callable[[str, int, str], Dashboard],
    host: str,
    port: int,
    token: str,
    listener: socket.socket,
) -> None:
    dashboard = build(host, port, token)
    config = uvicorn.Config(
        dashboard.app(),
        log_level="warning",
        access_log=False,
        server_header=False,
        lifespan="off",
        ws="none",
        timeout_graceful_shutdown=GOODBYE,
    )
    server = _Server(config)
    server.dashboard = dashboard
    with contextlib.suppress(KeyboardInterrupt):
        await server.serve(sockets=[listener])


class _Server(uvicorn.Server):
    """Ends the streams of open pages before it waits for its connections."""

    dashboard: Dashboard

    def handle_exit(self, sig: int, frame: object) -> None:
        self.dashboard.closing.set()
        super().handle_exit(sig, frame)  # type: ignore[arg-type]  # a frame or None


def _warm_up() -> None:
    """Import what the first open run needs, while the user still looks at the list."""
    for name in ("peerage.report.figures", "peerage.report.html", "peerage.experiment.catalogue"):
        import_module(name)
