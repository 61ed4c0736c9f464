"""What a run leaves behind: rows of metrics, checkpoints, and where it ran."""
