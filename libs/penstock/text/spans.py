"""Lengths of time in messages, in the two largest units."""

MINUTE_S, HOUR_S, DAY_S = 60, 3_600, 86_400


def span(ms: float) -> str:
    """`0.4 s`, `12 s`, `5 min 10 s`, `2 h 10 min`, `3 d 4 h`; a second unit of 0 is left out. `ms` ≥ 0."""
    if ms < 9_950:
        return f"{ms / 1_000:.1f}".removesuffix(".0") + " s"
    seconds = round(ms / 1_000)
    if seconds < MINUTE_S:
        return f"{seconds} s"
    if seconds < HOUR_S:
        return _two(seconds, (MINUTE_S, "min"), (1, "s"))
    if seconds < DAY_S:
        return _two(seconds, (HOUR_S, "h"), (MINUTE_S, "min"))
    return _two(seconds, (DAY_S, "d"), (HOUR_S, "h"))


def _two(seconds: int, large: tuple[int, str], small: tuple[int, str]) -> str:
    number, rest = divmod(seconds, large[0])
    first = f"{number:,} {large[1]}"
    return f"{first} {rest // small[0]} {small[1]}" if rest >= small[0] else first
