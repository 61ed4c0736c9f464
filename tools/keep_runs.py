"""Keep the records of finished runs of `peerage reproduce` in a small archive.

    python tools/keep_runs.py reproduced docs/results/p3/runs.tar.xz

Adds the runs of the folder to the archive, without checkpoints, and with six significant digits in
the rows, which is more than any page shows. With

    mkdir -p reproduced && tar -xJf docs/results/p3/runs.tar.xz -C reproduced

the same command elsewhere does not repeat them: it runs the rest of a study, or writes its page
again. Runs that have not finished are left out.
"""

import argparse
import io
import json
import sys
import tarfile
from pathlib import Path
from typing import Any

RECORDS = (".json", ".jsonl", ".toml")
ENDED = ("finished", "diverged")
DIGITS = 6

Files = dict[str, bytes]  # content by name


def finished_runs(home: Path) -> Files:
    """The records of the runs in this folder that have ended."""
    found: Files = {}
    for summary in sorted((home / "runs").glob("*/summary.json")):
        if json.loads(summary.read_text()).get("status") in ENDED:
            for path in summary.parent.iterdir():
                if path.suffix in RECORDS:
                    content = path.read_bytes()
                    rows = path.suffix == ".jsonl"
                    found[path.relative_to(home).as_posix()] = short(content) if rows else content
    return found


def short(rows: bytes) -> bytes:
    """The rows with rounded numbers, which take half the space."""
    lines = [json.dumps(rounded(json.loads(line))) for line in rows.splitlines()]
    return "".join(line + "\n" for line in lines).encode()


def rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    return [rounded(inner) for inner in value] if isinstance(value, list) else value


def kept_runs(archive: Path) -> Files:
    """The records in the archive; none if there is no archive yet."""
    if not archive.exists():
        return {}
    with tarfile.open(archive) as tar:
        opened = {member.name: tar.extractfile(member) for member in tar}
        return {name: file.read() for name, file in opened.items() if file is not None}


def write(files: Files, archive: Path) -> None:
    """Write an archive that depends on the records alone, not on times and users."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:xz", preset=9) as tar:
        for name in sorted(files):
            entry = tarfile.TarInfo(name)
            entry.size = len(files[name])
            tar.addfile(entry, io.BytesIO(files[name]))
    partial = archive.with_name(archive.name + ".part")
    partial.write_bytes(packed.getvalue())
    partial.replace(archive)


def count(files: Files) -> int:
    return len({Path(name).parent for name in files})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("home", type=Path, help="the folder that `peerage reproduce --out` wrote")
    parser.add_argument("archive", type=Path, help="the archive to write, a .tar.xz file")
    given = parser.parse_args()
    new, kept = finished_runs(given.home), kept_runs(given.archive)
    if not new:
        print(f"error: {given.home} has no finished runs; give --out of a study", file=sys.stderr)
        return 2
    write(kept | new, given.archive)
    size = given.archive.stat().st_size / 1e3
    print(f"{given.archive}: {count(new)} runs added, {count(kept | new)} in all, {size:.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
