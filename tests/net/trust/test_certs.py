"""Certificates: their fields, access to the keys, and which certificates are rejected."""

import errno
import os
import shutil
import ssl
import stat
import warnings
from base64 import b64encode
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from hypothesis import given, settings
from hypothesis import strategies as st
from support.identities import (
    CLIENT,
    SERVER,
    certificate_of,
    common_name,
    days_from_now,
    files,
    hand_made,
    of_another_authority,
    serial_of,
    wrong_identities,
)

from peerage.errors import DiskError, InputError
from peerage.net.trust import identity as identities
from peerage.net.trust.certs import Authority
from peerage.net.trust.identity import (
    CERTIFICATE_REASONS,
    CertificateRejected,
    Identity,
    check_name,
    server_name,
    verify_peer,
)
from peerage.net.wire.server import Authenticator

PEM_FORM = b"-----BEGIN CERTIFICATE-----\n%s\n-----END CERTIFICATE-----\n"
CA = x509.BasicConstraints(ca=True, path_length=None)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority.create(tmp_path / "certs", "trial")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """For tests that change nothing."""
    made = Authority.create(tmp_path_factory.mktemp("shared") / "certs", "trial")
    made.issue("node-1")
    return made


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def revocation_list(authority: Authority) -> x509.CertificateRevocationList:
    return x509.load_pem_x509_crl((authority.folder / "revoked.pem").read_bytes())


def revoked_serials(authority: Authority) -> set[int]:
    return {entry.serial_number for entry in revocation_list(authority)}


def verify(authority: Authority, pem: bytes, when: datetime | None = None) -> str:
    return verify_peer(pem, authority.certificate, revocation_list(authority), when)


def rejection(authority: Authority, pem: bytes, when: datetime | None = None) -> str:
    with pytest.raises(CertificateRejected) as caught:
        verify(authority, pem, when)
    assert caught.value.reason in CERTIFICATE_REASONS
    assert "\n" not in str(caught.value)
    return caught.value.reason


# What is made


def test_the_fields_of_a_certificate(authority: Authority) -> None:
    identity = authority.issue("node-3", hosts=["Peer.Example.org", "192.0.2.7", "2001:db8::1"])
    certificate = certificate_of(identity)
    assert certificate.version is x509.Version.v3
    assert certificate.subject == common_name("node-3")
    assert certificate.issuer == authority.certificate.subject == common_name("trial")
    key = certificate.public_key()
    assert isinstance(key, ec.EllipticCurvePublicKey)
    assert key.curve.name == "secp256r1"
    found = certificate.extensions
    names = found.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == [server_name("node-3"), "peer.example.org"]
    assert [str(one) for one in names.get_values_for_type(x509.IPAddress)] == [
        "192.0.2.7",
        "2001:db8::1",
    ]
    purposes = found.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert set(purposes) == {SERVER, CLIENT}
    limits = found.get_extension_for_class(x509.BasicConstraints)
    assert limits.critical
    assert not limits.value.ca
    length = certificate.not_valid_after_utc - certificate.not_valid_before_utc
    assert length == timedelta(days=825, hours=1)  # it begins an hour ago: clocks differ


def test_serials_are_random_and_keys_differ(authority: Authority) -> None:
    made = [certificate_of(authority.issue(f"node-{n}")) for n in range(8)]
    assert len({one.serial_number for one in made}) == 8
    assert all(one.serial_number.bit_length() > 64 for one in made)
    assert len({one.public_key().public_numbers() for one in made}) == 8  # type: ignore[union-attr]


def test_the_authority_can_sign_peers_and_no_other_authority(authority: Authority) -> None:
    found = authority.certificate.extensions
    limits = found.get_extension_for_class(x509.BasicConstraints)
    assert limits.critical
    assert limits.value.ca
    assert limits.value.path_length == 0
    usage = found.get_extension_for_class(x509.KeyUsage).value
    assert usage.key_cert_sign
    assert usage.crl_sign
    assert not usage.digital_signature
    years = (authority.certificate.not_valid_after_utc - datetime.now(UTC)).days / 365.2425
    assert years == pytest.approx(10, abs=0.01)


@pytest.mark.parametrize("umask", [0o022, 0o000, 0o077])
def test_only_the_owner_can_read_keys(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        made = Authority.create(tmp_path / "certs", "trial")
        identity = made.issue("node-1")
        elsewhere = made.issue("node-2", into=tmp_path / "machine")
    finally:
        os.umask(before)
    assert mode(made.folder) == mode(tmp_path / "machine") == 0o700
    assert mode(made.folder / "authority.key") == mode(identity.key) == mode(elsewhere.key) == 0o600
    assert Identity.load(made.folder, "node-1") == identity


def test_keys_are_private_from_the_first_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mode is given when the file is made; nothing is made private afterwards."""
    opened: dict[str, int] = {}
    real = os.open

    def watched(path: Any, flags: int, mode: int = 0o777, **more: Any) -> int:
        if flags & os.O_CREAT:
            assert flags & os.O_EXCL
            opened[Path(path).name.split(".")[1] + "." + Path(path).name.split(".")[2]] = mode
        return real(path, flags, mode, **more)

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("a mode was changed afterwards")

    monkeypatch.setattr(os, "open", watched)
    monkeypatch.setattr(os, "chmod", never)
    monkeypatch.setattr(os, "fchmod", never)
    Authority.create(tmp_path / "certs", "trial").issue("node-1")
    assert opened["authority.key"] == opened["node-1.key"] == 0o600


def test_a_folder_for_another_machine_has_all_that_a_peer_needs(
    authority: Authority, tmp_path: Path
) -> None:
    authority.revoke(serial_of(authority.issue("node-9")))
    machine = tmp_path / "machine"
    identity = authority.issue("node-1", into=machine)
    assert set(files(machine)) == {"node-1.pem", "node-1.key", "authority.pem", "revoked.pem"}
    assert not (authority.folder / "node-1.key").exists()
    assert Identity.load(machine, "node-1") == identity
    second = authority.issue("node-2", into=machine)  # several peers on one machine
    assert Identity.load(machine, "node-2") == second
    other = Authority.create(tmp_path / "other", "trial")
    with pytest.raises(InputError, match="belongs to another authority; choose another folder"):
        other.issue("node-3", into=machine)


def test_loading_gives_the_same_authority(authority: Authority) -> None:
    authority.issue("node-1")
    again = Authority.load(authority.folder)
    assert again.name == "trial"
    assert again.certificate == authority.certificate
    again.issue("node-2")
    assert [one.name for one in authority.issued()] == ["node-1", "node-2"]


def test_the_record_of_what_was_issued(authority: Authority) -> None:
    for name in ("node-10", "node-9"):
        authority.issue(name, hosts=["localhost", "192.0.2.7"])
    authority.issue("old", days=1, not_before=days_from_now(-3))
    authority.issue("new", days=1, not_before=days_from_now(3))
    before = datetime.now(UTC).replace(microsecond=0)  # certificates know whole seconds
    authority.revoke("node-10")
    found = authority.issued()
    assert [one.name for one in found] == ["new", "old", "node-9", "node-10"]
    assert [one.status for one in found] == ["not yet valid", "expired", "valid", "revoked"]
    assert found[2].hosts == ("localhost", "192.0.2.7")
    assert found[2].revoked is None
    assert found[3].revoked is not None
    assert before <= found[3].revoked <= datetime.now(UTC)


# Revocation


def test_the_list_is_signed_and_grows(authority: Authority) -> None:
    one, two = (serial_of(authority.issue(f"node-{n}")) for n in (1, 2))
    assert revoked_serials(authority) == set()
    assert authority.revoke("node-1") == [one]
    assert authority.revoke("node-1") == []  # once is enough
    assert authority.revoke(two) == [two]
    assert revoked_serials(authority) == {one, two}
    revocations = revocation_list(authority)
    assert revocations.is_signature_valid(authority.key.public_key())
    number = revocations.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number
    assert number == 3
    assert revocations.next_update_utc == authority.certificate.not_valid_after_utc


@pytest.mark.parametrize("form", ["{:x}", "{:X}", "00{:x}"])
def test_revoking_by_serial_takes_one_of_two(
    authority: Authority, tmp_path: Path, form: str
) -> None:
    first = authority.issue("node-1")
    second = authority.issue("node-1", into=tmp_path / "second")
    assert authority.revoke(form.format(serial_of(second))) == [serial_of(second)]
    assert Identity.load(authority.folder, "node-1") == first
    with pytest.raises(CertificateRejected, match="was revoked on"):
        first.trust().verify(second.certificate.read_bytes())


def test_revoking_by_name_takes_all_even_those_whose_files_are_gone(
    authority: Authority, tmp_path: Path
) -> None:
    first = authority.issue("node-1")
    lost = serial_of(first)
    first.certificate.unlink()
    first.key.unlink()
    second = serial_of(authority.issue("node-1"))
    assert set(authority.revoke("node-1")) == {lost, second}


def test_an_identity_can_be_replaced(authority: Authority) -> None:
    old = authority.issue("node-1")
    authority.revoke("node-1")
    with pytest.raises(InputError, match=r"node-1.pem already exists.*revoke node-1. and delete"):
        authority.issue("node-1")
    old.certificate.unlink()
    old.key.unlink()
    authority.issue("node-1")
    assert Identity.load(authority.folder, "node-1") == old


def test_members_whose_certificates_are_all_revoked(authority: Authority) -> None:
    """The list names a holder unless it has another certificate; a valid one settles it."""
    first = [authority.issue(name, into=authority.folder / name) for name in ("site-0", "site-1")]
    members = Authenticator(first[0], {"site-0": 0, "site-1": 1})
    assert members.revoked() == frozenset()
    old = first[1].certificate.read_bytes()
    assert members.identify(old) == 1
    renewed = authority.issue("site-1", into=authority.folder / "renewed")

    def copy_list() -> None:
        shutil.copy(authority.folder / "revoked.pem", first[0].revoked)

    authority.revoke(serial_of(first[1]))
    copy_list()
    assert members.revoked() == {1}  # it has shown no other one yet
    assert Authenticator(first[0], {"site-1": 1}).revoked() == frozenset()  # but it has one
    assert members.identify(renewed.certificate.read_bytes()) == 1
    assert members.revoked() == frozenset()
    with pytest.raises(CertificateRejected):  # whoever has the old key cannot exclude it
        members.identify(old)
    assert members.revoked() == frozenset()
    authority.revoke("site-1")
    copy_list()
    assert members.revoked() == {1}
    assert Authenticator(first[0], {"site-1": 1}).revoked() == {1}  # after a restart


def test_a_running_peer_takes_up_a_new_list(authority: Authority, tmp_path: Path) -> None:
    machine = authority.issue("node-1", into=tmp_path / "machine")
    pem = authority.issue("node-2").certificate.read_bytes()
    trust = machine.trust()
    assert trust.verify(pem) == "node-2"
    authority.revoke("node-2")
    assert trust.verify(pem) == "node-2"  # nobody has told it
    shutil.copy(authority.folder / "revoked.pem", machine.revoked)
    with pytest.raises(CertificateRejected) as caught:
        trust.verify(pem)
    assert caught.value.reason == "revoked"
    assert trust.list_problem is None


def test_a_list_that_cannot_be_read_leaves_the_last_one_in_force(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = authority.issue("node-1", into=tmp_path / "machine")
    pems = {name: authority.issue(name).certificate.read_bytes() for name in ("node-2", "node-3")}
    authority.revoke("node-2")
    shutil.copy(authority.folder / "revoked.pem", machine.revoked)
    trust = machine.trust()

    def check(problem: str) -> None:
        assert trust.verify(pems["node-3"]) == "node-3"
        with pytest.raises(CertificateRejected, match="revoked"):
            trust.verify(pems["node-2"])
        assert trust.list_problem is not None
        assert problem in trust.list_problem

    machine.revoked.write_bytes(b"half a li")
    check("revoked.pem is not a revocation list in PEM")
    foreign = Authority.create(tmp_path / "foreign", "foreign")
    shutil.copy(foreign.folder / "revoked.pem", machine.revoked)
    check("is not signed by the authority")
    machine.revoked.unlink()
    check("revoked.pem; copy it")
    with monkeypatch.context() as patch:
        patch.setattr("builtins.open", fail_with(errno.EMFILE))
        check("Too many open files")
    authority.revoke("node-3")
    shutil.copy(authority.folder / "revoked.pem", machine.revoked)
    with pytest.raises(CertificateRejected, match="revoked"):
        trust.verify(pems["node-3"])
    assert trust.list_problem is None


def fail_with(number: int) -> Any:
    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return fail


def test_two_that_revoke_at_once_lose_nothing(authority: Authority) -> None:
    names = [f"node-{n}" for n in range(12)]
    serials = {serial_of(authority.issue(name)) for name in names}

    def revoke(name: str) -> list[int]:
        return Authority.load(authority.folder).revoke(name)

    with ThreadPoolExecutor(4) as pool:
        taken = [serial for new in pool.map(revoke, names) for serial in new]
    assert set(taken) == revoked_serials(authority) == serials


# Which certificates are accepted


def test_a_valid_certificate_gives_its_name(authority: Authority) -> None:
    identity = authority.issue("node-3")
    assert verify(authority, identity.certificate.read_bytes()) == "node-3"
    assert identity.trust().verify(identity.certificate.read_bytes()) == "node-3"


def test_eight_wrong_identities(authority: Authority, tmp_path: Path) -> None:
    """The network's own rules, members and senders, come after: the last two are valid here."""
    wrong = wrong_identities(authority, tmp_path, victim="node-1", member="node-2")
    reasons = {
        "self-signed": "authority",
        "other authority": "authority",
        "expired": "expired",
        "not yet valid": "not yet valid",
        "revoked": "revoked",
    }
    valid = {"not a member": "stranger", "sends as another": "node-2"}
    assert list(wrong) == ["none", *reasons, *valid]
    for kind, identity in wrong.items():
        if identity is None:
            assert rejection(authority, b"") == "malformed"
        elif kind in reasons:
            assert rejection(authority, identity.certificate.read_bytes()) == reasons[kind]
        else:
            assert verify(authority, identity.certificate.read_bytes()) == valid[kind]


def test_another_authority_under_any_name(authority: Authority, tmp_path: Path) -> None:
    for name in ("trial", "another"):
        identity = of_another_authority(authority, tmp_path / name, "node-1", name)
        assert rejection(authority, identity.certificate.read_bytes()) == "authority"


def test_validity_to_the_second(authority: Authority) -> None:
    certificate = certificate_of(authority.issue("node-1", days=3))
    pem = certificate.public_bytes(serialization.Encoding.PEM)
    first, last = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    second = timedelta(seconds=1)
    assert verify(authority, pem, first) == verify(authority, pem, last) == "node-1"
    assert rejection(authority, pem, first - second) == "not yet valid"
    assert rejection(authority, pem, last + second) == "expired"
    with pytest.raises(
        CertificateRejected, match=f"expired on {last:%Y-%m-%d %H:%M} UTC, and it is {last:%Y}"
    ):
        verify(authority, pem, last + second)


def test_no_certificate_is_accepted_after_the_authority_has_expired(tmp_path: Path) -> None:
    short = Authority.create(tmp_path, "short", years=1)
    pem = short.issue("node-1", days=365).certificate.read_bytes()
    with pytest.raises(CertificateRejected, match="the authority 'short' expired"):
        verify(short, pem, days_from_now(367))


def test_certificates_that_the_key_signed_for_another_purpose(authority: Authority) -> None:
    """Even with the authority's signature: its own, another authority, one end only, odd names."""
    key = ec.generate_private_key(ec.SECP256R1())

    def signed(*names: str, **more: Any) -> bytes:
        issuer = authority.certificate.subject
        return hand_made(common_name(*names), issuer, key, authority.key, **more)

    assert verify(authority, signed("node-1")) == "node-1"
    assert rejection(authority, signed("node-1", limits=CA)) == "purpose"
    assert rejection(authority, signed("node-1", limits=None)) == "purpose"
    assert rejection(authority, signed("node-1", purposes=[CLIENT])) == "purpose"
    assert rejection(authority, signed("node-1", purposes=[])) == "purpose"
    assert rejection(authority, signed("Node 1")) == "name"
    assert rejection(authority, signed("node-1", "node-2")) == "name"
    assert rejection(authority, signed()) == "name"
    assert rejection(authority, signed("node-1\n")) == "name"
    own = authority.certificate.public_bytes(serialization.Encoding.PEM)
    assert rejection(authority, own) == "purpose"


@settings(deadline=None, max_examples=100)
@given(pem=st.binary() | st.binary().map(lambda content: PEM_FORM % b64encode(content)))
def test_what_is_no_certificate(shared: Authority, pem: bytes) -> None:
    assert rejection(shared, pem) == "malformed"


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_no_altered_certificate_is_accepted(shared: Authority, data: st.DataObject) -> None:
    """Any change of the signed bytes is rejected, with no other exception."""
    certificate = certificate_of(Identity.load(shared.folder, "node-1"))
    content = bytearray(certificate.public_bytes(serialization.Encoding.DER))
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(content) - 1))
        content[place] ^= data.draw(st.integers(1, 255))
    if data.draw(st.booleans()):
        content = content[: data.draw(st.integers(0, len(content)))]
    pem = ssl.DER_cert_to_PEM_cert(bytes(content)).encode()
    original = certificate.public_bytes(serialization.Encoding.DER)
    if bytes(content) == original:  # two changes that undo each other
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the library's remarks on odd but readable certificates
        rejection(shared, pem)


# Loading an identity


def test_every_missing_file_is_named(authority: Authority, tmp_path: Path) -> None:
    identity = authority.issue("node-1", into=tmp_path / "machine")
    for path in (identity.certificate, identity.key, identity.authority, identity.revoked):
        content, kept = path.read_bytes(), mode(path)
        path.unlink()
        with pytest.raises(InputError, match=f"there is no {path}; "):
            Identity.load(tmp_path / "machine", "node-1")
        path.mkdir()
        with pytest.raises(InputError, match=f"cannot read {path}: Is a directory; "):
            Identity.load(tmp_path / "machine", "node-1")
        path.rmdir()
        path.write_bytes(b"nonsense")
        path.chmod(kept)
        with pytest.raises(InputError, match=f"{path} is not a .* in PEM; "):
            Identity.load(tmp_path / "machine", "node-1")
        path.write_bytes(content)
    assert Identity.load(tmp_path / "machine", "node-1") == identity


@pytest.mark.parametrize("open_to", [0o640, 0o604, 0o644, 0o620, 0o666])
def test_a_key_that_others_can_read_is_rejected(authority: Authority, open_to: int) -> None:
    identity = authority.issue("node-1")
    identity.key.chmod(open_to)
    with pytest.raises(InputError, match=rf"mode {open_to:04o}\); run `chmod 600 {identity.key}`"):
        Identity.load(authority.folder, "node-1")
    identity.key.chmod(0o600)
    assert Identity.load(authority.folder, "node-1") == identity
    (authority.folder / "authority.key").chmod(open_to)
    with pytest.raises(InputError, match="run `chmod 600 "):
        Authority.load(authority.folder)


def test_a_key_of_another_certificate(authority: Authority) -> None:
    one, two = authority.issue("node-1"), authority.issue("node-2")
    one.key.write_bytes(two.key.read_bytes())
    with pytest.raises(
        InputError, match=r"node-1.key is not the key of the certificate in the same"
    ):
        Identity.load(authority.folder, "node-1")


def test_a_certificate_of_another_name(authority: Authority) -> None:
    one, two = authority.issue("node-1"), authority.issue("node-2")
    one.certificate.write_bytes(two.certificate.read_bytes())
    one.key.write_bytes(two.key.read_bytes())
    with pytest.raises(InputError, match=r"node-1.pem is the certificate of 'node-2', not of"):
        Identity.load(authority.folder, "node-1")


def test_wrong_identities_do_not_even_load(authority: Authority, tmp_path: Path) -> None:
    """A peer learns from its own files what the others would say, with the dates."""
    wrong = wrong_identities(authority, tmp_path, victim="node-1", member="node-2")
    errors = {
        "self-signed": "was not issued by the authority 'trial'",
        "other authority": "was not issued by the authority 'trial'",
        "expired": f"expired on {days_from_now(-10):%Y-%m-%d}.* and it is {days_from_now(0):%Y-%m}",
        "not yet valid": f"not valid before {days_from_now(5):%Y-%m-%d} .*check the clock, or wait",
    }
    for kind, match in errors.items():
        identity = wrong[kind]
        assert identity is not None
        with pytest.raises(InputError, match=match):
            Identity.load(identity.key.parent, "node-1")
    revoked = wrong["revoked"]
    assert revoked is not None
    shutil.copy(authority.folder / "revoked.pem", revoked.revoked)
    with pytest.raises(InputError, match=f"was revoked on {days_from_now(0):%Y-%m-%d}"):
        Identity.load(revoked.key.parent, "node-1")


def test_a_key_with_a_password(authority: Authority) -> None:
    identity = authority.issue("node-1")
    key = serialization.load_pem_private_key(identity.key.read_bytes(), None)
    identity.key.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    with pytest.raises(InputError, match="has a password; use a key without one"):
        Identity.load(authority.folder, "node-1")


def test_a_list_of_another_authority(authority: Authority, tmp_path: Path) -> None:
    identity = authority.issue("node-1")
    other = Authority.create(tmp_path / "other", "trial")
    shutil.copy(other.folder / "revoked.pem", identity.revoked)
    with pytest.raises(InputError, match=r"revoked.pem is not signed by the authority 'trial'"):
        Identity.load(authority.folder, "node-1")
    with pytest.raises(InputError, match="is not signed by"):
        Authority.load(authority.folder)


# Bad input, and what must never be lost


@pytest.mark.parametrize(
    "name", ["", "-a", "Node-1", "node_1", "node 1", "a/b", "..", "a" * 64, "node-1\n", "nöde"]
)
def test_bad_names(authority: Authority, name: str) -> None:
    before = files(authority.folder)
    with pytest.raises(
        InputError, match="lower-case letters, digits and hyphens, such as node-3; got"
    ):
        authority.issue(name)
    with pytest.raises(InputError, match="lower-case letters"):
        Identity.load(authority.folder, name)
    assert files(authority.folder) == before


@pytest.mark.parametrize("name", ["0", "node-3", "a" * 63, "7-"])
def test_good_names(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize("name", ["authority", "revoked"])
def test_names_of_files_of_the_authority(authority: Authority, name: str) -> None:
    with pytest.raises(InputError, match=f"{name!r} is used by a file of the authority"):
        authority.issue(name)


@pytest.mark.parametrize(
    "host",
    [
        "",
        "a b",
        "host:50051",
        "*.example.org",
        "300.1.1.1",
        "-a",
        "a-",
        "a..b",
        "a." * 127 + "b",
        "é.org",
    ],
)
def test_bad_hosts(authority: Authority, host: str) -> None:
    with pytest.raises(InputError, match="without a port; got"):
        authority.issue("node-1", hosts=[host])
    assert not (authority.folder / "node-1.key").exists()


def test_no_identity_can_get_the_server_name_of_another(authority: Authority) -> None:
    for host in (server_name("node-2"), server_name("node-2").upper(), "peerage.internal"):
        with pytest.raises(InputError, match="which is reserved for identities; choose another"):
            authority.issue("node-1", hosts=[host])


def test_bad_numbers(authority: Authority, tmp_path: Path) -> None:
    for days in (0, -1, 10**12):
        with pytest.raises(InputError, match=f"days must lie between 1 and 36500, got {days}"):
            authority.issue("node-1", days=days)
    with pytest.raises(InputError, match=r"4000 days are more than .*; use at most 3652 days"):
        authority.issue("node-1", days=4000)
    assert authority.issue("node-1", days=3652).key.exists()
    for years in (0, 101):
        with pytest.raises(InputError, match=f"years must lie between 1 and 100, got {years}"):
            Authority.create(tmp_path / "new", "trial", years)
    for name in ("", " a", "a" * 65, "a\nb"):
        with pytest.raises(InputError, match="must have 1 to 64 letters, got"):
            Authority.create(tmp_path / "new", name)
    assert not (tmp_path / "new").exists()


def test_an_expired_authority_signs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = Authority.create(tmp_path, "old", years=1)
    old.issue("node-1", days=100)
    later = identities.now() + timedelta(days=400)
    monkeypatch.setattr(identities, "now", lambda: later)
    with pytest.raises(InputError, match=f"'old' expired on .*, and it is {later:%Y}"):
        old.issue("node-2")
    with pytest.raises(InputError, match="the authority 'old' expired on"):
        old.revoke("node-1")


def test_an_unknown_name_is_not_revoked(authority: Authority) -> None:
    with pytest.raises(
        InputError, match="no identity 'node-1' was issued here; none has been issued"
    ):
        authority.revoke("node-1")
    authority.issue("node-1")
    with pytest.raises(InputError, match=r"no identity 'node-11' .*did you mean 'node-1'"):
        authority.revoke("node-11")
    with pytest.raises(InputError, match="no identity 'ff' was issued here"):
        authority.revoke(255)


@pytest.mark.parametrize("file", ["authority.pem", "authority.key", "revoked.pem"])
def test_an_authority_is_never_overwritten(authority: Authority, file: str) -> None:
    for other in {"authority.pem", "authority.key", "revoked.pem"} - {file}:
        (authority.folder / other).unlink()
    before = files(authority.folder)
    with pytest.raises(InputError, match=f"{file} already exists, and an authority is never over"):
        Authority.create(authority.folder, "trial")
    assert files(authority.folder) == before


@pytest.mark.parametrize("file", ["node-1.pem", "node-1.key"])
def test_an_identity_is_never_overwritten(authority: Authority, file: str) -> None:
    identity = authority.issue("node-1")
    for other in {identity.certificate, identity.key} - {authority.folder / file}:
        other.unlink()
    before = files(authority.folder)
    with pytest.raises(InputError, match=f"{file} already exists, and an identity is never over"):
        authority.issue("node-1")
    assert files(authority.folder) == before


def test_no_authority(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"peerage certs init --folder {tmp_path}"):
        Authority.load(tmp_path)


def test_an_authority_with_a_key_of_another_kind(authority: Authority) -> None:
    key = ed25519.Ed25519PrivateKey.generate()
    (authority.folder / "authority.key").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    with pytest.raises(InputError, match=r"authority.key is not the key of the certificate"):
        Authority.load(authority.folder)
    builder = x509.CertificateBuilder(
        issuer_name=authority.certificate.subject,
        subject_name=authority.certificate.subject,
        public_key=key.public_key(),
        serial_number=1,
        not_valid_before=datetime(2026, 1, 1),
        not_valid_after=datetime(2027, 1, 1),
    )
    own = builder.sign(key, None).public_bytes(serialization.Encoding.PEM)
    (authority.folder / "authority.pem").write_bytes(own)
    with pytest.raises(InputError, match=r"authority.key is not an elliptic curve key; create"):
        Authority.load(authority.folder)


def test_a_stray_certificate_in_the_record(authority: Authority, tmp_path: Path) -> None:
    authority.issue("node-1")
    stray = Authority.create(tmp_path / "other", "other").issue("node-2")
    shutil.copy(stray.certificate, authority.folder / "issued" / "stray.pem")
    with pytest.raises(InputError, match=r"stray.pem was not issued by 'trial'; move it away"):
        authority.issued()


def test_a_folder_that_others_can_write_to(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(InputError, match=rf"mode 0777\); run `chmod 700 {folder}`"):
        Authority.create(folder, "trial")
    assert files(folder) == {}


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "certs").write_text("")
    with pytest.raises(DiskError, match="certs: File exists"):
        Authority.create(tmp_path / "certs", "trial")


@pytest.mark.parametrize("ending", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt()])
@pytest.mark.parametrize("at", [1, 2, 3])
def test_an_end_while_writing_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: BaseException, at: int
) -> None:
    """Whichever of the three files of an authority or an identity is the one that fails."""

    def failing() -> Any:
        calls = [0]

        def replace(source: Any, target: Any, real: Any = os.rename) -> None:
            calls[0] += 1
            if calls[0] == at:
                raise ending
            real(source, target)

        return replace

    expected = DiskError if isinstance(ending, OSError) else KeyboardInterrupt
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", failing())
        with pytest.raises(expected):
            Authority.create(tmp_path / "certs", "trial")
    assert not (tmp_path / "certs").exists()
    authority = Authority.create(tmp_path / "certs", "trial")
    before = files(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", failing())
        with pytest.raises(expected):
            authority.issue("node-1")
    assert files(tmp_path) == before
    assert authority.issued() == []
    authority.issue("node-1")


def test_a_disk_that_fills_while_revoking_keeps_the_old_list(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority.issue("node-1")
    before = files(authority.folder)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(DiskError, match="free space and run the command again"):
            authority.revoke("node-1")
    assert files(authority.folder) == before
    assert len(authority.revoke("node-1")) == 1
