"""Lengths of time as messages show them: a user compares "waited 2 h 10 min" with a clock on the wall."""

import pytest

from penstock.text.spans import span


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (0, "0 s"),
        (800, "0.8 s"),
        (1_000, "1 s"),
        (9_949, "9.9 s"),
        (9_950, "10 s"),
        (59_499, "59 s"),
        (59_500, "1 min"),
        (61_000, "1 min 1 s"),
        (3_599_499, "59 min 59 s"),
        (3_599_500, "1 h"),
        (7_800_000, "2 h 10 min"),
        (86_400_000, "1 d"),
        (273_600_000, "3 d 4 h"),
        (90_000_000_000, "1,041 d 16 h"),
    ],
)
def test_a_length_of_time_has_its_two_largest_units(ms: float, text: str) -> None:
    """From a batch window to a training of years; no text says "60 s" or "60 min"."""
    assert span(ms) == text
