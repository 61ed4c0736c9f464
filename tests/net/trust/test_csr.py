"""Keys that are made at the site, and the requests that the authority signs."""

import stat
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from support.identities import certificate_of, common_name, files

from peerage.errors import InputError
from peerage.net.trust.certs import Authority
from peerage.net.trust.csr import SigningRequest, create_request
from peerage.net.trust.identity import Identity, server_name


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority.create(tmp_path / "authority", "trial")


@pytest.fixture
def site(tmp_path: Path, authority: Authority) -> Path:
    """The folder of a peer, with the public files of the authority."""
    folder = tmp_path / "site"
    folder.mkdir(mode=0o700)
    authority.copy_public_files(folder)
    return folder


def test_a_certificate_for_a_key_that_the_authority_never_saw(authority, site):
    path, request = create_request(site, "node-1", ["peer.example.org", "192.0.2.7"])
    assert path == site / "node-1.csr"
    assert stat.S_IMODE((site / "node-1.key").stat().st_mode) == 0o600
    secret = (site / "node-1.key").read_bytes()
    signed = authority.sign(SigningRequest.load(path))
    signed.rename(site / "node-1.pem")
    identity = Identity.load(site, "node-1")
    names = certificate_of(identity).extensions.get_extension_for_class(x509.SubjectAlternativeName)
    assert names.value.get_values_for_type(x509.DNSName) == [
        server_name("node-1"),
        "peer.example.org",
    ]
    [issued] = authority.issued()
    assert (issued.name, issued.hosts) == ("node-1", ("peer.example.org", "192.0.2.7"))
    assert secret not in files(authority.folder).values()
    assert len(request.fingerprint.replace(" ", "")) == 64


def test_the_same_key_is_renewed_and_another_one_is_not_signed(authority, site, tmp_path):
    _, first = create_request(site, "node-1", ["a.example.org"])
    authority.sign(first)
    _, second = create_request(site, "node-1", ["b.example.org"])
    assert second.fingerprint == first.fingerprint
    authority.sign(second, days=9)
    hosts = {one.hosts for one in authority.issued()}
    assert hosts == {("a.example.org",), ("b.example.org",)}

    _, stranger = create_request(tmp_path / "elsewhere", "node-1", [])
    before = files(authority.folder)
    with pytest.raises(InputError, match="'node-1' has a valid certificate for another key"):
        authority.sign(stranger)
    assert files(authority.folder) == before
    authority.revoke("node-1")
    assert authority.sign(stranger).exists()


def test_a_key_that_was_made_by_the_authority_stays_its_own(authority, site):
    authority.issue("node-1")
    _, request = create_request(site, "node-1", [])
    with pytest.raises(InputError, match="so the key of 'node-1' was made here"):
        authority.sign(request)


def written(path: Path, name: str, names: list[x509.GeneralName], key=None) -> Path:
    key = key or ec.generate_private_key(ec.SECP256R1())
    builder = x509.CertificateSigningRequestBuilder().subject_name(common_name(name))
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    kind = None if isinstance(key, ed25519.Ed25519PrivateKey) else hashes.SHA256()
    path.write_bytes(builder.sign(key, kind).public_bytes(serialization.Encoding.PEM))
    return path


def test_requests_that_are_not_signed(authority, tmp_path):
    """Above all in the name of another peer, whether as its own name or as that of a host."""
    other = x509.DNSName(server_name("node-0"))
    cases = [
        (written(tmp_path / "node-1.csr", "node-0", []), "is a request in the name of 'node-0'"),
        (written(tmp_path / "Node.csr", "Node", []), "such as node-3; got 'Node'"),
        (written(tmp_path / "authority.csr", "authority", []), "used by a file of the authority"),
        (written(tmp_path / "node-2.csr", "node-2", [other]), "is in peerage.internal, which is"),
        (
            written(tmp_path / "node-3.csr", "node-3", [x509.RFC822Name("a@example.org")]),
            "a host must be a name",
        ),
    ]
    key = ec.generate_private_key(ec.SECP384R1())
    odd = "is not signed with an elliptic curve key"
    cases.append((written(tmp_path / "node-4.csr", "node-4", [], key), odd))
    edwards = ed25519.Ed25519PrivateKey.generate()
    cases.append((written(tmp_path / "node-5.csr", "node-5", [], edwards), odd))
    (tmp_path / "node-6.csr").write_text("no request")
    cases.append((tmp_path / "node-6.csr", "is not a signing request in PEM"))
    good = create_request(tmp_path / "good", "node-7", [])[0]
    raw = x509.load_pem_x509_csr(good.read_bytes()).public_bytes(serialization.Encoding.DER)
    forged = x509.load_der_x509_csr(raw.replace(b"node-7", b"node-8"))
    (tmp_path / "node-8.csr").write_bytes(forged.public_bytes(serialization.Encoding.PEM))
    cases.append((tmp_path / "node-8.csr", odd))
    before = files(authority.folder)
    for path, said in cases:
        with pytest.raises(InputError) as caught:
            authority.sign(SigningRequest.load(path))
        assert said in str(caught.value)
    assert files(authority.folder) == before
