"""The epsilon that an experiment will have spent after its planned rounds."""

import math

from peerage.experiment import Experiment
from peerage.privacy import epsilon, format_epsilon


def planned_messages(experiment: Experiment) -> int:
    """The most messages that one node releases in all rounds and the final step."""
    algorithm, nodes = experiment.algorithm, experiment.nodes
    in_rounds = sum(algorithm.max_messages(round, nodes) for round in range(experiment.rounds))
    return in_rounds + (algorithm.max_messages(None, nodes) if algorithm.has_final else 0)


def planned_epsilon(experiment: Experiment) -> float | None:
    """The epsilon of one node after all rounds, at most; None without a bound."""
    if not experiment.noise.private:
        return None
    value = epsilon(experiment.noise, planned_messages(experiment))
    return value if value is not None and math.isfinite(value) else None


def privacy_plan(experiment: Experiment) -> str | None:
    """A sentence about the planned epsilon; None without differential privacy."""
    noise = experiment.noise
    if not noise.private:
        return None
    messages = planned_messages(experiment)
    after, one = map(format_epsilon, (planned_epsilon(experiment), epsilon(noise, 1)))
    return (
        f"differential privacy: epsilon {after} at delta {noise.delta:g} after {experiment.rounds} "
        f"planned rounds, for the data of each node ({messages} messages at most; {one} after one)"
    )
