"""How well models of step times do on cells that they were not shown."""

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from sklearn.ensemble import RandomForestRegressor

from penstock_services.estimator.core.learning.gaussian_process import Floats, Integers
from penstock_services.estimator.core.records.placements import MAX_LOCAL_BATCH, Cell, Placement, Table
from penstock_services.estimator.core.step_time.fit import MAX_CELLS, fit, reference_batch
from penstock_services.estimator.core.step_time.prior import Prior
from penstock_services.estimator.core.step_time.profile_plan import MAX_CANDIDATES, profile_plan
from tests.papers.estimator.models.genie import MAX_RUNS, Run, Task, fit_genie, predict_genie

LEVEL = 0.9  # of the intervals
PROBES = 3  # cells that a cluster measures at once: the plan is asked again after so many
TREES = 100
SPLITS = ("cells", "placements")
GENIES_WIDTHS = (2, 3, 4)
"""N and G of GENIE's light profile: nodes of one GPU, GPUs of one node; beside them batches on one GPU."""


class Predicted(NamedTuple):
    """Of cells, shape (cells,): ln of the step in seconds and half the width of its 90 % interval.

    `log_s` is NaN where a model's form has no place for the cell, inf where it says that nothing moves;
    `half` is NaN for a model without intervals.
    """

    log_s: Floats
    half: Floats


class Judged(NamedTuple):
    """Of |predicted / true − 1| over cells that were not shown."""

    median: float
    p95: float
    coverage: float
    """Share of cells inside their 90 % interval; NaN for a model that gives none."""
    cells: int
    """Of which the model said anything."""


class Errors(NamedTuple):
    """Cell by cell, those that the model has no place for left out. `inside`: 0 or 1, NaN without
    interval."""

    relative: Floats
    inside: Floats


Speaks = Callable[[Sequence[Cell]], Predicted]
Learner = Callable[[Table, Prior, float, np.random.Generator], Speaks]
"""From (cells measured, what other models teach, reference batch, chance)."""


def _ours(measured: Table, prior: Prior, reference: float, rng: np.random.Generator) -> Speaks:
    """Of at most MAX_CELLS of the cells measured."""
    some = np.sort(rng.permutation(len(measured.cells))[:MAX_CELLS])
    model = fit(part(measured, some), prior, reference)

    def speak(cells: Sequence[Cell]) -> Predicted:
        found = model.steps(list(cells))
        return Predicted(found.log_s, model.factor(LEVEL) * found.spread)

    return speak


def _forest(measured: Table, _: Prior, __: float, rng: np.random.Generator) -> Speaks:
    """Nodes, GPUs and local batch, as they are: what a forest reaches without any physics."""
    forest = RandomForestRegressor(TREES, random_state=int(rng.integers(1 << 31)), n_jobs=1)
    forest.fit(_columns(measured.cells), measured.log_s)

    def speak(cells: Sequence[Cell]) -> Predicted:
        return Predicted(forest.predict(_columns(cells)), np.full(len(cells), math.nan))

    return speak


def _columns(cells: Sequence[Cell]) -> Floats:
    return np.array([(len(shape), sum(shape), batch) for shape, batch in cells], dtype=np.float64)


def _genie(measured: Table, _: Prior, __: float, ___: np.random.Generator) -> Speaks:
    """Its form knows ⟨n, g⟩ alone, and nothing without a run on one GPU."""
    runs = []
    for cell, log_s in zip(measured.cells, measured.log_s.tolist(), strict=True):
        if _even(cell.placement):
            batch = cell.local_batch * sum(cell.placement)
            if batch <= MAX_LOCAL_BATCH:
                runs.append(Run(batch, len(cell.placement), cell.placement[0], batch / math.exp(log_s)))
    runs = runs[:MAX_RUNS]  # cells on the fewest nodes come first
    known = any(run.nodes == run.gpus_per_node == 1 for run in runs)
    model = fit_genie(runs) if known else None

    def speak(cells: Sequence[Cell]) -> Predicted:
        found = np.full((2, len(cells)), math.nan)
        for place, (shape, batch) in enumerate(cells):
            if model is not None and _even(shape):
                predicted = predict_genie(
                    model, Task(batch * sum(shape), 1), len(shape), shape[0], level=LEVEL
                )
                found[0, place] = math.log(predicted.step_s)
                if predicted.low_throughput > 0:
                    found[1, place] = math.log(predicted.high_throughput / predicted.low_throughput) / 2
        return Predicted(found[0], found[1])

    return speak


def _even(placement: Placement) -> bool:
    return len(set(placement)) == 1


MODELS: Mapping[str, Learner] = MappingProxyType({"penstock": _ours, "forest": _forest, "genie": _genie})


def light(whole: Table, prior: Prior, points: int, rng: np.random.Generator) -> Table:
    """So many cells as our own plan asks for, PROBES at a time; it knows of `whole` only which cells there
    are.

    Fewer where it would rather measure some twice.
    """
    candidates = np.sort(rng.permutation(len(whole.cells))[:MAX_CANDIDATES]).tolist()
    cells, reference = [whole.cells[index] for index in candidates], reference_batch(whole)
    places = {cell: index for index, cell in zip(candidates, cells, strict=True)}
    done: list[int] = []
    while len(done) < points:
        model = fit(part(whole, np.array(sorted(done), dtype=np.int64)), prior, reference)
        most = min(PROBES, points - len(done))
        plan = profile_plan(model, cells, [1.0] * len(cells), most)
        new = dict.fromkeys(places[probe.cell] for probe in plan).keys() - set(done)
        if not new:
            break
        done += sorted(new)
    return part(whole, np.array(sorted(done), dtype=np.int64))


def genies_light(whole: Table, points: int) -> Table:
    """Of GENIE's B + N + G runs those that `whole` has: batches on one GPU, then more nodes or GPUs at the
    middle one.

    Source: GENIE §II-B. The middle is that of the global batch, as near as it was measured.
    """
    alone = sorted(cell.local_batch for cell in whole.cells if cell.placement == (1,))
    if not alone:
        return part(whole, np.zeros(0, dtype=np.int64))
    batches = min(max(1, points - 2 * len(GENIES_WIDTHS)), len(alone))
    apart = (len(alone) - 1) / max(1, batches - 1)
    chosen = {Cell((1,), alone[round(index * apart)]) for index in range(batches)}
    middle = alone[len(alone) // 2]
    for shape in (*((1,) * count for count in GENIES_WIDTHS), *((count,) for count in GENIES_WIDTHS)):
        there = [cell for cell in whole.cells if cell.placement == shape]
        if there:
            wanted = math.log(middle / sum(shape))
            chosen.add(min(there, key=lambda cell: abs(math.log(cell.local_batch) - wanted)))
    return part(whole, np.array([i for i, cell in enumerate(whole.cells) if cell in chosen], dtype=np.int64))


def share_of(whole: Table, share: float, split: str, rng: np.random.Generator) -> Table:
    """That share of the cells, or of the placements at all batches (`split`); at least one."""
    if split == "cells":
        stored = rng.permutation(len(whole.cells))[: max(1, round(share * len(whole.cells)))]
    else:
        shapes = sorted({cell.placement for cell in whole.cells})
        drawn = rng.permutation(len(shapes))[: max(1, round(share * len(shapes)))]
        some = {shapes[index] for index in drawn}
        stored = np.array([i for i, cell in enumerate(whole.cells) if cell.placement in some])
    return part(whole, np.sort(stored))


def part(whole: Table, stored: Integers) -> Table:
    """Those cells."""
    return Table(tuple(whole.cells[index] for index in stored), whole.log_s[stored], whole.runs[stored])


def without(whole: Table, shown: Table) -> Table:
    """The cells of `whole` that `shown` does not have."""
    known = set(shown.cells)
    return part(whole, np.array([i for i, c in enumerate(whole.cells) if c not in known], dtype=np.int64))


def errors(answered: Predicted, truth: Table) -> Errors:
    """`said` of the very cells of `truth`."""
    spoken = ~np.isnan(answered.log_s)
    off, half = (answered.log_s - truth.log_s)[spoken], answered.half[spoken]
    with np.errstate(over="ignore"):
        return Errors(np.abs(np.expm1(off)), np.where(np.isnan(half), math.nan, np.abs(off) <= half))


def noise(whole: Table) -> Floats:
    """|relative| by which single measurements of one cell lie off its mean, without any model: shape
    (triples,).

    Of each placement every batch between two others: how far its step is from the line through theirs
    (computing grows by the sample), divided by what independent noise of the same size in each of the three
    would give. What bends the true curve counts as noise, so the figure is rather too large.
    """
    found = []
    rows: dict[Placement, list[tuple[float, float]]] = {}
    for cell, log_s in zip(whole.cells, whole.log_s.tolist(), strict=True):
        rows.setdefault(cell.placement, []).append((cell.local_batch, math.exp(log_s)))
    for row in rows.values():
        row.sort()
        for (left, low), (here, middle), (right, high) in zip(row, row[1:], row[2:], strict=False):
            share = (here - left) / (right - left)
            parts = (1 - share) * low, share * high
            line = sum(parts)
            weight = 1 + (parts[0] / line) ** 2 + (parts[1] / line) ** 2
            found.append(math.log(middle / line) / math.sqrt(weight))
    return np.asarray(np.abs(np.expm1(np.array(found, dtype=np.float64))))


def judged(parts: Sequence[Errors]) -> Judged:
    """All of them as one."""
    relative = np.concatenate([one.relative for one in parts]) if parts else np.zeros(0)
    inside = np.concatenate([one.inside for one in parts]) if parts else np.zeros(0)
    bounded = inside[np.isfinite(inside)]
    return Judged(
        median=_quantile(relative, 0.5),
        p95=_quantile(relative, 0.95),
        coverage=float(bounded.mean()) if bounded.size else math.nan,
        cells=len(relative),
    )


def _quantile(values: Floats, level: float) -> float:
    """The value that at least so many do not exceed: inf where too many are."""
    if not values.size:
        return math.nan
    return float(np.quantile(values, level, method="inverted_cdf"))
