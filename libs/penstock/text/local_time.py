"""Local time: dates and times that people write without a zone are of this machine's zone (`TZ`), as are all
times that commands show."""

import os
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

ZONES = "/usr/share/zoneinfo"  # of the C library, unless TZDIR is set
_RULE = re.compile(r"(<[-+\w]+>|[A-Za-z]{3,})[-+]?\d.*")
"""A zone that is written out, as `EST5EDT`."""
_DAYS_BACK = 3  # a time of day may lack on one day, and lie ahead on another


class NotOneMoment(ValueError):
    """A local time that occurs twice or never, where clocks are set back or forward.
    The message has the remedy."""


def moment_ms(text: str) -> int:
    """Ms since 1970, ≥ 0, of a date, or a date and time, with or without a zone. Raises `NotOneMoment`;
    ValueError or OverflowError for other text."""
    found = datetime.fromisoformat(text)
    if found.tzinfo is not None:
        return _ms(found)
    occurs = _occurrences(found)
    if len(occurs) == 1:
        return _ms(occurs[0])
    if occurs:
        forms = " or ".join(one.isoformat() for one in occurs)
        raise NotOneMoment(f"this local time occurs twice, since clocks are set back then; write {forms}")
    near = sorted(found.replace(fold=fold).astimezone() for fold in (0, 1))
    forms = " or ".join(one.isoformat() for one in near)
    raise NotOneMoment(f"this local time never occurs, since clocks are set forward then; write {forms}")


def last_time_of_day_ms(hour: int, minute: int, second: int, now_ms: int) -> int:
    """Ms since 1970 of the last time up to now at which local clocks showed this time of day."""
    today = datetime.fromtimestamp(now_ms / 1_000, UTC).astimezone().replace(tzinfo=None)
    at = today.replace(hour=hour, minute=minute, second=second, microsecond=0)
    days = (at - timedelta(days=back) for back in range(_DAYS_BACK))
    return max(ms for day in days for one in _occurrences(day) if (ms := _ms(one)) <= now_ms)


def unknown_zone() -> str:
    """The zone in `TZ` if the C library does not know it, so that local times are UTC; else empty."""
    name = os.environ.get("TZ", "").removeprefix(":")
    if name in ("", "UTC", "GMT") or _RULE.fullmatch(name):
        return ""
    return "" if Path(os.environ.get("TZDIR") or ZONES, name).is_file() else name


def _occurrences(local: datetime) -> list[datetime]:
    """The moments at which local clocks show this: mostly one, in order."""
    both = {local.replace(fold=fold).astimezone() for fold in (0, 1)}
    return sorted(one for one in both if one.replace(tzinfo=None, fold=0) == local)


def _ms(at: datetime) -> int:
    return max(0, round(at.timestamp() * 1_000))
