"""Networks in which some peers dial out: which ones can work, and that they do."""

import pytest
import torch
from support.networking import CALM_LIMITS, OverSockets, run_peers

import peerage as pg
from peerage.engine.prepare import prepare
from peerage.errors import InputError
from peerage.net.deploy.up import LocalNetwork
from peerage.net.peer import network as networks
from peerage.net.peer.dialling import parse_numbers
from peerage.net.peer.network import Member, Network, Timeouts
from peerage.net.wire.grpc import GrpcTransport

SMALL = {"partition": "iid", "model": "logistic", "rounds": 2, "local": {"epochs": 1}}


def members(count: int, dialling: set[int]) -> tuple[Member, ...]:
    return tuple(
        Member(f"node-{i}", dials_out=True) if i in dialling else Member(f"node-{i}", f"h:{i + 1}")
        for i in range(count)
    )


def network(dialling: set[int], **settings: object) -> Network:
    experiment = pg.Experiment(**{"nodes": 4, "rounds": 1, "partition": "iid", **settings})
    return Network("run", experiment, members(experiment.nodes_and_hub, dialling))


@pytest.mark.parametrize(
    ("dialling", "settings"),
    [
        ({1}, {"topology": "complete"}),
        ({1}, {"topology": "dynamic-regular:k=2"}),
        ({1, 3}, {"topology": "ring"}),
        ({1, 2, 3}, {"topology": "star"}),
        ({0, 1, 2, 3}, {"algorithm": "fedavg"}),
        ({4}, {"algorithm": "fedavg"}),
        ({1, 2, 3}, {"topology": "star", "algorithm": "el:final_mean=false"}),
    ],
)
def test_networks_that_can_work(dialling, settings):
    assert network(dialling, **settings).dialling == dialling


@pytest.mark.parametrize(
    ("dialling", "settings", "message"),
    [
        ({1, 2}, {"topology": "ring"}, "node-1 and node-2 are neighbours, but both dial out"),
        ({0, 2}, {"topology": "star"}, "such as a star around a reachable peer"),
        ({0, 3}, {"topology": "dynamic-regular:k=2"}, "node-0 and node-3 both dial out"),
        ({1, 3}, {"topology": "ring", "algorithm": "el"}, "switch its step after the last round"),
        ({1, 3}, {"topology": "ring", "algorithm": "dfml"}, "not neighbours exchange messages"),
        ({0, 4}, {"algorithm": "fedavg"}, "make one of them reachable"),
    ],
)
def test_networks_that_cannot_work(dialling, settings, message):
    with pytest.raises(InputError, match=message):
        network(dialling, **settings)


def test_a_network_file_marks_the_peers_that_dial_out(tmp_path):
    made = network({1, 2, 3}, topology="star")
    (tmp_path / "experiment.toml").write_text(made.experiment.to_toml())
    text = made.to_toml("experiment.toml")
    (tmp_path / "network.toml").write_text(text)
    assert text.count("dials_out = true") == 3
    assert text.count("address") == 1
    assert Network.load(tmp_path / "network.toml") == made
    assert not made.can_talk(1, 2)
    assert made.can_talk(0, 2)


def test_an_address_that_nobody_uses_is_an_error():
    with pytest.raises(InputError, match="remove address or dials_out"):
        Member("node-1", "10.0.0.1:7400", dials_out=True)
    with pytest.raises(InputError, match="HOST:PORT"):
        Member("node-1")


def test_numbers_of_peers():
    assert parse_numbers("", 3) == ()
    for text in ("3", "x", "-1", "1;2"):
        with pytest.raises(InputError, match="they are 0 to 2"):
            parse_numbers(text, 3)


class Dialling(OverSockets):
    """Transports over loopback, of which some open no port."""

    def __call__(self, network, me):
        names = {member.name: number for number, member in enumerate(network.members)}
        return GrpcTransport(
            self.authority.issue(network.members[me].name),
            names,
            network.addresses,
            limits=CALM_LIMITS,
            dialling=network.dialling,
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "dialling", "settings"),
    [("decavg", {2}, {"topology": "complete"}), ("fedavg", {0, 1, 2}, {})],
)
def test_peers_that_dial_out_end_with_the_bits_of_the_simulator(
    algorithm, dialling, settings, tmp_path, monkeypatch
):
    experiment = pg.Experiment(**{**SMALL, "nodes": 3, "algorithm": algorithm, **settings})
    wanted = pg.run(experiment).parameters
    plain = networks.Network

    def marked(run, experiment, members, *more, **options):
        members = tuple(
            Member(m.name, dials_out=True) if i in dialling else m for i, m in enumerate(members)
        )
        return plain(run, experiment, members, *more, **options)

    monkeypatch.setattr("support.networking.Network", marked)
    peers = run_peers(experiment, transports=Dialling(tmp_path))
    owned = {peer.me: peer.shard.members[peer.me].node.params for peer in peers}
    owners = {prepare(experiment).model_owner(peer.me) for peer in peers}  # or only the hub
    assert {me for me, params in owned.items() if params.numel()} == owners
    for me in owners:
        assert torch.equal(owned[me], wanted[me])
    assert {peer.me for peer in peers if peer.transport.port == 0} == dialling
    assert [dict(peer.counters) for peer in peers] == [{}] * len(peers)


@pytest.mark.slow
def test_processes_whose_ports_are_never_opened(tmp_path):
    experiment = pg.Experiment(nodes=2, algorithm="fedavg", **SMALL)
    timeouts = Timeouts(start=600, message=300, idle=30)
    found = LocalNetwork(experiment, tmp_path / "up", timeouts, dials_out=(0, 1)).run()
    text = (tmp_path / "up" / "network.toml").read_text()
    assert text.count("address") == 1
    assert found["digest"] == pg.run(experiment).summary["digest"]
