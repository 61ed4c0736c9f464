"""Files with keys and certificates: private from the first byte, and written atomically."""

import fcntl
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes

from peerage.errors import InputError
from peerage.files import disk_errors

REMEDY = "run the command again"
PUBLIC, SECRET = 0o644, 0o600


def read(path: Path, remedy: str, *, secret: bool = False) -> bytes:
    """Read a file; a secret one must be accessible to its owner only."""
    try:
        with open(path, "rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if secret and mode & 0o077:
                raise InputError(
                    f"{path} is a secret key that other users can access (mode {mode:04o}); "
                    f"run `chmod 600 {path}`"
                )
            return file.read()
    except FileNotFoundError:
        raise InputError(f"there is no {path}; {remedy}") from None
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}; check its permissions") from None


def read_certificate(path: Path, remedy: str) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(read(path, remedy))
    except (ValueError, x509.InvalidVersion):
        raise InputError(f"{path} is not a certificate in PEM; {remedy}") from None


def read_certificates(path: Path, remedy: str) -> list[x509.Certificate]:
    """The certificates of a file, which has at least one."""
    return parse_certificates(path, read(path, remedy), remedy)


def parse_certificates(path: Path, content: bytes, remedy: str) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(content)
    except (ValueError, x509.InvalidVersion):
        raise InputError(f"{path} is not a certificate in PEM; {remedy}") from None


def read_key(path: Path, remedy: str) -> PrivateKeyTypes:
    content = read(path, remedy, secret=True)
    try:
        return serialization.load_pem_private_key(content, password=None)
    except TypeError:
        raise InputError(f"{path} has a password; use a key without one") from None
    except (ValueError, UnsupportedAlgorithm):
        raise InputError(f"{path} is not a private key in PEM; {remedy}") from None


def check_pair(path: Path, key: PrivateKeyTypes, certificate: x509.Certificate) -> None:
    if key.public_key() != certificate.public_key():
        raise InputError(
            f"{path} is not the key of the certificate in the same folder; "
            "copy both from where they were created"
        )


def write_new(*files: tuple[Path, bytes, int]) -> None:
    """Write all of these new files (path, content, mode), or none of them."""
    temporary: list[Path] = []
    placed: list[Path] = []
    try:
        for path, content, mode in files:
            temporary.append(path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp"))
            with disk_errors(path, REMEDY):
                descriptor = os.open(temporary[-1], os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
                with open(descriptor, "wb") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(descriptor)
        for source, (path, _, _) in zip(temporary, files, strict=True):
            placed.append(path)
            with disk_errors(path, REMEDY):
                os.replace(source, path)
    except BaseException:
        for path in (*placed, *temporary):
            path.unlink(missing_ok=True)
        raise


@contextmanager
def private_folder(folder: Path) -> Iterator[None]:
    """Create a folder that only its owner can access; remove it again after an error."""
    with disk_errors(folder, REMEDY):
        new = not folder.is_dir()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        mode = stat.S_IMODE(folder.stat().st_mode)
    if mode & 0o022:
        raise InputError(
            f"other users can write to {folder} (mode {mode:04o}); run `chmod 700 {folder}`"
        )
    try:
        yield
    except BaseException:
        if new:
            with suppress(OSError):  # the folder is not empty
                folder.rmdir()
        raise


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a folder against other processes, so that concurrent revocations are not lost."""
    with disk_errors(folder, REMEDY):
        lock = os.open(folder, os.O_RDONLY)
    try:
        with disk_errors(folder, REMEDY):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def pem_of_key(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
