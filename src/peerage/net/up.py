"""A whole network of real processes on this machine: made, watched, disturbed, and gathered."""

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

from safetensors import safe_open
from torch import Tensor

from peerage import checkpoint
from peerage.environment import environment
from peerage.errors import InputError, Interrupted, PeerageError
from peerage.evaluation import Score
from peerage.experiment import Experiment
from peerage.net.certs import Authority
from peerage.net.network import Member, Network, Patience, check_rejoin
from peerage.prepare import Prepared, prepare
from peerage.privacy import account
from peerage.records import MetricWriter, Row, read_metrics, write_bytes, write_json
from peerage.running import check_free, digest, network_row, node_rows, summary_of, taken
from peerage.sim.lockstep import RoundReport
from peerage.sim.shard import NodeReport
from peerage.sim.world import World
from peerage.vectors import Layout

LOOK = 0.2  # seconds between two looks at the peers
MAIN = "from peerage.cli import main; main()"


@dataclass
class Seen:
    """What the files of one peer tell of it."""

    name: str
    state: str = "starting"
    round: int = 0
    accuracy: float | None = None
    heard: str = "-"


@dataclass
class Watched:
    """One peer's process and what was seen of it."""

    number: int
    seen: Seen
    folder: Path
    process: subprocess.Popen[bytes] | None = None
    starts: int = 0
    read: int = 0  # bytes of its metrics that were looked at
    file: int = 0  # the number of that file: a peer that comes back writes another

    @property
    def rows(self) -> list[Row]:
        return read_metrics(self.folder / "metrics.jsonl") if self.read else []

    def look(self) -> None:
        for row in self._new_rows():
            self.seen.round = row["round"]
            self.seen.heard = "{} of {}".format(*row["heard"])
            self.seen.accuracy = row.get("accuracy", self.seen.accuracy)
        if self.process is None:
            return
        code = self.process.poll()
        if code is None:
            self.seen.state = "playing" if self.read else "starting"
        else:
            self.seen.state = "finished" if code == 0 else "killed" if code < 0 else "failed"

    def _new_rows(self) -> Iterator[Row]:
        """What the peer has written since the last look; a line that is not whole can wait."""
        with suppress(FileNotFoundError), open(self.folder / "metrics.jsonl", "rb") as file:
            number = os.fstat(file.fileno()).st_ino
            if number != self.file:
                self.file, self.read = number, 0
            file.seek(self.read)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self.read += len(line)
                yield json.loads(line)


Show = Callable[[Sequence[Seen]], None]


@dataclass
class Up:
    """A network of processes; `kill` and `restart` say when a node is disturbed: node -> round."""

    experiment: Experiment
    home: Path
    patience: Patience = Patience()
    wire: str = "fp32"
    pack: bool = False
    kill: Mapping[int, int] = field(default_factory=dict)
    restart: Mapping[int, int] = field(default_factory=dict)
    rejoin: str = "own"
    show: Show | None = None

    def __post_init__(self) -> None:
        check_rejoin(self.rejoin)
        count = self.experiment.nodes_and_hub
        for what, plan in (("kill", self.kill), ("restart", self.restart)):
            for node in plan:
                if node >= count:
                    raise InputError(f"{what} names node {node}; the nodes are 0 to {count - 1}")
        for node, round in self.restart.items():
            if node not in self.kill or self.kill[node] > round:
                raise InputError(f"node {node} cannot be restarted in round {round} before a kill")

    def run(self) -> dict[str, Any]:
        """To the end of all peers; the summary of the run."""
        started = perf_counter()
        check_free(self.home)
        prepared = prepare(self.experiment)  # complains before anything is started
        self.experiment = prepared.experiment
        self.network = self._network()
        with taken(self.home), tempfile.TemporaryDirectory(prefix="peerage-") as secret:
            self._write(Path(secret))
            self.watched = [
                Watched(number, Seen(member.name), self.home / "peers" / member.name)
                for number, member in enumerate(self.network.members)
            ]
            with self._processes(Path(secret)):
                self._watch(Path(secret))
            return gathered(self.home, prepared, self.watched, perf_counter() - started)

    def _network(self) -> Network:
        ports = free_ports(self.experiment.nodes_and_hub)
        members = tuple(Member(f"node-{i}", f"127.0.0.1:{port}") for i, port in enumerate(ports))
        run = secrets.token_hex(8)
        return Network(run, self.experiment, members, self.patience, self.wire, self.pack)

    def _write(self, secret: Path) -> None:
        text = self.experiment.to_toml()
        write_bytes(self.home / "experiment.toml", text.encode(), "run the experiment again")
        write_bytes(self.home / "network.toml", self.network.to_toml("experiment.toml").encode())
        authority = Authority.create(secret / "certs", "peerage-up")
        for member in self.network.members:
            authority.issue(member.name, days=30)

    def _start(self, peer: Watched, secret: Path) -> None:
        peer.folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-c", MAIN, "node", "--network", str(self.home / "network.toml")]
        command += ["--identity", peer.seen.name, "--certs", str(secret / "certs")]
        command += ["--out", str(peer.folder), "--rejoin", self.rejoin]
        with open(peer.folder / "log.txt", "ab") as file:
            peer.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                start_new_session=True,  # Ctrl-C is for this process, which ends the others
            )
        peer.starts += 1
        peer.seen.state = "starting"

    @contextmanager
    def _processes(self, secret: Path) -> Iterator[None]:
        with ExitStack() as stack:
            stack.callback(self._end)
            for peer in self.watched:
                self._start(peer, secret)
            yield

    def _end(self) -> None:
        """Ask politely, then insist; nobody is left behind."""
        alive = [p.process for p in self.watched if p.process and p.process.poll() is None]
        for process in alive:
            process.terminate()
        for process in alive:
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
        for process in alive:
            process.kill()
            process.wait()

    def _watch(self, secret: Path) -> None:
        kill, restart = dict(self.kill), dict(self.restart)
        try:
            while True:
                for peer in self.watched:
                    peer.look()
                self._disturb(kill, restart, secret)
                if self.show is not None:
                    self.show([peer.seen for peer in self.watched])
                if self._over(restart):
                    break
                sleep(LOOK)
        except KeyboardInterrupt:
            raise Interrupted(f"interrupted; what the peers have is in {self.home}") from None
        failed = [peer for peer in self.watched if peer.seen.state == "failed"]
        if failed:
            raise PeerageError(f"{failed[0].seen.name} failed: {last_line(failed[0].folder)}")

    def _disturb(self, kill: dict[int, int], restart: dict[int, int], secret: Path) -> None:
        newest = max(peer.seen.round for peer in self.watched)
        for node, round in list(kill.items()):
            peer = self.watched[node]
            if peer.seen.round >= round - 1 and peer.process is not None:
                with suppress(ProcessLookupError):
                    os.kill(peer.process.pid, signal.SIGKILL)
                peer.process.wait()
                peer.seen.state = "killed"
                del kill[node]
        for node, round in list(restart.items()):
            if node not in kill and newest >= round - 1:
                self._start(self.watched[node], secret)
                del restart[node]

    def _over(self, restart: Mapping[int, int]) -> bool:
        ended = all(peer.process and peer.process.poll() is not None for peer in self.watched)
        if ended and restart:
            nodes = ", ".join(map(str, restart))
            raise PeerageError(
                f"the run was over before node {nodes} was to be restarted; name an earlier round"
            )
        return ended


def free_ports(count: int) -> list[int]:
    """Ports of this machine that nobody listens on now."""
    with ExitStack() as stack:
        taken = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in taken:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in taken]


def last_line(folder: Path) -> str:
    try:
        lines = (folder / "log.txt").read_text(errors="replace").strip().splitlines()
    except OSError:
        lines = []
    return lines[-1] if lines else "it said nothing"


# The run folder of the whole network, as the reports know it


def gathered(
    home: Path, prepared: Prepared, watched: Sequence[Watched], seconds: float
) -> dict[str, Any]:
    """Write metrics, setup and summary of the network from those of its peers."""
    world, noise = prepared.world, prepared.experiment.noise
    write_json(home / "setup.json", prepared.setup)
    write_json(home / "environment.json", environment())
    by_round: dict[int, list[Row]] = {}
    for row in (row for peer in watched for row in peer.rows):
        by_round.setdefault(row["round"], []).append(row)
    total, network = 0, []
    with MetricWriter(home / "metrics.jsonl") as writer:
        for round in sorted(by_round):
            report = report_of(by_round[round])
            total += report.bytes
            network.append(network_row(round, report, total, min(len(report.nodes), world.peers)))
            for row in (*node_rows(round, report), network[-1]):
                writer.append(row)
    kept, layouts = final_models(watched, world)
    ends = [_summary(peer.folder) for peer in watched]
    released = [int(end.get("released", 0)) for end in ends][: world.peers]
    summary = summary_of(
        prepared.experiment,
        world,
        network,
        run=home.name,
        status="finished",
        seconds=seconds,
        digest=digest(kept, layouts) if kept else None,
        privacy=account(noise, released) if noise.active else None,
    )
    summary |= {
        "wire_bytes": sum(int(end.get("wire_bytes", 0)) for end in ends),
        "peers": [{"name": peer.seen.name, "starts": peer.starts} for peer in watched],
    }
    write_json(home / "summary.json", summary)
    return summary


def report_of(rows: Sequence[Row]) -> RoundReport:
    """One round of all peers, from their rows, as an engine would report it."""
    nodes = [
        NodeReport(
            row["node"],
            row.get("train_loss"),
            _score(row, ""),
            _score(row, "validation_"),
            row.get("notes") or {},
        )
        for row in sorted(rows, key=lambda row: int(row["node"]))
    ]
    sent = sum(int(row["bytes"]) for row in rows)
    longest = max(float(row["seconds"]["total"]) for row in rows)
    return RoundReport(nodes, sent, None, {"total": longest})


def _score(row: Row, which: str) -> Score | None:
    if f"{which}accuracy" not in row:
        return None
    return Score(row[f"{which}accuracy"], row[f"{which}loss"])


def final_models(watched: Sequence[Watched], world: World) -> tuple[list[Tensor], list[Layout]]:
    """Of every node that keeps one, from its last checkpoint."""
    kept, layouts = [], []
    for peer in watched:
        if world.keeper(peer.number) != peer.number:
            continue
        saved = checkpoint.load(peer.folder)
        if saved is None:
            continue
        with safe_open(saved.folder / saved.parts[str(peer.number)], framework="pt") as file:
            kept.append(file.get_tensor(f"{peer.number}.params"))
        layouts.append(world.layout(peer.number))
    return kept, layouts


def _summary(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / "summary.json").read_text())
    except (OSError, ValueError):
        return {}
    return dict(found)
