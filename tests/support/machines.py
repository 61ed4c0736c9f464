"""Peers as separate processes, on machines that fail: disks fill up, cables are cut."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Self

import pytest
from support.processes import TIMEOUT

from peerage import Experiment
from peerage.experiment.identity import own_code
from peerage.net.deploy.forked import Forked
from peerage.net.deploy.up import free_ports
from peerage.net.peer.network import MAJORITY, Member, Network, Timeouts
from peerage.net.trust.certs import Authority
from peerage.records.rows import Row, read_metrics

PEERAGE = Path(sys.executable).with_name("peerage")


class Machines:
    """One process per peer; leaving the context ends those that still run."""

    def __init__(
        self,
        home: Path,
        experiment: Experiment,
        timeouts: Timeouts,
        hosts: Sequence[str] | None = None,
        quorum: int | str = MAJORITY,
        dials_out: Collection[int] = (),
        pack: bool = False,
    ) -> None:
        self.home = home
        count = experiment.nodes_and_hub
        hosts = hosts or ["127.0.0.1"] * count
        addresses = zip(hosts, free_ports(count), strict=True)
        members = tuple(
            Member(f"node-{i}", "" if i in dials_out else f"{h}:{p}", dials_out=i in dials_out)
            for i, (h, p) in enumerate(addresses)
        )
        network = Network("test", experiment, members, timeouts, quorum=quorum, pack=pack)
        (home / "experiment.toml").write_text(experiment.to_toml())
        (home / "network.toml").write_text(network.to_toml("experiment.toml"))
        authority = Authority.create(home / "certs", "tests")
        for member in members:
            authority.issue(member.name)
        # The permission that an administrator gives.
        hashes = dict.fromkeys(own_code(experiment).values())
        self.permission = [word for sha256 in hashes for word in ("--allow-code", sha256)]
        self.folders = [home / member.name for member in members]
        self.processes: dict[int, subprocess.Popen[bytes] | Forked] = {}

    def start(self, me: int, within: Sequence[str] = (), more: Sequence[str] = ()) -> None:
        """`within` is a command that must replace itself by the command after it, the peer's."""
        argv = ["node", "--identity", f"node-{me}"]
        argv += ["--network", str(self.home / "network.toml")]
        argv += ["--certs", str(self.home / "certs"), "--out", str(self.folders[me])]
        argv += [*self.permission, *more]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with open(self.log_file(me), "ab") as log:
            if within:
                command = [*within, str(PEERAGE), *argv]
                self.processes[me] = subprocess.Popen(
                    command, stdout=log, stderr=log, env=environment
                )
            else:
                self.processes[me] = Forked(argv, log, environment)

    def log_file(self, me: int) -> Path:
        return self.home / f"node-{me}.log"

    def log(self, me: int) -> str:
        return self.log_file(me).read_text()

    def rows(self, me: int) -> list[Row]:
        file = self.folders[me] / "metrics.jsonl"
        return read_metrics(file) if file.exists() else []

    def round(self, me: int) -> int:
        return int(self.rows(me)[-1]["round"]) if self.rows(me) else 0

    def received(self, me: int) -> tuple[int, int]:
        """Messages received in the last round, and expected."""
        received, expected = self.rows(me)[-1]["heard"]
        return received, expected

    def until(self, what: Callable[[], bool], seconds: float = TIMEOUT) -> None:
        """Wait for a condition while all peers run."""
        end = time.monotonic() + seconds
        while not what():
            over = time.monotonic() > end or any(p.poll() for p in self.processes.values())
            assert not over, "\n".join(self.log(me)[-2000:] for me in self.processes)
            time.sleep(0.05)

    def wait(self, seconds: float = TIMEOUT) -> list[int]:
        """The exit codes of all peers."""
        end = time.monotonic() + seconds
        return [process.wait(end - time.monotonic()) for process in self.processes.values()]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            process.send_signal(signal.SIGTERM)
        for process in self.processes.values():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class Cable:
    """Machines of two rooms, each a network namespace, and a cable between the rooms.

    Each machine also has a link of its own, which can be cut or slow.
    """

    def __init__(self, rooms: Sequence[Sequence[int]], stack: ExitStack) -> None:
        self.stack = stack
        self.rooms = {me: room for room, members in enumerate(rooms) for me in members}
        self.switch = self._namespace(["unshare", "--user", "--map-root-user", "--net"])
        self.machines: dict[int, int] = {}
        for room, members in enumerate(rooms):
            self.ip(f"link add room{room} type bridge")
            self.ip(f"link set room{room} up")
            for me in members:
                self._plug_in(me, room)
        self.ip("link add end0 type veth peer name end1")
        for room in range(2):
            self.ip(f"link set end{room} master room{room} up")

    def _namespace(self, command: Sequence[str]) -> int:
        process = subprocess.Popen([*command, "sh", "-c", "echo && exec cat"], **PIPES)
        self.stack.callback(process.communicate)  # closes its input, upon which it ends
        assert process.stdout is not None
        process.stdout.readline()
        return process.pid

    def _plug_in(self, me: int, room: int) -> None:
        machine = self._namespace([*entering(self.switch), "unshare", "--net"])
        self.machines[me] = machine
        self.ip(f"link add to{me} type veth peer name eth0 netns {machine}")
        self.ip(f"link set to{me} master room{room} up")
        for line in ("link set lo up", f"addr add {host(me)}/24 dev eth0", "link set eth0 up"):
            _within(machine, f"ip {line}")

    def ip(self, line: str) -> None:
        _within(self.switch, f"ip {line}")

    def cut(self) -> None:
        self.ip("link set end0 down")

    def restore(self) -> None:
        self.ip("link set end0 up")

    def cut_off(self, me: int) -> None:
        """Lose all packets of a machine, without a sign that it could notice."""
        self.ip(f"link set to{me} nomaster")

    def reconnect(self, me: int) -> None:
        self.ip(f"link set to{me} master room{self.rooms[me]}")

    def limit(self, me: int, rate: str) -> None:
        """Limit both directions of a machine's link, to a rate such as 6kbit."""
        _within(self.switch, f"tc qdisc replace dev to{me} root {QUEUE} rate {rate}")
        _within(self.machines[me], f"tc qdisc replace dev eth0 root {QUEUE} rate {rate}")


# A queue of 32 kB, as in a modem: a little more than the messages of one round here.
QUEUE = "tbf burst 3200 limit 32000"


PIPES = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}


def entering(namespace: int) -> list[str]:
    return ["nsenter", "--user", "--net", "--preserve-credentials", f"--target={namespace}"]


def host(me: int) -> str:
    return f"10.77.0.{me + 1}"


def _within(namespace: int, command: str) -> None:
    subprocess.run([*entering(namespace), *command.split()], check=True)


def why_impossible(slow_links: bool = False) -> str | None:
    """Why this machine cannot have network namespaces, or slow links in them; None if it can."""
    tools = ("unshare", "nsenter", "ip", *(["tc"] if slow_links else []))
    if missing := [tool for tool in tools if shutil.which(tool) is None]:
        return f"not installed: {', '.join(missing)} (packages util-linux and iproute2)"
    trial = "ip link add end0 type veth peer name end1"
    if slow_links:
        trial += f" && tc qdisc add dev end0 root {QUEUE} rate 6kbit"
    tried = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--net", "sh", "-c", trial],
        capture_output=True,
        text=True,
    )
    if tried.returncode:
        what = "network namespaces with slow links" if slow_links else "network namespaces"
        return f"{what} are not possible here: {tried.stderr.strip()}"
    return None


@contextmanager
def two_rooms(*rooms: Sequence[int], slow_links: bool = False) -> Iterator[Cable]:
    if reason := why_impossible(slow_links):
        pytest.skip(reason)
    with ExitStack() as stack:
        yield Cable(rooms, stack)
