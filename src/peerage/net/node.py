"""One peer as a process: its files, its log, its end."""

import asyncio
import json
import logging
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from peerage import specs
from peerage.data import DATASETS, cache_folder
from peerage.errors import InputError, Interrupted
from peerage.net.grpc import GrpcTransport, Limits
from peerage.net.identity import Identity
from peerage.net.metrics import serve_metrics, troubles
from peerage.net.network import Network
from peerage.net.own import prepare_own
from peerage.net.peer import Peer
from peerage.prepare import Prepared, prepare
from peerage.records import write_json
from peerage.running import digest, locked

log = logging.getLogger("peerage.peer")


@dataclass(frozen=True)
class Place:
    """Where one peer lives on this machine."""

    network: Path  # the network file
    identity: str
    certificates: Path
    folder: Path  # checkpoints, metrics and summary
    bind: str | None = None  # host:port to listen on, if not its address in the network file
    metrics_port: int | None = None
    data: str | None = None  # a data set of its own, in place of a part of the experiment's
    classes: int | None = None  # in the whole network, of which the own data may lack some
    rejoin: str = "own"  # with which model it goes on after it missed rounds


def run_node(place: Place) -> dict[str, Any]:
    """Play one peer to its end; its summary, which is also in the folder."""
    network = Network.load(place.network)
    me = network.number(place.identity)
    identity = Identity.load(place.certificates, place.identity)
    prepared = prepare_for(network, me, place)
    place.folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # so that the order of sums is that of the simulator
    with locked(place.folder):
        transport = GrpcTransport(
            identity,
            {member.name: number for number, member in enumerate(network.members)},
            {number: member.address for number, member in enumerate(network.members)},
            bind=place.bind,
            limits=Limits(patience=network.patience.gone),
        )
        with ThreadPoolExecutor(1) as executor:
            peer = Peer(
                network,
                me,
                prepared,
                transport,
                place.folder,
                executor=executor,
                rejoin=place.rejoin,
            )
            peer.watch = lambda row: _tell(peer, row)
            with serve_metrics(peer, transport, place.metrics_port):
                asyncio.run(_play(peer))
        node = peer.shard.members[me].node
        kept = [node.params] if node.params.numel() else []
        summary = {
            "node": me,
            "name": place.identity,
            "state": peer.state,
            "rounds": peer.finished,
            "bytes_sent": peer.bytes_total,
            "wire_bytes": transport.counters["bytes_sent"],
            "digest": digest(kept, [node.layout] * len(kept)),
            "released": peer.shard.released().get(me, 0),
            "counters": troubles(peer, transport),
        }
        write_json(place.folder / "summary.json", summary)
        return summary


def prepare_for(network: Network, me: int, place: Place) -> Prepared:
    if place.data is None:
        if place.classes is not None:
            raise InputError("--classes is about data of one's own; give --data as well")
        return prepare(network.experiment)
    spec = specs.parse(place.data, "dataset", DATASETS)
    return prepare_own(network.experiment, me, spec.load(cache_folder()), place.classes)


async def _play(peer: Peer) -> None:
    """To the end, or until somebody asks the process to stop."""
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)
    try:
        await peer.run()
    except asyncio.CancelledError:
        raise Interrupted(
            f"stopped in round {peer.round + 1}; start it again to go on from its last round"
        ) from None


def _tell(peer: Peer, row: dict[str, Any]) -> None:
    accuracy = f", accuracy {100 * row['accuracy']:.1f} %" if "accuracy" in row else ""
    heard, of = row["heard"]
    log.info(
        "round %d of %d%s, heard %d of %d",
        row["round"],
        peer.world.rounds,
        accuracy,
        heard,
        of,
        extra={"row": row},
    )


class JsonLines(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            **({"row": record.row} if hasattr(record, "row") else {}),
        }
        return json.dumps(entry)


def set_up_log(kind: str, name: str) -> None:
    """Human lines or JSON on standard error."""
    if kind not in ("human", "json"):
        raise InputError(f"log must be human or json, got {kind!r}")
    handler = logging.StreamHandler(sys.stderr)
    human = logging.Formatter(f"%(asctime)s {name} %(message)s", "%H:%M:%S")
    handler.setFormatter(JsonLines() if kind == "json" else human)
    root = logging.getLogger("peerage")
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
