"""Resumable downloads."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from http.client import HTTPException, HTTPResponse
from io import FileIO
from pathlib import Path, PurePosixPath
from secrets import token_hex
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from peerage.data.store import CHUNK, Progress, disk_errors, write_all
from peerage.errors import DataError

TIMEOUT = 10.0  # seconds to connect, and to wait for more bytes
ATTEMPTS = 5  # requests for one file, as long as each brings new bytes


@contextmanager
def download_file(url: str, folder: Path, *, limit: int, progress: Progress) -> Iterator[Path]:
    """Download a URL and yield the path of the file, which is deleted at the end of the context.

    An interrupted download stays in the folder as a `.part` file and is resumed the next time.
    """
    with _open_partial(url, folder) as (file, path):
        _download_rest(url, file, limit, progress)
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)  # its content is in the cache, or was rejected


def discard_partials(folder: Path) -> None:
    """Remove the files of interrupted downloads, except those that another process is writing."""
    for path in folder.glob("*.part"):
        with suppress(OSError):
            if file := _open_locked(path):
                path.unlink(missing_ok=True)
                file.close()


@contextmanager
def _open_partial(url: str, folder: Path) -> Iterator[tuple[FileIO, Path]]:
    """The `.part` file of a URL, or a private one if another process is writing to it."""
    name = f"{PurePosixPath(urlsplit(url).path).name}.{sha256(url.encode()).hexdigest()[:8]}"
    path = folder / f"{name}.part"
    with disk_errors(folder):
        file = _open_locked(path)
        private = file is None
        while file is None:
            path = folder / f"{name}.{token_hex(8)}.part"
            file = _open_locked(path)
    try:
        with file:
            yield file, path
    finally:
        if private or (path.exists() and path.stat().st_size == 0):
            path.unlink(missing_ok=True)


def _open_locked(path: Path) -> FileIO | None:
    """Open and lock the file; None if another process holds the lock."""
    while True:
        file = path.open("a+b", buffering=0)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return None
        except OSError:  # a file system without locks; the checksum detects a collision
            return file
        # The previous holder may have removed the file between opening and locking.
        if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
            return file
        file.close()


def _download_rest(url: str, file: FileIO, limit: int, progress: Progress) -> None:
    """Request the rest of the file until it is complete."""
    for attempt in range(ATTEMPTS):
        before = file.seek(0, os.SEEK_END)
        try:
            _append(url, file, limit, progress)
            return
        except HTTPError as error:
            error.close()
            if error.code != 416 or before == 0:  # 416: the range lies beyond the end of the file
                raise DataError(f"HTTP {error.code} {error.reason}") from None
            if error.headers.get("Content-Range") == f"bytes */{before}":
                return
            file.truncate(0)
        except (OSError, HTTPException) as error:
            stuck = file.seek(0, os.SEEK_END) <= before
            if stuck or attempt == ATTEMPTS - 1:
                raise DataError(_reason(error)) from None
    raise DataError("the server does not resume the download")


def _append(url: str, file: FileIO, limit: int, progress: Progress) -> None:
    start = file.seek(0, os.SEEK_END)
    request = Request(url, headers={"User-Agent": "peerage"})
    if start:
        request.add_header("Range", f"bytes={start}-")
    with urlopen(request, timeout=TIMEOUT) as response:
        if not _is_resumed(response, start):
            file.truncate(0)
            start = 0
        length = response.headers.get("Content-Length")
        total = start + int(length) if length else None
        done, label = start, PurePosixPath(urlsplit(url).path).name
        while chunk := response.read(CHUNK):
            done += len(chunk)
            if done > limit:
                file.truncate(0)
                raise DataError(f"{label} is larger than {limit} bytes, which is too large")
            write_all(file, chunk)
            progress(done, total, label)
    if total is not None and done < total:
        raise ConnectionError(f"cut off after {done} of {total} bytes")


def _is_resumed(response: HTTPResponse, start: int) -> bool:
    """Whether the response holds the bytes from `start` on; some servers send the whole file."""
    content_range = response.headers.get("Content-Range", "")
    return response.status == 206 and content_range.startswith(f"bytes {start}-")


def _reason(error: Exception) -> str:
    """The cause of an error of urllib, as one line."""
    cause = getattr(error, "reason", error)
    return " ".join(str(cause).split()) or type(cause).__name__
