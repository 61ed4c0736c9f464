"""The certificate authority of a network: issues and revokes the identities of its peers.

An authority is a folder:

    authority.pem  authority.key    its certificate, copied to every peer, and its secret key
    NAME.pem       NAME.key         the certificate and key of one peer, its identity
    revoked.pem                     the signed revocation list, copied to every peer
    issued/SERIAL.pem               every issued certificate, to revoke it by name even after the
                                    files of the identity have been moved
    previous/                       the authority before this one, while both are valid; see
                                    `rotation`

A peer needs a folder with `authority.pem`, `revoked.pem` and its own two files. Keys are ECDSA on
P-256. Files are written under a temporary name and renamed, and keys are never readable by others.
"""

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from peerage.errors import InputError, did_you_mean
from peerage.files import write_bytes
from peerage.net.trust import identity as identities
from peerage.net.trust.building import SKEW, builder, issued_by, pem, self_signed, usage
from peerage.net.trust.csr import SigningRequest
from peerage.net.trust.identity import (
    HOLDER,
    OBSERVER_PURPOSES,
    OBSERVER_UNIT,
    PURPOSES,
    Identity,
    check_dates,
    common_name,
    date,
    is_observer,
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
    pem_of_key,
    private_folder,
    read,
    read_certificate,
    read_key,
    write_new,
)
from peerage.net.trust.memory_keys import MemoryKeys
from peerage.net.trust.names import general_name

PREVIOUS = "previous"  # folder of the authority before
LOCAL = ("localhost", "127.0.0.1")


@dataclass(frozen=True)
class Issued:
    """A certificate that an authority has issued."""

    name: str
    serial: int
    hosts: tuple[str, ...]
    not_before: datetime
    not_after: datetime
    revoked: datetime | None
    observer: bool = False

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
    memory: MemoryKeys | None = None  # where keys are made, if not in files

    @classmethod
    def create(
        cls, folder: Path, name: str, years: int = 10, memory: MemoryKeys | None = None
    ) -> Self:
        """Create an authority in a folder that has none; the folder is created if necessary.

        With `memory`, it is a temporary one: its key is in no file, nor are those that it makes.
        """
        if not (name.isprintable() and 1 <= len(name) <= 64 and name == name.strip()):
            raise InputError(f"the name of an authority must have 1 to 64 letters, got {name!r}")
        _check_range("years", years, 100)
        folder = Path(folder)
        key = ec.generate_private_key(ec.SECP256R1())
        authority = cls(folder, self_signed(name, key, years), key, memory)
        with private_folder(folder), locked(folder):
            for file in ("authority.pem", "authority.key", "revoked.pem"):
                if os.path.lexists(folder / file):
                    raise InputError(
                        f"{folder / file} already exists, and an authority is never overwritten; "
                        "choose another folder, or move the file away"
                    )
            # The certificate is written last: without it there is no authority.
            secret = [] if memory else [(folder / "authority.key", pem_of_key(key), SECRET)]
            write_new(
                *secret,
                (folder / "revoked.pem", authority._signed_list([], 1), PUBLIC),
                (folder / "authority.pem", pem(authority.certificate), PUBLIC),
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
        observer: bool = False,
    ) -> Identity:
        """Issue an identity for a peer that runs on these hosts (names or addresses).

        With `into`, all files of the peer are written to that folder, and its key only there. An
        observer may only ask peers for their status.
        """
        self.check_free(name, into)
        identity = Identity.within(self.folder if into is None else into, name)
        key = ec.generate_private_key(ec.SECP256R1())
        period = self._period(days, not_before)
        certificate = self._certify(name, key.public_key(), hosts, period, observer)
        record = self._record(certificate)
        home = identity.certificate.parent
        with private_folder(home), locked(self.folder), private_folder(record.parent):
            self.check_free(name, into)
            self.copy_public_files(home)
            if self.memory is not None:
                self.memory.keep(identity.key, pem_of_key(key))
            secret = [] if self.memory else [(identity.key, pem_of_key(key), SECRET)]
            write_new(
                (record, pem(certificate), PUBLIC),
                *secret,
                (identity.certificate, pem(certificate), PUBLIC),
            )
        return identity

    def sign(self, request: SigningRequest, *, days: int = 825, observer: bool = False) -> Path:
        """Issue a certificate for a key that was made elsewhere; return its path.

        Raises InputError if another key with this name is still valid: its holder could act as the
        new peer, or the new one as its holder. The same key gets a new certificate, a renewal.
        """
        name = request.name
        identity = Identity.within(self.folder, name)
        if os.path.lexists(identity.key):
            raise InputError(
                f"{identity.key} exists, so the key of {name!r} was made here; to use one that was "
                f"made elsewhere, run `peerage certs revoke {name}` and delete both of its files"
            )
        period = self._period(days, None)
        certificate = self._certify(name, request.key, request.hosts, period, observer)
        record = self._record(certificate)
        with locked(self.folder), private_folder(record.parent):
            for one in self.issued():
                if one.name != name or one.status != "valid":
                    continue
                path = self.folder / "issued" / f"{one.serial:x}.pem"
                if read_certificate(path, REMEDY).public_key() != request.key:
                    raise InputError(
                        f"{name!r} has a valid certificate for another key, serial "
                        f"{one.serial:x}; if that key is no longer used, run `peerage certs revoke "
                        f"{name}` first"
                    )
            write_new((record, pem(certificate), PUBLIC))
            write_bytes(identity.certificate, pem(certificate), REMEDY)
        return identity.certificate

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
            previous = self.previous()
            both = [self] if previous is None else [self, previous]
            issued = [one for each in both for one in each.issued()]
            serials = _matching(issued, name_or_serial)
            new = sorted(serial for each in both for serial in each._extend_list(serials, issued))
            if new and previous is not None:
                self.write_public_files()
        return new

    def previous(self) -> Self | None:
        """The authority that this one replaces, while both are valid."""
        folder = self.folder / PREVIOUS
        return type(self).load(folder) if folder.exists() else None

    def _extend_list(self, serials: Collection[int], issued: Sequence[Issued]) -> list[int]:
        """Add the serials that were issued here to the own list; return the new ones.

        `issued` are the certificates of all authorities, and `serials` those to be revoked.
        """
        old = self._list()
        number = old.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number
        known = {entry.serial_number for entry in old}
        new = [one for one in self.issued() if one.serial in serials and one.serial not in known]
        if new:
            entries = [_revocation(one, issued, serials) for one in new]
            content = self._signed_list([*old, *entries], number + 1)
            write_bytes(self.folder / "revoked.pem", content, REMEDY)
        return [one.serial for one in new]

    def write_public_files(self, *, alone: bool = False) -> None:
        """Write the own certificate and list, and those of the authority before unless `alone`."""
        own = self._list().public_bytes(serialization.Encoding.PEM)
        previous = None if alone else self.previous()
        files = {"revoked.pem": own, "authority.pem": pem(self.certificate)}
        for file, content in files.items():
            more = b"" if previous is None else read(previous.folder / file, REMEDY)
            write_bytes(self.folder / file, content + more, REMEDY)

    def certify_again(self, one: Issued, issued: x509.Certificate, days: int) -> None:
        """Issue a certificate for a key that another authority has certified."""
        key = issued.public_key()
        assert isinstance(key, ec.EllipticCurvePublicKey)
        period = self._period(days, None)
        certificate = self._certify(one.name, key, one.hosts, period, one.observer)
        record = self._record(certificate)
        with private_folder(record.parent):
            path = Identity.within(self.folder, one.name).certificate
            write_new((record, pem(certificate), PUBLIC), (path, pem(certificate), PUBLIC))

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
            .add_extension(issued_by(self.key.public_key()), critical=False)
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

    def _record(self, certificate: x509.Certificate) -> Path:
        return self.folder / "issued" / f"{certificate.serial_number:x}.pem"

    def _certify(
        self,
        name: str,
        key: ec.EllipticCurvePublicKey,
        hosts: Sequence[str],
        period: tuple[datetime, datetime],
        observer: bool,
    ) -> x509.Certificate:
        names = [x509.DNSName(server_name(name)), *map(general_name, dict.fromkeys(hosts))]
        purposes = OBSERVER_PURPOSES if observer else PURPOSES
        return (
            builder(name, key, *period, unit=OBSERVER_UNIT if observer else None)
            .issuer_name(self.certificate.subject)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(usage(authority=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(issued_by(self.key.public_key()), critical=False)
            .sign(self.key, hashes.SHA256())
        )

    def copy_public_files(self, folder: Path) -> None:
        """Copy the authority's certificate and revocation list to another folder."""
        if folder.samefile(self.folder):
            return
        own, authority = read(self.folder / "authority.pem", REMEDY), folder / "authority.pem"
        if not os.path.lexists(authority):
            write_new((authority, own, PUBLIC))
        elif read(authority, REMEDY) != own:
            if pem(read_certificate(authority, REMEDY)) not in own:
                raise InputError(f"{authority} belongs to another authority; choose another folder")
            write_bytes(authority, own, REMEDY)  # of the authority before this one
        revoked = read(self.folder / "revoked.pem", REMEDY)
        write_bytes(folder / "revoked.pem", revoked, REMEDY)


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
        observer=is_observer(certificate),
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


def _revocation(
    revoked: Issued, issued: Sequence[Issued], serials: Collection[int]
) -> x509.RevokedCertificate:
    """The entry of a certificate that is revoked together with others.

    It has the name of the holder, unless that has another valid certificate: a renewed one.
    """
    builder = x509.RevokedCertificateBuilder().serial_number(revoked.serial)
    others = [one for one in issued if one.name == revoked.name and one.serial not in serials]
    if not any(one.status == "valid" for one in others):
        name = x509.UnrecognizedExtension(HOLDER, revoked.name.encode())
        builder = builder.add_extension(name, critical=False)
    return builder.revocation_date(identities.now()).build()
