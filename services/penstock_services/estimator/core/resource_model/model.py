"""The learned model of resources: one Gaussian process per label,
with cross-conformal prediction intervals."""

import math
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from penstock_services.estimator.core.learning.gaussian_process import (
    Floats,
    Indexes,
    Mask,
    Posterior,
    sample,
)
from penstock_services.estimator.core.learning.limits import CELLS_OF_ONE, REPEATS
from penstock_services.estimator.core.learning.new_group import ends_of_new_group
from penstock_services.estimator.core.resource_model.covariance import Covariance, search
from penstock_services.estimator.core.resource_model.features import (
    Features,
    Inputs,
    features_of,
    memory_lines,
)
from penstock_services.estimator.core.resource_model.gpus import generation_of
from penstock_services.estimator.core.resource_model.labels import UNITS
from penstock_services.estimator.core.resource_model.measurements import (
    LABELS,
    MEMORY,
    Runs,
    Task,
    card_mib,
    cell_of,
    half_precision,
)

MAX_CELLS = 512  # a prediction costs cells², a training cells³
MAX_SEARCHED = 400  # cells that hyperparameters are searched on; cells³ per step
MAX_CACHED = 50_000  # predictions; 10 MB
MAX_WIDENED = 2.0  # in variance, where there are few cells
OUTSIDE = 0.1  # share of held-out runs that may lie outside their interval; half of it on either side
MIN_SCORES = 20  # fewer show no 5 % tail
UNTESTED = 2.5  # standard deviations on either side below that number
UNTESTED_GPU = 5.0  # for an unseen GPU model with too few others to leave one out; that of 17 is 3 to 5
UNTESTED_GENERATION = 10.0  # and for an unseen generation, where all GPU models are of one
GENERATION_CONFIDENCE = 0.95  # as the next one, of generations
GPU_CONFIDENCE = 0.99  # 1 unseen GPU model in 100 may exceed an end more often: promises are enforced
SHRINK_SCORES = 10.0  # weight, in runs, of the average spread to which a workload's own is shrunk
MIN_SPREAD = 1e-6  # of labels that are all the same
OUTLIER = 3.0  # standard deviations from the prediction by all others; beyond, a cell loses weight (Huber)
LINE_NUMBERS = 2  # effective parameters of a workload's line: one of its two slopes is nearly always 0


class Spread(NamedTuple):
    """Ends of an interval, in standard deviations below and above the mean."""

    low: float
    high: float


NOTHING_KNOWN = Spread(math.inf, math.inf)
"""Of a workload that was never run: the whole range of the label."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Of one label, in its own unit. Shapes (tasks,). The truth lies between low and high 9 times of 10, and
    below high 19 times of 20; on unseen GPU models in GPU_CONFIDENCE of them."""

    value: Floats
    low: Floats
    high: Floats
    known: Floats
    """0: no similar job was measured, 1: as good as measured."""


@dataclass(frozen=True)
class LabelModel:
    """Model of one label: its cells and its learned parameters. Standardised by `mean` and `scale`."""

    covariance: Covariance
    cells: Inputs
    y: Floats
    noise: Floats
    mean: float
    scale: float
    width: Floats
    """Per workload, the size of its errors relative to the average."""
    seen_gpu: Spread
    new_gpu: Spread
    new_generation: Spread

    @cached_property
    def _k(self) -> Callable[[Inputs], Floats]:
        return self.covariance.to(self.cells)

    @cached_property
    def posterior(self) -> Posterior:
        return Posterior(self._k(self.cells), self.noise, self.y)

    @cached_property
    def _cache(self) -> dict[bytes, tuple[float, float]]:
        return {}

    def predict(self, name: str, inputs: Inputs, *, cached: bool = False) -> Prediction:
        """`cached`: for labels whose covariance takes few different values, such as memory's, which does not
        depend on the batch."""
        mean, variance = self._cached(inputs) if cached else self._computed(inputs)
        known = 1 - np.minimum(variance / self.covariance.prior, 1.0)
        deviation = np.sqrt(variance + self.covariance.noise)
        deviation *= np.where(inputs.workload < 0, 1.0, self.width[inputs.workload])
        case = np.where(inputs.workload < 0, 3, -np.minimum(inputs.gpu, 0))  # 0, −NEW_GPU, −NEW_GENERATION
        low, high = np.array([self.seen_gpu, self.new_gpu, self.new_generation, NOTHING_KNOWN])[case].T
        z = np.stack([mean, mean - low * deviation, mean + high * deviation])
        value, lower, upper = UNITS[name].measured(self.mean + self.scale * z, inputs)
        return Prediction(value, lower, upper, known)

    def expect(self, name: str, inputs: Inputs) -> Floats:
        """The values of `predict` without interval, for a fraction of the work."""
        mean = self._k(inputs) @ self.posterior.alpha
        return UNITS[name].measured(self.mean + self.scale * mean, inputs)

    def _computed(self, inputs: Inputs) -> tuple[Floats, Floats]:
        return self.posterior.predict(self._k(inputs), self.covariance.prior)

    def _cached(self, inputs: Inputs) -> tuple[Floats, Floats]:
        keys, cache = self.covariance.keys(inputs), self._cache
        first = {key: row for row, key in enumerate(keys) if key not in cache}
        if len(cache) + len(first) > MAX_CACHED:
            cache.clear()
            first = {key: row for row, key in enumerate(keys)}
        if first:
            mean, variance = self._computed(inputs.pick(np.fromiter(first.values(), np.intp, len(first))))
            cache.update(zip(first, zip(mean.tolist(), variance.tolist(), strict=True), strict=True))
        found = np.array([cache[key] for key in keys]).reshape(-1, 2)
        return found[:, 0], found[:, 1]


@dataclass(frozen=True)
class Model:
    """Everything learned from some runs."""

    features: Features
    labels: Mapping[str, LabelModel]
    runs: int

    def predict(
        self, tasks: Sequence[Task] | Inputs, names: Collection[str] = LABELS
    ) -> Mapping[str, Prediction]:
        """Label → predictions, of the requested ones; labels that no run measured are missing.

        The memory's `high` is the bound to promise.
        """
        inputs = tasks if isinstance(tasks, Inputs) else self.features.of(tasks)
        return {name: label.predict(name, inputs) for name, label in self.labels.items() if name in names}


def train(runs: Runs, seed: int = 0, like: Model | None = None) -> Model:
    """Learns from sound runs. Deterministic. Raises `ValueError` where there is nothing to learn.

    `like`: a model of nearly the same runs. Where these have so many cells that hyperparameters are searched
    on a sample, its own are taken instead: the search is a third of the work.
    """
    count = len(runs)
    runs = limited_per_owner(runs, seed)
    first, cell = cells(runs.tasks)
    known = {} if like is None or len(first) <= MAX_SEARCHED else like.labels
    together = aggregated_by_owner(runs, first, cell)
    features = features_of(together)
    new = [as_new(features, together, runs.tasks, kind) for kind in (_gpu, _generation)]
    labels = {}
    for name in LABELS:
        rows = np.flatnonzero(np.isfinite(runs.labels.get(name, np.empty(0))))
        if rows.size:
            covariance = known[name].covariance if name in known else None
            labels[name] = _learn(
                name, runs.pick(rows), features, [one.pick(rows) for one in new], seed, covariance
            )
    if not labels:
        raise ValueError("no run measured anything: there is nothing to learn from")
    return Model(features, labels, count)


def _learn(
    name: str, runs: Runs, features: Features, new: Sequence[Inputs], seed: int, known: Covariance | None
) -> LabelModel:
    """One label, with intervals calibrated on cells, on GPU models and on generations left out.

    `new`: the runs as `as_new` describes them, by GPU model and by generation; `known`: hyperparameters that
    need no search.
    """
    unit, inputs = UNITS[name], features.of(runs.tasks)
    first, cell = grouped(Covariance(np.empty(0), unit.columns).keys(inputs))
    chosen = sample(len(first), MAX_CELLS, seed)
    if len(chosen) < len(first):
        rows = np.flatnonzero(np.isin(cell, chosen))
        runs, inputs, new = runs.pick(rows), inputs.pick(rows), [one.pick(rows) for one in new]
        first, cell = np.searchsorted(rows, first[chosen]), np.searchsorted(chosen, cell[rows])
    tasks, some_cells = runs.tasks, inputs.pick(first)
    raw = unit.learned(runs.labels[name], inputs)
    mean, scale = float(raw.mean()), max(float(raw.std()), MIN_SPREAD)
    y, repeats = merged(runs, (raw - mean) / scale, cell, len(first))
    some = sample(len(first), MAX_SEARCHED, seed)
    covariance = known or search(some_cells.pick(some), y[some], repeats[some], unit.columns)
    gram = covariance.between(some_cells, some_cells)
    noise = weighted_noise(gram, covariance.noise / repeats, y)
    posterior = Posterior(gram, noise, y)

    def scores(groups: Sequence[Hashable], asked: Inputs, k: Floats) -> Floats:
        """Of each run, its error in standard deviations when predicted without its cell's group; `asked` and
        `k`: the queries for it."""
        predicted, variance = posterior.leave_groups_out(blocks(groups), k, covariance.prior)
        truth = (unit.learned(runs.labels[name], asked) - mean) / scale
        return np.asarray((truth - predicted[cell]) / np.sqrt(variance + covariance.noise)[cell])

    held_out = scores([cell_of(tasks[row]) for row in first], inputs, gram)
    groups = blocks([cell_of(task) for task in tasks])
    width, own = widths(held_out, inputs.workload, len(features.workloads), groups)
    lines = LINE_NUMBERS * len(features.lines) if name == MEMORY else 0
    seen = spread_of(held_out / own, len(first), len(covariance.values) + lines)
    gpu_models, spreads = blocks([task.gpu for task in tasks]), [seen]
    for kind, asked, confidence, untested in zip(
        (_gpu, _generation),
        new,
        (GPU_CONFIDENCE, GENERATION_CONFIDENCE),
        (UNTESTED_GPU, UNTESTED_GENERATION),
        strict=True,
    ):
        k = covariance.between(asked.pick(first), some_cells)
        off = scores([kind(tasks[row]) for row in first], asked, k) / own
        count, errors = len({kind(task) for task in tasks}), [off[rows] for rows in gpu_models]
        ends = ends_of_new_group(errors, 1 - OUTSIDE / 2, confidence, count) or (untested, untested)
        spreads.append(Spread(*map(max, ends, spreads[-1])))  # intervals widen as less is known
    return LabelModel(covariance, some_cells, y, noise, mean, scale, width, *spreads)


def weighted_noise(gram: Floats, noise: Floats, y: Floats) -> Floats:
    """The noise, larger for cells that all others contradict (Huber's weights)."""
    error, variance = Posterior(gram, noise, y).leave_one_out()
    return np.asarray(noise * np.maximum(1.0, np.abs(error) / np.sqrt(variance) / OUTLIER) ** 2)


def _gpu(task: Task) -> str:
    return task.gpu


def _generation(task: Task) -> str:
    return generation_of(task.gpu)


def as_new(features: Features, runs: Runs, tasks: Sequence[Task], kind: Callable[[Task], str]) -> Inputs:
    """Each task as described before any GPU of its kind (model, generation) was measured: the lines use the
    other kinds only.

    `runs`: one per cell, those of which the lines are made. With one kind the lines have no data.
    """
    groups = blocks([kind(task) for task in tasks])
    parts = []
    for rows in groups:
        others = np.array([kind(task) != kind(tasks[rows[0]]) for task in runs.tasks])
        lines, _ = memory_lines(runs.pick(others))
        parts.append(replace(features, lines=lines).of([tasks[row] for row in rows]))
    order = np.argsort(np.concatenate(groups))
    columns = (np.concatenate([getattr(part, name) for part in parts])[order] for name in Inputs.__slots__)
    return Inputs(*columns)


def grouped(names: Sequence[Hashable]) -> tuple[Indexes, Indexes]:
    """Per different name the first row that has it, in their order,
    and for each row the number of its name."""
    found: dict[Hashable, int] = {}
    first = []
    number = np.empty(len(names), dtype=np.intp)
    for row, name in enumerate(names):
        if name not in found:
            first.append(row)
        number[row] = found.setdefault(name, len(found))
    return np.array(first, dtype=np.intp), number


def blocks(names: Sequence[Hashable]) -> list[Indexes]:
    """Rows with the same name, in the order of their first row."""
    _, number = grouped(names)
    order = np.argsort(number, kind="stable")
    return np.split(order, np.cumsum(np.bincount(number))[:-1])


def cells(tasks: Sequence[Task]) -> tuple[Indexes, Indexes]:
    """`grouped` by all that is known of a job beforehand."""
    return grouped(
        [
            (
                task.gpu,
                task.gpus,
                task.model,
                half_precision(task.precision),
                None if math.isnan(task.batch_size) else task.batch_size,
                card_mib(task),
            )
            for task in tasks
        ]
    )


def aggregated_by_owner(runs: Runs, first: Indexes, cell: Indexes) -> Runs:
    """One run per cell (see `cells`), with the memory of `merged`; NaN where no owner measured it."""
    memory = runs.labels.get(MEMORY, np.full(len(runs), np.nan))
    together = np.full(len(first), np.nan)
    rows = np.flatnonzero(np.isfinite(memory))
    if rows.size:
        measured, number = np.unique(cell[rows], return_inverse=True)
        together[measured], _ = merged(runs.pick(rows), memory[rows], number, len(measured))
    return Runs(tuple(runs.tasks[row] for row in first), {MEMORY: together})


def limited_per_owner(runs: Runs, seed: int) -> Runs:
    """The training set, limited so that no owner alone measured more cells than all others together.

    Cells to drop are chosen by `seed`; CELLS_OF_ONE of them stay in any case, and all cells that a second
    owner measured.
    """
    first, cell = cells(runs.tasks)
    owners_of: list[set[str]] = [set() for _ in first]
    for row, task in enumerate(runs.tasks):
        owners_of[cell[row]].add(task.owner)
    alone: dict[str, list[int]] = {}
    for number, owners in enumerate(owners_of):
        if len(owners) == 1:
            alone.setdefault(owners.pop(), []).append(number)
    stays, generator = np.ones(len(first), dtype=np.bool_), np.random.default_rng(seed)
    for _, his in sorted(alone.items()):
        limit = max(len(first) - len(his), CELLS_OF_ONE)
        if len(his) > limit and len({task.owner for task in runs.tasks}) > 1:
            stays[generator.choice(his, len(his) - limit, replace=False)] = False
    return runs if stays.all() else runs.pick(stays[cell])


def merged(runs: Runs, y: Floats, cell: Indexes, count: int) -> tuple[Floats, Floats]:
    """One value per cell and its weight in measurements: the median over owners of each owner's mean.

    So one owner, however many runs are sent, moves a cell that two others measured no further than between
    those two.
    """
    owners, owner_of = np.unique([task.owner for task in runs.tasks], return_inverse=True)
    pairs, pair_of, size = np.unique(cell * len(owners) + owner_of, return_inverse=True, return_counts=True)
    mean = np.bincount(pair_of, y) / size
    cell_of_pair = pairs // len(owners)
    order = np.lexsort((mean, cell_of_pair))
    starts = np.searchsorted(cell_of_pair[order], np.arange(count))
    ends = np.searchsorted(cell_of_pair[order], np.arange(count), side="right")
    low, high = mean[order][(starts + ends - 1) // 2], mean[order][(starts + ends) // 2]
    repeats = np.bincount(cell_of_pair, np.minimum(size, REPEATS))
    return (low + high) / 2, np.minimum(repeats, REPEATS).astype(np.float64)


def widths(scores: Floats, workload: Indexes, count: int, groups: Sequence[Indexes]) -> tuple[Floats, Floats]:
    """How much wider than the average each workload's errors are, about 1: shape (count,), and per run, shape
    (runs,).

    Mean absolute errors, shrunk to the average: some workloads wait for their input in ways that no column
    shows. A run's own group is left out of its figure, since otherwise the calibration would use the run that
    it tests.
    """
    size = np.abs(scores)
    average = max(float(size.mean()), MIN_SPREAD)
    total, runs = np.bincount(workload, size, count), np.bincount(workload, minlength=count)
    own = np.empty(len(scores))
    for rows in groups:
        work = workload[rows[0]]
        others = total[work] - size[rows].sum()
        own[rows] = (others + SHRINK_SCORES * average) / (runs[work] - len(rows) + SHRINK_SCORES) / average
    return (total + SHRINK_SCORES * average) / (runs + SHRINK_SCORES) / average, own


def spread_of(scores: Floats, cells: int, fitted: int) -> Spread:
    """Ends beyond which 5 % of the left-out runs fell, on either side; never inside the mean.

    Source: cross-conformal prediction with normalised scores; its level is (n + 1) / n · 0.95, since one more
    run is to come. n counts cells, not runs: repeats of one cell add nothing. Departure: leaving a cell out
    does not unlearn the `fitted` numbers that it helped to choose, so the ends are widened as for a variance,
    by √(n / (n − fitted)).
    """
    if cells < MIN_SCORES:
        return Spread(UNTESTED, UNTESTED)
    level = min((cells + 1) / cells * (1 - OUTSIDE / 2), 1.0)
    wider = math.sqrt(cells / max(cells - fitted, cells / MAX_WIDENED))
    low, high = (float(np.quantile(side, level, method="higher")) * wider for side in (-scores, scores))
    return Spread(max(low, 0.0), max(high, 0.0))


def within(low: Floats, high: Floats, truth: Floats) -> Mask:
    """Which runs lie in their interval, its ends included. Shape (runs,)."""
    return (low <= truth) & (truth <= high)
