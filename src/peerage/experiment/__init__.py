"""The experiment: one frozen, checked value that says everything about a run.

`experiment` has the value, `readers` what turns text and tables into its parts, `toml` its form in
a file, `catalogue` the members of every family, and `recipes/` the experiments that are shipped.
"""

from peerage.experiment.experiment import Engine, Evaluation, Experiment, Init

__all__ = ["Engine", "Evaluation", "Experiment", "Init"]
