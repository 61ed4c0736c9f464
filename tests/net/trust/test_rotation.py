"""A new authority replaces the old one while peers run."""

import shutil
from pathlib import Path

import pytest

from peerage.errors import InputError
from peerage.net.trust.certs import Authority
from peerage.net.trust.identity import CertificateRejected, Identity
from peerage.net.trust.rotation import finish, rotate


def copy(source: Path, target: Path, *names: str) -> None:
    target.mkdir(exist_ok=True)
    for name in names:
        shutil.copy2(source / name, target / name)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    authority = Authority.create(tmp_path / "certs", "trial")
    for name in ("node-0", "node-1", "gone"):
        authority.issue(name, hosts=["peer.example.org"])
    authority.issue("watcher", observer=True)
    authority.revoke("gone")
    return authority.folder


def test_both_authorities_are_valid_until_the_end(folder: Path, tmp_path: Path) -> None:
    old = {name: (folder / f"{name}.pem").read_bytes() for name in ("node-0", "node-1", "gone")}
    site = tmp_path / "site"
    copy(folder, site, "authority.pem", "revoked.pem", "node-0.pem", "node-0.key")
    trust = Identity.load(site, "node-0").trust()  # as a running peer has it
    made = rotate(folder)
    assert made.authority.name == "trial 2"
    assert sorted(path.name for path in made.certificates) == [
        "node-0.pem",
        "node-1.pem",
        "watcher.pem",
    ]
    new = (folder / "node-1.pem").read_bytes()
    with pytest.raises(CertificateRejected, match="was not issued by the authority 'trial'"):
        trust.verify(new)  # the peer has the old files
    copy(folder, site, "authority.pem")
    assert trust.verify(old["node-1"]) == "node-1"
    assert trust.list_problem is not None  # the list of the new authority is missing
    copy(folder, site, "revoked.pem")
    assert [trust.verify(one) for one in (new, old["node-1"])] == ["node-1"] * 2
    assert trust.list_problem is None
    with pytest.raises(CertificateRejected, match="was revoked"):
        trust.verify(old["gone"])
    Identity.load(site, "node-0")  # its own certificate is still the old one
    finish(folder)
    copy(folder, site, "authority.pem", "revoked.pem", "node-0.pem")
    Identity.load(site, "node-0")  # the key is the same
    assert trust.verify(new) == "node-1"
    for one in old.values():
        with pytest.raises(CertificateRejected, match="not issued by the authority 'trial 2'"):
            trust.verify(one)
    assert not list(folder.rglob("previous"))


def test_certificates_are_issued_and_revoked_in_between(folder: Path, tmp_path: Path) -> None:
    old = (folder / "node-1.pem").read_bytes()
    authority = rotate(folder, "next").authority
    new = (folder / "node-1.pem").read_bytes()
    assert len(authority.revoke("node-1")) == 2  # of both authorities
    added = authority.issue("node-2", into=tmp_path / "site")
    trust = added.trust()
    assert trust.verify(added.certificate.read_bytes()) == "node-2"
    for one in (old, new):
        with pytest.raises(CertificateRejected, match="was revoked"):
            trust.verify(one)
    assert {one.name: one.status for one in authority.issued()} == {
        "node-0": "valid",
        "node-1": "revoked",
        "node-2": "valid",
        "watcher": "valid",
    }
    assert [one.observer for one in authority.issued() if one.name == "watcher"] == [True]


def test_one_change_at_a_time(folder: Path) -> None:
    with pytest.raises(InputError, match="has one authority; begin with"):
        finish(folder)
    rotate(folder)
    with pytest.raises(InputError, match="is being replaced already"):
        rotate(folder)
    finish(folder)
    assert rotate(folder).authority.name == "trial 3"
