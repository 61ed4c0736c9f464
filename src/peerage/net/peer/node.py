"""One peer as a process: its files, its log and its exit."""

import asyncio
import json
import logging
import os
import secrets
import signal
import sys
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from peerage import specs
from peerage.data import DATASETS, Dataset, DatasetSpec, cache_folder
from peerage.engine.prepare import prepare
from peerage.engine.world import World
from peerage.errors import InputError, Interrupted, PeerageError, check_choice
from peerage.files import disk_errors, write_json
from peerage.net.peer.metrics import serve_metrics
from peerage.net.peer.network import Network
from peerage.net.peer.peer import Peer
from peerage.net.peer.private_data import Classes, prepare_own
from peerage.net.peer.progress import State
from peerage.net.trust.identity import Identity
from peerage.net.wire.grpc import GrpcTransport
from peerage.net.wire.server import Limits
from peerage.records.rows import read_metrics
from peerage.runs.run import locked
from peerage.runs.summary import digest, missed_rounds, totals

log = logging.getLogger("peerage.peer")


@dataclass(frozen=True)
class PeerConfig:
    """The paths and options of one peer process."""

    network: Path  # the network file
    identity: str
    certificates: Path
    folder: Path  # checkpoints, metrics and summary
    bind: str | None = None  # host:port to listen on, if not its address in the network file
    metrics_port: int | None = None
    data: str | None = None  # a private data set, instead of a part of the experiment's
    test: str | None = None  # a data set whose test set replaces that of `data`
    classes: Classes | None = None  # of the whole network; `data` may lack some
    shift: bool = False  # whether `data` get the shift of this peer's cluster
    rejoin: str = "own"  # the model to continue with after missed rounds: own or neighbour

    def __post_init__(self) -> None:
        if self.metrics_port is not None and not 0 < self.metrics_port < 65536:
            raise InputError(f"--metrics-port must lie in 1 to 65535, got {self.metrics_port}")


def run_node(config: PeerConfig) -> dict[str, Any]:
    """Run one peer to its end; write its summary to the folder and return it."""
    network = Network.load(config.network)
    me = network.number(config.identity)
    identity = Identity.load(config.certificates, config.identity)
    # Other peers must not be able to compute the noise, so its seed is drawn here.
    world = prepare_for(network, me, config).restrict_to_node(me, secrets.randbits(62))
    torch.set_num_threads(1)  # so that sums are in the same order as in the simulator
    with ExitStack() as stack:
        with disk_errors(config.folder):
            config.folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(config.folder))
        # What is needed to build its model without its data.
        needed = ("classes", "example", "constants", "models_at")
        facts = {key: world.setup[key] for key in needed if key in world.setup}
        write_json(config.folder / "setup.json", facts)
        transport = GrpcTransport(
            identity,
            {member.name: number for number, member in enumerate(network.members)},
            {number: member.address for number, member in enumerate(network.members)},
            bind=config.bind,
            limits=Limits(idle_timeout=network.timeouts.idle),
        )
        executor = ThreadPoolExecutor(1)  # for the work of the node; nothing waits for its end
        stack.callback(executor.shutdown, wait=False, cancel_futures=True)
        peer = Peer(
            network, me, world, transport, config.folder, executor=executor, rejoin=config.rejoin
        )
        peer.recorder.watch = lambda row: _log_row(peer, row)
        with serve_metrics(peer, transport, config.metrics_port):
            asyncio.run(_run_until_signal(peer))
        node = peer.shard.members[me].node
        params = [node.params] if node.params.numel() else []
        rows = read_metrics(config.folder / "metrics.jsonl")  # over all restarts
        summary = {
            "node": me,
            "name": config.identity,
            "state": peer.state,
            **totals(rows),
            "rounds": peer.finished,
            "missed": missed_rounds(rows, peer.scheduled_rounds),
            "skipped": peer.recorder.skipped,
            "digest": digest(params, [node.layout] * len(params)),
            "released": peer.shard.released().get(me, 0),
        }
        write_json(config.folder / "summary.json", summary)
        if peer.state == State.SKIPPED:
            raise PeerageError(
                f"skipped {summary['skipped']} of {len(peer.scheduled_rounds)} rounds to catch up "
                f"with the others, and ran no round {summary['missed']}; check which peers are "
                "faulty, and start it again in a new folder"
            )
        return summary


def prepare_for(network: Network, me: int, config: PeerConfig) -> World:
    if config.data is None:
        for flag, value in (("--test", config.test), ("--classes", config.classes)):
            if value is not None:
                raise InputError(f"{flag} requires --data")
        if config.shift:
            raise InputError("--shift requires --data; examples of the experiment are shifted")
        return prepare(network.experiment)
    test = None if config.test is None else _load(config.test)
    data = _load(config.data)
    return prepare_own(network.experiment, me, data, config.classes, test, shift=config.shift)


def _load(text: str) -> Dataset:
    spec: DatasetSpec = specs.parse(text, "dataset", DATASETS)
    return spec.load(cache_folder())


async def _run_until_signal(peer: Peer) -> None:
    """Run the peer to its end, or until the process receives SIGTERM or SIGINT."""
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)
    try:
        await peer.run()
    except asyncio.CancelledError:
        raise Interrupted(
            f"stopped in round {peer.round + 1}; start it again to continue from its last round"
        ) from None


def _log_row(peer: Peer, row: dict[str, Any]) -> None:
    accuracy = f", accuracy {100 * row['accuracy']:.1f} %" if "accuracy" in row else ""
    log.info(
        "%sround %d of %d%s, received %d of %d messages",
        "step after " if row.get("final") else "",
        row["round"],
        peer.world.rounds,
        accuracy,
        *row["heard"],
        extra={"row": row},
    )


class JsonLines(logging.Formatter):
    """One JSON object per line."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname.lower(),
            "peer": self.name,
            "message": record.getMessage(),
            **({"row": record.row} if hasattr(record, "row") else {}),
        }
        return json.dumps(entry)


def set_up_log(kind: str, name: str) -> None:
    """Log to standard error, as text or JSON lines; asyncio and gRPC do the same."""
    check_choice("log", kind, ("human", "json"))
    handler = logging.StreamHandler(sys.stderr)
    human = logging.Formatter(f"%(asctime)s {name} %(message)s", "%H:%M:%S")
    handler.setFormatter(JsonLines(name) if kind == "json" else human)
    for source in ("peerage", "asyncio", "grpc"):
        logging.getLogger(source).handlers[:] = [handler]
    logging.getLogger("peerage").setLevel(logging.INFO)


@contextmanager
def ending(kind: str) -> Iterator[None]:
    """Report errors in the format of the log; exit at once if the peer was interrupted."""
    with warnings.catch_warnings():
        if kind == "json":
            warnings.showwarning = lambda message, *_, **__: log.warning("%s", message)
        try:
            yield
        except PeerageError as error:
            stopped = isinstance(error, Interrupted)
            if not stopped and kind != "json":
                raise
            text = " ".join(str(error).split())
            if kind == "json":
                log.error("%s", text)
            else:
                print(f"error: {text}", file=sys.stderr, flush=True)
            if stopped:  # without waiting for a thread that may still train for minutes
                os._exit(error.exit_code)
            sys.exit(error.exit_code)
