"""`fgd`: fragmentation gradient descent (FGD): chooses the node that stays most useful for typical tasks.

Source: Weng et al., USENIX ATC '23 (FGD), with the scores of its published scheduler.

Fragmentation of a node: F = Σ_m w_m · f_m over typical tasks m with weights w_m, Σ w_m = 1. With G = the sum
of the node's free GPU shares (thousandths), f_m is
  G, if m cannot run there: it asks no GPU, or its model is not allowed, or too few cores are free, or fewer
  GPUs than it asks have its share free; else the sum of the free shares that are smaller than its share.
Memory is ignored. Score = 100/(1 + exp(−(F_before − F_after)/1000)), truncated to a whole number. For a part
of a GPU each GPU that fits is tried; the first one with the largest whole number is taken and gives the
node's score.

Typical tasks: groups of equal (cores, share, GPUs, models) by count, largest first (ties: the larger group
first), until they hold 95 % of all; w_m = count over the count of those taken. They come from the
settings (`typical_tasks`), else from the `RECENT_JOBS` youngest jobs in the cell, waiting or running.

Departure: none in the rules. F is computed in whole numbers, as Σ count_m · f_m, and the logistic is
inverted: the score is the number of k = 1 … 99 with F_before − F_after ≥ 1000 · ln(k/(100 − k)). So rounding
cannot change a score on any machine; in floating point a task without effect on F scores sometimes 49,
sometimes 50.
"""

from collections import Counter
from collections.abc import Iterable
from itertools import islice
from math import log
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.ledger.state.state import CellState
from penstock.model.nouns.gpu_names import allows
from penstock.model.nouns.types import WHOLE_GPU, ResourceVector
from penstock_papers.baselines.rows import Flags, Ints, NodeTable, Rows
from penstock_papers.baselines.scored import Scored
from penstock_papers.settings import MAX_TYPICAL_TASKS, TypicalTask

TYPICAL_PERCENT = 95  # of all tasks are typical; see above
RECENT_JOBS = 1_024
"""Number of the cell's youngest jobs that are the sample of typical tasks where the settings name none."""
MAX_SCORE = 100  # of a Kubernetes scheduler

Group = tuple[int, int, int, tuple[str, ...]]
"""(cores, share of a GPU in thousandths or 0 for tasks without GPUs, GPUs, allowed models)."""


def typical_tasks(tasks: Iterable[tuple[ResourceVector, tuple[str, ...]]]) -> tuple[TypicalTask, ...]:
    """The groups that contain 95 % of these (need, allowed models), most frequent first."""
    counts: Counter[Group] = Counter()
    for need, models in tasks:
        counts[need.cores, need.gpu_share_milli if need.gpus else 0, need.gpus, tuple(sorted(models))] += 1
    found: list[TypicalTask] = []
    held, total = 0, counts.total()
    for (cores, share, gpus, models), count in sorted(
        counts.items(), key=lambda item: (item[1], item[0]), reverse=True
    ):
        if held * 100 >= total * TYPICAL_PERCENT or len(found) == MAX_TYPICAL_TASKS:
            break
        held += count
        found.append(
            TypicalTask(
                cores=cores, gpus=gpus, gpu_share_milli=share or WHOLE_GPU, gpu_models=models, count=count
            )
        )
    return tuple(found)


def recent_tasks(state: CellState) -> tuple[TypicalTask, ...]:
    """The typical tasks of the cell's youngest jobs; a gang counts once per worker."""
    return typical_tasks(
        (job.estimate.worker, job.spec.gpu_models)
        for job in islice(reversed(state.jobs.values()), RECENT_JOBS)
        if job.estimate is not None
        for _ in range(job.workers)
    )


class _Typical(NamedTuple):
    """The typical tasks with GPUs, as arrays of shape (kinds)."""

    cores: Ints
    gpus: Ints
    share_at: Ints
    """Position of the task's share in `shares`."""
    counts: Ints
    shares: Ints
    """Distinct shares, ascending."""
    without_gpus: int
    """Count of typical tasks without GPUs."""
    thresholds: npt.NDArray[np.float64]
    """Shape (99): minimum of F_before − F_after for a score of k = 1 … 99, times the count of all."""


def _typical(tasks: tuple[TypicalTask, ...]) -> _Typical:
    with_gpus = [task for task in tasks if task.gpus]
    shares = sorted({task.gpu_share_milli for task in with_gpus})
    total = sum(task.count for task in tasks)
    return _Typical(
        np.array([task.cores for task in with_gpus], np.int64),
        np.array([task.gpus for task in with_gpus], np.int64),
        np.array([shares.index(task.gpu_share_milli) for task in with_gpus], np.int64),
        np.array([task.count for task in with_gpus], np.int64),
        np.array(shares, np.int64),
        total - sum(task.count for task in with_gpus),
        np.array([WHOLE_GPU * total * log(k / (MAX_SCORE - k)) for k in range(1, MAX_SCORE)]),
    )


class FragmentationGradient:
    """`typical`: the setting `typical_tasks`; empty: derived from the jobs in the cell."""

    def __init__(self, typical: tuple[TypicalTask, ...] = ()) -> None:
        self._given = typical
        self._basis = typical
        self._typical = _typical(typical)

    def basis(self, state: CellState) -> tuple[TypicalTask, ...]:
        """The typical tasks."""
        if not self._given:
            found = recent_tasks(state)
            if found != self._basis:
                self._basis = found
                self._typical = _typical(found)
        return self._basis

    def score(self, rows: Rows, need: ResourceVector, table: NodeTable) -> Scored:
        allowed = self._allowed(table)[rows.model]
        before = self._fragmentation(rows.cores, rows.shares, allowed)
        cores = rows.cores - need.cores
        if need.gpu_share_milli == WHOLE_GPU:
            free = rows.shares == WHOLE_GPU
            taken = free & (free.cumsum(1) <= need.gpus)
            after = self._fragmentation(cores, np.where(taken, 0, rows.shares), allowed)
            return Scored(self._score(before - after))
        node, gpu = np.nonzero(rows.fits(need))
        shares = rows.shares[node]
        shares[np.arange(node.size), gpu] -= need.gpu_share_milli
        after = self._fragmentation(cores[node], shares, allowed[node])
        by_gpu = np.full(rows.shares.shape, -1, np.int64)
        by_gpu[node, gpu] = self._score(before[node] - after)
        return Scored(by_gpu.max(1, initial=-1), by_gpu.argmax(1))

    def _allowed(self, table: NodeTable) -> Flags:
        """Shape (models, kinds): whether a typical task may run on GPUs of this model."""
        kinds = [task for task in self._basis if task.gpus]
        return np.array(
            [[allows(task.gpu_models, model) for task in kinds] for model in table.models],
            np.bool_,
        ).reshape(len(table.models), len(kinds))

    def _fragmentation(self, cores: Ints, shares: Ints, allowed: Flags) -> Ints:
        """F times the count of all typical tasks; shapes (rows), (rows, 16), (rows, kinds) → (rows)."""
        typical = self._typical
        enough = shares[:, None, :] >= typical.shares[:, None]  # (rows, distinct shares, 16)
        having = enough.sum(2)
        total = shares.sum(1)
        smaller = total[:, None] - np.where(enough, shares[:, None, :], 0).sum(2)
        at = typical.share_at
        runs = allowed & (cores[:, None] >= typical.cores) & (having[:, at] >= typical.gpus)
        lost = np.where(runs, smaller[:, at], total[:, None])
        found: Ints = (lost * typical.counts).sum(1) + total * typical.without_gpus
        return found

    def _score(self, gradient: Ints) -> Ints:
        return np.searchsorted(self._typical.thresholds, gradient, side="right")
