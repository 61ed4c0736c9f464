"""The exceptions of the package, and their exit codes on the command line.

PeerageError            1   something failed while running
├── InputError          2   an invalid value that the user can change
│   ├── DataError       2   a data set that is missing, altered or of the wrong shape
│   └── CheckpointError 2   a run folder or checkpoint that cannot be used
├── Diverged            2   a loss or a parameter is no longer a finite number
├── DiskError           2   a file could not be written
├── TooManyOpenFiles    1   a file could not be opened now; it may work later
├── WorkerDied          1   a worker process ended too early
├── Unreachable         1   a message could not be delivered to a peer (in net)
├── Rejected            1   a peer does not accept a message (in net)
└── Interrupted       130   the user pressed Ctrl-C

A PeerageWarning informs the user, and does not stop the run.
"""

import shlex
from collections.abc import Iterable, Sequence
from difflib import get_close_matches


class PeerageError(Exception):
    """An error with a one-line text for the user: the value and the remedy.

    >>> import peerage as pg
    >>> try:
    ...     pg.Experiment(nodes=0)
    ... except pg.PeerageError as error:
    ...     print(error)
    nodes must be at least 1, got 0
    """

    exit_code = 1


class InputError(PeerageError):
    exit_code = 2


class DataError(InputError):
    pass


class CheckpointError(InputError):
    pass


class Diverged(PeerageError):
    exit_code = 2


class DiskError(PeerageError):
    exit_code = 2


class TooManyOpenFiles(PeerageError):
    pass


class WorkerDied(PeerageError):
    pass


class Interrupted(PeerageError):
    exit_code = 130


class PeerageWarning(UserWarning):
    """A warning about something that is allowed but may surprise the user."""


def shell_command(*words: object) -> str:
    """A command of a hint, quoted so that it can be pasted into a shell as it is.

    >>> shell_command("resume", "runs/a b;c")
    "peerage resume 'runs/a b;c'"
    """
    return shlex.join(["peerage", *map(str, words)])


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of an 'unknown name' message: the nearest known name, then all of them."""
    names = sorted(known)
    hint = f"{_nearest(name, names)} ".lstrip()
    return f"{hint}known: {', '.join(names)}" if names else "it takes no options"


def check_choice(name: str, value: object, choices: Iterable[object]) -> None:
    """Raise an InputError if the value of an option is not one of its choices."""
    known = tuple(choices)
    if value not in known:
        raise InputError(f"{name} {wrong_choice(value, known)}")


def wrong_choice(value: object, choices: Iterable[object]) -> str:
    """The end of a message about an option: all choices, the value, and the nearest choice.

    >>> wrong_choice("unifrom", ["data", "uniform"])
    "must be one of data, uniform; got 'unifrom', did you mean 'uniform'?"
    """
    names = [str(choice) for choice in choices]
    nearest = _nearest(str(value), names)
    return f"must be one of {', '.join(names)}; got {value!r}" + (f", {nearest}" if nearest else "")


def _nearest(name: str, known: Sequence[str]) -> str:
    nearest = get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {nearest[0]!r}?" if nearest else ""


def check_at_least(name: str, value: int | None, least: int, unit: str = "") -> None:
    """Raise an InputError if an option is too small; None is an option that is not set."""
    if value is not None and value < least:
        raise InputError(f"{name} must be at least {least}{unit}, got {value}")
