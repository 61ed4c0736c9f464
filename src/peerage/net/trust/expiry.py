"""Warns before a certificate expires."""

import logging
from datetime import UTC, datetime, timedelta

from peerage.net.trust.identity import date

WARN_DAYS = (30, 7, 1)  # before a certificate expires
DAY = timedelta(days=1)

log = logging.getLogger("peerage.peer")


class ExpiryWarnings:
    """Logs a warning 30, 7 and 1 days before a certificate expires, and daily after that."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._stage: tuple[datetime, int] | None = None  # expiry and days of the last warning
        self._logged = datetime.min.replace(tzinfo=UTC)

    def check(self, expires: datetime, now: datetime) -> None:
        """Log a warning if one is due."""
        left = expires - now
        due = [days for days in WARN_DAYS if left <= days * DAY]
        if not due:
            self._stage = None
            return
        stage = -1 if left < timedelta() else due[-1]
        if self._stage == (expires, stage) and (stage >= 0 or now - self._logged < DAY):
            return
        self._stage, self._logged = (expires, stage), now
        what = f"the certificate of {self._name}"
        remedy = f"put a new {self._name}.pem in its folder; a restart is not necessary"
        if stage < 0:
            log.error("%s expired on %s; %s", what, date(expires), remedy)
        else:
            log.warning("%s expires on %s; %s", what, date(expires), remedy)
