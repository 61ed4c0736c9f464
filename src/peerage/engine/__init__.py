"""Simulation: the world, shards of nodes, message routing, and the engines serial and pool."""
