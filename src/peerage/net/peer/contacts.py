"""With which members a peer keeps connections, and how it stays in contact with the others.

A peer keeps connections to its *near* members: those that it exchanges messages with, and those
next to it by number, up to NEXT on each side. So the number of connections follows from the graph,
and networks of up to 2 NEXT + 1 members are fully connected.

A *distant* member counts as in contact after a sign of life: a question, an answer or a message. A
question opens a connection and closes it again, and shows both peers that the other one is there.
So each pair needs one question per interval. A peer asks few distant members at once.

A peer that loses a near member may itself be cut off. So from then on distant members count only
after a new sign of life, and meanwhile for a short time if most near members are still there.
"""

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager

from peerage.engine.world import World
from peerage.net.peer.network import Network
from peerage.net.wire.transport import Transport

NEXT = 4  # near members on each side by number, besides those that exchange messages
AT_ONCE = 4  # connections to distant members at once
# Multiples of the idle timeout:
INTERVAL = 12.0  # between two signs of life of a distant member
VALIDITY = 3 * INTERVAL  # of a sign of life
RECHECK = 4.0  # until distant members no longer count after a near one was lost


def near_members(me: int, world: World, network: Network) -> frozenset[int]:
    """The other members to which a peer keeps connections."""
    count = world.nodes
    others = frozenset(range(count)) - {me}
    # Tunnels of peers that dial out stay open, so nothing is gained by closing other connections.
    if world.graph.dynamic or network.dialling:
        return others
    beside = {(me + step) % count for step in range(-NEXT, NEXT + 1)}
    neighbours = {*world.graph.neighbours(0)[me], *world.graph.out_neighbours(0)[me]}
    may_meet = world.algorithm.may_meet
    partners = {peer for peer in others if may_meet(me, peer) or may_meet(peer, me)}
    return others & (beside | neighbours | partners)


class Contacts:
    """The members that one peer is in contact with."""

    def __init__(self, me: int, transport: Transport) -> None:
        self.me, self.transport = me, transport
        self.near: tuple[int, ...] = ()
        self.distant: tuple[int, ...] = ()  # in the order in which they are asked
        self._idle = 0.0
        self._seen: dict[int, float] = {}  # distant member -> time of its last sign of life
        self._asked: dict[int, float] = {}  # distant member -> time of the last question
        self._near_before: frozenset[int] = frozenset()  # near members in contact at the last look
        self._doubt = float("-inf")  # when a near member was last lost
        self._few = asyncio.Semaphore(AT_ONCE)

    def use(self, others: Collection[int], near: Collection[int], count: int, idle: float) -> None:
        """Use these members of `count`, at the beginning or after a revision."""

        def after_me(peer: int) -> int:
            return (peer - self.me) % count

        self.near = tuple(sorted(peer for peer in others if peer in near))
        # Each peer begins with those after it. So those before it have asked it by then.
        self.distant = tuple(sorted((p for p in others if p not in near), key=after_me))
        self._asks_first = frozenset(p for p in self.distant if 2 * after_me(p) <= count)
        self._idle = idle

    def note(self, peer: int) -> None:
        """Note a sign of life of a member; the transport notes those of near ones."""
        if peer in self.distant:
            self._seen[peer] = asyncio.get_running_loop().time()

    def look(self, finished: Collection[int]) -> frozenset[int]:
        """The members in contact now; near ones that have `finished` are not lost."""
        near = frozenset(filter(self.transport.reachable, self.near))
        if not self.distant:
            return near
        now = asyncio.get_running_loop().time()
        if self._near_before - near - set(finished):
            self._doubt = now
        self._near_before = near
        most = 2 * len(near.union(finished).intersection(self.near)) > len(self.near)
        trusting = most and now < self._doubt + RECHECK * self._idle
        oldest = now - VALIDITY * self._idle
        return near.union(
            peer
            for peer in self.distant
            if self._last(peer) > oldest and (trusting or self._last(peer) > self._doubt)
        )

    def due(self, excluded: Collection[int]) -> list[int]:
        """The distant members to ask now, at most AT_ONCE; those seen longest ago come first."""
        now, idle = asyncio.get_running_loop().time(), self._idle
        retry = now - idle

        def is_due(peer: int) -> bool:
            # One of two peers asks earlier, so that the other one need not ask.
            interval = idle * (INTERVAL if peer in self._asks_first else 1.5 * INTERVAL)
            old = self._last(peer) < now - interval or self._last(peer) < self._doubt
            return old and self._asked.get(peer, float("-inf")) < retry

        found = [peer for peer in self.distant if peer not in excluded and is_due(peer)]
        found.sort(key=lambda peer: max(self._last(peer), self._asked.get(peer, float("-inf"))))
        return found[:AT_ONCE]

    @asynccontextmanager
    async def connection(self, peer: int) -> AsyncIterator[None]:
        """Ask a member in this block; connections to distant ones are few, and closed after it."""
        if peer not in self.distant:
            yield
            return
        async with self._few:
            self._asked[peer] = asyncio.get_running_loop().time()
            try:
                yield
            finally:
                self.transport.release(peer)

    def _last(self, peer: int) -> float:
        return self._seen.get(peer, float("-inf"))
