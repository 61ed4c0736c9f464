"""A lock for torch's process-wide settings, so that only one run uses them at a time.

Torch has one global generator and one number of threads per process. Dropout and the constructors
of modules draw from that generator, and the order of floating-point sums depends on the number of
threads. So runs in several threads of one process could change each other's results. Each run holds
a lock while it uses these settings, and restores both.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock

import torch

_lock = RLock()


@contextmanager
def exclusive_torch() -> Iterator[None]:
    """Lock torch's global generator and compute with one thread; restore both at the end.

    >>> before = torch.get_rng_state()
    >>> with exclusive_torch():
    ...     _ = torch.manual_seed(0), torch.rand(3)
    >>> torch.equal(torch.get_rng_state(), before)
    True
    """
    with _lock:
        threads, generator = torch.get_num_threads(), torch.get_rng_state()
        if threads != 1:
            torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_rng_state(generator)
            if threads != 1:
                torch.set_num_threads(threads)


def _renew_lock() -> None:
    """Replace the lock in a forked process; a thread of the parent may hold the old one."""
    global _lock
    _lock = RLock()


os.register_at_fork(after_in_child=_renew_lock)
