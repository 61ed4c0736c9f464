"""Undoes rounds that failed because of messages, and finds the senders that caused it.

A message may pass every check and still make a round fail, or the training of the next one. The
peer then repeats what failed: without any message, and with the messages of one sender at a time
(decision 17). It bans a sender only if its messages alone make the repetition fail.
"""

import logging
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from peerage.engine.router import ShardOutput
from peerage.errors import Diverged, PeerageError
from peerage.net.peer.replay import NodeState, RoundLog, repeat
from peerage.requests import PRE_ROUND

if TYPE_CHECKING:
    from peerage.net.peer.peer import Peer

KEPT_STATES = 4  # states before earlier rounds, to which a peer can go back

NOBODY: frozenset[int] = frozenset()

log = logging.getLogger("peerage.peer")


class Recovery:
    """Keeps what is needed to undo the last rounds of one peer, and undoes them."""

    def __init__(self, peer: "Peer") -> None:
        self.peer = peer
        # The oldest first. Only the newest has its messages, until the next training succeeded.
        self._earlier: deque[RoundLog] = deque(maxlen=KEPT_STATES)
        self._current: RoundLog | None = None

    def begin(self, round: int, begin: Callable[[], ShardOutput]) -> None:
        """Note the state before a round; `begin` begins it on the present shard."""
        peer = self.peer
        before = NodeState.of(peer.shard, peer.me)
        self._current = RoundLog(round, peer.shard, before, begin, self.is_last(round))
        self._current.received = peer.exchanges.packets

    def is_last(self, round: int) -> bool:
        """Whether this peer trains nothing on the result of the round."""
        world = self.peer.world
        return self.peer.me == world.hub or round + 1 >= world.rounds

    def adopted(self, before: NodeState, round: int) -> None:
        """Note that a model of others has replaced the peer's own, which it had `before`."""
        self._earlier.clear()  # what came earlier does not lead to this model
        self._earlier.append(RoundLog(round, self.peer.shard, before, None, undone=False))

    def trained(self) -> None:
        """Note that training succeeded after the last round, whose messages are then harmless."""
        for earlier in self._earlier:
            earlier.received = []

    def succeeded(self) -> None:
        """Note that the current round was successful so far."""
        assert self._current is not None
        self.trained()
        self._earlier.append(self._current)
        self._current = None

    def cancel(self) -> None:
        """Go back to the state before the current round, without any judgement."""
        assert self._current is not None
        self._current.before.restore(self.peer.shard, self.peer.me)

    async def recover(self, error: Exception) -> bool:
        """Undo what made the current round fail; return whether the round can be run again.

        Raises the error if it would also have occurred without any message.
        """
        peer, current = self.peer, self._current
        assert current is not None
        rounds = [*self._earlier, current]
        first = await self._first_to_undo(rounds)
        if first is None and not isinstance(error, Diverged) and current.senders:
            first = len(rounds) - 1  # the algorithm fails without messages as well
            self._ban([])
        elif first is None:
            rounds = [await self._older_checkpoint(error), current]
            first = 0
        elif rounds[first].begin is None:
            log.warning("continuing with the own model, as training fails with the adopted one")
        else:
            self._ban(await self._find_guilty(rounds[first:], error))
        exchanged = bool(current.received) or peer.endings.sent(current.round).total() > 0
        again = first < len(rounds) - 1 and not exchanged
        for _ in range(first, len(self._earlier)):
            self._earlier.pop()
        await self._undo(rounds[first:], error, again)
        return again

    async def _repeat(self, rounds: list[RoundLog], senders: frozenset[int]) -> Exception | None:
        found: Exception | None = await self.peer.compute(repeat, rounds, self.peer.me, senders)
        return found

    async def _first_to_undo(self, rounds: list[RoundLog]) -> int | None:
        """The newest round from which all succeed without messages; None if there is none.

        Divergence without messages is that of the peer's own training.
        """
        newest = len(rounds) - 1 if rounds[-1].senders else len(rounds) - 2
        for first in range(newest, -1, -1):
            if await self._repeat(rounds[first:], NOBODY) is None:
                return first
        return None

    async def _older_checkpoint(self, error: Exception) -> RoundLog:
        """The state before the checkpoint that this process resumed from; raises the error if none.

        The messages that led to the newest checkpoint are gone, so no sender can be named.
        """
        peer, current = self.peer, self._current
        assert current is not None
        saved = None if self._earlier else peer.recorder.older_checkpoint()
        if saved is None:
            raise error
        arguments = (saved.trees, saved.parts, saved.round, saved.final)
        peer.shard.restore(str(saved.folder), *arguments)
        peer.recorder.restore_release_count()
        before = NodeState.of(peer.shard, peer.me)
        older = RoundLog(saved.round, peer.shard, before, None, undone=True)
        if await self._repeat([older, current], NOBODY) is not None:
            raise error
        log.warning("going back to %s, as training from the newest fails", saved.folder.name)
        return older

    async def _find_guilty(self, rounds: list[RoundLog], error: Exception) -> list[int]:
        """The senders whose messages alone make the rounds fail."""
        hub, me = self.peer.world.hub, self.peer.me
        senders = sorted(set().union(*(each.senders for each in rounds)))
        if hub not in (None, me):  # a client trusts its hub, without which it can do nothing
            if isinstance(error, Diverged):
                raise error
            return []
        errors = {s: await self._repeat(rounds, frozenset([s])) for s in senders}
        failed = [s for s, found in errors.items() if found is not None]
        if len(failed) == len(senders) > 1:
            # An algorithm may be unable to use a single message, which is no evidence.
            failed = [s for s in failed if isinstance(errors[s], Diverged)]
        # A hub does not train: it cannot tell whether most clients lie or their training diverges.
        return [] if hub == me and 2 * len(failed) > len(senders) else failed

    def _ban(self, guilty: list[int]) -> None:
        peer = self.peer
        for sender in guilty:
            peer.tracker.banned_peers.add(sender)
            reason = peer.assembler.blocked_peers[sender] = "its message alone made a round fail"
            log.error("ignoring %s from now on: %s", peer.tracker.name(sender), reason)
        if not guilty:
            log.warning("no message made it fail alone, so all are left out and nobody is banned")

    async def _undo(self, rounds: list[RoundLog], error: Exception, again: bool) -> None:
        """Go back to the state before the first of these rounds, of which the last has failed."""
        peer, current = self.peer, rounds[-1]
        rounds[0].before.restore(peer.shard, peer.me)
        finished = [each.round for each in rounds[:-1] if each.undone]
        undone = finished if again else [*finished, current.round]
        text = "round %d failed and was skipped: %s"
        if finished:
            text = f"undoing round {finished[0] + 1}, as {text}"
        if again:
            text = text.replace(" and was skipped", "")
        # Without the remedy, which is about the peer's own training.
        reason = str(error).partition("; ")[0] if isinstance(error, PeerageError) else repr(error)
        log.error(text, current.round + 1, reason)
        peer.counters["poisoned round"] += max(len(undone), 1)
        peer.recorder.skipped += sum(round != PRE_ROUND for round in undone)
        if peer.recorder.models is not None:
            peer.recorder.models.forget()
        if finished:
            await self._rewind(finished[0], current.round)

    async def _rewind(self, first: int, current: int) -> None:
        """Remove the records of finished rounds, and save the state as that before the current."""
        peer = self.peer
        peer.sent_bytes.difference += await peer.compute(peer.recorder.rewind, first)
        if first == PRE_ROUND:
            await peer.record_initial_model(0)
        if first > 0:
            peer.offer(first - 1)
        if current > 0:
            await peer.write(peer.recorder.save_checkpoint, current, False, False)
            await peer.compute(peer.recorder.remove_checkpoints, first, current)
