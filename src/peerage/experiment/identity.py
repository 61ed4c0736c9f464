"""The identity of an experiment: the settings that determine its result."""

from collections.abc import Mapping
from typing import Any

from peerage import specs
from peerage.algorithms import ALGORITHMS
from peerage.data.datasets import DATASETS
from peerage.data.examples import content_hash
from peerage.data.partition import PARTITIONS
from peerage.data.tensors import Dataset
from peerage.experiment.experiment import Experiment
from peerage.experiment.outside import (
    by_content,
    defined_by,
    is_by_content,
    loaded_file,
    source_file,
    source_hash,
)
from peerage.experiment.toml import HEAD, PYTHON_OBJECT, local_table
from peerage.graphs.faults import Faults
from peerage.graphs.gains import GAINS
from peerage.graphs.topology import TOPOLOGIES
from peerage.models import MODELS
from peerage.models.start import Split
from peerage.privacy import Noise
from peerage.work.losses import CORRECTIONS, LOSSES
from peerage.work.training import LocalSGD


def identity(experiment: Experiment) -> dict[str, Any]:
    """The table of an experiment without what does not change the result."""
    return identity_of(experiment.table())


def identity_of(table: Mapping[str, Any]) -> dict[str, Any]:
    """The same of a table: without the engine, and without the path of a model file.

    The table has a hash of the file's content.
    """
    settings = {key: value for key, value in table.items() if key != "engine"}
    if "file" in settings.get("init", {}):
        settings["init"] = {key: v for key, v in settings["init"].items() if key != "file"}
    return settings


def own_code(experiment: Experiment) -> dict[str, str]:
    """The files of a user's own algorithm, models and metrics, with the SHA-256 of each."""
    found = {str(metric.file): metric.sha256 for metric in experiment.evaluation.metrics}
    cls = defined_by(experiment.algorithm)
    if (sha256 := source_hash(cls)) is not None:
        found[str(source_file(cls))] = sha256
    return found | model_code(experiment)


def model_code(experiment: Experiment) -> dict[str, str]:
    """As `own_code`, but only the files of models."""
    models = [model.model if isinstance(model, Split) else model for model in experiment.model]
    classes = [cls for cls in map(defined_by, models) if loaded_file(cls) is not None]
    return {str(loaded_file(cls)): str(source_hash(cls)) for cls in classes}


def content_identity(experiment: Experiment) -> dict[str, Any]:
    """As `identity`, but equal for the same code in another folder, and not for other code."""
    return by_content(identity(experiment), own_code(experiment))


def run_key(experiment: Experiment) -> dict[str, Any]:
    """The settings in which an experiment differs from the defaults.

    Its hash names study folders. An option that a later version adds, with a default that changes
    no result, must not change it, so that finished runs stay finished.
    """
    table = content_identity(experiment)
    local = table.pop("local", local_table(LocalSGD()))
    init, models = table.pop("init"), table["model"]
    defaults = Experiment().table()
    key = {
        **table,
        "algorithm": _text(table["algorithm"], "algorithm", ALGORITHMS),
        "dataset": _dataset_text(experiment, table["dataset"]),
        "model": [
            _model_text(model) for model in (models if isinstance(models, list) else [models])
        ],
        "topology": specs.table_text(table["topology"], "topology", TOPOLOGIES),
        "partition": specs.table_text(table["partition"], "partition", PARTITIONS),
        "until": table.get("until", "None"),
        "loss": specs.table_text(local.pop("loss"), "loss", LOSSES),
        "start": init.pop("start"),
        "evaluation": _beyond(table["evaluation"], defaults["evaluation"]),
    }
    # Keys that are newer than the first finished runs are added only where they are used.
    if "correct" in local:
        key["correct"] = specs.table_text(local.pop("correct"), "correction", CORRECTIONS)
    key["local"] = _beyond(local, defaults["local"])
    if init := _beyond(init, defaults["init"]):
        if "gain" in init:
            init["gain"] = specs.table_text(init["gain"], "gain", GAINS)
        key["init"] = init
    for name, default in (("faults", Faults()), ("noise", Noise())):
        if name in table:
            key[name] = _beyond(table[name], specs.plain(default))
    return key


def _dataset_text(experiment: Experiment, table: Mapping[str, Any]) -> str:
    """The data set; loaded data is named by its content, and has no other name in a file."""
    if isinstance(data := experiment.dataset, Dataset):
        return f"{PYTHON_OBJECT}:sha256={data.sha256 or content_hash(data)}"
    return specs.table_text(table, "dataset", DATASETS)


def _model_text(table: Mapping[str, Any]) -> str:
    head = "+".join(table.get(HEAD, ()))
    plain = {key: value for key, value in table.items() if key != HEAD}
    return _text(plain, "model", MODELS) + (f" head {head}" if head else "")


def _text(table: Mapping[str, Any], kind: str, family: specs.Family) -> str:
    """An algorithm or model as text; own code has all options, as its defaults are in its file."""
    name = str(table["name"])
    if name in family or not is_by_content(name):
        return specs.table_text(table, kind, family)
    options = [f"{key}={specs.spelled(value)}" for key, value in table.items() if key != "name"]
    return ":".join([name, *([",".join(options)] if options else [])])


def _beyond(table: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in table.items() if defaults.get(key) != value}
