"""Linear interpolation in a table of measured points."""

from bisect import bisect_left
from collections.abc import Sequence


def interpolate(points: Sequence[tuple[float, ...]], at: float) -> tuple[float, ...]:
    """The values after the first of each tuple at `at`, linear between neighbours,
    constant beyond the ends."""
    place = bisect_left(points, (at,))
    if place == 0:
        return points[0][1:]
    if place == len(points):
        return points[-1][1:]
    low, high = points[place - 1], points[place]
    share = (at - low[0]) / (high[0] - low[0])
    return tuple([a + (b - a) * share for a, b in zip(low[1:], high[1:], strict=True)])
