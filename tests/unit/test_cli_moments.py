"""Moments of the past as people write them after `--at`."""

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
