"""One peer of a real network."""
