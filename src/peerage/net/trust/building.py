"""How certificates are built: names, extensions and periods."""

from datetime import datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from peerage.net.trust import identity as identities

SKEW = timedelta(hours=1)  # certificates start in the past, for peers whose clocks are slow


def self_signed(name: str, key: ec.EllipticCurvePrivateKey, years: int) -> x509.Certificate:
    now = identities.now()
    public = key.public_key()
    return (
        builder(name, public, now - SKEW, now + years * timedelta(days=365.2425))
        .issuer_name(x509_name(name))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage(authority=True), critical=True)
        .add_extension(issued_by(public), critical=False)
        .sign(key, hashes.SHA256())
    )


def builder(
    name: str,
    key: ec.EllipticCurvePublicKey,
    start: datetime,
    end: datetime,
    unit: str | None = None,
) -> x509.CertificateBuilder:
    units = [] if unit is None else [x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, unit)]
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([*x509_name(name), *units]))
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(end)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def x509_name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def issued_by(key: ec.EllipticCurvePublicKey) -> x509.AuthorityKeyIdentifier:
    return x509.AuthorityKeyIdentifier.from_issuer_public_key(key)


def usage(authority: bool) -> x509.KeyUsage:
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


def pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
