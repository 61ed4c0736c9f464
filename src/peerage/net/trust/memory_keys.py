"""Secret keys of a temporary authority, in memory: if its process is killed, no key is left."""

import fcntl
import os
from pathlib import Path

from peerage.net.trust.keyfiles import SECRET

LOWEST = 500  # number of a descriptor that a new process does not use for another file


class MemoryKeys:
    """Keys as files that exist only in memory, by the path at which a process finds its own.

    The path is a link to a file descriptor, which the process must have inherited.
    """

    def __init__(self) -> None:
        self._descriptors: dict[Path, int] = {}

    def keep(self, path: Path, content: bytes) -> None:
        made = os.memfd_create(path.name)
        descriptor = fcntl.fcntl(made, fcntl.F_DUPFD_CLOEXEC, LOWEST)
        os.close(made)
        self._descriptors[path] = descriptor
        os.fchmod(descriptor, SECRET)
        os.write(descriptor, content)
        path.symlink_to(f"/proc/self/fd/{descriptor}")

    def descriptor(self, path: Path) -> int:
        """The descriptor that a process must inherit to read the key at this path."""
        return self._descriptors[path]

    def close(self) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()
