"""What a shard makes sure of, whatever an algorithm does in its rounds."""

import json
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import peerage as pg
from peerage import Algorithm, LocalSGD, Node
from peerage.engine.lockstep import Lockstep, RoundReport, SerialTeam
from peerage.engine.prepare import prepare
from peerage.engine.shard import InProcessStore, Shard
from peerage.errors import CheckpointError, Diverged, InputError, PeerageError
from peerage.requests import Compute, Message, Send
from peerage.runs.run import Result
from peerage.state import map_tensors
from peerage.testing import NODES, toy

SERIAL, POOL = {"name": "serial"}, {"name": "pool", "workers": 2}


def ran(algorithm: Algorithm[Any], **changes: Any) -> Result:
    settings: dict[str, Any] = {
        "nodes": 4,
        "topology": "complete",
        "rounds": 3,
        "model": "logistic",
        "partition": "iid",
        "engine": SERIAL,
    }
    settings |= changes
    return pg.run(pg.Experiment(algorithm=algorithm, **settings))


# What nodes keep is their own


@dataclass(frozen=True)
class OwnHead(Algorithm[None]):
    """Averages all but a part of the model, written as authors write it first."""

    local: LocalSGD = LocalSGD(epochs=1)
    copy: bool = False

    async def round(self, node: Node[None]) -> None:
        await node.train(self.local)
        head = node.params[-5:]
        inbox = await node.exchange(x=node.params)
        mean = inbox.mean("x", inbox.uniform_weights())
        node.params = mean.clone() if self.copy else mean
        node.params[-5:] = head


@pytest.mark.slow
def test_a_mean_may_be_changed_in_place():
    expected = ran(OwnHead(copy=True))
    assert ran(OwnHead()).digest == expected.digest
    assert ran(OwnHead(), engine=POOL).digest == expected.digest
    heads = [params[-5:] for params in expected.parameters]
    assert not torch.equal(heads[0], heads[1])


@dataclass(frozen=True)
class Adopts(Algorithm[Tensor]):
    """Takes over a neighbour's model, remembers it too, and changes its own in the next round."""

    local: LocalSGD = LocalSGD(epochs=1)

    def init(self, node: Node[Tensor]) -> Tensor:
        return node.params

    async def round(self, node: Node[Tensor]) -> None:
        node.params[0] += node.id + 1.0
        await node.train(self.local)
        inbox = await node.exchange(x=node.params)
        node.params = inbox["x"][0]
        node.state = inbox["x"][0]


def test_nodes_that_keep_the_same_message_do_not_share_it(engine):
    result = ran(Adopts(), engine=engine)
    addresses = {params.data_ptr() for params in result.parameters}
    assert len(addresses) == 4
    assert result.digest == ran(Adopts()).digest


# States


class Pair(NamedTuple):
    x: Any
    count: int


@dataclass
class Box:
    x: Any


@dataclass(frozen=True)
class Remembers(Algorithm[Any]):
    """Keeps what a neighbour sent, in a container of some kind, and uses it in the next round."""

    local: LocalSGD = LocalSGD(epochs=1)
    kind: str = "pair"

    def init(self, node: Node[Any]) -> Any:
        return None if self.kind == "late" else KINDS[self.kind][0](torch.zeros_like(node.params))

    async def round(self, node: Node[Any]) -> None:
        await node.train(self.local)
        wrap, x_of = KINDS[self.kind]
        if node.state is not None:
            node.params = node.params + 0.1 * x_of(node.state)
        inbox = await node.exchange(x=node.params)
        node.state = wrap(inbox.others()["x"][0])


Kind = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
KINDS: dict[str, Kind] = {
    "pair": (lambda x: Pair(x, 1), lambda state: state.x),
    "by-number": (lambda x: {3: x}, lambda state: state[3]),
    "deque": (lambda x: deque([x], maxlen=3), lambda state: state[0]),
    "defaultdict": (lambda x: defaultdict(Tensor, x=x), lambda state: state["x"]),
    "late": (Box, lambda state: state.x),
}


@pytest.mark.parametrize("kind", ["pair", "by-number"])
@pytest.mark.slow
def test_states_that_can_be_kept_are_the_same_in_every_engine(kind, tmp_path):
    through = ran(Remembers(kind=kind))
    assert ran(Remembers(kind=kind), engine=POOL).digest == through.digest
    experiment = through.experiment
    folder = tmp_path / "run"

    def stop(row: dict[str, Any]) -> None:
        if row["round"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(pg.PeerageError, match="interrupted"):
        pg.run(experiment, folder, checkpoint_every=1, watch=stop)
    assert pg.resume(folder, experiment=experiment).digest == through.digest


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("deque", "a state of type deque cannot be saved; use tensors"),
        ("defaultdict", "a state of type defaultdict cannot be saved; use tensors"),
        ("late", "the state holds a Box, which init does not return; return one from init"),
    ],
)
def test_other_states_are_rejected_in_the_round_that_makes_them(kind, reason, engine):
    with pytest.raises(CheckpointError, match=reason) as caught:
        ran(Remembers(kind=kind), engine=engine)
    assert "\n" not in str(caught.value)


# Numbers that are not finite


@dataclass(frozen=True)
class Spoil(Compute[Tensor]):
    """Work of the user's own that fails."""

    params: Tensor
    by: float

    def run(self, local: Any) -> Tensor:
        return self.params * self.by


@dataclass(frozen=True)
class Spoils(Algorithm[None]):
    """Node 2 computes nonsense in its second round, and may send it."""

    local: LocalSGD = LocalSGD(epochs=1)
    by: float = float("nan")
    sends: bool = False
    trains: bool = False

    async def round(self, node: Node[None]) -> None:
        if self.trains:
            await node.train(self.local)
        x = node.params
        if node.round == 1 and node.id == 2:
            x = await Spoil(node.params, self.by)
        if self.sends:
            inbox = await node.exchange(x=x)
            x = inbox.stack("x").mean(0)
        node.params = x


@pytest.mark.parametrize("by", [float("nan"), float("inf"), float("-inf")])
def test_a_run_whose_parameters_are_not_finite_does_not_finish(by, engine):
    reason = "the parameters of node 2 were NaN or infinite at the end of round 2; check what"
    with pytest.raises(Diverged, match=reason):
        ran(Spoils(by=by), engine=engine)


def test_the_sender_of_nan_is_named_and_not_the_receivers(engine):
    reason = "^node 2 sent NaN or infinite numbers in round 2, in tensor 'x'; check how"
    with pytest.raises(Diverged, match=reason):
        ran(Spoils(sends=True), engine=engine)


@dataclass(frozen=True)
class Overflows(Algorithm[None]):
    """Finite messages whose sum is not."""

    local: LocalSGD = LocalSGD(epochs=1)

    async def round(self, node: Node[None]) -> None:
        inbox = await node.exchange(x=torch.full_like(node.params, 3e38))
        node.params = inbox.stack("x").sum(0)


def test_an_overflow_in_the_sum_of_messages_is_found_where_it_happens(engine):
    with pytest.raises(
        Diverged, match=r"parameters of nodes 0, 1, 2, 3 were .* at the end of round 1"
    ):
        ran(Overflows(), engine=engine)


@dataclass(frozen=True)
class SpoilsInPlace(Algorithm[None]):
    """Changes what training left, in place, before it sends it."""

    local: LocalSGD = LocalSGD(epochs=1)
    sends: bool = True

    async def round(self, node: Node[None]) -> None:
        await node.train(self.local)
        node.params[0] = float("nan")
        if self.sends:
            await node.exchange(x=node.params)


@pytest.mark.parametrize(
    ("sends", "reason"), [(True, "nodes 0, 1, 2, 3 sent NaN"), (False, "parameters of nodes 0, 1,")]
)
def test_what_training_left_is_looked_at_again_if_it_was_changed(sends, reason):
    with pytest.raises(Diverged, match=reason):
        ran(SpoilsInPlace(sends=sends))


@pytest.mark.parametrize(("trains", "round"), [(True, 2), (False, 4)])
def test_a_round_without_evaluation_is_looked_at_later(trains, round):
    """By the next training, which is not blamed for it, or in the last round."""
    reason = f"parameters of node 2 were NaN or infinite at the end of round {round}; check"
    with pytest.raises(Diverged, match=reason):
        ran(Spoils(trains=trains), rounds=4, evaluation={"every": 4})


# Mistakes of authors


@dataclass(frozen=True)
class Forgets(Algorithm[None]):
    local: LocalSGD = LocalSGD(epochs=1)

    async def round(self, node: Node[None]) -> None:
        node.train(self.local)  # type: ignore[unused-coroutine]
        await node.exchange(x=node.params)


@dataclass(frozen=True)
class Waits(Algorithm[None]):
    """Awaits a call later, which is no mistake."""

    local: LocalSGD = LocalSGD(epochs=1)

    async def round(self, node: Node[None]) -> None:
        training = node.train(self.local)
        await node.exchange(x=node.params)
        await training


@dataclass(frozen=True)
class Sends(Algorithm[None]):
    local: LocalSGD = LocalSGD(epochs=1)

    async def round(self, node: Node[None]) -> None:
        await node.exchange(count=3)  # type: ignore[arg-type]


@dataclass(frozen=True)
class NotAsync(Algorithm[None]):
    local: LocalSGD = LocalSGD(epochs=1)

    def round(self, node: Node[None]) -> None:  # type: ignore[override]
        node.params = node.params + 1.0


@pytest.mark.parametrize(
    ("algorithm", "reason"),
    [
        (Forgets(), r"^node \d called node.train without await in round 1, so nothing happened; w"),
        (
            Sends(),
            r"^node \d sent count=3 in round 1; a message may contain only tensors: send torch",
        ),
        (
            NotAsync(),
            "^NotAsync.round returned None instead of a coroutine; define it as `async def ",
        ),
    ],
    ids=["await", "number", "async"],
)
def test_mistakes_of_authors_are_one_clear_line(algorithm, reason, engine):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(PeerageError, match=reason) as caught:
            ran(algorithm, engine=engine)
    assert "\n" not in str(caught.value)


def test_a_call_may_be_awaited_later():
    assert ran(Waits()).digest != ran(pg.Local(LocalSGD(epochs=1, lr=0.0))).digest


# Streams


@dataclass(frozen=True)
class Draws(Algorithm[Any]):
    """Draws from both streams in `init` and in every round."""

    local: LocalSGD = LocalSGD(epochs=1)

    def init(self, node: Node[Any]) -> Any:
        return draws(node)

    async def round(self, node: Node[Any]) -> None:
        rng, coin = draws(node)
        node.note(same_rng=rng == node.state[0], same_coin=coin == node.state[1], coin=coin)
        node.note(first_coin=node.state[1])


def draws(node: Node[Any]) -> tuple[float, float]:
    return tuple(float(torch.rand(1, generator=g)) for g in (node.rng, node.coin))


def test_init_draws_other_numbers_than_round_one():
    rows = [row for row in ran(Draws()).rows if row["scope"] == "node" and row["round"] == 1]
    notes = [row["notes"] for row in rows]
    assert not any(note["same_rng"] or note["same_coin"] for note in notes)
    assert len({note["coin"] for note in notes}) == 1  # the coin stays public
    assert len({note["first_coin"] for note in notes}) == 1


# One shard alone, without an engine around it


def shard_of(
    algorithm: Algorithm[Any], nodes: Sequence[int] = range(NODES), **changes: Any
) -> Shard:
    return Shard(prepare(toy(algorithm, **changes)), nodes, InProcessStore())


def run_round(shard: Shard, round: int, evaluate: bool = False) -> RoundReport:
    """A round of a shard that has all nodes."""
    team = SerialTeam(shard.world)
    team.shard = shard
    return Lockstep(shard.world, team).round(round, evaluate)


@dataclass(frozen=True)
class Does(Algorithm[Any]):
    """What a test says, once in a round."""

    act: Callable[[Node[Any]], Any]
    first: Callable[[Node[Any]], Any] = lambda node: None
    local: LocalSGD = LocalSGD(epochs=1)

    def init(self, node: Node[Any]) -> Any:
        return self.first(node)

    async def round(self, node: Node[Any]) -> None:
        await self.act(node)


class NotARequest:
    def __await__(self) -> Any:
        return (yield self)

    def __repr__(self) -> str:
        return "NotARequest()"


async def changes_what_it_sent(node: Node[Any]) -> None:
    await node.exchange(x=node.params)
    node.params += 1.0


async def changes_what_it_received(node: Node[Any]) -> None:
    inbox = await node.exchange(x=node.params)
    inbox.others()["x"][0][0] = 0.0


async def ends_with_another_shape(node: Node[Any]) -> None:
    node.params = node.params[1:]


async def ends_with_another_type(node: Node[Any]) -> None:
    node.params = node.params.double()


@pytest.mark.parametrize(
    ("act", "reason"),
    [
        (lambda node: NotARequest(), r"^the algorithm awaited NotARequest\(\), which is not a req"),
        (
            lambda node: Send((node.id,), Message(node.envelope(), {})),
            r"^node 0 sent to 0, which is not another node$",
        ),
        (
            lambda node: Send((1, 9), Message(node.envelope(), {})),
            r"^node 0 sent to 9, which is not another node$",
        ),
        (
            lambda node: Send((-1,), Message(node.envelope(), {})),
            r"^node 0 sent to -1, which is not another node$",
        ),
        (
            lambda node: Send(
                (1,), Message(node.envelope(), {"x": torch.zeros(2, dtype=torch.complex64)})
            ),
            r"node 0 sends tensor 'x'.*complex64",
        ),
        (changes_what_it_sent, r"^the algorithm changed tensor 'x' of node 0 in place after send"),
        (changes_what_it_received, r"^the algorithm changed tensor 'x' of node 1 in place after"),
        (
            ends_with_another_shape,
            r"node 0 parameters of shape \(66,\) .* needs \(67,\) in",
        ),
        (ends_with_another_type, r"shape \(67,\) and type torch.float64; its model needs \(67,\)"),
    ],
    ids=["object", "itself", "no node", "negative", "type", "own", "others", "shape", "double"],
)
def test_a_shard_rejects_what_breaks_the_contract(act, reason):
    with pytest.raises(PeerageError, match=reason) as caught:
        run_round(shard_of(Does(act), topology="complete"), 0)
    assert "\n" not in str(caught.value)


def test_an_error_of_the_author_says_where_it_happened():
    async def fail(node: Node[Any]) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        shard_of(Does(fail)).begin(2, evaluate=False)
    assert caught.value.__notes__ == ["at node 0 in round 2"]


def test_nodes_wait_for_messages_and_go_on_with_those_that_came():
    shard, others = (shard_of(pg.DecAvg(weights="uniform"), nodes) for nodes in ([1, 3], [2]))
    step = shard.begin(0, evaluate=False)
    assert step.waiting == {1: (0, 2), 3: (2, 4)}
    assert [packet.to for packet in step.packets] == [(0, 2), (2, 4)]
    assert [packet.bytes for packet in step.packets] == [4 * 67] * 2
    trained = [packet.payload["x"] for packet in step.packets]
    [sent] = others.begin(0, evaluate=False).packets
    after = shard.resume({1: [sent], 3: []})  # node 1 receives from node 2 alone, node 3 from none
    assert (after.finished, after.waiting) == ([1, 3], {})
    report = shard.finish()
    assert [node.node for node in report.nodes] == [1, 3]
    torch.testing.assert_close(shard.members[1].node.params, (trained[0] + sent.payload["x"]) / 2)
    assert torch.equal(shard.members[3].node.params, trained[1])


def test_absent_nodes_do_nothing_and_report_nothing():
    shard = shard_of(pg.DecAvg(), faults={"join": "4@2"})
    before = shard.members[4].node.params.clone()
    assert [node.node for node in run_round(shard, 0).nodes] == [0, 1, 2, 3]
    assert torch.equal(shard.members[4].node.params, before)
    assert [node.node for node in run_round(shard, 1).nodes] == [0, 1, 2, 3, 4]
    assert not torch.equal(shard.members[4].node.params, before)


def test_models_are_evaluated_only_in_rounds_that_ask_for_it():
    shard = shard_of(pg.DecAvg(), evaluation={"at": "end", "validation": 0.25})
    scores = {"accuracy", "loss", "validation_accuracy", "validation_loss"}
    assert set(run_round(shard, 0).nodes[0].metrics) == {"train_loss"}
    assert set(run_round(shard, 1, evaluate=True).nodes[0].metrics) == {"train_loss", *scores}
    measured = shard.evaluate_models()
    assert set(measured.nodes[0].metrics) == scores
    assert measured.seconds["evaluate"] > 0.0 == measured.seconds["train"]


# States of one shard


def keeps(wrap: Callable[[Tensor], Any]) -> Does:
    async def act(node: Node[Any]) -> None:
        inbox = await node.exchange(x=node.params)
        node.state = wrap(inbox.others()["x"][0])

    return Does(act, first=lambda node: wrap(torch.zeros_like(node.params)))


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: {"a": (x, x)}, lambda x: [x.view(1, -1)]])
def test_what_nodes_keep_shares_no_memory(wrap):
    shard = shard_of(keeps(wrap), topology="complete")
    run_round(shard, 0)
    kept = [
        tensor.untyped_storage().data_ptr()
        for member in shard.members.values()
        for tensor in (member.node.params, *tensors_in(member.node.state))
    ]
    assert len(set(kept)) == len(kept)


def tensors_in(state: Any) -> list[Tensor]:
    found: list[Tensor] = []
    map_tensors(lambda x: found.append(x) or x, state)
    return found


def test_a_state_that_cannot_be_kept_is_rejected_before_the_first_round():
    with pytest.raises(CheckpointError, match="a state of type deque cannot be saved; use tensors"):
        shard_of(keeps(lambda x: deque([x])))


# Saving one shard


@dataclass(frozen=True)
class Halves(Algorithm[Any]):
    """Counts its rounds, keeps momentum, and evaluates half of its parameters."""

    local: LocalSGD = LocalSGD(epochs=1, momentum=0.9, keep_optimizer=True)

    def init(self, node: Node[Any]) -> Any:
        return {"count": 0, "sum": torch.zeros_like(node.params)}

    async def round(self, node: Node[Any]) -> None:
        await node.train(self.local)
        inbox = await node.exchange(x=node.params)
        node.params = inbox.mean("x", inbox.uniform_weights())
        node.state = {"count": node.state["count"] + 1, "sum": node.state["sum"] + node.params}

    def evaluated(self, node: Node[Any]) -> Tensor:
        return node.params / 2


def saved(shard: Shard, folder: Path) -> tuple[dict[str, Any], dict[str, str]]:
    trees = shard.save(str(folder / "part"))
    return json.loads(json.dumps(trees)), dict.fromkeys(trees, "part")  # as a manifest holds them


def test_a_restored_shard_goes_on_as_the_first_would_have(tmp_path):
    first, second = shard_of(Halves()), shard_of(Halves())
    run_round(first, 0)
    second.restore(str(tmp_path), *saved(first, tmp_path), 1)
    for shard in (first, second):
        run_round(shard, 1)
    for one, other in zip(first.members.values(), second.members.values(), strict=True):
        assert torch.equal(one.node.params, other.node.params)
        assert torch.equal(one.node.state["sum"], other.node.state["sum"])
        assert one.node.state["count"] == other.node.state["count"] == 2
        assert one.persistent_tensors.keys() == other.persistent_tensors.keys() != set()


def test_a_part_holds_parameters_states_memory_and_what_is_evaluated(tmp_path):
    shard = shard_of(Halves(), nodes=[2])
    saved(shard, tmp_path)
    held = load_file(tmp_path / "part")
    assert torch.equal(held["2.params"], shard.members[2].node.params)
    assert torch.equal(held["2.evaluated"], held["2.params"] / 2)
    assert {name.split(".")[0] for name in held} == {"2"}
    plain = shard_of(pg.DecAvg(), nodes=[2])
    saved(plain, tmp_path)
    assert list(load_file(tmp_path / "part")) == ["2.params"]


def test_nodes_are_restored_by_a_shard_of_some_from_a_shard_of_all(tmp_path):
    whole, part = shard_of(Halves()), shard_of(Halves(), nodes=[1, 4])
    run_round(whole, 0)
    part.restore(str(tmp_path), *saved(whole, tmp_path), 1)
    for node in (1, 4):
        assert torch.equal(part.members[node].node.params, whole.members[node].node.params)
        assert part.members[node].node.round == 0  # the last that it took part in


def test_a_checkpoint_of_another_model_is_rejected(tmp_path):
    trees, parts = saved(shard_of(pg.DecAvg()), tmp_path)
    other = shard_of(pg.DecAvg(), model="mlp:hidden=4")
    reason = "holds 67 parameters for node 0, but the model has 35; resume with the same experiment"
    with pytest.raises(InputError, match=reason):
        other.restore(str(tmp_path), trees, parts, 1)


def test_copies_of_a_model_and_of_what_is_evaluated():
    shard = shard_of(Halves())
    (params, buffers, evaluated), models = shard.model(1)
    assert torch.equal(evaluated, params / 2)
    assert buffers.numel() == 0
    assert models == {"": (2, 1, "mlp")}
    plain = shard_of(pg.DecAvg())
    places, models = plain.model(1)
    assert (len(places), models) == (2, {"": (0, 1, "mlp")})  # nothing is copied twice
    assert plain.model(None) == ([], {})
