"""Hostile messages of every layer against live peers; `make fuzz` sends a million."""

import os
from pathlib import Path

import pytest
from support.fuzzed import fuzz

BUDGET = int(os.environ.get("PEERAGE_FUZZ", "600"))


@pytest.mark.slow
def test_live_peers_survive_hostile_messages_and_use_none(tmp_path: Path) -> None:
    found = fuzz(tmp_path, BUDGET)
    assert found.problems() == []
    assert found.messages >= BUDGET
    layers = {name.partition(": ")[0] for name in found.outcomes}
    assert {"bytes", "TLS hello", "TLS records", "certificate", "HTTP/2"} <= layers
    assert {"call", "message", "chunks", "offset", "question", "tunnel"} <= layers
    assert len(found.refused["calls_refused"]) >= 8  # reasons
