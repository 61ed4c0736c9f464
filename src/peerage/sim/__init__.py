"""The simulator: many nodes on one machine, in lockstep."""
