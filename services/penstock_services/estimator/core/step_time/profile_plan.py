"""Profiling plan (greedy experimental design): which few placements to measure next.

Ideal: the set of measurements after which the later estimates have the smallest error. Departure: one after
the other, each the best given those before it (greedy): its gain is near that of the best set, since a
measurement gains less the more others there are. Departure: the two ends of the batch on the fewest GPUs go
first. They cost least, and until they are known the expected gain depends on a guess of how computing grows
with the batch.
"""

from collections.abc import Sequence
from math import sqrt
from typing import NamedTuple

import numpy as np

from penstock_services.estimator.core.learning.gaussian_process import Floats
from penstock_services.estimator.core.records.placements import Cell, ring
from penstock_services.estimator.core.step_time.model import StepModel
from penstock_services.estimator.core.step_time.prior import covariance, noise_variance

MAX_CANDIDATES = 3_000  # the covariance over them takes 8 · candidates² bytes
MAX_PLANNED = 64  # runs that somebody has to make: with 15 half of the errors are below 4.8 %


class Probe(NamedTuple):
    """One cell to measure. `spread_before`, `spread_after`:
    root of the mean variance of ln t, weighted by use."""

    cell: Cell
    spread_before: float
    spread_after: float


def profile_plan(
    model: StepModel, candidates: Sequence[Cell], use: Sequence[float], most: int, enough: float = 0.0
) -> list[Probe]:
    """Up to `most` cells to measure next, the most useful first.

    `use`: how often each candidate is expected to be queried, ≥ 0 and not all 0. A candidate's gain is the
    fall of the mean variance of ln t over all candidates, weighted by use. It ends early once the weighted
    spread is at most `enough`. Ties go to the candidate that comes first. Raises `ValueError`.
    """
    weights = _weights(candidates, use, most)
    doubt, noise = _doubt(model, candidates)
    plan: list[Probe] = []
    anchors = _anchors(model, candidates)
    while len(plan) < most:
        before = _spread(doubt, weights)
        if before <= enough:
            break
        gain = (weights @ doubt**2) / (np.diag(doubt) + noise)
        best = anchors.pop(0) if anchors else int(np.argmax(gain))
        column = doubt[:, best].copy()
        doubt -= np.outer(column, column) / (column[best] + noise[best])
        after = _spread(doubt, weights)
        plan.append(Probe(candidates[best], before, after))
    return plan


def _spread(doubt: Floats, weights: Floats) -> float:
    return sqrt(max(0.0, float(weights @ np.diag(doubt))))


def _anchors(model: StepModel, candidates: Sequence[Cell]) -> list[int]:
    """Indices of the smallest and largest batch on the fewest GPUs, as far as they were not measured."""
    fewest = min(sum(cell.placement) for cell in candidates)
    narrow = [index for index, cell in enumerate(candidates) if sum(cell.placement) == fewest]
    ends = (
        min(narrow, key=lambda index: candidates[index].local_batch),
        max(narrow, key=lambda index: candidates[index].local_batch),
    )
    measured = {(cell.placement, cell.local_batch) for cell in model.table.cells}
    return [
        index
        for index in dict.fromkeys(ends)
        if (ring(candidates[index].placement), candidates[index].local_batch) not in measured
    ]


def _weights(candidates: Sequence[Cell], use: Sequence[float], most: int) -> Floats:
    if not 0 < len(candidates) <= MAX_CANDIDATES:
        raise ValueError(f"{len(candidates)} candidates: must be 1 to {MAX_CANDIDATES}")
    if not 0 <= most <= MAX_PLANNED:
        raise ValueError(f"{most} measurements asked for: must be 0 to {MAX_PLANNED}")
    weights = np.array(use, dtype=np.float64)
    if len(weights) != len(candidates) or not np.all(np.isfinite(weights)) or np.any(weights < 0):
        raise ValueError(f"use: needs {len(candidates)} finite numbers ≥ 0")
    if weights.sum() <= 0:
        raise ValueError("use: at least one candidate must be used")
    return np.asarray(weights / weights.sum())


def _doubt(model: StepModel, cells: Sequence[Cell]) -> tuple[Floats, Floats]:
    """(covariance of ln t over `cells`, shape (cells, cells); variance of one measurement, shape
    (cells,))."""
    _, slope, at = model.linearised(cells)
    residual, variances = np.array(model.prior.residual), np.array(model.prior.spread) ** 2
    known = model.posterior.root @ model.together(slope, at).T
    before: Floats = covariance(residual, at, at) + slope * variances @ slope.T
    return np.asarray(before - known.T @ known), noise_variance(residual, at)
