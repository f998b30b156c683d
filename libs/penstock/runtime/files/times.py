"""Parser of times in files: dates with and without a zone, Unix epochs, clock times; seconds in doubles."""

import re
from datetime import UTC, datetime
from typing import NamedTuple

NUMBER = re.compile(r"[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]{1,3})?")
CLOCK = re.compile(r"(?:([0-9]{1,6})(?:-| days? ))?([0-9]{1,6}):([0-5][0-9]):([0-5][0-9](?:\.[0-9]{1,9})?)")
UTC_AT_THE_END = re.compile(r" ?(?:UTC|GMT)$")
DAY_S, HOUR_S, MINUTE_S = 86_400, 3_600, 60
EPOCH_S = 1e8
"""From this value on a number is an epoch: as seconds from a trace's start it would be three years, as a date
it is March 1973."""
EPOCH_UNITS = (1.0, 1e3, 1e6, 1e9)
"""Units per second: s, ms, µs, ns. In each unit dates up to the year 5138 lie below the first date of the
next one."""
MAX_EPOCH_S = 1e11


class Moment(NamedTuple):
    """A time. `dated`: `at_s` counts from 1970; else from the start of the file's period."""

    at_s: float
    dated: bool


def moment_of(text: str, per: float = 1.0) -> Moment | None:
    """A date and time (UTC where it names no zone), an epoch, seconds or a clock time; None: none of these.

    `per`: units of a plain number in a second. An epoch is recognised by its size, in s, ms, µs or ns.
    """
    if NUMBER.fullmatch(text):
        value = float(text) / per
        if value < EPOCH_S:
            return Moment(value, False)
        fitting = (value / unit for unit in EPOCH_UNITS if value / unit < MAX_EPOCH_S)
        at_s = next(fitting, None)
        return None if at_s is None else Moment(at_s, True)
    clock_s = clock_of(text)
    if clock_s is not None:
        return Moment(clock_s, False)
    try:
        found = datetime.fromisoformat(UTC_AT_THE_END.sub("", text).replace("/", "-"))
    except ValueError:
        return None
    return Moment((found if found.tzinfo is not None else found.replace(tzinfo=UTC)).timestamp(), True)


def clock_of(text: str) -> float | None:
    """Seconds of `02:03:04`, `1-02:03:04` or `1 day 02:03:04`; None: not of this form."""
    match = CLOCK.fullmatch(text)
    if match is None:
        return None
    days, hours, minutes, seconds = match.groups(default="0")
    return int(days) * DAY_S + int(hours) * HOUR_S + int(minutes) * MINUTE_S + float(seconds)
