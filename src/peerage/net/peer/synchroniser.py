"""Keeps a peer in step with the others: it pauses, catches up, skips rounds or waits.

`progress` has the rules, as functions of what the peer knows. Here the peer asks the others, waits,
and tells its user.
"""

import asyncio
import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from peerage.engine.router import Packet
from peerage.engine.world import World
from peerage.errors import PeerageError
from peerage.net.peer.model_transfer import MOST_OFFERS, choose_model, download_model
from peerage.net.peer.peer_tracker import POLL_INTERVAL
from peerage.net.peer.progress import State, View
from peerage.net.peer.replay import NodeState
from peerage.net.wire.header import Rejected
from peerage.net.wire.transport import Unreachable

if TYPE_CHECKING:
    from peerage.net.peer.peer import Peer

QUESTION_INTERVAL = 9  # times what the last question about rounds took: a tenth of all time

log = logging.getLogger("peerage.peer")


class OutOfContact(PeerageError):
    """No other peer could be reached for the timeout `alone`."""


class Synchroniser:
    """Decides in which round one peer continues, and waits until it may."""

    def __init__(self, peer: "Peer") -> None:
        self.peer, self.tracker = peer, peer.tracker
        self._next_question = 0.0  # when the others may be asked for their rounds again

    @property
    def world(self) -> World:
        return self.peer.world

    async def catch_up(self, first: int) -> int:
        """Return the round to start with: that of the others if they are ahead."""
        if not self.tracker.awaited:
            # Perhaps one of them has answered so far. Messages that waited for this peer, which was
            # down, are of earlier rounds.
            await self.tracker.ask()
        view = self.tracker.view(first)
        newest = view.start_round()
        if newest == first:
            return first
        log.info("the others are in round %d, this peer was in %d", newest + 1, first + 1)
        if view.next_round() > first and self.peer.rejoin == "neighbour":
            await self.adopt_a_model(newest)
        return self.tracker.view(first).start_round()

    # A quorum

    async def pause(self, round: int) -> bool:
        """Wait while this peer may not run the round; return whether it had to wait.

        Also ends when a revision of the network file is there that applies to the round. Raises
        `OutOfContact` if no other peer can be reached for long: they may have finished and left.
        """
        self.tracker.check_experiment()
        view = self.tracker.view(round)
        peer, before = self.peer, self.peer.state
        if view.may_run():
            peer.out_of_contact = view.out_of_contact()
            return False
        peer.mailbox.begin_round(round)
        peer.round, peer.contacts = round, view.reachable
        names = self.tracker.names(view.needed_contacts())
        log.warning("%s: round %d waits for %s", _shortage(view), round + 1, names)
        now = asyncio.get_running_loop().time
        alone_since, limit = now(), peer.network.timeouts.alone
        while not peer.revisions.look(round) and not await self._can_continue(round):
            view = self.tracker.view(round)
            if view.reachable or view.finished:
                alone_since = now()
            elif now() >= alone_since + limit:
                raise OutOfContact(f"no other peer could be reached for {limit:g} s")
            # Even if they can be reached already: they have not answered yet.
            needed = view.needed_contacts() or sorted(view.others)
            self._show(State.WAITING + self.tracker.names(needed, addresses=False))
            await asyncio.sleep(POLL_INTERVAL)
            self.tracker.check_experiment()
        if not peer.revisions.is_due(round):
            log.info("enough peers are in contact again, continuing with round %d", round + 1)
        peer.out_of_contact = self.tracker.view(round).out_of_contact()
        self._show(None, before)
        return True

    async def _can_continue(self, round: int) -> bool:
        """Whether a peer that was without a quorum has one: enough peers answer."""
        view = self.tracker.view(round)
        if not view.may_run():
            return False
        running = view.others & view.reachable - view.finished
        # Distant members are in contact only after an answer or a question of theirs.
        distant = running.intersection(self.tracker.contacts.distant)
        answers = await self.tracker.ask(running - distant)
        return replace(view, reachable=distant.union(answers)).may_run()

    def _show(self, pause: str | None, state: str | None = None) -> None:
        """Tell users and other peers what this one waits for; None if it runs again."""
        state = pause if state is None else state
        if state is not None and state != self.peer.state:
            self.peer.state = state
            self.peer.recorder.show_pause(pause)

    # Rounds

    async def resynchronise(self, round: int) -> int:
        """Return the round to continue with after messages were missing.

        A peer that has fallen behind skips to the round of the others. A peer in front waits, and
        nobody follows it.
        """
        view, now = self.tracker.view(round), asyncio.get_running_loop().time
        if not view.is_in_step() and (begun := now()) >= self._next_question:
            # A question to all, as most peers hear only from neighbours. A member that states a
            # wrong round and does not answer must not cost this time in every round.
            view = await self._ask_for_rounds(round)
            self._next_question = now() + QUESTION_INTERVAL * (now() - begun)
        if view.next_round() == round and view.too_far_ahead():
            view = await self._let_others_catch_up(view)
        newest = view.next_round()
        if newest == round:
            return round
        log.warning("fell behind: skipping from round %d to %d", round + 1, newest + 1)
        if self.peer.rejoin == "neighbour":
            await self.adopt_a_model(newest)
        newest = max(newest, self.tracker.view(round).next_round())
        present = [r for r in range(round, newest) if self.world.is_present(self.peer.me, r)]
        self.peer.recorder.skipped += len(present)
        return newest

    async def _ask_for_rounds(self, round: int) -> View:
        view = self.tracker.view(round)
        running = view.others & view.reachable - view.finished
        if running:
            await self.tracker.ask(running)
        return self.tracker.view(round)

    async def _let_others_catch_up(self, view: View) -> View:
        """Wait until most of the others in contact are close; return what is known then."""
        before, names = self.peer.state, self.tracker.names(view.behind())
        log.warning("ahead of the others: round %d waits for %s", view.round + 1, names)
        self._show(State.AHEAD)
        while view.may_run() and view.next_round() == view.round and view.too_far_ahead():
            await asyncio.sleep(POLL_INTERVAL)
            view = await self._ask_for_rounds(view.round)
        log.info("no longer ahead of the others, continuing with round %d", view.round + 1)
        self._show(None, before)
        return view

    async def sit_out(self, round: int) -> None:
        """Wait until the peers that take part in the round have left it."""
        peer = self.peer
        peer.state = State.ABSENT
        peer.exchanges.begin_round()
        peer.mailbox.begin_round(round)
        peer.round = round
        last = round + 1 >= self.world.rounds
        while not last and not (view := self.tracker.view(round)).is_over():
            answers = await self.tracker.ask(view.others)
            unreachable = not answers and not self.tracker.reachable_peers() & view.others
            if unreachable and not await self.pause(round):
                return
            await asyncio.sleep(POLL_INTERVAL)

    # Models

    async def adopt_a_model(self, round: int) -> None:
        """Continue with the median of the models of neighbours, or with one of them.

        They must have the same architecture. Models that are personal, or those of a hub, stay.
        """
        peer = self.peer
        shared = self.world.hub is None and not self.world.algorithm.personal
        if not shared:
            return
        before = NodeState.of(peer.shard, peer.me)
        node = peer.shard.members[peer.me].node
        offers: dict[int, Packet] = {}
        for other in self.world.neighbours(round)[peer.me]:
            if other not in self.tracker.banned_peers and len(offers) < MOST_OFFERS:
                offer = await self._download(other)
                if offer is not None and offer.architecture == node.architecture:
                    offers[other] = offer
        model, sources = await peer.compute(choose_model, node.params, offers)
        if model is None:
            if offers:
                names = self.tracker.names(offers, addresses=False)
                log.warning("keeping the own model: that of %s is too far from it", names)
            return
        node.params, node.buffers = model
        peer.recovery.adopted(before, round)
        names = self.tracker.names(sources, addresses=False)
        if len(sources) > 1:
            log.info("continuing with the median of the models of %s", names)
        else:
            log.warning("continuing with the model of %s, which is trusted alone", names)

    async def _download(self, other: int) -> Packet | None:
        peer = self.peer
        try:
            return await download_model(
                peer.transport, other, peer.expected, peer.network.timeouts.message
            )
        except (Unreachable, Rejected) as error:
            log.info("cannot download the model of %s: %s", self.tracker.name(other), error)
            return None


def _shortage(view: View) -> str:
    """Why a peer may not run its round."""
    contacts = view.in_contact()
    if view.hub is not None and view.hub not in contacts:
        return "no contact with the hub"
    return (
        f"in contact with {len(contacts) + view.present} of {view.size} peers, {view.least} needed"
    )
