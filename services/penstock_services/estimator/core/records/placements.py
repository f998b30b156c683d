"""Measurements of step times by placement and local batch, and the rejection of implausible ones."""

from collections.abc import Iterable, Sequence
from math import isfinite, log
from typing import NamedTuple

import numpy as np

from penstock_services.estimator.core.learning.gaussian_process import Floats, Integers

Placement = tuple[int, ...]
"""GPUs on each node, in ring order; every entry ≥ 1."""

MAX_NODES, MAX_GPUS_PER_NODE, MAX_LOCAL_BATCH = 4_096, 64, 1 << 31  # more are taken for errors
MIN_STEP_S = 1e-6  # below any kernel launch
MAX_STEP_S = 86_400.0  # a step of a day is a job that hangs


class Cell(NamedTuple):
    """One point of the measured space: a placement and the samples per GPU and step."""

    placement: Placement
    local_batch: float


class Measurement(NamedTuple):
    """The mean step time of one run in one cell, in seconds."""

    cell: Cell
    step_s: float


class Table(NamedTuple):
    """Measured cells of one model on one kind of GPU, each cell once.

    `log_s`: shape (cells,), mean over the runs of ln(step in seconds). `runs`: shape (cells,), ≥ 1.
    """

    cells: tuple[Cell, ...]
    log_s: Floats
    runs: Floats


def ring(placement: Placement) -> Placement:
    """The same ring, named by its lexicographically smallest rotation: (4, 2, 2) → (2, 2, 4)."""
    return min(placement[turn:] + placement[:turn] for turn in range(len(placement)))


def table(measurements: Iterable[Measurement]) -> Table:
    """Runs of one cell are averaged. Only plausible measurements are allowed, see `why_rejected`.

    The order of the cells is that of their placements and batches, so that the order of the runs has no
    effect.
    """
    logs: dict[Cell, list[float]] = {}
    for (placement, local_batch), step_s in measurements:
        logs.setdefault(Cell(ring(placement), float(local_batch)), []).append(log(step_s))
    cells = tuple(sorted(logs, key=lambda cell: (len(cell.placement), cell)))
    means = np.array([sum(logs[cell]) / len(logs[cell]) for cell in cells], dtype=np.float64)
    return Table(cells, means, np.array([len(logs[cell]) for cell in cells], dtype=np.float64))


def why_rejected(measurement: Measurement) -> str:
    """Why this is implausible; empty if it is plausible."""
    (placement, local_batch), step_s = measurement
    if not (isfinite(step_s) and MIN_STEP_S <= step_s <= MAX_STEP_S):
        return f"step time {step_s} s is not between {MIN_STEP_S} and {MAX_STEP_S:.0f} s"
    if not (isfinite(local_batch) and 0 < local_batch <= MAX_LOCAL_BATCH):
        return f"local batch {local_batch} is not above 0 and at most {MAX_LOCAL_BATCH}"
    return why_no_placement(placement)


def why_no_placement(placement: Placement) -> str:
    """Why this is not a valid placement; empty if it is."""
    if not 1 <= len(placement) <= MAX_NODES:
        return f"{len(placement)} nodes: must be 1 to {MAX_NODES}"
    bad = [gpus for gpus in placement if not 1 <= gpus <= MAX_GPUS_PER_NODE]
    return f"{bad[0]} GPUs on a node: must be 1 to {MAX_GPUS_PER_NODE}" if bad else ""


class Points(NamedTuple):
    """Cells as columns; every one of shape (cells,)."""

    nodes: Floats
    gpus: Floats
    widest: Floats
    """GPUs on the node with the most."""
    batch: Floats
    """Local batch / reference batch."""
    ring: Integers
    """Same number: same placement."""
    counts: Integers
    """Same number: the same GPU counts per node in any order."""


def points(cells: Sequence[Cell], reference_batch: float) -> Points:
    """`cells` as columns. Placements are compared by the hashes of their numbers,
    which are the same in every process."""
    shapes = [cell.placement for cell in cells]
    return Points(
        np.array([len(shape) for shape in shapes], dtype=np.float64),
        np.array([sum(shape) for shape in shapes], dtype=np.float64),
        np.array([max(shape) for shape in shapes], dtype=np.float64),
        np.array([cell.local_batch for cell in cells], dtype=np.float64) / reference_batch,
        np.array([hash(ring(shape)) for shape in shapes], dtype=np.int64),
        np.array([hash(tuple(sorted(shape))) for shape in shapes], dtype=np.int64),
    )
