"""An experiment: one frozen, checked value that says everything about a run, and its TOML form."""

import importlib.util
import inspect
import json
import math
import re
import sys
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from textwrap import shorten
from typing import Annotated, Any, Literal, Self

import networkx as nx
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    ValidationError,
    model_validator,
)
from torch import nn

from peerage import specs
from peerage.algorithm import Algorithm
from peerage.algorithms import ALGORITHMS
from peerage.algorithms.dechw import DecHW
from peerage.algorithms.local import Local
from peerage.data.datasets import DATASETS, Digits
from peerage.data.partition import PARTITIONS, Dirichlet
from peerage.errors import InputError, did_you_mean
from peerage.graphs.estimation import EstimatedGain
from peerage.graphs.faults import Faults
from peerage.graphs.topology import TOPOLOGIES, ErdosRenyi, FromGraph, Star
from peerage.models import MODELS
from peerage.models.start import GAINS, Bias, NoGain, Scheme
from peerage.privacy import Noise
from peerage.records.metrics import METRICS
from peerage.work.losses import CORRECTIONS, LOSSES
from peerage.work.training import LocalSGD

OUTSIDE = re.compile(r"(?P<file>.+\.py):(?P<name>\w+)(?::(?P<options>.*))?")
PYTHON_OBJECT = "python-object"  # stands in a file for a value that only the program has
# Tables of which single keys may be changed.
SECTIONS = ("local", "init", "faults", "noise", "evaluation", "engine")
HUB = Star(centre="last")  # the graph of an algorithm with a hub


def reader(kind: str, family: specs.Family, *offers: str) -> Callable[[Any], Any]:
    """Accepts the text, the table and the object form of a member of a family.

    An object may be of a class of the user's own that offers one of these methods.
    """

    def read(value: Any) -> Any:
        if isinstance(value, str):
            return specs.parse(value, kind, family)
        if isinstance(value, Mapping):
            if value.get("name") == PYTHON_OBJECT:
                raise InputError(
                    f"this experiment's {kind} is a Python object ({value.get('value')}), which a "
                    "file cannot hold; work on from Python, with the same object: "
                    "peerage.resume(folder, experiment=...), or verify in the same way"
                )
            return specs.from_table(value, kind, family)
        forgotten = isinstance(value, type) and hasattr(value, offers[0])  # Ring instead of Ring()
        if forgotten or not any(hasattr(value, name) for name in offers):
            raise InputError(
                f"{kind} cannot be {shorten(repr(value), 80)}; give a name such as "
                f"{next(iter(family))!r}, a table with a name, or an object"
            )
        return value

    return read


def read_algorithm(value: Any) -> Any:
    """As `reader`, and also `file.py:Class:key=value` for an algorithm kept outside the package."""
    name = (
        value if isinstance(value, str) else value.get("name") if isinstance(value, Mapping) else ""
    )
    outside = OUTSIDE.fullmatch(str(name))
    if not outside:
        return reader("algorithm", ALGORITHMS, "round")(value)
    cls = load_class(Path(outside["file"]).absolute(), outside["name"])
    family = {outside["name"]: cls}
    if isinstance(value, Mapping):
        return specs.from_table({**value, "name": outside["name"]}, "algorithm", family)
    return specs.parse(f"{outside['name']}:{outside['options'] or ''}", "algorithm", family)


@cache
def load_class(path: Path, name: str) -> type[Algorithm[Any]]:
    """The algorithm class of this name from a Python file."""
    if not path.is_file():
        raise InputError(f"algorithm file {str(path)!r} does not exist; give the path of a file")
    # The path as the name of the module: two files may be called alike, or like another module.
    spec = importlib.util.spec_from_file_location(str(path), path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[spec.name]
        reason = f"{type(error).__name__}: {error}"
        raise InputError(f"algorithm file {str(path)!r} cannot be loaded: {reason}") from error
    known = {
        key: value
        for key, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, Algorithm) and value is not Algorithm
    }
    if name not in known:
        hint = did_you_mean(name, known) if known else "it defines no subclass of Algorithm"
        raise InputError(f"{str(path)!r} has no algorithm {name!r}; {hint}")
    return known[name]


def read_topology(value: Any) -> Any:
    if isinstance(value, nx.Graph):
        return FromGraph(value)
    return reader("topology", TOPOLOGIES, "build")(value)


def read_models(value: Any) -> Any:
    """One model for all nodes, or several that nodes take in turn."""
    if value is None:
        return ()
    one_by_one = value if isinstance(value, list | tuple) else [value]
    return tuple(reader("model", MODELS, "build", "__call__")(item) for item in one_by_one)


def read_local(value: Any) -> Any:
    if value is None or isinstance(value, LocalSGD):
        return value
    if not isinstance(value, Mapping):
        raise InputError(f"local must be a LocalSGD or a table, got {value!r}")
    known = [field.name for field in fields(LocalSGD)]
    for key in value:
        if key not in known:
            raise InputError(f"local has no key {key!r}; {did_you_mean(key, known)}")
    options = dict(value)
    parts: dict[str, Any] = {}
    if "loss" in options:
        parts["loss"] = reader("loss", LOSSES, "__call__")(options.pop("loss"))
    if "correct" in options:
        read = reader("correction", CORRECTIONS, "__call__")
        parts["correct"] = read(options.pop("correct"))
    return replace(specs.construct(LocalSGD, options, "local"), **parts)


def read_faults(value: Any) -> Any:
    if isinstance(value, Faults):
        return value
    if not isinstance(value, Mapping):
        raise InputError(f"faults must be a table, got {value!r}; write [faults] and links = 0.5")
    return specs.construct(Faults, value, "faults")


def read_noise(value: Any) -> Any:
    if isinstance(value, Noise):
        return value
    if not isinstance(value, Mapping):
        raise InputError(f"noise must be a table, got {value!r}; write [noise] and sigma = 0.1")
    noise = specs.construct(Noise, value, "noise")
    if "delta" in value and not noise.private:
        raise InputError(
            f"delta={noise.delta:g} is what epsilon is computed for; "
            "give the noise a sigma above 0 and a clip as well"
        )
    return noise


UNTIL = {key: metric for metric in METRICS for key in metric.targets}


@dataclass(frozen=True)
class Until:
    """End a run once the mean over the nodes has got this far: `accuracy=0.469`."""

    metric: str
    value: float

    def __post_init__(self) -> None:
        metric = UNTIL[self.metric]
        if metric.scale == "fraction" and not 0 < self.value <= 1:
            raise InputError(f"until {self} is never reached: {metric.name} lies between 0 and 1")

    def reached(self, row: Mapping[str, Any]) -> bool:
        """Whether the network row of a round has got there; one that was not judged has not."""
        found = row.get(self.metric)
        if found is None:
            return False
        higher = UNTIL[self.metric].better == "higher"
        return bool(found >= self.value if higher else found <= self.value)

    def __str__(self) -> str:
        return f"{self.metric}={self.value!r}"


def read_until(value: Any) -> Until | None:
    if value is None or isinstance(value, Until):
        return value
    metric, _, number = str(value).replace(" ", "").partition("=")
    if metric not in UNTIL:
        raise InputError(
            f"until {value!r} does not begin with something that is measured; "
            f"{did_you_mean(metric, UNTIL)}, as in accuracy=0.9"
        )
    try:
        target = float(number)
    except ValueError:
        target = math.nan
    if not math.isfinite(target):
        raise InputError(f"until {value!r} gives {metric} no number; write {metric}=0.9")
    return Until(metric, target)


class Section(BaseModel):
    """A table of the experiment: frozen, and without unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    def __init__(self, **values: Any) -> None:
        where = type(self).__name__.lower()
        unknown = [key for key in values if key not in type(self).model_fields]
        if unknown:
            hint = did_you_mean(unknown[0], type(self).model_fields)
            raise InputError(f"{where} has no key {unknown[0]!r}; {hint}")
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise InputError(_one_line(error, where)) from None


class Init(Section):
    """The initial models."""

    start: Literal["shared", "independent"] = "independent"
    scheme: Scheme = "torch"  # PyTorch's own defaults, or He with zero biases (P4)
    bias: Bias | None = None  # zero, default or scaled; the scheme's own if left out
    gain: Annotated[Any, BeforeValidator(reader("gain", GAINS, "factors"))] = NoGain()


class Evaluation(Section):
    """When and on what models are judged."""

    every: int = 1  # rounds; the first and the last are always judged
    growth: float | None = None  # instead: rounds whose numbers grow by this factor (P4: 1.1)
    samples: int | None = None  # examples of the test set, drawn once; all by default
    at: Literal["exchange", "end"] = "exchange"  # after local training, or after aggregation
    validation: float = 0.0  # share of every node's data that is held out and judged as well
    spread: bool = False  # record how the tensors of models spread and move as well (P4 Fig. 5)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.every < 1:
            raise InputError(f"evaluation every {self.every} rounds is impossible; use 1 or more")
        if self.growth is not None and not 1 < self.growth < math.inf:
            raise InputError(f"growth must be above 1, such as 1.1, got {self.growth}")
        if self.growth is not None and self.every != 1:
            raise InputError(
                f"every={self.every} and growth={self.growth} exclude each other; give one of them"
            )
        if self.samples is not None and self.samples < 1:
            raise InputError(f"evaluation on {self.samples} samples is impossible; use 1 or more")
        if not 0 <= self.validation < 1:
            raise InputError(f"validation must lie in [0, 1), got {self.validation}")
        return self

    def judged(self, rounds: int) -> frozenset[int]:
        """The rounds of a run, numbered from 1, after which models are judged."""
        if self.growth is None:
            return frozenset({*range(self.every, rounds + 1, self.every), rounds})
        chosen = [1]
        while chosen[-1] < rounds:
            chosen.append(max(chosen[-1] + 1, math.ceil(chosen[-1] * self.growth)))
        return frozenset({*chosen[:-1], rounds})


class Engine(Section):
    """What runs the nodes; it never changes a result."""

    name: Literal["serial", "pool"] = "pool"
    workers: int | None = None  # of the pool; one per core by default

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.workers is not None and self.workers < 1:
            raise InputError(f"workers must be at least 1, got {self.workers}")
        return self


class Experiment(Section):
    """Everything that decides about a run.

    Members of a family may be given as an object, as text (`"er:p=0.2"`) or as a table.
    """

    algorithm: Annotated[Any, BeforeValidator(read_algorithm)] = DecHW()
    dataset: Annotated[Any, BeforeValidator(reader("dataset", DATASETS, "load", "train_x"))] = (
        Digits()
    )
    model: Annotated[Any, BeforeValidator(read_models)] = ()  # a tuple, once it is read
    nodes: int = 50
    topology: Annotated[Any, BeforeValidator(read_topology)] = ErdosRenyi(p=0.2)
    partition: Annotated[Any, BeforeValidator(reader("partition", PARTITIONS, "split"))] = (
        Dirichlet(alpha=0.2)
    )
    rounds: int = 20  # at most, if the run has something to end it earlier
    until: Annotated[Any, BeforeValidator(read_until)] = None  # e.g. accuracy=0.469
    local: Annotated[Any, BeforeValidator(read_local)] = None  # a LocalSGD
    init: Init = Init()
    faults: Annotated[Any, BeforeValidator(read_faults)] = Faults()
    noise: Annotated[Any, BeforeValidator(read_noise)] = Noise()  # on all that nodes send
    pooled: bool = False  # one node has the data of all: the centralised reference
    assortativity: float | None = None  # rewire the graph to it, with the same degrees (P4)
    evaluation: Evaluation = Evaluation()
    engine: Engine = Engine()
    seed: int = 0

    @model_validator(mode="before")
    @classmethod
    def _lay_over(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Single keys of `local` change the work order that the algorithm brings along.

        A hub brings its own graph along.
        """
        algorithm = read_algorithm(values.get("algorithm", cls.model_fields["algorithm"].default))
        if getattr(algorithm, "with_hub", False):
            values = {"topology": HUB, **values, "algorithm": algorithm}
        table = values.get("local")
        own = getattr(algorithm, "local", None)
        if not isinstance(table, Mapping) or not isinstance(own, LocalSGD):
            return values
        base = _local_table(own)
        if table.get("steps") is not None or table.get("epochs") is not None:
            base = {key: value for key, value in base.items() if key not in ("steps", "epochs")}
        return {**values, "algorithm": algorithm, "local": {**base, **table}}

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not isinstance(self.algorithm, Algorithm):
            raise InputError(f"algorithm must be an Algorithm, got {self.algorithm!r}")
        if not is_dataclass(self.algorithm):
            name = type(self.algorithm).__name__
            raise InputError(
                f"algorithm {name!r} is not a dataclass; write @dataclass(frozen=True) above it"
            )
        if self.nodes < 1:
            raise InputError(f"nodes must be at least 1, got {self.nodes}")
        if self.rounds < 1:
            raise InputError(f"rounds must be at least 1, got {self.rounds}")
        if self.seed < 0:
            raise InputError(f"seed must be at least 0, got {self.seed}")
        self.faults.check(self.nodes)
        if self.algorithm.with_hub:
            self._check_hub()
        if self.pooled and (self.faults != Faults() or not isinstance(self.init.gain, NoGain)):
            raise InputError("pooled means one node: it has no faults and no gain; leave them out")
        if isinstance(self.init.gain, EstimatedGain) and self.faults.join:
            raise InputError(
                "gain 'estimated' is found out by all nodes before the first round, so nobody can "
                "join later; use --gain graph"
            )
        if self.until and self.until.metric.startswith("validation") and not self._held_out():
            raise InputError(f"until {self.until} needs held-out examples; add --validation 0.2")
        # The algorithm and the section `local` hold the same work order; the section counts.
        own = getattr(self.algorithm, "local", None)
        if self.local is None:
            object.__setattr__(self, "local", own or LocalSGD())
        elif own is None:
            name = display_name(self.algorithm, ALGORITHMS)
            raise InputError(
                f"algorithm {name!r} does not take orders about local training; leave out "
                "--lr, --epochs and the like (the section [local])"
            )
        elif own != self.local:
            algorithm: Any = self.algorithm
            object.__setattr__(self, "algorithm", replace(algorithm, local=self.local))
        if self.work.early_stop != "none" and not self._held_out():
            raise InputError(
                f"early_stop={self.work.early_stop} needs held-out examples; add --validation 0.2"
            )
        return self

    def _check_hub(self) -> None:
        name = display_name(self.algorithm, ALGORITHMS)
        if self.topology != HUB:
            raise InputError(
                f"algorithm {name!r} has a hub that all nodes talk to; leave --topology out "
                "(it is star:centre=last), or choose an algorithm without a hub"
            )
        chosen = getattr(self.algorithm, "clients", None)
        if chosen is not None and chosen > self.nodes:
            raise InputError(
                f"algorithm {name!r} cannot choose {chosen} clients among {self.nodes} nodes; "
                f"use clients={self.nodes} or fewer, or more --nodes"
            )
        if len(self.model) > 1:
            raise InputError(f"the hub of {name!r} merges equal models; give one --model for all")

    def _held_out(self) -> bool:
        return self.evaluation.validation > 0

    @property
    def nodes_and_hub(self) -> int:
        """How many nodes there are, also one without data."""
        return self.nodes + bool(self.algorithm.with_hub)

    @property
    def work(self) -> LocalSGD:
        """The work order of local training."""
        assert isinstance(self.local, LocalSGD)  # filled by _check
        return self.local

    @classmethod
    def from_toml(cls, text: str, where: str = "experiment", **changes: Any) -> "Experiment":
        """Read the text form; `changes` replace keys, or single keys of a table."""
        try:
            table = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise InputError(f"{where} is not valid TOML: {error}") from None
        return cls(**merged(table, changes))

    def to_toml(self) -> str:
        return toml(self.table())

    def _noise_table(self) -> dict[str, Any]:
        table = specs.plain(self.noise)
        return table if self.noise.private else {k: v for k, v in table.items() if k != "delta"}

    def table(self) -> dict[str, Any]:
        """Plain values that describe the experiment completely."""
        models = [_family_table(model, "model", MODELS) for model in self.model]
        # What came later is written only where it is used: older runs can still be resumed.
        unused = None if self.evaluation.spread else {"spread"}
        return {
            "nodes": self.nodes,
            "rounds": self.rounds,
            **({"until": str(self.until)} if self.until else {}),
            **({"pooled": True} if self.pooled else {}),
            **({} if self.assortativity is None else {"assortativity": self.assortativity}),
            "seed": self.seed,
            "algorithm": _algorithm_table(self.algorithm),
            "dataset": _family_table(self.dataset, "dataset", DATASETS),
            "model": models[0] if len(models) == 1 else models,
            "topology": _family_table(self.topology, "topology", TOPOLOGIES),
            "partition": _family_table(self.partition, "partition", PARTITIONS),
            **({"local": _local_table(self.work)} if hasattr(self.algorithm, "local") else {}),
            "init": {
                "start": self.init.start,
                "scheme": self.init.scheme,
                **({"bias": self.init.bias} if self.init.bias else {}),
                "gain": _family_table(self.init.gain, "gain", GAINS),
            },
            **({"faults": specs.plain(self.faults)} if self.faults != Faults() else {}),
            **({"noise": self._noise_table()} if self.noise.active else {}),
            "evaluation": self.evaluation.model_dump(exclude_none=True, exclude=unused),
            "engine": self.engine.model_dump(exclude_none=True),
        }


def reference(name: str, experiment: Experiment) -> Experiment:
    """What to compare an experiment with, on the same total data and the same work per round.

    centralised: one node holds the data of all; isolated: every node trains on its own data alone.
    """
    known = ("centralised", "isolated")
    if name not in known:
        raise InputError(f"unknown reference {name!r}; {did_you_mean(name, known)}")
    # Nothing is averaged, so there are no messages to lose, and weights keep their size.
    init = experiment.init.model_copy(update={"gain": NoGain()})
    changes = {
        "algorithm": Local(local=experiment.work),
        "init": init,
        "faults": Faults(),
        "noise": Noise(),
    }
    return experiment.model_copy(update={**changes, "pooled": name == "centralised"})


def merged(table: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The table with changes laid over it: single keys of a section, everything else whole."""
    result = dict(table)
    for key, value in changes.items():
        old = result.get(key)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        result[key] = {**dict(old or {}), **value} if key in SECTIONS and both else value
    return result


def toml(table: Mapping[str, Any], prefix: str = "") -> str:
    """A table of plain values as TOML text."""
    lines, tables = [], []
    for key, value in table.items():
        if isinstance(value, Mapping) and not prefix:
            tables.append(f"\n[{key}]\n{toml(value, key)}")
        elif isinstance(value, list) and value and isinstance(value[0], Mapping):
            tables += [f"\n[[{key}]]\n{toml(item, key)}" for item in value]
        else:
            lines.append(f"{key} = {_toml_value(value)}\n")
    return "".join(lines + tables)


def _toml_value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{k} = {_toml_value(v)}" for k, v in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml_value, value)) + "]"
    if isinstance(value, float):
        return repr(value)
    text = json.dumps(str(value) if isinstance(value, Path) else value, ensure_ascii=False)
    return text.replace("\x7f", "\\u007f")  # the one character that JSON allows and TOML does not


def _family_table(value: Any, kind: str, family: specs.Family) -> dict[str, Any]:
    if type(value) in family.values():
        return specs.to_table(value, kind, family)
    name = value.__qualname__ if callable(value) and hasattr(value, "__qualname__") else None
    return {"name": PYTHON_OBJECT, "value": name or type(value).__name__}


def _algorithm_table(algorithm: Algorithm[Any]) -> dict[str, Any]:
    cls = type(algorithm)
    if cls in ALGORITHMS.values():
        return specs.to_table(algorithm, "algorithm", ALGORITHMS)
    options = specs.plain(algorithm)
    try:
        file = Path(inspect.getfile(cls)).absolute()
    except (OSError, TypeError):
        file = Path()
    # Loading a script again would run it again, so its classes count as known to the program only.
    outside = file.is_file() and "." not in cls.__qualname__ and cls.__module__ != "__main__"
    if outside and _fits_in_file(algorithm, options):
        return {"name": f"{file}:{cls.__name__}", **options}
    shown = {key: v for key, v in options.items() if isinstance(v, str | bool | int | float)}
    return {"name": PYTHON_OBJECT, "value": cls.__qualname__, **shown}


def _fits_in_file(algorithm: Any, options: Mapping[str, Any]) -> bool:
    """Whether the options, read back from a file, make an equal algorithm."""
    try:
        again = specs.construct(type(algorithm), tomllib.loads(toml(options)), "algorithm")
    except (InputError, TypeError, ValueError):
        return False
    if hasattr(again, "local"):  # has its own section
        again = replace(again, local=algorithm.local)
    return bool(again == algorithm)


def _local_table(work: LocalSGD) -> dict[str, Any]:
    table = {key: value for key, value in specs.plain(work).items() if key != "correct"}
    table["loss"] = _family_table(work.loss, "loss", LOSSES)
    if work.correct is not None:
        table["correct"] = _family_table(work.correct, "correction", CORRECTIONS)
    return table


def _one_line(error: ValidationError, where: str) -> str:
    key = str(error.errors()[-1]["loc"][0])
    return f"{'' if where == 'experiment' else f'{where}: '}{key} {specs.complaint(error)}"


def display_name(value: Any, family: specs.Family) -> str:
    """The registered name of a value, or the name of its class."""
    for name, cls in family.items():
        if type(value) is cls:
            return name
    if isinstance(value, nn.Module):
        return type(value).__name__
    own = getattr(value, "name", None) or getattr(value, "__name__", None)
    return str(own or type(value).__name__)
