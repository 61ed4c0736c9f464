"""A self-contained HTML page about runs, without scripts, fonts or images from elsewhere."""

import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from matplotlib.figure import Figure

from peerage.errors import InputError
from peerage.files import disk_errors, write_bytes
from peerage.records.environment import CODE
from peerage.records.metrics import BY_KEY, METRICS, SCORES, Metric, own_metric
from peerage.records.rows import RunRecord
from peerage.report import (
    fairness_figures,
    fairness_tables,
    figures,
    groups,
    peer_figures,
    peers,
    tables,
)
from peerage.report.alpha_figure import accuracy_over_alpha, has_alpha
from peerage.report.fairness import fairness_over_rounds
from peerage.report.tables import differing, labels, number, percent, value_text

ENDS = 10  # lowest and highest nodes shown if there are too many to show all
COLUMNS = 3  # runs that tables show as columns
SAME_ACCURACY = 0.0005  # smaller differences do not show in print
Curves = tuple[str, Callable[[RunRecord], bool], Callable[[Sequence[RunRecord]], Figure], str]


def _curves(metric: Metric) -> Curves:
    """The title, a predicate for runs with data, the figure, and the caption."""

    def known(record: RunRecord) -> bool:
        values = record.curve(metric.key)[1]
        return any(value > 0 for value in values) if metric.scale == "log" else bool(values)

    where = f"the {metric.name} on the test set, as the mean over the nodes"
    return (
        metric.title or metric.name.capitalize(),
        known,
        partial(figures.curves, key=metric.key),
        metric.caption or f"{metric.better} is better; {where}.".capitalize(),
    )


def _group_curves(by: str) -> Curves:
    return (
        groups.KINDS[by],
        lambda record: bool(record.group_curves("accuracy", by)),
        partial(figures.group_curves, by=by),
        f"Accuracy of each {by}, as the mean over its nodes; each node is evaluated on its own "
        "test set.",
    )


CURVES: tuple[Curves, ...] = (
    *(_curves(metric) for metric in METRICS if metric.source in ("test", "network")),
    *map(_group_curves, groups.KINDS),
    (
        "Fair accuracy",
        lambda record: bool(fairness_over_rounds(record)),
        fairness_figures.fair_accuracy_curves,
        "Two thirds of the mean accuracy of the clusters, plus one third of 1 minus the gap "
        "between the best and the worst of them; higher is better.",
    ),
    (
        "Accuracy and alpha",
        has_alpha,
        accuracy_over_alpha,
        "Alpha is how much models learn from the predictions of others instead of from labels. "
        "Peak models follow where it is largest.",
    ),
    (
        "Traffic",
        lambda record: any(row["bytes_total"] > 0 for row in record.network),
        figures.bytes_and_accuracy,
        "Mean accuracy over the bytes sent per node; further left is cheaper.",
    ),
    (
        "Nodes",
        lambda record: bool(record.nodes),
        figures.node_accuracies,
        "Every dot is a node. The vertical bar is the median, and the line through it spans the "
        "middle half of the nodes. A narrow group means that all nodes have similar accuracy.",
    ),
    (
        "Time",
        lambda record: record.rounds > 0,
        figures.phase_seconds,
        "Mean wall time per round by phase; in the phase 'wait', workers are idle until the others "
        "are ready.",
    ),
)


@dataclass(frozen=True)
class Picture:
    title: str
    caption: str
    address: str
    wide: bool


def write_report(records: Sequence[RunRecord], out: Path) -> None:
    """Write the page atomically; equal runs give equal bytes."""
    if not records:
        raise InputError("a report needs at least one run; give the folder of a run")
    out = Path(out)
    with disk_errors(out, "write the report again"):
        out.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(out, page(records).encode(), "write the report again")


def page(records: Sequence[RunRecord]) -> str:
    rows = tables.compare(records)
    titles, texts = tables.cells(rows)
    table = _readable([titles, *texts])
    names = labels(records)
    return _template().render(
        title=title(records),
        headline=headline(rows, where(records)),
        notes=notes(records),
        titles=table[0],
        lines=table[1:],
        best=max((row["best_accuracy"] or 0.0 for row in rows), default=0.0),
        percent=percent,
        pictures=pictures(records),
        runs=list(zip(names, figures.styled_runs(records), records, strict=True)),
        names=names,
        sheets=[
            _sheet("Settings", [tables.settings(record) for record in records]),
            _sheet("Data and graph", [facts(record) for record in records]),
            _sheet("Environment", [_environment(record) for record in records]),
        ],
        group_titles=groups.TITLES,
        group_tables=[(name, groups.lines(r)) for name, r in zip(names, records, strict=True)],
        fairness_table=_readable(fairness_tables.lines(records)),
        peer_tables=[(name, peers.table(r)) for name, r in zip(names, records, strict=True)],
        unheard_titles=peers.UNHEARD,
        unheard_tables=[(name, peers.unheard(r)) for name, r in zip(names, records, strict=True)],
        node_tables=[_node_table(record) for record in records],
        commands=[_commands(record) for record in records],
    )


def _readable(lines: Sequence[Sequence[str]]) -> list[Sequence[str]]:
    """Titles and lines; few runs are easier to read as columns, also on a phone."""
    return list(zip(*lines, strict=True)) if len(lines) <= 1 + COLUMNS else list(lines)


def title(records: Sequence[RunRecord]) -> str:
    names = labels(records)
    start = _and(names) if len(_and(names)) <= 50 else f"{len(names)} runs"
    return f"{start} on {_and(_data_sets(records))}"


def headline(rows: Sequence[Mapping[str, Any]], where: str) -> str:
    """Sentences that say what was compared, and which run leads by how much."""
    broken = [row for row in rows if row["status"] in ("diverged", "failed")]
    ranked = [row for row in rows if row["accuracy"] is not None and row not in broken]
    ranked.sort(key=lambda row: -row["accuracy"])
    sentences = [f"{_count(len(rows), 'run')} on {where}."]
    if ranked:
        sentences.append(_lead(ranked))
    sentences += [_broken(row) for row in broken]
    unevaluated = [row["label"] for row in rows if row["accuracy"] is None and row not in broken]
    if unevaluated:
        sentences.append(f"{_and(unevaluated)}: no round has been evaluated yet.")
    return " ".join(sentences)


def notes(records: Sequence[RunRecord]) -> list[str]:
    """Caveats about the numbers."""
    result = []
    for name, record in zip(labels(records), records, strict=True):
        planned = record.summary.get("rounds_planned")
        if record.status in ("running", "interrupted") and not peers.is_joined(record):
            state = "is not finished" if record.status == "running" else "was interrupted"
            result.append(f"{name} {state}: {record.rounds} of {planned} rounds are done.")
        until = record.experiment.get("until")
        if until and planned and record.status == "finished" and record.rounds < planned:
            result.append(
                f"{name} stopped after reaching {until} in round {record.rounds} of {planned}."
            )
        elif planned and record.status == "finished" and 0 < record.rounds < planned:
            result.append(f"{name} was stopped in round {record.rounds} of {planned} by a watcher.")
        if record.summary.get("message"):
            result.append(f"{name}: {record.summary['message']}")
        if record.setup.get("topology", {}).get("connected") is False:
            result.append(
                f"{name}: the graph is not connected, so some nodes never influence each other."
            )
    named = list(zip(labels(records), records, strict=True))
    result += [sentence for record in records for sentence in peers.caveats(record)]
    clients = [name for name, record in named if "models_at" in record.setup]
    if clients:
        result.append(
            f"{_and(clients)}: all nodes exchange messages with a hub and keep their own models; "
            "accuracy is the mean over these."
        )
    hubs = [name for name, record in named if _has_hub(record) and name not in clients]
    if hubs:
        result.append(
            f"{_and(hubs)}: all nodes exchange models with a hub; accuracy is that of its model."
        )
    for sentences in (peers.traffic(records), privacy(records)):
        result += [f"{name}: {sentence}" for name, sentence in sentences.items()]
    if len(_data_sets(records)) > 1:
        result.append("The runs use different data sets; their accuracies cannot be compared.")
    elif len(records) > 1:
        result.append(
            "Every curve is a single run; small differences may reverse with other seeds."
        )
    return result


@cache
def _template() -> Template:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    return environment.get_template("template.html")


def pictures(records: Sequence[RunRecord]) -> list[Picture]:
    """The figures for which the runs have data, with captions."""
    named = dict.fromkeys(key for record in records for key in record.own_metrics)
    own = [_curves(own_metric(key)) for key in named]
    result = [
        Picture(name, caption, figures.data_uri(draw, records), wide=False)
        for name, known, draw, caption in (*CURVES[: len(SCORES)], *own, *CURVES[len(SCORES) :])
        if any(map(known, records))
    ]
    result += [
        Picture(
            f"Accuracy of {name}",
            f"The models named {name}; the other figures are about the first model of a node.",
            figures.data_uri(partial(figures.curves, key=f"models.{name}.accuracy"), records),
            wide=False,
        )
        for name in dict.fromkeys(name for record in records for name in record.model_names)
    ]
    result += [
        Picture(name, caption, figures.embedded(figure), wide)
        for name, caption, figure, wide in fairness_figures.shown(records)
    ]
    for name, record in zip(labels(records), records, strict=True):
        result += _peer_pictures(record, f": {name}" if len(records) > 1 else "")
    for names, record in _allocations(records):
        name = "Data of each node" + (f": {names}" if names else "")
        address = figures.data_uri(figures.allocation, record)
        result.append(Picture(name, _allocation_caption(record), address, wide=True))
    address = figures.data_uri(figures.graph, records)
    result.append(Picture("Graph", _graph_caption(records), address, wide=len(records) > 1))
    return result


def _peer_pictures(record: RunRecord, ending: str) -> list[Picture]:
    """The figures about single peers, if the run was between real ones."""
    return [
        Picture(title + ending, caption, figures.data_uri(draw, record), wide=wide)
        for title, known, draw, caption, wide in peer_figures.SHOWN
        if known(record)
    ]


def facts(record: RunRecord) -> dict[str, str]:
    """Properties of the graph and of the data split that follow from the settings."""
    graph = record.setup.get("topology", {})
    degrees = [graph.get(f"degree_{which}") for which in ("min", "mean", "max")]
    return {
        "examples per node": _span(record.setup["examples"]),
        "test examples": _test_examples(record),
        "parameters per node": _span(record.setup["parameters"]),
        "links": number(len(record.setup["edges"])),
        "neighbours (fewest, mean, most)": ", ".join(map(number, degrees)),
        "connected": {True: "yes", False: "no"}.get(graph.get("connected"), "-"),
        "spectral gap": number(graph.get("spectral_gap")),
        "gain": number(graph.get("gain")),
        **_privacy_facts(record),
    }


def _test_examples(record: RunRecord) -> str:
    clusters = record.setup.get("clusters")
    if clusters is None:
        count = record.setup.get("test_examples")
        return f"{_span(count)} per node" if isinstance(count, list) else number(count)
    return f"{_span(clusters['test_examples'])} per cluster"


def _has_hub(record: RunRecord) -> bool:
    """Whether there is a node with a model and without data."""
    return len(record.setup["parameters"]) > len(record.setup["examples"])


def _privacy_facts(record: RunRecord) -> dict[str, str]:
    """The epsilons of a run with differential privacy; `notes` explains them."""
    privacy = record.summary.get("privacy", {})
    if "epsilons" not in privacy:
        return {}

    def format_epsilon(value: float | None) -> str:
        return "unbounded" if value is None else f"{value:.4g}"

    return {
        "epsilon of one message": format_epsilon(privacy["epsilon_message"]),
        "epsilon of every node": ", ".join(map(format_epsilon, privacy["epsilons"])),
    }


def _lead(ranked: Sequence[Mapping[str, Any]]) -> str:
    first = ranked[0]
    tied = [row["label"] for row in ranked if first["accuracy"] - row["accuracy"] < SAME_ACCURACY]
    if len(ranked) == 1:
        return (
            f"{first['label']} reached a mean test accuracy of {percent(first['accuracy'])} "
            f"{_after(first)}; {_best(first)}."
        )
    if len(tied) > 1:
        return f"{_and(tied)} are tied at {percent(first['accuracy'])} mean test accuracy."
    second, last = ranked[1], ranked[-1]
    text = (
        f"{first['label']} is ahead with a mean test accuracy of {percent(first['accuracy'])} "
        f"{_after(first)}, {_points(first, second)} percentage points more than "
        f"{second['label']} ({_short(second, first)})"
    )
    if last is not second:
        text += f" and {_points(first, last)} more than {last['label']} ({_short(last, first)})"
    return text + "."


def _points(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    # The difference of the rounded values, so that it matches the printed numbers.
    return f"{round(100 * one['accuracy'], 1) - round(100 * other['accuracy'], 1):.1f}"


def _short(row: Mapping[str, Any], first: Mapping[str, Any]) -> str:
    same = row["evaluated_round"] == first["evaluated_round"]
    return percent(row["accuracy"]) + ("" if same else f" {_after(row)}")


def _after(row: Mapping[str, Any]) -> str:
    done = row["evaluated_round"]
    return f"after {_count(done, 'round')}" if done else "before the first round"


def _best(row: Mapping[str, Any]) -> str:
    if row["best_round"] == row["evaluated_round"]:
        return "this is also its best"
    return f"its best was {percent(row['best_accuracy'])} in round {row['best_round']}"


def _broken(row: Mapping[str, Any]) -> str:
    text = f"{row['label']} {row['status']} in round {row['rounds']} of {row['rounds_planned']}"
    if row["accuracy"] is None:
        return text + "."
    return f"{text}; its last known accuracy is {percent(row['accuracy'])} {_after(row)}."


def where(records: Sequence[RunRecord]) -> str:
    """The data sets and the number of nodes of the runs, as text."""
    counts = sorted({len(record.setup["examples"]) for record in records})
    nodes = _count(counts[0], "node") if len(counts) == 1 else f"{counts[0]} to {counts[-1]} nodes"
    return f"{_and(_data_sets(records))} with {nodes}"


def privacy(records: Sequence[RunRecord]) -> dict[str, str]:
    """The privacy guarantees of the runs that have one, by name."""
    pairs = zip(labels(records), records, strict=True)
    found = {name: record.summary.get("privacy", {}).get("guarantee") for name, record in pairs}
    return {name: sentence for name, sentence in found.items() if sentence}


def _data_sets(records: Sequence[RunRecord]) -> list[str]:
    return list(dict.fromkeys(str(record.summary.get("dataset", "?")) for record in records))


def _allocations(records: Sequence[RunRecord]) -> list[tuple[str, RunRecord]]:
    """One run for each different data split, with the names of the runs that share it."""
    groups: dict[str, tuple[list[str], RunRecord]] = {}
    for name, record in zip(labels(records), records, strict=True):
        if "allocation" not in record.setup:  # of private data
            continue
        names, _ = groups.setdefault(str(record.setup["allocation"]), ([], record))
        names.append(name)
    shown = list(groups.values())[: figures.PANELS]
    return [(_and(names) if len(groups) > 1 else "", record) for names, record in shown]


def _allocation_caption(record: RunRecord) -> str:
    if figures.is_crowded(record):
        return (
            "Darker is more. A column is a node, a row is a class; nodes are sorted by their "
            "largest class."
        )
    return "The area of a bubble is the number of training examples of that class at that node."


def _graph_caption(records: Sequence[RunRecord]) -> str:
    text = "Links between nodes in the first round; brighter nodes reached a higher accuracy."
    if max(len(record.setup["edges"]) for record in records) > figures.EDGES:
        text += f" Only about {figures.EDGES} of the links are drawn."
    if len(records) > figures.PANELS:
        text += f" The first {figures.PANELS} runs are shown."
    return text


def _node_table(record: RunRecord) -> dict[str, Any]:
    """A table of all nodes, or of the lowest and highest if there are many."""
    rounds, _ = record.curve("accuracy")
    columns = {m.key: m for m in (*SCORES, *map(own_metric, record.own_metrics))} | {
        f"models.{name}.accuracy": BY_KEY["accuracy"] for name in record.model_names
    }
    values = {key: record.node_values(key, rounds[-1]) if rounds else {} for key in columns}
    accuracy = values["accuracy"]
    degree = Counter(chain.from_iterable(record.setup["edges"]))
    count = len(record.setup["parameters"])
    examples = list(record.setup["examples"])
    if _has_hub(record):
        hub = record.setup.get("hub")
        examples.insert(count if hub is None else hub, 0)
    order = sorted(range(count), key=lambda node: (accuracy.get(node, -1.0), node))
    few = count <= figures.MANY
    lines = [
        [
            peers.name_of(record, node),
            number(examples[node]),
            str(degree[node]),
            number(record.setup["parameters"][node]),
            *[value_text(columns[key], of_node.get(node)) for key, of_node in values.items()],
        ]
        for node in (order if few else order[:ENDS] + order[-ENDS:])
    ]
    which = (
        f"all {count} nodes" if few else f"the {ENDS} lowest and {ENDS} highest of {count} nodes"
    )
    return {
        "which": f"{which}, by accuracy",
        "titles": ["node", "examples", "neighbours", "parameters", *map(_column, columns)],
        "lines": lines,
    }


def _column(key: str) -> str:
    """The title of a column; `models.NAME.accuracy` is the accuracy of a named model."""
    return f"accuracy of {key.split('.')[1]}" if "." in key else key


def _commands(record: RunRecord) -> list[str]:
    if peers.is_joined(record) or not record.saved:
        return []
    folder = shlex.quote(str(record.folder))
    experiment = shlex.quote(str(record.folder / "experiment.toml"))
    if not peers.is_network_run(record):
        return [f"peerage run {experiment}", f"peerage verify {folder}"]
    verify = [f"peerage verify {folder}"] if not record.unrepeatable else []
    return [f"peerage up {experiment}", *verify]


def _sheet(title: str, tables: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    """Named values of several runs, split into those that differ and those that do not."""
    changed = differing(tables)
    keys = dict.fromkeys(key for table in tables for key in table)
    shared = [key for key in keys if key not in changed]
    return {"title": title, "tables": tables, "changed": changed, "shared": shared}


def _environment(record: RunRecord) -> dict[str, str]:
    """The environment of a run, with a line for each file of the user's own code."""
    known = {key: value for key, value in record.environment.items() if key != CODE}
    texts = {key: "-" if value is None else str(value) for key, value in known.items()}
    return texts | {f"SHA-256 of {f}": h for f, h in record.environment.get(CODE, {}).items()}


def _span(values: Sequence[int | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    low, high = min(known), max(known)
    return number(low) if low == high else f"{number(low)} to {number(high)}"


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" + ("" if number == 1 else "s")


def _and(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
