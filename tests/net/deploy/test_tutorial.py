"""The tutorial of docs/real-peers.md: five sites and an office, each a network namespace.

Commands, files and expected lines come from the page. Every section that has commands for a machine
has a step here, so that a new section needs one too.
"""

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support.machines import Cable, entering, host, two_rooms
from support.pages import Block, blocks_of
from support.processes import TIMEOUT, until

PAGE = (Path(__file__).parents[3] / "docs" / "real-peers.md").read_text()
SITES, OFFICE = range(5), 5  # the last site joins later
SOON = 10  # rounds from the present one to the first of a revision
# Stands for the real one: machines are folders beside each other, named by their addresses.
SCP = '#!/bin/bash\nset -- "${@/#10./../10.}"\nexec cp "${@/:/\\/}"\n'


@dataclass(frozen=True)
class Command:
    line: str
    output: list[str]  # lines that it prints, as the page shows them

    def at(self, site: int) -> "Command":
        """The same command of another site; the page has it for the first one."""
        line = self.line.replace("node-0", f"node-{site}").replace(host(0), host(site))
        return Command(line, self.output)


def commands(text: str) -> list[Command]:
    found: list[Command] = []
    for line in text.replace("\\\n", " ").splitlines():
        if line.startswith("$ "):
            found.append(Command(line.removeprefix("$ "), []))
        elif line != "...":
            found[-1].output.append(line)
    return found


def sections() -> dict[str, list[Block]]:
    """The blocks with a note, by section."""
    parts = re.split(r"^## (.+)\n", PAGE, flags=re.M)
    found = {
        title: [block for block in blocks_of(text) if block.note]
        for title, text in zip(parts[1::2], parts[2::2], strict=True)
    }
    return {title: blocks for title, blocks in found.items() if blocks}


def masked(line: str) -> str:
    """A line without numbers and fingerprints, which are different each time.

    What follows dots in the page may be anything.
    """
    line = re.sub(r"\b[0-9a-f]{8}( [0-9a-f]{8}){7}\b", "#", line.split("...")[0])
    return re.sub(r"\d+([.:]\d+)*", "#", line).strip()


@dataclass
class Machine:
    """A folder and a network namespace, with at most one peer."""

    number: int
    home: Path  # where a user is after login
    namespace: int
    environment: dict[str, str]
    process: subprocess.Popen[bytes] | None = None
    seen: int = 0  # characters of the log that belong to earlier steps

    @property
    def folder(self) -> Path:
        return self.home if self.number == OFFICE else self.home / f"node-{self.number}"

    @property
    def log_file(self) -> Path:
        return self.home / "log.txt"

    @property
    def log(self) -> str:
        """What the peer has logged in this step."""
        return self.log_file.read_text()[self.seen :] if self.log_file.exists() else ""

    def perform(self, command: Command) -> str:
        """Run the command, check the lines that the page shows, and return its output."""
        if command.line.startswith("peerage node "):
            self.start(command)
            return ""
        done = subprocess.run(
            [*entering(self.namespace), "bash", "-ec", command.line],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
        )
        assert done.returncode == 0, f"{command.line}: {done.stdout}{done.stderr}"
        assert not missing(command.output, done.stdout), f"{command.line}: {done.stdout}"
        return done.stdout

    def start(self, command: Command) -> None:
        with open(self.log_file, "ab") as log:
            self.process = subprocess.Popen(
                [*entering(self.namespace), "bash", "-ec", f"exec {command.line}"],
                cwd=self.folder,
                env=self.environment,
                stdout=log,
                stderr=log,
            )

    def stop(self) -> None:
        """As Ctrl-C."""
        assert self.process is not None
        self.process.send_signal(signal.SIGINT)
        assert self.process.wait(TIMEOUT) == 130
        self.process = None

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def until_logged(self, lines: list[str]) -> None:
        def logged() -> bool:
            died = self.process is not None and self.process.poll() is not None
            assert not died, f"node-{self.number} has ended: {self.log}"
            return not missing(lines, self.log)

        until(logged, f"node-{self.number} logs {lines}, but it logged {self.log[-3000:]}")

    def until_heard(self, others: int) -> None:
        """Wait for a round of this step with messages of so many others, and of no fewer."""
        text = f"received {others} of {others} messages"
        until(lambda: text in self.log, f"node-{self.number} logs {text}: {self.log[-3000:]}")

    @property
    def rounds(self) -> list[int]:
        """The rounds in the log of this step."""
        return [int(number) for number in re.findall(r" round (\d+) of ", self.log)]


def missing(lines: list[str], text: str) -> list[str]:
    """The lines of the page that do not occur in the text, in any order, apart from numbers."""
    actual = [masked(line) for line in text.splitlines()]
    return [one for one in lines if not any(got.startswith(masked(one)) for got in actual)]


@dataclass
class Tutorial:
    """All machines; each step carries out one section of the page."""

    machines: list[Machine]
    cable: Cable
    sites: list[int] = field(default_factory=lambda: [0, 1, 2, 3])  # that take part
    left: dict[str, list[Block]] = field(default_factory=sections)
    blocks: Iterator[Block] = field(default_factory=lambda: iter(()))

    def section(self, title: str) -> None:
        """Begin a section; the log lines of earlier ones do not count from here on."""
        assert next(self.blocks, None) is None, f"before {title}: not all blocks were performed"
        self.blocks = iter(self.left.pop(title))
        for machine in self.machines:
            machine.seen += len(machine.log)

    def next(self, note: str) -> str:
        """Perform the next block, which must have this note; return the output of its commands."""
        block = next(self.blocks)
        assert block.note == note
        kind, place = note.split(": ")
        if kind == "file":
            (self.machines[OFFICE].folder / place).write_text(block.text)
            return ""
        if kind == "log":
            self.machines[int(place.removeprefix("node-"))].until_logged(block.text.splitlines())
            return ""
        known, every = [self.soon(one) for one in commands(block.text)], "every site" in place
        performed = [
            (self._machine(place, site), command.at(site))
            for site in (self.sites if every else [0])
            for command in known
        ]
        output = [machine.perform(command) for machine, command in performed]
        for machine, command in performed:
            if command.line.startswith("peerage node "):
                machine.until_logged(command.output)
        return "".join(output)

    def soon(self, command: Command) -> Command:
        """The command with a round that comes soon on this machine, instead of that of the page."""
        if "--from-round" not in command.line:
            return command
        reached = max(max(self.machines[site].rounds, default=0) for site in self.sites)
        line = re.sub(r"(--from-round) \d+", rf"\1 {reached + SOON}", command.line)
        return Command(line, command.output)

    def _machine(self, place: str, site: int) -> Machine:
        if place.startswith("office"):
            return self.machines[OFFICE]
        return self.machines[site if place == "every site" else int(place.removeprefix("node-"))]

    def status(self, states: list[str]) -> list[dict[str, Any]]:
        """Wait until the command of the page finds these states; return what it says as JSON."""
        line = next(line for line in PAGE.splitlines() if line.startswith("$ peerage status "))
        command = Command(f"{line.removeprefix('$ ')} --json", [])
        peers: list[dict[str, Any]] = []

        def found() -> bool:
            peers[:] = json.loads(self.machines[OFFICE].perform(command))["peers"]
            return [peer.get("state", "unreachable") for peer in peers] == states

        until(found, f"the states are {states}")
        return peers

    def end(self) -> None:
        for machine in self.machines:
            machine.end()


@pytest.fixture
def tutorial(tmp_path: Path) -> Iterator[Tutorial]:
    """Site 3 is in a room of its own, so that its cable can be cut."""
    scp = tmp_path / "bin" / "scp"
    scp.parent.mkdir()
    scp.write_text(SCP)
    scp.chmod(0o755)
    path = f"{scp.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
    with two_rooms((0, 1, 2, 4, OFFICE), (3,)) as cable:
        machines = [
            Machine(number, tmp_path / host(number), cable.machines[number], environment)
            for number in (*SITES, OFFICE)
        ]
        for machine in machines:
            machine.home.mkdir()
        running = Tutorial(machines, cable)
        try:
            yield running
        finally:
            running.end()


def test_the_page_names_the_hash_of_its_model():
    """A changed model needs another hash in the page, also where there are no namespaces."""
    model = next(block for block in blocks_of(PAGE) if block.note == "file: triage.py")
    sha256 = hashlib.sha256(model.text.encode()).hexdigest()
    assert set(re.findall(r"\b[0-9a-f]{64}\b", PAGE)) == {sha256}


@pytest.mark.slow
def test_the_tutorial(tutorial):
    sites = tutorial.machines[:OFFICE]
    running = sites[:4]

    tutorial.section("What the sites agree on")
    for name in ("triage.py", "ward.toml", "hosts.txt", "invent.py"):
        tutorial.next(f"file: {name}")
    for _ in range(3):  # simulate, export, copy
        tutorial.next("at: office")

    tutorial.section("Keys stay at the sites")
    tutorial.next("at: every site")
    tutorial.next("at: office, for every site")

    tutorial.section("Data and code at the sites")
    tutorial.next("at: every site")
    tutorial.next("at: every site")

    tutorial.section("Start")
    tutorial.next("at: every site")

    tutorial.section("Look at it")
    tutorial.next("at: office")
    before = tutorial.status(["running"] * 4)

    tutorial.section("Stop one, and let it return")
    sites[3].stop()
    tutorial.next("log: node-3")
    tutorial.next("log: node-0")
    rounds = len(sites[0].rounds)
    until(lambda: len(sites[0].rounds) > rounds + 5, "the others continue")
    tutorial.next("at: node-3")

    tutorial.section("A cut link that heals")
    tutorial.cable.cut()
    tutorial.next("log: node-3")
    paused = sites[3].rounds
    rounds = len(sites[0].rounds)
    until(lambda: len(sites[0].rounds) > rounds + 8, "the majority continues")
    assert sites[3].rounds == paused
    tutorial.status(["running"] * 3 + ["unreachable"])
    tutorial.cable.restore()
    tutorial.next("log: node-3")

    tutorial.section("Replace a certificate")
    tutorial.next("at: node-2")
    tutorial.next("at: office")
    tutorial.next("log: node-2")
    after = tutorial.status(["running"] * 4)
    expiry = [(old["expires"], new["expires"]) for old, new in zip(before, after, strict=True)]
    assert [new < old for old, new in expiry] == [False, False, True, False]

    tutorial.section("A fifth site joins")
    until(lambda: sites[0].rounds, "the present round is known")
    tutorial.next("at: office")
    tutorial.next("at: node-4")
    tutorial.next("at: office")
    tutorial.next("at: office, for every site")
    tutorial.next("at: node-4")
    tutorial.next("log: node-0")
    tutorial.sites.append(4)
    for site in sites:
        site.until_heard(4)
    assert "ignoring" not in "".join(site.log for site in sites)

    tutorial.section("A site leaves")
    until(lambda: sites[0].rounds, "the present round is known")
    tutorial.next("at: office")
    tutorial.next("at: office, for every site")
    assert sites[1].process is not None
    assert sites[1].process.wait(TIMEOUT) == 0
    sites[1].process = None
    running = [sites[0], *sites[2:]]
    tutorial.sites.remove(1)
    for site in running:
        site.until_heard(3)
    tutorial.next("at: office")
    tutorial.next("log: node-0")
    last = [site.rounds[-1] for site in running]

    tutorial.section("Restart all")
    for site in running:
        site.stop()
        site.seen += len(site.log)
    tutorial.next("at: every site")
    for site, reached in zip(running, last, strict=True):
        assert site.rounds[0] > reached
        site.until_heard(3)
    for site in sites:
        assert "Traceback" not in site.log_file.read_text()

    tutorial.section("Get the best model out")
    tutorial.next("at: node-0")
    tutorial.next("file: use.py")
    tutorial.next("at: office")

    tutorial.section("Report on all sites")
    tutorial.next("at: office, for every site")
    tutorial.next("at: office")
    assert "Accuracy of each peer" in (tutorial.machines[OFFICE].folder / "sites.html").read_text()

    for site in running:
        site.stop()
    assert not tutorial.left
