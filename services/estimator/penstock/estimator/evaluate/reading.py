"""Measured runs from a CSV file. A file that is no table of runs is refused; a run that cannot be believed is set aside."""

import csv
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from penstock.estimator.core.learn.runs import (
    BANDWIDTH,
    MEMORY,
    MIB_PER_GIB,
    THROUGHPUT,
    UTILISATION,
    UTILISATION_STD,
    Runs,
    Task,
    runs_of,
    set_aside,
)

MAX_BYTES = 1 << 28
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
    }
)
"""What is read → the names that a column may have. Other columns are not looked at."""
REQUIRED = ("gpu", "gpus", "model")
NUMBERS = ("gpus", "batch_size", "card_gib", "parameter_servers", "workers", "batches")
MEASURED = (MEMORY, UTILISATION, UTILISATION_STD, BANDWIDTH, THROUGHPUT)


class BadData(ValueError):
    """The file cannot be read as runs; the message has a line for each thing that is wrong."""


class SetAside(NamedTuple):
    """A run that is not learned from."""

    where: str
    """File and line; lines count from 1, the header included."""
    reason: str


@dataclass(frozen=True, slots=True)
class Read:
    """What a file holds."""

    runs: Runs
    aside: tuple[SetAside, ...]

    def reasons(self) -> Mapping[str, int]:
        """Reason → runs that it set aside, most first."""
        return dict(Counter(one.reason for one in self.aside).most_common())


def read_runs(path: Path) -> Read:
    """A file, or all CSV files of a folder. Raises `BadData` for what is no table of runs, or holds none to believe."""
    files = sorted(path.glob("*.csv")) if path.is_dir() else [path]
    if not files:
        raise BadData(f"{path}: a folder without a CSV file")
    tasks: list[Task] = []
    measured: list[Mapping[str, float]] = []
    aside: list[SetAside] = []
    problems = []
    for file in files:
        try:
            _read_file(file, tasks, measured, aside)
        except BadData as error:
            problems.append(str(error))
    if problems:
        raise BadData("\n".join(problems))
    read = Read(runs_of(tasks, measured), tuple(aside))
    if not tasks:
        why = "; ".join(f"{count} × {reason}" for reason, count in read.reasons().items())
        raise BadData(f"{path}: no run can be learned from: {why or 'there is none below the header'}")
    return read


def _read_file(
    path: Path, tasks: list[Task], measured: list[Mapping[str, float]], aside: list[SetAside]
) -> None:
    names, lines = _table(path, _text(path))
    for line, values in lines:
        found = _run(dict(zip(names, values, strict=False)), len(values) - len(names))
        reason = found if isinstance(found, str) else set_aside(*found)
        if isinstance(found, str) or reason is not None:
            aside.append(SetAside(f"{path.name}:{line}", str(reason)))
        else:
            tasks.append(found[0])
            measured.append(found[1])


def _text(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise BadData(f"{path}: larger than {MAX_BYTES} bytes; split it")
        raw = path.read_bytes()
    except OSError as error:
        raise BadData(f"{path}: {error.strerror or error}") from error
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise BadData(
            f"{path}: line {line}: byte {raw[error.start]:#04x} is not UTF-8; save it as UTF-8"
        ) from error


def _table(path: Path, text: str) -> tuple[list[str], Iterator[tuple[int, list[str]]]]:
    """The columns' own names, and the lines below with their numbers."""
    reader = csv.reader(StringIO(text), strict=True)
    try:
        names = [name.strip() for name in next(reader, [])]
    except csv.Error as error:
        raise BadData(f"{path}: line 1: {error}") from error
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
        raise BadData("\n".join(f"{path}: line 1: {problem}" for problem in problems))

    def lines() -> Iterator[tuple[int, list[str]]]:
        while True:
            try:
                values = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                raise BadData(f"{path}: line {reader.line_num}: {error}") from error
            if values:
                yield reader.line_num, values

    return plain, lines()


def _run(row: Mapping[str, str], surplus: int) -> tuple[Task, dict[str, float]] | str:
    """The run of one line, or why there is none."""
    if surplus:
        return "the line has more or fewer fields than the header"
    numbers: dict[str, float] = {}
    for name in (*NUMBERS, *MEASURED):
        text = row.get(name, "").strip()
        if text and not NUMBER.fullmatch(text):
            return f"{name} is no number"
        numbers[name] = float(text) if text else math.nan
    words = {name: row.get(name, "").strip() for name in ("gpu", "model", "precision", "owner")}
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
    return task, {name: numbers[name] for name in MEASURED}
