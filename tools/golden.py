"""Run two states of the code on this machine and compare their results, bit by bit.

    python tools/golden.py BASE [--only PATTERN] [--json]

BASE is a commit, which is compared with the working tree. Both are copied to a temporary folder and
use this virtual environment. A change that should not alter results shows equal rows, bytes,
parameters and checkpoints in every case. Digests differ between kinds of processors, so none are
stored.

The cases are commands of the stable command line. This tool imports nothing of Peerage, so it can
compare commits between which modules have moved.
Exit code 0: all equal; 1: something differs or failed; 2: bad input; 130: interrupted.
"""

import argparse
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any

from golden_cases import STUDIES, Job, choose, list_jobs, matches
from golden_facts import COLUMNS, Facts, Verdict, compare_runs, read_runs
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
JOB_TIMEOUT = 900.0  # seconds; reached only by a broken program
STOP_TIMEOUT = 10.0  # seconds for processes to exit after a signal


class BadInput(Exception):
    """Invalid input; the message is one line with the remedy."""


class Code:
    """One state of the code, in its own folder, and its processes."""

    def __init__(self, name: str, home: Path) -> None:
        self.name, self.home = name, home
        self.source, self.output = home / "src", home / "runs"
        self.output.mkdir(parents=True)
        # Each state has its own cache, so that it does not read results of the other.
        folders = {"PYTHONPATH": str(self.source), "PEERAGE_DATA": str(home / "cache")}
        self.environment = {**os.environ, **folders, "OMP_NUM_THREADS": "1"}
        self.processes: set[subprocess.Popen[str]] = set()
        self.lock = threading.Lock()
        self.stopped = False

    def check(self) -> None:
        """Raise an error unless this code is imported, rather than an installed package."""
        code, out, _ = self._call(["-c", "import peerage; print(peerage.__file__)"])
        if code or not Path(out.strip()).is_relative_to(self.source):
            raise BadInput(f"{self.name} cannot be run; give a commit with the package in src/")

    def ask(self, *words: str) -> dict[str, Any]:
        """The JSON object that a command prints."""
        code, out, error = self._peerage([*words, "--json"])
        if code:
            raise BadInput(f"{self.name}: `peerage {' '.join(words)}` failed ({error})")
        return dict(json.loads(out.splitlines()[-1]))

    def run(self, job: Job) -> tuple[dict[str, Facts], dict[str, str]]:
        """The facts of the job's runs, and the errors of those that failed, by name."""
        folder = Path(tempfile.mkdtemp(dir=self.output)) / "run"
        try:
            code, _, error = self._peerage(job.command(folder))
            if not code:
                return read_runs(folder), {}
        finally:
            shutil.rmtree(folder.parent, ignore_errors=True)
        parts = job.apart()
        if not parts:
            name = re.split("[:,]", job.algorithms[0])[0] if job.algorithms else "run"
            return {}, {name: error}
        facts: dict[str, Facts] = {}
        errors: dict[str, str] = {}
        for part in parts:
            more, failed = self.run(part)
            facts, errors = facts | more, errors | failed
        return facts, errors

    def stop(self) -> None:
        with self.lock:
            self.stopped = True
            running = list(self.processes)
        stop(running)

    def _peerage(self, words: list[str]) -> tuple[int, str, str]:
        return self._call(["-m", "peerage", *words])

    def _call(self, words: list[str]) -> tuple[int, str, str]:
        """(exit code, standard output, last line of standard error)."""
        with self.lock:
            if self.stopped:
                return 1, "", "stopped"
            process = subprocess.Popen(
                [sys.executable, *words],
                cwd=self.home,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,  # so that its child processes can be stopped with it
            )
            self.processes.add(process)
        try:
            out, error = process.communicate(timeout=JOB_TIMEOUT)
        except subprocess.TimeoutExpired:
            stop([process])
            return 1, "", f"still running after {JOB_TIMEOUT:.0f} s"
        with self.lock:
            self.processes.discard(process)
        return process.returncode, out, (error.strip().splitlines() or [""])[-1]


def stop(processes: list[subprocess.Popen[str]]) -> None:
    """End processes and their child processes."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_TIMEOUT)


def export(base: str, home: Path) -> Code:
    """The package of a commit, from the repository."""
    commit = commit_of(base)
    archive = _git("archive", "--format=tar", commit, "src", text=False)
    if archive.returncode:
        raise BadInput(f"commit {base!r} has no folder src; give a later commit")
    code = Code(f"{base} ({commit[:7]})", home)
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as file:
        file.extractall(home, filter="data")
    return code


def copy_working_tree(home: Path) -> Code:
    """A copy of the package in the checkout, so that later edits have no effect."""
    changed = _git("status", "--porcelain", "--", "src").stdout.strip()
    commit = _git("rev-parse", "--short=7", "HEAD").stdout.strip()
    code = Code(f"working tree ({commit}{' with changes' if changed else ''})", home)
    shutil.copytree(ROOT / "src", code.source, ignore=shutil.ignore_patterns("__pycache__"))
    return code


def commit_of(base: str) -> str:
    found = _git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{base}^{{commit}}")
    if not base or found.returncode:
        raise BadInput(f"unknown commit {base!r}; give a commit, branch or tag: BASE=main")
    return str(found.stdout.strip().splitlines()[-1])


def _git(*words: str, text: bool = True) -> subprocess.CompletedProcess[Any]:
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=text)


def list_algorithms(code: Code) -> list[str]:
    return [entry["name"] for entry in code.ask("list", "algorithms")["algorithms"]]


def list_studies(code: Code) -> dict[str, list[str]]:
    """The missing data sets of each study that is both in `STUDIES` and in this state."""
    studies = code.ask("reproduce", "--list", "--scale", "smoke")["studies"]
    return {study["id"]: study["lacking"] for study in studies if study["id"] in STUDIES}


def compare_job(job: Job, base: Code, head: Code, executor: ThreadPoolExecutor) -> list[Verdict]:
    """Run a job in both states in parallel, and compare the results."""
    states = executor.map(lambda code: code.run(job), (base, head))
    (before, failed_before), (now, failed_now) = states
    verdicts = []
    for name in {**failed_before, **failed_now}:
        errors = [
            f"fails {when}: {failed[name]}"
            for when, failed in (("before", failed_before), ("now", failed_now))
            if name in failed
        ]
        verdicts.append(Verdict(f"{job.name}/{name}", "failed", where="; ".join(errors)))
        before.pop(name, None)
        now.pop(name, None)
    return [*compare_runs(job.name, before, now), *verdicts]


def compare_codes(base: Code, head: Code, only: str, files: Path) -> list[Verdict]:
    # Processes are started in these two threads, as an interruption reaches only the main thread.
    with ThreadPoolExecutor(2) as executor:
        try:
            jobs, verdicts = choose_jobs(base, head, only, files, executor)
            for number, job in enumerate(jobs, start=1):
                start = monotonic()
                found = compare_job(job, base, head, executor)
                wrong = sum(not verdict.passes for verdict in found)
                result = f"{wrong} of {len(found)} differ" if wrong else f"{len(found)} equal"
                line = f"{number} of {len(jobs)}: {job.name}, {result}, {monotonic() - start:.0f} s"
                print(line, file=sys.stderr, flush=True)
                verdicts += found
        except BaseException:
            base.stop()
            head.stop()
            raise
    return verdicts


def choose_jobs(
    base: Code, head: Code, only: str, files: Path, executor: ThreadPoolExecutor
) -> tuple[list[Job], list[Verdict]]:
    """The jobs for both states, and verdicts for algorithms and studies that only one has."""
    for _ in executor.map(Code.check, (base, head)):
        pass
    before, now = executor.map(list_algorithms, (base, head))
    algorithms, verdicts = choose("algorithm", before, now, only)
    studies = []
    if any(matches(f"study/{study}", only) for study in STUDIES):
        data_before, data_now = executor.map(list_studies, (base, head))
        both, more = choose("study", list(data_before), list(data_now), only)
        verdicts += more
        for study in both:
            if missing := sorted({*data_before[study], *data_now[study]}):
                line = f"study/{study}: skipped, missing data: {', '.join(missing)}"
                print(line, file=sys.stderr, flush=True)
            else:
                studies.append(study)
    jobs = list_jobs(algorithms, studies, files, only)
    if not jobs and not verdicts:
        raise BadInput(f"no case matches {only!r}; remove ONLY to see all cases")
    return jobs, verdicts


def show(verdicts: list[Verdict], base: Code, head: Code) -> None:
    table = Table("case", "result", *COLUMNS, title=f"{base.name} and {head.name}")
    for verdict in verdicts:
        columns = (verdict.columns.get(name, "") for name in COLUMNS)
        table.add_row(verdict.case, verdict.status, *columns)
    # A pipe has no width.
    console = Console() if sys.stdout.isatty() else Console(width=120)
    console.print(table)
    for verdict in verdicts:
        if verdict.where:
            console.print(f"{verdict.case}: {verdict.where}", markup=False, soft_wrap=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("base", help="commit to compare the working tree with")
    parser.add_argument("--only", default="", help="cases to run, e.g. dechw or 'lossy/*/hwa'")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    start = monotonic()
    try:
        with tempfile.TemporaryDirectory(prefix="golden-") as temporary:
            home = Path(temporary).resolve()
            base = export(arguments.base, home / "base")
            head = copy_working_tree(home / "head")
            verdicts = compare_codes(base, head, arguments.only, home)
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 130
    wrong = [verdict for verdict in verdicts if not verdict.passes]
    if arguments.json:
        cases = [vars(verdict) for verdict in verdicts]
        states = {"base": base.name, "head": head.name}
        print(json.dumps({**states, "equal": not wrong, "cases": cases}))
    else:
        show(verdicts, base, head)
        compared = sum(bool(verdict.columns) for verdict in verdicts)
        result = f"{len(wrong)} differ or failed" if wrong else "all equal"
        print(f"{compared} cases compared in {monotonic() - start:.0f} s: {result}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
