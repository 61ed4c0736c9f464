"""What a peer writes to `setup.json` at its start: facts about its network, its data and itself."""

from dataclasses import asdict
from typing import Any

from peerage.engine.world import World
from peerage.experiment import Experiment
from peerage.experiment.identity import own_code
from peerage.net.peer.network import Network
from peerage.records.environment import code_record, environment
from peerage.runs.facts import RunFacts
from peerage.runs.saved import EXPERIMENT


def setup_facts(
    network: Network, me: int, world: World, *, private: bool, signed: bool
) -> dict[str, Any]:
    """What is needed for the models of a peer, and for a report about it, from its folder alone.

    With `private` data, only the numbers of examples are written, not how many are of which class.
    `signed` says whether the authority has signed the network file.
    """
    shared = ("edges", "topology", "parameters", "clusters", *(() if private else ("allocation",)))
    return {
        **model_facts(network.experiment, world),
        **{key: world.setup[key] for key in shared if key in world.setup},
        "name": network.members[me].name,
        "peers": [member.name for member in network.members],
        "wire": network.wire,
        "signed": signed,
        "examples": len(world.parts[me]),
        "test_examples": sum(map(len, world.tests_of(me).values())) if world.tested else 0,
        "facts": asdict(RunFacts.of(world)),
        "environment": environment() | code_record(own_code(network.experiment)),
    }


def model_facts(experiment: Experiment, world: World) -> dict[str, Any]:
    """What is needed to build the models of a peer from its folder alone."""
    needed = ("classes", "example", "constants", "models_at")
    facts = {key: world.setup[key] for key in needed if key in world.setup}
    # Not the experiment of the world, which is changed for private data.
    text = experiment.model_copy(update={"model": world.experiment.model}).to_toml()
    return {**facts, "nodes": world.nodes, "hub": world.hub, EXPERIMENT: text}
