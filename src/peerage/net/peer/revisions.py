"""Revisions of the network file: members that join or leave a run, and more rounds.

A revision has a higher number than the file that it replaces, and the first round to which it
applies. The schedule of its experiment (`join`, `leave`) says from which round on a member takes
part or no longer does. Members keep their numbers; new ones come last.
"""

from typing import Any

from torch import Tensor

from peerage.engine.shard import Shard
from peerage.errors import InputError
from peerage.net.peer.network import Network, differing, unrevised
from peerage.state import pack


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
    if len(new.members) > len(before) and new.experiment.algorithm.with_hub:
        raise InputError(
            "a network with a hub cannot get new members: the hub is the last one, and its number "
            "would change; start a new run"
        )
    settings = (unrevised(network.shared_settings) for network in (old, new))
    if differences := differing(*settings):
        raise InputError(
            f"a revision may change members, rounds and topology only, but {differences[0]}"
        )


def check_state_fits(shard: Shard, me: int, fresh: Any) -> None:
    """Raise InputError if the state that a node carries over is for another number of nodes.

    `fresh` is the state with which the node would begin.
    """
    nodes = shard.world.nodes
    wanted, carried = _tensors(fresh), _tensors(shard.members[me].node.state)
    for name, tensor in wanted.items():
        other = carried.get(name, tensor)
        if tensor.shape != other.shape and nodes in tensor.shape:
            raise InputError(
                f"the state of the algorithm is for another number of nodes than {nodes} "
                f"({list(other.shape)} instead of {list(tensor.shape)}); start a new run"
            )


def _tensors(state: Any) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    pack(state, found, "state")
    return found
