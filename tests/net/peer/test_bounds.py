"""What members state about themselves and their weights: bounds, and what exceeds them."""

from dataclasses import replace

import pytest
import torch
from support.networking import network_of, run_peers
from support.poisoners import poison

from peerage import DAC, DecAvg, DecHW, Experiment, Facade, FedCurv, FedNL
from peerage.aggregation import capped
from peerage.engine.prepare import prepare
from peerage.engine.router import Packet
from peerage.errors import InputError
from peerage.net.peer.network import Network
from peerage.net.peer.traffic import message_policy
from peerage.net.wire.header import Rejected
from peerage.net.wire.payload import decode, encode
from peerage.privacy import Noise
from peerage.requests import Envelope, TensorSpec
from peerage.testing import toy

SETTINGS = {"nodes": 4, "topology": "complete", "partition": "iid", "rounds": 3}


def schema(algorithm, **changes):
    world = prepare(toy(algorithm, **changes))
    [kind] = message_policy(network_of(world.experiment), 0, world).tensors.values()
    return kind


# Bounds of tensors


@pytest.mark.parametrize(
    ("algorithm", "norm", "growth"),
    [
        (DecHW(), 1.0, 1.0),
        (DecHW(beta=0.25), 1.0, 0.25),
        (DecHW(accumulate="ema", beta=0.5), 1.0, 0.0),
        (DecHW(accumulate="none"), 1.0, 0.0),
        (DecHW(normalise="none"), None, 0.0),
    ],
)
def test_dechw_states_how_large_its_curvature_can_be(algorithm, norm, growth):
    h = schema(algorithm)["h"]
    assert (h.low, h.norm, h.growth) == (0.0, norm, growth)


def test_other_weights_counts_and_indices_have_bounds():
    assert schema(FedCurv())["f"].low == 0.0
    assert (schema(FedCurv())["who"].low, schema(FedCurv())["who"].high) == (0, 5)
    assert schema(FedNL())["l"].low == 0.0
    assert (schema(DAC())["s"].low, schema(DAC())["s"].high) == (0.0, 1e6)
    assert (schema(Facade(k=3))["index"].low, schema(Facade(k=3))["index"].high) == (-1, 2)


def test_noise_breaks_bounds_of_floats_only():
    noisy = {"noise": Noise(sigma=0.1, clip=1.0)}
    h = schema(DecHW(), **noisy)["h"]
    assert (h.low, h.norm) == (0.0, None)
    index = TensorSpec((1,), torch.int64, low=-1, high=2)
    assert index.under_noise(nonnegative=False) == index


@pytest.mark.parametrize(
    ("spec", "values", "text"),
    [
        (TensorSpec((2,), low=0.0, total=1.0), [0.6, 0.6], "sum 1.2, not 1"),
        (TensorSpec((2,), low=0.0, total=1.0), [-0.5, 1.5], "an entry -0.5, at least 0"),
        (TensorSpec((2,), high=1.0), [0.0, 2.0], "an entry 2, at most 1"),
        (TensorSpec((2,), norm=1.0, growth=1.0), [30.0, 40.0], "norm 50, at most 3"),
        (TensorSpec((2,), norm=1.0, growth=1.0), [1e30, 1e30], "norm 1.41421e+30, at most 3"),
        (TensorSpec((2,), norm=1.0, growth=1.0), [1.8, 2.4], None),
    ],
)
def test_bounds_are_stated_in_words(spec, values, text):
    assert spec.broken_bound(torch.tensor(values), round=2) == text


@pytest.mark.parametrize("wire", ["fp32", "bf16", "int8"])
def test_rounding_on_the_wire_stays_within_the_bounds(wire):
    world = prepare(toy(DecHW(), **SETTINGS, model="mlp:hidden=64"))
    network = replace(network_of(world.experiment), wire=wire)
    spec = message_policy(network, 1, world)
    [(name, tensors)] = spec.tensors.items()
    spread = torch.rand(tensors["h"].shape) ** 20
    for norm, accepted in ((1.0, True), (1.5, False)):
        h = spread * (norm / float(spread.norm()))
        packet = Packet(Envelope(0, 5, 1, name), (1,), {"h": h}, 0)
        header, payload = encode(packet, run="test", round=0, recipient=1, sequence=0, wire=wire)
        if accepted:
            decode(header, payload, spec)
        else:
            with pytest.raises(Rejected, match=r"'h' of node 0 has norm 1.*, at most 1") as error:
                decode(header, payload, spec)
            assert error.value.reason == "bound"


@pytest.mark.slow
def test_curvature_buys_no_weight():
    experiment = toy(DecHW(), **SETTINGS)
    with poison({"3": {"all": {"h": 1e30, "x": 7.0}}}):
        peers = run_peers(experiment)
    for peer in peers[:3]:
        assert peer.counters["bound"] == 3
        assert float(peer.shard.members[peer.me].node.params.abs().max()) < 5.0


@pytest.mark.slow
def test_a_share_can_be_capped_where_there_is_no_bound():
    with poison({"3": {"all": {"h": 1e30, "x": 7.0}}}):
        short = SETTINGS | {"rounds": 1}
        free = run_peers(toy(DecHW(normalise="none"), **short))[0]
        bound = run_peers(toy(DecHW(normalise="none", max_share=0.4), **short))[0]
    means = [float(peer.shard.members[0].node.params.mean()) for peer in (free, bound)]
    assert means[0] == pytest.approx(7.0, rel=1e-3)
    assert means[1] < 4.0


def test_capped_shares():
    h = [torch.tensor(values) for values in ([9.0, 0, 5, 1e38], [1.0, 0, 4, 1e38], [0, 0, 1, 1e38])]
    shares = torch.stack(list(capped(h, 0.45)))
    assert torch.allclose(shares[:, 1], torch.zeros(3))
    assert torch.allclose(shares[:, [0, 2, 3]].sum(0), torch.ones(3))
    assert float(shares.max()) <= 0.45 + 1e-6
    assert torch.allclose(shares[:, 2], torch.tensor([0.45, 0.44, 0.11]))
    assert torch.allclose(torch.stack(list(capped(h, 0.2)))[:, 0], torch.full((3,), 1 / 3))
    assert capped(h, None) is h


@pytest.mark.parametrize("share", [0.0, 1.0, -0.5])
def test_a_share_lies_between_0_and_1(share):
    with pytest.raises(InputError, match="max_share must lie between 0 and 1"):
        DecHW(max_share=share)


# Numbers of examples


def examples_of(network: Network) -> list[int]:
    world = prepare(network.experiment)
    return [len(part) for part in world.parts]


def with_examples(network: Network, counts: list[int]) -> tuple:
    pairs = zip(network.members, counts, strict=True)
    return tuple(replace(member, examples=count) for member, count in pairs)


EXPERIMENT = toy(DecAvg(), **SETTINGS)
CLAIM = {"3": {"all": {"examples": 10**9, "x": 7.0}}}


@pytest.mark.slow
def test_many_examples_buy_weight_unless_the_network_file_limits_them(caplog):
    with poison(CLAIM):
        free = run_peers(EXPERIMENT)[0]
        assert (
            "node-3 states 1000000000 examples, more than 100 times the median of the others"
            in caplog.text
        )
        limited = run_peers(EXPERIMENT, max_examples=1000)[0]
        members = with_examples(network_of(EXPERIMENT), examples_of(network_of(EXPERIMENT)))
        fixed = run_peers(EXPERIMENT, members=members)[0]
    means = [float(peer.shard.members[0].node.params.mean()) for peer in (free, limited, fixed)]
    assert means[0] == pytest.approx(7.0, rel=1e-3)
    assert max(means[1:]) < 1.0
    assert limited.counters["bound"] == fixed.counters["bound"] == 3
    assert free.counters["bound"] == 0


@pytest.mark.slow
def test_honest_peers_with_limits_end_with_the_same_bits():
    members = with_examples(network_of(EXPERIMENT), examples_of(network_of(EXPERIMENT)))
    plain, limited = run_peers(EXPERIMENT), run_peers(EXPERIMENT, members=members, max_examples=99)
    for one, other in zip(plain, limited, strict=True):
        params = [peer.shard.members[peer.me].node.params for peer in (one, other)]
        assert torch.equal(*params)


@pytest.mark.parametrize("changes", [{"max_examples": 1}, {"examples": 3}])
def test_a_peer_with_other_data_than_the_network_file_says_ends(changes):
    network = network_of(EXPERIMENT)
    if "examples" in changes:
        changes = {"members": with_examples(network, [3] * 4)}
    with pytest.raises(
        InputError, match=r"node 0 states .* examples, .*correct the data of node-0"
    ):
        run_peers(EXPERIMENT, **changes)


def test_limits_of_examples_in_the_network_file(tmp_path):
    experiment = Experiment(nodes=2, topology="ring", model="logistic")
    network = network_of(experiment, max_examples=500)
    network = replace(network, members=with_examples(network, [100, 200]))
    (tmp_path / "experiment.toml").write_text(experiment.to_toml())
    (tmp_path / "network.toml").write_text(network.to_toml("experiment.toml"))
    loaded = Network.load(tmp_path / "network.toml")
    assert (loaded.max_examples, loaded.members) == (500, network.members)
    assert "examples" not in network_of(experiment).to_toml("experiment.toml")
    with pytest.raises(InputError, match="max_examples must be 1 to 1000000000, got 0"):
        replace(network, max_examples=0)
    with pytest.raises(InputError, match="examples of node-0 must be 0 to 1000000000, got -1"):
        replace(network.members[0], examples=-1)
