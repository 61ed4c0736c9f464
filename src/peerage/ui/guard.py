"""Who may read the dashboard and act through it: checks of every request, and headers of answers.

The page starts processes, so it must not obey foreign pages. A foreign page can send requests to
this machine (Origin), and can give its own name the address of this machine (Host). Other users of
the machine can connect to loopback, so reading needs the token too.
"""

import hmac
import ipaddress
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response

from peerage.errors import InputError

ASGI = Callable[[Any, Any, Any], Awaitable[None]]
LOOPBACK = ("127.0.0.1", "localhost", "::1")
SHORTEST_TOKEN = 16  # characters
ACTION_HEADER = "x-peerage-token"  # of requests that change something; no foreign form can send it
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; form-action 'none'; base-uri 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


def check_address(host: str, token: str | None) -> None:
    """Raise an InputError if others could reach the dashboard without a token of its user."""
    if host not in LOOPBACK and token is None:
        raise InputError(
            f"--host {host} lets other machines connect, so it needs --token TEXT with at least "
            f"{SHORTEST_TOKEN} characters; remove --host to serve this machine only"
        )
    if token is not None and (len(token) < SHORTEST_TOKEN or not token.isascii()):
        raise InputError(
            f"--token must have at least {SHORTEST_TOKEN} ASCII characters, got {len(token)}; "
            "make one with `openssl rand -hex 16`"
        )


@dataclass(frozen=True)
class Guard:
    """ASGI middleware: checks Host, Origin and token, and adds the security headers."""

    app: ASGI
    host: str
    port: int
    token: str

    @property
    def cookie(self) -> str:
        """The name of the cookie; browsers share cookies between the ports of a machine."""
        return f"peerage-{self.port}"

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":  # start and end of the server; WebSockets are not used
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return
        request = Request(scope)

        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        answer = self.refusal(request) or self._login(request)
        await (answer or self.app)(scope, receive, send_with_headers)

    def refusal(self, request: Request) -> Response | None:
        """The answer to a request that is not allowed; None if it is."""
        if not self._is_own_host(request.headers.get("host", "")):
            return PlainTextResponse("this Host is not the dashboard's\n", 400)
        origin = request.headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != request.headers.get("host"):
            return PlainTextResponse("requests of other pages are not allowed\n", 403)
        given = request.query_params.get("token") or request.cookies.get(self.cookie) or ""
        if not self._is_token(given):
            return PlainTextResponse(
                "open the address with the token that `peerage ui` printed\n", 403
            )
        if request.method not in ("GET", "HEAD") and not self._is_token(
            request.headers.get(ACTION_HEADER, "")
        ):
            return PlainTextResponse("an action needs the token of the page\n", 403)
        return None

    def _login(self, request: Request) -> Response | None:
        """Move a token from the address to a cookie, so that it stays out of the history."""
        if "token" not in request.query_params:
            return None
        kept = [(key, v) for key, v in request.query_params.multi_items() if key != "token"]
        answer = RedirectResponse(
            str(request.url.replace(query="").include_query_params(**dict(kept)))
        )
        answer.set_cookie(self.cookie, self.token, httponly=True, samesite="strict")
        return answer

    def _is_token(self, text: str) -> bool:
        return hmac.compare_digest(text.encode(), self.token.encode())

    def _is_own_host(self, header: str) -> bool:
        """Whether a Host header names this server; an address cannot be rebound, a name can."""
        try:
            parts = urlsplit(f"//{header}")
            name, port = parts.hostname or "", parts.port or 80
        except ValueError:
            return False
        if port != self.port or parts.path or parts.username is not None:
            return False
        if self.host in LOOPBACK:
            return name in LOOPBACK
        return name in (*LOOPBACK, self.host, socket.gethostname().lower()) or _is_address(name)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
