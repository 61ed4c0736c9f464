"""The experiment: one frozen, checked value that says everything about a run.

`experiment` has the value, `readers` what turns text and tables into its parts, `until` what ends a
run early, `outside` algorithms in users' own files, `toml` the form in a file, `identity` what
decides the result, `catalogue` the members of every family, and `recipes/` the experiments that are
shipped.
"""

from peerage.experiment.experiment import Engine, Evaluation, Experiment, Init

__all__ = ["Engine", "Evaluation", "Experiment", "Init"]
