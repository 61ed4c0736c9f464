"""What a shard makes sure of, whatever an algorithm does in its rounds."""

import warnings
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import peerage as pg
from peerage import Algorithm, LocalSGD, Node
from peerage.errors import CheckpointError, Diverged, PeerageError
from peerage.requests import Compute
from peerage.runs.run import Result

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
        ("deque", "a state of type deque cannot be kept; use tensors"),
        ("defaultdict", "a state of type defaultdict cannot be kept; use tensors"),
        ("late", "the state holds a Box, which init does not return; return one from init"),
    ],
)
def test_other_states_are_refused_in_the_round_that_makes_them(kind, reason, engine):
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


def test_the_sender_of_nan_is_named_and_not_those_who_hear_it(engine):
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
        (Sends(), r"^node \d sent count=3 in round 1; a message holds tensors only: send torch"),
        (NotAsync(), "^NotAsync.round gave None instead of a coroutine; define it as `async def "),
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
