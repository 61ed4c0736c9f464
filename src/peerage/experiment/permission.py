"""Permission to run code from others: the hashes that this machine's administrator has allowed.

They are kept in the folder of a peer. That folder may come from the person who wrote the code, so
each hash has a seal with the id of this machine, which that person does not know.
"""

import hmac
import re
from collections.abc import Iterable
from pathlib import Path

from peerage.errors import InputError
from peerage.files import disk_errors, read_json, write_json

FILE = "allowed-code.json"
MACHINE = Path("/etc/machine-id")
HASH = re.compile("[0-9a-f]{64}")


def allow(folder: Path, hashes: Iterable[str]) -> None:
    """Remember in the folder of a peer that these files may run on this machine."""
    known = {*allowed(folder), *hashes}
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / FILE, {sha256: _seal(sha256) for sha256 in sorted(known)})


def allowed(folder: Path) -> set[str]:
    """The SHA-256 of all files that were allowed on this machine."""
    table = read_json(folder / FILE) if (folder / FILE).exists() else {}
    return {sha256 for sha256, seal in table.items() if seal == _seal(sha256)}


def check_hash(text: str) -> str:
    """A hash as `--allow-code` takes it."""
    if not HASH.fullmatch(text.lower()):
        raise InputError(
            f"--allow-code {text!r} is not a SHA-256; give the 64 digits that `sha256sum` prints"
        )
    return text.lower()


def _seal(sha256: str) -> str:
    try:
        machine = MACHINE.read_bytes()
    except OSError:  # as in some containers
        machine = b""
    return hmac.new(machine, sha256.encode(), "sha256").hexdigest()
