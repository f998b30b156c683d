"""Training set of step times: which finished runs are used, and how much of it may come from one owner.

A network's step times are stored twice: per owner, and shared by all owners. One owner's runs change other
owners' estimates only within bounds (`limits`): a shared cell is the median over owners; where two disagree
too far there is none; a cell that one owner alone measured counts while it is near the usual value among
owners; and of everything that is learned across networks (the prior, curves, spreads) each owner supplies a
bounded part.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from math import exp, isfinite, log
from statistics import median
from typing import NamedTuple, TypeVar

from penstock_services.estimator.core.eta.curves import Curve, curve
from penstock_services.estimator.core.learning import limits
from penstock_services.estimator.core.records.placements import (
    Cell,
    Measurement,
    Table,
    ring,
    table,
    why_rejected,
)
from penstock_services.estimator.core.records.runs import FinishedRun

SHARED = "*"  # stands for all owners in a table's name; no owner can be called so
OWNERS_APART = 0.3  # by hand, while few cells have two owners: versions, precisions, input sizes differ
APART, APART_WEIGHT = (
    (0.05, 0.5),
    10.0,
)  # bounds of the learned value, and weight of the one set by hand, in cells


class Quota(NamedTuple):
    """Maximum number of tables, of cells in all of them, and of cells in each. A fit costs cells³, and a
    training shall end in seconds."""

    tables: int
    cells: int
    each: int


SHARED_QUOTA = Quota(120, 4_000, 200)  # the most recently used tables; of each the newest cells
MIN_SHARED_EACH = 40  # cells that a shared table may have, however many tables there are
OWN_QUOTA = Quota(80, 2_000, 50)  # an owner's own tables; too few cells for scales of their own

Item = TypeVar("Item")


class Sample(NamedTuple):
    """One run's step time with its network, GPU and placement."""

    seq: int
    owner: str
    network: str
    gpu: str
    cell: Cell
    step_s: float
    gpus: int
    batch: float
    """Of the whole job."""


class TrainingSet(NamedTuple):
    """Data of the learned models. Step times by name of table."""

    tables: Mapping[str, Table]
    teaching: Collection[str]
    """Names of the tables from which the prior is learned."""
    curves: Sequence[tuple[str, Curve]]
    """(kind, loss curve) of finished runs."""
    totals: Sequence[tuple[str, Sequence[float]]]
    """(kind, iterations of finished runs) per job."""
    windows: Sequence[Sequence[float]]
    """Mean step per window, one sequence per finished run."""
    apart: float = OWNERS_APART
    """Standard deviation of ln step between owners of one network in the same cell."""


def name_of(owner: str, network: str, gpu: str) -> str:
    """Identifiers hold no spaces."""
    return f"{owner} {network} {gpu}"


def cell_of(placement: tuple[int, ...], batch_size: float, workers: int = 1) -> Cell:
    """`batch_size`: samples per iteration and worker, as job files have it; all GPUs share those of all
    workers evenly."""
    return Cell(ring(placement), batch_size * workers / sum(placement))


def sample_of(run: FinishedRun) -> Sample | None:
    """None where a value is missing or implausible."""
    info, steps, step_s = run.info, run.steps, run.measured.step_ms / 1_000.0
    if run.rejected or steps is None or not steps.placement or not isfinite(step_s):
        return None
    if info.model is None or info.batch_size is None or not run.allocation.card.model:
        return None
    cell = cell_of(steps.placement, info.batch_size, info.workers)
    if why_rejected(Measurement(cell, step_s)):
        return None
    gpus = sum(steps.placement)
    return Sample(
        run.seq,
        info.owner,
        info.model,
        run.allocation.card.model,
        cell,
        step_s,
        gpus,
        cell.local_batch * gpus,
    )


def samples_of(runs: Sequence[FinishedRun]) -> list[Sample]:
    return [sample for run in runs if (sample := sample_of(run)) is not None]


def training_set(runs: Sequence[FinishedRun]) -> TrainingSet:
    """Runs in the order in which they ended; the newest count where there are too many."""
    samples = samples_of(runs)
    tables = tables_of(samples)
    return TrainingSet(
        tables,
        teaching_of(tables, samples),
        _curves(runs),
        _totals(runs),
        _windows(runs),
        owners_apart(samples),
    )


def tables_of(samples: Sequence[Sample]) -> dict[str, Table]:
    """By name."""
    own: dict[str, list[Sample]] = {}
    shared: dict[str, list[Sample]] = {}
    for sample in reversed(samples):
        own.setdefault(name_of(sample.owner, sample.network, sample.gpu), []).append(sample)
        shared.setdefault(name_of(SHARED, sample.network, sample.gpu), []).append(sample)
    each = min(max(SHARED_QUOTA.cells // max(1, len(shared)), MIN_SHARED_EACH), SHARED_QUOTA.each)
    return _within_quota(shared, SHARED_QUOTA._replace(each=each)) | _within_quota(own, OWN_QUOTA)


def _within_quota(samples: Mapping[str, Sequence[Sample]], quota: Quota) -> dict[str, Table]:
    """Tables of these samples, newest first each; the most recently used tables are filled first."""
    tables_by_name: dict[str, Table] = {}
    left = quota.cells
    tables: Counter[str] = Counter()
    cells: Counter[str] = Counter()
    for name in sorted(samples, key=lambda name: (-samples[name][0].seq, name)):
        if left <= 0 or len(tables_by_name) >= quota.tables:
            break
        owners = {sample.owner for sample in samples[name]}
        sole = owners.pop() if len(owners) == 1 else SHARED
        if sole != SHARED and tables[sole] >= quota.tables // limits.TABLES_OF_ONE:
            continue
        most = left if sole == SHARED else min(left, quota.cells // limits.TABLES_OF_ONE - cells[sole])
        found = table(shared_cells(samples[name])[: max(0, min(most, quota.each))])
        if found.cells:
            tables_by_name[name] = found
            left -= len(found.cells)
            tables[sole] += 1
            cells[sole] += len(found.cells)
    return tables_by_name


def shared_cells(samples: Sequence[Sample]) -> list[Measurement]:
    """Of each cell the median over its runs, then over owners, those measured last first;
    see the module docstring."""
    found: dict[Cell, dict[str, list[float]]] = {}
    for sample in samples:
        found.setdefault(sample.cell, {}).setdefault(sample.owner, []).append(log(sample.step_s))
    logs_of = {
        cell: {owner: median(logs) for owner, logs in owners.items()} for cell, owners in found.items()
    }
    usual, alone = _usual(logs_of), len({sample.owner for sample in samples}) == 1
    cells = []
    for cell, owners in logs_of.items():
        middle = median(owners.values())
        if len(owners) < limits.SHARING_OWNERS:
            off, most = abs(middle - usual), limits.BEYOND_USUAL
        else:
            off, most = min(abs(value - middle) for value in owners.values()), limits.OWNERS_DISAGREE**0.5
        if alone or off <= log(most):
            cells.append(Measurement(cell, exp(middle)))
    return cells


def _usual(logs_of: Mapping[Cell, Mapping[str, float]]) -> float:
    """Median over owners of the median of each owner's cells, ln of seconds."""
    by_owner: dict[str, list[float]] = {}
    for owners in logs_of.values():
        for owner, value in owners.items():
            by_owner.setdefault(owner, []).append(value)
    return median(median(values) for values in by_owner.values())


def owners_apart(samples: Sequence[Sample]) -> float:
    """Standard deviation of ln step between owners that measured the same cell, within APART; the value set
    by hand weighs as much as APART_WEIGHT such cells."""
    logs_of: dict[tuple[str, str, Cell], dict[str, list[float]]] = {}
    for sample in samples:
        cell = logs_of.setdefault((sample.network, sample.gpu, sample.cell), {})
        cell.setdefault(sample.owner, []).append(log(sample.step_s))
    squares, free = APART_WEIGHT * OWNERS_APART**2, APART_WEIGHT
    for owners in logs_of.values():
        logs = [median(values) for values in owners.values()]
        if len(logs) >= limits.SHARING_OWNERS:
            middle = median(logs)
            off = [min(abs(value - middle), log(limits.OWNERS_DISAGREE) / 2) for value in logs]
            squares += sum(value**2 for value in off)
            free += len(logs) - 1
    return float(min(max((squares / free) ** 0.5, APART[0]), APART[1]))


def teaching_of(tables: Mapping[str, Table], samples: Sequence[Sample]) -> frozenset[str]:
    """Names of the shared tables from which the prior is learned: those with most cells,
    few of any one owner alone."""
    owners: dict[str, set[str]] = {}
    for sample in samples:
        owners.setdefault(name_of(SHARED, sample.network, sample.gpu), set()).add(sample.owner)
    alone: Counter[str] = Counter()
    chosen: list[str] = []
    for name in sorted(owners, key=lambda name: (-len(tables[name].cells) if name in tables else 0, name)):
        if name not in tables or len(chosen) >= limits.TEACHING_TABLES:
            continue
        sole = next(iter(owners[name])) if len(owners[name]) == 1 else None
        if sole is not None:
            alone[sole] += 1
            if alone[sole] > limits.TEACHING_OF_ONE:
                continue
        chosen.append(name)
    return frozenset(chosen)


def limited_per_owner(items: Iterable[tuple[str, Item]], at_most: int) -> list[Item]:
    """The first `at_most` of (owner, item), at most limits.TAUGHT_BY_ONE of each owner."""
    counts: Counter[str] = Counter()
    chosen: list[Item] = []
    for owner, item in items:
        counts[owner] += 1
        if counts[owner] <= limits.TAUGHT_BY_ONE:
            chosen.append(item)
            if len(chosen) == at_most:
                break
    return chosen


def kind_of(network: str | None) -> str:
    """Group of similar loss curves."""
    return network or ""


def _curves(runs: Sequence[FinishedRun]) -> list[tuple[str, Curve]]:
    logs_of = [
        (run.info.owner, (kind_of(run.info.model), curve(*zip(*run.steps.curve, strict=True))))
        for run in reversed(runs)
        if run.steps is not None and run.steps.curve
    ]
    return limited_per_owner(logs_of, limits.CURVES)


def _totals(runs: Sequence[FinishedRun]) -> list[tuple[str, list[float]]]:
    by_key: dict[bytes, tuple[str, tuple[str, list[float]]]] = {}
    for run in reversed(runs):
        if run.measured.iterations > 0:
            _, (_, totals) = by_key.setdefault(run.info.key, (run.info.owner, (kind_of(run.info.model), [])))
            totals.append(run.measured.iterations)
    return limited_per_owner(by_key.values(), limits.JOBS)


def _windows(runs: Sequence[FinishedRun]) -> list[tuple[float, ...]]:
    logs_of = [
        (run.info.owner, tuple(window / 1_000.0 for window in run.steps.windows_ms))
        for run in reversed(runs)
        if run.steps is not None and len(run.steps.windows_ms) > 1
    ]
    return limited_per_owner(logs_of, limits.WINDOWED)
