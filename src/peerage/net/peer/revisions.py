"""Revisions of the network file: members that join or leave a run, and more rounds.

A revision has a higher number than the file that it replaces, and the first round to which it
applies. The schedule of its experiment (`join`, `leave`) says from which round on a member takes
part or no longer does. Members keep their numbers; new ones come last.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from peerage.engine.shard import InProcessStore, Shard
from peerage.engine.world import World
from peerage.errors import InputError, PeerageError
from peerage.net.peer.network import Network, differing, unrevised
from peerage.net.peer.traffic import message_policy
from peerage.net.trust.signature import check_signature
from peerage.state import pack

if TYPE_CHECKING:
    from peerage.net.peer.peer import Peer

COPY_TIME = 5.0  # seconds in which new files may be incomplete

log = logging.getLogger("peerage.peer")


class RevisionSource(Protocol):
    """Where a running peer finds revisions of its network file."""

    def look(self, present: Network) -> Network | None:
        """A valid revision above the present one, if there is one that was not returned before."""

    def prepare(self, network: Network) -> World:
        """The world of this peer in the revision."""


class NetworkFile:
    """The network file of a peer, which is read again when it, its experiment or signature change.

    A file that cannot replace the present one is ignored. It may be half copied, and then it
    changes again: so the reason is logged only if it still holds after `COPY_TIME`.
    """

    def __init__(
        self,
        path: Path,
        certificates: Path,
        load: Callable[[], Network],
        prepare: Callable[[Network], World],
    ) -> None:
        self.path, self.certificates, self.load, self.prepare = path, certificates, load, prepare
        self._stamps = self._read_stamps()
        self._problem = ""  # of the present files
        self._log_at: float | None = None  # when to log it; None if that is done

    def look(self, present: Network) -> Network | None:
        stamps = self._read_stamps()
        if stamps == self._stamps:
            self._log_problem()
            return None
        self._stamps, self._log_at = stamps, None
        try:
            check_signature(self.path, self.certificates)
            new = self.load()
            if (new.run, new.revision) == (present.run, present.revision):
                return None
            check_successor(present, new)
        except InputError as error:
            self._problem, self._log_at = str(error), monotonic() + COPY_TIME
            return None
        return new

    def _log_problem(self) -> None:
        if self._log_at is not None and monotonic() >= self._log_at:
            self._log_at = None
            log.error("ignoring the new network file: %s", self._problem)

    def _read_stamps(self) -> list[tuple[str, int, int]]:
        """Name, time and size of the files that may belong to the network."""
        found = []
        try:
            for file in self.path.parent.iterdir():
                if file.suffix in (".toml", ".sig"):
                    status = file.stat()
                    found.append((file.name, status.st_mtime_ns, status.st_size))
        except OSError as error:  # replaced at this moment, or too many open files
            log.debug("cannot look for a new network file: %s", error)
            return self._stamps
        return sorted(found)


class Revisions:
    """Takes up revisions of the network file while a peer runs."""

    def __init__(self, peer: "Peer", source: RevisionSource | None) -> None:
        self.peer, self.source = peer, source
        self.next: Network | None = None  # known, but not taken up yet

    def look(self, round: int) -> bool:
        """Look for a new revision; return whether one applies to this round already."""
        known = self.next or self.peer.network
        new = None if self.source is None else self.source.look(known)
        if new is not None:
            self.next = new
            self._admit(new)
            log.info(
                "revision %d of the network file applies from round %d on",
                *(new.revision, new.from_round),
            )
        return self.is_due(round)

    def is_due(self, round: int) -> bool:
        """Whether a revision that is known applies to this round."""
        return self.next is not None and round + 1 >= (self.next.from_round or 1)

    def _admit(self, new: Network) -> None:
        """Accept calls and messages of new members at once: some peers are in a later round."""
        peer = self.peer
        names = {member.name: number for number, member in enumerate(new.members)}
        peer.transport.add_members(names, new.addresses)
        peer.tracker.members = new.members
        first = (new.from_round or 1) - 1
        peer.assembler.expect(message_policy(new, peer.me, peer.world), first)

    async def take_up(self, round: int) -> None:
        """Use a revision that applies to this round, the next one of the peer.

        After the step that follows the last round it is too late: the peer has to be restarted.
        """
        peer = self.peer
        if peer.recorder.final or not self.look(round):
            return
        new, self.next = self.next, None
        assert new is not None
        assert self.source is not None
        try:
            world = await peer.compute(self.source.prepare, new)
            shard = await peer.compute(self._next_shard, world, round)
        except PeerageError as error:
            log.error("cannot use revision %d of the network file: %s", new.revision, error)
            return
        peer.renew(new, world, shard)
        log.info("round %d is the first with revision %d", round + 1, new.revision)

    def _next_shard(self, world: World, round: int) -> Shard:
        me = self.peer.me
        shard = Shard(world, [me], InProcessStore())
        fresh = shard.members[me].node.state
        shard.take_over(self.peer.shard, round)
        extend_state(shard, me, fresh)
        return shard


def check_successor(old: Network, new: Network) -> None:
    """Raise InputError if a network file cannot replace another one during a run."""
    if new.run != old.run:
        raise InputError(f"run {new.run!r} is not {old.run!r}, the run of this network")
    if new.revision <= old.revision:
        raise InputError(
            f"revision {new.revision} is not above {old.revision}, the present one; raise it"
        )
    before = [member.name for member in old.members]
    if [member.name for member in new.members[: len(before)]] != before:
        raise InputError(
            "members of the earlier revision are missing or in another order; their numbers must "
            "stay, so let a member leave by the schedule and append new ones"
        )
    settings = (unrevised(network.shared_settings) for network in (old, new))
    if differences := differing(*settings):
        raise InputError(
            f"a revision may change members, rounds and topology only, but {differences[0]}"
        )
    if new.experiment.hub != old.experiment.hub:
        raise InputError(
            f"the hub would be {new.members[new.experiment.hub or 0].name} instead of "
            f"{old.members[old.experiment.hub or 0].name}, whose number must stay; set the "
            f"experiment's topology to star:number={old.experiment.hub}"
        )


def extend_state(shard: Shard, me: int, fresh: Any) -> None:
    """Extend the state that a node carries over to the present number of nodes.

    `fresh` is the state with which the node would begin. Raises InputError if the algorithm does
    not extend a state with entries for all nodes.
    """
    nodes, node = shard.world.nodes, shard.members[me].node
    node.state = shard.world.algorithm.extend_state(node.state, fresh)
    wanted, carried = _tensors(fresh), _tensors(node.state)
    for name, tensor in wanted.items():
        other = carried.get(name, tensor)
        pairs = zip(tensor.shape, other.shape, strict=False)
        grown = [pair for pair in pairs if pair[0] != pair[1]]
        if grown and all(now == nodes > before for now, before in grown):
            raise InputError(
                f"the state of the algorithm is for another number of nodes than {nodes} "
                f"({list(other.shape)} instead of {list(tensor.shape)}); start a new run, or let "
                "its extend_state add entries"
            )


def _tensors(state: Any) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    pack(state, found, "state")
    return found
