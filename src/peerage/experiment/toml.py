"""An experiment as a table of plain values, and a table as TOML text."""

import json
import tomllib
from collections.abc import Mapping
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from peerage import specs
from peerage.algorithm import Algorithm
from peerage.algorithms import ALGORITHMS
from peerage.data.clusters import Clusters
from peerage.data.datasets import DATASETS
from peerage.data.partition import PARTITIONS
from peerage.data.shifts import SHIFTS
from peerage.data.tensors import Dataset
from peerage.errors import InputError
from peerage.experiment.outside import defined_by, loaded_file, source_file
from peerage.graphs.faults import Faults
from peerage.graphs.gains import GAINS
from peerage.graphs.topology import TOPOLOGIES
from peerage.models import MODELS
from peerage.models.start import Split
from peerage.privacy import Noise
from peerage.work.losses import CORRECTIONS, LOSSES
from peerage.work.training import LocalSGD

if TYPE_CHECKING:
    from peerage.experiment.experiment import Experiment

PYTHON_OBJECT = "python-object"  # stands for a value that a file cannot hold
HEAD = "head"  # key of a model's table: the modules of its head; see `Split`
# Tables whose single keys may be changed.
SECTIONS = ("clusters", "local", "init", "faults", "noise", "evaluation", "engine")


def table_of(experiment: "Experiment") -> dict[str, Any]:
    """Plain values that describe the experiment completely."""
    models = [_model_table(model) for model in experiment.model]
    init, evaluation = experiment.init, experiment.evaluation
    # Newer keys are written only where they are used, so that older runs can be resumed.
    unused = {"metrics"} if evaluation.spread else {"spread", "metrics"}
    if evaluation.node_rows == type(evaluation).model_fields["node_rows"].default:
        unused.add("node_rows")
    metrics = [str(metric) for metric in evaluation.metrics]
    has_local = hasattr(experiment.algorithm, "local")
    rewired = experiment.assortativity is not None
    clusters, schema = experiment.clusters, experiment.data_schema
    return {
        "nodes": experiment.nodes,
        "rounds": experiment.rounds,
        **({"until": str(experiment.until)} if experiment.until else {}),
        **({"pooled": True} if experiment.pooled else {}),
        **({"assortativity": experiment.assortativity} if rewired else {}),
        "seed": experiment.seed,
        "algorithm": _algorithm_table(experiment.algorithm),
        "dataset": _dataset_table(experiment.dataset),
        "model": models[0] if len(models) == 1 else models,
        "topology": _family_table(experiment.topology, "topology", TOPOLOGIES),
        "partition": _family_table(experiment.partition, "partition", PARTITIONS),
        **({"clusters": _clusters_table(clusters)} if clusters is not None else {}),
        **({"data_schema": schema.table()} if schema is not None else {}),
        **({"local": local_table(experiment.local)} if has_local else {}),
        "init": {
            "start": init.start,
            **({"file": init.file, "sha256": init.sha256} if init.file else {}),
            "scheme": init.scheme,
            **({"bias": init.bias} if init.bias else {}),
            "gain": _family_table(init.gain, "gain", GAINS),
        },
        **({"faults": specs.plain(experiment.faults)} if experiment.faults != Faults() else {}),
        **({"noise": _noise_table(experiment.noise)} if experiment.noise.active else {}),
        "evaluation": evaluation.model_dump(exclude_none=True, exclude=unused)
        | {"at": experiment.evaluated_at, **({"metrics": metrics} if metrics else {})},
        "engine": experiment.engine.model_dump(exclude_none=True),
    }


def local_table(work: LocalSGD) -> dict[str, Any]:
    table = {key: value for key, value in specs.plain(work).items() if key != "correct"}
    table["loss"] = _family_table(work.loss, "loss", LOSSES)
    if work.correct is not None:
        table["correct"] = _family_table(work.correct, "correction", CORRECTIONS)
    return table


def merged(table: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The table with changes: they replace single keys of a section, and all else as a whole."""
    result = dict(table)
    for key, value in changes.items():
        old = result.get(key)
        mergeable = isinstance(old, Mapping) and isinstance(value, Mapping)
        result[key] = {**dict(old or {}), **value} if key in SECTIONS and mergeable else value
    return result


def toml(table: Mapping[str, Any], prefix: str = "") -> str:
    """A table of plain values as TOML text."""
    lines, tables = [], []
    for key, value in table.items():
        if isinstance(value, Mapping) and not prefix:
            tables.append(f"\n[{key}]\n{toml(value, key)}")
        elif isinstance(value, list) and value and isinstance(value[0], Mapping):
            name = f"{prefix}.{key}" if prefix else key
            tables += [f"\n[[{name}]]\n{toml(item, name)}" for item in value]
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
    return text.replace("\x7f", "\\u007f")  # the only character that JSON allows and TOML forbids


def _family_table(value: Any, kind: str, family: specs.Family) -> dict[str, Any]:
    if type(value) in family.values():
        return specs.to_table(value, kind, family)
    name = value.__qualname__ if callable(value) and hasattr(value, "__qualname__") else None
    return {"name": PYTHON_OBJECT, "value": name or type(value).__name__}


def _dataset_table(value: Any) -> dict[str, Any]:
    """The table of a data set; that of loaded data has a hash of its content, if it is known."""
    sha256 = getattr(value, "sha256", None) if isinstance(value, Dataset) else None
    known = {} if sha256 is None else {"sha256": sha256}
    return _family_table(value, "dataset", DATASETS) | known


def _model_table(value: Any) -> dict[str, Any]:
    if isinstance(value, Split):
        return {**_model_table(value.model), HEAD: list(value.head_modules)}
    # Only models that were given as `file.py:Name`: older runs name others as Python objects.
    cls = defined_by(value)
    file, options = loaded_file(cls), {}
    if file is not None and cls is not value and is_dataclass(cls):
        options = specs.plain(value)
        file = file if _fits_in_file(value, options) else None
    if file is not None and not isinstance(value, nn.Module):
        return {"name": f"{file}:{cls.__name__}", **options}
    return _family_table(value, "model", MODELS)


def _algorithm_table(algorithm: Algorithm[Any]) -> dict[str, Any]:
    cls = type(algorithm)
    if cls in ALGORITHMS.values():
        return specs.to_table(algorithm, "algorithm", ALGORITHMS)
    options = specs.plain(algorithm)
    # Loading a script would run it again, so its classes are written as Python objects.
    file = source_file(cls)
    if file and "." not in cls.__qualname__ and _fits_in_file(algorithm, options):
        return {"name": f"{file}:{cls.__name__}", **options}
    scalars = {key: v for key, v in options.items() if isinstance(v, str | bool | int | float)}
    return {"name": PYTHON_OBJECT, "value": cls.__qualname__, **scalars}


def _clusters_table(clusters: Clusters) -> dict[str, Any]:
    return {
        "sizes": list(clusters.sizes),
        "shift": _family_table(clusters.shift, "shift", SHIFTS),
        "shuffle": clusters.shuffle,
    }


def _noise_table(noise: Noise) -> dict[str, Any]:
    table = specs.plain(noise)
    return table if noise.private else {k: v for k, v in table.items() if k != "delta"}


def _fits_in_file(value: Any, options: Mapping[str, Any]) -> bool:
    """Whether the options, written to a file and read again, give an equal algorithm or model."""
    try:
        copy = specs.construct(type(value), tomllib.loads(toml(options)), "options")
    except (InputError, TypeError, ValueError):
        return False
    if hasattr(copy, "local"):  # has its own section
        copy = replace(copy, local=value.local)
    return bool(copy == value)
