"""The authority's signature of a network file."""

import shutil
import subprocess
from base64 import b64decode
from pathlib import Path

import pytest

from peerage.errors import InputError
from peerage.net.trust.certs import Authority
from peerage.net.trust.signature import REQUIRED, check_signature, sign_network

NETWORK = 'run = "a"\nexperiment = "mine.toml"\n'


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority.create(tmp_path / "certs", "trial")


@pytest.fixture
def network(tmp_path: Path) -> Path:
    (tmp_path / "mine.toml").write_text("rounds = 3\n")
    path = tmp_path / "network.toml"
    path.write_text(NETWORK)
    return path


def test_signed_and_unsigned(authority, network):
    certs = authority.folder
    assert not check_signature(network, certs)
    (certs / REQUIRED).touch()
    with pytest.raises(InputError, match=r"is not signed, but .* requires it; sign it with `peer"):
        check_signature(network, certs)
    assert sign_network(authority, network) == network.with_suffix(".sig")
    assert check_signature(network, certs)


@pytest.mark.parametrize("file", ["network.toml", "mine.toml"])
def test_a_file_that_has_changed(authority, network, file):
    sign_network(authority, network)
    path = network.with_name(file)
    path.write_text(path.read_text() + "# another line\n")
    with pytest.raises(InputError, match="or its experiment has changed since it was signed; sign"):
        check_signature(network, authority.folder)
    sign_network(authority, network)
    assert check_signature(network, authority.folder)


def test_a_signature_of_another_authority_or_none_at_all(authority, network, tmp_path):
    other = Authority.create(tmp_path / "other", "trial")
    path = sign_network(other, network)
    texts = [path.read_bytes(), b"", b"\xff\n", b"signature \n"]
    sign_network(authority, network)
    own = path.read_text().splitlines()
    texts += ["\n".join(own[:-1]).encode(), "\n".join([*own[1:], own[-1]]).encode()]
    texts.append(path.read_bytes().replace(b"signature 1", b"signature 2"))
    for text in texts:
        path.write_bytes(text)
        with pytest.raises(InputError, match="is not a signature of the authority 'trial'; sign"):
            check_signature(network, authority.folder)


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("openssl"), reason="openssl is not installed")
def test_openssl_verifies_it_as_well(authority, network, tmp_path):
    *lines, last = sign_network(authority, network).read_text().splitlines()
    (tmp_path / "signed").write_text("".join(f"{line}\n" for line in lines))
    (tmp_path / "raw").write_bytes(b64decode(last.split()[1]))
    show = ["openssl", "x509", "-in", str(authority.folder / "authority.pem"), "-noout", "-pubkey"]
    (tmp_path / "key").write_bytes(subprocess.run(show, capture_output=True, check=True).stdout)
    verify = ["openssl", "dgst", "-sha256", "-verify", "key", "-signature", "raw", "signed"]
    done = subprocess.run(verify, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "Verified OK")
