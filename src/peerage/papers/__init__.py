"""Tables and figures of the papers, each a set of runs that one command repeats and shows."""
