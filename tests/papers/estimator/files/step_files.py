"""Measured step times from CSV files, a table per model. What cannot be believed is rejected with its
line."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from penstock.runtime.files.csv_import import BadFile, Problem, Row, header_of, rows, text_of
from penstock_services.estimator.core.records.placements import Cell, Measurement, Table, table, why_rejected
from tests.papers.estimator.files.run_files import MAX_NAME, NUMBER, BadData, Rejected

COLUMNS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "model": ("model", "workload"),
        "gpu": ("gpu", "gpu_model"),
        "placement": ("placement",),
        "batch": ("local_bsz", "local_batch"),
        "step_s": ("step_time", "step_s", "step_time_s"),
    }
)
"""What is read → the names that a column may have. Without `model` a table is named by its file, or, if it is
called as Pollux calls its tables, by its folder. With `gpu` each GPU model has a table of its own."""
Name = tuple[str, str]
"""Model and GPU model of a table; the latter empty without such a column."""
REQUIRED = ("placement", "batch", "step_s")
NAMED_BY_FOLDER = "placements"
DIGITS = re.compile(r"[1-9]{1,4096}")
"""GPUs of each node, a digit each: 224 is three nodes."""
LIST = re.compile(r"(?=.*-)[0-9]{1,4}(-[0-9]{1,4})*-?")
"""The same with any numbers: 12-12; 12- is one node."""


@dataclass(frozen=True, slots=True)
class Steps:
    """What the files hold."""

    tables: Mapping[str, Table]
    """Model, or "MODEL on GPU" → its cells, each once: repeats are averaged."""
    networks: Mapping[str, str]
    """Name of a table → its model, which may have a table per GPU model."""
    measured: int
    rejected: tuple[Rejected, ...]
    ignored: tuple[str, ...]
    """Columns that were not looked at."""
    other_files: int
    """CSV files of the folder that are no tables of step times."""

    def reasons(self) -> Mapping[str, int]:
        """Reason → measurements that it rejected, most first."""
        return dict(Counter(one.reason for one in self.rejected).most_common())


def holds_steps(path: Path) -> bool:
    """Whether there is a table of placements and step times, by the headers; False where nothing can be
    read."""
    return any(_is_table(file) for file in _files(path))


def read_steps(path: Path) -> Steps:
    """A file, or the CSV files of a folder and of the folders in it. Raises `BadData`."""
    files = _files(path)
    tables = [file for file in files if _is_table(file)] if path.is_dir() else files
    if not tables:
        raise BadData(f"{path}: a folder without a table of placement, local_batch and step_s")
    found: dict[Name, list[Measurement]] = {}
    rejected: list[Rejected] = []
    ignored: dict[str, None] = {}
    problems = []
    for file in tables:
        try:
            ignored |= dict.fromkeys(_read_file(file, path, found, rejected))
        except BadFile as error:
            problems.append(str(error))
    if problems:
        raise BadData("\n".join(problems))
    steps = Steps(
        {_shown(name): table(measured) for name, measured in sorted(found.items())},
        {_shown(name): name[0] for name in sorted(found)},
        sum(map(len, found.values())),
        tuple(rejected),
        tuple(ignored),
        len(files) - len(tables),
    )
    if not steps.tables:
        why = "; ".join(f"{count} × {reason}" for reason, count in steps.reasons().items())
        raise BadData(f"{path}: no step can be learned from: {why or 'there is none below the header'}")
    return steps


def _files(path: Path) -> Sequence[Path]:
    return sorted([*path.glob("*.csv"), *path.glob("*/*.csv")]) if path.is_dir() else [path]


def _is_table(file: Path) -> bool:
    try:
        with file.open(encoding="utf-8-sig", errors="replace") as lines:
            names = {name.strip().strip('"') for name in lines.readline(1 << 16).split(",")}
    except OSError:
        return False
    return all(names & set(COLUMNS[name]) for name in ("placement", "step_s"))


def _read_file(
    file: Path, asked: Path, found: dict[Name, list[Measurement]], rejected: list[Rejected]
) -> Sequence[str]:
    """The columns that were not looked at. Raises `BadFile`."""
    text = text_of(file)
    names = header_of(file, text)
    known = {other: name for name, others in COLUMNS.items() for other in others}
    plain = [known.get(name, name) for name in names]
    wrong_header = [
        f"column {name!r} stands in the header twice" for name in sorted(set(plain)) if plain.count(name) > 1
    ]
    wrong_header += [f"no column {' or '.join(COLUMNS[name])}" for name in REQUIRED if name not in plain]
    if wrong_header:
        raise BadFile(str(file), [Problem(1, "", one) for one in wrong_header])
    own_name = file.parent.resolve().name if file.stem == NAMED_BY_FOLDER else file.stem
    where = file.relative_to(asked) if asked.is_dir() else Path(file.name)
    problems: list[Problem] = []
    bad: list[tuple[int, str]] = []
    for line, read in rows(text, plain, _measurement, problems):
        reason = read if isinstance(read, str) else why_rejected(read[2])
        if isinstance(read, str) or reason:
            bad.append((line, str(reason)))
        else:
            found.setdefault((read[0] or own_name, read[1]), []).append(read[2])
    bad += [(problem.line, problem.text) for problem in problems]
    rejected += [Rejected(f"{where}:{line}", reason) for line, reason in sorted(bad)]
    return [name for name, ours in zip(names, plain, strict=True) if ours not in COLUMNS]


def _shown(name: Name) -> str:
    model, gpu = name
    return f"{model} on {gpu}" if gpu else model


def _measurement(row: Row) -> tuple[str, str, Measurement] | str:
    """(model or nothing, GPU model or nothing, measurement) of one line, or why there is none."""
    model, gpu, shape = row.text("model"), row.text("gpu"), row.text("placement")
    if max(len(model), len(gpu)) > MAX_NAME:
        return f"a name is longer than {MAX_NAME} characters"
    if DIGITS.fullmatch(shape):
        placement = tuple(map(int, shape))
    elif LIST.fullmatch(shape):
        placement = tuple(int(count) for count in shape.split("-") if count)
    else:
        return "placement is neither digits, one a node, nor numbers with - between"
    for name in ("batch", "step_s"):
        if not NUMBER.fullmatch(row.text(name)):
            return f"{COLUMNS[name][-1]} is not a number"
    return model, gpu, Measurement(Cell(placement, float(row.text("batch"))), float(row.text("step_s")))
