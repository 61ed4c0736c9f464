"""The experiment: one frozen, checked value that describes a run completely.

`experiment` has the value, `readers` parse its parts, `until` has stop conditions, `outside` loads
algorithms from users' files, `toml` converts to and from TOML, `identity` selects the settings that
determine the result, `catalogue` lists all families, and `recipes/` has experiment files.
"""

from peerage.experiment.experiment import Engine, Evaluation, Experiment, Init

__all__ = ["Engine", "Evaluation", "Experiment", "Init"]
