"""The flags of an experiment: one table, from which commands get their options and help.

Slow imports are inside functions, so that `peerage --help` starts fast.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import GenericAlias
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from peerage.cli.names import Complete, beginning_with, complete_experiment
from peerage.errors import InputError, check_choice, did_you_mean

if TYPE_CHECKING:
    from peerage.experiment import Experiment

Json = Annotated[bool, Option("--json", help="Print one JSON object as the last line.")]
Quiet = Annotated[bool, Option("--quiet", "-q", help="Show no progress.")]
Out = Annotated[Path | None, Option(help="New folder to write (default: a name in runs/).")]
Wire = Annotated[
    str, Option(help="Numbers in messages: fp32, bf16 (half the bytes) or int8 (a quarter).")
]
DialsOut = Annotated[
    str, Option(help="Numbers of the peers that open no port and only dial out: NODE,...")
]
LogTo = Annotated[
    str | None,
    Option(
        help="Log every round to tensorboard, mlflow, wandb (offline) or trackio, or to several, "
        "separated by commas."
    ),
]
CheckpointEvery = Annotated[
    int | None,
    Option(help="Rounds between checkpoints (default: as often as 5 % of the run time allows)."),
]
ExperimentFile = Annotated[
    str | None,
    Argument(
        help="Experiment file (TOML) or name of a recipe; flags override it. The defaults below "
        "apply where neither the file nor the algorithm sets a value.",
        autocompletion=complete_experiment,
    ),
]
LAST = (
    "out",
    "checkpoint_every",
    "log_to",
    "quiet",
    "as_json",
)  # shown below the flags of the experiment


@dataclass(frozen=True)
class Flag:
    """One row: a flag, the key of the experiment that it sets, and its help."""

    name: str
    key: str  # as in an experiment file, with its section: local.lr
    type: type | GenericAlias
    help: str
    # Shown in the help: a value, which a test compares with the experiment's, or a (description).
    default: Any = None
    # Other keys of the section that this flag excludes -> the values to which they are reset.
    excludes: Mapping[str, Any] = field(default_factory=dict)
    values: Mapping[str, str] = field(default_factory=dict)  # what users write -> what is stored
    after_colon: str | None = None  # key of the section that the text after the first colon sets
    families: tuple[str, ...] = ()  # whose names shells complete

    @property
    def parameter(self) -> inspect.Parameter:
        """The parameter from which Typer creates the option."""
        text = self.help if self.default is None else f"{self.help}  [default: {self.default}]"
        option = Option(
            help=text,
            metavar="<str>" if self.type == list[str] else None,
            autocompletion=self.completion,
        )
        return inspect.Parameter(
            self.name.replace("-", "_"),
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=None,
            annotation=Annotated[self.type | None, option],
        )

    @property
    def completion(self) -> Complete | None:
        """What shells complete; None leaves it to them."""
        return beginning_with(*self.families) if self.families else None

    def stored(self, value: Any) -> Any:
        """The value as experiments store it."""
        if not self.values:
            return value
        check_choice(self.name, value, self.values)
        return self.values[value]


TABLE = (
    Flag("algorithm", "algorithm", str,
         "Algorithm, e.g. dechw:theta=30 or my_file.py:MyAlgorithm.", "dechw",
         families=("algorithms",)),
    Flag("dataset", "dataset", str, "Data set, e.g. mnist or npz:path=FILE.", "digits",
         families=("datasets",)),
    Flag("model", "model", list[str],
         "Model, e.g. mnist-cnn or my_file.py:MyModel, or a mix, e.g. h2-cnn; repeat the flag to "
         "mix several.", "(by data set)", families=("models", "mixes")),
    Flag("nodes", "nodes", int, "Number of nodes.", 50),
    Flag("topology", "topology", str, "Graph between the nodes, e.g. regular:k=4.", "er:p=0.2",
         families=("topologies",)),
    Flag("assortativity", "assortativity", float,
         "Degree assortativity to rewire the graph to, from -1 to 1."),
    Flag("partition", "partition", str,
         "Split of the data between the nodes, e.g. iid.", "dirichlet:alpha=0.2",
         families=("partitions",)),
    Flag("clusters", "clusters.sizes", str,
         "Nodes per cluster and the shift of their examples, e.g. 30/2:rotate.",
         after_colon="shift"),
    Flag("shuffle-clusters", "clusters.shuffle", bool,
         "Draw the nodes of each cluster from the seed, instead of numbering them in order."),
    Flag("centralised", "pooled", bool, "Give all data to one node, as a centralised baseline."),
    Flag("rounds", "rounds", int, "Number of rounds.", 20),
    Flag("until", "until", str,
         "Stop once a recorded number reaches a target, e.g. accuracy=0.9 or alpha>=0.9."),
    Flag("seed", "seed", int, "Random seed.", 0),
    Flag("epochs", "local.epochs", int, "Local epochs per round.", 5, excludes={"steps": None}),
    Flag("steps", "local.steps", int,
         "Local mini-batches per round, instead of epochs.", excludes={"epochs": None}),
    Flag("batch-size", "local.batch_size", int, "Examples per mini-batch.", 16),
    Flag("batch-of-one", "local.batch_of_one", str,
         "Use of a last mini-batch of 1 example: keep, merge or drop.", "(by model)"),
    Flag("lr", "local.lr", float, "Learning rate.", 0.05),
    Flag("momentum", "local.momentum", float, "Momentum of SGD.", 0),
    Flag("nesterov", "local.nesterov", bool, "Use Nesterov momentum."),
    Flag("weight-decay", "local.weight_decay", float, "Weight decay.", 0),
    Flag("optimizer", "local.optimizer", str, "Optimiser: sgd or adamw.", "sgd"),
    Flag("loss", "local.loss", str, "Loss, e.g. virtual-teacher:share=0.5.", "cross-entropy",
         families=("losses",)),
    Flag("loss-clamp", "local.loss_clamp", float, "Largest mini-batch loss that gives a gradient."),
    Flag("only", "local.only", str,
         "Part of the model to train: head (usually its last layer) or core.", "(whole model)"),
    Flag("early-stop", "local.early_stop", str,
         "Response to a rising validation loss: none, or rollback of the round.", "none"),
    Flag("init", "init.start", str,
         "Initial models: independent, shared, or file:FILE, a model with which all nodes start; "
         "dfml and its baselines start shared.",
         "independent", excludes={"file": None, "sha256": None}, after_colon="file"),
    Flag("scheme", "init.scheme", str, "Initial weights: torch, he or he-normal.", "torch"),
    Flag("bias", "init.bias", str,
         "Initial biases: zero, default (as PyTorch) or scaled.", "(by --scheme)"),
    Flag("gain", "init.gain", str,
         "Factor on the initial weights: none, graph, estimated, manual:g=2, ...", "none",
         families=("gains",)),
    Flag("eval-every", "evaluation.every", int,
         "Rounds between evaluations.", 1, excludes={"growth": None}),
    Flag("eval-growth", "evaluation.growth", float,
         "Evaluate at round numbers that grow by this factor instead, e.g. 1.1.",
         excludes={"every": 1}),
    Flag("eval-samples", "evaluation.samples", int, "Test examples per evaluation.", "(all)"),
    Flag("eval-at", "evaluation.at", str,
         "Time in the round to evaluate the models: after-training (before they are sent; at = "
         '"exchange" in files) or after-aggregation (at = "end").',
         "(by algorithm)", values={"after-training": "exchange", "after-aggregation": "end"}),
    Flag("validation", "evaluation.validation", float,
         "Share of each node's data to hold out for validation, below 1.", 0),
    Flag("spread", "evaluation.spread", bool,
         "Record the spread and movement of the parameters, layer by layer."),
    Flag("node-rows", "evaluation.node_rows", int,
         "Nodes with rows of their own in the records; in the last round, all nodes have rows.",
         1000),
    Flag("metric", "evaluation.metrics", list[str],
         "Metric of your own, e.g. my_file.py:balanced, a function of y_true and y_pred; repeat "
         "the flag for several."),
    Flag("link-activity", "faults.links", float, "Probability that a link is up in a round.", 1),
    Flag("node-activity", "faults.nodes", float,
         "Probability that a node communicates in a round; it trains in any case.", 1),
    Flag("directed-activity", "faults.directed", bool,
         "Draw each direction of a link independently."),
    Flag("message-loss", "faults.loss", float, "Probability that a message is lost.", 0),
    Flag("join", "faults.join", str, "Nodes that join late: NODE@ROUND,..."),
    Flag("leave", "faults.leave", str, "Nodes that leave early: NODE@ROUND,..."),
    Flag("noise", "noise.sigma", float, "Standard deviation of Gaussian noise on messages.", 0),
    Flag("clip", "noise.clip", float,
         "Largest Euclidean distance of a message from its reference; with --noise, gives "
         "differential privacy."),
    Flag("delta", "noise.delta", float, "Delta of the (epsilon, delta) privacy guarantee.", "1e-5"),
    Flag("engine", "engine.name", str,
         "Engine: pool (worker processes), serial, or ray (a Ray cluster).", "pool"),
    Flag("workers", "engine.workers", int, "Workers of the engines pool and ray.",
         "(one per core)"),
    Flag("address", "engine.address", str,
         "Address of a Ray cluster, auto or HOST:PORT; without it, Ray runs on this machine."),
    Flag("restarts", "engine.restarts", int,
         "How often a run with engine ray continues from its last checkpoint after a worker died.",
         "(3)"),
)  # fmt: skip
FLAGS = {flag.name: flag for flag in TABLE}


def option(name: str) -> Any:
    """The flag as an option of a command with another default."""
    flag = FLAGS[name]
    return Option(help=flag.help, autocompletion=flag.completion)


def read_changes(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of flags as tables of an experiment file; None means not given."""
    changes: dict[str, Any] = {}
    for flag in (FLAGS[name] for name, value in values.items() if value is not None):
        section, _, key = flag.key.rpartition(".")
        table = changes.setdefault(section, {}) if section else changes
        for other, replacement in flag.excludes.items():
            table.setdefault(other, replacement)
        value = flag.stored(values[flag.name])
        if flag.after_colon is not None:
            value, colon, rest = value.partition(":")
            table |= {flag.after_colon: rest} if colon else {}
        table[key] = value
    return changes


@dataclass(frozen=True)
class Settings:
    """The user's experiment file or recipe, and the changes by flags."""

    file: str | None
    changes: dict[str, Any]

    def experiment(self, **more: Any) -> "Experiment":
        """The experiment of the file or recipe, or the default one, with all changes."""
        from peerage.experiment import Experiment
        from peerage.experiment.catalogue import recipes

        file, changes = self.file, {**self.changes, **more}
        if file is None:
            return Experiment.from_toml("", **changes)
        path = Path(file) if Path(file).is_file() else recipes().get(file)
        if path is None:
            hint = did_you_mean(file, recipes())
            raise InputError(f"{file!r} is neither a file nor a recipe; {hint}")
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{file} cannot be read: {error}; give a TOML file in UTF-8") from None
        return Experiment.from_toml(text, file, path.parent, **changes)


def experiment_flags(command: Callable[..., None], without: str = "") -> Callable[..., None]:
    """Add all flags of an experiment but `without` to a command, which gets them as Settings."""
    flags = {flag.parameter.name: flag for flag in FLAGS.values() if flag.name != without}

    @functools.wraps(command)
    def wrapper(file: str | None, **values: Any) -> None:
        by_flag = {flag.name: values.pop(name) for name, flag in flags.items()}
        command(Settings(file, read_changes(by_flag)), **values)

    settings, *others = inspect.signature(command).parameters.values()
    file = settings.replace(name="file", default=None, annotation=ExperimentFile)
    parameters = [file, *others, *(flag.parameter for flag in flags.values())]
    parameters.sort(key=lambda parameter: parameter.name in LAST)
    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
    return wrapper
