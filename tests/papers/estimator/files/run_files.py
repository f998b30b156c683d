"""Measured runs from a CSV file. Other files are refused; runs that cannot be believed are rejected."""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from penstock.runtime.files.csv_import import BadFile, Problem, Row, header_of, rows, text_of
from penstock_services.estimator.core.resource_model.measurements import (
    BANDWIDTH,
    LABELS,
    MEMORY,
    MIB_PER_GIB,
    THROUGHPUT,
    UTILISATION,
    UTILISATION_STD,
    Runs,
    Task,
    card_mib,
    runs_of,
)
from tests.papers.estimator.models.liquid import PHASES
from tests.papers.estimator.models.phases import FEWEST, MOST_PHASE_S, RESOURCES, Phased, phased_of

MAX_NAME = 120
NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,3})?")

COLUMNS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "gpu": ("gpu", "gpu_model"),
        "gpus": ("gpus", "num_gpu", "num_gpus"),
        "model": ("model", "workload"),
        "precision": ("precision",),
        "batch_size": ("batch_size", "batch_cfg"),
        "card_gib": ("gpu_mem_gib", "card_gib"),
        "parameter_servers": ("num_ps", "parameter_servers"),
        "workers": ("num_worker", "workers"),
        "batches": ("num_batches", "batches"),
        "owner": ("owner", "user"),
        MEMORY: (MEMORY, "gmem_max_mib"),
        UTILISATION: (UTILISATION, "util_mean"),
        UTILISATION_STD: (UTILISATION_STD, "util_std"),
        BANDWIDTH: (BANDWIDTH,),
        THROUGHPUT: (THROUGHPUT,),
        **{name: (name,) for name in (*PHASES, *RESOURCES)},
    }
)
"""What is read → the names that a column may have. Other columns are not looked at."""
REQUIRED = ("gpu", "gpus", "model")
NUMBERS = ("gpus", "batch_size", "card_gib", "parameter_servers", "workers", "batches")
MOST_GPUS = 100_000
MOST_BATCH = 1 << 30
MOST_VALUE = 1e15
MEASURED = (MEMORY, UTILISATION, UTILISATION_STD, BANDWIDTH, THROUGHPUT)
OF_PHASES = (*RESOURCES, *PHASES)
"""Phases in seconds, the training's of one iteration."""


class BadData(ValueError):
    """The file cannot be read as runs; the message has a line for each thing that is why_rejected."""


class Rejected(NamedTuple):
    """A run that is not learned from."""

    where: str
    """File and line; lines count from 1, the header included."""
    reason: str


@dataclass(frozen=True, slots=True)
class Read:
    """What a file holds."""

    runs: Runs
    rejected: tuple[Rejected, ...]
    phased: Phased | None = None
    """Those of the runs whose phases were measured; None: too few."""
    ignored: tuple[str, ...] = ()
    """Columns that were not looked at."""

    def reasons(self) -> Mapping[str, int]:
        """Reason → runs that it rejected, most first."""
        return dict(Counter(one.reason for one in self.rejected).most_common())


def read_runs(path: Path) -> Read:
    """A file, or all CSV files of a folder. Raises `BadData` for another table, or where no run can
    be believed."""
    files = sorted(path.glob("*.csv")) if path.is_dir() else [path]
    if not files:
        raise BadData(f"{path}: a folder without a CSV file")
    tasks: list[Task] = []
    measured: list[Mapping[str, float]] = []
    phases: list[Mapping[str, float]] = []
    rejected: list[Rejected] = []
    ignored: dict[str, None] = {}
    problems = []
    for file in files:
        try:
            ignored |= dict.fromkeys(_read_file(file, tasks, measured, phases, rejected))
        except BadFile as error:
            problems.append(str(error))
    if problems:
        raise BadData("\n".join(problems))
    phased = phased_of(
        tasks,
        [[row[name] for name in RESOURCES] for row in phases],
        [[row[name] for name in PHASES] for row in phases],
    )
    phased_enough = phased if len(phased.tasks) >= FEWEST else None
    read = Read(runs_of(tasks, measured), tuple(rejected), phased_enough, tuple(ignored))
    if not tasks:
        why = "; ".join(f"{count} × {reason}" for reason, count in read.reasons().items())
        raise BadData(f"{path}: no run can be learned from: {why or 'there is none below the header'}")
    return read


def _read_file(
    path: Path,
    tasks: list[Task],
    measured: list[Mapping[str, float]],
    phases: list[Mapping[str, float]],
    rejected: list[Rejected],
) -> Sequence[str]:
    """The columns that were not looked at. A line that is not a line of the table is rejected like a run that
    cannot be believed. Raises `BadFile`."""
    text = text_of(path)
    columns = _columns(path, header_of(path, text))
    found: list[tuple[int, str]] = []
    problems: list[Problem] = []
    for line, run in rows(text, columns, _run, problems):
        reason = run if isinstance(run, str) else why_rejected(run[0], run[1])
        if isinstance(run, str) or reason is not None:
            found.append((line, str(reason)))
        else:
            tasks.append(run[0])
            measured.append(run[1])
            phases.append(run[2])
    found += [(problem.line, problem.text) for problem in problems]
    rejected += [Rejected(f"{path.name}:{line}", reason) for line, reason in sorted(found)]
    return [name for name in columns if name not in COLUMNS]


def _columns(path: Path, names: Sequence[str]) -> Sequence[str]:
    """The columns by our own names. Raises `BadFile`."""
    known = {other: name for name, others in COLUMNS.items() for other in others}
    plain = [known.get(name, name) for name in names]
    problems = [
        f"column {name!r} stands in the header twice" for name in sorted(set(plain)) if plain.count(name) > 1
    ]
    problems += [f"no column {' or '.join(COLUMNS[name])}" for name in REQUIRED if name not in plain]
    if not set(plain) & set(MEASURED):
        problems.append(
            f"nothing measured: a column of {', '.join(COLUMNS[name][-1] for name in MEASURED)} is needed"
        )
    if problems:
        raise BadFile(str(path), [Problem(1, "", problem) for problem in problems])
    return plain


def _run(row: Row) -> tuple[Task, dict[str, float], dict[str, float]] | str:
    """The run of one line, or why there is none."""
    numbers: dict[str, float] = {}
    for name in (*NUMBERS, *MEASURED, *OF_PHASES):
        text = row.text(name)
        if text and not NUMBER.fullmatch(text):
            return f"{name} is not a number"
        numbers[name] = float(text) if text else math.nan
    for name in PHASES:
        if not (math.isnan(numbers[name]) or 0 <= numbers[name] <= MOST_PHASE_S):
            return f"{name} is out of all range"
    words = {name: row.text(name) for name in ("gpu", "model", "precision", "owner")}
    if any(len(word) > MAX_NAME for word in words.values()):
        return f"a name is longer than {MAX_NAME} characters"
    task = Task(
        model=words["model"],
        gpu=words["gpu"],
        gpus=numbers["gpus"],
        precision=words["precision"] or "FP32",
        batch_size=numbers["batch_size"],
        card_mib=numbers["card_gib"] * MIB_PER_GIB,
        parameter_servers=numbers["parameter_servers"],
        workers=numbers["workers"],
        batches=numbers["batches"],
        owner=words["owner"],
    )
    return (
        task,
        {name: numbers[name] for name in MEASURED},
        {name: numbers[name] for name in OF_PHASES},
    )


def why_rejected(task: Task, measured: Mapping[str, float]) -> str | None:
    """Why this run teaches nothing; None: it may be believed.

    One absurd value discredits the whole run: whatever mixed it up may have mixed up the others.
    """
    card = card_mib(task)
    if not task.model:
        return "the workload has no name"
    if not 1 <= task.gpus <= MOST_GPUS or task.gpus != int(task.gpus):
        return "the number of GPUs is not a whole number ≥ 1"
    if not math.isnan(task.batch_size) and not 0 < task.batch_size <= MOST_BATCH:
        return "the batch size is out of range"
    if math.isnan(card):
        return "the GPU is unknown and its memory is not given"
    if not 0 < card <= MOST_VALUE:
        return "the GPU's memory is not a number above 0"
    for name, value in measured.items():
        if math.isnan(value):
            continue
        if math.isinf(value) or value > MOST_VALUE:
            return f"{name} is out of all range"
        if value < 0:
            return f"{name} is negative"
    if all(math.isnan(measured.get(name, math.nan)) for name in LABELS):
        return "nothing was measured"
    if measured.get(UTILISATION, 0.0) > 100 or measured.get(UTILISATION_STD, 0.0) > 100:
        return "utilisation is above 100 %"
    if measured.get(MEMORY, 0.0) > card:
        return "more GPU memory than the card has"
    if measured.get(MEMORY, 1.0) == 0 or measured.get(THROUGHPUT, 1.0) == 0:
        return "it never used its GPU"
    return None
