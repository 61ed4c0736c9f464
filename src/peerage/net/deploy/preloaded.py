"""Prepares the process that forks peers, which loads this module as its last one."""

import gc
import os

FORKS = "PEERAGE_FORKS"  # environment variable that only this process has

if FORKS in os.environ:
    os.setsid()  # signals of the terminal must not end it: it reports how its children ended
    gc.collect()
    gc.freeze()  # the collector of a child would otherwise write to every shared page
