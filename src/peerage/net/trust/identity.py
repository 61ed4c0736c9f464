"""Who a peer is, and whom it believes: identities, and the check of a certificate that is shown."""

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from peerage.errors import InputError
from peerage.net.trust.keyfiles import check_pair, read, read_certificate, read_key

__all__ = [
    "CERTIFICATE_REASONS",
    "DOMAIN",
    "PURPOSES",
    "CertificateRejected",
    "Identity",
    "TrustStore",
    "check_dates",
    "check_name",
    "common_name",
    "date",
    "now",
    "read_revocations",
    "server_name",
    "signed_by",
    "verify_peer",
]

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
DOMAIN = "peerage.internal"  # a zone that the public name system never hands out
PURPOSES = (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH)
COPY = "copy it from the folder of the authority"


class CertificateRejected(InputError):
    """A certificate that is not valid here; `reason` is one of `CERTIFICATE_REASONS`."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def check_name(name: str) -> str:
    if not NAME.fullmatch(name):
        raise InputError(
            "an identity is named with at most 63 small letters, digits and hyphens, "
            f"such as node-3; got {name!r}"
        )
    if name in ("authority", "revoked"):
        raise InputError(f"the name {name!r} is taken by a file of the authority; choose another")
    return name


def server_name(name: str) -> str:
    """The host name that only this identity's certificate holds, on whatever machine it is.

    A client that asks for it knows which peer answers, not only which machine.

    >>> server_name("node-3")
    'node-3.peerage.internal'
    """
    return f"{name}.{DOMAIN}"


@dataclass(frozen=True)
class Identity:
    """The files that one peer needs to prove who it is and to check the others."""

    name: str
    key: Path
    certificate: Path
    authority: Path
    revoked: Path

    @classmethod
    def within(cls, folder: Path, name: str) -> Self:
        """Where the files of an identity are, or will be."""
        folder = Path(folder)
        return cls(
            check_name(name),
            key=folder / f"{name}.key",
            certificate=folder / f"{name}.pem",
            authority=folder / "authority.pem",
            revoked=folder / "revoked.pem",
        )

    @classmethod
    def load(cls, folder: Path, name: str) -> Self:
        """The identity, checked as others will check it; an InputError says what is wrong."""
        identity = cls.within(folder, name)
        remedy = f"make it with `peerage certs add {name}`, or copy it from where it was made"
        certificate = read_certificate(identity.certificate, remedy)
        key = read_key(identity.key, remedy)
        check_pair(identity.key, key, certificate)
        holder = identity.trust().check(certificate)
        if holder != name:
            raise InputError(
                f"{identity.certificate} is the certificate of {holder!r}, not of {name!r}; "
                "give the folder or the name that belongs to it"
            )
        return identity

    def trust(self) -> "TrustStore":
        return TrustStore(self.authority, self.revoked)


class TrustStore:
    """Whom a peer believes; a new revocation list counts as soon as its file is there."""

    def __init__(self, authority: Path, revoked: Path) -> None:
        self._authority = read_certificate(authority, COPY)
        self._path = Path(revoked)
        self._content = read(self._path, COPY)
        self._revoked = read_revocations(self._path, self._content, self._authority)

    def verify(self, pem: bytes) -> str:
        """The name on a certificate; raises InputError, mostly `CertificateRejected`, if not valid.

        A list that cannot be read any more is an InputError for everybody.
        """
        self._renew()
        return verify_peer(pem, self._authority, self._revoked)

    def check(self, certificate: x509.Certificate) -> str:
        self._renew()
        return _check(certificate, self._authority, self._revoked, now())

    def _renew(self) -> None:
        content = read(self._path, COPY)
        if content != self._content:
            self._revoked = read_revocations(self._path, content, self._authority)
            self._content = content


def verify_peer(
    pem: bytes,
    authority: x509.Certificate,
    revoked: x509.CertificateRevocationList,
    when: datetime | None = None,
) -> str:
    """The name of the holder of a certificate; raises `CertificateRejected` if it is not valid.

    Nothing that the certificate says is looked at before its signature has been checked.
    """
    try:
        certificate = x509.load_pem_x509_certificate(pem)
    except (ValueError, x509.InvalidVersion):
        raise CertificateRejected(
            "malformed", "what was shown is not a certificate in PEM; show one"
        ) from None
    return _check(certificate, authority, revoked, when or now())


def _check(
    certificate: x509.Certificate,
    authority: x509.Certificate,
    revoked: x509.CertificateRevocationList,
    when: datetime,
) -> str:
    issuer = f"the authority {common_name(authority)!r}"
    if not signed_by(certificate, authority):
        raise CertificateRejected(
            "authority", f"a certificate was not issued by {issuer}; use one that was"
        )
    name = common_name(certificate)
    if not NAME.fullmatch(name):
        raise CertificateRejected(
            "name", f"no identity is named {name!r}; use a certificate of one"
        )
    what = f"the certificate of {name!r}"
    if not _for_peers(certificate):
        raise CertificateRejected(
            "purpose", f"{what} is not for servers and clients; use one that is"
        )
    check_dates(authority, issuer, when)
    check_dates(certificate, what, when)
    entry = revoked.get_revoked_certificate_by_serial_number(certificate.serial_number)
    if entry is not None:
        day = date(entry.revocation_date_utc)
        raise CertificateRejected("revoked", f"{what} was revoked on {day}; it needs a new one")
    return name


def signed_by(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    """Whether the issuer's name and the signature are those of the authority."""
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
        return False
    return True


def _for_peers(certificate: x509.Certificate) -> bool:
    """Whether it is for both ends of a connection, and not that of an authority."""
    try:
        found = certificate.extensions
        limits = found.get_extension_for_class(x509.BasicConstraints).value
        purposes = found.get_extension_for_class(x509.ExtendedKeyUsage).value
    except (ValueError, x509.ExtensionNotFound, x509.DuplicateExtension):
        return False
    return not limits.ca and set(PURPOSES) <= set(purposes)


def common_name(certificate: x509.Certificate) -> str:
    """The one common name, or nothing at all, which cannot be a name."""
    found = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(found[0].value) if len(found) == 1 else ""


def check_dates(certificate: x509.Certificate, what: str, when: datetime) -> None:
    begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if when < begins:
        raise CertificateRejected(
            "not yet valid",
            f"{what} is valid from {date(begins)} on, and it is {date(when)}; "
            "check the clock, or wait",
        )
    if when > ends:
        raise CertificateRejected(
            "expired",
            f"{what} expired on {date(ends)}, and it is {date(when)}; "
            "check the clock, or make a new one",
        )


def read_revocations(
    path: Path, content: bytes, authority: x509.Certificate
) -> x509.CertificateRevocationList:
    """The list in a file's content, once its signature has been checked."""
    try:
        found = x509.load_pem_x509_crl(content)
        # Kinds of keys that cannot sign a list raise a TypeError.
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
    return datetime.now(UTC).replace(microsecond=0)  # certificates know whole seconds


def date(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M} UTC"
