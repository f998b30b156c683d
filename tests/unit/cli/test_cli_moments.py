"""Moments of the past as people write them after `--at`."""

import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime

import pytest

from penstock.cli.moments import moment, since
from penstock.exits import Exit, Stop
from penstock.text.local_time import unknown_zone

NOW = datetime(2026, 11, 22, 11, 0, tzinfo=UTC)


def ms(at: datetime) -> int:
    return round(at.timestamp() * 1_000)


@pytest.fixture
def zone(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Sets this machine's zone."""

    def set_zone(name: str) -> None:
        monkeypatch.setenv("TZ", name)
        time.tzset()

    yield set_zone
    monkeypatch.undo()
    time.tzset()


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
    ("name", "text", "expected"),
    [
        ("Asia/Kolkata", "16:29", datetime(2026, 11, 22, 10, 59, tzinfo=UTC)),
        ("Asia/Kolkata", "16:31", datetime(2026, 11, 21, 11, 1, tzinfo=UTC)),
        ("Pacific/Auckland", "23:59", datetime(2026, 11, 22, 10, 59, tzinfo=UTC)),
        ("Pacific/Auckland", "0:01", datetime(2026, 11, 21, 11, 1, tzinfo=UTC)),
        ("Pacific/Auckland", "2026-11-23", datetime(2026, 11, 22, 11, 0, tzinfo=UTC)),
        ("Asia/Kolkata", "2026-11-22T16:25", datetime(2026, 11, 22, 10, 55, tzinfo=UTC)),
        ("America/New_York", "2026-11-22T05:55", datetime(2026, 11, 22, 10, 55, tzinfo=UTC)),
    ],
)
def test_times_are_of_this_zone_also_across_midnight(
    zone: Callable[[str], None], name: str, text: str, expected: datetime
) -> None:
    """A laptop in India and one in New Zealand, a cluster in UTC: `logs --since` and `why --at` mean the time
    that `events` shows."""
    zone(name)
    assert moment(text, ms(NOW)) == {"at_ms": ms(expected)}
    assert since(text, ms(NOW)) == {"since_ms": ms(expected)}


def test_since_a_duration_counts_by_each_nodes_clock() -> None:
    """A node's clock is three minutes off: five minutes ago are five minutes ago there."""
    assert since("1h30m", ms(NOW)) == {"since": "1h30m"}
    assert since(None, ms(NOW)) == {}
    for text, reason in (
        ("812", "give a time"),
        ("2026-11-22T11:01Z", "lies ahead"),
        ("25:00", "--since '25:00': give"),
    ):
        with pytest.raises(Stop, match=reason):
            since(text, ms(NOW))


def test_an_hour_that_occurs_twice_or_never_is_named(zone: Callable[[str], None]) -> None:
    """New York's clocks are set back in November and forward in March: an answer for one of two hours would
    be a guess."""
    zone("America/New_York")
    for ask in (moment, since):
        with pytest.raises(
            Stop, match=r"occurs twice.*2026-11-01T01:30:00-04:00 or 2026-11-01T01:30:00-05:00"
        ):
            ask("2026-11-01T01:30", ms(NOW))
        with pytest.raises(
            Stop, match=r"never occurs.*2026-03-08T01:30:00-05:00 or 2026-03-08T03:30:00-04:00"
        ):
            ask("2026-03-08T02:30", ms(NOW))
    assert since("2026-11-01T01:30-05:00", ms(NOW)) == {
        "since_ms": ms(datetime(2026, 11, 1, 6, 30, tzinfo=UTC))
    }
    twice = datetime(2026, 11, 1, 6, 10, tzinfo=UTC)
    assert moment("1:30", ms(twice)) == {"at_ms": ms(datetime(2026, 11, 1, 5, 30, tzinfo=UTC))}, (
        "the last one"
    )
    never = datetime(2026, 3, 8, 12, 0, tzinfo=UTC)
    assert moment("2:30", ms(never)) == {"at_ms": ms(datetime(2026, 3, 7, 7, 30, tzinfo=UTC))}, (
        "of the day before"
    )


def test_a_zone_that_this_machine_does_not_know_is_named(zone: Callable[[str], None]) -> None:
    """A typing error in TZ, and an image without zones: the C library then takes UTC, silently."""
    for name in ("", "UTC", "Asia/Kolkata", ":Asia/Kolkata", "EST5EDT,M3.2.0,M11.1.0", "<+0530>-5:30"):
        zone(name)
        assert unknown_zone() == "", name
    zone("Nonsense/Zone")
    assert unknown_zone() == "Nonsense/Zone"
