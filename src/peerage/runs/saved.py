"""Open the folder of a run, of a network of real peers, or of one peer, for its models.

Building a model needs no data, as `setup.json` holds shape and type of an example. In the folder of
a peer it also holds the experiment, so that the folder is enough.
"""

import hashlib
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from peerage.engine.prepare import load_dataset, name_architectures, with_model
from peerage.engine.world import constants_of, describe_example
from peerage.errors import CheckpointError, InputError
from peerage.experiment.experiment import Experiment
from peerage.experiment.identity import model_code
from peerage.experiment.outside import OUTSIDE, CodeGate, check_unchanged, code_gate, own_path
from peerage.experiment.permission import allowed
from peerage.experiment.toml import PYTHON_OBJECT
from peerage.files import read_bytes, read_json, read_toml
from peerage.records import rows as records
from peerage.runs.run import check_constants, check_same, code_of_run
from peerage.runs.saved_run import SavedRun
from peerage.runs.view import View

EXPERIMENT = "experiment"  # key of `setup.json` in the folder of a peer: the experiment as TOML


class RunRecord(View, records.RunRecord):
    """The records of a run, finished or not, with the models of its last checkpoint.

    >>> import tempfile
    >>> import peerage as pg
    >>> folder = f"{tempfile.mkdtemp()}/first"
    >>> experiment = pg.Experiment(nodes=3, rounds=1, topology="ring", engine={"name": "serial"})
    >>> result = pg.run(experiment, out=folder)
    >>> record = pg.RunRecord.load(folder)
    >>> record.status, record.rounds, record.accuracy == result.accuracy
    ('finished', 1, True)
    """

    @property
    def records(self) -> Sequence[records.RunRecord]:
        return [self]

    @property
    def accuracy(self) -> float | None:
        """The mean accuracy over the nodes in the last evaluated round; None without any."""
        values = self.curve("accuracy")[1]
        return values[-1] if values else None

    @property
    def digest(self) -> str | None:
        """The digest of all final parameters; None if the run is not finished."""
        return self.summary.get("digest")

    def state_dict(
        self, node: int, name: str | None = None, *, experiment: Experiment | None = None
    ) -> dict[str, Tensor]:
        """The evaluated model of a node, or that with a name, as `Result.state_dict` returns it.

        For an unfinished run, it is the model of the last checkpoint. `experiment` is needed only
        if the run's model is a Python object.
        """
        return open_run(self.folder, experiment=experiment).model(node, name).state_dict()

    def module(
        self, node: int, name: str | None = None, *, experiment: Experiment | None = None
    ) -> nn.Module:
        """The model of `state_dict` as a module in evaluation mode."""
        return open_run(self.folder, experiment=experiment).model(node, name).module()


def load(folder: str | Path) -> RunRecord:
    """The result of a run from its folder, whether it is finished, interrupted or still running.

    It has the tables, figures and reports of a `Result`, and the models of the last checkpoint.

    >>> import tempfile
    >>> import peerage as pg
    >>> folder = f"{tempfile.mkdtemp()}/first"
    >>> experiment = pg.Experiment(nodes=3, rounds=1, topology="ring", engine={"name": "serial"})
    >>> result = pg.run(experiment, out=folder)
    >>> loaded = pg.load(folder)
    >>> loaded.digest == result.digest, loaded.frame().equals(result.frame())
    (True, True)
    """
    folder = Path(folder)
    if folder.is_dir() and not (folder / "experiment.toml").exists():
        inside = sorted(file.parent.name for file in folder.glob("*/experiment.toml"))
        if inside:
            raise CheckpointError(
                f"{str(folder)!r} holds no run itself, but the folders of several; give one of "
                f"them, such as {str(folder / inside[0])!r}"
            )
    return RunRecord.load(folder)


def open_run(
    folder: str | Path, *, experiment: Experiment | None = None, network: Path | None = None
) -> SavedRun:
    """The models in the folder of a run, of a network, or of one real peer.

    `experiment` is needed if the run's model is a Python object. `network` is the network file of a
    peer of an earlier version, if it is neither in its folder nor in one of the two above.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(
            f"there is no folder {str(folder)!r}; give one that `peerage run`, `peerage up` or "
            "`peerage node` made"
        )
    files = [
        *folder.glob("peer.json"),
        *folder.glob("*/peer.json"),
        *folder.glob("peers/*/peer.json"),
    ]
    if not files:
        content = read_bytes(folder / "experiment.toml").decode()
        return _open(folder, folder.absolute().name, content, {}, experiment)
    peers = {file.parent: read_json(file) for file in files}
    first = files[0].parent
    text = None if network else _own_experiment(first)
    source, table = first, {}
    if text is not None:
        run = str(peers[first].get("run"))
    else:  # a peer of an earlier version has no experiment in its folder
        source = network or _network_file(folder, first)
        table = read_toml(source)
        run = str(table.get("run"))
        if not any(peer.get("run") == run for peer in peers.values()):
            raise InputError(
                f"{source} is the network file of run {run}, but {folder} is of another run; give "
                "the right file with --network"
            )
        text = read_bytes(source.parent / str(table.get("experiment"))).decode()
    places = {int(peer["node"]): at for at, peer in peers.items() if peer.get("run") == run}
    if (source.parent / "environment.json").exists():  # `peerage up` made it on this machine
        return _open(folder, run, text, places, experiment)
    known = frozenset().union(*map(allowed, places.values()))
    with code_gate(CodeGate.of_network(source, table, known)):
        return _open(folder, run, text, places, experiment)


def _own_experiment(peer: Path) -> str | None:
    """The experiment of a peer, from its own folder; None if it is not there."""
    file = peer / "setup.json"
    found = read_json(file).get(EXPERIMENT) if file.exists() else None
    return None if found is None else str(found)


def _network_file(folder: Path, peer: Path) -> Path:
    folders = [peer.absolute(), *peer.absolute().parents[:2]]
    found = next((one for one in folders if (one / "network.toml").exists()), None)
    if found is None:
        raise InputError(
            f"there is no network.toml in {folder} or above it; give the network file of this peer "
            "with --network"
        )
    return found / "network.toml"


def _open(
    folder: Path,
    run: str,
    text: str,
    places: Mapping[int, Path],
    given: Experiment | None,
) -> SavedRun:
    """Open a run with this experiment, or a network with the folders of its peers in `places`."""
    try:
        table = tomllib.loads(text)
    except ValueError as error:
        raise CheckpointError(f"the experiment of {folder} is not valid TOML ({error})") from None
    experiment = given or _read(table, folder)
    check_unchanged(code_of_run(folder), model_code(experiment))
    objects = [] if given else [k for k in ("algorithm", "dataset") if _is_object(table.get(k))]
    setup = _setup([folder, *places.values()], folder, experiment, complete=not objects)
    shape = tuple(setup["example"]["shape"])
    experiment = with_model(experiment, shape)
    if given is not None:
        check_same(text, folder, experiment)
    kinds = name_architectures(experiment, shape, len(setup["classes"]))
    check_constants(folder, setup, {"constants": constants_of(kinds) or None})
    nodes, hub = experiment.nodes_and_hub, experiment.hub
    if not places:
        nodes = len(setup["parameters"])
        hub = setup.get("hub", nodes - 1) if nodes > len(setup["examples"]) else None
    elif "nodes" in setup:  # the algorithm may not be here
        nodes, hub = setup["nodes"], setup["hub"]
    origin = {
        "run": run,
        "algorithm": _name(table.get("algorithm")),
        "dataset": _name(table.get("dataset")),
        "experiment": hashlib.sha256(text.encode()).hexdigest(),
    }
    return SavedRun(
        folder,
        experiment,
        None if "algorithm" in objects else experiment.algorithm,
        list(kinds.values()),
        torch.zeros(1, *shape, dtype=getattr(torch, setup["example"]["dtype"])),
        nodes,
        hub,
        places or dict.fromkeys(range(nodes), folder),
        origin,
        "models_at" in setup,
        bool(places),
    )


def _read(table: dict[str, Any], folder: Path) -> Experiment:
    """The experiment, with defaults for Python objects and metrics: no model depends on them."""
    if "metrics" in table.get("evaluation", {}):
        kept = {key: value for key, value in table["evaluation"].items() if key != "metrics"}
        table = {**table, "evaluation": kept}
    models = table.get("model", [])
    if any(map(_is_object, models if isinstance(models, list) else [models])):
        raise InputError(
            f"the model of {folder} is a Python object, which a file cannot hold; use "
            "peerage.RunRecord.load(folder).state_dict(node, experiment=...)"
        )
    init = {key: value for key, value in table.get("init", {}).items() if not _is_object(value)}
    clusters = table.get("clusters")
    if isinstance(clusters, Mapping) and _is_object(clusters.get("shift")):
        table = {**table, "clusters": None}
    return Experiment(**{k: v for k, v in table.items() if not _is_object(v)} | {"init": init})


def _setup(
    folders: Iterable[Path], folder: Path, experiment: Experiment, complete: bool
) -> dict[str, Any]:
    """The setup of a run; that of an older version has no example, so the data are loaded."""
    files = [one / "setup.json" for one in folders]
    found = [read_json(file) for file in files if file.exists()]
    setup = next((one for one in found if "example" in one), found[0] if found else {})
    if "example" in setup:
        return setup
    if not complete:
        raise InputError(
            f"{folder} is of an older version, and its experiment has Python objects; use "
            "peerage.RunRecord.load(folder).state_dict(node, experiment=...)"
        )
    data = load_dataset(experiment)
    return {
        **setup,
        "classes": data.classes,
        "example": describe_example(data.shape, torch.float32),
    }


def _is_object(value: Any) -> bool:
    """Whether a value from a file stands for a Python object, or for a class that is not here."""
    if not isinstance(value, Mapping):
        return False
    outside = OUTSIDE.fullmatch(str(value.get("name")))
    missing = outside is not None and not own_path(outside["file"]).is_file()
    return missing or value.get("name") == PYTHON_OBJECT


def _name(value: Any) -> str:
    table = value if isinstance(value, Mapping) else {"name": value}
    return str(table.get("value", table.get("name")) if _is_object(table) else table.get("name"))
