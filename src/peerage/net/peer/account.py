"""The privacy account of a peer's data: how many messages all runs on it have released.

The account of private data is a file beside it, so that it goes on over restarts and runs:

    mine.npz.privacy.json
    {"version": 1, "entries": [
        {"run": "spring", "peer": "node-0", "sigma": 0.5, "clip": 0.25, "messages": 20}]}

The account of a peer that trains on its part of the experiment's data set is in the peer's folder.
Every release is written before its message leaves. So a crash may count a message that was never
sent, but never misses one that was.
"""

import fcntl
import json
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from peerage import specs
from peerage.errors import CheckpointError, InputError, PeerageError
from peerage.files import disk_errors, write_json
from peerage.privacy import Noise, check_epsilon_limit, composed_epsilon, format_epsilon

ACCOUNT = "privacy.json"  # in the folder of a peer
VERSION = 1
REMEDY = "start the peer again"
LOCK_TIMEOUT = 60.0  # seconds; another process holds the lock for milliseconds


class EpsilonReached(PeerageError):
    """Another message would bring the account above its limit."""


@dataclass(frozen=True)
class Entry:
    """The messages that one peer has released in one run with one kind of noise."""

    run: str
    peer: str
    sigma: float
    clip: float | None
    messages: int

    def __post_init__(self) -> None:
        Noise(self.sigma, self.clip)  # checks both
        if self.messages < 0:
            raise InputError(f"messages must be at least 0, got {self.messages}")

    @property
    def key(self) -> "Entry":
        return replace(self, messages=0)


class PrivacyAccount:
    """The account of one peer's data; without a path, it is kept in memory only.

    `limit` is the largest total epsilon. Processes that share the data also share the account.
    """

    def __init__(
        self, path: Path | None, run: str, peer: str, noise: Noise, limit: float | None = None
    ) -> None:
        check_epsilon_limit(limit, noise)
        self.path, self.noise, self.limit = path, noise, limit
        self._own = Entry(run, peer, noise.sigma, noise.clip, messages=0)
        self._entries: dict[Entry, int] = {}  # key -> messages

    def open(self, known: int = 0) -> None:
        """Read the account and write it, so that a disk error shows before anything is released.

        `known` is a number of messages of this run that was stored elsewhere.
        """
        if self.noise.active:
            with self._locked():
                self._merge([replace(self._own, messages=known)])

    def record(self, messages: int) -> None:
        """Write the number of messages of this run; raise EpsilonReached if it is too many."""
        if not self.noise.active or messages <= self.messages:
            return
        with self._locked():
            self._check_limit(messages)
            self._merge([replace(self._own, messages=messages)])

    # What was spent

    @property
    def messages(self) -> int:
        """The number of messages that this peer has released in this run."""
        return self._entries.get(self._own, 0)

    @property
    def epsilon(self) -> float | None:
        """The epsilon of all runs on this data; None without a bound."""
        return self._epsilon(self._entries)

    @property
    def epsilon_run(self) -> float | None:
        """The epsilon of this run alone; None without a bound."""
        return self._epsilon({self._own: self.messages})

    def facts(self) -> dict[str, Any]:
        """The privacy entry of the peer's summary."""
        return {
            "sigma": self.noise.sigma,
            "clip": self.noise.clip,
            "delta": self.noise.delta,
            "messages": self.messages,
            "epsilon_run": self.epsilon_run,
            "epsilon": self.epsilon,
            "earlier_runs": self._earlier_runs,
        }

    def statements(self, planned: int) -> Iterator[str]:
        """Lines for the log before the first round, about what this data has spent already."""
        delta = f"at delta {self.noise.delta:g}"
        earlier = {key: count for key, count in self._entries.items() if key != self._own}
        runs = self._earlier_runs
        if runs:
            plural = "run" if runs == 1 else "runs"
            total = self._epsilon(earlier | {self._own: max(planned, self.messages)})
            yield (
                f"this data had already spent epsilon {format_epsilon(self._epsilon(earlier))} "
                f"{delta} in {runs} earlier {plural}, and will have spent "
                f"{format_epsilon(total)} after this one ({self.path})"
            )
        if self.messages:
            yield (
                f"this run has already released {self.messages} messages of this peer: epsilon "
                f"{format_epsilon(self.epsilon_run)} {delta}"
            )

    @property
    def _earlier_runs(self) -> int:
        others = (key for key, count in self._entries.items() if count and key != self._own)
        return len({(key.run, key.peer) for key in others})

    def _epsilon(self, entries: dict[Entry, int]) -> float | None:
        released = [(Noise(key.sigma, key.clip), count) for key, count in entries.items()]
        value = composed_epsilon(released, self.noise.delta)
        return None if value is None or math.isinf(value) else value

    def _check_limit(self, messages: int) -> None:
        if self.limit is None:
            return
        self._add(self._read())  # another process may share the data
        after = self._epsilon(self._entries | {self._own: messages})
        if after is None or after > self.limit:
            raise EpsilonReached(
                f"epsilon {format_epsilon(self.epsilon)} at delta {self.noise.delta:g}, and the "
                f"next message would exceed --stop-at-epsilon {self.limit:g}"
            )

    # The file

    def _merge(self, entries: Iterable[Entry]) -> None:
        """Add entries to those of the file, and write all of them; counts never fall."""
        self._add(self._read())
        self._add(entries)
        if self.path is not None:
            table = [asdict(replace(key, messages=n)) for key, n in self._entries.items()]
            write_json(self.path, {"version": VERSION, "entries": table}, REMEDY)

    def _add(self, entries: Iterable[Entry]) -> None:
        found = dict(self._entries)
        for entry in entries:
            found[entry.key] = max(found.get(entry.key, 0), entry.messages)
        self._entries = found  # another thread may be reading the old one

    def _read(self) -> list[Entry]:
        return [] if self.path is None else read_account(self.path)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Lock the account against other processes that use the same data."""
        if self.path is None:
            yield
            return
        lock = self.path.with_name(f".{self.path.name}.lock")
        with disk_errors(lock, REMEDY):
            file = open(lock, "w")  # noqa: SIM115 - closed below; its errors are not disk errors
        with file:
            deadline = monotonic() + LOCK_TIMEOUT
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if monotonic() > deadline:
                        raise CheckpointError(
                            f"another process has locked {self.path} for {LOCK_TIMEOUT:g} s; "
                            "end that process, and start the peer again"
                        ) from None
                    sleep(0.01)
            yield


def account_beside(data: Any) -> Path | None:
    """The account of a data set from a file or folder of the user; None for any other data set."""
    path = getattr(data, "path", None)
    if path is None:
        return None
    found = Path(path).expanduser().resolve()
    return found.with_name(f"{found.name}.{ACCOUNT}")


def read_account(path: Path) -> list[Entry]:
    """The entries of an account; none if there is no file."""
    try:
        table = json.loads(path.read_bytes())
        if table["version"] != VERSION:
            raise ValueError(f"version {table['version']}, expected {VERSION}")
        return [specs.construct(Entry, entry, "entry") for entry in table["entries"]]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise InputError(
            f"cannot read the privacy account {path}: {error.strerror}; check its permissions"
        ) from None
    except (
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        RecursionError,
        InputError,
    ) as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise InputError(
            f"the privacy account {path} is damaged ({reason}), so the epsilon that this data has "
            "spent is unknown; restore the file, or delete it if you give up the earlier account"
        ) from None


def check_bypass(path: Path | None, noise: Noise) -> None:
    """Raise an InputError if data with an account would be used without differential privacy."""
    if path is None or noise.private or not any(entry.messages for entry in read_account(path)):
        return
    raise InputError(
        f"this data has a privacy account, {path}, and this run has no differential privacy, so no "
        "epsilon would hold after it; set --noise and --clip, or delete the account to give it up"
    )


def released_messages(folder: Path) -> int:
    """The number of noisy messages that a peer has released, from its folder, even if it failed."""
    return sum(entry.messages for entry in read_account(folder / ACCOUNT))
