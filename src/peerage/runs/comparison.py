"""Comparisons: several algorithms, with the same data, graph and initial models for each seed."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from peerage.algorithm import Algorithm
from peerage.algorithms import ALGORITHMS
from peerage.data import Dataset
from peerage.errors import InputError
from peerage.experiment.experiment import HUB, Experiment, display_name, reference
from peerage.experiment.readers import read_algorithm
from peerage.records.rows import RunRecord
from peerage.runs.run import Result, check_empty, check_every, run
from peerage.runs.view import View


@dataclass(frozen=True)
class Comparison(View):
    """The results of a comparison, in the order of the algorithms, and of the seeds of each.

    >>> import peerage as pg
    >>> small = {"nodes": 3, "rounds": 1, "topology": "ring", "engine": {"name": "serial"}}
    >>> compared = pg.compare(["local", "decavg"], seeds=2, **small)
    >>> [(result.experiment.seed, result.record.algorithm) for result in compared.results]
    [(0, 'local'), (1, 'local'), (0, 'decavg'), (1, 'decavg')]
    >>> sorted(compared.frame().columns)[:2]
    ['accuracy', 'accuracy_max']
    """

    results: tuple[Result, ...]
    folder: Path | None = None

    @property
    def records(self) -> Sequence[RunRecord]:
        names = run_names([result.experiment for result in self.results])
        found = [result.record for result in self.results]
        return [
            one if one.saved else replace(one, folder=Path(name))
            for one, name in zip(found, names, strict=True)
        ]

    def __iter__(self) -> Iterator[Result]:
        return iter(self.results)

    def __len__(self) -> int:
        return len(self.results)


def compare(
    algorithms: Iterable[Algorithm[Any] | Experiment | str],
    *,
    seeds: int = 1,
    references: Iterable[str] = (),
    out: str | Path | None = None,
    dataset: Dataset | None = None,
    checkpoint_every: int | None = None,
    progress: bool | None = None,
    log_to: str | None = None,
    **settings: Any,
) -> Comparison:
    """Run several algorithms on the same data, graph and initial models, as `peerage compare` does.

    `algorithms` are objects or text, and `settings` are those of an `Experiment`; or give
    experiments, which have their own. With `seeds`, every one runs with as many seeds, from its own
    on. `references` are baselines of the first: `centralised`, `isolated`. With `out`, every run
    has a folder in that new folder. `progress` and `log_to` are as in `run`.

    >>> import peerage as pg
    >>> small = {"nodes": 4, "rounds": 1, "topology": "ring", "engine": {"name": "serial"}}
    >>> compared = pg.compare([pg.DecAvg(), "dechw:theta=30"], **small)
    >>> [row["label"] for row in compared.table()]
    ['DecAvg', 'DecHW (theta=30)']
    >>> compared.plot("loss").axes[0].get_xlabel()
    'round'
    """
    items: list[Any] = (
        [algorithms] if isinstance(algorithms, str | Algorithm | Experiment) else list(algorithms)
    )
    if settings and any(isinstance(item, Experiment) for item in items):
        raise InputError(
            f"experiments have their own {next(iter(settings))}; set it in them, or give algorithms"
        )
    wanted = comparable(items, references, seeds, lambda **more: Experiment(**{**settings, **more}))
    return run_all(wanted, out, dataset, checkpoint_every, progress, log_to)


def comparable(
    items: Iterable[Any],
    references: Iterable[str],
    seeds: int,
    build: Callable[..., Experiment],
) -> list[Experiment]:
    """The experiments of a comparison; `build` makes one from an algorithm and its topology."""
    if seeds < 1:
        raise InputError(f"seeds must be at least 1, got {seeds}")
    experiments = [one if isinstance(one, Experiment) else _built(one, build) for one in items]
    if not experiments:
        raise InputError("a comparison needs at least one algorithm; give decavg,dechw")
    starts = {one.init.start: display_name(one.algorithm, ALGORITHMS) for one in experiments}
    if len(starts) > 1:
        known = " and ".join(f"{name} {start}" for start, name in starts.items())
        raise InputError(
            f"the algorithms start from different kinds of initial models ({known}); add --init "
            "shared or --init independent"
        )
    experiments += [reference(name, experiments[0]) for name in references]
    return [
        one.model_copy(update={"seed": seed})
        for one in experiments
        for seed in range(one.seed, one.seed + seeds)
    ]


def _built(item: Any, build: Callable[..., Experiment]) -> Experiment:
    algorithm = read_algorithm(item)
    return build(algorithm=algorithm, **({"topology": HUB} if algorithm.with_hub else {}))


def run_names(experiments: Sequence[Experiment]) -> list[str]:
    """The folder of each run: its number and algorithm."""
    return [
        f"{number}-{display_name(experiment.algorithm, ALGORITHMS)}"
        for number, experiment in enumerate(experiments, start=1)
    ]


def run_all(
    experiments: Sequence[Experiment],
    out: str | Path | None,
    dataset: Dataset | None = None,
    checkpoint_every: int | None = None,
    progress: bool | None = None,
    log_to: str | None = None,
) -> Comparison:
    """Run the experiments one after the other; with `out`, each in a folder of that new folder."""
    check_every(checkpoint_every)
    home = None if out is None else Path(out)
    if home is not None:
        check_empty(home)
    results = [
        run(
            experiment,
            None if home is None else home / name,
            dataset=dataset,
            checkpoint_every=checkpoint_every,
            progress=progress,
            log_to=log_to,
        )
        for experiment, name in zip(experiments, run_names(experiments), strict=True)
    ]
    return Comparison(tuple(results), home)
