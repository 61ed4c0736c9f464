"""The short name of an experiment, for tables and legends."""

from peerage import specs
from peerage.experiment.experiment import Experiment
from peerage.graphs.gains import GAINS, NoGain


def label(experiment: Experiment) -> str:
    """A short name for tables and legends: the class, and options other than the defaults."""
    algorithm = experiment.algorithm
    cls = type(algorithm)
    options = specs.text(algorithm, "algorithm", {"": cls}).removeprefix(":")
    shared = "shared start" if experiment.init.start == "shared" else ""
    pooled = "centralised" if experiment.pooled else ""
    gain, noise = gain_label(experiment), noise_label(experiment)
    parts = [options.replace(",", ", "), shared, gain, noise, pooled]
    extra = ", ".join(filter(None, parts))
    return f"{cls.__name__} ({extra})" if extra else cls.__name__


def noise_label(experiment: Experiment) -> str:
    noise = experiment.noise
    clip = "" if noise.clip is None else f"clip {noise.clip:g}"
    return ", ".join(filter(None, [f"noise {noise.sigma:g}" if noise.sigma else "", clip]))


def gain_label(experiment: Experiment) -> str:
    gain = experiment.init.gain
    if gain == NoGain():
        return ""
    known = type(gain) in GAINS.values()
    return f"gain {specs.text(gain, 'gain', GAINS) if known else type(gain).__name__}"
