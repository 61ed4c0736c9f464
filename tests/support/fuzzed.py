"""A live network of three honest peers, under the hostile messages of `support.fuzzing`.

Three more members are attackers. The same network runs again without them: the honest peers must
have the same accuracy and loss after every round, bit by bit. Then nothing that the attackers sent
was taken up.
"""

import os
import re
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from support.fuzzing import ATTACKERS, DIALLER, HONEST, Settings, attack
from support.machines import Machines
from support.paced import ALGORITHM as PACED
from support.processes import TIMEOUT

from peerage import Experiment
from peerage.files import read_json
from peerage.net.deploy.forked import CONTEXT
from peerage.net.deploy.up import free_ports
from peerage.net.peer.network import Network, Timeouts
from peerage.net.trust.certs import Authority

GROWTH = 50 << 20  # bytes of memory that a peer may gain
QUIET = 3600.0  # seconds for the undisturbed rounds
ROW = 1 << 13  # bytes, more than a line of the file of rows
POLL = 0.5  # seconds between two looks at what the attackers have done
WARM = 0.02  # share of the messages before its memory is measured for the first time
EXPERIMENT: dict[str, Any] = {
    "nodes": len(HONEST) + len(ATTACKERS),
    "topology": "complete",
    "partition": "iid",
    "model": "logistic",
    "rounds": 1_000_000,
    "local": {"epochs": 1},
}
VALUES = 650  # parameters of the model
# Honest peers get all the time that they need, so that the rounds are those of a quiet machine.
TIMEOUTS = Timeouts(start=1.0, message=600.0, idle=20.0)
COUNTERS = ("calls_refused", "connections_refused")
METRIC = re.compile(r"^peerage_(\w+)_total\{(.*)\} (\S+)$")
Progress = Callable[[int, list[int]], None]  # messages so far, and the rounds of the honest peers


@dataclass
class Fuzzed:
    """What came of it."""

    outcomes: Counter[str] = field(default_factory=Counter)  # "layer: kind: outcome", of attackers
    refused: dict[str, Counter[str]] = field(default_factory=dict)  # by what and reason, of peers
    wrong: list[str] = field(default_factory=list)  # accepted although a check forbids it
    memory: dict[str, list[int]] = field(default_factory=dict)  # bytes before and after
    rounds: dict[str, list[int]] = field(default_factory=dict)  # before, after
    ended: list[str] = field(default_factory=list)  # peers that did not survive
    errors: list[str] = field(default_factory=list)  # lines of logs that should not be there
    missed: int = 0  # messages of honest peers that other honest peers did not hear
    compared: int = 0  # rows that were compared with those of the undisturbed network
    different: int = 0  # of these, rows with another accuracy or loss
    accuracy: float = 0.0  # in the last compared round, mean of the honest peers
    seconds: float = 0.0

    @property
    def messages(self) -> int:
        return self.outcomes.total()

    @property
    def growth(self) -> int:
        return max(after - before for before, after in self.memory.values())

    def problems(self) -> list[str]:
        """Everything that must not happen."""
        stuck = [name for name, (before, after) in self.rounds.items() if after <= before]
        return [
            *(f"{name} ended" for name in self.ended),
            *(f"{name} finished no round" for name in stuck),
            *(f"accepted: {text}" for text in self.wrong),
            *(f"logged: {text}" for text in self.errors),
            *([f"memory grew by {self.growth >> 20} MB"] if self.growth >= GROWTH else []),
            *([f"{self.missed} messages of honest peers are missing"] if self.missed else []),
            *([f"{self.different} of {self.compared} rows differ"] if self.different else []),
            *([] if self.compared else ["nothing was compared"]),
        ]


def fuzz(
    home: Path,
    budget: int,
    *,
    seconds: float = TIMEOUT,
    seed: int = 0,
    progress: Progress | None = None,
    pause: float = 0.0,
) -> Fuzzed:
    """Send this many hostile messages, or as many as there is time for.

    With a `pause` of so many seconds in each round, the peers leave the processor to the attackers,
    and an hour has few rounds: peers keep the rows of all rounds in memory, about 4 kB for each.
    """
    found = Fuzzed()
    paced = f"{PACED}:pause={pause}"
    with _machines(home / "fuzzed", paced if pause else "decavg") as network:
        Attack(network, found, budget, seconds, seed, progress).run()
        rows = [network.rows(me) for me in HONEST]
    last = min(each[-1]["round"] for each in rows)
    with _machines(home / "undisturbed", "decavg") as network:
        for me in HONEST:
            network.start(me)
        network.until(lambda: min(last_round(network, me) for me in HONEST) >= last, QUIET)
        for me in HONEST:
            quiet = {row["round"]: _scores(row) for row in network.rows(me)}
            for row in rows[me]:
                if 0 < row["round"] <= last:
                    found.compared += 1
                    found.different += _scores(row) != quiet[row["round"]]
                    found.missed += row["heard"][0] < len(HONEST) - 1
    found.accuracy = sum(each[last]["accuracy"] for each in rows) / len(HONEST)
    return found


def _machines(home: Path, algorithm: str) -> Machines:
    home.mkdir()
    quorum, experiment = len(HONEST), Experiment(algorithm=algorithm, **EXPERIMENT)
    return Machines(home, experiment, TIMEOUTS, quorum=quorum, dials_out=[DIALLER], pack=True)


def last_round(network: Machines, me: int) -> int:
    """The last finished round, from the end of the file of rows."""
    file = network.folders[me] / "metrics.jsonl"
    if not file.exists():
        return 0
    with open(file, "rb") as rows:
        rows.seek(max(rows.seek(0, os.SEEK_END) - ROW, 0))
        rounds = re.findall(rb'"round": (\d+), .*\n', rows.read())
    return int(rounds[-1]) if rounds else 0


def _scores(row: Any) -> Any:
    return row["accuracy"], row["loss"]


class Attack:
    """One process for each honest peer, which attacks it."""

    def __init__(
        self,
        network: Machines,
        found: Fuzzed,
        budget: int,
        seconds: float,
        seed: int,
        progress: Progress | None,
    ) -> None:
        self.network, self.found, self.budget = network, found, budget
        self.seconds, self.seed, self.progress = seconds, seed, progress
        Authority.create(network.home / "foreign", "another").issue("node-3")
        members = Network.load_members(network.home / "network.toml")
        self.ports = [int(members[me].address.rpartition(":")[2]) for me in HONEST]
        self.metrics = free_ports(len(HONEST))
        self.before: dict[int, tuple[int, int]] = {}  # memory and round after the first messages

    def run(self) -> None:
        network, found = self.network, self.found
        for me in HONEST:
            network.start(me, more=["--metrics-port", str(self.metrics[me])])
        network.until(lambda: all(network.round(me) >= 1 for me in HONEST))
        began = time.monotonic()
        self._fire()
        # Rounds go on afterwards too, with all that the peers have kept.
        rounds = {me: self._round(me) for me in HONEST}
        network.until(lambda: all(self._round(me) >= rounds[me] + 2 for me in HONEST))
        found.seconds = time.monotonic() - began
        for me in HONEST:
            name = f"node-{me}"
            memory, round = self.before[me]
            found.memory[name] = [memory, self._memory(me)]
            found.rounds[name] = [round, self._round(me)]
            self._count(me)
            log = network.log(me)
            found.errors += re.findall(r".*(?:Traceback|internal error|ERROR).*", log)[:5]
            if network.processes[me].poll() is not None:
                found.ended.append(name)

    def _round(self, me: int) -> int:
        """As `Machines.round`, which reads all rows."""
        return last_round(self.network, me)

    def _memory(self, me: int) -> int:
        return int(psutil.Process(self.network.processes[me].pid).memory_info().rss)

    def _count(self, me: int) -> None:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics[me]}/metrics") as answer:
            lines = answer.read().decode().splitlines()
        for match in filter(None, map(METRIC.match, lines)):
            name, labels, value = match.groups()
            if name in COUNTERS and float(value):
                reason = dict(re.findall(r'(\w+)="([^"]*)"', labels))["reason"]
                self.found.refused.setdefault(name, Counter())[reason] += int(float(value))

    def _fire(self) -> None:
        reports = [self.network.home / f"attacker-{me}.json" for me in HONEST]
        attackers = [
            CONTEXT.Process(target=attack, args=(self._settings(me, report),), daemon=True)
            for me, report in zip(HONEST, reports, strict=True)
        ]
        try:
            for attacker in attackers:
                attacker.start()
            while any(attacker.is_alive() for attacker in attackers):
                time.sleep(POLL)
                self._read(reports)
        finally:
            for attacker in attackers:
                attacker.kill()
                attacker.join()
        self._read(reports)
        known = [read_json(report) for report in reports]
        assert all(each["ended"] for each in known), "an attacker failed"

    def _settings(self, me: int, report: Path) -> Settings:
        return Settings(
            victim=me,
            port=self.ports[me],
            certs=str(self.network.home / "certs"),
            foreign=str(self.network.home / "foreign"),
            values=VALUES,
            budget=-(-self.budget // len(HONEST)),
            seconds=self.seconds,
            seed=len(HONEST) * self.seed + me,
            report=str(report),
        )

    def _read(self, reports: list[Path]) -> None:
        known = [read_json(report) for report in reports if report.exists()]
        self.found.outcomes = sum((Counter(each["outcomes"]) for each in known), Counter())
        self.found.wrong = [text for each in known for text in each["wrong"]]
        rounds = [self._round(me) for me in HONEST]
        if not self.before and self.found.messages >= WARM * self.budget:
            self.before = {me: (self._memory(me), rounds[me]) for me in HONEST}
        if self.progress is not None:
            self.progress(self.found.messages, rounds)
        ended = [me for me in HONEST if self.network.processes[me].poll() is not None]
        assert not ended, "\n".join(self.network.log(me)[-2000:] for me in ended)
