"""Redraws of a line that has not ended, such as a progress bar, by carriage returns."""

from typing import AnyStr


def redrawn(shown: AnyStr, now: AnyStr) -> AnyStr:
    """What to print so that a line of which `shown` is printed reads `now`: the rest,
    or all after a carriage return."""
    if now.startswith(shown):
        return now[len(shown) :]
    return (b"\r" if isinstance(now, bytes) else "\r") + now
