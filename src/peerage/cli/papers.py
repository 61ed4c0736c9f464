"""The command that repeats tables and figures of the papers: reproduce.

Slow imports are inside functions, so that `peerage --help` starts fast.
"""

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

from rich.console import Console
from typer import Argument, Option

from peerage.cli.flags import Json, Quiet
from peerage.cli.names import STUDIES, beginning_with
from peerage.errors import InputError


def reproduce(
    ids: Annotated[
        list[str] | None,
        Argument(
            help="Tables and figures to repeat, e.g. p0-tab2 or my_file.py:STUDY; see --list.",
            autocompletion=beginning_with(STUDIES),
        ),
    ] = None,
    scale: Annotated[
        str,
        Option(help="Size of the runs: smoke (seconds), small (minutes) or paper (as published)."),
    ] = "small",
    seeds: Annotated[int | None, Option(help="Number of seeds (default: by --scale).")] = None,
    only: Annotated[
        str | None, Option(help="Methods and data sets to run, separated by commas (default: all).")
    ] = None,
    fidelity: Annotated[
        str,
        Option(help="Settings to use: paper (as published) or code (as in the authors' scripts)."),
    ] = "paper",
    inputs: Annotated[
        str,
        Option(help="Inputs of P2's images: paper (in [0, 1]) or standard (mean 0, deviation 1)."),
    ] = "paper",
    out: Annotated[
        Path, Option(help="Folder for runs and results; finished runs are not repeated.")
    ] = Path("reproduced"),
    show_list: Annotated[
        bool,
        Option("--list", help="List tables and figures with the data they need and their state."),
    ] = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Repeat tables and figures of the papers and compare numbers."""
    from peerage.papers import runner
    from peerage.papers.calibrate import Speeds
    from peerage.papers.listing import entries, rich_list
    from peerage.papers.study import plan_of
    from peerage.papers.trial import show
    from peerage.papers.write import finished, write
    from peerage.report.terminal import StudyProgress

    plan = plan_of(scale, seeds, fidelity, inputs)
    store = runner.Store(out)
    console = Console(highlight=False)
    studies = [runner.find(id) for id in ids or ()]
    if other := [study.id for study in studies if inputs != "paper" and study.id[:3] != "p2-"]:
        raise InputError(f"--inputs is for studies of P2, not for {other[0]}; remove it")
    if show_list:
        every = studies or list(runner.STUDIES.values())
        rows = entries(every, store, plan, Speeds(), quiet=quiet)
        if as_json:
            print(json.dumps({"studies": rows}))
        else:
            console.print(rich_list(rows, plan.scale))
        return
    if not studies:
        raise InputError("name a table or a figure, e.g. `peerage reproduce p0-tab2`; see --list")
    methods = [name.strip() for name in (only or "").split(",") if name.strip()]
    wanted = [job for study in studies for job in runner.jobs_of(study, plan, methods)]
    with ExitStack() as stack:
        outcome = runner.run_jobs(
            store,
            wanted,
            lambda costs: stack.enter_context(
                StudyProgress(costs, Console(quiet=True, force_terminal=False) if quiet else None)
            ),
            Speeds(),
        )
    written = []
    for study in studies:
        results = store.results(plan, study.jobs(plan))  # including those of earlier commands
        if not results.series:
            continue
        shown = show(study, results)
        files = write(study, results, shown, out / "results")
        written += [str(path) for path in files]
        if not as_json:
            for table in shown.tables:
                console.print(table.rich(console.width))
            console.print(f"{study.id}: {finished(results)}; {files[0]}", soft_wrap=True)
    if as_json:
        print(json.dumps({"files": written, **vars(outcome)}))
    runner.check_data(outcome)
