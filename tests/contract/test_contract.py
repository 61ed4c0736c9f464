"""Every law over every algorithm, and algorithms that break them, to prove that laws can fail."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from peerage import (
    ALGORITHMS,
    CFA,
    DAC,
    DESA,
    DFML,
    DPSGD,
    EL,
    HWA,
    IFCA,
    Algorithm,
    DecAvg,
    DecDiff,
    DecFedRolex,
    DecFML,
    DecHW,
    DefKT,
    DePRL,
    DFMLNeighbours,
    Facade,
    FedAvg,
    FedCurv,
    Local,
    Node,
    Proximal,
    VirtualTeacher,
    resume,
    run,
)
from peerage.aggregation import uniform_weights, weighted_mean
from peerage.algorithms.mutual_learning import ONE_EPOCH
from peerage.algorithms.rotating_hub import RotatingHub
from peerage.errors import InputError
from peerage.testing import (
    LAWS,
    Stopped,
    check_algorithm,
    check_law,
    stop_in_round_three,
    toy,
)
from peerage.work.training import LocalSGD

# Two epochs break a law as surely as the five of the default, in half the time.
SHORT = LocalSGD(epochs=2)


def short(cls: type[Algorithm[Any]], **options: Any) -> Algorithm[Any]:
    """An algorithm with less local training, if it has any."""
    return cls(**({"local": SHORT} if hasattr(cls(), "local") else {}), **options)


GOOD: dict[str, Algorithm[Any]] = {
    **{name: short(cls) for name, cls in ALGORITHMS.items()},
    "decavg uniform": short(DecAvg, weights="uniform"),
    "decavg metropolis": short(DecAvg, weights="metropolis"),
    "decavg adamw": DecAvg(LocalSGD(steps=3, lr=0.01, optimizer="adamw", keep_optimizer=True)),
    "decavg proximal": DecAvg(LocalSGD(epochs=1, momentum=0.9, correct=Proximal(0.1))),
    "local momentum": Local(LocalSGD(epochs=1, momentum=0.9, nesterov=True, keep_optimizer=True)),
    "dechw average": short(DecHW, theta=2),
    "dechw frozen": short(DecHW, theta=1, after_stop="frozen"),
    "dechw ema": short(DecHW, accumulate="ema", beta=0.5),
    "dechw none": short(DecHW, accumulate="none", beta=0.3),
    "dechw raw": short(DecHW, normalise="none"),
    "dechw sample": short(DecHW, curvature="sample"),
    "dechw full": short(DecHW, curvature="full"),
    "dechw others": short(DecHW, include_self=False),
    "dechw online": short(DecHW, curvature="online"),
    "dechw trace": short(DecHW, trace=3),
    "dechw output": short(DecHW, scope="output"),
    "fedavg chosen": short(FedAvg, clients=3),
    "fedcurv chosen": short(FedCurv, clients=3, curvature="batch"),
    "hwa all": short(HWA, scope="all"),
    "hwa named": short(HWA, scope="head", curvature="sample"),
    "cfa careful": short(CFA, epsilon=0.3),
    "cfa degree": short(CFA, epsilon=-1.0),
    "decdiff model": short(DecDiff, granularity="model", weights="uniform"),
    "decavg virtual teacher": DecAvg(LocalSGD(loss=VirtualTeacher(share=0.5))),
    # The default is of the size of the experiments: most of a second for every node.
    "desa": DESA(ipc=2, iterations=3),
    "desa mean": DESA(LocalSGD(steps=3, correct=Proximal(0.1)), 1, 2, kl_reduction="mean"),
    "dpsgd metropolis": short(DPSGD, weights="metropolis"),
    "el local": short(EL, mode="local", sends=2),
    "deprl steps": short(DePRL, core_steps=1, weights="metropolis", final_mean=False),
    # With fewer peers than others, and a mean at the end.
    "dac some": short(DAC, peers=2, two_hop=False, weights="data", examples=3, final_mean=True),
    "facade one head": short(Facade, k=1),
    "facade tied": short(Facade, warmup=3),
    "facade warm-up": Facade(LocalSGD(steps=3), k=3, warmup=1, choice_batches=1),
    "facade eq. 4": Facade(LocalSGD(steps=3), 3, own_head="if_selected", eval_head="last"),
    "facade code": Facade(
        LocalSGD(steps=3, batch_size=4),
        choice_batches=1,
        choice_samples="different",
        test_choice_batches=2,
        eval_head="test",
    ),
    "facade curvature": short(Facade, core_weights="curvature"),
    "ifca one model": short(IFCA, k=1, weights="data"),
    "ifca shared": short(IFCA, k=3, shared_core=True, restart=1, examples=3),
    "ifca chosen": short(IFCA, clients=3),
    "dfml": short(DFML, epochs_mutual=3),  # as with `SHORT`
    "dfml walk": DFML(ONE_EPOCH, aggregator="walk", senders=1, epochs_mutual=2, cycle="full"),
    "dfml fixed": DFML(ONE_EPOCH, aggregator="fixed", alpha_min=0.5, alpha_max=0.5),
    "dfml vanilla": short(DFML, epochs_mutual=3, teacher="vanilla", kl_weights="uniform"),
    "dfml wsl": short(DFML, epochs_mutual=3, balance="wsl"),
    "dfml anl-kd": short(DFML, epochs_mutual=3, balance="anl-kd"),
    "dfml-neighbours": short(DFMLNeighbours, epochs_mutual=2),
    "dfml-neighbours own": short(DFMLNeighbours, epochs_mutual=2, keep="own"),
    "def-kt": short(DefKT, epochs_mutual=3),
    "def-kt one pair": short(DefKT, epochs_mutual=3, pairs=1, kl_weight=0.3),
    "dec-fedrolex sorted": short(DecFedRolex, direction="code", indices="sorted"),
    "dec-fml meme": short(DecFML, meme="mlp:hidden=3", weights="data"),
}
# Nobody is without neighbours where there is a hub.
HUBS = {(name, "isolated") for name, algorithm in GOOD.items() if algorithm.with_hub}
PARTICIPANTS = [
    name for name, algorithm in GOOD.items() if isinstance(algorithm, RotatingHub | DefKT)
]
EXCEPTIONS = HUBS | {
    # Newton's method has no learning rate that could be zero.
    ("fednl", "consensus"),
    # Which clients are chosen depends on how they are numbered.
    ("fedavg chosen", "relabelling"),
    ("fedcurv chosen", "relabelling"),
    # It trains with another loss than its work order says.
    ("decdiff-vt", "isolated"),
    # Anchors come from all nodes, not only from neighbours.
    ("desa", "isolated"),
    ("desa mean", "isolated"),
    # A node draws the noise that its synthetic examples start from.
    ("desa", "relabelling"),
    ("desa mean", "relabelling"),
    # Nodes draw others among all, not among neighbours, and by their private streams.
    ("el local", "isolated"),
    ("el local", "relabelling"),
    ("dac", "isolated"),
    ("dac some", "isolated"),
    ("dac some", "relabelling"),
    # A batch from the endless stream contains some examples twice, in the node's own order.
    ("deprl steps", "relabelling"),
    # The head and the core are trained in turn, and logistic regression has no core.
    ("deprl", "isolated"),
    ("deprl steps", "isolated"),
    ("deprl", "convex"),
    ("deprl steps", "convex"),
    # Several heads start different from that of the node's initial model.
    ("facade", "consensus"),
    ("facade", "isolated"),
    ("facade eq. 4", "consensus"),
    ("facade eq. 4", "isolated"),
    ("facade code", "consensus"),
    ("facade code", "isolated"),
    ("facade curvature", "consensus"),
    ("facade curvature", "isolated"),
    # Nodes choose at random between heads that were tied.
    ("facade warm-up", "relabelling"),
    # Several models start different from the initial model of a client.
    ("ifca", "consensus"),
    ("ifca shared", "consensus"),
    ("ifca chosen", "consensus"),
    ("ifca chosen", "relabelling"),
    # Clients draw the examples that models are tried on by their private streams.
    ("ifca shared", "relabelling"),
    # Only the participants of a round train, and the public coin draws them by their numbers.
    *((name, law) for name in PARTICIPANTS for law in ("isolated", "relabelling")),
    # Logistic regression has a head and no core.
    *((name, "convex") for name in GOOD if name.startswith("facade")),
    ("ifca shared", "convex"),
}


@pytest.fixture(autouse=True)
def no_cache(monkeypatch):
    """Nothing is cached: else one engine would use the results of another."""
    monkeypatch.setenv("PEERAGE_DATA", str(Path(__file__) / "folder"))  # of a file: never possible


POOLED = ("engines", "resuming", "architectures", "directed", "lost-messages", "clusters")
COMPARED = ("engines", "clusters")  # laws that no algorithm can break with a single engine


def marked(law: str, *values: Any) -> Any:
    """The parameters of a test of this law; some laws start the processes of a pool."""
    marks = [pytest.mark.slow] if law in POOLED else []
    if values and law in COMPARED:
        marks.append(pytest.mark.own_engine)
    return pytest.param(law, *values, marks=marks)


# Fast tests check each algorithm; all tests check their variants as well.
NAMES = [
    name if name in ALGORITHMS else pytest.param(name, marks=pytest.mark.slow) for name in GOOD
]


@pytest.mark.parametrize("law", [marked(law) for law in LAWS])
@pytest.mark.parametrize("name", NAMES)
def test_laws_hold(name, law):
    if (name, law) in EXCEPTIONS:
        with pytest.raises(AssertionError):
            check_law(law, GOOD[name])
    else:
        check_law(law, GOOD[name])


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_run_that_was_stopped_goes_on_without_a_pool(name, tmp_path):
    """The law about resuming in one process, so that fast tests know checkpoints as well."""
    experiment = toy(GOOD[name], rounds=4)
    with pytest.raises(Stopped):
        run(experiment, tmp_path / "run", checkpoint_every=2, watch=stop_in_round_three)
    resumed = resume(tmp_path / "run", experiment=experiment, engine={"name": "serial"})
    assert resumed.digest == run(experiment).digest


# Algorithms that break a law


@dataclass(frozen=True)
class TooMuch(Algorithm[None]):
    """Weights that add up to more than one."""

    local: LocalSGD = LocalSGD()

    async def round(self, node: Node[None]) -> None:
        await node.train(self.local)
        inbox = await node.exchange(x=node.params)
        node.params = weighted_mean(inbox["x"], [1.01 / len(inbox)] * len(inbox))


@dataclass(frozen=True)
class LostAlone(Algorithm[None]):
    """Takes the mean of its neighbours, which is undefined without any."""

    local: LocalSGD = LocalSGD()

    async def round(self, node: Node[None]) -> None:
        await node.train(self.local)
        inbox = (await node.exchange(x=node.params)).others()
        node.params = sum(inbox["x"], torch.zeros_like(node.params)) / max(len(inbox), 1)


@dataclass(frozen=True)
class FirstWins(Algorithm[None]):
    """Copies the node with the lowest number."""

    local: LocalSGD = LocalSGD()

    async def round(self, node: Node[None]) -> None:
        await node.train(self.local)
        node.params = (await node.exchange(x=node.params))["x"][0]


BOARD: dict[int, Tensor] = {}


@dataclass(frozen=True)
class Notice(Algorithm[None]):
    """Talks past the engine, through memory that only nodes of one process share."""

    local: LocalSGD = LocalSGD()

    async def round(self, node: Node[None]) -> None:
        await node.train(self.local)
        BOARD[node.id] = node.params
        near = [BOARD.get(peer, node.params) for peer in node.neighbours]
        node.params = weighted_mean([node.params, *near], uniform_weights(len(near) + 1))


@dataclass(frozen=True)
class Forgetful(Algorithm[None]):
    """Remembers something outside its state, where no checkpoint looks."""

    local: LocalSGD = LocalSGD()

    async def round(self, node: Node[None]) -> None:
        await node.train(self.local)
        before = getattr(node, "before", node.params)
        node.before = node.params
        node.params = (node.params + before) / 2


@dataclass(frozen=True)
class Unsaveable(Algorithm[set[int]]):
    """Keeps a state that no checkpoint can hold."""

    local: LocalSGD = LocalSGD()

    def init(self, node: Node[set[int]]) -> set[int]:
        return set()

    async def round(self, node: Node[set[int]]) -> None:
        await node.train(self.local)


@dataclass(frozen=True)
class AssumesAllMessages(Algorithm[None]):
    """Assumes that a message of every neighbour arrives."""

    local: LocalSGD = LocalSGD()

    async def round(self, node: Node[None]) -> None:
        await node.train(self.local)
        inbox = await node.exchange(x=node.params)
        models = [inbox["x"][i] for i in range(len(node.neighbours) + 1)]
        node.params = weighted_mean(models, uniform_weights(len(models)))


@dataclass(frozen=True)
class DividesByNothing(Algorithm[None]):
    """Moves towards the mean of the others, also when there are none."""

    local: LocalSGD = LocalSGD()

    async def round(self, node: Node[None]) -> None:
        await node.train(self.local)
        inbox = (await node.exchange(x=node.params)).others()
        mean = sum(inbox["x"], torch.zeros_like(node.params)) / torch.tensor(float(len(inbox)))
        node.params = (node.params + mean) / 2


@dataclass(frozen=True)
class Idle(Algorithm[None]):
    """Averages and never trains."""

    async def round(self, node: Node[None]) -> None:
        inbox = await node.exchange(x=node.params)
        node.params = weighted_mean(inbox["x"], inbox.uniform_weights())


@dataclass(frozen=True)
class Uphill(Algorithm[None]):
    """Takes every step in the wrong direction."""

    local: LocalSGD = LocalSGD()

    async def round(self, node: Node[None]) -> None:
        start = node.params
        await node.train(self.local)
        node.params = 2 * start - node.params


@dataclass(frozen=True)
class SharedMean(Algorithm[None]):
    """Changes a tensor in place that nodes share if they receive the same: not on a ring."""

    local: LocalSGD = LocalSGD()

    async def round(self, node: Node[None]) -> None:
        await node.train(self.local)
        inbox = await node.exchange(x=node.params)
        mean = inbox.mean("x", inbox.uniform_weights())
        node.params = node.mean_cache.setdefault(f"mean of {inbox.senders}", (None, mean))[1]
        node.params *= 0.9


@dataclass(frozen=True)
class InPlace(Algorithm[None]):
    """Changes what it has just sent."""

    local: LocalSGD = LocalSGD()

    async def round(self, node: Node[None]) -> None:
        await node.train(self.local)
        await node.exchange(x=node.params)
        node.params += 1.0


@dataclass(frozen=True)
class InPlaceLater(Algorithm[None]):
    """Changes what it sent in the round before."""

    local: LocalSGD = LocalSGD()

    async def round(self, node: Node[None]) -> None:
        node.params *= 0.5
        await node.train(self.local)
        await node.exchange(x=node.params)


@dataclass(frozen=True)
class InSecret(Algorithm[None]):
    """Changes what it has sent behind torch's back."""

    local: LocalSGD = LocalSGD()

    async def round(self, node: Node[None]) -> None:
        await node.train(self.local)
        inbox = await node.exchange(x=node.params)
        inbox.others()["x"][0].numpy()[0] = 7.0


@dataclass
class Thawed(Algorithm[None]):
    """Can be changed."""

    factor: float = 1.0


@dataclass(frozen=True)
class WithList(Local):
    """Holds a value that has no hash."""

    factors: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class WithFunction(Local):
    """Holds a value that no file can hold."""

    scale: Callable[[float], float] = abs


@dataclass(frozen=True)
class WithAnything(Local):
    """Comes back from a file with a list, because the type of the field does not say tuple."""

    sizes: Any = (1, 2)


@dataclass(frozen=True)
class Doubling(Local):
    """Does not keep the value that it is given."""

    factor: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "factor", 2 * self.factor)


@dataclass(frozen=True)
class Shouting(Algorithm[None]):
    """Sends what no node reads."""

    local: LocalSGD = LocalSGD()

    async def round(self, node: Node[None]) -> None:
        await node.train(self.local)
        await node.exchange(x=node.params)
        await node.send(node.neighbours, x=node.params)


@dataclass(frozen=True)
class Whispering(Algorithm[None]):
    """Sends something that it has not declared."""

    local: LocalSGD = LocalSGD()

    async def round(self, node: Node[None]) -> None:
        await node.train(self.local)
        await node.exchange(secret=node.params)


@dataclass(frozen=True)
class Abridging(Algorithm[None]):
    """Sends half of what it has declared."""

    local: LocalSGD = LocalSGD()

    async def round(self, node: Node[None]) -> None:
        await node.train(self.local)
        await node.exchange(x=node.params[: len(node.params) // 2])


@dataclass(frozen=True)
class BothWays(Algorithm[None]):
    """Sends to those from which it receives, who may not be waiting for it."""

    local: LocalSGD = LocalSGD()

    async def round(self, node: Node[None]) -> None:
        await node.train(self.local)
        await node.exchange(to=node.neighbours, x=node.params)


BROKEN = [
    ("consensus", TooMuch(), "changed the model that all nodes share"),
    ("isolated", LostAlone(), "differs from local training"),
    ("relabelling", FirstWins(), "has a different final model as node"),
    ("engines", Notice(), "serial gives"),
    ("engines", SharedMean(), "on a complete graph"),
    ("architectures", FirstWins(), "its model needs"),
    ("directed", BothWays(), "wait for messages that no node will send"),
    ("lost-messages", AssumesAllMessages(), "IndexError"),
    ("clusters", Notice(), "serial gives"),
    ("resuming", Forgetful(), "uninterrupted"),
    ("resuming", Unsaveable(), "CheckpointError: a state of type set cannot be saved"),
    ("short-inbox", AssumesAllMessages(), "IndexError"),
    ("short-inbox", DividesByNothing(), "Diverged"),
    ("convex", Idle(), "the loss went from"),
    ("convex", Uphill(), "the loss went from"),
    ("unchanged", InPlace(), "in place after sending it"),
    ("unchanged", InPlaceLater(), "changed after it had been sent"),
    ("unchanged", InSecret(), "changed after it had been sent"),
    ("value", Thawed(), "not a frozen dataclass"),
    ("value", WithList(), "unhashable"),
    ("value", WithFunction(), "which a file cannot hold"),
    ("value", WithAnything(), "which a file cannot hold"),
    ("value", Doubling(), "a copy with the same values is not equal"),
    ("traffic", Shouting(), "were received"),
    ("declared", Whispering(), "sends a tensor 'secret', which it does not declare"),
    ("declared", Abridging(), "'x' is torch.float32 of shape (33,)"),
]


@pytest.mark.parametrize(
    ("law", "algorithm", "reason"),
    [marked(*broken) for broken in BROKEN],
    ids=[f"{law}-{type(a).__name__}" for law, a, _ in BROKEN],
)
def test_laws_can_fail(law, algorithm, reason):
    with pytest.raises(AssertionError) as caught:
        check_law(law, algorithm)
    assert f"{algorithm!r} breaks the law {law!r}: " in str(caught.value)
    assert reason in str(caught.value)


def test_a_registered_algorithm_must_come_back_from_a_file_as_it_was(monkeypatch):
    monkeypatch.setitem(ALGORITHMS, "anything", WithAnything)
    with pytest.raises(AssertionError, match=r"sizes=\(1, 2\) comes back .* as \[1, 2\]"):
        check_law("value", WithAnything())


def test_every_law_is_known_to_fail():
    assert {law for law, _, _ in BROKEN} == set(LAWS)


# The door for algorithms kept elsewhere


def test_check_algorithm_names_the_first_broken_law():
    with pytest.raises(AssertionError, match=r"^TooMuch\(.*\) breaks the law 'consensus': "):
        check_algorithm(TooMuch())


@pytest.mark.slow
def test_check_algorithm_leaves_out_declared_exceptions():
    check_algorithm(FirstWins(), exceptions=["relabelling", "architectures"])
    with pytest.raises(AssertionError, match="breaks the law 'relabelling'"):
        check_algorithm(FirstWins())


def test_check_algorithm_rejects_unknown_exceptions():
    with pytest.raises(InputError, match="unknown law 'relabeling'; did you mean"):
        check_algorithm(DecAvg(), exceptions=["relabeling"])


OUTSIDE = """
from dataclasses import dataclass

from peerage import Algorithm, LocalSGD
from peerage.aggregation import weighted_mean


@dataclass(frozen=True)
class Lazy(Algorithm[float]):
    local: LocalSGD = LocalSGD(epochs=1)
    share: float = 0.5
    names: tuple[str, ...] = ("x",)

    def init(self, node):
        return float("inf")

    async def round(self, node):
        stats = await node.train(self.local)
        node.state = min(node.state, stats.loss)
        inbox = (await node.exchange(x=node.params)).alike(node.architecture)
        mean = weighted_mean(inbox["x"], inbox.uniform_weights())
        node.params = (1 - self.share) * node.params + self.share * mean
"""


@pytest.mark.slow
def test_an_algorithm_in_a_module_of_its_own_keeps_all_laws(tmp_path, monkeypatch):
    (tmp_path / "lazy_gossip.py").write_text(OUTSIDE)
    monkeypatch.syspath_prepend(tmp_path)
    algorithm = importlib.import_module("lazy_gossip").Lazy(share=0.25, names=("x", "y"))
    check_algorithm(algorithm)
