"""The cache folder: files enter it past their checksum only, and are checked again when read.

Files are written under a name that no other process uses, flushed to the disk and renamed, so a
reader never sees half a file and two processes that fetch the same data set do no harm.
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
Progress = Callable[[int, int | None, str], None]  # bytes done, bytes in all if known, what

CHUNK = 1 << 20
UNREADABLE = (OSError, EOFError, zlib.error, tarfile.TarError)


class Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


@dataclass(frozen=True)
class ExpectedFile:
    """One uncompressed file as it was published."""

    name: str
    size: int
    sha256: str


@dataclass
class VerifiedFiles:
    """What is still wanted of a data set; whatever is offered, only the right bytes get in."""

    folder: Path
    wanted: dict[str, ExpectedFile]
    progress: Progress
    failures: list[str] = field(default_factory=list)

    def add(self, path: Path, name: str | None = None) -> None:
        """Take every wanted file out of a plain file, a .gz file or a tar archive.

        The name tells what it is, for a file that lies under a temporary one.
        """
        name = name or path.name
        if not _is_tar(name) and name.removesuffix(".gz") not in self.wanted:
            return
        try:
            for member, stream in _members(path, name):
                if member in self.wanted:
                    self._take(self.wanted[member], stream)
        except UNREADABLE as error:
            self.failures.append(f"{name} cannot be read: {error}")

    def add_bytes(self, name: str, content: bytes) -> None:
        if name in self.wanted:
            self._take(self.wanted[name], BytesIO(content))

    def add_folder(self, folder: Path) -> None:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                self.add(path)

    def require(self, *names: str) -> None:
        """Complain if one of the names is still wanted."""
        lacking = [name for name in names if name in self.wanted]
        if lacking:
            raise DataError("; ".join(self.failures) or f"it does not hold {', '.join(lacking)}")

    def _take(self, content: ExpectedFile, stream: Readable) -> None:
        temporary = self.folder / f"{content.name}.{token_hex(8)}.tmp"
        try:
            size, digest = _copy(stream, temporary, limit=content.size)
            if (size, digest) != (content.size, content.sha256):
                self.failures.append(f"{content.name} has other content than the published file")
                return
            with disk_errors(self.folder):
                os.replace(temporary, self.folder / content.name)
        finally:
            temporary.unlink(missing_ok=True)
        del self.wanted[content.name]
        self.progress(size, content.size, f"{content.name} checked")


def cache_folder() -> Path:
    """PEERAGE_DATA, or else `peerage` in the user's cache folder."""
    if chosen := os.environ.get("PEERAGE_DATA"):
        return Path(chosen).expanduser()
    # The XDG specification asks that a relative path be ignored.
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "peerage"


def state_of(folder: Path, content: ExpectedFile) -> State:
    path = folder / content.name
    if not path.exists():
        return "missing"
    try:
        same = path.stat().st_size == content.size and _digest(path) == content.sha256
    except OSError:  # what cannot be read cannot be used, and is fetched anew
        same = False
    return "ready" if same else "altered"


def read_checked(folder: Path, content: ExpectedFile, dataset: str) -> NDArray[np.uint8]:
    """The bytes of a cached file, of which size and checksum are verified every time."""
    path = folder / content.name
    try:
        values = np.fromfile(path, dtype=np.uint8)
    except FileNotFoundError:
        raise DataError(f"{path} is missing; fetch it with: peerage data get {dataset}") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None
    if values.size != content.size or sha256(values.data).hexdigest() != content.sha256:
        raise DataError(
            f"{path} was altered; fetch it anew with: peerage data get {dataset} --again"
        )
    return values


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Report what the disk refuses as one line."""
    try:
        yield
    except OSError as error:
        raise DiskError(
            f"cannot write to {folder}: {error.strerror or error}; "
            "make room, or set PEERAGE_DATA to another folder"
        ) from None


def write_all(file: FileIO, chunk: bytes) -> None:
    """Write to an unbuffered file, so that a full disk is noticed here and not on closing it."""
    rest = memoryview(chunk)
    with disk_errors(Path(file.name).parent):
        while rest:
            rest = rest[file.write(rest) :]


@contextmanager
def scratch_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """A folder for large temporary files, on the disk that has to hold the result anyway."""
    with disk_errors(parent):
        folder = TemporaryDirectory(dir=parent, prefix=prefix)
    with folder as path:
        yield Path(path)


def _copy(stream: Readable, path: Path, limit: int) -> tuple[int, str]:
    """Size and checksum of what was written; it stops beyond the limit, as it is wrong anyway."""
    size, digest = 0, sha256()
    with disk_errors(path.parent):
        file = path.open("xb", buffering=0)
    with file:
        while size <= limit and (chunk := stream.read(CHUNK)):
            size += len(chunk)
            digest.update(chunk)
            write_all(file, chunk)
        with disk_errors(path.parent):
            os.fsync(file.fileno())
    return size, digest.hexdigest()


def _members(path: Path, name: str) -> Iterator[tuple[str, Readable]]:
    """The names and the uncompressed bytes in a file."""
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


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()
