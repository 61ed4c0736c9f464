"""Warnings before a certificate expires."""

import logging
from datetime import UTC, datetime, timedelta

import pytest

from peerage.net.trust.expiry import ExpiryWarnings

END = datetime(2030, 6, 30, 12, tzinfo=UTC)
DAY, HOUR = timedelta(days=1), timedelta(hours=1)


def said(warnings: ExpiryWarnings, caplog: pytest.LogCaptureFixture, *left: timedelta) -> list[int]:
    """How many lines are logged when so much time is left."""
    counts = []
    for time in left:
        caplog.clear()
        warnings.check(END, END - time)
        counts.append(len(caplog.records))
    return counts


def test_thirty_seven_and_one_day_before(caplog: pytest.LogCaptureFixture) -> None:
    warnings = ExpiryWarnings("node-0")
    assert said(warnings, caplog, 400 * DAY, 30 * DAY + HOUR) == [0, 0]
    assert said(warnings, caplog, 30 * DAY, 29 * DAY, 7 * DAY + HOUR) == [1, 0, 0]
    assert said(warnings, caplog, 7 * DAY, 6 * DAY, 1 * DAY + HOUR) == [1, 0, 0]
    assert said(warnings, caplog, 1 * DAY) == [1]
    assert caplog.messages == [
        "the certificate of node-0 expires on 2030-06-30 12:00 UTC; put a new node-0.pem in its "
        "folder; a restart is not necessary"
    ]
    assert said(warnings, caplog, 1 * HOUR) == [0]


def test_daily_when_it_has_expired(caplog: pytest.LogCaptureFixture) -> None:
    warnings = ExpiryWarnings("node-0")
    assert said(warnings, caplog, -HOUR) == [1]
    assert caplog.records[0].levelno == logging.ERROR
    assert said(warnings, caplog, -2 * HOUR, -1 * DAY, -1 * DAY - HOUR) == [0, 0, 1]


def test_a_new_certificate_is_warned_about_anew(caplog: pytest.LogCaptureFixture) -> None:
    warnings = ExpiryWarnings("node-0")
    assert said(warnings, caplog, 5 * DAY) == [1]
    warnings.check(END + 6 * DAY, END - 5 * DAY)  # also a short one
    assert len(caplog.records) == 2
    assert said(warnings, caplog, 400 * DAY, 20 * DAY) == [0, 1]
