"""An experiment: one frozen, checked value that describes a run completely."""

import math
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import CoreSchema, core_schema
from torch import nn

from peerage import specs
from peerage.algorithm import Algorithm
from peerage.algorithms import ALGORITHMS
from peerage.algorithms.dechw import DecHW
from peerage.algorithms.local import Local
from peerage.data.clusters import Clusters
from peerage.data.datasets import DATASETS, DatasetSpec, Digits
from peerage.data.partition import PARTITIONS, Dirichlet, Partition
from peerage.data.schema import Schema, read_schema
from peerage.data.tensors import Dataset
from peerage.errors import InputError, check_at_least, check_choice, did_you_mean
from peerage.experiment.outside import OwnMetric
from peerage.experiment.readers import (
    read_algorithm,
    read_clusters,
    read_faults,
    read_local,
    read_metrics,
    read_models,
    read_noise,
    read_topology,
    reader,
    split_start,
    with_file_in,
)
from peerage.experiment.toml import local_table, merged, table_of, toml
from peerage.experiment.until import StopCondition, read_until
from peerage.graphs.estimation import EstimatedGain
from peerage.graphs.faults import Faults
from peerage.graphs.gains import GAINS, Gain, NoGain
from peerage.graphs.graph import Graph
from peerage.graphs.topology import ErdosRenyi, Star
from peerage.models import Model
from peerage.models.files import hash_file
from peerage.models.start import Bias, Scheme, Split
from peerage.privacy import Noise
from peerage.work.training import LocalSGD

HUB = Star(centre="last")  # the graph of an algorithm with a hub
# When models are evaluated, as users write it, and as experiments store it.
EVALUATION_TIMES = {"after-training": "exchange", "after-aggregation": "end"}


class GraphBuilder(Protocol):
    """What every topology must implement, including a user's own."""

    def build(self, nodes: int, seed: int) -> Graph: ...


@dataclass(frozen=True)
class ReadBy:
    """The function that reads a field; pydantic takes its result without further checks."""

    read: Callable[[Any], Any]

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self.read)


class Section(BaseModel):
    """A frozen table of the experiment that rejects unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")

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
    """The initial models.

    `start` may also be text such as `file:model.safetensors`, which sets `file` as well. The
    identity of an experiment has the content of the file, and not its path.

    >>> import peerage as pg
    >>> pg.Experiment(init=pg.Init(start="shared", gain="graph")).init.start
    'shared'
    """

    start: Literal["shared", "independent", "file"] = "independent"
    file: str | None = None  # the model file with which all nodes start
    sha256: str | None = None  # of its content; by default, of what it holds now
    scheme: Scheme = "torch"  # PyTorch's defaults, or He with zero biases (P4)
    bias: Bias | None = None  # zero, default or scaled; by default that of the scheme
    gain: Annotated[Gain, ReadBy(reader("gain", GAINS, "factors"))] = NoGain()

    if TYPE_CHECKING:  # a gain may also be text or a table

        def __init__(self, **values: Any) -> None: ...

    @model_validator(mode="before")
    @classmethod
    def _read_file(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):  # an Init that was checked already
            return values
        values = split_start(values)
        if values.get("start") != "file":
            if values.get("file") is not None or values.get("sha256") is not None:
                raise InputError('init: file requires start = "file"; set it, or remove file')
            return values
        if not values.get("file"):
            raise InputError(
                "init: start = file requires the path of a model; write --init file:FILE"
            )
        # Absolute, as a run may be resumed from another folder.
        path = Path(values["file"]).absolute()
        return {**values, "file": str(path), "sha256": values.get("sha256") or hash_file(path)}

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.start == "file" and not isinstance(self.gain, NoGain):
            raise InputError(
                "init: the values of a model file are used as they are; use --gain none"
            )
        return self


class Evaluation(Section):
    """When and on which examples models are evaluated.

    >>> import peerage as pg
    >>> sorted(pg.Evaluation(every=4).evaluated_rounds(10))
    [4, 8, 10]
    """

    every: int = 1  # rounds; initial and final models are always evaluated
    growth: float | None = None  # instead of `every`: factor between round numbers (P4: 1.1)
    samples: int | None = None  # examples of the test set, drawn once; all by default
    # After local training (exchange) or after aggregation (end); by default, as the algorithm says.
    at: Literal["exchange", "end"] | None = None
    validation: float = 0.0  # share of each node's data that is held out for validation
    spread: bool = False  # also record the spread and movement of parameters (P4 Fig. 5)
    node_rows: int = 1000  # nodes with rows in the records; all nodes have rows in the last round
    # Functions of a user's own, of true and predicted classes: my_file.py:balanced.
    metrics: Annotated[tuple[OwnMetric, ...], ReadBy(read_metrics)] = ()

    if TYPE_CHECKING:  # metrics may also be text

        def __init__(self, **values: Any) -> None: ...

    @field_validator("at", mode="before")
    @classmethod
    def _read_at(cls, value: Any) -> Any:
        return EVALUATION_TIMES.get(value, value) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.every < 1:
            raise InputError(f"evaluation every must be at least 1 round, got {self.every}")
        if self.growth is not None and not 1 < self.growth < math.inf:
            raise InputError(f"growth must be above 1, such as 1.1, got {self.growth}")
        if self.growth is not None and self.every != 1:
            raise InputError(
                f"every={self.every} and growth={self.growth} exclude each other; give one of them"
            )
        if self.samples is not None and self.samples < 1:
            raise InputError(f"evaluation samples must be at least 1, got {self.samples}")
        if not 0 <= self.validation < 1:
            raise InputError(f"validation must lie in [0, 1), got {self.validation}")
        check_at_least("node_rows", self.node_rows, 1)
        return self

    def evaluated_rounds(self, rounds: int) -> frozenset[int]:
        """The rounds in which models are evaluated, numbered from 1."""
        if self.growth is None:
            return frozenset({*range(self.every, rounds + 1, self.every), rounds})
        numbers = [1]
        while numbers[-1] < rounds:
            numbers.append(max(numbers[-1] + 1, math.ceil(numbers[-1] * self.growth)))
        return frozenset({*numbers[:-1], rounds})


class Engine(Section):
    """The engine that runs the nodes; it does not change the result.

    >>> import peerage as pg
    >>> pg.Experiment(engine=pg.Engine(name="pool", workers=2)).engine.workers
    2
    """

    name: Literal["serial", "pool", "ray"] = "pool"
    workers: int | None = None  # of pool and ray; one per core by default
    address: str | None = None  # of a Ray cluster, auto or HOST:PORT; None: on this machine
    restarts: int | None = None  # after workers of Ray died, from the last checkpoint; 3 by default

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.workers is not None and self.workers < 1:
            raise InputError(f"workers must be at least 1, got {self.workers}")
        if self.restarts is not None and self.restarts < 0:
            raise InputError(f"restarts must be at least 0, got {self.restarts}")
        if self.name != "ray" and (self.address, self.restarts) != (None, None):
            raise InputError(f"address and restarts need engine ray, not {self.name!r}")
        return self


class Experiment(Section):
    """All settings of a run.

    A member of a family may be an object, text (`"er:p=0.2"`) or a table.

    >>> import peerage as pg
    >>> short = pg.Experiment(algorithm="dechw:theta=30", topology="er:p=0.3", nodes=8)
    >>> graph = pg.topologies.ErdosRenyi(p=0.3)
    >>> short == pg.Experiment(algorithm=pg.DecHW(theta=30), topology=graph, nodes=8)
    True
    >>> pg.Experiment.from_toml(short.to_toml()) == short
    True
    """

    algorithm: Annotated[Algorithm[Any], ReadBy(read_algorithm)] = DecHW()
    dataset: Annotated[
        DatasetSpec | Dataset, ReadBy(reader("dataset", DATASETS, "load", "train_x"))
    ] = Digits()
    # One for all nodes, or several that nodes take in turn; also a module, or a function for one.
    model: Annotated[
        tuple[Model | nn.Module | Callable[[], nn.Module] | Split, ...], ReadBy(read_models)
    ] = ()
    nodes: int = 50
    topology: Annotated[GraphBuilder, ReadBy(read_topology)] = ErdosRenyi(p=0.2)
    partition: Annotated[Partition, ReadBy(reader("partition", PARTITIONS, "split"))] = Dirichlet(
        alpha=0.2
    )
    clusters: Annotated[Clusters | None, ReadBy(read_clusters)] = None  # e.g. 30/2:rotate
    # Features and classes that tabular data must have, also the private data of peers.
    data_schema: Annotated[Schema | None, ReadBy(read_schema)] = None
    rounds: int = 20  # at most, if `until` is set
    until: Annotated[StopCondition | None, ReadBy(read_until)] = None  # e.g. accuracy=0.469
    local: Annotated[LocalSGD, ReadBy(read_local)] = LocalSGD()  # same as in the algorithm
    init: Init = Init()
    faults: Annotated[Faults, ReadBy(read_faults)] = Faults()
    noise: Annotated[Noise, ReadBy(read_noise)] = Noise()  # on all messages
    pooled: bool = False  # one node has all data: the centralised reference
    assortativity: float | None = None  # rewire the graph to this value, keeping degrees (P4)
    evaluation: Evaluation = Evaluation()
    engine: Engine = Engine()
    seed: int = 0

    if TYPE_CHECKING:  # arguments may also be text or tables

        def __init__(self, **values: Any) -> None: ...

    @model_validator(mode="before")
    @classmethod
    def _settle(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Take from the algorithm what is not set: training, start, a hub's graph, evaluation."""
        spec = values.get("algorithm", cls.model_fields["algorithm"].default)
        algorithm, local = settle_local(read_algorithm(spec), values.get("local"))
        graph = {"topology": HUB} if algorithm.with_hub else {}
        evaluation = settle_evaluation(algorithm, values.get("evaluation", {}))
        init = settle_init(algorithm, values.get("init", {}))
        settled = {"algorithm": algorithm, "local": local, "init": init, "evaluation": evaluation}
        return {**graph, **values, **settled}

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.nodes < 1:
            raise InputError(f"nodes must be at least 1, got {self.nodes}")
        if self.rounds < 1:
            raise InputError(f"rounds must be at least 1, got {self.rounds}")
        if self.seed < 0:
            raise InputError(f"seed must be at least 0, got {self.seed}")
        self.faults.check(self.nodes_and_hub, self.hub)
        if self.clusters is not None and sum(self.clusters.sizes) != self.nodes:
            raise InputError(
                f"clusters {self.clusters.text} have {sum(self.clusters.sizes)} nodes in all, but "
                f"the experiment has {self.nodes}; make them equal, as in --nodes "
                f"{sum(self.clusters.sizes)}"
            )
        if self.algorithm.with_hub:
            self._check_hub()
        if self.pooled and (self.faults != Faults() or not isinstance(self.init.gain, NoGain)):
            raise InputError("pooled means a single node; remove the faults and the gain")
        if isinstance(self.init.gain, EstimatedGain) and self.faults.join:
            raise InputError(
                "gain 'estimated' requires all nodes before the first round, but some join later; "
                "use --gain graph"
            )
        if self.until and "validation_" in self.until.metric and not self._held_out():
            raise InputError(f"until {self.until} needs held-out examples; add --validation 0.2")
        if self.work.early_stop != "none" and not self._held_out():
            raise InputError(
                f"early_stop={self.work.early_stop} needs held-out examples; add --validation 0.2"
            )
        return self

    def _check_hub(self) -> None:
        name = display_name(self.algorithm, ALGORITHMS)
        choices = ("hub", "clients", "both")
        check_choice("models_at of the algorithm", self.algorithm.models_at, choices)
        if self.topology != HUB and getattr(self.topology, "number", None) is None:
            raise InputError(
                f"algorithm {name!r} has a hub, so its topology is star:centre=last; remove "
                "--topology, or choose an algorithm without a hub"
            )
        if self.pooled and self.topology != HUB:
            raise InputError("pooled means a single node beside the hub; remove --topology")
        clients = getattr(self.algorithm, "clients", None)
        if clients is not None and clients > self.nodes:
            raise InputError(
                f"algorithm {name!r} cannot select {clients} clients among {self.nodes} nodes; "
                f"use clients={self.nodes} or fewer, or more --nodes"
            )
        if len(self.model) > 1 and self.algorithm.models_at == "hub":
            raise InputError(
                f"the hub of {name!r} requires equal architectures; use one --model for all nodes"
            )

    def _held_out(self) -> bool:
        return self.evaluation.validation > 0

    @property
    def nodes_and_hub(self) -> int:
        """The number of nodes, including a hub."""
        return self.nodes + bool(self.algorithm.with_hub)

    @property
    def hub(self) -> int | None:
        """The number of the hub, usually the last; None without one."""
        return self.hub_among(self.nodes_and_hub)

    def hub_among(self, nodes: int) -> int | None:
        """As `hub`, if the network has so many nodes instead, the hub included."""
        return (
            self.topology.place(nodes)
            if isinstance(self.topology, Star) and self.algorithm.with_hub
            else None
        )

    @property
    def evaluated_at(self) -> str:
        """When models are evaluated: `exchange` (after local training) or `end` of the round."""
        return self.evaluation.at or time_of_evaluation(self.algorithm)

    @property
    def work(self) -> LocalSGD:
        """The settings of local training."""
        return self.local

    @classmethod
    def from_toml(
        cls,
        text: str,
        where: str = "experiment",
        folder: Path | None = None,
        **changes: Any,
    ) -> "Experiment":
        """Read TOML text; `changes` replace keys, or single keys of a table.

        The path of a model file in the text is relative to `folder`, if given.
        """
        try:
            table = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise InputError(f"{where} is not valid TOML: {error}") from None
        return cls(**merged(with_file_in(table, folder), changes))

    def to_toml(self) -> str:
        return toml(self.table())

    def table(self) -> dict[str, Any]:
        """Plain values that describe the experiment completely."""
        return table_of(self)

    def _repr_html_(self) -> str:
        from peerage.report.notebook import experiment_html  # slow, and only notebooks need it

        name, data = display_name(self.algorithm, ALGORITHMS), display_name(self.dataset, DATASETS)
        title = f"Experiment: {name} on {data}, {self.nodes} nodes, {self.rounds} rounds"
        return experiment_html(title, self.table())


def settle_local(algorithm: Any, section: Any) -> tuple[Algorithm[Any], LocalSGD]:
    """The algorithm and the section `local`, with the same settings of local training.

    The section overrides the algorithm; keys that it does not set come from the algorithm.
    """
    default = getattr(algorithm, "local", None)
    if section is None:
        return algorithm, default or LocalSGD()
    if default is None:
        name = display_name(algorithm, ALGORITHMS)
        raise InputError(
            f"algorithm {name!r} has no local training settings; remove --lr, --epochs and the "
            "other flags of section [local]"
        )
    if isinstance(section, Mapping) and isinstance(default, LocalSGD):
        base = local_table(default)
        if section.get("steps") is not None or section.get("epochs") is not None:
            base = {key: value for key, value in base.items() if key not in ("steps", "epochs")}
        section = {**base, **section}
    local = read_local(section)
    return algorithm if default == local else replace(algorithm, local=local), local


def settle_evaluation(algorithm: Algorithm[Any], section: Any) -> Any:
    """The section `evaluation`, with the algorithm's time of evaluation unless one is set."""
    default = {"at": time_of_evaluation(algorithm)}
    if isinstance(section, Evaluation):
        return section if section.at else section.model_copy(update=default)
    if isinstance(section, Mapping) and section.get("at") is None:
        return {**section, **default}
    return section


def settle_init(algorithm: Algorithm[Any], section: Any) -> Any:
    """The section `init`, with the algorithm's start unless one is set."""
    choices = ("shared", "independent")
    check_choice("initial_models of the algorithm", algorithm.initial_models, choices)
    default = {"start": algorithm.initial_models}
    if isinstance(section, Init):
        known = "start" in section.model_fields_set
        return section if known else section.model_copy(update=default)
    if isinstance(section, Mapping) and section.get("start") is None:
        return {**section, **default}
    return section


def time_of_evaluation(algorithm: Algorithm[Any]) -> str:
    """When the algorithm has its models evaluated, as experiments store it."""
    check_choice("evaluated_at of the algorithm", algorithm.evaluated_at, EVALUATION_TIMES)
    return EVALUATION_TIMES[algorithm.evaluated_at]


def reference(name: str, experiment: Experiment) -> Experiment:
    """A baseline for an experiment, with the same total data and the same work per round.

    centralised: one node has all data; isolated: every node trains on its own data alone.
    """
    known = ("centralised", "isolated")
    if name not in known:
        raise InputError(f"unknown reference {name!r}; {did_you_mean(name, known)}")
    # Nothing is averaged: no message can be lost, and weights do not shrink.
    init = experiment.init.model_copy(update={"gain": NoGain()})
    changes = {
        "algorithm": Local(local=experiment.work),
        "init": init,
        "faults": Faults(),
        "noise": Noise(),
    }
    return experiment.model_copy(update={**changes, "pooled": name == "centralised"})


def _one_line(error: ValidationError, where: str) -> str:
    key = str(error.errors()[-1]["loc"][0])
    return f"{'' if where == 'experiment' else f'{where}: '}{key} {specs.describe_error(error)}"


def display_name(value: Any, family: specs.Family) -> str:
    """The registered name of a value, or the name of its class."""
    if isinstance(value, Split):
        value = value.model
    for name, cls in family.items():
        if type(value) is cls:
            return name
    if isinstance(value, nn.Module):
        return type(value).__name__
    label = getattr(value, "name", None) or getattr(value, "__name__", None)
    return str(label or type(value).__name__)
