"""The records of a run: rows of metrics, checkpoints and the environment."""
