"""A study as files: Markdown, CSV, JSON, PNG and SVG, beside each other."""

import json
from pathlib import Path
from typing import Any

from peerage.records import disk_errors, write_bytes
from peerage.report import figures
from peerage.reproduce.study import Job, Plan, Results, Shown, Study

REMEDY = "give the command again"


def name_of(study: Study, plan: Plan) -> str:
    return "-".join([study.id, plan.scale, *(["code"] if plan.fidelity == "code" else [])])


def write(study: Study, results: Results, shown: Shown, folder: Path) -> list[Path]:
    """Write every form of the study; the answer is what was written."""
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    base = folder / name_of(study, results.plan)
    texts = {
        ".md": markdown(study, results, shown, base.name),
        ".csv": "\n".join(table.csv() for table in shown.tables),
        ".json": json.dumps(as_dict(study, results, shown), indent=1) + "\n",
    }
    written = []
    for suffix, text in texts.items():
        written.append(base.with_name(base.name + suffix))
        write_bytes(written[-1], text.encode(), REMEDY)
    for suffix in (".png", ".svg"):
        written.append(base.with_name(base.name + suffix))
        figures.save(shown.figure, written[-1])
    return written


def markdown(study: Study, results: Results, shown: Shown, name: str) -> str:
    plan = results.plan
    command = f"peerage reproduce {study.id} --scale {plan.scale}"
    if plan.seeds is not None:
        command += f" --seeds {plan.seeds}"
    if plan.fidelity == "code":
        command += " --fidelity code"
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
    done = sum(series.seeds for series in results.series.values())
    return f"{done} of {len(results.jobs)} runs finished"


def as_dict(study: Study, results: Results, shown: Shown) -> dict[str, Any]:
    return {
        "id": study.id,
        "title": study.title,
        "claim": study.claim,
        "scale": results.plan.scale,
        "fidelity": results.plan.fidelity,
        "tables": [table.as_dict() for table in shown.tables],
        "curves": [
            {"dataset": dataset, "alpha": alpha, "method": method, **_curves(results, place)}
            for place in results.series
            for dataset, alpha, method in [place]
        ],
        "runs": [_run(results, job) for job in results.jobs],
    }


def _curves(results: Results, place: tuple[str, float, str]) -> dict[str, Any]:
    """Means and deviations over seeds, rounded: a picture needs no more digits."""
    series = results.series[place]
    found: dict[str, Any] = {"rounds": series.curve("accuracy").rounds}
    for key in ("accuracy", "loss"):
        curve = series.curve(key)
        found[key] = [round(value, 5) for value in curve.means]
        found[f"{key}_std"] = [round(value, 5) for value in curve.stds]
    return found


def _run(results: Results, job: Job) -> dict[str, Any]:
    dataset, alpha, method = job.place
    series = results.series.get(job.place)
    seed = job.experiment.seed
    records = [r for r in series.records if r.experiment["seed"] == seed] if series else []
    kept = ("status", "rounds", "accuracy", "loss", "bytes_sent", "seconds", "digest")
    summary = {key: records[0].summary.get(key) for key in kept} if records else {"status": "open"}
    return {"dataset": dataset, "alpha": alpha, "method": method, "seed": seed, **summary}
