"""A self-contained HTML page about runs, with nothing from elsewhere and one small script.

Figures are drawings in the page that follow light and dark; the script shows the values of curves
under the pointer.
"""

import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from peerage.errors import InputError
from peerage.files import disk_errors, write_bytes
from peerage.records.environment import CODE
from peerage.records.metrics import BY_KEY, SCORES, own_metric
from peerage.records.rows import RunRecord
from peerage.report import fairness_tables, figures, groups, inline, peers, seeds, tables
from peerage.report.pictures import PARTS, Picture, join, pictures
from peerage.report.series import Series, by_method
from peerage.report.tables import differing, labels, number, percent, setting_text, value_text

T = TypeVar("T")
# Shows the progress through items that take long, with a label and their number.
Show = Callable[[Iterable[T], str, int], Iterable[T]]
ENDS = 10  # lowest and highest nodes shown if there are too many to show all
COLUMNS = 3  # runs that tables show as columns
SAME_ACCURACY = 0.0005  # smaller differences do not show in print
TOML = "experiment.toml"
MINOR = ("attempts", "min_size")  # options that a sentence about a run leaves out


@dataclass(frozen=True)
class Figured:
    """A picture with its drawing."""

    picture: Picture
    drawing: inline.Drawing


def write_report(
    records: Sequence[RunRecord], out: Path, show: "Show[Picture] | None" = None
) -> None:
    """Write the page atomically; equal runs give equal bytes."""
    if not records:
        raise InputError("a report needs at least one run; give the folder of a run")
    out = Path(out)
    with disk_errors(out, "write the report again"):
        out.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(out, page(records, show).encode(), "write the report again")


def page(records: Sequence[RunRecord], show: "Show[Picture] | None" = None) -> str:
    rows = tables.compare(records)
    titles, texts = tables.cells(rows)
    names = labels(records)
    runs = figures.styled_runs(records)
    found = by_method(records)
    several = any(method.seeds > 1 for method in found)
    methods = seeds.MethodTable.of(found)
    styles = figures.styled_runs([method.records[0] for method in found])
    drawn = draw_all(pictures(records), show)
    used = {run.colour for run in (*runs, *styles)}.union(*(one.drawing.colours for one in drawn))
    light, dark = inline.variables(used)
    return _template().render(
        title=title(records),
        headline=headline(rows, where(records)) if not several else lead(found, records),
        notes=notes(records),
        story=[story(method.records[0], method.seeds) for method in found],
        sources=list(filter(None, (_source(method.records[0]) for method in found))),
        light=Markup(light),  # colours only
        dark=Markup(dark),
        several=several,
        methods=_readable(methods.lines()),
        method_colours=[inline.variable(style.colour) for style in styles],
        targets=_readable(methods.targets()),
        differences=seeds.difference_lines(found) if seeds.comparable(records) else [],
        table=_readable([titles, *texts]),
        colours=[inline.variable(run.colour) for run in runs],
        best=max((row["best_accuracy"] or 0.0 for row in rows), default=0.0),
        percent=percent,
        parts={part: [one for one in drawn if one.picture.part == part] for part in PARTS},
        runs=list(zip(names, records, strict=True)),
        names=names,
        sheets=[
            _sheet("Settings", [tables.settings(record) for record in records]),
            _sheet("Data and graph", [facts(record) for record in records]),
            _sheet("Environment", [environment(record) for record in records]),
        ],
        group_titles=groups.TITLES,
        group_tables=[(name, groups.lines(r)) for name, r in zip(names, records, strict=True)],
        fairness_table=_readable(fairness_tables.lines(records)),
        peer_tables=[(name, peers.table(r)) for name, r in zip(names, records, strict=True)],
        unheard_titles=peers.UNHEARD,
        unheard_tables=[(name, peers.unheard(r)) for name, r in zip(names, records, strict=True)],
        node_tables=[_node_table(record) for record in records],
        commands=[commands(record) for record in records],
    )


def draw_all(found: Sequence[Picture], show: "Show[Picture] | None") -> list[Figured]:
    """Draw the figures of a page, with progress if `show` shows it."""
    items = found if show is None else show(found, "figures", len(found))
    return [
        Figured(picture, inline.drawing(picture.draw(), f"figure-{place}"))
        for place, picture in enumerate(items)
    ]


def story(record: RunRecord, seeds: int = 1) -> str:
    """What was run, in a sentence or two."""
    table = record.experiment
    settings = {key: setting_text(_main(value)) for key, value in table.items()}
    training = table.get("local", {})
    data = settings.get("dataset") or str(record.summary.get("dataset", "?"))
    parts = [
        f"{record.label}: {_count(len(record.setup['examples']), 'node')} on {data}",
        f"split by {settings['partition']}" if "partition" in settings else "",
        f"linked by {settings['topology']}" if "topology" in settings else "",
        f"with the model {settings['model']}" if "model" in settings else "",
    ]
    amount = training.get("epochs"), training.get("steps")
    work = [
        _count(amount[0], "local epoch") if amount[0] else "",
        _count(amount[1], "local step") if amount[1] else "",
        f"mini-batches of {training['batch_size']}" if "batch_size" in training else "",
        f"learning rate {training['lr']:g}" if "lr" in training else "",
    ]
    rounds = record.summary.get("rounds_planned") or record.rounds
    work = [text for text in work if text]
    trained = f" of {', '.join(work)}" if work else ""
    which = f"{seeds} seeds" if seeds > 1 else f"seed {table.get('seed', 0)}"
    return f"{', '.join(filter(None, parts))}. {_count(rounds, 'round')}{trained}; {which}."


def _main(value: Any) -> Any:
    """A setting without options that hardly anybody changes, for a sentence."""
    if not isinstance(value, Mapping):
        return value
    kept = {key: v for key, v in value.items() if not isinstance(v, bool) and key not in MINOR}
    return {key: v for key, v in kept.items() if v is not None}


def _source(record: RunRecord) -> tuple[str, str] | None:
    """The experiment file of a run and its text, if it has a folder."""
    file = record.folder / TOML
    if not record.saved or not file.is_file():
        return None
    return str(file), file.read_text(encoding="utf-8").strip()


def lead(found: Sequence[Series], records: Sequence[RunRecord]) -> str:
    """Sentences about methods with several seeds: what was compared, and what is ahead."""
    text = f"{_count(len(records), 'run')} of {_count(len(found), 'method')} on {where(records)}."
    ranked = [(method.final(), method) for method in found]
    known = [(final.mean, final, method) for final, method in ranked if final.mean is not None]
    if not known:
        return text
    known.sort(key=lambda entry: -entry[0])
    _, final, first = known[0]
    reached = seeds.fraction_text(final)
    if len(known) == 1:
        return f"{text} {first.label} reached a mean test accuracy of {reached}, over its seeds."
    other = known[1][2]
    text += f" {first.label} is ahead with a mean test accuracy of {reached}, over its seeds"
    pair = [one for one in seeds.differences([other, first]) if len(one.by_seed) > 1]
    if not pair:
        return f"{text}."
    [one] = pair
    clear = "excludes 0" if one.clear else "includes 0, so the order may be chance"
    return (
        f"{text}: {seeds.points(one.mean).lstrip('+')} percentage points more than {other.label} "
        f"with the same seeds; the 95 % confidence interval {seeds.bounds(one)} {clear}."
    )


def _readable(lines: Sequence[Sequence[str]]) -> list[Sequence[str]]:
    """Titles and lines; few runs are easier to read as columns, also on a phone."""
    return list(zip(*lines, strict=True)) if len(lines) <= 1 + COLUMNS else list(lines)


def title(records: Sequence[RunRecord]) -> str:
    names = labels(records)
    start = join(names) if len(join(names)) <= 50 else f"{len(names)} runs"
    return f"{start} on {join(_data_sets(records))}"


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
        sentences.append(f"{join(unevaluated)}: no round has been evaluated yet.")
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
            f"{join(clients)}: all nodes exchange messages with a hub and keep their own models; "
            "accuracy is the mean over these."
        )
    hubs = [name for name, record in named if _has_hub(record) and name not in clients]
    if hubs:
        result.append(
            f"{join(hubs)}: all nodes exchange models with a hub; accuracy is that of its model."
        )
    for sentences in (peers.traffic(records), privacy(records)):
        result += [f"{name}: {sentence}" for name, sentence in sentences.items()]
    if len(_data_sets(records)) > 1:
        result.append("The runs use different data sets; their accuracies cannot be compared.")
    elif len(records) > 1 and len(by_method(records)) == len(records):
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
        return f"{join(tied)} are tied at {percent(first['accuracy'])} mean test accuracy."
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
    return f"{join(_data_sets(records))} with {nodes}"


def privacy(records: Sequence[RunRecord]) -> dict[str, str]:
    """The privacy guarantees of the runs that have one, by name."""
    pairs = zip(labels(records), records, strict=True)
    found = {name: record.summary.get("privacy", {}).get("guarantee") for name, record in pairs}
    return {name: sentence for name, sentence in found.items() if sentence}


def _data_sets(records: Sequence[RunRecord]) -> list[str]:
    return list(dict.fromkeys(str(record.summary.get("dataset", "?")) for record in records))


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


def commands(record: RunRecord) -> list[str]:
    """The commands that repeat and verify a run; none if it cannot be repeated here."""
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


def environment(record: RunRecord) -> dict[str, str]:
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
