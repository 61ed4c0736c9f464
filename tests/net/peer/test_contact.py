"""Peers that cannot be reached, are rejected or get a new certificate say so; real processes."""

import os
import socket
import ssl
from pathlib import Path
from urllib.request import urlopen

import pytest
from cryptography import x509
from prometheus_client.parser import text_string_to_metric_families
from support.command_line import peerage
from support.machines import Machines
from support.processes import TIMEOUT

import peerage as pg
from peerage.net.deploy.up import free_ports
from peerage.net.peer.network import Member, Network, Timeouts
from peerage.net.trust.certs import Authority
from peerage.net.trust.identity import Identity, server_name

pytestmark = pytest.mark.slow  # peers are processes that listen

PATIENT = Timeouts(start=3600, message=30, idle=5)


def endless(nodes: int) -> pg.Experiment:
    settings = {"nodes": nodes, "topology": "complete", "model": "logistic", "rounds": 10**6}
    return pg.Experiment(partition="iid", **settings)


def address(network: Machines, me: int) -> str:
    return Network.load(network.home / "network.toml").members[me].address


def is_other_label(value: str) -> bool:
    return not value.startswith("node-") and value != "other"


def samples(port: int) -> dict[tuple[str, ...], float]:
    """The name of a metric, its peer and its other labels -> value."""
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=TIMEOUT) as answer:
        text = answer.read().decode()
    return {
        (one.name, *sorted(one.labels.values(), key=is_other_label)): one.value
        for family in text_string_to_metric_families(text)
        for one in family.samples
    }


def test_a_peer_that_others_cannot_reach_is_told_so(tmp_path):
    """It can reach the others, so it counts them as alive, and hears none of them."""
    elsewhere, metrics = free_ports(2)
    with Machines(tmp_path, endless(3), PATIENT) as network:
        network.start(0)
        network.start(1)
        network.start(2, more=["--bind", f"127.0.0.1:{elsewhere}", "--metrics-port", str(metrics)])
        where = address(network, 2)
        for me in (0, 1):
            own = f"node-{me} cannot reach this peer at {where}: connection refused; "
            own += "check --bind and the firewall"
            network.until(lambda line=own: line in network.log(2))
            theirs = f"cannot reach node-2 ({where}), which asks this peer: connection refused; "
            theirs += "check its --bind and its firewall"
            network.until(lambda me=me, line=theirs: line in network.log(me))
            assert network.log(2).count(own) == network.log(me).count(theirs) == 1
            assert samples(metrics)["peerage_contact", f"node-{me}", "from"] == 0
        assert "network.toml is not signed by the authority; sign it with" in network.log(0)


def test_rejections_are_shown_at_both_ends(tmp_path):
    """A peer that is not a member does not wait, and a revoked one is named."""
    metrics, third = free_ports(2)
    with Machines(tmp_path, endless(2), PATIENT) as network:
        network.start(0, more=["--metrics-port", str(metrics)])
        network.start(1)
        network.until(lambda: network.round(0) >= 1)
        authority = Authority.load(tmp_path / "certs")
        authority.issue("node-2")
        members = (*Network.load(tmp_path / "network.toml").members,)
        members += (Member("node-2", f"127.0.0.1:{third}"),)
        longer = Network("test", endless(3), members, PATIENT)
        (tmp_path / "longer.toml").write_text(longer.to_toml("longer-experiment.toml"))
        (tmp_path / "longer-experiment.toml").write_text(endless(3).to_toml())
        line = f"node --network {tmp_path}/longer.toml --identity node-2 --certs {tmp_path}/certs"
        done = peerage(f"{line} --out {tmp_path}/node-2")
        assert done.code == 2
        assert done.err.splitlines()[-1] == (
            "error: node-0, node-1 reject this peer: 'node-2' is not a member of this network; "
            "give all peers the same network file"
        )
        stranger = "refusing a caller that is not a member: 'node-2' is not a member"
        network.until(lambda: stranger in network.log(0))
        assert samples(metrics)["peerage_calls_refused_total", "other", "membership"] >= 1

        authority.revoke("node-1")
        revoked = "refusing node-1: the certificate of 'node-1' was revoked on "
        network.until(lambda: revoked in network.log(0))
        assert network.log(0).count(revoked) == 1
        # It is no longer a member for the others: node-0 does not wait for it.
        gone = "the certificate of node-1 was revoked; it is neither waited for nor counted"
        network.until(lambda: gone in network.log(0))
        reached = network.round(0)
        network.until(lambda: network.round(0) >= reached + 3)
        assert network.rows(0)[-1]["heard"] == [0, 0]
        assert network.log(0).count(gone) == 1


# Certificates


def served_serial(certs: Path, place: str) -> int:
    """The serial number of the certificate that node-0 shows to node-1 in a new connection."""
    mine = Identity.load(certs, "node-1")
    context = ssl.create_default_context(cafile=mine.authority)
    context.load_cert_chain(mine.certificate, mine.key)
    host, _, port = place.rpartition(":")
    with (
        socket.create_connection((host, int(port)), timeout=TIMEOUT) as plain,
        context.wrap_socket(plain, server_hostname=server_name("node-0")) as wrapped,
    ):
        shown = wrapped.getpeercert(binary_form=True)
    return x509.load_der_x509_certificate(shown).serial_number


def test_a_replaced_certificate_is_used_without_a_restart(tmp_path):
    metrics = free_ports(1)[0]
    with Machines(tmp_path, endless(2), PATIENT) as network:
        network.start(0, more=["--metrics-port", str(metrics)])
        network.start(1)
        network.until(lambda: network.round(0) >= 1)
        authority = Authority.load(tmp_path / "certs")
        [old] = [one for one in authority.issued() if one.name == "node-0"]
        expiry = ("peerage_certificate_expiry_seconds",)
        assert samples(metrics)[expiry] == old.not_after.timestamp()

        fresh = authority.issue("node-0", into=tmp_path / "fresh", days=20)
        for source in (fresh.key, fresh.certificate):
            os.replace(source, tmp_path / "certs" / source.name)
        network.until(lambda: "using the new certificate, valid until" in network.log(0))
        assert "expires on" in network.log(0)  # in less than 30 days
        [new] = [one for one in authority.issued() if one.name == "node-0" and one != old]
        assert served_serial(tmp_path / "certs", address(network, 0)) == new.serial
        assert samples(metrics)[expiry] == new.not_after.timestamp()

        # The other peer rejects the old certificate from now on, and is called with the new one.
        authority.revoke(old.serial)
        for me in range(2):
            reached = network.round(me)
            network.until(lambda me=me, reached=reached: network.round(me) >= reached + 3)
        assert {row["heard"][0] for row in network.rows(0)[-2:]} == {1}
        assert "refusing" not in network.log(1)


def test_a_certificate_that_is_not_valid_is_not_used(tmp_path):
    with Machines(tmp_path, endless(2), PATIENT) as network:
        network.start(0)
        network.start(1)
        network.until(lambda: network.round(0) >= 1)
        place = address(network, 0)
        before = served_serial(tmp_path / "certs", place)
        other = Authority.create(tmp_path / "other", "other").issue("node-0")
        for source in (other.key, other.certificate):
            os.replace(source, tmp_path / "certs" / source.name)
        problem = "using the old certificate, as the new one is not valid: "
        network.until(lambda: problem in network.log(0))
        assert served_serial(tmp_path / "certs", place) == before
