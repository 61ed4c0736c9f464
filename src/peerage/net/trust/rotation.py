"""Replaces the authority of a network while its peers run.

For a while both authorities are valid: `authority.pem` has two certificates, the new one first, and
`revoked.pem` the list of each. The old authority moves to the folder `previous`, and signs only
revocations. The new one certifies the same keys again, so no key has to be moved.
"""

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from peerage.errors import InputError
from peerage.files import disk_errors, write_bytes
from peerage.net.trust.certs import PREVIOUS, Authority
from peerage.net.trust.identity import Identity
from peerage.net.trust.keyfiles import REMEDY, locked, read, read_certificate

FILES = ("authority.key", "authority.pem", "revoked.pem")


@dataclass(frozen=True)
class Rotation:
    """A new authority, and the certificates that it has issued for the keys of the old one."""

    authority: Authority
    certificates: list[Path]


def rotate(folder: Path, name: str = "", *, years: int = 10, days: int = 825) -> Rotation:
    """Make a new authority beside the old one, and certify all valid identities again."""
    folder = Path(folder)
    old = Authority.load(folder)
    if (folder / PREVIOUS).exists():
        raise InputError(
            f"{folder / PREVIOUS} exists: the authority is being replaced already; end this with "
            "`peerage certs rotate --finish`"
        )
    with locked(folder), tempfile.TemporaryDirectory(dir=folder, prefix=".next-") as temporary:
        new = Authority.create(Path(temporary) / "certs", name or _next_name(old.name), years)
        valid = {one.name: one for one in old.issued() if one.status == "valid"}  # the newest
        for one in valid.values():
            issued = read_certificate(folder / "issued" / f"{one.serial:x}.pem", REMEDY)
            new.certify_again(one, issued, days)
        with disk_errors(folder, REMEDY):
            (folder / PREVIOUS).mkdir(mode=0o700)
            for file in FILES:
                shutil.copy2(folder / file, folder / PREVIOUS / file)
            if valid or (folder / "issued").exists():
                os.replace(folder / "issued", folder / PREVIOUS / "issued")
            if valid:
                os.replace(new.folder / "issued", folder / "issued")
            for each in valid:
                os.replace(new.folder / f"{each}.pem", folder / f"{each}.pem")
            os.replace(new.folder / "authority.key", folder / "authority.key")
        for file in ("revoked.pem", "authority.pem"):
            both = read(new.folder / file, REMEDY) + read(folder / PREVIOUS / file, REMEDY)
            write_bytes(folder / file, both, REMEDY)
    paths = [Identity.within(folder, each).certificate for each in valid]
    return Rotation(Authority.load(folder), paths)


def finish(folder: Path) -> Authority:
    """Trust the new authority only; the key of the old one is deleted."""
    folder = Path(folder)
    authority = Authority.load(folder)
    if not (folder / PREVIOUS).exists():
        raise InputError(f"{folder} has one authority; begin with `peerage certs rotate`")
    with locked(folder):
        authority.write_public_files(alone=True)
        with disk_errors(folder, REMEDY):
            shutil.rmtree(folder / PREVIOUS)
    return authority


def _next_name(name: str) -> str:
    """The name of the next authority.

    >>> _next_name("peerage"), _next_name("peerage 2")
    ('peerage 2', 'peerage 3')
    """
    base, _, number = name.rpartition(" ")
    if base and number.isascii() and number.isdecimal():
        return f"{base} {int(number) + 1}"
    return f"{name} 2"
