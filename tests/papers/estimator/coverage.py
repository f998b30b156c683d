"""Coverage of prediction intervals: the share that held what came."""

from collections.abc import Sequence

from penstock_services.estimator.core.eta.remaining import Bounds


def covered(predicted: Sequence[Bounds], actual: Sequence[float]) -> float:
    """Share of the intervals that held what came: the calibration that is reported. Raises for no or unequal
    ones."""
    if not predicted or len(predicted) != len(actual):
        raise ValueError(
            f"{len(predicted)} intervals for {len(actual)} values: must be as many, at least one"
        )
    held = sum(bounds.low <= value <= bounds.high for bounds, value in zip(predicted, actual, strict=True))
    return held / len(predicted)
