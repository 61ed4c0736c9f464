"""The credentials of a peer for TLS; replaced files are used without a restart."""

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
        self.version = 0  # changes when the certificate or the authorities change
        self._problem = ""  # the last one that was logged
        self._lock = threading.Lock()  # gRPC calls the server's function in a thread of its own
        self._seen = self._stamp()
        self._use(self._read())

    @property
    def expires(self) -> datetime:
        """When the certificate expires."""
        return self._certificate.not_valid_after_utc

    def renew(self) -> None:
        """Use the certificate, key and authorities in the folder, if they changed and are valid.

        The files cannot be replaced at the same moment. Until they belong together, the old ones
        are used.
        """
        with self._lock:
            stamp = self._stamp()
            if stamp == self._seen:
                return
            try:
                files = self._read()
                if files != self._files:
                    folder, name = self._identity.certificate.parent, self._identity.name
                    Identity.load(folder, name, observer=self._observer)
                    before = self._files
                    self._use(files)
                    if files[2] != before[2]:
                        count = len(x509.load_pem_x509_certificates(files[2]))
                        authorities = "1 authority" if count == 1 else f"{count} authorities"
                        log.warning("the authority has changed; trusting %s", authorities)
                    if files[:2] != before[:2]:
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
        version = self.version

        def fetch() -> Any:
            nonlocal version
            self.renew()
            if version == self.version:
                return None  # as before
            version = self.version
            return self._server_configuration()

        return grpc.dynamic_ssl_server_credentials(current, fetch, True)

    def client(self) -> Any:
        key, certificate, authorities = self._files
        return grpc.ssl_channel_credentials(authorities, key, certificate)

    def _server_configuration(self) -> Any:
        key, certificate, authorities = self._files
        return grpc.ssl_server_certificate_configuration([(key, certificate)], authorities)

    def _use(self, files: tuple[bytes, bytes, bytes]) -> None:
        context = ssl.create_default_context(cadata=files[2].decode("ascii", "replace"))
        context.load_cert_chain(self._identity.certificate, self._identity.key)
        context.set_alpn_protocols(["h2"])
        self.context = context
        self._certificate = x509.load_pem_x509_certificate(files[1])
        self._files, self._problem = files, ""
        self.version += 1

    def _read(self) -> tuple[bytes, bytes, bytes]:
        """The key, the certificate and the authorities."""
        one = self._identity
        return one.key.read_bytes(), one.certificate.read_bytes(), one.authority.read_bytes()

    def _stamp(self) -> list[tuple[int, int, int]]:
        """What changes when a file is written or replaced; empty while one is missing."""
        try:
            one = self._identity
            found = [os.stat(path) for path in (one.key, one.certificate, one.authority)]
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
