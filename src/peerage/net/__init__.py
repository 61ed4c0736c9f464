"""The network engine: one process per node, and every message is validated."""
