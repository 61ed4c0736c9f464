"""Writes a study as Markdown, CSV, JSON, PNG and SVG files."""

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from peerage.errors import shell_command
from peerage.files import compact_json, disk_errors, write_bytes
from peerage.papers.study import Calculation, Job, Plan, Results, Study, StudyOutput
from peerage.report import figures
from peerage.report.series import Series

REMEDY = "run the command again"
OPEN = {"status": "open"}
DPI = 160
WIDEST = 1400  # pixels of a PNG file


def name_of(study: Study, plan: Plan) -> str:
    variants = {"code": plan.fidelity == "code", "standard": plan.inputs == "standard"}
    return "-".join([study.id, plan.scale, *(name for name, used in variants.items() if used)])


def write(study: Study, results: Results, shown: StudyOutput, folder: Path) -> list[Path]:
    """Write all files of the study and return their paths."""
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    base = folder / name_of(study, results.plan)
    texts = {
        ".md": markdown(study, results, shown, base.name),
        ".csv": "\n".join(table.csv() for table in shown.tables),
        ".json": compact_json(as_dict(study, results, shown)) + "\n",
    }
    written = []
    for suffix, text in texts.items():
        written.append(base.with_name(base.name + suffix))
        write_bytes(written[-1], text.encode(), REMEDY)
    for suffix in (".png", ".svg"):
        written.append(base.with_name(base.name + suffix))
        save_figure(shown.figure, written[-1])
    return written


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure of at most `WIDEST` pixels, so that many panels do not make a large file."""
    figures.save(figure, path, min(DPI, int(WIDEST / figure.get_figwidth())))


def markdown(study: Study, results: Results, shown: StudyOutput, name: str) -> str:
    plan = results.plan
    command = shell_command("reproduce", study.command or study.id, "--scale", plan.scale)
    if plan.seeds is not None:
        command += f" --seeds {plan.seeds}"
    if plan.fidelity == "code":
        command += " --fidelity code"
    if plan.inputs == "standard":
        command += " --inputs standard"
    parts = [
        f"# {study.title}\n",
        f"{claim(study)}\n",
        *(table.markdown() for table in shown.tables),
        f"![{study.title}]({name}.png)\n",
        f"Made by `{command}`; {finished(results)}.\n",
    ]
    return "\n".join(parts)


def claim(study: Study) -> str:
    if study.title.startswith("Not in the paper"):
        return f"{study.claim[0].upper()}{study.claim[1:]}."
    return f"The paper: {study.claim}."


def finished(results: Results) -> str:
    return f"{results.done} of {len(results.jobs)} runs finished"


def as_dict(study: Study, results: Results, shown: StudyOutput) -> dict[str, Any]:
    return {
        "id": study.id,
        "title": study.title,
        "claim": study.claim,
        "scale": results.plan.scale,
        "fidelity": results.plan.fidelity,
        **({"inputs": "standard"} if results.plan.inputs == "standard" else {}),
        "tables": [table.as_dict() for table in shown.tables],
        "curves": [
            {**place._asdict(), **_curves(series, shown.curves)}
            for place, series in results.series.items()
        ],
        **({"pictures": shown.pictures} if shown.pictures else {}),
        "runs": [_run(results, job) for job in results.jobs],
    }


def _curves(series: Series, wanted: tuple[str, ...]) -> dict[str, Any]:
    """Means and deviations over seeds, rounded to what a figure shows."""
    calculated = bool(series.rounds("sigma_ap"))
    keys = ("sigma_ap", "sigma_an") if calculated else wanted
    rounds = series.rounds(keys[0])
    found: dict[str, Any] = {"rounds": rounds}
    for key in keys:
        known, means, stds = series.curve(key)
        for name, values in ((key, means), (f"{key}_std", stds)):
            short = [float(f"{v:.5g}") if calculated else round(v, 5) for v in values]
            by_round = dict(zip(known, short, strict=True))
            found[name] = [by_round.get(r) for r in rounds]  # there is no training loss in round 0
    return found


def _run(results: Results, job: Job) -> dict[str, Any]:
    series = results.series.get(job.place)
    records = series.records if series else ()
    if isinstance(job, Calculation):
        made = [record for record in records if record.experiment["seed"] in job.seeds]
        seeds = {"first_seed": job.seeds[0], "last_seed": job.seeds[-1]}
        ending = {"status": "finished", "seconds": made[0].summary["seconds"]} if made else OPEN
        return {**job.place._asdict(), **seeds, **ending}
    seed = job.experiment.seed
    made = [record for record in records if record.experiment["seed"] == seed]
    kept = ("status", "rounds", "accuracy", "loss", "bytes_sent", "seconds", "digest")
    summary = {key: made[0].summary.get(key) for key in kept} if made else OPEN
    return {**job.place._asdict(), "seed": seed, **summary}
