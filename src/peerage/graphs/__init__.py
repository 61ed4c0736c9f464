"""Graphs between nodes: topologies, mixing weights, diffusion, faults and gains."""
