"""The authority's signature of a network file and its experiment.

It is a text file beside the network file, `network.sig` for `network.toml`:

    peerage network signature 1
    network SHA-256
    experiment SHA-256
    signature BASE64

The signature is ECDSA with SHA-256, over the first three lines. A peer whose certificates folder
has a file `require-signature` refuses network files without a signature.
"""

import hashlib
import tomllib
from base64 import b64decode, b64encode
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from peerage.errors import InputError
from peerage.files import write_bytes
from peerage.net.trust.certs import Authority
from peerage.net.trust.identity import COPY, common_name
from peerage.net.trust.keyfiles import REMEDY, read, read_certificates

TITLE = "peerage network signature 1"
REQUIRED = "require-signature"  # in the certificates folder of a peer
REQUIRED_TEXT = "This peer refuses network files that the authority has not signed.\n"


def signature_path(network: Path) -> Path:
    return network.with_suffix(".sig")


def sign_network(authority: Authority, network: Path) -> Path:
    """Sign a network file and its experiment; return the path of the signature."""
    message = _message(network)
    signature = authority.key.sign(message.encode(), ec.ECDSA(hashes.SHA256()))
    text = f"{message}signature {b64encode(signature).decode()}\n"
    path = signature_path(network)
    write_bytes(path, text.encode(), REMEDY)
    return path


def check_signature(network: Path, certificates: Path) -> bool:
    """Whether a network file is signed by the authority of a peer.

    Raises InputError if the signature is wrong, or if there is none and the folder of certificates
    requires one. This is checked before the file is used: an experiment may name a file with code.
    """
    path = signature_path(network)
    sign = f"sign it with `peerage certs sign-network {network}` where the authority is"
    if not path.exists():
        if (certificates / REQUIRED).exists():
            raise InputError(f"{network} is not signed, but {certificates} requires it; {sign}")
        return False
    authorities = read_certificates(certificates / "authority.pem", COPY)
    lines = read(path, REMEDY).decode("utf-8", "replace").splitlines()
    signed, last = "".join(f"{line}\n" for line in lines[:-1]), (lines or [""])[-1]
    try:
        value = b64decode(last.removeprefix("signature "), validate=True)
    except ValueError:
        value = b""
    if not (
        signed.startswith(f"{TITLE}\n")
        and any(_has_signed(authority, value, signed.encode()) for authority in authorities)
    ):
        name = common_name(authorities[0])
        raise InputError(f"{path} is not a signature of the authority {name!r}; {sign}")
    if signed != _message(network):
        raise InputError(f"{network} or its experiment has changed since it was signed; {sign}")
    return True


def _has_signed(authority: x509.Certificate, signature: bytes, message: bytes) -> bool:
    key = authority.public_key()
    try:
        if isinstance(key, ec.EllipticCurvePublicKey):
            key.verify(signature, message, ec.ECDSA(hashes.SHA256()))
            return True
    except InvalidSignature:
        pass
    return False


def _message(network: Path) -> str:
    """The text that is signed."""
    content = read(network, "give the path of a network file")
    try:
        experiment = tomllib.loads(content.decode("utf-8"))["experiment"]
    except (ValueError, KeyError):
        raise InputError(f"{network} is not a network file, or names no experiment") from None
    source = read(network.parent / str(experiment), f"{network} names this experiment")
    hashed = [hashlib.sha256(one).hexdigest() for one in (content, source)]
    return f"{TITLE}\nnetwork {hashed[0]}\nexperiment {hashed[1]}\n"
