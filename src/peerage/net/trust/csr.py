"""Certificate signing requests: the key is made where the peer runs, and never leaves it."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from peerage.errors import InputError
from peerage.files import write_bytes
from peerage.net.trust.identity import Identity, check_name, server_name
from peerage.net.trust.keyfiles import (
    REMEDY,
    SECRET,
    pem_of_key,
    private_folder,
    read,
    read_key,
    write_new,
)
from peerage.net.trust.names import general_name


@dataclass(frozen=True)
class SigningRequest:
    """A request for a certificate: the name, hosts and public key of a peer."""

    name: str
    hosts: tuple[str, ...]
    key: ec.EllipticCurvePublicKey

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.key)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a request, and check its name and that it was made with its key.

        The file must be called like the peer, so that whoever signs it sees for whom.
        """
        remedy = "make it with `peerage certs request`"
        try:
            request = x509.load_pem_x509_csr(read(path, remedy))
            key, valid = request.public_key(), request.is_signature_valid
            found = request.extensions
        except (ValueError, TypeError, x509.InvalidVersion, UnsupportedAlgorithm):
            raise InputError(f"{path} is not a signing request in PEM; {remedy}") from None
        if not valid or not (isinstance(key, ec.EllipticCurvePublicKey) and _is_p256(key)):
            raise InputError(f"{path} is not signed with an elliptic curve key (P-256); {remedy}")
        names = request.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        name = check_name(str(names[0].value) if len(names) == 1 else "")
        if path.name != f"{name}.csr":
            raise InputError(
                f"{path} is a request in the name of {name!r}; if this is right, rename it to "
                f"{name}.csr"
            )
        try:
            wanted = found.get_extension_for_class(x509.SubjectAlternativeName).value
        except x509.ExtensionNotFound:
            wanted = x509.SubjectAlternativeName([])
        values = (str(one.value) for one in wanted)
        return cls(name, tuple(host for host in values if host != server_name(name)), key)


def create_request(folder: Path, name: str, hosts: Sequence[str]) -> tuple[Path, SigningRequest]:
    """Write NAME.csr, and NAME.key if it does not exist; with the same key, it asks for a renewal.

    Returns the path of the request, and the request.
    """
    identity = Identity.within(folder, name)
    names = [x509.DNSName(server_name(name)), *map(general_name, dict.fromkeys(hosts))]
    path = identity.certificate.with_suffix(".csr")
    with private_folder(folder):
        if identity.key.exists():
            key = read_key(identity.key, "choose another folder")
            if not (isinstance(key, ec.EllipticCurvePrivateKey) and _is_p256(key)):
                raise InputError(f"{identity.key} is not an elliptic curve key (P-256); remove it")
        else:
            key = ec.generate_private_key(ec.SECP256R1())
            write_new((identity.key, pem_of_key(key), SECRET))
        builder = (
            x509.CertificateSigningRequestBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
        )
        request = builder.sign(key, hashes.SHA256())
        write_bytes(path, request.public_bytes(serialization.Encoding.PEM), REMEDY)
    return path, SigningRequest.load(path)


def fingerprint(key: ec.EllipticCurvePublicKey) -> str:
    """SHA-256 of a public key, in groups that two people can read to each other."""
    raw = key.public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    digits = hashlib.sha256(raw).hexdigest()
    return " ".join(digits[i : i + 8] for i in range(0, len(digits), 8))


def _is_p256(key: ec.EllipticCurvePublicKey | ec.EllipticCurvePrivateKey) -> bool:
    return isinstance(key.curve, ec.SECP256R1)
