"""Disturb a network of real peers with random events, and check that it survives.

    PYTHONPATH=tests python benchmarks/chaos.py [--seed N] [--events N] [--rounds N] [--out FOLDER]

Five sites train the logistic model on digits, each with an equal part of the examples. Every site
is a process in a network namespace of its own, with a link of 100 kbit/s and the default timeouts.
Links are cut for seconds, so that packets are lost without a sign; processes are killed with
SIGKILL and started again; links are slow, 50 or 6 kbit/s. Events are drawn from the seed and begin
in drawn rounds. In one round three sites are cut off together, so no quorum is left. Otherwise at
most two sites are disturbed at the same time: an event waits until enough others have caught up.

The same network runs undisturbed at the same time. The program writes chaos.json and chaos.md, and
ends with exit code 1 if a check failed. It needs no root, but network namespaces and `tc`.
"""

import argparse
import json
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from statistics import fmean
from typing import Any

from chaos_checks import checks, contacts, counted_without_quorum, page
from chaos_events import (
    CALM_END,
    CALM_START,
    LINK,
    QUORUM,
    SITES,
    TIMEOUTS,
    TOGETHER,
    Event,
    Occurrence,
    draw,
)
from support.machines import Cable, Machines, entering, host, why_impossible

from peerage import Experiment
from peerage.files import read_json, write_bytes, write_json
from peerage.records.environment import environment

POINTS = 1.0  # the largest allowed loss of accuracy
STALLED = 600.0  # seconds without a new round or event, after which the program gives up
OUT = Path("docs/results/net")
Found = tuple[list[dict[str, Any]], list[dict[str, Any]]]  # about the sites, and about the events


@dataclass
class Site:
    """What one peer has logged, read as it is written."""

    file: Path
    lines: list[dict[str, Any]] = field(default_factory=list)
    round: int = 0
    _position: int = 0

    def read(self) -> None:
        if not self.file.exists():
            return
        with open(self.file, "rb") as log:
            log.seek(self._position)
            new = log.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._position += len(whole)
        for text in whole.splitlines():
            try:
                line = json.loads(text)
                line["time"] = datetime.fromisoformat(line["time"]).timestamp()
            except (ValueError, TypeError, KeyError):  # what a killed process was writing
                continue
            self.lines.append(line)
            if "row" in line:
                self.round = int(line["row"]["round"])

    @property
    def pauses(self) -> list[tuple[float, float]]:
        """When it began and ended to wait for a quorum."""
        found, since = [], None
        for line in self.lines:
            if since is None and re.search(r"^in contact with .* waits for ", line["message"]):
                since = line["time"]
            elif since is not None and ("row" in line or "enough peers" in line["message"]):
                found.append((since, line["time"]))
                since = None
        return found


class Disturbance:
    """A network and its events, from the start of all peers to their end."""

    def __init__(self, machines: Machines, cable: Cable, events: Sequence[list[Event]]) -> None:
        self.machines, self.cable, self.left = machines, cable, list(events)
        self.sites = [Site(machines.log_file(me)) for me in range(SITES)]
        self.occurrences: list[Occurrence] = []
        self.disturbed: dict[int, Occurrence] = {}  # by site
        self._progress: tuple[Any, float] = None, time.time()

    def run(self) -> list[int]:
        """Run all peers to their end; return their exit codes."""
        for me in range(SITES):
            self.cable.limit(me, LINK)
            self._start(me)
        while any(process.poll() is None for process in self.machines.processes.values()):
            time.sleep(0.1)
            for site in self.sites:
                site.read()
            self._check_progress()
            for me, occurrence in list(self.disturbed.items()):
                self._heal(me, occurrence)
            while self.left and self._is_due(self.left[0]):
                alone = not self.disturbed
                for event in self.left.pop(0):
                    self._disturb(event, alone)
        return [self.machines.processes[me].wait() for me in range(SITES)]

    @property
    def newest(self) -> int:
        """The highest round that a site has finished."""
        return max(site.round for site in self.sites)

    def _start(self, me: int) -> None:
        within = entering(self.cable.machines[me])
        self.machines.start(me, within, ["--log", "json"])

    def _is_due(self, events: list[Event]) -> bool:
        if self.newest + 1 < events[0].round:
            return False
        if len(events) > 1:
            return not self.disturbed
        return events[0].site not in self.disturbed and len(self.disturbed) < SITES - QUORUM

    def _disturb(self, event: Event, alone: bool) -> None:
        if event.kind == "cut":
            self.cable.cut_off(event.site)
        elif event.kind == "slow":
            self.cable.limit(event.site, event.rate)
        else:
            self.machines.processes[event.site].send_signal(signal.SIGKILL)
        occurrence = Occurrence(event, time.time(), self.newest + 1, alone)
        self.occurrences.append(occurrence)
        self.disturbed[event.site] = occurrence
        print(f"round {self.newest + 1}: {event}", file=sys.stderr, flush=True)

    def _heal(self, me: int, occurrence: Occurrence) -> None:
        event, site = occurrence.event, self.sites[me]
        if occurrence.healed is None:
            if time.time() < occurrence.began + event.seconds:
                return
            if event.kind == "cut":
                self.cable.reconnect(me)
            elif event.kind == "slow":
                self.cable.limit(me, LINK)
            else:
                self.machines.processes[me].wait()
                self._start(me)
            occurrence.healed = time.time()
        elif site.lines[-1]["time"] > occurrence.healed and site.round + 1 >= self.newest:
            occurrence.caught_up = site.round
            del self.disturbed[me]
            print(f"round {self.newest + 1}: site {me} is back", file=sys.stderr, flush=True)

    def _check_progress(self) -> None:
        state = [site.round for site in self.sites], len(self.occurrences)
        known, since = self._progress
        if state != known:
            self._progress = state, time.time()
        elif time.time() > since + STALLED:
            logs = "\n".join(self.machines.log(me)[-2000:] for me in range(SITES))
            raise SystemExit(f"error: no new round for {STALLED:g} seconds:\n{logs}")


def run(home: Path, experiment: Experiment, events: Sequence[list[Event]]) -> Found:
    """Run the network; return what is known about each site, and about each event."""
    home.mkdir()
    hosts = [host(me) for me in range(SITES)]
    with ExitStack() as stack:
        cable = Cable([range(SITES), ()], stack)
        machines = stack.enter_context(Machines(home, experiment, TIMEOUTS, hosts))
        disturbance = Disturbance(machines, cable, events)
        codes = disturbance.run()
    happened = disturbance.occurrences
    sites = []
    for me, site in enumerate(disturbance.sites):
        site.read()
        rows = [row for row in machines.rows(me) if row["round"] > 0]
        summary = machines.folders[me] / "summary.json"
        ended = read_json(summary) if summary.exists() else {"state": "no summary", "skipped": None}
        pauses = site.pauses
        sites.append(
            {
                "site": me,
                "exit_code": codes[me],
                "state": ended["state"],
                "last_round": rows[-1]["round"],
                "rounds_run": len(rows),
                "rounds_skipped": ended["skipped"],  # while it ran; others were missed while down
                "rounds_missed": experiment.rounds - len(rows),
                "pauses": len(pauses),
                "seconds_paused": round(sum(end - begin for begin, end in pauses), 1),
                "least_contacts": min(map(contacts, rows)),
                "rounds_not_all_in_contact": sum(contacts(row) < SITES for row in rows),
                "rounds_below_quorum": [r["round"] for r in rows if contacts(r) < QUORUM],
                "rounds_logged_without_quorum": counted_without_quorum(me, site.lines, happened),
                "accuracy": next(r["accuracy"] for r in reversed(rows) if "accuracy" in r),
                "tracebacks": machines.log(me).count("Traceback"),
            }
        )
    return sites, [
        {
            **asdict(one.event),
            "began_in": one.round,
            "alone": one.alone,
            "caught_up_in": one.caught_up,
        }
        for one in happened
    ]


def timed(home: Path, experiment: Experiment, events: Sequence[list[Event]]) -> tuple[Found, float]:
    """What `run` returns, and how many seconds it took."""
    begin = time.monotonic()
    return run(home, experiment, events), time.monotonic() - begin


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="of the events")
    parser.add_argument("--events", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--out", type=Path, default=OUT, help="folder of chaos.json and chaos.md")
    parser.add_argument("--keep", type=Path, help="new folder for the files of all peers")
    arguments = parser.parse_args()
    if arguments.events < TOGETHER + 2:
        parser.error(f"--events must be at least {TOGETHER + 2}, got {arguments.events}")
    if arguments.rounds < CALM_START + CALM_END + arguments.events:
        least = CALM_START + CALM_END + arguments.events
        parser.error(f"--rounds must be at least {least}, got {arguments.rounds}")
    return arguments


def main() -> None:
    arguments = parse()
    if reason := why_impossible(slow_links=True):
        raise SystemExit(f"error: {reason}")
    rounds, seed, machine = arguments.rounds, arguments.seed, environment()
    experiment = Experiment(
        algorithm="dechw",
        nodes=SITES,
        topology="complete",
        partition="iid",
        dataset="digits",
        model="logistic",
        rounds=rounds,
        local={"epochs": 1},
        evaluation={"every": rounds},
    )
    home = arguments.keep or Path(tempfile.mkdtemp(prefix="chaos-"))
    home.mkdir(parents=True, exist_ok=True)
    groups = draw(seed, arguments.events, rounds)
    with ThreadPoolExecutor(2) as both:
        disturbed = both.submit(timed, home / "disturbed", experiment, groups)
        undisturbed = both.submit(timed, home / "undisturbed", experiment, [])
    (sites, events), seconds = disturbed.result()
    (calm, _), longer = undisturbed.result()
    took = {"disturbed": seconds, "undisturbed": longer}
    means = [100 * fmean(site["accuracy"] for site in each) for each in (sites, calm)]
    verdicts = checks(sites, events, arguments.events, rounds)
    verdicts[f"accuracy within {POINTS:g} point"] = abs(means[0] - means[1]) <= POINTS
    result = {
        "command": f"make chaos SEED={seed}",
        "seed": seed,
        "rounds": rounds,
        "quorum": QUORUM,
        "checks": verdicts,
        "accuracy": {
            "disturbed": round(means[0], 3),
            "undisturbed": round(means[1], 3),
            "difference": round(means[0] - means[1], 3),
            "seconds": {key: round(seconds) for key, seconds in took.items()},
        },
        "sites": sites,
        "undisturbed": calm,
        "events": events,
        "experiment": experiment.to_toml(),
        "environment": machine,
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    write_json(arguments.out / "chaos.json", result)
    write_bytes(arguments.out / "chaos.md", page(result).encode())
    print(page(result))
    if arguments.keep is None:
        shutil.rmtree(home)
    if not all(verdicts.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
