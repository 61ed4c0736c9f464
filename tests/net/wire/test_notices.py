"""Log lines about other peers."""

import logging

import pytest

from peerage.net.wire import notices as module
from peerage.net.wire.notices import LOG_INTERVAL, MAX_REASONS, Notices


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(module, "monotonic", lambda: now[0])
    return now


def test_once_per_peer_and_reason(clock: list[float], caplog: pytest.LogCaptureFixture) -> None:
    notices = Notices(logging.getLogger("test"))
    for _ in range(3):
        for peer in ("node-0", "node-1"):
            for reason in ("expired", "revoked"):
                notices.warn(peer, reason, f"{peer} {reason}")
        clock[0] += 10 * LOG_INTERVAL
    assert caplog.messages == [
        "node-0 expired",
        "node-0 revoked",
        "node-1 expired",
        "node-1 revoked",
    ]


def test_again_after_it_was_settled_but_not_at_once(
    clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    notices = Notices(logging.getLogger("test"))
    for _ in range(100):  # it comes and goes once a second
        notices.warn("node-0", "away", "node-0 is away")
        notices.settle("node-0")
        clock[0] += 1.0
    assert len(caplog.messages) == 2


def test_a_peer_cannot_fill_the_log_with_reasons(
    clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    notices = Notices(logging.getLogger("test"))
    for number in range(1000):
        notices.warn("node-0", f"reason {number}", "a line")
        clock[0] += LOG_INTERVAL
    notices.warn("node-1", "reason", "another line")
    assert caplog.messages == ["a line"] * MAX_REASONS + ["another line"]
