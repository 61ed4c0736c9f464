"""Readers: turn text, tables and objects into the parts of an experiment."""

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from textwrap import shorten
from typing import Any

from peerage import specs
from peerage.algorithm import Algorithm
from peerage.algorithms import ALGORITHMS
from peerage.data.clusters import Clusters
from peerage.data.shifts import SHIFTS
from peerage.errors import InputError, did_you_mean
from peerage.experiment.outside import (
    OUTSIDE,
    OwnMetric,
    load_class,
    load_metric,
    load_model,
    own_path,
    required,
)
from peerage.experiment.toml import HEAD, PYTHON_OBJECT
from peerage.graphs.faults import Faults
from peerage.graphs.topology import TOPOLOGIES, FromGraph
from peerage.models import MIXES, MODELS
from peerage.models.start import Split
from peerage.privacy import Noise
from peerage.records.metrics import RESERVED, STATISTICS, VALIDATION
from peerage.work.losses import CORRECTIONS, LOSSES
from peerage.work.training import LocalSGD


def reader(kind: str, family: specs.Family, *attributes: str) -> Callable[[Any], Any]:
    """A function that accepts a member of a family as text, table or object.

    An object may be of a user's own class that has one of these attributes.
    """

    def read(value: Any) -> Any:
        if isinstance(value, str):
            return specs.parse(value, kind, family)
        if isinstance(value, Mapping):
            if value.get("name") == PYTHON_OBJECT:
                raise InputError(
                    f"this experiment's {kind} is a Python object ({value.get('value')}), which a "
                    "file cannot hold; use peerage.resume(folder, experiment=...) or "
                    "peerage.verify with the same object"
                )
            return specs.from_table(value, kind, family)
        is_class = isinstance(value, type) and hasattr(value, attributes[0])  # Ring, not Ring()
        if is_class or not any(hasattr(value, name) for name in attributes):
            raise InputError(
                f"{kind} cannot be {shorten(repr(value), 80)}; give a name such as "
                f"{next(iter(family))!r}, a table with a name, or an object"
            )
        return value

    return read


def read_algorithm(value: Any) -> Algorithm[Any]:
    """As `reader`, but also accepts `file.py:Class:key=value` for one outside the package."""
    outside = _outside(value)
    if not outside:
        algorithm = reader("algorithm", ALGORITHMS, "round")(value)
    else:
        cls = load_class(own_path(outside["file"]), outside["name"])
        algorithm = reader("algorithm", {outside["name"]: cls}, "round")(_inside(value, outside))
    if not isinstance(algorithm, Algorithm):
        raise InputError(f"algorithm must be an Algorithm, got {algorithm!r}")
    if not is_dataclass(algorithm):
        raise InputError(
            f"algorithm {type(algorithm).__name__!r} is not a dataclass; "
            "write @dataclass(frozen=True) above it"
        )
    return algorithm


def _outside(value: Any) -> re.Match[str] | None:
    """The file, name and options in text or a table, if it names code outside the package."""
    name = value.get("name") if isinstance(value, Mapping) else value
    return OUTSIDE.fullmatch(name) if isinstance(name, str) else None


def _inside(value: Any, outside: re.Match[str]) -> Any:
    """The same text or table without the file."""
    if isinstance(value, Mapping):
        return {**value, "name": outside["name"]}
    return f"{outside['name']}:{outside['options'] or ''}"


def read_metrics(value: Any) -> tuple[OwnMetric, ...]:
    """Metrics of a user's own, each as text `file.py:function`."""
    items = value if isinstance(value, list | tuple) else [value]
    metrics = tuple(map(_read_metric, items))
    taken = set(RESERVED)  # keys of the records
    for metric in metrics:
        keys = {metric.name + ending for ending in STATISTICS}
        if keys & taken or metric.name.startswith(VALIDATION):
            raise InputError(
                f"the records have another use for the name of metric {metric.name!r}; "
                "rename the function"
            )
        taken |= keys
    return metrics


def _read_metric(value: Any) -> OwnMetric:
    if isinstance(value, OwnMetric):
        return value
    outside = _outside(value)
    if not outside or isinstance(value, Mapping):
        raise InputError(
            f"metric {shorten(repr(value), 80)} is not of the form file.py:function; write "
            "--metric my_file.py:balanced"
        )
    if outside["options"]:
        raise InputError(f"metric {value!r} cannot have options; write {value.rpartition(':')[0]}")
    return load_metric(own_path(outside["file"]), outside["name"])


def read_topology(value: Any) -> Any:
    nx = sys.modules.get("networkx")  # not loaded here: it takes 11 MB, and few experiments need it
    if nx is not None and isinstance(value, nx.Graph):
        return FromGraph(value)
    return reader("topology", TOPOLOGIES, "build")(value)


def read_models(value: Any) -> tuple[Any, ...]:
    """One model for all nodes, or several that nodes take in turn; a mix stands for its members."""
    if value is None:
        return ()
    items = value if isinstance(value, list | tuple) else [value]
    return tuple(_read_model(member) for item in items for member in _members(item))


def _members(value: Any) -> tuple[Any, ...]:
    """The members of a mix, given by name as text or table; any other value is its only member."""
    text = value.get("name") if isinstance(value, Mapping) else value
    name, colon, _ = text.partition(":") if isinstance(text, str) else ("", "", "")
    if name not in MIXES:
        return (value,)
    if colon or (isinstance(value, Mapping) and len(value) > 1):
        raise InputError(
            f"mix {name!r} of models has no options; write {name}, or list the models one by one"
        )
    return MIXES[name].members


def _read_model(value: Any) -> Any:
    if isinstance(value, Mapping) and HEAD in value:
        plain = {key: option for key, option in value.items() if key != HEAD}
        value = Split(_read_model(plain), value[HEAD])
    if isinstance(value, Split):
        model = _read_model(value.model)
        model = model.model if isinstance(model, Split) else model  # the outer one counts
        return replace(value, model=model) if value.head_modules else model
    if outside := _outside(value):
        return _read_own_model(value, outside)
    name = value.partition(":")[0].strip() if isinstance(value, str) else None
    if name is not None and name not in MODELS:
        hint = did_you_mean(name, [*MODELS, *MIXES])
        if name in MIXES:
            hint = "it is a mix of several models, of which the head cannot be named here"
        raise InputError(f"unknown model {name!r}; {hint}")
    return reader("model", MODELS, "build", "__call__")(value)


def _read_own_model(value: Any, outside: re.Match[str]) -> Any:
    found: Any = load_model(own_path(outside["file"]), outside["name"])
    name = str(outside["name"])
    if hasattr(found, "build"):
        family: specs.Family = {name: found}
        if not is_dataclass(found):
            raise InputError(
                f"model {name!r} is not a dataclass; write @dataclass(frozen=True) above it"
            )
        return reader("model", family, "build")(_inside(value, outside))
    if outside["options"] or (isinstance(value, Mapping) and len(value) > 1):
        raise InputError(
            f"model {name!r} has no options; to give it some, write a dataclass with a method "
            "build(self, shape, classes)"
        )
    if missing := required(found):
        raise InputError(
            f"model {name!r} requires {missing[0]}; give it a default, or write a dataclass with a "
            "method build(self, shape, classes)"
        )
    return found


def read_local(value: Any) -> LocalSGD:
    if isinstance(value, LocalSGD):
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
    work: LocalSGD = specs.construct(LocalSGD, options, "local")
    return replace(work, **parts)


def read_faults(value: Any) -> Faults:
    if isinstance(value, Faults):
        return value
    if not isinstance(value, Mapping):
        raise InputError(f"faults must be a table, got {value!r}; write [faults] and links = 0.5")
    faults: Faults = specs.construct(Faults, value, "faults")
    return faults


def read_clusters(value: Any) -> Clusters | None:
    """Clusters from an object, a table, or text: sizes and a shift, as in `30/2:rotate`."""
    if value is None or isinstance(value, Clusters):
        return value
    if isinstance(value, str):
        sizes, colon, shift = value.partition(":")
        value = {"sizes": sizes, **({"shift": shift} if colon else {})}
    if not isinstance(value, Mapping):
        raise InputError(
            f"clusters cannot be {shorten(repr(value), 80)}; write 30/2:rotate, or a table with "
            "sizes and a shift"
        )
    known = [field.name for field in fields(Clusters)]
    for key in value:
        if key not in known:
            raise InputError(f"clusters has no key {key!r}; {did_you_mean(key, known)}")
    if "sizes" not in value:
        raise InputError("clusters requires sizes; write --clusters 30/2:rotate")
    shift = reader("shift", SHIFTS, "__call__")(value.get("shift", "none"))
    shuffle = specs.convert(value.get("shuffle", False), bool, "clusters: shuffle")
    return Clusters(value["sizes"], shift, shuffle)


def read_noise(value: Any) -> Noise:
    if isinstance(value, Noise):
        return value
    if not isinstance(value, Mapping):
        raise InputError(f"noise must be a table, got {value!r}; write [noise] and sigma = 0.1")
    noise: Noise = specs.construct(Noise, value, "noise")
    if "delta" in value and not noise.private:
        raise InputError(
            f"delta={noise.delta:g} requires differential privacy; "
            "also set sigma above 0 and a clip"
        )
    return noise


def split_start(init: Mapping[str, Any]) -> Mapping[str, Any]:
    """The section `init` with `start = "file:FILE"` as `start = "file"` and `file = "FILE"`."""
    start, colon, file = str(init.get("start", "")).partition(":")
    return {**init, "start": start, "file": file} if start == "file" and colon else init


def with_file_in(table: dict[str, Any], folder: Path | None) -> dict[str, Any]:
    """The table with the relative path of its model file, if it has one, in this folder."""
    init = table.get("init")
    if folder is None or not isinstance(init, Mapping):
        return table
    init = split_start(init)
    if not isinstance(init.get("file"), str):
        return table
    return {**table, "init": {**init, "file": str(folder / init["file"])}}
