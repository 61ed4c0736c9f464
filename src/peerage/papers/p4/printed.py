"""The numbers as printed in P4 and the fits in its authors' notebook."""

# Fig. 3: the plateau of the loss without the gain lasts n^mu rounds, by configuration of Table A1.
PLATEAUS = {"A": 1.0, "B": 0.64, "C": 1.0, "D": 0.4}

REPETITIONS = {"A": 32, "B": 128, "C": 16, "D": 16}

# Fig. 8: ||v|| falls as n^-a on graphs of mean degree 64 with 256 to 8192 nodes.
EXPONENTS = {
    "regular": 0.493,
    "Erdos-Renyi": 0.492,
    "Barabasi-Albert": 0.434,
    "heavy tail 2.5": 0.303,
    "heavy tail 3": 0.403,
    "heavy tail 3.5": 0.454,
    "heavy tail 4": 0.476,
    "heavy tail 5": 0.489,
}

# Fig. 7: the relative errors of the number of nodes in (a), and of the exponent 1/2 in (b).
ERRORS = (-0.2, -0.1, -0.05, 0.0, 0.05, 0.1, 0.2)
# Fig. 4: the probability that a connection, or a node, is active in a round.
ACTIVITIES = (0.1, 0.04, 0.02, 0.01)
