"""The credentials of a peer for TLS; a replaced certificate is used without a restart."""

import asyncio
import logging
import os
import socket
import ssl
import threading
from datetime import datetime
from typing import Any

import grpc
from cryptography import x509

from peerage.errors import InputError
from peerage.net.trust.identity import Identity, date
from peerage.net.wire.address import Address

log = logging.getLogger(__name__)


class Credentials:
    """The credentials of an identity for gRPC and for Python's `ssl`."""

    def __init__(self, identity: Identity, *, observer: bool = False) -> None:
        self._identity, self._observer = identity, observer
        self._authority = identity.authority.read_bytes()
        self._problem = ""  # the last one that was logged
        self._lock = threading.Lock()  # gRPC calls the server's function in a thread of its own
        self._seen = self._stamp()
        self._use(self._read())

    @property
    def expires(self) -> datetime:
        """When the certificate expires."""
        return self._certificate.not_valid_after_utc

    @property
    def serial(self) -> int:
        """The serial number of the certificate, which changes when the certificate is replaced."""
        return self._certificate.serial_number

    def renew(self) -> None:
        """Use the certificate and key in the folder, if they changed and are valid.

        Both files cannot be replaced at the same moment. Until they belong together, the old ones
        are used.
        """
        with self._lock:
            stamp = self._stamp()
            if stamp == self._seen:
                return
            try:
                pair = self._read()
                if pair != self._pair:
                    folder, name = self._identity.certificate.parent, self._identity.name
                    Identity.load(folder, name, observer=self._observer)
                    self._use(pair)
                    log.warning("using the new certificate, valid until %s", date(self.expires))
            except FileNotFoundError:
                return  # it is being replaced
            except (OSError, InputError) as error:
                if str(error) != self._problem:
                    log.error("using the old certificate, as the new one is not valid: %s", error)
                self._problem = str(error)
                return
            if stamp == self._stamp():  # else it has changed once more
                self._seen = stamp

    def server(self) -> Any:
        """Credentials with which every new connection gets the current certificate."""
        current = self._server_configuration()
        serial = self.serial

        def fetch() -> Any:
            nonlocal serial
            self.renew()
            if serial == self.serial:
                return None  # as before
            serial = self.serial
            return self._server_configuration()

        return grpc.dynamic_ssl_server_credentials(current, fetch, True)

    def client(self) -> Any:
        return grpc.ssl_channel_credentials(self._authority, *self._pair)

    def _server_configuration(self) -> Any:
        return grpc.ssl_server_certificate_configuration([self._pair], self._authority)

    def _use(self, pair: tuple[bytes, bytes]) -> None:
        context = ssl.create_default_context(cafile=self._identity.authority)
        context.load_cert_chain(self._identity.certificate, self._identity.key)
        context.set_alpn_protocols(["h2"])
        self.context = context
        self._certificate = x509.load_pem_x509_certificate(pair[1])
        self._pair, self._problem = pair, ""

    def _read(self) -> tuple[bytes, bytes]:
        return self._identity.key.read_bytes(), self._identity.certificate.read_bytes()

    def _stamp(self) -> list[tuple[int, int, int]]:
        """What changes when a file is written or replaced; empty while one is missing."""
        try:
            found = [os.stat(path) for path in (self._identity.key, self._identity.certificate)]
        except OSError:
            return []
        return [(one.st_ino, one.st_size, one.st_mtime_ns) for one in found]


async def fetch_certificate(place: Address, name: str, context: ssl.SSLContext) -> bytes:
    """Fetch the certificate of the server at an address, in a handshake for this name.

    With TLS 1.3, a server rejects a client's certificate only after the handshake. If it accepts
    the certificate, it sends the first byte.
    """
    reader, writer = await asyncio.open_connection(*place, ssl=context, server_hostname=name)
    try:
        if not await reader.read(1):
            raise ConnectionResetError("the peer rejected the certificate of this peer")
        peer_certificate = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    finally:
        writer.transport.abort()
    return ssl.DER_cert_to_PEM_cert(peer_certificate).encode("ascii")


def describe(error: OSError | InputError) -> str:
    """Why a peer could not be reached, in the words of the operating system.

    >>> describe(ConnectionRefusedError(111, "Connect call failed ('10.0.0.3', 7400)"))
    'connection refused'
    """
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not valid: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return f"TLS failed: {(error.reason or str(error)).replace('_', ' ').lower()}"
    if isinstance(error, socket.gaierror):
        return str(error.strerror).lower()
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno).lower()
    return str(error)
