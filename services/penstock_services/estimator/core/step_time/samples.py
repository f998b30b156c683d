"""From finished runs to what the step model is trained on: which runs teach, and how much one owner may.

A network's step times are kept twice: per owner, and shared by all owners. One owner's runs move what others are told
only within bounds: a shared cell is the median over owners; where two disagree by more than `MOST_APART` there is none; a
cell that one owner alone measured counts while it is within `MOST_BEYOND` of what is usual among owners; and of everything
that is learned across networks (the prior, curves, spreads) each owner teaches a bounded part.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import exp, isfinite, log
from statistics import median
from typing import NamedTuple, TypeVar

from penstock_services.estimator.core.eta.curves import Curve, curve
from penstock_services.estimator.core.runs import FinishedRun
from penstock_services.estimator.core.step_time.durations import OWNERS_APART
from penstock_services.estimator.core.step_time.placements import (
    Cell,
    Measurement,
    Table,
    ring,
    table,
    wrong,
)

SHARED = "*"  # stands for all owners in a table's name; no owner can be called so
MAX_SHARED, MAX_OWN = 120, 80  # tables, the most recently used
SHARED_CELLS, OWN_CELLS = 4_000, 2_000  # in all; a fit costs cells³, and a training shall end in seconds
MAX_TABLE_CELLS, LEAST_TABLE_CELLS = 200, 40  # of a shared one, the newest; as many as all have room for
MAX_OWN_TABLE_CELLS = 50  # an owner's own say how his runs differ; fewer than have their own scales
APART, APART_WEIGHT = (0.05, 0.5), 10.0
OF_ONE = 3  # a third of the tables, and of their cells, may be such to which one owner alone contributes
FEWEST_SHARING = 2  # owners, for a shared cell to need no bound
MOST_APART = 4.0  # times: beyond, two owners do not measure the same thing
MOST_BEYOND = (
    8.0  # times the usual: in none of Pollux' six networks is a cell further than 4.6 from the median
)
MAX_TEACHING = 8  # tables that the prior is learned from; most of a training's time
TEACHING_OF_ONE = 3  # of them with one and the same owner alone
MAX_CURVES = 300
MAX_JOBS = 1_000  # whose totals teach how runs scatter
MAX_WINDOWED = 300
MOST_OF_ONE = 32  # curves, jobs and runs of one owner among these

Item = TypeVar("Item")


class Sample(NamedTuple):
    """One run's step time where it says for which network, GPU and placement."""

    seq: int
    owner: str
    network: str
    gpu: str
    cell: Cell
    step_s: float
    gpus: int
    batch: float
    """Of the whole job."""


class Lessons(NamedTuple):
    """As `durations.train` takes them."""

    tables: Mapping[str, Table]
    teaching: frozenset[str]
    curves: Sequence[tuple[str, Curve]]
    totals: Sequence[Sequence[float]]
    windows: Sequence[Sequence[float]]
    apart: float


def name_of(owner: str, network: str, gpu: str) -> str:
    """Identifiers hold no spaces."""
    return f"{owner} {network} {gpu}"


def cell_of(placement: tuple[int, ...], batch_size: float, workers: int = 1) -> Cell:
    """`batch_size`: samples per iteration and worker, as job files have it; all GPUs share those of all workers evenly."""
    return Cell(ring(placement), batch_size * workers / sum(placement))


def sample_of(run: FinishedRun) -> Sample | None:
    """None where something is missing or cannot be true."""
    about, steps, step_s = run.about, run.steps, run.measured.step_ms / 1_000.0
    if run.set_aside or steps is None or not steps.placement or not isfinite(step_s):
        return None
    if about.model is None or about.batch_size is None or not run.given.card.model:
        return None
    cell = cell_of(steps.placement, about.batch_size, about.workers)
    if wrong(Measurement(cell, step_s)):
        return None
    gpus = sum(steps.placement)
    return Sample(
        run.seq, about.owner, about.model, run.given.card.model, cell, step_s, gpus, cell.local_batch * gpus
    )


def samples_of(runs: Sequence[FinishedRun]) -> list[Sample]:
    return [sample for run in runs if (sample := sample_of(run)) is not None]


def lessons(runs: Sequence[FinishedRun]) -> Lessons:
    """Runs in the order in which they ended; the newest count where there are too many."""
    samples = samples_of(runs)
    tables = tables_of(samples)
    return Lessons(
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
    each = min(max(SHARED_CELLS // max(1, len(shared)), LEAST_TABLE_CELLS), MAX_TABLE_CELLS)
    kept = _with_room(shared, Room(MAX_SHARED, SHARED_CELLS, each))
    return kept | _with_room(own, Room(MAX_OWN, OWN_CELLS, MAX_OWN_TABLE_CELLS))


class Room(NamedTuple):
    """How many tables, cells in all of them, and cells in each."""

    tables: int
    cells: int
    each: int


def _with_room(samples: Mapping[str, Sequence[Sample]], room: Room) -> dict[str, Table]:
    """Tables of these samples, newest first each; the most recently used tables have room first."""
    kept: dict[str, Table] = {}
    left = room.cells
    tables: Counter[str] = Counter()
    cells: Counter[str] = Counter()
    for name in sorted(samples, key=lambda name: (-samples[name][0].seq, name)):
        if left <= 0 or len(kept) >= room.tables:
            break
        owners = {sample.owner for sample in samples[name]}
        sole = owners.pop() if len(owners) == 1 else SHARED
        if sole != SHARED and tables[sole] >= room.tables // OF_ONE:
            continue
        most = left if sole == SHARED else min(left, room.cells // OF_ONE - cells[sole])
        found = table(shared_cells(samples[name])[: max(0, min(most, room.each))])[0]
        if found.cells:
            kept[name] = found
            left -= len(found.cells)
            tables[sole] += 1
            cells[sole] += len(found.cells)
    return kept


def shared_cells(samples: Sequence[Sample]) -> list[Measurement]:
    """Of each cell the median over its runs, then over owners, those measured last first; see the top."""
    found: dict[Cell, dict[str, list[float]]] = {}
    for sample in samples:
        found.setdefault(sample.cell, {}).setdefault(sample.owner, []).append(log(sample.step_s))
    told = {cell: {owner: median(logs) for owner, logs in owners.items()} for cell, owners in found.items()}
    usual, alone = _usual(told), len({sample.owner for sample in samples}) == 1
    cells = []
    for cell, owners in told.items():
        middle = median(owners.values())
        if len(owners) < FEWEST_SHARING:
            off, most = abs(middle - usual), MOST_BEYOND
        else:
            off, most = min(abs(value - middle) for value in owners.values()), MOST_APART**0.5
        if alone or off <= log(most):
            cells.append(Measurement(cell, exp(middle)))
    return cells


def _usual(told: Mapping[Cell, Mapping[str, float]]) -> float:
    """Median over owners of the median of what each says, ln of seconds."""
    by_owner: dict[str, list[float]] = {}
    for owners in told.values():
        for owner, value in owners.items():
            by_owner.setdefault(owner, []).append(value)
    return median(median(values) for values in by_owner.values())


def owners_apart(samples: Sequence[Sample]) -> float:
    """Standard deviation of ln step between owners who measured the same cell, within APART; the belief set by hand weighs
    as much as APART_WEIGHT such cells."""
    told: dict[tuple[str, str, Cell], dict[str, list[float]]] = {}
    for sample in samples:
        cell = told.setdefault((sample.network, sample.gpu, sample.cell), {})
        cell.setdefault(sample.owner, []).append(log(sample.step_s))
    squares, free = APART_WEIGHT * OWNERS_APART**2, APART_WEIGHT
    for owners in told.values():
        logs = [median(values) for values in owners.values()]
        if len(logs) >= FEWEST_SHARING:
            middle = median(logs)
            off = [min(abs(value - middle), log(MOST_APART) / 2) for value in logs]
            squares += sum(value**2 for value in off)
            free += len(logs) - 1
    return float(min(max((squares / free) ** 0.5, APART[0]), APART[1]))


def teaching_of(tables: Mapping[str, Table], samples: Sequence[Sample]) -> frozenset[str]:
    """Names of the shared tables that teach the prior: those with most cells, few of any one owner alone."""
    owners: dict[str, set[str]] = {}
    for sample in samples:
        owners.setdefault(name_of(SHARED, sample.network, sample.gpu), set()).add(sample.owner)
    alone: Counter[str] = Counter()
    chosen: list[str] = []
    for name in sorted(owners, key=lambda name: (-len(tables[name].cells) if name in tables else 0, name)):
        if name not in tables or len(chosen) >= MAX_TEACHING:
            continue
        sole = next(iter(owners[name])) if len(owners[name]) == 1 else None
        if sole is not None:
            alone[sole] += 1
            if alone[sole] > TEACHING_OF_ONE:
                continue
        chosen.append(name)
    return frozenset(chosen)


def fair(items: Iterable[tuple[str, Item]], most: int) -> list[Item]:
    """The first `most` of (owner, item), at most MOST_OF_ONE of each owner."""
    counts: Counter[str] = Counter()
    chosen: list[Item] = []
    for owner, item in items:
        counts[owner] += 1
        if counts[owner] <= MOST_OF_ONE:
            chosen.append(item)
            if len(chosen) == most:
                break
    return chosen


def kind_of(network: str | None) -> str:
    """What makes loss curves alike."""
    return network or ""


def _curves(runs: Sequence[FinishedRun]) -> list[tuple[str, Curve]]:
    told = [
        (run.about.owner, (kind_of(run.about.model), curve(*zip(*run.steps.curve, strict=True))))
        for run in reversed(runs)
        if run.steps is not None and run.steps.curve
    ]
    return fair(told, MAX_CURVES)


def _totals(runs: Sequence[FinishedRun]) -> list[list[float]]:
    by_key: dict[bytes, tuple[str, list[float]]] = {}
    for run in reversed(runs):
        if run.measured.iterations > 0:
            by_key.setdefault(run.about.key, (run.about.owner, []))[1].append(run.measured.iterations)
    return fair(by_key.values(), MAX_JOBS)


def _windows(runs: Sequence[FinishedRun]) -> list[tuple[float, ...]]:
    told = [
        (run.about.owner, tuple(window / 1_000.0 for window in run.steps.windows_ms))
        for run in reversed(runs)
        if run.steps is not None and len(run.steps.windows_ms) > 1
    ]
    return fair(told, MAX_WINDOWED)
