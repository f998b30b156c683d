"""Our default model: one process per label, with intervals that are calibrated on cells and GPUs left out."""

import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from penstock_services.estimator.core.resource_model.covariance import Weights
from penstock_services.estimator.core.resource_model.features import Design, Inputs, design_of, lines_of
from penstock_services.estimator.core.resource_model.gaussian_process import (
    MAX_LEARNING,
    Fit,
    Process,
    Remembering,
    sample,
)
from penstock_services.estimator.core.resource_model.labels import UNITS
from penstock_services.estimator.core.resource_model.measurements import (
    LABELS,
    MEMORY,
    Floats,
    Indexes,
    Mask,
    Runs,
    Task,
    card_mib,
    cell_of,
    half_precision,
)

MOST_WIDENED = 2.0  # in variance, where there are few cells
OUTSIDE = 0.1  # of held-out runs may lie outside their interval; half of it on either side
FEWEST_SCORES = 20  # below, no 5 % tail has been seen
UNTESTED = 2.5  # standard deviations on either side while that is so
FEWEST_GROUPS = 3  # of GPU models or workloads, for leaving one out to say anything
MOST_REPEATS = (
    8  # that one cell counts for: what repeats share (the machine, the data) averages out no further
)
LEAN_SCORES = 10.0  # how many runs of average spread a workload's own spread is worth
LEAST_SPREAD = 1e-6
LINE_SHARES = (1.0, 0.75, 0.5)
MOST_TRIED = 200  # cells to choose among those; n³
MOST_JUDGES = 2_048  # cells that are foretold as if new: 100 lie beyond either end, so its level is known to half a percent
UNKNOWN = ""  # a workload that no run can have
LINE_NUMBERS = 2  # that a workload's line really has: one of its two slopes is nearly always 0
FEWEST_ALONE = 100  # cells that one owner alone measured always count: a small team must not lose its history
MOST_OF_ONE = (
    0.25  # of all cells may be cells that one owner alone measured: his word about them is the only one
)


class Spread(NamedTuple):
    """Ends of an interval, in standard deviations below and above the mean."""

    low: float
    high: float


class Spreads(NamedTuple):
    """For a job like those seen, one on a GPU model never seen, and one of a workload never seen."""

    seen: Spread
    new_gpu: Spread
    new_workload: Spread


@dataclass(frozen=True, slots=True)
class Learned:
    """One label. `mean`, `scale`: of what was learned; `width`: per workload, its errors against the average."""

    process: Process
    mean: float
    scale: float
    width: Floats
    spreads: Spreads


@dataclass(frozen=True, slots=True)
class Told:
    """Predictions of one label, in its own unit. Shapes (tasks,). The truth lies between low and high 9 times of 10,
    and below high 19 times of 20."""

    value: Floats
    low: Floats
    high: Floats
    known: Floats
    """0: nothing like it was measured, 1: all but measured."""


@dataclass(frozen=True, slots=True)
class Model:
    """Everything learned from some runs."""

    design: Design
    labels: Mapping[str, Learned]
    runs: int

    def predict(self, tasks: Sequence[Task] | Inputs, names: Collection[str] = LABELS) -> Mapping[str, Told]:
        """Label → predictions, of those that are asked for; labels that no run measured are missing.

        The memory's `high` is the bound to promise.
        """
        inputs = tasks if isinstance(tasks, Inputs) else self.design.of(tasks)
        return {name: told(name, learned, inputs) for name, learned in self.labels.items() if name in names}

    def expect(self, inputs: Inputs, name: str) -> Floats | None:
        """The values that `predict` tells of one label, without interval, for a fraction of the work; None: never measured."""
        learned = self.labels.get(name)
        if learned is None:
            return None
        return UNITS[name].told(learned.mean + learned.scale * learned.process.mean(inputs), inputs)


def told(name: str, learned: Learned, inputs: Inputs, process: Process | Remembering | None = None) -> Told:
    """The predictions of one label. `process`: that label's, where it is asked another way."""
    mean, variance = (process or learned.process).predict(inputs)
    weights = learned.process.weights
    known = 1 - np.minimum(variance / weights.prior, 1.0)
    deviation = np.sqrt(variance + weights.noise)
    new_work = inputs.workload < 0
    deviation *= np.where(new_work, 1.0, learned.width[inputs.workload])
    case = np.where(new_work, 2, inputs.gpu < 0)
    low, high = np.array(learned.spreads)[case].T
    z = np.stack([mean, mean - low * deviation, mean + high * deviation])
    value, lower, upper = UNITS[name].told(learned.mean + learned.scale * z, inputs)
    return Told(value, lower, upper, known)


def train(runs: Runs, seed: int = 0, like: Model | None = None) -> Model:
    """Learns from runs that were not set aside. Deterministic. Raises `ValueError` where there is nothing to learn.

    `like`: a model of nearly the same runs. Where these have so many cells that weights are learned on a sample of them,
    its weights are taken instead of searching for others. Source: the search is a third of the work.
    """
    count = len(runs)
    runs = fair(runs, seed)
    first, row_of = cells(runs.tasks)
    if len(first) <= MAX_LEARNING:
        like = None
    together = witnessed(runs, first, row_of)
    design = design_of(together)
    design = (
        following_its_line(design, together, seed)
        if like is None
        else replace(design, line_share=like.design.line_share)
    )
    tasks = together.tasks
    asked = design.of(tasks), as_new_gpus(design, together, tasks), as_new_workloads(design, tasks)
    learned = {}
    for name in LABELS:
        rows = np.flatnonzero(np.isfinite(runs.labels.get(name, np.empty(0))))
        if rows.size:
            mine, of_mine = among(row_of[rows])
            known = like.labels.get(name) if like is not None else None
            measured = _Measured(
                runs.pick(rows), of_mine, [tasks[cell] for cell in mine], *(one.pick(mine) for one in asked)
            )
            learned[name] = _learn(name, measured, design, seed, known.process.weights if known else None)
    if not learned:
        raise ValueError("no run measured anything: there is nothing to learn from")
    return Model(design, learned, count)


@dataclass(frozen=True, slots=True)
class _Measured:
    """The runs that measured one label, and their cells: how those are asked about, and how they would be as new ones."""

    runs: Runs
    cell_of: Indexes
    """Shape (runs,); all else is per cell."""
    tasks: Sequence[Task]
    inputs: Inputs
    new_gpu: Inputs
    new_workload: Inputs


def following_its_line(design: Design, runs: Runs, seed: int) -> Design:
    """The design with that share of LINE_SHARES which best foretells the memory on GPU models left out.

    `runs`: one per cell. Where memory was not measured on FEWEST_GROUPS models, the line alone is believed.
    """
    rows = np.flatnonzero(np.isfinite(runs.labels[MEMORY]))
    if len({runs.tasks[row].gpu for row in rows}) < FEWEST_GROUPS:
        return design
    if len(rows) > MOST_TRIED:
        rows = np.sort(np.random.default_rng(seed).choice(rows, MOST_TRIED, replace=False))
    some = runs.pick(rows)
    errors = {}
    for share in LINE_SHARES:
        tried = replace(design, line_share=share)
        inputs = tried.of(some.tasks)
        raw = UNITS[MEMORY].learned(some.labels[MEMORY], inputs)
        scale = max(float(raw.std()), LEAST_SPREAD)
        y = (raw - raw.mean()) / scale
        fit = Fit(inputs, y, np.ones(len(y)), UNITS[MEMORY].columns, seed)
        told, _ = fit.without(blocks([task.gpu for task in some.tasks]))
        errors[share] = float(np.abs(told - y).mean()) * scale
    return replace(design, line_share=min(LINE_SHARES, key=lambda share: errors[share]))


def as_new_gpus(design: Design, runs: Runs, tasks: Sequence[Task]) -> Inputs:
    """Each task as it would be asked about before its GPU model was measured: the lines know other models only.

    `runs`: one per cell, those that the lines are made of. With one GPU model the lines know nothing.
    """
    of_gpu = blocks([task.gpu for task in tasks])
    parts = []
    for rows in of_gpu:
        others = np.array([task.gpu != tasks[rows[0]].gpu for task in runs.tasks])
        lines, _ = lines_of(runs.pick(others))
        parts.append(replace(design, lines=lines).of([tasks[row] for row in rows]))
    order = np.argsort(np.concatenate(of_gpu))
    columns = (np.concatenate([getattr(part, name) for part in parts])[order] for name in Inputs.__slots__)
    return Inputs(*columns)


def as_new_workloads(design: Design, tasks: Sequence[Task]) -> Inputs:
    """Each task as it would be asked about before anything of its workload was measured."""
    return design.of([replace(task, model=UNKNOWN) for task in tasks])


def _learn(name: str, measured: _Measured, design: Design, seed: int, weights: Weights | None) -> Learned:
    runs, row_of, tasks = measured.runs, measured.cell_of, measured.tasks
    inputs = measured.inputs.pick(row_of)
    raw = UNITS[name].learned(runs.labels[name], inputs)
    mean, scale = float(raw.mean()), max(float(raw.std()), LEAST_SPREAD)
    y = (raw - mean) / scale
    value, repeats = merged(runs, y, row_of, len(tasks))
    fit = Fit(measured.inputs, value, repeats, UNITS[name].columns, seed, weights)
    told, variance = fit.without(blocks([cell_of(task) for task in tasks]))
    seen = (y - told[row_of]) / np.sqrt(variance + fit.weights.noise)[row_of]
    names = blocks([cell_of(task) for task in runs.tasks])
    width, mine = widths(seen, inputs.workload, len(design.workloads), names)
    judges = sample(len(tasks), MOST_JUDGES, seed)
    place = np.full(len(tasks), -1)
    place[judges] = np.arange(len(judges))
    judging = np.flatnonzero(place[row_of] >= 0)

    def scores(asked: Inputs, groups: Sequence[Indexes]) -> Floats:
        """Of the judges' runs, as they would have been foretold without their group. Shape (judging,)."""
        told, variance = fit.foretold(groups, asked.pick(judges), judges)
        truth = UNITS[name].learned(runs.labels[name][judging], asked.pick(row_of[judging]))
        at = place[row_of[judging]]
        off: Floats = ((truth - mean) / scale - told[at]) / np.sqrt(variance + fit.weights.noise)[at]
        return off

    fitted = len(fit.weights.values)
    lines = LINE_NUMBERS * len(design.lines) if name == MEMORY else 0
    spread = new_gpu = new_workload = spread_of(seen / mine, len(tasks), fitted + lines)
    if len(of_gpu := blocks([task.gpu for task in tasks])) >= FEWEST_GROUPS:
        new_gpu = spread_of(scores(measured.new_gpu, of_gpu) / mine[judging], len(judges), fitted)
    if len(of_workload := blocks([task.model for task in tasks])) >= FEWEST_GROUPS:
        new_workload = spread_of(scores(measured.new_workload, of_workload), len(judges), fitted)
    return Learned(fit.process(), mean, scale, width, Spreads(spread, new_gpu, new_workload))


def cells(tasks: Sequence[Task]) -> tuple[Indexes, Indexes]:
    """Runs that nothing known beforehand tells apart: the first row of each such cell, and each run's cell.

    Shapes (cells,), (runs,).
    """
    found: dict[Hashable, int] = {}
    first, row_of = [], np.empty(len(tasks), dtype=np.intp)
    for row, task in enumerate(tasks):
        batch = None if task.batch_size != task.batch_size else task.batch_size
        key = (task.gpu, task.gpus, task.model, half_precision(task.precision), batch, card_mib(task))
        if key not in found:
            first.append(row)
        row_of[row] = found.setdefault(key, len(found))
    return np.array(first, dtype=np.intp), row_of


def among(cell_of: Indexes) -> tuple[Indexes, Indexes]:
    """The cells that some runs are of, in the order of their first run, and which of those each run is of."""
    found, first, place = np.unique(cell_of, return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return found[order], rank[place]


def witnessed(runs: Runs, first: Indexes, row_of: Indexes) -> Runs:
    """One run per cell (see `cells`), with the memory that its owners measured together; where it was measured."""
    memory = runs.labels.get(MEMORY, np.full(len(runs), np.nan))
    together = np.full(len(first), np.nan)
    rows = np.flatnonzero(np.isfinite(memory))
    if rows.size:
        measured, again = np.unique(row_of[rows], return_inverse=True)
        together[measured], _ = merged(runs.pick(rows), memory[rows], again, len(measured))
    return Runs(tuple(runs.tasks[row] for row in first), {MEMORY: together})


def fair(runs: Runs, seed: int) -> Runs:
    """The runs to learn from, so that no owner is the only witness of more cells than all others have together.

    Cells that go are drawn by `seed`; FEWEST_ALONE of them stay in any case, and all with a second witness.
    """
    owners = {owner: index for index, owner in enumerate(sorted({task.owner for task in runs.tasks}))}
    if len(owners) == 1:
        return runs
    first, row_of = cells(runs.tasks)
    count = len(first)
    owner_of = np.array([owners[task.owner] for task in runs.tasks])
    lowest, highest = np.full(count, len(owners)), np.full(count, -1)
    np.minimum.at(lowest, row_of, owner_of)
    np.maximum.at(highest, row_of, owner_of)
    alone = np.where(lowest == highest, lowest, -1)
    keep, chance = np.ones(count, dtype=np.bool_), np.random.default_rng(seed)
    for owner in owners.values():
        his = np.flatnonzero(alone == owner)
        most = max(count - len(his), FEWEST_ALONE)
        if len(his) > most:
            keep[chance.choice(his, len(his) - most, replace=False)] = False
    return runs if keep.all() else runs.pick(keep[row_of])


def merged(runs: Runs, y: Floats, row_of: Indexes, count: int) -> tuple[Floats, Floats]:
    """One value per cell and how many measurements it is worth: the median over owners of each owner's mean.

    So one owner, however many runs he sends, moves a cell that two others measured no further than between them.
    """
    owners = {owner: index for index, owner in enumerate(sorted({task.owner for task in runs.tasks}))}
    pair = row_of * len(owners) + np.array([owners[task.owner] for task in runs.tasks])
    pairs, pair_of, size = np.unique(pair, return_inverse=True, return_counts=True)
    mean = np.bincount(pair_of, y) / size
    cell = pairs // len(owners)
    order = np.lexsort((mean, cell))
    starts = np.searchsorted(cell[order], np.arange(count))
    ends = np.searchsorted(cell[order], np.arange(count), side="right")
    low, high = mean[order][(starts + ends - 1) // 2], mean[order][(starts + ends) // 2]
    repeats = np.bincount(cell, np.minimum(size, MOST_REPEATS))
    return (low + high) / 2, np.minimum(repeats, MOST_REPEATS).astype(np.float64)


def blocks(group: Sequence[Hashable]) -> list[Indexes]:
    """Rows with the same name, in the order of their first."""
    found: dict[Hashable, int] = {}
    which = np.array([found.setdefault(name, len(found)) for name in group], dtype=np.intp)
    order = np.argsort(which, kind="stable")
    return np.split(order, np.cumsum(np.bincount(which))[:-1])


def widths(scores: Floats, workload: Indexes, count: int, groups: Sequence[Indexes]) -> tuple[Floats, Floats]:
    """How much wider than the average each workload's errors are, about 1: shape (count,), and per run, shape (runs,).

    Mean absolute errors, leaning to the average: some workloads wait for their input in ways that no column knows.
    For a run it is said without the runs of its own group, or the calibration would be shown what it is to judge.
    """
    size = np.abs(scores)
    average = max(float(size.mean()), LEAST_SPREAD)
    total, runs = np.bincount(workload, size, count), np.bincount(workload, minlength=count)
    mine = np.empty(len(scores))
    for rows in groups:
        work = workload[rows[0]]
        others = total[work] - size[rows].sum()
        mine[rows] = (others + LEAN_SCORES * average) / (runs[work] - len(rows) + LEAN_SCORES) / average
    return (total + LEAN_SCORES * average) / (runs + LEAN_SCORES) / average, mine


def spread_of(scores: Floats, cells: int, fitted: int) -> Spread:
    """Ends that 5 % of runs left out fell beyond, on either side; never inside the mean.

    Source: cross-conformal prediction with normalised scores, its level (n + 1) / n · 0.95 for one more run is to come.
    n counts cells, not runs: repeats of one cell say the same again. Departure: leaving a cell out does not unlearn the
    `fitted` numbers that it helped to choose, so the ends are widened as for a variance, by √(n / (n − fitted)).
    """
    if cells < FEWEST_SCORES:
        return Spread(UNTESTED, UNTESTED)
    level = min((cells + 1) / cells * (1 - OUTSIDE / 2), 1.0)
    wider = math.sqrt(cells / max(cells - fitted, cells / MOST_WIDENED))
    low, high = (float(np.quantile(side, level, method="higher")) * wider for side in (-scores, scores))
    return Spread(max(low, 0.0), max(high, 0.0))


def within(low: Floats, high: Floats, truth: Floats) -> Mask:
    """Which runs their interval holds, its ends included. Shape (runs,)."""
    return (low <= truth) & (truth <= high)
