"""One peer as a process: its files, its limits and its end."""

import asyncio
import logging
import resource
import signal
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from peerage import specs
from peerage.data import DATASETS, Dataset, DatasetSpec, cache_folder
from peerage.data.classes import Classes
from peerage.engine.prepare import load_dataset, prepare
from peerage.engine.world import World
from peerage.errors import DataError, InputError, Interrupted, PeerageError
from peerage.experiment.identity import own_code
from peerage.experiment.permission import allow, allowed, check_hash
from peerage.files import disk_errors, write_json
from peerage.net.peer.account import ACCOUNT, PrivacyAccount, account_beside, check_bypass
from peerage.net.peer.hub_data import (
    ExampleFacts,
    NotReady,
    ask_clients,
    check_flags,
    prepare_without_data,
    recorded_facts,
)
from peerage.net.peer.network import Network
from peerage.net.peer.peer import Peer
from peerage.net.peer.private_data import (
    as_test_set,
    describe_examples,
    prepare_own,
    unused_examples,
    unused_training,
)
from peerage.net.peer.progress import State
from peerage.net.peer.revisions import NetworkFile
from peerage.net.peer.secret_noise import SecretNoise
from peerage.net.peer.setup_file import setup_facts
from peerage.net.trust.identity import Identity
from peerage.net.trust.signature import check_signature
from peerage.net.wire.grpc import GrpcTransport
from peerage.net.wire.limits import Limits
from peerage.net.wire.transport import Transport
from peerage.privacy import format_epsilon
from peerage.records.rows import read_metrics
from peerage.runs.kept_models import Keep
from peerage.runs.run import locked
from peerage.runs.summary import digest, missed_rounds, spans, totals

log = logging.getLogger("peerage.peer")
Result = TypeVar("Result")


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
    test: str | None = None  # a data set to test on, instead of the test set of `data`
    classes: Classes | None = None  # of the whole network; `data` may lack some
    shift: bool = False  # whether `data` get the shift of this peer's cluster
    rejoin: str | None = None  # the model to continue with after missed rounds: own or neighbour
    stop_at_epsilon: float | None = None  # the largest epsilon of the data, over all runs
    keep: Keep = Keep()
    allow_code: Sequence[str] = ()  # SHA-256 of files outside the package that may run

    def __post_init__(self) -> None:
        if self.metrics_port is not None and not 0 < self.metrics_port < 65536:
            raise InputError(f"--metrics-port must lie in 1 to 65535, got {self.metrics_port}")


def run_node(config: PeerConfig) -> dict[str, Any]:
    """Run one peer to its end; write its summary to the folder and return it."""
    raise_open_files_limit()
    signed = check_signature(config.network, config.certificates)
    network = _load_network(config)
    me = network.number(config.identity)
    identity = Identity.load(config.certificates, config.identity)
    if config.allow_code:
        allow(config.folder, map(check_hash, config.allow_code))
    idle = network.timeouts.idle
    transport = partial(
        GrpcTransport,
        identity,
        {member.name: number for number, member in enumerate(network.members)},
        network.addresses,
        bind=config.bind,
        # A small message, or a handshake, may take as long on a slow link as a sign of life.
        limits=Limits(idle_timeout=idle, grace=max(idle, Limits.grace)),
        dialling=network.dialling,
    )
    world, notes = _prepare(network, me, config, transport)
    account = account_of(network, me, world, config)
    torch.set_num_threads(1)  # so that sums are in the same order as in the simulator
    with ExitStack() as stack:
        with disk_errors(config.folder):
            config.folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(config.folder))
        account.open()  # if it cannot be read or written, the peer must not begin
        _write_setup(network, me, world, config)
        executor = ThreadPoolExecutor(1)  # for the work of the node; nothing waits for its end
        stack.callback(executor.shutdown, wait=False, cancel_futures=True)
        connected = transport()
        peer = Peer(
            network,
            me,
            world,
            connected,
            config.folder,
            executor=executor,
            rejoin=config.rejoin,
            notes=(describe_examples(world, me), *notes),
            account=account,
            keep=config.keep,
            revisions=NetworkFile(
                config.network,
                config.certificates,
                partial(_load_network, config),
                partial(_prepare_revision, me, config, transport),
            ),
        )
        peer.recorder.watch = lambda row: _log_row(peer, row)
        if not signed:
            remedy = "sign it with `peerage certs sign-network`"
            peer.warnings.append(f"{config.network} is not signed by the authority; {remedy}")
        with _metrics(peer, connected, config.metrics_port):
            asyncio.run(_run_until_signal(peer.run(), lambda: f"in round {peer.round + 1}"))
        rows = read_metrics(config.folder / "metrics.jsonl")  # over all restarts
        if peer.state == State.ALONE:
            last = max(row["round"] for row in rows) if rows else 0
            unrun = spans(round for round in peer.scheduled_rounds if round > last)
            raise PeerageError(
                f"no other peer could be reached for {peer.network.timeouts.alone:g} s; they may "
                f"have finished and left, so this peer did not run rounds {unrun}; start it again "
                "to continue, or raise alone in the network file to wait longer"
            )
        node = peer.shard.members[me].node
        params = [node.params] if node.params.numel() else []
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
            **({"privacy": account.facts()} if account.noise.private else {}),
        }
        write_json(config.folder / "summary.json", summary)
        if peer.state == State.SKIPPED:
            raise PeerageError(
                f"skipped {summary['skipped']} of {len(peer.scheduled_rounds)} rounds to catch up "
                "with the others or because of messages that made them fail, and has no round "
                f"{summary['missed']}; check which peers are faulty, and start it again in a new "
                "folder"
            )
        return summary


def _metrics(peer: Peer, transport: Transport, port: int | None) -> AbstractContextManager[None]:
    """Serve metrics if a port is given; without one, the packages for it are not loaded."""
    if port is None:
        return nullcontext()
    from peerage.net.peer.metrics import serve_metrics

    return serve_metrics(peer, transport, port)


def _prepare(
    network: Network, me: int, config: PeerConfig, transport: Callable[[], Transport]
) -> tuple[World, list[str]]:
    """As `prepare_for`, with the data of this peer only, and with secret noise."""
    world, notes = prepare_for(network, me, config, transport)
    # Other peers must not be able to compute the noise, so its key is taken here.
    return world.restrict_to_node(me, SecretNoise()), notes


def _prepare_revision(
    me: int, config: PeerConfig, transport: Callable[[], Transport], network: Network
) -> World:
    """The world of a running peer in a higher revision of the network file."""
    world, _ = _prepare(network, me, config, transport)
    _write_setup(network, me, world, config)
    log.info("%s", describe_examples(world, me))
    return world


def _write_setup(network: Network, me: int, world: World, config: PeerConfig) -> None:
    signed = check_signature(config.network, config.certificates)
    facts = setup_facts(network, me, world, private=config.data is not None, signed=signed)
    write_json(config.folder / "setup.json", facts)


def _load_network(config: PeerConfig) -> Network:
    """The network, with own code only if it was allowed now or at an earlier start."""
    given = set(map(check_hash, config.allow_code))
    network = Network.load(config.network, given | allowed(config.folder))
    for sha256 in given.difference(own_code(network.experiment).values()):
        raise InputError(
            f"--allow-code {sha256}: no file of this network has this SHA-256; remove it"
        )
    return network


def raise_open_files_limit() -> None:
    """Raise the soft limit of open files to the hard one; every connection is an open file."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # some systems do not allow an infinite soft limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def prepare_for(
    network: Network, me: int, config: PeerConfig, transport: Callable[[], Transport]
) -> tuple[World, list[str]]:
    """The world of a peer, and lines for its log about examples that it does not use."""
    if me == network.experiment.hub:
        return prepare_hub(network, me, config, transport)
    if config.data is None:
        for flag, value in (("--test", config.test), ("--classes", config.classes)):
            if value is not None:
                raise InputError(f"{flag} requires --data")
        if config.shift:
            raise InputError("--shift requires --data; examples of the experiment are shifted")
        return prepare(network.experiment), []
    test = None if config.test is None else _load(config.test)
    data = _load(config.data)
    world = prepare_own(network.experiment, me, data, config.classes, test, shift=config.shift)
    return world, unused_examples(data, test)


def prepare_hub(
    network: Network, me: int, config: PeerConfig, transport: Callable[[], Transport]
) -> tuple[World, list[str]]:
    """As `prepare_for`, for a hub, which may have a test set and needs no data."""
    experiment = network.experiment
    given = check_flags(config.data, config.test)
    if given is not None:
        data = _load(given)
        world = prepare_own(experiment, me, as_test_set(data), config.classes, shift=config.shift)
        return world, unused_training(data)
    for flag, is_set in (("--classes", config.classes is not None), ("--shift", config.shift)):
        if is_set:
            raise InputError(f"{flag} at the hub requires --test")
    try:
        return prepare(experiment, load_dataset(experiment)), []
    except DataError as error:
        missing = f"the hub does not have the data set of the experiment: {error}"
    facts = ExampleFacts.of_schema(experiment.data_schema) or recorded_facts(config.folder)
    notes = [missing]
    if facts is None:
        log.info("%s", notes.pop())
        asked = ask_with(network, me, transport)
        facts = asyncio.run(_run_until_signal(asked, lambda: "before it knew its model"))
    return prepare_without_data(experiment, me, facts), [*notes, f"the model is for {facts}"]


async def ask_with(network: Network, me: int, transport: Callable[[], Transport]) -> ExampleFacts:
    """Ask the clients over connections of their own, which are closed before the hub listens.

    Clients that dial out must be able to open a tunnel, so then the hub listens, for them alone.
    """
    asking = transport()
    try:
        if network.dialling:
            await asking.start(NotReady())
        return await ask_clients(network, me, asking)
    finally:
        await asking.stop()


def account_of(network: Network, me: int, world: World, config: PeerConfig) -> PrivacyAccount:
    """The privacy account of this peer: beside its private data, or in its folder."""
    noise, path = world.noise_of(me), config.folder / ACCOUNT
    beside = None if config.data is None or me == world.hub else account_beside(_spec(config.data))
    check_bypass(beside, noise)
    if beside is not None and noise.private:
        path = beside
    return PrivacyAccount(path, network.run, config.identity, noise, config.stop_at_epsilon)


def _spec(text: str) -> DatasetSpec:
    spec: DatasetSpec = specs.parse(text, "dataset", DATASETS)
    return spec


def _load(text: str) -> Dataset:
    return _spec(text).load(cache_folder())


async def _run_until_signal(work: Coroutine[Any, Any, Result], place: Callable[[], str]) -> Result:
    """Run work to its end, or until the process receives SIGTERM or SIGINT in some `place`."""
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)
    try:
        return await work
    except asyncio.CancelledError:
        raise Interrupted(
            f"stopped {place()}; start it again to continue from its last round"
        ) from None


def _log_row(peer: Peer, row: dict[str, Any]) -> None:
    accuracy = f", accuracy {100 * row['accuracy']:.1f} %" if "accuracy" in row else ""
    delta = f"at delta {peer.world.noise.delta:g}"
    missing = f", none from {peer.tracker.names(peer.exchanges.missing, addresses=False)}"
    spent = f", epsilon {format_epsilon(row['epsilon'])} {delta}" if "epsilon" in row else ""
    log.info(
        "%sround %d of %d%s, received %d of %d messages%s%s",
        "step after " if row.get("final") else "",
        row["round"],
        peer.world.rounds,
        accuracy,
        *row["heard"],
        missing if peer.exchanges.missing else "",
        spent,
        extra={"row": row},
    )
