"""Identities for tests, above all wrong ones that an attacker may use."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from peerage.net.trust.certs import Authority
from peerage.net.trust.identity import Identity

SERVER, CLIENT = ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH
NO_AUTHORITY = x509.BasicConstraints(ca=False, path_length=None)


def wrong_identities(
    authority: Authority, folder: Path, *, victim: str, member: str
) -> dict[str, Identity | None]:
    """Eight kinds, all but the last two in the name of `victim`; None means no certificate.

    All of them have the certificate of the right authority, so that they accept the server and only
    the server can reject them. The last, "sends as another", is the valid identity of `member`;
    only the sender in its headers is wrong.
    """
    return {
        "none": None,
        "self-signed": self_signed(authority, folder / "self-signed", victim),
        "other authority": of_another_authority(authority, folder / "other", victim),
        "expired": authority.issue(
            victim, days=10, not_before=days_from_now(-20), into=folder / "expired"
        ),
        "not yet valid": authority.issue(
            victim, days=10, not_before=days_from_now(5), into=folder / "early"
        ),
        "revoked": revoked(authority, folder / "revoked", victim),
        "not a member": authority.issue("stranger", into=folder / "stranger"),
        "sends as another": authority.issue(member, into=folder / "member"),
    }


def days_from_now(days: float) -> datetime:
    return datetime.now(UTC) + timedelta(days=days)


def certificate_of(identity: Identity) -> x509.Certificate:
    return x509.load_pem_x509_certificate(identity.certificate.read_bytes())


def files(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def serial_of(identity: Identity) -> int:
    return certificate_of(identity).serial_number


def revoked(authority: Authority, folder: Path, name: str) -> Identity:
    """It keeps the list from before it was revoked, as a thief would."""
    identity = authority.issue(name, into=folder)
    authority.revoke(serial_of(identity))
    return identity


def of_another_authority(
    authority: Authority, folder: Path, name: str, called: str | None = None
) -> Identity:
    """Signed by another authority that has the same name."""
    other = Authority.create(folder, called or authority.name)
    identity = other.issue(name)
    return trusting(authority, identity)


def self_signed(authority: Authority, folder: Path, name: str) -> Identity:
    folder.mkdir(parents=True)
    identity = Identity.within(folder, name)
    key = ec.generate_private_key(ec.SECP256R1())
    subject = common_name(name)
    identity.certificate.write_bytes(hand_made(subject, subject, key, key))
    identity.key.touch(mode=0o600)
    identity.key.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return trusting(authority, identity)


def trusting(authority: Authority, identity: Identity) -> Identity:
    for file in ("authority.pem", "revoked.pem"):
        content = (authority.folder / file).read_bytes()
        (identity.certificate.parent / file).write_bytes(content)
    return identity


def common_name(*names: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name) for name in names])


def hand_made(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    signer: ec.EllipticCurvePrivateKey,
    *,
    limits: x509.BasicConstraints | None = NO_AUTHORITY,
    purposes: Sequence[x509.ObjectIdentifier] = (SERVER, CLIENT),
) -> bytes:
    """A certificate in PEM for this machine, not made by an authority of ours."""
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(days_from_now(-1))
        .not_valid_after(days_from_now(100))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
    )
    if limits is not None:
        builder = builder.add_extension(limits, critical=True)
    if purposes:
        builder = builder.add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
    return builder.sign(signer, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
