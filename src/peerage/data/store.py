"""The cache folder: checksums are verified when files are added, and again when they are read.

Files are written under a unique name, flushed to disk and renamed. A reader never sees a partial
file, and several processes may fetch the same data set.
"""

import gzip
import os
import tarfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import file_digest, sha256
from io import BytesIO, FileIO
from pathlib import Path, PurePosixPath
from secrets import token_hex
from tempfile import TemporaryDirectory
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from peerage.errors import DataError, DiskError

State = Literal["ready", "missing", "altered"]
Progress = Callable[[int, int | None, str], None]  # bytes done, total bytes if known, label

CHUNK = 1 << 20
UNREADABLE = (OSError, EOFError, zlib.error, tarfile.TarError)


class Readable(Protocol):
    def read(self, size: int = -1, /) -> bytes: ...


@dataclass(frozen=True)
class ExpectedFile:
    """Name, size and checksum of one uncompressed file, as published."""

    name: str
    size: int
    sha256: str


@dataclass
class VerifiedFiles:
    """Accepts the wanted files of a data set if their size and checksum are right."""

    folder: Path
    wanted: dict[str, ExpectedFile]
    progress: Progress
    failures: list[str] = field(default_factory=list)

    def add(self, path: Path, name: str | None = None) -> None:
        """Add every wanted file from a plain file, a .gz file or a tar archive.

        `name` is the name of the file if `path` is a temporary one.
        """
        name = name or path.name
        if not _is_tar(name) and name.removesuffix(".gz") not in self.wanted:
            return
        try:
            for member, stream in archive_members(path, name):
                if member in self.wanted:
                    self._verify_and_store(self.wanted[member], stream)
        except UNREADABLE as error:
            self.failures.append(f"{name} cannot be read: {error}")

    def add_bytes(self, name: str, content: bytes) -> None:
        if name in self.wanted:
            self._verify_and_store(self.wanted[name], BytesIO(content))

    def add_folder(self, folder: Path) -> None:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                self.add(path)

    def require(self, *names: str) -> None:
        """Raise an error if one of these files is still missing."""
        missing = [name for name in names if name in self.wanted]
        if missing:
            raise DataError("; ".join(self.failures) or f"{', '.join(missing)} not found")

    def _verify_and_store(self, expected: ExpectedFile, stream: Readable) -> None:
        temporary = self.folder / f"{expected.name}.{token_hex(8)}.tmp"
        try:
            size, checksum = _copy(stream, temporary, limit=expected.size)
            if (size, checksum) != (expected.size, expected.sha256):
                self.failures.append(f"{expected.name} differs from the published file")
                return
            with disk_errors(self.folder):
                os.replace(temporary, self.folder / expected.name)
        finally:
            temporary.unlink(missing_ok=True)
        del self.wanted[expected.name]
        self.progress(size, expected.size, f"{expected.name} checked")


def cache_folder() -> Path:
    """PEERAGE_DATA, or else `peerage` in the user's cache folder."""
    if folder := os.environ.get("PEERAGE_DATA"):
        return Path(folder).expanduser()
    # The XDG specification says to ignore relative paths.
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "peerage"


def state_of(folder: Path, expected: ExpectedFile) -> State:
    path = folder / expected.name
    if not path.exists():
        return "missing"
    try:
        with path.open("rb") as file:
            same = file_digest(file, "sha256").hexdigest() == expected.sha256
    except OSError:  # an unreadable file is fetched again
        same = False
    return "ready" if same else "altered"


def read_checked(folder: Path, expected: ExpectedFile, dataset: str) -> NDArray[np.uint8]:
    """The bytes of a cached file, with size and checksum verified."""
    path = folder / expected.name
    try:
        values = np.fromfile(path, dtype=np.uint8)
    except FileNotFoundError:
        raise DataError(f"{path} is missing; fetch it with: peerage data get {dataset}") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None
    if values.size != expected.size or sha256(values.data).hexdigest() != expected.sha256:
        raise DataError(
            f"{path} was altered; fetch it again with: peerage data get {dataset} --again"
        )
    return values


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Turn an OSError into a one-line DiskError."""
    try:
        yield
    except OSError as error:
        raise DiskError(
            f"cannot write to {folder}: {error.strerror or error}; "
            "free some space, or set PEERAGE_DATA to another folder"
        ) from None


def write_all(file: FileIO, chunk: bytes) -> None:
    """Write to an unbuffered file, so that a full disk raises an error here, not on closing."""
    rest = memoryview(chunk)
    with disk_errors(Path(file.name).parent):
        while rest:
            rest = rest[file.write(rest) :]


@contextmanager
def scratch_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """A temporary folder for large files, on the same disk as the result."""
    with disk_errors(parent):
        folder = TemporaryDirectory(dir=parent, prefix=prefix)
    with folder as path:
        yield Path(path)


def _copy(stream: Readable, path: Path, limit: int) -> tuple[int, str]:
    """Copy a stream to a file and return size and checksum; stops beyond the limit."""
    size, hasher = 0, sha256()
    with disk_errors(path.parent):
        file = path.open("xb", buffering=0)
    with file:
        while size <= limit and (chunk := stream.read(CHUNK)):
            size += len(chunk)
            hasher.update(chunk)
            write_all(file, chunk)
        with disk_errors(path.parent):
            os.fsync(file.fileno())
    return size, hasher.hexdigest()


def archive_members(path: Path, name: str) -> Iterator[tuple[str, Readable]]:
    """The names and the uncompressed content of the files in a file or archive."""
    if _is_tar(name):
        with tarfile.open(path) as archive:
            for member in archive:
                if member.isfile() and (stream := archive.extractfile(member)):
                    yield PurePosixPath(member.name).name, stream
    elif name.endswith(".gz"):
        with path.open("rb") as compressed, gzip.GzipFile(fileobj=compressed) as plain:
            yield name.removesuffix(".gz"), plain
    else:
        with path.open("rb") as file:
            yield name, file


def _is_tar(name: str) -> bool:
    return name.endswith((".tar", ".tar.gz", ".tgz"))
