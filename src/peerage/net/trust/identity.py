"""The identity of a peer, and the verification of the certificates of other peers."""

import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Self

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from peerage.errors import InputError
from peerage.net.trust.keyfiles import (
    check_pair,
    parse_certificates,
    read,
    read_certificate,
    read_key,
)

CERTIFICATE_REASONS = (
    "malformed",
    "authority",
    "name",
    "purpose",
    "not yet valid",
    "expired",
    "revoked",
)
LIST = re.compile(rb"-----BEGIN X509 CRL-----.*?-----END X509 CRL-----\s*", re.DOTALL)
NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
DOMAIN = "peerage.internal"  # a domain that does not exist in public DNS
PURPOSES = (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH)
OBSERVER_PURPOSES = (ExtendedKeyUsageOID.CLIENT_AUTH,)
OBSERVER_UNIT = "observer"  # organisational unit in the certificate of an observer
# Extension of an entry in a revocation list: the name of a holder without another certificate. The
# number is made from a UUID, as ITU-T X.667 describes, so nobody has to assign it.
HOLDER = x509.ObjectIdentifier("2.25.21404999388500790035212611139744892479")
COPY = "copy it from the folder of the authority"
REMEMBERED = 1024  # certificates whose signature was verified; dates and lists are always checked


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


@dataclass(frozen=True)
class Revocations:
    """The entries of revocation lists."""

    serials: frozenset[int]
    names: frozenset[str]  # holders that had no other certificate when theirs was revoked

    @classmethod
    def of(cls, lists: Iterable[x509.CertificateRevocationList]) -> Self:
        entries = [entry for one in lists for entry in one]
        serials = frozenset(entry.serial_number for entry in entries)
        return cls(serials, frozenset(filter(None, map(holder_of, entries))))


class TrustStore:
    """The authorities that a peer trusts, and their revocation lists; changed files are read again.

    There are two authorities while one replaces the other. If the new files cannot be read, or do
    not belong together, the last ones stay in force. They may be replaced at this moment, or no
    more files can be opened. To reject all peers then would stop the whole network.
    """

    def __init__(self, authority: Path, revoked: Path) -> None:
        self._paths = Path(authority), Path(revoked)
        self._contents = (b"", b"")
        self.list_problem: str | None = None  # why a file could not be read the last time
        self._read()

    def verify(self, pem: bytes) -> str:
        """The name on a certificate; raises `CertificateRejected` if it is not valid."""
        self._renew()
        return verify_peer(pem, *self._issuer(pem))

    def verify_holder(self, pem: bytes) -> Holder:
        """The peer or the observer that holds a certificate; raises errors as `verify` does."""
        self._renew()
        return verify_holder(pem, *self._issuer(pem))

    def _issuer(self, pem: bytes) -> tuple[x509.Certificate, x509.CertificateRevocationList]:
        """The authority that has signed a certificate, and its list; the newest if none has."""
        if len(self._trusted) > 1:
            with suppress(ValueError, x509.InvalidVersion):
                certificate = x509.load_pem_x509_certificate(pem)
                for authority, revoked in self._trusted:
                    if signed_by(certificate, authority):
                        return authority, revoked
        return self._trusted[0]

    def revocations(self) -> "Revocations":
        """What the present revocation lists say."""
        self._renew()
        return self._entries

    def _renew(self) -> None:
        try:
            self._read()
            self.list_problem = None
        except InputError as error:
            self.list_problem = str(error)

    def _read(self) -> None:
        contents = read(self._paths[0], COPY), read(self._paths[1], COPY)
        if contents != self._contents:
            authorities = parse_certificates(self._paths[0], contents[0], COPY)
            lists = [read_revocations(self._paths[1], contents[1], one) for one in authorities]
            self._trusted = list(zip(authorities, lists, strict=True))
            self._entries = Revocations.of(lists)
            self._contents = contents


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
    """The holder of a certificate; raises `CertificateRejected` if it is not valid."""
    certificate, holder = _issued_to(pem, authority)
    when = when or now()
    what = f"the certificate of {holder.name!r}"
    check_dates(authority, f"the authority {common_name(authority)!r}", when)
    check_dates(certificate, what, when, holder.name)
    entry = revoked.get_revoked_certificate_by_serial_number(certificate.serial_number)
    if entry is not None:
        day = date(entry.revocation_date_utc)
        raise CertificateRejected(
            "revoked", f"{what} was revoked on {day}; issue a new one", holder.name
        )
    return holder


@lru_cache(maxsize=REMEMBERED)
def _issued_to(pem: bytes, authority: x509.Certificate) -> tuple[x509.Certificate, Holder]:
    """A certificate of this authority and its holder, whether it is still valid or not.

    The signature is verified before any field of the certificate is used. Every call of a peer asks
    for this, so it is remembered, but not if the certificate is rejected: outsiders have many.
    """
    try:
        certificate = x509.load_pem_x509_certificate(pem)
    except (ValueError, x509.InvalidVersion):
        raise CertificateRejected(
            "malformed", "the certificate is not valid PEM; present one that is"
        ) from None
    if not signed_by(certificate, authority):
        issuer = f"the authority {common_name(authority)!r}"
        raise CertificateRejected(
            "authority", f"the certificate was not issued by {issuer}; use one that was"
        )
    name = common_name(certificate)
    if not NAME.fullmatch(name):
        raise CertificateRejected(
            "name", f"{name!r} is not a valid identity name; use the certificate of a peer"
        )
    observer = is_observer(certificate)
    if not _has_purposes(certificate, OBSERVER_PURPOSES if observer else PURPOSES):
        what = f"the certificate of {name!r}"
        raise CertificateRejected(
            "purpose", f"{what} is not valid for servers and clients; use one that is", name
        )
    return certificate, Holder(name, observer)


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
    """The revocation list in a file that this authority has signed."""
    try:
        lists = [x509.load_pem_x509_crl(one) for one in LIST.findall(content) or [content]]
        # Key types that cannot sign a list raise a TypeError.
        key = authority.public_key()
        signed = [one for one in lists if one.is_signature_valid(key)]  # type: ignore[arg-type]
    except (ValueError, TypeError, x509.InvalidVersion, UnsupportedAlgorithm):
        raise InputError(f"{path} is not a revocation list in PEM; {COPY}") from None
    if not signed:
        raise InputError(
            f"{path} is not signed by the authority {common_name(authority)!r}; "
            "copy the list that belongs to it"
        )
    return signed[0]


def serial_of(pem: bytes) -> int:
    """The serial number of a valid certificate."""
    return x509.load_pem_x509_certificate(pem).serial_number


def holder_of(entry: x509.RevokedCertificate) -> str | None:
    """The holder of a revoked certificate, if the list says that it has no other one."""
    for extension in entry.extensions:
        if extension.oid == HOLDER and isinstance(extension.value, x509.UnrecognizedExtension):
            return extension.value.value.decode("ascii", "replace")
    return None


def now() -> datetime:
    return datetime.now(UTC).replace(microsecond=0)  # certificates store whole seconds


def date(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M} UTC"
