"""Scores of the packing family: `best-fit`, `dot-product`, `clustering`, `packing`.

Source: the baselines of the FGD paper (Weng et al., USENIX ATC '23) as its experiments define them. C and G
are the node's free cores and the sum of its free GPU shares (thousandths) before the task is placed, c and g
the task's demand. Cores and shares are divided by those of the cell's largest node, C̄ and Ḡ: 128 cores and 8
GPUs there. A score is truncated to a whole number: without that dot-product loses a point of allocation. The
truncation is exact, in whole numbers, where the source divides in floating point. Departures: none in the
rules; memory and bandwidth do not affect the score but must fit.
"""

from typing import NamedTuple

import numpy as np

from penstock.ledger.state.state import CellState
from penstock.model.nouns.types import WHOLE_GPU, ResourceVector
from penstock_papers.baselines.rows import NodeTable, Rows, class_of
from penstock_papers.baselines.scored import Scored

FULL_NODE = 33  # packing: base score of a node whose GPUs are all free, less its number of GPUs
SOME_FREE = 50  # packing: base score where wholly free GPUs are needed, less their number
ALL_GIVEN = 100  # packing: base score where only partly allocated GPUs are used, less their free per cent


class Largest(NamedTuple):
    """The largest of the cell's nodes that are not gone."""

    cores: int
    share_milli: int
    """Its GPUs in thousandths."""

    @classmethod
    def of(cls, state: CellState) -> "Largest":
        alive = [shape for shape, nodes in state.index.shape.items() if nodes & ~state.index.gone]
        return cls(
            max((shape.cores for shape in alive), default=1),
            max(1, *(shape.gpus for shape in alive)) * WHOLE_GPU if alive else WHOLE_GPU,
        )


def asked_milli(need: ResourceVector) -> int:
    """g: the task's total GPU demand, in thousandths."""
    return need.gpus * need.gpu_share_milli


class _Relative:
    """A scorer that depends on the cell's largest node."""

    def __init__(self) -> None:
        self.largest = Largest(1, 1)

    def basis(self, state: CellState) -> Largest:
        self.largest = Largest.of(state)
        return self.largest


class BestFit(_Relative):
    """Prefers the node with least left: 100 · (1 − ½ · ((C − c)/C̄ + (G − g)/Ḡ))."""

    def score(self, rows: Rows, need: ResourceVector, table: NodeTable) -> Scored:
        cores, milli = self.largest
        left = (rows.cores - need.cores) * milli + (rows.shares.sum(1) - asked_milli(need)) * cores
        return Scored(50 * (2 * cores * milli - left) // (cores * milli))


class DotProduct(_Relative):
    """Prefers the smallest dot product of free resources and demand:
    100 · (1 − ½ · (C/C̄ · c/C̄ + G/Ḡ · g/Ḡ))."""

    def score(self, rows: Rows, need: ResourceVector, table: NodeTable) -> Scored:
        cores, milli = self.largest
        alike = rows.cores * (need.cores * milli**2) + rows.shares.sum(1) * (asked_milli(need) * cores**2)
        unit = (cores * milli) ** 2
        return Scored(50 * (2 * unit - alike) // unit)


class Clustering(_Relative):
    """Prefers nodes with tasks of the same class: ⌊25 · (Ḡ − G)/Ḡ⌋ + 75, 50, 25 or 0. A task without GPUs: 0
    everywhere.

    75 where all tasks with GPUs are of this task's class (parts of a GPU, or its number of whole ones), 50
    where some are, 25 where there are no tasks with GPUs, else 0.
    """

    def score(self, rows: Rows, need: ResourceVector, table: NodeTable) -> Scored:
        if not need.gpus:
            return Scored(np.zeros_like(rows.cores))
        milli = self.largest.share_milli
        own = rows.classes[:, class_of(need.gpus, need.gpu_share_milli)]
        all_tasks = rows.classes.sum(1)
        alike = np.select([all_tasks == 0, own == all_tasks, own > 0], [25, 75, 50], 0)
        return Scored(25 * (milli - rows.shares.sum(1)) // milli + alike)


class Packing:
    """Prefers partly allocated GPUs, then partly allocated nodes, then free nodes. A task without GPUs: 0
    everywhere.

    A node with all n GPUs wholly free: max(33 − n, n). Else the task's GPUs are those with least free that
    fit: if u > 0 of them are wholly free, max(50 − u, 33); if none is, max(50, 100 − ⌊r/10⌋), r = the sum of
    ⌊free share/10⌋.
    """

    def basis(self, state: CellState) -> None:
        """The score depends only on the node."""

    def score(self, rows: Rows, need: ResourceVector, table: NodeTable) -> Scored:
        if not need.gpus:
            return Scored(np.zeros_like(rows.cores))
        fitting = np.where(rows.fits(need), rows.shares, WHOLE_GPU)
        used = np.sort(fitting, axis=1)[:, : need.gpus]
        whole = (used == WHOLE_GPU).sum(1)
        rest = (used // 10).sum(1)
        free = (rows.shares == WHOLE_GPU).sum(1) == rows.gpus
        return Scored(
            np.select(
                [free, whole > 0],
                [np.maximum(FULL_NODE - rows.gpus, rows.gpus), np.maximum(SOME_FREE - whole, FULL_NODE)],
                np.maximum(SOME_FREE, ALL_GIVEN - rest // 10),
            )
        )
