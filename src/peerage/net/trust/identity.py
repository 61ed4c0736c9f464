"""The identity of a peer, and the verification of the certificates of other peers."""

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from peerage.errors import InputError
from peerage.net.trust.keyfiles import check_pair, read, read_certificate, read_key

CERTIFICATE_REASONS = (
    "malformed",
    "authority",
    "name",
    "purpose",
    "not yet valid",
    "expired",
    "revoked",
)
NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
DOMAIN = "peerage.internal"  # a domain that does not exist in public DNS
PURPOSES = (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH)
OBSERVER_PURPOSES = (ExtendedKeyUsageOID.CLIENT_AUTH,)
OBSERVER_UNIT = "observer"  # organisational unit in the certificate of an observer
COPY = "copy it from the folder of the authority"


class CertificateRejected(InputError):
    """A certificate that is not valid here; `reason` is one of `CERTIFICATE_REASONS`.

    `name` is that of its holder, empty if the authority did not sign it.
    """

    def __init__(self, reason: str, message: str, name: str = "") -> None:
        super().__init__(message)
        self.reason, self.name = reason, name


def check_name(name: str) -> str:
    if not NAME.fullmatch(name):
        raise InputError(
            "the name of an identity must have at most 63 lower-case letters, digits and hyphens, "
            f"such as node-3; got {name!r}"
        )
    if name in ("authority", "revoked"):
        raise InputError(f"the name {name!r} is used by a file of the authority; choose another")
    return name


def server_name(name: str) -> str:
    """The host name that only this identity's certificate holds, on any machine.

    A client that verifies this name knows which peer answers, not only which machine.

    >>> server_name("node-3")
    'node-3.peerage.internal'
    """
    return f"{name}.{DOMAIN}"


@dataclass(frozen=True)
class Identity:
    """The files with which a peer authenticates itself and verifies the others."""

    name: str
    key: Path
    certificate: Path
    authority: Path
    revoked: Path

    @classmethod
    def within(cls, folder: Path, name: str) -> Self:
        """The paths of an identity's files, which need not exist yet."""
        folder = Path(folder)
        return cls(
            check_name(name),
            key=folder / f"{name}.key",
            certificate=folder / f"{name}.pem",
            authority=folder / "authority.pem",
            revoked=folder / "revoked.pem",
        )

    @classmethod
    def load(cls, folder: Path, name: str, *, observer: bool = False) -> Self:
        """Load an identity and verify it as other peers will; raises InputError if not valid.

        With `observer`, it may be that of a peer or of an observer.
        """
        identity = cls.within(folder, name)
        remedy = f"create it with `peerage certs add {name}`, or copy it from the authority"
        certificate = read_certificate(identity.certificate, remedy)
        key = read_key(identity.key, remedy)
        check_pair(identity.key, key, certificate)
        pem = certificate.public_bytes(serialization.Encoding.PEM)
        trust = identity.trust()
        holder = trust.verify_holder(pem).name if observer else trust.verify(pem)
        if holder != name:
            raise InputError(
                f"{identity.certificate} is the certificate of {holder!r}, not of {name!r}; "
                "give the folder or the name that belongs to it"
            )
        return identity

    def trust(self) -> "TrustStore":
        return TrustStore(self.authority, self.revoked)


@dataclass(frozen=True)
class Holder:
    """The holder of a valid certificate: a peer, or an observer that may only ask for status."""

    name: str
    observer: bool


class TrustStore:
    """The authority and the revocation list that a peer trusts; a changed list is read again.

    If a new list cannot be read, the last one stays in force. It may be replaced at this moment, or
    no more files can be opened. To reject all peers then would stop the whole network.
    """

    def __init__(self, authority: Path, revoked: Path) -> None:
        self._authority = read_certificate(authority, COPY)
        self._path = Path(revoked)
        self._content = read(self._path, COPY)
        self._revoked = read_revocations(self._path, self._content, self._authority)
        self.list_problem: str | None = None  # why the list could not be read the last time

    def verify(self, pem: bytes) -> str:
        """The name on a certificate; raises `CertificateRejected` if it is not valid."""
        self._renew()
        return verify_peer(pem, self._authority, self._revoked)

    def verify_holder(self, pem: bytes) -> Holder:
        """The peer or the observer that holds a certificate; raises errors as `verify` does."""
        self._renew()
        return verify_holder(pem, self._authority, self._revoked)

    def _renew(self) -> None:
        try:
            content = read(self._path, COPY)
            if content != self._content:
                self._revoked = read_revocations(self._path, content, self._authority)
                self._content = content
            self.list_problem = None
        except InputError as error:
            self.list_problem = str(error)


def verify_peer(
    pem: bytes,
    authority: x509.Certificate,
    revoked: x509.CertificateRevocationList,
    when: datetime | None = None,
) -> str:
    """The name of the peer that holds a certificate; raises `CertificateRejected` if none does."""
    holder = verify_holder(pem, authority, revoked, when)
    if holder.observer:
        raise CertificateRejected(
            "purpose",
            f"the certificate of {holder.name!r} is an observer's, which may only ask for the "
            "status; use the certificate of a peer",
            holder.name,
        )
    return holder.name


def verify_holder(
    pem: bytes,
    authority: x509.Certificate,
    revoked: x509.CertificateRevocationList,
    when: datetime | None = None,
) -> Holder:
    """The holder of a certificate; raises `CertificateRejected` if it is not valid.

    The signature is verified before any field of the certificate is used.
    """
    try:
        certificate = x509.load_pem_x509_certificate(pem)
    except (ValueError, x509.InvalidVersion):
        raise CertificateRejected(
            "malformed", "the certificate is not valid PEM; present one that is"
        ) from None
    when = when or now()
    issuer = f"the authority {common_name(authority)!r}"
    if not signed_by(certificate, authority):
        raise CertificateRejected(
            "authority", f"the certificate was not issued by {issuer}; use one that was"
        )
    name = common_name(certificate)
    if not NAME.fullmatch(name):
        raise CertificateRejected(
            "name", f"{name!r} is not a valid identity name; use the certificate of a peer"
        )
    what = f"the certificate of {name!r}"
    observer = is_observer(certificate)
    if not _has_purposes(certificate, OBSERVER_PURPOSES if observer else PURPOSES):
        raise CertificateRejected(
            "purpose", f"{what} is not valid for servers and clients; use one that is", name
        )
    check_dates(authority, issuer, when)
    check_dates(certificate, what, when, name)
    entry = revoked.get_revoked_certificate_by_serial_number(certificate.serial_number)
    if entry is not None:
        day = date(entry.revocation_date_utc)
        raise CertificateRejected("revoked", f"{what} was revoked on {day}; issue a new one", name)
    return Holder(name, observer)


def signed_by(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    """Whether the issuer's name and the signature are those of the authority."""
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
        return False
    return True


def is_observer(certificate: x509.Certificate) -> bool:
    found = certificate.subject.get_attributes_for_oid(NameOID.ORGANIZATIONAL_UNIT_NAME)
    return [str(one.value) for one in found] == [OBSERVER_UNIT]


def _has_purposes(certificate: x509.Certificate, needed: tuple[x509.ObjectIdentifier, ...]) -> bool:
    """Whether a certificate has these purposes, and is not an authority's."""
    try:
        found = certificate.extensions
        limits = found.get_extension_for_class(x509.BasicConstraints).value
        purposes = found.get_extension_for_class(x509.ExtendedKeyUsage).value
    except (ValueError, x509.ExtensionNotFound, x509.DuplicateExtension):
        return False
    return not limits.ca and set(needed) <= set(purposes)


def common_name(certificate: x509.Certificate) -> str:
    """The common name of a certificate; empty if it has none or several."""
    found = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(found[0].value) if len(found) == 1 else ""


def check_dates(certificate: x509.Certificate, what: str, when: datetime, name: str = "") -> None:
    start, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if when < start:
        raise CertificateRejected(
            "not yet valid",
            f"{what} is not valid before {date(start)}, and it is {date(when)}; "
            "check the clock, or wait",
            name,
        )
    if when > end:
        raise CertificateRejected(
            "expired",
            f"{what} expired on {date(end)}, and it is {date(when)}; "
            "check the clock, or create a new one",
            name,
        )


def read_revocations(
    path: Path, content: bytes, authority: x509.Certificate
) -> x509.CertificateRevocationList:
    """Parse a revocation list and verify its signature."""
    try:
        found = x509.load_pem_x509_crl(content)
        # Key types that cannot sign a list raise a TypeError.
        signed = found.is_signature_valid(authority.public_key())  # type: ignore[arg-type]
    except (ValueError, TypeError, x509.InvalidVersion, UnsupportedAlgorithm):
        raise InputError(f"{path} is not a revocation list in PEM; {COPY}") from None
    if not signed:
        raise InputError(
            f"{path} is not signed by the authority {common_name(authority)!r}; "
            "copy the list that belongs to it"
        )
    return found


def now() -> datetime:
    return datetime.now(UTC).replace(microsecond=0)  # certificates store whole seconds


def date(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M} UTC"
