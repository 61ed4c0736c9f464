"""The log of one peer: to standard error or a file of bounded size, for people or programs."""

import json
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

from peerage.errors import Interrupted, PeerageError, check_choice
from peerage.files import disk_errors
from peerage.net.wire.header import escaped

FILE_BYTES, FILES = 10_000_000, 5  # size and number of log files, of which the first is current

log = logging.getLogger("peerage.peer")


class HumanLines(logging.Formatter):
    """Time, peer and message on one line; the lines of a traceback are indented."""

    def __init__(self, name: str) -> None:
        super().__init__(f"%(asctime)s {name} %(message)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = escaped(record.message)
        return super().formatMessage(record)

    def formatException(self, exc_info: Any) -> str:
        lines = super().formatException(exc_info).splitlines()
        return "\n".join(f"    {escaped(line)}" for line in lines)


class JsonLines(logging.Formatter):
    """One JSON object per line."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname.lower(),
            "peer": self.name,
            "message": escaped(record.getMessage()),
            **({"row": record.row} if hasattr(record, "row") else {}),
        }
        return json.dumps(entry)


class LogFile(RotatingFileHandler):
    """At most `FILES` files of `FILE_BYTES`; lines that a full disk cannot take are lost."""

    def __init__(self, path: Path) -> None:
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            super().__init__(path, maxBytes=FILE_BYTES, backupCount=FILES - 1, encoding="utf-8")

    def handleError(self, record: logging.LogRecord) -> None:
        """Continue: a peer must not end, nor fill standard error, for lack of space for its log."""


def set_up_log(kind: str, name: str, file: Path | None = None) -> None:
    """Log as text or JSON lines to a file, or to standard error; asyncio and gRPC do the same."""
    check_choice("log", kind, ("human", "json"))
    handler = logging.StreamHandler(sys.stderr) if file is None else LogFile(file)
    handler.setFormatter(JsonLines(name) if kind == "json" else HumanLines(name))
    for source in ("peerage", "asyncio", "grpc"):
        logging.getLogger(source).handlers[:] = [handler]
    logging.getLogger("peerage").setLevel(logging.INFO)


@contextmanager
def ending(kind: str, file: Path | None = None) -> Iterator[None]:
    """Report errors in the format of the log, and on standard error if the log is in a file.

    Exits at once if the peer was asked to stop.
    """
    with warnings.catch_warnings():
        if kind == "json" or file is not None:
            warnings.showwarning = lambda message, *_, **__: log.warning("%s", message)
        try:
            yield
        except Interrupted as stop:
            log.info("%s", stop)  # as asked: no error
            os._exit(stop.exit_code)  # without waiting for a thread that may train for minutes
        except PeerageError as error:
            text = escaped(" ".join(str(error).split()))
            if kind == "json" or file is not None:
                log.error("%s", text)
            if kind != "json" or file is not None:
                print(f"error: {text}", file=sys.stderr, flush=True)
            sys.exit(error.exit_code)
