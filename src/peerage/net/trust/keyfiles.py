"""Files that hold keys and certificates: private from the first byte, complete or not there."""

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
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes, PublicKeyTypes

from peerage.errors import InputError
from peerage.files import disk_errors

__all__ = [
    "PUBLIC",
    "REMEDY",
    "SECRET",
    "check_pair",
    "locked",
    "private_folder",
    "read",
    "read_certificate",
    "read_key",
    "write_new",
]

REMEDY = "run the command again"
PUBLIC, SECRET = 0o644, 0o600


def read(path: Path, remedy: str, *, secret: bool = False) -> bytes:
    """The content; what is secret must not be open to anybody but its owner."""
    try:
        with open(path, "rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if secret and mode & 0o077:
                raise InputError(
                    f"{path} is a secret key that others can use (mode {mode:04o}); "
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


def read_key(path: Path, remedy: str) -> PrivateKeyTypes:
    content = read(path, remedy, secret=True)
    try:
        return serialization.load_pem_private_key(content, password=None)
    except TypeError:
        raise InputError(f"{path} has a password; peers need a key without one") from None
    except (ValueError, UnsupportedAlgorithm):
        raise InputError(f"{path} is not a private key in PEM; {remedy}") from None


def check_pair(path: Path, key: PrivateKeyTypes, certificate: x509.Certificate) -> None:
    if _bytes(key.public_key()) != _bytes(certificate.public_key()):
        raise InputError(
            f"{path} is not the key of the certificate beside it; "
            "copy both from where they were made"
        )


def _bytes(key: PublicKeyTypes) -> bytes:
    return key.public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )


def write_new(*files: tuple[Path, bytes, int]) -> None:
    """All of these (path, content, mode), or none of them; none may be there before."""
    asides: list[Path] = []
    placed: list[Path] = []
    try:
        for path, content, mode in files:
            asides.append(path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp"))
            with disk_errors(path, REMEDY):
                _write(asides[-1], content, mode)
        for aside, (path, _, _) in zip(asides, files, strict=True):
            placed.append(path)
            with disk_errors(path, REMEDY):
                os.replace(aside, path)
    except BaseException:
        for path in (*placed, *asides):
            path.unlink(missing_ok=True)
        raise


def _write(path: Path, content: bytes, mode: int) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def private_folder(folder: Path) -> Iterator[None]:
    """Make a folder that is its owner's alone, and take it away again if nothing comes of it."""
    with disk_errors(folder, REMEDY):
        new = not folder.is_dir()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        mode = stat.S_IMODE(folder.stat().st_mode)
    if mode & 0o022:
        raise InputError(
            f"others can write to the folder {folder} (mode {mode:04o}); run `chmod 700 {folder}`"
        )
    try:
        yield
    except BaseException:
        if new:
            with suppress(OSError):  # a folder that holds something refuses to go
                folder.rmdir()
        raise


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One process at a time: two that revoke at once must not lose a revocation."""
    with disk_errors(folder, REMEDY):
        lock = os.open(folder, os.O_RDONLY)
    try:
        with disk_errors(folder, REMEDY):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)
