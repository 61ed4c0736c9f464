"""Parts, candidates, streams and initial values in algorithms: the same bits in every engine."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support.networking import OverSockets, network_of, run_peers
from torch import Tensor, nn

import peerage as pg
from peerage import Algorithm, LocalSGD, Node, PeerageError, Weights, run
from peerage.engine.prepare import prepare
from peerage.engine.router import Packet
from peerage.errors import InputError
from peerage.net.peer.traffic import message_policy
from peerage.net.wire.header import Rejected
from peerage.net.wire.payload import decode, encode
from peerage.requests import Envelope, TensorSpec
from peerage.testing import NODES, check_law, simulate, toy


def network() -> nn.Module:
    return nn.Sequential(
        nn.Linear(4, 6),
        nn.BatchNorm1d(6),
        nn.ReLU(),
        nn.Linear(6, 5),
        nn.Dropout(),
        nn.Linear(5, 3),
    )


MODEL = pg.Split(network, head=("3", "5"))


@dataclass(frozen=True)
class State:
    heads: tuple[Tensor, ...]
    tracked: Tensor


@dataclass(frozen=True)
class Heads(Algorithm[State]):
    """Several heads over one core: train the best one, average cores and heads of that number."""

    local: LocalSGD = LocalSGD(epochs=1, batch_size=4, momentum=0.5)
    k: int = 3

    def init(self, node: Node[State]) -> State:
        head = node.layout.part("head")
        heads = [node.initial(f"head {j}").params[head] for j in range(self.k)]
        return State(tuple(heads), torch.zeros_like(node.params))

    async def round(self, node: Node[State]) -> None:
        head, core = node.layout.part("head"), node.layout.part("core")
        heads = list(node.state.heads)
        losses = await node.losses(heads, 6, part="head", stream="choice", batch_size=4)
        best = int(losses.argmin())
        node.note(best=best)
        params = node.params.clone()
        params[head] = heads[best]
        old = await node.gradient(3, at=node.params, advance=False)
        new = await node.gradient(3, at=Weights(params, node.buffers, node.architecture))
        node.params = params
        await node.train(self.local)
        heads[best] = node.params[head]
        tracked = node.state.tracked + new - old
        inbox = await node.exchange(
            core=node.params[core], h=heads[best], number=torch.tensor(best), b=node.buffers
        )
        same = [m.payload["h"] for m in inbox.messages if int(m.payload["number"]) == best]
        heads[best] = torch.stack(same).mean(0)
        params = node.params + 0.01 * tracked / (1 + tracked.norm())
        params[core] = inbox.mean("core", inbox.uniform_weights())
        params[head] = heads[best]
        node.params, node.buffers = params, inbox.mean("b", inbox.uniform_weights())
        node.state = State(tuple(heads), tracked)

    def message_schema(self, dimensions: Any) -> dict[str, TensorSpec]:
        return {
            "core": TensorSpec((dimensions.layout.part_size("core"),)),
            "h": TensorSpec((dimensions.layout.part_size("head"),)),
            "number": TensorSpec((), torch.int64),
            "b": TensorSpec((dimensions.buffers,)),
        }


def test_heads_over_one_core_give_the_same_bits_in_every_engine(engine):
    experiment = toy(Heads(), model=MODEL, engine=engine, rounds=4)
    result = run(experiment)
    for found, wanted in zip(result.parameters, simulate(experiment).end, strict=True):
        assert torch.equal(found, wanted)
    only = toy(Heads(LocalSGD(epochs=1, only="head")), model=MODEL, engine=engine, rounds=4)
    for found, wanted in zip(run(only).parameters, simulate(only).end, strict=True):
        assert torch.equal(found, wanted)


def test_peers_with_several_heads_end_with_the_bits_of_the_simulator():
    experiment = toy(Heads(), model=MODEL, rounds=4)
    for peer, wanted in zip(run_peers(experiment), simulate(experiment).end, strict=True):
        assert torch.equal(peer.shard.members[peer.me].node.params, wanted)
        assert dict(peer.counters) == {}


@pytest.mark.slow
def test_peers_with_their_own_data_over_real_connections_give_the_same_bits(tmp_path):
    work = LocalSGD(epochs=1, batch_size=4, only="head")
    experiment = toy(Heads(work), model=MODEL, nodes=3, partition="iid", rounds=3)
    peers = run_peers(
        experiment,
        transports=OverSockets(tmp_path),
        worlds=lambda me: prepare(experiment).restrict_to_node(me),
    )
    for peer, wanted in zip(peers, simulate(experiment).end, strict=True):
        assert torch.equal(peer.shard.members[peer.me].node.params, wanted)


@pytest.mark.slow
@pytest.mark.own_engine
@pytest.mark.parametrize("law", ["engines", "resuming", "unchanged", "traffic", "declared"])
def test_the_laws_hold_with_several_heads(law):
    check_law(law, Heads())


# Initial values


@dataclass(frozen=True)
class Draws(Algorithm[Any]):
    """Its model is what it drew."""

    stream: str = "first"
    private: bool = False

    def init(self, node: Node[Any]) -> Any:
        return node.initial(self.stream, private=self.private).params

    async def round(self, node: Node[Any]) -> None:
        again = node.initial(self.stream, private=self.private)
        assert torch.equal(node.state, again.params)
        assert again.architecture == node.architecture
        assert again.buffers.tolist() == node.buffers.tolist()
        node.params = again.params


INIT = {"scheme": "he", "gain": "manual:g=2"}


def draws(model: Any = network, init: Any = INIT, engine: Any = None, **options: Any) -> Any:
    engine = engine or {"name": "serial"}
    return run(toy(Draws(**options), model=model, init=init, rounds=1, engine=engine)).parameters


def test_initial_values_of_a_stream_are_equal_on_all_nodes_or_private(engine):
    first = draws(engine=engine)
    assert all(torch.equal(params, first[0]) for params in first)
    assert not torch.equal(draws(stream="second")[0], first[0])
    private = draws(private=True, engine=engine)
    assert len({tuple(params.tolist()) for params in [*private, first[0]]}) == NODES + 1


def test_initial_values_follow_the_scheme_and_the_gain():
    layout = prepare(toy(Draws(), model=network)).layouts["network"]
    doubled, plain = draws()[0], draws(init={"scheme": "he"})[0]
    for slot in layout.slots:
        factor = 1.0 if slot.layer == "1" else 2.0  # BatchNorm is not amplified
        torch.testing.assert_close(slot.view(doubled), factor * slot.view(plain))
    assert not layout.view(plain, "0.bias").any()  # of He
    assert draws(init={"scheme": "torch"})[0][layout.span("0")].all()


def test_a_users_module_is_drawn_anew():
    module = network()
    drawn = draws(module, init={"start": "shared"})[0]
    layout = prepare(toy(Draws(), model=module)).layouts["Sequential"]
    assert not torch.equal(layout.view(drawn, "0.weight"), module[0].weight)
    assert torch.equal(draws(module, init={"start": "independent"})[0], drawn)


@dataclass(frozen=True)
class DrawsOther(Algorithm[Any]):
    architecture: str

    async def round(self, node: Node[Any]) -> None:
        other = node.initial("s", architecture=self.architecture)
        assert other.params.shape == (node.layouts[self.architecture].size,)
        [loss] = await node.losses([other])
        node.note(loss=float(loss))


def test_initial_values_of_other_architectures():
    models = ["mlp:hidden=8", "mlp:hidden=4"]
    run(toy(DrawsOther("mlp-1"), model=models))
    with pytest.raises(InputError, match=r"unknown architecture 'mlp-2'; did you mean 'mlp-"):
        run(toy(DrawsOther("mlp-2"), model=models))


def test_a_gain_that_is_not_known_yet_is_refused():
    with pytest.raises(InputError, match=r"node\.initial requires a gain that is known before"):
        run(toy(Draws(), init={"gain": "estimated"}))


def test_a_node_without_an_engine_has_no_initial_values():
    node: Node[None] = Node(
        0, 1, 1, torch.ones(1), "net", pg.Layout(()), torch.empty(0), torch.empty(0), 0
    )
    with pytest.raises(PeerageError, match="requires an engine"):
        node.initial("s")


# Gradients


@dataclass(frozen=True)
class Differentiates(Algorithm[Any]):
    options: Any = ()

    async def round(self, node: Node[Any]) -> None:
        await node.gradient(**dict(self.options))


@pytest.mark.parametrize("options", [(("stream", "s"),), (("advance", False),)])
def test_options_of_batches_need_a_batch_size(options):
    with pytest.raises(PeerageError, match="without a batch size uses all examples; give batch_si"):
        run(toy(Differentiates(options)))


# Payloads of another architecture


@dataclass(frozen=True)
class Swaps(Algorithm[Any]):
    """Sends back what it gets, as a model of its sender's architecture."""

    async def round(self, node: Node[Any]) -> None:
        other = next(name for name in node.layouts if name != node.architecture)
        theirs = node.initial(f"from {node.id}", architecture=other)
        inbox = await node.exchange(architecture=other, x=theirs.params, b=theirs.buffers)
        found = inbox.others().alike(node.architecture)
        assert found.senders == tuple(j for j in node.neighbours if j % 2 != node.id % 2)
        node.params = found.stack("x").mean(0)


MODELS = ["mlp:hidden=8", "mlp:hidden=4"]


def test_an_exchange_of_models_of_other_architectures(engine):
    experiment = toy(Swaps(), model=MODELS, topology="complete", engine=engine, rounds=1)
    result = run(experiment)
    assert torch.equal(result.parameters[0], result.parameters[2])
    for peer, wanted in zip(run_peers(experiment), result.parameters, strict=True):
        assert torch.equal(peer.shard.members[peer.me].node.params, wanted)
        assert dict(peer.counters) == {}


@pytest.mark.parametrize("architecture", ["mlp-0", "mlp-1"])
def test_peers_check_shapes_by_the_architecture_of_the_payload(architecture):
    experiment = toy(Swaps(), model=MODELS)
    world = prepare(experiment)
    policy = message_policy(network_of(experiment), 1, world)
    for name, layout in world.layouts.items():
        payload = {"x": torch.zeros(layout.size), "b": torch.empty(0)}
        packet = Packet(Envelope(0, 4, 2, architecture), (1,), payload, 4 * layout.size)
        message = encode(packet, run=policy.run, round=0, recipient=1, sequence=0)
        if name == architecture:
            assert decode(*message, policy).architecture == name
        else:
            with pytest.raises(Rejected, match="tensor 'x' has the wrong shape"):
                decode(*message, policy)


@dataclass(frozen=True)
class Misnames(Algorithm[Any]):
    async def round(self, node: Node[Any]) -> None:
        await node.send(node.neighbours, architecture=node.params, to=node.params)


def test_a_tensor_cannot_be_called_architecture():
    with pytest.raises(
        PeerageError, match="sent a tensor 'architecture', which must be the name of"
    ):
        run(toy(Misnames()))
