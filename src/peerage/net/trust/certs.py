"""The certificate authority of a network: issues and revokes the identities of its peers.

An authority is a folder:

    authority.pem  authority.key    its certificate, copied to every peer, and its secret key
    NAME.pem       NAME.key         the certificate and key of one peer, its identity
    revoked.pem                     the signed revocation list, copied to every peer
    issued/SERIAL.pem               every issued certificate, to revoke it by name even after the
                                    files of the identity have been moved

A peer needs a folder with `authority.pem`, `revoked.pem` and its own two files. Keys are ECDSA on
P-256. Files are written under a temporary name and renamed, and keys are never readable by others.
"""

import ipaddress
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from peerage.errors import InputError, did_you_mean
from peerage.files import write_bytes
from peerage.net.trust import identity as identities
from peerage.net.trust.identity import (
    DOMAIN,
    PURPOSES,
    Identity,
    check_dates,
    common_name,
    date,
    read_revocations,
    server_name,
    signed_by,
)
from peerage.net.trust.keyfiles import (
    PUBLIC,
    REMEDY,
    SECRET,
    check_pair,
    locked,
    private_folder,
    read,
    read_certificate,
    read_key,
    write_new,
)

LOCAL = ("localhost", "127.0.0.1")
LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
SKEW = timedelta(hours=1)  # certificates start in the past, for peers whose clocks are slow


@dataclass(frozen=True)
class Issued:
    """A certificate that an authority has issued."""

    name: str
    serial: int
    hosts: tuple[str, ...]
    not_before: datetime
    not_after: datetime
    revoked: datetime | None

    @property
    def status(self) -> str:
        if self.revoked is not None:
            return "revoked"
        now = identities.now()
        if now < self.not_before:
            return "not yet valid"
        return "expired" if now > self.not_after else "valid"


@dataclass(frozen=True, eq=False)
class Authority:
    """The certificate authority of one network; issues and revokes identities."""

    folder: Path
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @classmethod
    def create(cls, folder: Path, name: str, years: int = 10) -> Self:
        """Create an authority in a folder that has none; the folder is created if necessary."""
        if not (name.isprintable() and 1 <= len(name) <= 64 and name == name.strip()):
            raise InputError(f"the name of an authority must have 1 to 64 letters, got {name!r}")
        _check_range("years", years, 100)
        folder = Path(folder)
        key = ec.generate_private_key(ec.SECP256R1())
        authority = cls(folder, _self_signed(name, key, years), key)
        with private_folder(folder), locked(folder):
            for file in ("authority.pem", "authority.key", "revoked.pem"):
                if os.path.lexists(folder / file):
                    raise InputError(
                        f"{folder / file} already exists, and an authority is never overwritten; "
                        "choose another folder, or move the file away"
                    )
            # The certificate is written last: without it there is no authority.
            write_new(
                (folder / "authority.key", _pem_of_key(key), SECRET),
                (folder / "revoked.pem", authority._signed_list([], 1), PUBLIC),
                (folder / "authority.pem", _pem(authority.certificate), PUBLIC),
            )
        return authority

    @classmethod
    def load(cls, folder: Path) -> Self:
        folder = Path(folder)
        remedy = f"create an authority with `peerage certs init --folder {folder}`"
        certificate = read_certificate(folder / "authority.pem", remedy)
        path = folder / "authority.key"
        key = read_key(path, "use the folder in which the authority was created")
        check_pair(path, key, certificate)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise InputError(f"{path} is not an elliptic curve key; {remedy}")
        authority = cls(folder, certificate, key)
        authority._list()
        return authority

    @property
    def name(self) -> str:
        return common_name(self.certificate)

    def check_free(self, name: str, into: Path | None = None) -> None:
        """Raise InputError if an identity of this name exists, or the name is not valid."""
        identity = Identity.within(self.folder if into is None else into, name)
        for path in (identity.certificate, identity.key):
            if os.path.lexists(path):
                raise InputError(
                    f"{path} already exists, and an identity is never overwritten; to replace it, "
                    f"run `peerage certs revoke {name}` and delete {name}.pem and {name}.key"
                )

    def issue(
        self,
        name: str,
        *,
        hosts: Sequence[str] = LOCAL,
        days: int = 825,
        not_before: datetime | None = None,
        into: Path | None = None,
    ) -> Identity:
        """Issue an identity for a peer that runs on these hosts (names or addresses).

        With `into`, all files of the peer are written to that folder, and its key only there.
        """
        self.check_free(name, into)
        identity = Identity.within(self.folder if into is None else into, name)
        key = ec.generate_private_key(ec.SECP256R1())
        names = [x509.DNSName(server_name(name)), *map(_general_name, dict.fromkeys(hosts))]
        start, end = self._period(days, not_before)
        certificate = self._sign(_builder(name, key.public_key(), start, end), names)
        record = self.folder / "issued" / f"{certificate.serial_number:x}.pem"
        home = identity.certificate.parent
        with private_folder(home), locked(self.folder), private_folder(record.parent):
            self.check_free(name, into)
            self._copy_public_files(identity)
            write_new(
                (record, _pem(certificate), PUBLIC),
                (identity.key, _pem_of_key(key), SECRET),
                (identity.certificate, _pem(certificate), PUBLIC),
            )
        return identity

    def issued(self) -> list[Issued]:
        """All issued certificates, by name and then by age."""
        revocations = self._list()
        found = []
        for path in (self.folder / "issued").glob("*.pem"):
            certificate = read_certificate(path, "restore it from a copy, or delete it")
            if not signed_by(certificate, self.certificate):
                raise InputError(f"{path} was not issued by {self.name!r}; move it away")
            found.append(_issued(certificate, revocations))
        return sorted(found, key=lambda c: (len(c.name), c.name, c.not_before, c.serial))

    def revoke(self, name_or_serial: str | int) -> list[int]:
        """Revoke all certificates of a name, or one by its serial; return the newly revoked ones.

        A serial is a number, or a text of hexadecimal digits as shown by `peerage certs list`.
        """
        check_dates(self.certificate, f"the authority {self.name!r}", identities.now())
        with locked(self.folder):
            serials = _matching(self.issued(), name_or_serial)
            old = self._list()
            number = old.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number
            new = sorted(serials - {entry.serial_number for entry in old})
            if new:
                content = self._signed_list([*old, *map(_revocation, new)], number + 1)
                write_bytes(self.folder / "revoked.pem", content, REMEDY)
        return new

    def _list(self) -> x509.CertificateRevocationList:
        path = self.folder / "revoked.pem"
        return read_revocations(path, read(path, "restore it from a copy"), self.certificate)

    def _signed_list(self, entries: Sequence[x509.RevokedCertificate], number: int) -> bytes:
        """A signed revocation list, valid as long as the authority, as peers may get no other."""
        builder = (
            x509.CertificateRevocationListBuilder()
            .issuer_name(self.certificate.subject)
            .last_update(identities.now() - SKEW)
            .next_update(self.certificate.not_valid_after_utc)
            .add_extension(x509.CRLNumber(number), critical=False)
            .add_extension(_issued_by(self.key.public_key()), critical=False)
        )
        for entry in entries:
            builder = builder.add_revoked_certificate(entry)
        signed = builder.sign(self.key, hashes.SHA256())
        return signed.public_bytes(serialization.Encoding.PEM)

    def _period(self, days: int, not_before: datetime | None) -> tuple[datetime, datetime]:
        _check_range("days", days, 36500)
        now = identities.now()
        check_dates(self.certificate, f"the authority {self.name!r}", now)
        start = now if not_before is None else not_before.astimezone(UTC)
        end = start + timedelta(days=days)
        last = self.certificate.not_valid_after_utc
        if end > last:
            raise InputError(
                f"{days} days are more than the authority {self.name!r} has left: it expires on "
                f"{date(last)}; use at most {max((last - start).days, 0)} days"
            )
        return (now - SKEW if not_before is None else start), end

    def _sign(
        self, builder: x509.CertificateBuilder, names: Sequence[x509.GeneralName]
    ) -> x509.Certificate:
        return (
            builder.issuer_name(self.certificate.subject)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(authority=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(PURPOSES), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(_issued_by(self.key.public_key()), critical=False)
            .sign(self.key, hashes.SHA256())
        )

    def _copy_public_files(self, identity: Identity) -> None:
        """Copy the authority's certificate and revocation list to another folder."""
        if identity.authority.parent.samefile(self.folder):
            return
        own = _pem(self.certificate)
        if not os.path.lexists(identity.authority):
            write_new((identity.authority, own, PUBLIC))
        elif read(identity.authority, REMEDY) != own:
            raise InputError(
                f"{identity.authority} belongs to another authority; choose another folder"
            )
        write_bytes(identity.revoked, read(self.folder / "revoked.pem", REMEDY), REMEDY)


def _self_signed(name: str, key: ec.EllipticCurvePrivateKey, years: int) -> x509.Certificate:
    now = identities.now()
    public = key.public_key()
    return (
        _builder(name, public, now - SKEW, now + years * timedelta(days=365.2425))
        .issuer_name(_x509_name(name))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(authority=True), critical=True)
        .add_extension(_issued_by(public), critical=False)
        .sign(key, hashes.SHA256())
    )


def _builder(
    name: str, key: ec.EllipticCurvePublicKey, start: datetime, end: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(_x509_name(name))
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(end)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _x509_name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _issued_by(key: ec.EllipticCurvePublicKey) -> x509.AuthorityKeyIdentifier:
    return x509.AuthorityKeyIdentifier.from_issuer_public_key(key)


def _usage(authority: bool) -> x509.KeyUsage:
    """The key usage: an authority signs certificates and lists, a peer only handshakes."""
    return x509.KeyUsage(
        digital_signature=not authority,
        key_cert_sign=authority,
        crl_sign=authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def is_host_name(name: str) -> bool:
    """Whether this is a valid host name, and not an IP address."""
    labels = name.split(".")
    well_formed = all(map(LABEL.fullmatch, labels))
    return len(name) <= 253 and well_formed and not labels[-1].isdigit()


def _general_name(host: str) -> x509.GeneralName:
    with suppress(ValueError):
        return x509.IPAddress(ipaddress.ip_address(host))
    name = host.lower()
    if not is_host_name(name):
        raise InputError(
            "a host must be a name such as peer.example.org or an address such as 192.0.2.7, "
            f"without a port; got {host!r}"
        )
    if name == DOMAIN or name.endswith(f".{DOMAIN}"):
        raise InputError(
            f"host {host!r} is in {DOMAIN}, which is reserved for identities; choose another"
        )
    return x509.DNSName(name)


def _check_range(what: str, value: int, most: int) -> None:
    if not 1 <= value <= most:
        raise InputError(f"{what} must lie between 1 and {most}, got {value}")


def _issued(certificate: x509.Certificate, revocations: x509.CertificateRevocationList) -> Issued:
    name = common_name(certificate)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    entry = revocations.get_revoked_certificate_by_serial_number(certificate.serial_number)
    return Issued(
        name=name,
        serial=certificate.serial_number,
        hosts=tuple(str(host.value) for host in names if host.value != server_name(name)),
        not_before=certificate.not_valid_before_utc,
        not_after=certificate.not_valid_after_utc,
        revoked=None if entry is None else entry.revocation_date_utc,
    )


def _matching(issued: Sequence[Issued], name_or_serial: str | int) -> set[int]:
    text = f"{name_or_serial:x}" if isinstance(name_or_serial, int) else name_or_serial
    serials = {entry.serial for entry in issued if entry.name == name_or_serial}
    if not serials:
        digits = text.lower().replace(":", "").lstrip("0")
        serials = {entry.serial for entry in issued if f"{entry.serial:x}" == digits}
    if not serials:
        names = {entry.name for entry in issued}
        hint = did_you_mean(text, names) if names else "none has been issued yet"
        raise InputError(f"no identity {text!r} was issued here; {hint}")
    return serials


def _revocation(serial: int) -> x509.RevokedCertificate:
    builder = x509.RevokedCertificateBuilder().serial_number(serial)
    return builder.revocation_date(identities.now()).build()


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _pem_of_key(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
