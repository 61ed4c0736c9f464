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

import numpy as np
from safetensors import safe_open
from torch import Tensor

from peerage import checkpoint
from peerage.algorithms import ALGORITHMS
from peerage.data.datasets import DATASETS
from peerage.environment import environment
from peerage.errors import InputError, Interrupted, PeerageError
from peerage.experiment import Experiment, display_name
from peerage.faults import moments
from peerage.net.certs import Authority
from peerage.net.network import NO_END, Member, Network, Patience
from peerage.prepare import Prepared, prepare
from peerage.privacy import account
from peerage.records import MetricWriter, Row, read_metrics, write_bytes, write_json
from peerage.running import digest, label

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

    @property
    def rows(self) -> list[Row]:
        path = self.folder / "metrics.jsonl"
        return read_metrics(path) if path.exists() else []

    def look(self) -> None:
        rows = self.rows
        if rows:
            self.seen.round = rows[-1]["round"]
            self.seen.heard = "{} of {}".format(*rows[-1]["heard"])
            judged = [row["accuracy"] for row in rows if "accuracy" in row]
            self.seen.accuracy = judged[-1] if judged else None
        if self.process is None:
            return
        code = self.process.poll()
        if code is None:
            self.seen.state = "playing" if rows else "starting"
        else:
            self.seen.state = "finished" if code == 0 else "killed" if code < 0 else "failed"


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
        if self.experiment.until is not None:
            raise InputError(NO_END)
        if self.rejoin not in ("own", "neighbour"):
            raise InputError(f"rejoin must be own or neighbour, got {self.rejoin!r}")
        if self.wire not in ("fp32", "bf16"):
            raise InputError(f"wire must be fp32 or bf16, got {self.wire!r}")
        count = self.experiment.nodes + self.experiment.algorithm.with_hub
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
        prepared = prepare(self.experiment)  # complains before anything is started
        self.experiment = prepared.experiment
        with tempfile.TemporaryDirectory(prefix="peerage-") as secret:
            self._write(Path(secret))
            self.watched = [
                Watched(number, Seen(member.name), self.home / "peers" / member.name)
                for number, member in enumerate(self.network.members)
            ]
            with self._processes(Path(secret)):
                self._watch(Path(secret))
        return gathered(self.home, prepared, self.watched, perf_counter() - started)

    def _write(self, secret: Path) -> None:
        count = self.experiment.nodes + self.experiment.algorithm.with_hub
        members = tuple(
            Member(f"node-{number}", f"127.0.0.1:{port}")
            for number, port in enumerate(free_ports(count))
        )
        self.network = Network(
            secrets.token_hex(8),
            self.experiment,
            members,
            self.patience,
            self.wire,  # type: ignore[arg-type]
            self.pack,
        )
        self.home.mkdir(parents=True, exist_ok=True)
        text = self.experiment.to_toml()
        write_bytes(self.home / "experiment.toml", text.encode(), "run the experiment again")
        write_bytes(self.home / "network.toml", self.network.to_toml("experiment.toml").encode())
        authority = Authority.create(secret / "certs", "peerage-up")
        for member in members:
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
    world, experiment = prepared.world, prepared.experiment
    write_json(home / "setup.json", prepared.setup)
    write_json(home / "environment.json", environment())
    rows = [row for peer in watched for row in peer.rows]
    by_round: dict[int, list[Row]] = {}
    for row in rows:
        by_round.setdefault(row["round"], []).append(row)
    total = 0
    network: list[Row] = []
    with MetricWriter(home / "metrics.jsonl") as writer:
        for round in sorted(by_round):
            mine = sorted(by_round[round], key=lambda row: int(row["node"]))
            for row in mine:
                if "accuracy" in row:
                    writer.append(node_row(row))
            total += sum(int(row["bytes"]) for row in mine)
            network.append(network_row(round, mine, total, world.peers))
            writer.append(network[-1])
    kept, layouts = final_models(watched, world)
    last = next((row for row in reversed(network) if "accuracy" in row), {})
    best = max((r for r in network if "accuracy" in r), key=lambda r: r["accuracy"], default={})
    summaries = [_summary(peer.folder) for peer in watched]
    released = [int(summary.get("released", 0)) for summary in summaries][: world.peers]
    noise = experiment.noise
    summary = {
        "run": home.name,
        "status": "finished",
        "algorithm": display_name(experiment.algorithm, ALGORITHMS),
        "label": label(experiment),
        "dataset": display_name(experiment.dataset, DATASETS),
        "nodes": world.peers,
        "rounds": max(by_round, default=0),
        "rounds_planned": experiment.rounds,
        "accuracy": last.get("accuracy"),
        "accuracy_std": last.get("accuracy_std"),
        "loss": last.get("loss"),
        "bytes_sent": total,
        "wire_bytes": sum(int(summary.get("wire_bytes", 0)) for summary in summaries),
        "seconds": seconds,
        "digest": digest(kept, layouts) if kept else None,
        "best_accuracy": best.get("accuracy"),
        "best_round": best.get("round"),
        "message": "",
        "peers": [{"name": p.seen.name, "starts": p.starts} for p in watched],
        **({"privacy": account(noise, released)} if noise.active else {}),
    }
    write_json(home / "summary.json", summary)
    return summary


def node_row(row: Row) -> Row:
    return {key: value for key, value in row.items() if key not in ("bytes", "heard", "seconds")}


def network_row(round: int, rows: Sequence[Row], total: int, peers: int) -> Row:
    found: Row = {"scope": "network", "round": round, "nodes": min(len(rows), peers)}
    trained = [row["train_loss"] for row in rows if "train_loss" in row]
    if trained:
        found["train_loss"] = float(np.mean(trained))
    found |= {"bytes": sum(int(row["bytes"]) for row in rows), "bytes_total": total}
    for key in ("accuracy", "loss"):
        x = np.array([row[key] for row in rows if key in row])
        if len(x):
            found |= {key: x.mean(), f"{key}_std": x.std()}
            found |= {f"{key}_min": x.min(), f"{key}_max": x.max()}
    found["seconds"] = {"total": max(float(row["seconds"]["total"]) for row in rows)}
    return {k: float(v) if isinstance(v, np.floating) else v for k, v in found.items()}


def final_models(watched: Sequence[Watched], world: Any) -> tuple[list[Tensor], list[Any]]:
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


def disturbances(what: str, text: str | None) -> dict[int, int]:
    return moments(what, text or "")
