"""Our certificates checked by other programs: openssl, and a handshake of Python's ssl."""

import shutil
import socket
import ssl
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
from support.identities import serial_of, wrong_identities
from support.processes import TIMEOUT

from peerage.net.trust.certs import Authority
from peerage.net.trust.identity import Identity, server_name

pytestmark = pytest.mark.slow  # real connections

needs_openssl = pytest.mark.skipif(not shutil.which("openssl"), reason="openssl is not installed")


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority.create(tmp_path / "certs", "trial")


def openssl(identity: Identity, *more: str) -> tuple[bool, str]:
    """What `openssl verify` says about a certificate and the list, by the strict rules."""
    ended = subprocess.run(
        [
            *("openssl", "verify", "-x509_strict", "-check_ss_sig"),
            *("-CAfile", str(identity.authority), "-CRLfile", str(identity.revoked)),
            *("-crl_check", *more, str(identity.certificate)),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT,
    )
    return ended.returncode == 0, ended.stdout + ended.stderr


@needs_openssl
def test_openssl_accepts_the_certificates_that_we_issue(authority: Authority) -> None:
    identity = authority.issue("node-3", hosts=["peer.example.org", "192.0.2.7"])
    authority.revoke(serial_of(authority.issue("node-4")))
    for more in (
        ("-purpose", "sslserver"),
        ("-purpose", "sslclient"),
        ("-verify_hostname", "peer.example.org"),
        ("-verify_hostname", server_name("node-3")),
        ("-verify_ip", "192.0.2.7"),
    ):
        good, said = openssl(identity, *more)
        assert good, said
    for more, reason in (
        (("-verify_hostname", server_name("node-4")), "hostname mismatch"),
        (("-verify_ip", "192.0.2.8"), "IP address mismatch"),
    ):
        good, said = openssl(identity, *more)
        assert not good
        assert reason.lower() in said.lower()


@needs_openssl
def test_openssl_rejects_the_same_wrong_identities(authority: Authority, tmp_path: Path) -> None:
    wrong = wrong_identities(authority, tmp_path, victim="node-1", member="node-2")
    verdicts = {
        "self-signed": "self-signed certificate",
        "other authority": "error",
        "expired": "certificate has expired",
        "not yet valid": "certificate is not yet valid",
        "revoked": "certificate revoked",
    }
    for kind, identity in wrong.items():
        if identity is None:
            continue
        shutil.copy(authority.folder / "revoked.pem", identity.revoked)
        good, said = openssl(identity)
        assert good == (kind not in verdicts), said
        assert verdicts.get(kind, "OK") in said.replace("self signed", "self-signed")


# A handshake as a second opinion


def context(identity: Identity | None, trust: Identity, *, server: bool) -> ssl.SSLContext:
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    made.minimum_version = ssl.TLSVersion.TLSv1_3
    made.verify_mode = ssl.CERT_REQUIRED
    made.load_verify_locations(trust.authority)
    made.load_verify_locations(trust.revoked)
    made.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF | ssl.VERIFY_X509_STRICT
    if identity is not None:
        made.load_cert_chain(identity.certificate, identity.key)
    return made


def shake(server: Identity, client: Identity | None, expect: str) -> tuple[Any, Any]:
    """What each end of a handshake over loopback has: server and client, a value or an error.

    The server gets the client's certificate, and the client a greeting.
    """
    found: dict[str, Any] = {}
    accepting = context(server, server, server=True)
    connecting = context(client, client or server, server=False)

    def serve(listener: socket.socket) -> None:
        try:
            with (
                listener.accept()[0] as plain,
                accepting.wrap_socket(plain, server_side=True) as wrapped,
            ):
                found["server"] = wrapped.getpeercert(binary_form=True)
                wrapped.sendall(b"hello")
        except OSError as error:
            found["server"] = error

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(TIMEOUT)
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        try:
            with (
                socket.create_connection(listener.getsockname(), timeout=TIMEOUT) as plain,
                connecting.wrap_socket(plain, server_hostname=expect) as wrapped,
            ):
                found["client"] = wrapped.recv(5)
        except OSError as error:
            found["client"] = error
        thread.join()
    return found["server"], found["client"]


@pytest.mark.parametrize("expect", ["localhost", "127.0.0.1", server_name("node-1")])
def test_two_identities_complete_a_handshake(authority: Authority, expect: str) -> None:
    server, client = authority.issue("node-1"), authority.issue("node-2")
    shown, greeting = shake(server, client, expect)
    assert greeting == b"hello"
    assert server.trust().verify(ssl.DER_cert_to_PEM_cert(shown).encode()) == "node-2"


def test_the_server_is_known_by_its_own_name(authority: Authority) -> None:
    """Both are on this machine: only the name of the identity differs."""
    _, error = shake(authority.issue("node-1"), authority.issue("node-2"), server_name("node-2"))
    assert "Hostname mismatch" in str(error)


TLS_VERDICTS = {
    "none": "peer did not return a certificate",
    "self-signed": "certificate verify failed: self-signed certificate",
    "other authority": "certificate verify failed",
    "expired": "certificate has expired",
    "not yet valid": "certificate is not yet valid",
    "revoked": "certificate revoked",
}


def in_one_spelling(error: Exception) -> str:
    """As the newest OpenSSL says it."""
    return str(error).replace("self signed", "self-signed")


@pytest.mark.parametrize("kind", TLS_VERDICTS)
def test_tls_rejects_wrong_clients(authority: Authority, tmp_path: Path, kind: str) -> None:
    wrong = wrong_identities(authority, tmp_path, victim="node-1", member="node-2")[kind]
    error, nothing = shake(authority.issue("node-0"), wrong, "localhost")
    assert isinstance(error, ssl.SSLError)
    assert TLS_VERDICTS[kind] in in_one_spelling(error)
    assert nothing != b"hello"


@pytest.mark.parametrize("kind", [kind for kind in TLS_VERDICTS if kind != "none"])
def test_tls_rejects_wrong_servers(authority: Authority, tmp_path: Path, kind: str) -> None:
    wrong = wrong_identities(authority, tmp_path, victim="node-1", member="node-2")[kind]
    assert wrong is not None
    _, error = shake(wrong, authority.issue("node-0"), "localhost")
    assert isinstance(error, ssl.SSLCertVerificationError)
    assert TLS_VERDICTS[kind] in in_one_spelling(error)
