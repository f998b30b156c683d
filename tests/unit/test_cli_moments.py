"""Moments of the past as people write them after `--at`."""

import time
from datetime import UTC, datetime

import pytest

from penstock.cli.moments import moment
from penstock.exits import Exit, Stop

NOW = datetime(2026, 11, 22, 11, 0, tzinfo=UTC)


def ms(at: datetime) -> int:
    return round(at.timestamp() * 1_000)


def test_a_moment_in_each_form() -> None:
    """A time of day is of this zone and lies behind, a plain number is a record."""
    now_ms = ms(NOW)
    here = NOW.astimezone()
    assert moment("812", now_ms) == {"at": 812}
    assert moment("5m", now_ms) == {"at_ms": now_ms - 300_000}
    assert moment("9999999999d", now_ms) == {"at_ms": 0}
    assert moment(f"{here:%H:%M}", now_ms) == {"at_ms": now_ms}
    assert moment(f"{here:%H:%M}:01", now_ms) == {"at_ms": now_ms + 1_000 - 86_400_000}
    assert moment(f"{here:%Y-%m-%dT%H:%M}", now_ms) == {"at_ms": now_ms}
    assert moment("2026-05-04T10:42+02:00", now_ms) == {"at_ms": ms(datetime(2026, 5, 4, 8, 42, tzinfo=UTC))}


@pytest.mark.parametrize("text", ["", "25:00", "yesterday", "-5m", "2026-13-01"])
def test_what_is_no_moment_is_refused_with_the_forms(text: str) -> None:
    with pytest.raises(Stop, match="give a time such as 10:42") as stop:
        moment(text, ms(NOW))
    assert stop.value.code == Exit.BAD_SPEC


@pytest.mark.parametrize("text", ["2026-11-22T11:00:01Z", "2030-01-01"])
def test_what_lies_ahead_is_refused(text: str) -> None:
    """The answer would be that of now, under a date that has not come."""
    with pytest.raises(Stop, match="lies ahead; leave it out") as stop:
        moment(text, ms(NOW))
    assert stop.value.code == Exit.BAD_SPEC


@pytest.mark.parametrize(
    ("zone", "text", "expected"),
    [
        ("Asia/Kolkata", "16:29", datetime(2026, 11, 22, 10, 59, tzinfo=UTC)),
        ("Asia/Kolkata", "16:31", datetime(2026, 11, 21, 11, 1, tzinfo=UTC)),
        ("Pacific/Auckland", "23:59", datetime(2026, 11, 22, 10, 59, tzinfo=UTC)),
        ("Pacific/Auckland", "0:01", datetime(2026, 11, 21, 11, 1, tzinfo=UTC)),
        ("Pacific/Auckland", "2026-11-23", datetime(2026, 11, 22, 11, 0, tzinfo=UTC)),
    ],
)
def test_a_time_of_day_is_of_this_zone_also_across_midnight(
    monkeypatch: pytest.MonkeyPatch, zone: str, text: str, expected: datetime
) -> None:
    """A user in New Zealand asks at midnight, when it is the day before in UTC."""
    with monkeypatch.context() as patch:
        patch.setenv("TZ", zone)
        time.tzset()
        assert moment(text, ms(NOW)) == {"at_ms": ms(expected)}
    time.tzset()
