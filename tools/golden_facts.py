"""Read the results in run folders, and compare them.

This module imports nothing of Peerage, whose modules may move between commits.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Keys that differ between equal runs; bytes on the wire depend on certificates.
TIMES = re.compile(r"(^|_)(seconds|hours)$|^wire_bytes$")
COLUMNS = ("rows", "bytes", "parameters", "checkpoint")


@dataclass(frozen=True)
class Facts:
    """The results of a run, without anything that depends on time, folder or workers."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    bytes: int | None = None
    digest: str | None = None
    checkpoint: dict[str, str] = field(default_factory=dict)  # path of a value -> its hash


def read_runs(folder: Path) -> dict[str, Facts]:
    """The facts of every run below a folder, by name without number and hash."""
    found: dict[str, Facts] = {}
    homes = {path.parent for path in folder.rglob("summary.json")}
    homes = {home for home in homes if homes.isdisjoint(home.parents)}  # peers belong to their run
    for home in sorted(homes, key=lambda home: (home / "summary.json").stat().st_mtime_ns):
        found[_unique(found, _plain_name(home, folder))] = read_run(home)
    for path in sorted(folder.glob("results/*.json")):
        found[_unique(found, path.stem)] = Facts(rows=[_numbers(json.loads(path.read_bytes()))])
    return found


def read_run(folder: Path) -> Facts:
    summary = json.loads((folder / "summary.json").read_bytes())
    metrics = folder / "metrics.jsonl"
    if metrics.exists():
        rows = [_timeless(json.loads(line)) for line in metrics.read_bytes().splitlines()]
    else:  # the numerical model has a summary only
        rows = [_numbers(summary)]
    checkpoint = read_checkpoints(folder)
    return Facts(rows, summary.get("bytes_sent"), summary.get("digest"), checkpoint)


def read_checkpoints(folder: Path) -> dict[str, str]:
    """Hashes of all values in the newest checkpoints: of the run, or of each of its peers."""
    values: dict[str, str] = {}
    for home in sorted(folder.rglob("checkpoint")):
        newest = max(home.glob("round-*"), default=None)
        if newest is None:
            continue
        manifest = json.loads((newest / "manifest.json").read_bytes())["content"]
        tensors: dict[str, str] = {}
        for name in manifest["files"]:
            tensors |= hash_tensors(newest / name)
        for node, tree in manifest["trees"].items():
            values[f"{node}.round"] = str(manifest["round"])
            for name, hashed in tensors.items():  # named {node}.params; in trees: {node}.state.7
                if name.startswith(f"{node}.") and name.count(".") == 1:
                    values[name] = hashed
            values |= dict(_leaves(tree, tensors, node))
    return values


def hash_tensors(path: Path) -> dict[str, str]:
    """A hash of type, shape and bytes for each tensor in a safetensors file."""
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    header.pop("__metadata__", None)
    hashes = {}
    for name, about in header.items():
        begin, end = about["data_offsets"]
        sha = hashlib.sha256(f"{about['dtype']} {about['shape']} ".encode())
        sha.update(content[start + begin : start + end])
        hashes[name] = sha.hexdigest()
    return hashes


def _leaves(tree: Any, tensors: Mapping[str, str], path: str) -> Iterator[tuple[str, str]]:
    """(path, hash or text) of each value in the JSON part of a node's state."""
    if isinstance(tree, dict):
        if set(tree) == {"tensor"} and tree["tensor"] in tensors:
            yield path, tensors[tree["tensor"]]
            return
        for key, item in tree.items():
            if key == "dataclass":  # the name of a class is not a result
                continue
            layout = key in ("fields", "dict", "value")
            yield from _leaves(item, tensors, path if layout else f"{path}.{key}")
    elif isinstance(tree, list):
        for number, item in enumerate(tree):
            yield from _leaves(item, tensors, f"{path}.{number}")
    else:
        yield path, json.dumps(tree)


def _timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _timeless(item) for key, item in value.items() if not TIMES.search(key)}
    return [_timeless(item) for item in value] if isinstance(value, list) else value


def _numbers(value: Any, path: str = "") -> dict[str, Any]:
    """All numbers in a JSON document except times, by path; texts may be reworded."""
    if isinstance(value, dict):
        pairs = [(key, item) for key, item in value.items() if not TIMES.search(key)]
    elif isinstance(value, list):
        pairs = [(str(number), item) for number, item in enumerate(value)]
    else:
        return {path: value} if isinstance(value, int | float) else {}
    found: dict[str, Any] = {}
    for key, item in pairs:
        found |= _numbers(item, f"{path}.{key}" if path else key)
    return found


def _plain_name(home: Path, folder: Path) -> str:
    """`3-cfa` gives cfa, `digits-seed0-4475d187dc` digits-seed0, and the folder itself run."""
    name = home.name if home != folder else "run"
    return re.sub(r"^\d+-|-[0-9a-f]{10}$", "", name)


def _unique(names: Mapping[str, object], name: str) -> str:
    """The name, with a number if it is already among `names`."""
    candidates = (
        name if number == 1 else f"{name}-{number}" for number in range(1, len(names) + 2)
    )
    return next(candidate for candidate in candidates if candidate not in names)


@dataclass(frozen=True)
class Verdict:
    case: str
    status: str  # equal, differs, failed, new, gone
    columns: dict[str, str] = field(default_factory=dict)
    where: str = ""

    @property
    def passes(self) -> bool:
        return self.status in ("equal", "new")


def compare(case: str, base: Facts, head: Facts) -> Verdict:
    found = {
        "rows": _compare_rows(base.rows, head.rows),
        "bytes": _compare_values("bytes", base.bytes, head.bytes),
        "parameters": _compare_values("digest", base.digest, head.digest),
        "checkpoint": _compare_checkpoints(base.checkpoint, head.checkpoint),
    }
    columns = {name: column for name, (column, _) in found.items()}
    where = "; ".join(text for _, text in found.values() if text)
    return Verdict(case, "differs" if "differs" in columns.values() else "equal", columns, where)


def compare_runs(case: str, base: Mapping[str, Facts], head: Mapping[str, Facts]) -> list[Verdict]:
    """One verdict for each run of either state."""
    verdicts = []
    for name in [*base, *(name for name in head if name not in base)]:
        full = f"{case}/{name}"
        if name not in head:
            verdicts.append(Verdict(full, "gone"))
        elif name not in base:
            verdicts.append(Verdict(full, "new"))
        else:
            verdicts.append(compare(full, base[name], head[name]))
    return verdicts


def _compare_rows(base: list[dict[str, Any]], head: list[dict[str, Any]]) -> tuple[str, str]:
    if not base and not head:
        return "-", ""
    scopes = {row.get("scope") for row in base}
    added = sorted({str(row["scope"]) for row in head if row.get("scope") not in scopes})
    if base:  # rows of a newer kind are not compared
        head = [row for row in head if row.get("scope") in scopes]
    if len(base) != len(head):
        return "differs", f"{len(base)} rows before, {len(head)} now"
    new: set[str] = set()
    for before, now in zip(base, head, strict=True):
        new |= now.keys() - before.keys()
        for key, value in before.items():
            if key not in now or now[key] != value:
                row = " ".join(f"{k} {before[k]}" for k in ("round", "node") if k in before)
                return "differs", f"{row or 'row'}: {key} {value} before, {now.get(key)} now"
    texts = [
        f"new in rows: {', '.join(sorted(new))}" if new else "",
        f"new rows: {', '.join(added)}" if added else "",
    ]
    return "equal", "; ".join(filter(None, texts))


def _compare_values(name: str, base: object, head: object) -> tuple[str, str]:
    if base is None and head is None:
        return "-", ""
    if base == head:
        return "equal", ""
    return "differs", "" if name == "digest" else f"{name} {base} before, {head} now"


def _compare_checkpoints(base: Mapping[str, str], head: Mapping[str, str]) -> tuple[str, str]:
    if not base and not head:
        return "-", ""
    if base == head:
        return "equal", ""
    if sorted(base.values()) == sorted(head.values()):
        return "equal", "names in the checkpoint changed, values did not"
    paths = sorted(path for path in {*base, *head} if base.get(path) != head.get(path))
    return "differs", f"checkpoint: {', '.join(paths[:3])}{' ...' if len(paths) > 3 else ''}"
