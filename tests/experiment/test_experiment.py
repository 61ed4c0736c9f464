"""An experiment survives its file, flags override files, and Python objects are marked."""

import hashlib
import json
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.command_line import TINY, error_line, peerage
from support.strategies import members
from torch import Tensor, nn

import peerage as pg
from peerage.algorithms import ALGORITHMS
from peerage.cli.flags import FLAGS
from peerage.data.datasets import DATASETS
from peerage.data.partition import PARTITIONS, Iid
from peerage.engine.fitting import check_widths
from peerage.errors import InputError, Interrupted
from peerage.experiment.catalogue import recipes
from peerage.experiment.experiment import HUB, display_name
from peerage.experiment.identity import identity, run_key
from peerage.experiment.toml import merged
from peerage.experiment.until import STOP_METRICS, StopCondition
from peerage.graphs.gains import GAINS, ManualGain
from peerage.graphs.topology import TOPOLOGIES, ErdosRenyi, FromGraph, Ring
from peerage.models import MODELS
from peerage.models.dfml_cnn import DfmlCNN
from peerage.models.mlp import MLP, Logistic
from peerage.models.start import Architecture
from peerage.net.peer.network import Member, Network, differing
from peerage.privacy import Noise
from peerage.records.environment import environment
from peerage.runs import comparison
from peerage.runs import run as running
from peerage.runs.verify import OF_ENGINE
from peerage.work.losses import CORRECTIONS, LOSSES
from peerage.work.training import LocalSGD


def any_of(family: Any) -> st.SearchStrategy[Any]:
    return st.one_of([members(cls) for cls in family.values()])


@st.composite
def works(draw: st.DrawFn) -> pg.LocalSGD:
    """Any valid work order."""
    length = draw(st.sampled_from(["epochs", "steps"]))
    optimizer = draw(st.sampled_from(["sgd", "adamw"]))
    momentum = draw(st.floats(0, 0.99)) if optimizer == "sgd" else 0.0
    return pg.LocalSGD(
        **{length: draw(st.integers(1, 9))},
        batch_size=draw(st.integers(1, 99)),
        batch_of_one=draw(st.sampled_from([None, "keep", "merge", "drop"])),
        lr=draw(st.floats(0, 10)),
        momentum=momentum,
        weight_decay=draw(st.floats(0, 1)),
        nesterov=momentum > 0 and draw(st.booleans()),
        optimizer=optimizer,
        keep_optimizer=draw(st.booleans()),
        loss=draw(any_of(LOSSES)),
        correct=draw(st.none() | any_of(CORRECTIONS)),
    )


@st.composite
def mixes(draw: st.DrawFn, algorithm: pg.Algorithm[Any]) -> tuple[Any, ...]:
    """The models of an experiment, which not every algorithm can combine."""
    if algorithm.width_scaled:
        widths = draw(st.lists(st.integers(1, 64), max_size=3))
        return tuple(DfmlCNN((width, 2 * width)) for width in widths)
    alike = algorithm.with_hub or isinstance(algorithm, pg.DefKT)
    return tuple(draw(st.lists(any_of(MODELS), max_size=1 if alike else 3)))


MUTUAL = pg.DFML | pg.DFMLNeighbours | pg.DefKT | pg.DecFML


@st.composite
def experiments(draw: st.DrawFn) -> pg.Experiment:
    """Any valid experiment that names no file of this machine and no Python object."""
    algorithm, local = draw(any_of(ALGORITHMS)), draw(st.none() | works())
    validation = draw(st.floats(0, 0.99))
    if local and isinstance(algorithm, pg.DecDiffVT | pg.DESA):  # bring their own loss
        local = replace(local, loss=pg.CrossEntropy())
    if local and isinstance(algorithm, pg.FedProx | pg.FedCurv):  # bring their own correction
        local = replace(local, correct=None)
    if local and isinstance(algorithm, pg.DePRL):  # trains parts of a model in turn
        local = replace(local, keep_optimizer=False)
    if local and isinstance(algorithm, MUTUAL):  # trains several models at once
        local = replace(local, keep_optimizer=False, correct=None)
    if local and isinstance(algorithm, pg.DecFedProx):  # brings its own correction
        local = replace(local, correct=None)
    if not hasattr(algorithm, "local"):
        local = None
    hub = algorithm.with_hub
    if local and local.epochs and validation and not isinstance(algorithm, MUTUAL):
        local = replace(local, early_stop=draw(st.sampled_from(["none", "rollback"])))
    measured = [name for name in STOP_METRICS if validation or not name.startswith("validation")]
    numbers = st.floats(0, 1, exclude_min=True)
    return pg.Experiment(
        algorithm=algorithm,
        dataset=draw(any_of(DATASETS)),
        model=draw(mixes(algorithm)),
        nodes=draw(st.integers(getattr(algorithm, "clients", None) or 1, 10**6)),
        topology=HUB if hub else draw(any_of(TOPOLOGIES)),
        partition=draw(any_of(PARTITIONS)),
        rounds=draw(st.integers(1, 10**6)),
        until=draw(st.none() | st.builds(StopCondition, st.sampled_from(measured), numbers)),
        local=local,
        init={
            "start": draw(st.sampled_from(["shared", "independent"])),
            "scheme": draw(st.sampled_from(["torch", "he"])),
            "gain": draw(any_of(GAINS)),
        },
        noise=draw(st.builds(Noise, st.floats(0, 9), st.none() | st.floats(0.1, 9))),
        evaluation={
            "every": draw(st.integers(1, 99)),
            "samples": draw(st.none() | st.integers(1, 99)),
            "at": draw(st.sampled_from(["exchange", "end"])),
            "validation": validation,
        },
        engine={
            "name": draw(st.sampled_from(["serial", "pool"])),
            "workers": draw(st.none() | st.integers(1, 99)),
        },
        seed=draw(st.integers(0, 2**70)),
    )


@pytest.mark.slow
@settings(deadline=None, max_examples=100)
@given(experiments())
def test_an_experiment_comes_back_from_its_file(experiment: pg.Experiment) -> None:
    text = experiment.to_toml()
    again = pg.Experiment.from_toml(text)
    assert again == experiment
    assert again.to_toml() == text
    assert tomllib.loads(text) == experiment.table()


@pytest.mark.slow
@settings(deadline=None, max_examples=20)
@given(mixes(pg.DecHeteroFL()))
def test_random_experiments_have_models_that_their_algorithm_accepts(models: Any) -> None:
    builders = [partial(model.build, (3, 8, 8), 10) for model in models]
    check_widths([Architecture(str(i), build) for i, build in enumerate(builders)])


@pytest.mark.parametrize("name", list(recipes()))
def test_every_recipe_is_an_experiment(name: str) -> None:
    experiment = pg.Experiment.from_toml(recipes()[name].read_text())
    assert pg.Experiment.from_toml(experiment.to_toml()) == experiment
    assert experiment.algorithm.local == experiment.local


@pytest.mark.parametrize("name", ["mnist", "fashion", "cifar"])
def test_the_recipes_of_the_released_code_differ_as_they_state(name: str) -> None:
    paper, code = (
        pg.Experiment.from_toml(recipes()[f"p0-{name}{kind}"].read_text()).table()
        for kind in ("", "-code")
    )
    model = {"mnist": {"dropout": True}, "fashion": {"relu": "first"}, "cifar": {}}[name]
    assert code == {
        **paper,
        "algorithm": paper["algorithm"]
        | {"accumulate": "ema", "normalise": "none", "include_self": False, "weights": "uniform"},
        "topology": {"name": "ba", "m": 5},
        "model": paper["model"] | model,
        "local": paper["local"] | {"early_stop": "rollback"},
        "evaluation": paper["evaluation"] | {"validation": 0.2},
    }
    assert code["algorithm"]["beta"] == 1.0


def test_text_table_and_object_are_the_same() -> None:
    text = pg.Experiment(
        algorithm="dechw:theta=3",
        dataset="digits",
        model="mlp:hidden=8",
        topology="er:p=0.5",
        partition="iid",
        local={"lr": 0.1, "correct": "proximal:mu=0.5"},
        init={"gain": "manual:g=2"},
    )
    table = pg.Experiment(
        algorithm={"name": "dechw", "theta": 3},
        dataset={"name": "digits"},
        model={"name": "mlp", "hidden": "8"},
        topology={"name": "er", "p": 0.5},
        partition={"name": "iid"},
        local={"lr": 0.1, "correct": {"name": "proximal", "mu": 0.5}},
        init={"gain": {"name": "manual", "g": 2}},
    )
    value = pg.Experiment(
        algorithm=pg.DecHW(theta=3),
        model=MLP(hidden="8"),
        topology=ErdosRenyi(p=0.5),
        partition=Iid(),
        local=pg.LocalSGD(lr=0.1, correct=pg.Proximal(mu=0.5)),
        init=pg.Init(gain=ManualGain(g=2.0)),
    )
    assert text == table == value


def test_the_section_counts_and_not_what_the_algorithm_brings() -> None:
    own = pg.DecHW(local=pg.LocalSGD(lr=0.5))
    assert pg.Experiment(algorithm=own).local == pg.LocalSGD(lr=0.5)
    changed = pg.Experiment(algorithm=own, local=pg.LocalSGD(lr=0.1))
    assert changed.algorithm.local == changed.local == pg.LocalSGD(lr=0.1)


def test_single_keys_of_local_change_what_the_algorithm_brings() -> None:
    brought = pg.DecAvg(local=pg.LocalSGD(steps=7, batch_size=9, lr=0.3))
    changed = pg.Experiment(algorithm=brought, local={"lr": 0.1})
    assert changed.local == pg.LocalSGD(steps=7, batch_size=9, lr=0.1)
    assert changed.algorithm.local == changed.local
    epochs = pg.Experiment(algorithm=brought, local={"epochs": 2})
    assert epochs.local == pg.LocalSGD(epochs=2, batch_size=9, lr=0.3)


def test_an_algorithm_may_bring_its_kind_of_start() -> None:
    assert pg.Experiment(algorithm="decavg").init.start == "independent"
    assert pg.Experiment(algorithm="dfml").init.start == "shared"
    scaled = pg.Experiment(algorithm="dfml", init={"gain": "sqrt"})
    assert scaled.init == pg.Init(start="shared", gain="sqrt")
    assert pg.Experiment(algorithm="dfml", init=pg.Init(gain="sqrt")).init == scaled.init
    for own in ({"start": "independent"}, pg.Init(start="independent")):
        assert pg.Experiment(algorithm="dfml", init=own).init.start == "independent"


def test_nothing_is_set_after_an_experiment_is_built() -> None:
    brought = pg.DecAvg(local=pg.LocalSGD(lr=0.3))
    experiment = pg.Experiment(algorithm=brought, local={"momentum": 0.5})
    assert experiment.work is experiment.local
    assert experiment.local is experiment.algorithm.local
    assert brought.local == pg.LocalSGD(lr=0.3)
    again = pg.Experiment(
        **{name: getattr(experiment, name) for name in pg.Experiment.model_fields}
    )
    assert again == experiment
    with pytest.raises(InputError, match="local must be a LocalSGD or a table, got 5"):
        pg.Experiment(algorithm=brought, local=5)


def test_numbers_of_numpy_can_be_written() -> None:
    topology = ErdosRenyi(p=np.float64(0.1) + np.float64(0.2))
    experiment = pg.Experiment(topology=topology, nodes=np.int64(7), seed=np.int32(3))
    again = pg.Experiment.from_toml(experiment.to_toml())
    assert (again.topology.p, again.nodes, again.seed) == (0.1 + 0.2, 7, 3)


# Until


@pytest.mark.parametrize("text", ["accuracy=0.469", "accuracy = 0.469", " accuracy= 46.9e-2 "])
def test_until_is_a_metric_and_a_number(text: str) -> None:
    experiment = pg.Experiment(until=text)
    assert experiment.until == StopCondition("accuracy", 0.469)
    assert experiment == pg.Experiment(until=StopCondition("accuracy", 0.469))
    assert experiment.table()["until"] == "accuracy=0.469"
    assert pg.Experiment.from_toml(f"until = '{text}'") == experiment
    assert "until" not in pg.Experiment().table()


@pytest.mark.parametrize(
    ("metric", "short", "there", "beyond"),
    [
        ("accuracy", 0.49, 0.5, 0.51),
        ("accuracy_min", 0.49, 0.5, 0.51),
        ("validation_accuracy", 0.49, 0.5, 0.51),
        ("loss", 0.51, 0.5, 0.49),
        ("validation_loss", 0.51, 0.5, 0.49),
        ("train_loss", 0.51, 0.5, 0.49),
        ("consensus", 0.51, 0.5, 0.49),
    ],
)
def test_accuracies_rise_to_the_target_and_losses_fall(
    metric: str, short: float, there: float, beyond: float
) -> None:
    until = StopCondition(metric, 0.5)
    assert not until.reached({metric: short})
    assert until.reached({metric: there})
    assert until.reached({metric: beyond})
    assert not until.reached({metric: None})
    assert not until.reached({"round": 3})
    assert not until.reached({metric: float("nan")})


@pytest.mark.parametrize(
    ("until", "message"),
    [
        ("acuracy=0.9", "until 'acuracy=0.9' does not start with a known metric; did"),
        ("acuracy=0.9", "did you mean 'accuracy'?"),
        ("alpha=0.9", "for another number of the records, write a comparison such as alpha>=0.9"),
        (">=0.9", "does not start with a known metric"),
        ("alpha>=much", "until 'alpha>=much' has no number for alpha"),
        ("models.a.accuracy=2", "cannot be reached; accuracy lies between 0 and 1"),
        ("models.a.validation_loss=2", "needs held-out examples; add --validation 0.2"),
        ("0.9", "does not start with a known metric; known: accuracy, accuracy_min"),
        ("accuracy", "until 'accuracy' has no number for accuracy; write accuracy=0.9"),
        ("accuracy=90", "until accuracy=90.0 cannot be reached; accuracy lies between 0 and 1"),
        ("loss=low", "until 'loss=low' has no number for loss; write loss=0.9"),
        ("loss=nan", "until 'loss=nan' has no number for loss; write loss=0.9"),
        ("loss=-inf", "until 'loss=-inf' has no number for loss; write loss=0.9"),
        ("validation_loss=0.3", "needs held-out examples; add --validation 0.2"),
    ],
)
def test_an_impossible_stop_condition_is_rejected(until: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        pg.Experiment(until=until)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "written", "reached", "short"),
    [
        ("accuracy >= 0.5", "accuracy=0.5", {"accuracy": 0.6}, {"accuracy": 0.4}),
        ("accuracy<=0.5", "accuracy<=0.5", {"accuracy": 0.4}, {"accuracy": 0.6}),
        ("bytes_total>=10", "bytes_total>=10.0", {"bytes_total": 10}, {"bytes_total": 9}),
        (
            "models.a.loss=0.5",
            "models.a.loss=0.5",
            {"models": {"a": {"loss": 0.4}}},
            {"models": {"a": {"loss": 0.6}}},
        ),
    ],
)
def test_until_may_compare_any_number(
    text: str, written: str, reached: dict[str, Any], short: dict[str, Any]
) -> None:
    experiment = pg.Experiment(until=text)
    until = experiment.until
    assert until is not None
    assert experiment.table()["until"] == written
    assert pg.Experiment.from_toml(experiment.to_toml()) == experiment
    assert until.reached({"round": 1, **reached})
    assert not until.reached({"round": 1, **short})


def test_until_takes_the_mean_of_a_note_and_names_what_is_known() -> None:
    until = StopCondition("alpha", 0.5, ">=")
    nodes = [{"notes": {"alpha": value}} for value in (0.4, 0.7, None)]
    assert until.reached({"round": 1}, nodes)
    assert not until.reached({"round": 1}, nodes[:1])
    assert not until.reached({"round": 1}, nodes[2:])  # a note that is not finite
    until.check_recorded([*nodes, {"round": 1}])
    message = "that no round up to 1 has recorded; did you mean 'alpha'? known: alpha, loss, round"
    with pytest.raises(InputError) as caught:
        StopCondition("alhpa", 0.5, ">=").check_recorded([*nodes, {"round": 1, "loss": 2.0}])
    assert message in str(caught.value)


def test_the_time_of_evaluation_is_written_as_always() -> None:
    plain = pg.Experiment(algorithm="decavg")
    assert plain == pg.Experiment(algorithm="decavg", evaluation=pg.Evaluation(at="exchange"))
    assert 'at = "exchange"' in plain.to_toml()
    assert run_key(plain)["evaluation"] == {}
    late = pg.Experiment(algorithm="decavg", evaluation={"at": "after-aggregation"})
    assert late == pg.Experiment(algorithm="decavg", evaluation={"at": "end"})
    assert run_key(late)["evaluation"] == {"at": "end"}


def test_until_may_ask_for_validation_where_examples_are_held_out() -> None:
    experiment = pg.Experiment(until="validation_loss=0.3", evaluation={"validation": 0.1})
    assert experiment.until == StopCondition("validation_loss", 0.3)


# Keys that do not exist, and values that cannot be


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rouns = 3", "experiment has no key 'rouns'; did you mean 'rounds'? known: algorithm,"),
        ("[init]\nstrat = 1", "init has no key 'strat'; did you mean 'start'?"),
        ("[evaluation]\nevry = 1", "evaluation has no key 'evry'; did you mean 'every'?"),
        ("[engine]\nworker = 1", "engine has no key 'worker'; did you mean 'workers'?"),
        ("[local]\nlos = 1", "local has no key 'los'; did you mean 'loss'?"),
        ("[local]\nbatchsize = 1", "local has no key 'batchsize'; did you mean 'batch_size'?"),
        ("[algorithm]\nname = 'dechw'\nbeat = 1", "'dechw' has no option 'beat'; did you mean 'be"),
        ("[topology]\nname = 'er'\npp = 1", "topology 'er' has no option 'pp'; did you mean 'p'?"),
        ("[init.gain]\nname = 'manual'\ngg = 1", "'manual' has no option 'gg'; did you mean 'g'?"),
        ("[local.correct]\nname = 'proximal'\nmuu = 1", "'proximal' has no option 'muu'; did you"),
        ("[local.loss]\nname = 'cross-entropy'\nx = 1", "'cross-entropy' has no option 'x'; it ta"),
        ("[local.loss]\nname = 'entropy'", "unknown loss 'entropy'; did you mean 'cross-entropy'?"),
        ("[[model]]\nname = 'mlp'\nhiden = '8'", "'mlp' has no option 'hiden'; did you mean 'hid"),
        (
            "[engine]\nname = 'poll'",
            "engine: name must be one of serial, pool, ray; got 'poll', did you mean 'pool'?",
        ),
        (
            "[init]\nstart = 'same'",
            "init: start must be one of shared, independent, file; got 'same', did you mean 'share",
        ),
        ("[evaluation]\nat = 'zzz'", "evaluation: at must be one of exchange, end; got 'zzz'"),
        ("[local]\nlr = 'fast'", "local: lr cannot be 'fast': input should be a valid number"),
        ("nodes = 1.5", "nodes cannot be 1.5: input should be a valid integer"),
        ("seed = nan", "seed cannot be nan: input should be a finite number"),
        ("topology = 5", "topology cannot be 5; give a name such as 'ba', a table with a name"),
        ("dataset = [1]", "dataset cannot be [1]; give a name such as 'digits'"),
        ("model = 5", "model cannot be 5; give a name"),
        ("partition = 5", "partition cannot be 5; give a name"),
        ("algorithm = 5", "algorithm cannot be 5; give a name"),
        ("local = 5", "local must be a LocalSGD or a table, got 5"),
        ("engine = 5", "engine cannot be 5: input should be a valid dictionary"),
        ("[init]\ngain = 2", "gain cannot be 2; give a name"),
        ("[local]\nloss = 5", "loss cannot be 5; give a name"),
        ("[topology]\np = 1", "the topology table has no name; add name = one of ba, complete"),
        ("nodes = 5\nnodes = 6", "experiment is not valid TOML: Cannot overwrite a value"),
    ],
)
def test_errors_of_a_file_say_what_is_wrong(text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        pg.Experiment.from_toml(text)
    assert message in str(caught.value)


@pytest.mark.parametrize("value", [Ring, np.zeros((99, 99)), object()])
def test_an_object_that_is_no_topology_is_rejected_in_one_line(value: Any) -> None:
    with pytest.raises(InputError, match="topology cannot be") as caught:
        pg.Experiment(topology=value)
    assert "\n" not in str(caught.value)


def test_an_algorithm_is_a_dataclass() -> None:
    class Forgotten(pg.Algorithm[None]):
        pass

    with pytest.raises(InputError, match="'Forgotten' is not a dataclass; write @dataclass"):
        pg.Experiment(algorithm=Forgotten())


# Flags over files

Captured = Callable[..., pg.Experiment]

FILE = """
nodes = 6
[algorithm]
name = "dechw"
theta = 3
[topology]
name = "er"
p = 0.5
[[model]]
name = "logistic"
[[model]]
name = "mlp"
[local]
steps = 7
batch_size = 9
loss = { name = "cross-entropy" }
correct = { name = "proximal", mu = 0.5 }
[init]
start = "shared"
scheme = "he"
gain = { name = "manual", g = 2.0 }
[evaluation]
every = 3
at = "end"
[engine]
name = "pool"
workers = 3
"""


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Captured:
    """The experiment that a command line would run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file.toml").write_text(FILE)
    seen: list[pg.Experiment] = []

    def run(experiment: pg.Experiment, *arguments: Any, **options: Any) -> None:
        seen.append(experiment)
        raise InputError("captured")

    def capture(line: str, *more: object) -> pg.Experiment:
        assert error_line(peerage(line, *more)) == "captured"
        return seen[-1]

    for module in (running, comparison):
        monkeypatch.setattr(module, "run", run)
    return capture


def test_every_flag_reaches_the_experiment(captured: Captured) -> None:
    experiment = captured(
        "run --algorithm decavg:weights=uniform --dataset mnist --model logistic --model mlp "
        "--nodes 9 --topology ring --partition iid --rounds 8 --epochs 2 --batch-size 3 "
        "--batch-of-one drop --lr 0.3 --momentum 0.4 --nesterov --weight-decay 0.1 "
        "--optimizer sgd --init shared --scheme he --loss virtual-teacher:share=0.5 "
        "--early-stop rollback --until loss=0.7 "
        "--gain sqrt --eval-every 4 --eval-samples 77 --eval-at after-aggregation "
        "--validation 0.25 --engine serial --workers 5 --seed 6"
    )
    work = pg.LocalSGD(
        epochs=2,
        batch_size=3,
        batch_of_one="drop",
        lr=0.3,
        momentum=0.4,
        nesterov=True,
        weight_decay=0.1,
        loss=pg.VirtualTeacher(share=0.5),
        early_stop="rollback",
    )
    assert experiment == pg.Experiment(
        algorithm=pg.DecAvg(work, weights="uniform"),
        dataset="mnist",
        model=(Logistic(), MLP()),
        nodes=9,
        topology="ring",
        partition="iid",
        rounds=8,
        until="loss=0.7",
        local=work,
        init=pg.Init(start="shared", scheme="he", gain="sqrt"),
        evaluation=pg.Evaluation(every=4, samples=77, at="end", validation=0.25),
        engine=pg.Engine(name="serial", workers=5),
        seed=6,
    )


def test_without_flags_a_file_counts_as_it_is(captured: Captured) -> None:
    assert captured("run file.toml") == pg.Experiment.from_toml(FILE)


def test_the_help_shows_the_defaults(captured: Captured) -> None:
    defaults = {name: str(flag.default) for name, flag in FLAGS.items() if flag.default is not None}
    shown = {name: text for name, text in defaults.items() if not text.startswith("(")}
    assert len(shown) >= 20
    assert float(shown.pop("delta")) == Noise().delta  # which needs noise to go with it
    flags = " ".join(f"--{name} {default}" for name, default in shown.items())
    experiment = captured(f"run {flags} --model digits-mlp")
    assert experiment == pg.Experiment(model="digits-mlp")


def test_without_a_file_the_defaults_count(captured: Captured) -> None:
    assert captured("run") == pg.Experiment()
    assert captured("run --rounds 3") == pg.Experiment(rounds=3)


def test_epochs_on_the_command_line_replace_the_steps_of_a_file(captured: Captured) -> None:
    work = captured("run file.toml --epochs 2").work
    assert (work.epochs, work.steps, work.batch_size) == (2, None, 9)
    assert work.correct == pg.Proximal(mu=0.5)


def test_steps_on_the_command_line_replace_the_epochs_of_a_recipe(captured: Captured) -> None:
    work = captured("run demo --steps 3").work
    assert (work.epochs, work.steps, work.momentum) == (None, 3, 0.9)


def test_a_flag_changes_one_key_of_a_section(captured: Captured) -> None:
    old = pg.Experiment.from_toml(FILE)
    assert captured("run file.toml --gain sqrt").init == old.init.model_copy(
        update={"gain": GAINS["sqrt"]()}
    )
    assert captured("run file.toml --init independent").init.gain == ManualGain(2.0)
    assert captured("run file.toml --eval-samples 5").evaluation == pg.Evaluation(
        every=3, at="end", samples=5
    )
    assert captured("run file.toml --engine pool").engine == pg.Engine(name="pool", workers=3)
    assert captured("run file.toml --workers 2").engine == pg.Engine(name="pool", workers=2)
    assert captured("run file.toml --lr 0.5").work.steps == 7


def test_a_named_value_is_replaced_as_a_whole(captured: Captured) -> None:
    assert captured("run file.toml --algorithm dechw:beta=0.5").algorithm.theta is None
    assert captured("run file.toml --algorithm decavg").algorithm.local.steps == 7
    assert captured("run file.toml --topology er:degree=3").topology == ErdosRenyi(degree=3.0)
    assert captured("run file.toml --model mlp:hidden=4").model == (MLP("4"),)


def test_compare_runs_every_algorithm_with_the_same_settings(captured: Captured) -> None:
    experiment = captured("compare file.toml --algorithms decavg:weights=uniform,dechw --seed 3")
    assert experiment == pg.Experiment.from_toml(FILE, algorithm="decavg:weights=uniform", seed=3)


def test_changes_from_python_may_be_tables() -> None:
    table = {"topology": {"name": "er", "p": 0.5}, "engine": {"name": "pool", "workers": 3}}
    changes = {"topology": {"name": "er", "degree": 3}, "engine": {"name": "serial"}, "seed": 1}
    assert merged(table, changes) == {
        "topology": {"name": "er", "degree": 3},
        "engine": {"name": "serial", "workers": 3},
        "seed": 1,
    }


# Algorithms kept outside the package

OUTSIDE = '''
from dataclasses import dataclass
from typing import Literal

from peerage import Algorithm, LocalSGD, Node
from peerage.aggregation import weighted_mean

STEP = 0.5


@dataclass(frozen=True)
class Lazy(Algorithm[None]):
    """Go a share of the way to the mean of the neighbourhood."""

    local: LocalSGD = LocalSGD()
    share: float = STEP
    kind: Literal["mean", "none"] = "mean"

    async def round(self, node: Node[None]) -> None:
        await node.train(self.local)
        inbox = await node.exchange(x=node.params)
        if self.kind == "mean":
            mean = weighted_mean(inbox["x"], inbox.weights("uniform"))
            node.params = node.params + self.share * (mean - node.params)
'''


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    path = tmp_path / "lazy.py"
    path.write_text(OUTSIDE)
    return path


def test_an_algorithm_from_a_file_has_options_like_any_other(outside: Path) -> None:
    experiment = pg.Experiment(algorithm=f"{outside}:Lazy:share=0.25,kind=none", local={"lr": 0.5})
    assert experiment.algorithm.share == 0.25
    assert experiment.algorithm.local == pg.LocalSGD(lr=0.5)
    table = experiment.table()["algorithm"]
    assert table == {"name": f"{outside}:Lazy", "share": 0.25, "kind": "none"}
    assert pg.Experiment.from_toml(experiment.to_toml()) == experiment
    with pytest.raises(InputError, match="'Lazy' has no option 'shar'; did you mean 'share'"):
        pg.Experiment(algorithm=f"{outside}:Lazy:shar=1")


def test_two_files_of_one_name_are_two_modules(tmp_path: Path) -> None:
    paths = [tmp_path / name / "json.py" for name in "ab"]  # the name of a module, too
    for path, share in zip(paths, ("0.25", "0.75"), strict=True):
        path.parent.mkdir()
        text = "from __future__ import annotations\n" + OUTSIDE.replace("= 0.5", f"= {share}")
        path.write_text(text)
    read = [pg.Experiment(algorithm=f"{path}:Lazy").algorithm.share for path in paths]
    assert read == [0.25, 0.75]


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        (OUTSIDE, "Lasy", "has no algorithm 'Lasy'; did you mean 'Lazy'? known: Lazy"),
        ("x = 1", "Lazy", "has no algorithm 'Lazy'; it defines no subclass of Algorithm"),
        ("x = ", "Lazy", "cannot be loaded: SyntaxError: invalid syntax"),
        ("import nothing_there", "Lazy", "cannot be loaded: ModuleNotFoundError: No module"),
    ],
)
def test_a_file_without_the_algorithm_says_so(
    tmp_path: Path, text: str, name: str, message: str
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(text)
    line = error_line(peerage("run --algorithm", f"{path}:{name}", "--out", tmp_path / "out"))
    assert str(path) in line
    assert message in line
    assert not (tmp_path / "out").exists()


def test_a_run_of_an_algorithm_from_a_file_is_verified_from_its_folder(
    tmp_path: Path, outside: Path
) -> None:
    folder = tmp_path / "run"
    result = pg.run(
        pg.Experiment(
            algorithm=f"{outside}:Lazy:share=0.25",
            model="logistic",
            nodes=4,
            topology="ring",
            rounds=2,
            engine={"name": "serial"},
        ),
        folder,
    )
    done = peerage("verify", folder)
    assert (done.code, result.digest in done.out) == (0, True)


def lazy_run(outside: Path, folder: Path, **options: Any) -> pg.Result:
    experiment = pg.Experiment(
        algorithm=f"{outside}:Lazy",
        model="logistic",
        nodes=4,
        topology="ring",
        rounds=4,
        engine={"name": "serial"},
    )
    return pg.run(experiment, folder, checkpoint_every=1, **options)


CHANGED = [OUTSIDE.replace("= 0.5", "= 0.9"), OUTSIDE.replace("Lazy", "Idle"), "x = "]


@pytest.mark.parametrize("text", CHANGED, ids=["another share", "another name", "broken"])
def test_verify_says_that_the_file_of_an_algorithm_was_changed(
    tmp_path: Path, outside: Path, text: str
) -> None:
    folder = tmp_path / "run"
    lazy_run(outside, folder)
    outside.write_text(text)
    message = f"{outside} has changed since this run; restore it, or run the experiment again"
    assert error_line(peerage("verify", folder)) == message
    outside.write_text(OUTSIDE)  # the one remedy
    assert peerage("verify", folder).code == 0


def test_resume_says_that_the_file_of_an_algorithm_was_changed(
    tmp_path: Path, outside: Path
) -> None:
    folder = tmp_path / "run"
    through = lazy_run(outside, tmp_path / "through")
    with pytest.raises(Interrupted):
        lazy_run(outside, folder, watch=stop_in_round_three)
    outside.write_text(CHANGED[0])
    changed = f"{outside} has changed since this run; restore it, or run"
    assert changed in error_line(peerage("resume", folder))
    with pytest.raises(InputError, match="has changed since this run"):
        pg.resume(folder, experiment=pg.Experiment(algorithm=f"{outside}:Lazy"))
    outside.write_text(OUTSIDE)
    assert pg.resume(folder).digest == through.digest


def test_a_changed_file_is_run_as_it_is_now(tmp_path: Path, outside: Path) -> None:
    before = lazy_run(outside, tmp_path / "before")
    outside.write_text(CHANGED[0])
    after = lazy_run(outside, tmp_path / "after")
    assert after.experiment.algorithm.share == 0.9
    assert after.digest != before.digest
    assert peerage("verify", tmp_path / "after").code == 0


def test_the_hash_is_of_the_file_that_was_loaded(tmp_path: Path, outside: Path) -> None:
    def change(row: dict[str, Any]) -> None:
        outside.write_text(CHANGED[0])

    lazy_run(outside, tmp_path / "run", watch=change)
    stored = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert stored["code"] == {str(outside): hashlib.sha256(OUTSIDE.encode()).hexdigest()}
    assert "has changed" in error_line(peerage("verify", tmp_path / "run"))


def test_peers_with_other_files_of_an_algorithm_do_not_agree(outside: Path) -> None:
    def shared_settings() -> dict[str, str]:
        experiment = pg.Experiment(algorithm=f"{outside}:Lazy", nodes=2)
        members = tuple(Member(f"node-{i}", f"127.0.0.1:{4000 + i}") for i in range(2))
        return Network("test", experiment, members).shared_settings

    before = shared_settings()
    outside.write_text(OUTSIDE + "# a comment\n")
    assert [line.partition(" ")[0] for line in differing(before, shared_settings())] == [
        "algorithm.name"
    ]
    outside.write_text(OUTSIDE)
    assert shared_settings() == before


def test_the_correction_of_gradients_is_part_of_what_names_a_run() -> None:
    plain, corrected = (
        pg.Experiment(model="mlp", algorithm="decavg", local=local)
        for local in ({}, {"correct": "proximal:mu=0.5"})
    )
    assert run_key(corrected) == run_key(plain) | {"correct": "proximal:mu=0.5"}


@pytest.mark.parametrize("name", ["serial", "pool"])
def test_the_engine_is_no_part_of_the_identity(name: str) -> None:
    experiment = pg.Experiment(engine={"name": name})
    assert identity(experiment) == identity(pg.Experiment())
    assert run_key(experiment) == run_key(pg.Experiment())
    assert "engine" not in identity(experiment)


def test_records_of_the_algorithms_of_the_package_name_no_file(tmp_path: Path) -> None:
    assert peerage(f"run {TINY} --rounds 1 --engine serial --out", tmp_path / "run").code == 0
    stored = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert set(stored) == set(environment())


# Python objects


class Net(nn.Module):
    """A model that no family knows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def small_net() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


@dataclass(frozen=True)
class EveryOther(pg.Algorithm[float]):
    """Average in every other round, and remember the best training loss."""

    local: LocalSGD = LocalSGD()
    second: LocalSGD = LocalSGD()  # not in a section of its own, so a file cannot hold it

    def init(self, node: pg.Node[float]) -> float:
        return float("inf")

    async def round(self, node: pg.Node[float]) -> None:
        stats = await node.train(self.second)
        node.state = min(node.state, stats.loss)
        if node.round % 2:
            inbox = await node.exchange(x=node.params)
            node.params = torch.stack(inbox["x"]).mean(0)


def rows_of_numbers() -> pg.Dataset:
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(60) % 3
    x = torch.randn(60, 5, generator=generator) + 2.0 * nn.functional.one_hot(y, 5)
    return pg.in_memory(x, y, name="clouds")


OBJECTS: dict[str, tuple[str, Callable[[], dict[str, Any]]]] = {
    "module": ("model", lambda: {"model": Net()}),
    "factory": ("model", lambda: {"model": small_net}),
    "class": ("model", lambda: {"model": Net}),
    "tensors": ("dataset", lambda: {"dataset": rows_of_numbers()}),
    "graph": ("topology", lambda: {"topology": nx.path_graph(4)}),
    "algorithm": ("algorithm", lambda: {"algorithm": EveryOther(second=pg.LocalSGD(lr=0.5))}),
}


def with_object(name: str) -> pg.Experiment:
    settings: dict[str, Any] = {
        "algorithm": "dechw",
        "dataset": rows_of_numbers(),
        "model": "logistic",
        "nodes": 4,
        "topology": "ring",
        "partition": "iid",
        "rounds": 4,
        "local": {"epochs": 1, "batch_size": 90},
        "engine": {"name": "serial"},
    }
    return pg.Experiment(**settings | OBJECTS[name][1]())


def stop_in_round_three(row: dict[str, Any]) -> None:
    if row["round"] == 3:
        raise KeyboardInterrupt


def without_time(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key not in OF_ENGINE} for row in rows]


@pytest.mark.parametrize("name", list(OBJECTS))
def test_a_run_with_python_objects_is_resumed_from_python(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "run"
    through = pg.run(with_object(name))
    with pytest.raises(Interrupted, match="interrupted in round 4; the last checkpoint is of"):
        pg.run(with_object(name), folder, checkpoint_every=1, watch=stop_in_round_three)
    key, _ = OBJECTS[name]
    table = tomllib.loads((folder / "experiment.toml").read_text())
    assert table[key]["name"] == "python-object"
    line = error_line(peerage("resume", folder))
    assert "is a Python object (" in line
    assert "peerage.resume(folder, experiment=...)" in line
    resumed = pg.resume(folder, experiment=with_object(name))
    assert resumed.digest == through.digest
    assert without_time(resumed.rows) == without_time(through.rows)
    assert pg.verify(folder, experiment=with_object(name)).same


def test_python_objects_are_named_in_the_file() -> None:
    table = with_object("factory").table()
    assert table["model"] == {"name": "python-object", "value": "small_net"}
    assert with_object("module").table()["model"]["value"] == "Net"
    assert with_object("class").table()["model"]["value"] == "Net"
    assert with_object("algorithm").table()["algorithm"]["value"] == "EveryOther"
    assert display_name(small_net, MODELS) == "small_net"


def test_resuming_with_another_experiment_is_rejected(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with pytest.raises(Interrupted):
        pg.run(with_object("tensors"), folder, checkpoint_every=1, watch=stop_in_round_three)
    other = with_object("tensors").model_copy(update={"seed": 1})
    with pytest.raises(InputError, match="began with seed = 0, but the given experiment has 1"):
        pg.resume(folder, experiment=other)


def test_a_networkx_graph_is_a_topology() -> None:
    graph = nx.path_graph(4)
    assert pg.Experiment(topology=graph, nodes=4).topology == FromGraph(graph)


def test_a_model_that_does_not_fit_says_so(tmp_path: Path) -> None:
    experiment = pg.Experiment(dataset="digits", model=Net(), nodes=4, topology="ring")
    with pytest.raises(InputError, match=r"'Net' does not fit data of shape \(1, 8, 8\)"):
        pg.run(experiment, tmp_path / "run")
    wrong = nn.Sequential(nn.Flatten(), nn.Linear(64, 7))
    with pytest.raises(InputError, match=r"gives \(7,\) outputs .* which has 10 classes"):
        pg.run(experiment.model_copy(update={"model": (wrong,)}), tmp_path / "run")
    nothing = experiment.model_copy(update={"model": (nn.Flatten(),)})
    with pytest.raises(InputError, match="'Flatten' has no parameters to learn"):
        pg.run(nothing, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_command_line_runs_an_algorithm_from_a_file(tmp_path: Path, outside: Path) -> None:
    folder = tmp_path / "run"
    algorithm = f"{outside}:Lazy:share=0.25"
    done = peerage(f"run {TINY} --rounds 1 --engine serial --algorithm", algorithm, "--out", folder)
    assert done.code == 0
    stored = tomllib.loads((folder / "experiment.toml").read_text())
    assert stored["algorithm"] == {"name": f"{outside}:Lazy", "share": 0.25, "kind": "mean"}
