"""Runs a whole network of peer processes on this machine, and collects its records."""

import os
import random
import secrets
import socket
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, perf_counter, sleep
from typing import Any

from peerage.engine.prepare import prepare
from peerage.errors import Diverged, InputError, Interrupted, PeerageError, WorkerDied
from peerage.experiment import Experiment
from peerage.experiment.identity import own_code
from peerage.files import write_bytes
from peerage.net.deploy.collect import REMEDY, RecordCollector
from peerage.net.deploy.forked import Forked
from peerage.net.deploy.message_sizes import MessageSizes
from peerage.net.deploy.parent_pipe import VARIABLE, ParentPipe, interrupt_once
from peerage.net.deploy.process import PeerProcess, PeerProgress
from peerage.net.peer.network import (
    MAJORITY,
    Member,
    Network,
    Timeouts,
    check_quorum,
    check_rejoin,
    least_contacts,
)
from peerage.net.peer.progress import State
from peerage.net.peer.recorder import PAUSED
from peerage.net.trust.certs import Authority
from peerage.net.trust.identity import Identity
from peerage.net.trust.memory_keys import MemoryKeys
from peerage.net.trust.signature import sign_network
from peerage.privacy import check_epsilon_limit
from peerage.runs.kept_models import Keep
from peerage.runs.run import check_empty, new_run_folder

PORTS = range(10_000, 32_000)  # below those that Linux gives to outgoing connections
POLL_INTERVAL = 0.2  # seconds between two checks of the peers
SHUTDOWN_TIMEOUT = 10.0  # seconds for all peers to exit after SIGTERM


Show = Callable[[Sequence[PeerProgress]], None]


@dataclass
class LocalNetwork:
    """A network of processes; `kill` and `restart` map a node to a round."""

    experiment: Experiment
    home: Path
    timeouts: Timeouts = Timeouts()
    wire: str = "fp32"
    pack: bool = False
    kill: Mapping[int, int] = field(default_factory=dict)
    restart: Mapping[int, int] = field(default_factory=dict)
    rejoin: str = "own"
    stop_at_epsilon: float | None = None
    show: Show | None = None
    announce: Callable[[str], None] | None = None  # called with lines for the user
    keep: Keep = Keep()
    quorum: int | str = MAJORITY
    dials_out: Sequence[int] = ()  # peers that open no port

    def __post_init__(self) -> None:
        check_rejoin(self.rejoin)
        check_quorum(self.quorum, self.experiment.nodes_and_hub)
        check_epsilon_limit(self.stop_at_epsilon, self.experiment.noise)
        count, rounds = self.experiment.nodes_and_hub, self.experiment.rounds
        for what, plan in (("kill", self.kill), ("restart", self.restart)):
            for node, round in plan.items():
                if not 0 <= node < count:
                    raise InputError(f"{what} names node {node}; the nodes are 0 to {count - 1}")
                if not 1 <= round <= rounds:
                    raise InputError(f"{what} names round {round}; the rounds are 1 to {rounds}")
        for node, round in self.restart.items():
            if node not in self.kill or self.kill[node] > round:
                raise InputError(
                    f"node {node} cannot be restarted in round {round} before it is killed; "
                    "kill it in an earlier round"
                )

    def run(self) -> dict[str, Any]:
        """Run all peers to their end; return the summary of the run."""
        started = perf_counter()
        check_empty(self.home)
        world = prepare(self.experiment)  # raises errors before any process is started
        self.experiment = world.experiment
        self.network = self._network()
        if self.announce is not None:
            self.announce(str(MessageSizes.of_world(world, self.wire)))
        collector = RecordCollector(self.home, world, self.wire, started)
        self.watched = [
            PeerProcess(
                number,
                PeerProgress(member.name, own=dict.fromkeys(world.own_metrics)),
                self.home / "peers" / member.name,
            )
            for number, member in enumerate(self.network.members)
        ]
        with (
            interrupt_once(),
            new_run_folder(self.home),
            tempfile.TemporaryDirectory(prefix="peerage-") as folder,
            closing(ParentPipe()) as self.parent_pipe,
            closing(MemoryKeys()) as self.keys,
        ):
            secret = Path(folder)
            self._write(secret)
            collector.write([], "running")
            try:
                with ExitStack() as stack:
                    stack.callback(self._end)
                    for peer in self.watched:
                        self._start(peer, secret)
                    self._watch(secret)
            except BaseException as error:
                described = self._record_failure(error, collector)
                if described is error:
                    raise
                raise described from None
            return collector.write(self.watched, "finished", self._stops())

    def _stops(self) -> str:
        """Which peers ended their training early, and why; empty if none did."""
        early = [peer.seen for peer in self.watched if peer.seen.state.startswith(State.STOPPED)]
        if not early:
            return ""
        names = ", ".join(seen.name for seen in early)
        rounds = ", ".join(dict.fromkeys(str(seen.round) for seen in early))
        return f"{names} stopped after round {rounds} at the limit of epsilon"

    def _record_failure(self, error: BaseException, collector: RecordCollector) -> BaseException:
        """Write the records so far; return the error to raise, which names their folder."""
        if isinstance(error, KeyboardInterrupt | Interrupted):
            status, error = "interrupted", Interrupted(f"interrupted in round {self.newest + 1}")
        else:
            status = "diverged" if isinstance(error, Diverged) else "failed"
        if isinstance(error, PeerageError):
            error = type(error)(f"{error}; the records of the peers are in {self.home}")
        # If the disk is full, these records cannot be written either.
        with suppress(PeerageError):
            collector.write(self.watched, status, str(error))
        return error

    @property
    def newest(self) -> int:
        """The latest round that any peer has finished."""
        return max(peer.seen.round for peer in self.watched)

    def _network(self) -> Network:
        ports = free_ports(self.experiment.nodes_and_hub)
        members = tuple(
            Member(
                f"node-{i}", "" if i in self.dials_out else f"127.0.0.1:{port}", i in self.dials_out
            )
            for i, port in enumerate(ports)
        )
        run = secrets.token_hex(8)
        return Network(
            run,
            self.experiment,
            members,
            self.timeouts,
            self.wire,
            self.pack,
            quorum=self.quorum,
        )

    def _write(self, secret: Path) -> None:
        text = self.experiment.to_toml()
        write_bytes(self.home / "experiment.toml", text.encode(), REMEDY)
        text = self.network.to_toml("experiment.toml")
        write_bytes(self.home / "network.toml", text.encode(), REMEDY)
        authority = Authority.create(secret / "certs", "peerage-up", memory=self.keys)
        for member in self.network.members:
            authority.issue(member.name, days=365)
        sign_network(authority, self.home / "network.toml")

    def _start(self, peer: PeerProcess, secret: Path) -> None:
        peer.folder.mkdir(parents=True, exist_ok=True)
        (peer.folder / PAUSED).unlink(missing_ok=True)  # of an earlier start
        command = ["node"]
        command += ["--network", str(self.home / "network.toml")]
        command += ["--identity", peer.seen.name, "--certs", str(secret / "certs")]
        command += ["--out", str(peer.folder), "--rejoin", self.rejoin]
        if self.stop_at_epsilon is not None and peer.number != self.experiment.hub:
            command += ["--stop-at-epsilon", str(self.stop_at_epsilon)]
        command += ["--keep", self.keep.models]
        if self.keep.every is not None:
            command += ["--keep-every", str(self.keep.every)]
        for sha256 in dict.fromkeys(own_code(self.experiment).values()):
            command += ["--allow-code", sha256]  # the user has named the file in this command
        key = self.keys.descriptor(Identity.within(secret / "certs", peer.seen.name).key)
        with open(peer.folder / "log.txt", "ab") as file:
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            passed = {VARIABLE: self.parent_pipe.theirs}
            peer.process = Forked(command, file, environment, passed, [key], peer.seen.name)
        peer.starts += 1
        peer.old_file, peer.killed = peer.file, False
        peer.seen.state = State.STARTING

    def _end(self) -> None:
        """End all processes: with SIGTERM, and after `SHUTDOWN_TIMEOUT` with SIGKILL."""
        alive = [peer for peer in self.watched if peer.alive]
        processes = [peer.process for peer in alive if peer.process is not None]
        for peer in alive:
            peer.seen.state = "stopped"
        for process in processes:
            process.terminate()
        deadline = monotonic() + SHUTDOWN_TIMEOUT
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - monotonic(), 0))
        for process in processes:
            process.kill()
            process.wait()

    def _watch(self, secret: Path) -> None:
        kill, restart = dict(self.kill), dict(self.restart)
        over = False
        while not over:
            # Checked before the rows are read, so that the last rows of a peer are not missed.
            over = not any(peer.alive for peer in self.watched)
            for peer in self.watched:
                peer.look()
            restarted = self._kill_and_restart(kill, restart, secret)
            over = over and not restarted
            if not restarted:
                self._check_progress()
            if self.show is not None:
                self.show([peer.seen for peer in self.watched])
            if not over:
                sleep(POLL_INTERVAL)
        self._raise_failure()
        for what, left in (("killed", kill), ("restarted", restart)):
            for node in left:
                raise PeerageError(
                    f"the run ended before node {node} was {what}; choose an earlier round"
                )

    def _raise_failure(self) -> None:
        """Raise the error of a peer that failed, if any did."""
        failed = [peer for peer in self.watched if peer.seen.state in ("failed", State.SKIPPED)]
        # A killed peer first: it may be the reason why others failed.
        for peer in sorted(failed, key=lambda peer: not isinstance(peer.failure, WorkerDied)):
            raise peer.failure

    def _check_progress(self) -> None:
        """Raise PeerageError if all peers that still run wait for others that have ended."""
        alive = [peer for peer in self.watched if peer.alive]
        pauses = [peer.pause for peer in alive]
        if not alive or None in pauses:
            return
        finished = sum(peer.seen.state == State.FINISHED for peer in self.watched)
        enough = least_contacts(self.quorum, len(self.watched))
        # Several peers that wait may find each other again, if they and the finished are enough.
        if len(alive) == 1 or len(alive) + finished < enough:
            for peer in self.watched:
                peer.look()  # one may have failed since the last time
            self._raise_failure()
            raise PeerageError(
                f"{alive[0].seen.name} is {pauses[0]} in round {alive[0].seen.round + 1}, and too "
                "many others have ended; kill fewer peers, restart them in an earlier round, or "
                "lower --quorum"
            )

    def _kill_and_restart(
        self, kill: dict[int, int], restart: dict[int, int], secret: Path
    ) -> bool:
        """Kill and restart the peers that are due; return whether any was restarted."""
        for node, round in list(kill.items()):
            if self.watched[node].seen.round >= round - 1 and self.watched[node].kill():
                self.watched[node].seen.state = "killed"
                del kill[node]
        # If all peers wait, they never reach the round in which others are due for a restart.
        alive = [peer for peer in self.watched if peer.alive]
        stuck = bool(alive) and all(peer.pause for peer in alive)
        reached = [n for n, round in restart.items() if stuck or self.newest >= round - 1]
        due = [node for node in reached if node not in kill]
        for node in due:
            self._start(self.watched[node], secret)
            del restart[node]
        return bool(due)


def free_ports(count: int) -> list[int]:
    """Ports of this machine that are free now, and that no outgoing connection will take."""
    found: list[int] = []
    with ExitStack() as stack:
        for port in random.SystemRandom().sample(PORTS, len(PORTS)):
            if len(found) == count:
                break
            candidate = stack.enter_context(socket.socket())
            with suppress(OSError):
                candidate.bind(("127.0.0.1", port))
                found.append(port)
    return found
