"""Traces of real clusters, each format with its importer; the header tells the format.

| format | columns that it must have | times |
|---|---|---|
| `muri` | job_id, num_gpu, submit_time, iterations, model_name, batch_size, duration, iteration_time, resource_time_0 … _2 | ms |
| `philly` | timestamp, duration, num_gpus, cluster | date and time; seconds |
| `pollux` | name, time, application, num_replicas, batch_size | seconds |
| `csv` | job_id, submit_s, duration_s, gpus; may have model, batch_size, owner | seconds |

Other columns are allowed and ignored. Times count from the first job of a `philly` trace, else from 0.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from penstock.simulator.jobs import Stages, TraceJob
from penstock.simulator.reading import BadTrace, Problem, Row, header_of, rows, text_of

MAX_GANG_GPUS = 4_096  # 256 workers of 16 GPUs: the largest gang there can be
DATA_VARIABLE = "PENSTOCK_DATA"


class Trace(NamedTuple):
    """A trace as read. `skipped`: the problems of the lines left out, with `skip_bad` only."""

    name: str
    format: str
    jobs: Sequence[TraceJob]
    skipped: Sequence[Problem]


class Format(NamedTuple):
    """How one kind of file is read."""

    columns: frozenset[str]
    """That it must have."""
    optional: frozenset[str]
    read: Callable[[Row, frozenset[str]], TraceJob]
    relative: bool = False
    """Whether times count from the first arrival."""


def _muri(row: Row, columns: frozenset[str]) -> TraceJob:
    stages = Stages(
        row.number("iteration_time", above=0),
        row.number("resource_time_0"),
        row.number("resource_time_1"),
        row.number("resource_time_2"),
    )
    return TraceJob(
        job_id=row.name("job_id"),
        submit_s=row.number("submit_time") / 1_000,
        duration_s=row.number("duration", above=0) / 1_000,
        gpus=_gpus(row, "num_gpu"),
        model=row.name("model_name"),
        batch_size=row.whole("batch_size", least=1),
        iterations=row.whole("iterations", least=1),
        stages=stages,
    )


def _philly(row: Row, columns: frozenset[str]) -> TraceJob:
    return TraceJob(
        job_id=f"philly-{row.line - 1}",
        submit_s=row.moment_s("timestamp"),
        duration_s=row.number("duration", above=0),
        gpus=_gpus(row, "num_gpus"),
        owner=row.name("cluster"),
    )


def _pollux(row: Row, columns: frozenset[str]) -> TraceJob:
    """Its run time is nowhere told: it follows from the measured step times (truth `placement-table`)."""
    return TraceJob(
        job_id=row.name("name"),
        submit_s=row.number("time"),
        duration_s=0.0,
        gpus=_gpus(row, "num_replicas"),
        model=row.name("application"),
        batch_size=row.whole("batch_size", least=1),
    )


def _csv(row: Row, columns: frozenset[str]) -> TraceJob:
    return TraceJob(
        job_id=row.name("job_id"),
        submit_s=row.number("submit_s"),
        duration_s=row.number("duration_s", above=0),
        gpus=_gpus(row, "gpus"),
        model=row.name("model", optional=True) if "model" in columns else "",
        batch_size=row.whole("batch_size", least=1) if "batch_size" in columns else None,
        owner=row.name("owner", optional=True) if "owner" in columns else "",
    )


def _gpus(row: Row, column: str) -> int:
    gpus = row.whole(column, least=1)
    return gpus if gpus <= MAX_GANG_GPUS else row.bad(column, f"{gpus} exceed {MAX_GANG_GPUS} GPUs", 1)


FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        "muri": Format(
            frozenset(
                {"job_id", "num_gpu", "submit_time", "iterations", "model_name", "batch_size", "duration"}
                | {"iteration_time", "resource_time_0", "resource_time_1", "resource_time_2"}
            ),
            frozenset(),
            _muri,
        ),
        "philly": Format(
            frozenset({"timestamp", "duration", "num_gpus", "cluster"}), frozenset(), _philly, relative=True
        ),
        "pollux": Format(
            frozenset({"name", "time", "application", "num_replicas", "batch_size"}), frozenset(), _pollux
        ),
        "csv": Format(
            frozenset({"job_id", "submit_s", "duration_s", "gpus"}),
            frozenset({"model", "batch_size", "owner"}),
            _csv,
        ),
    }
)

SETS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "muri": ("muri/trace-data", "{}.csv"),
        "philly": ("", "philly_{}.csv"),
        "pollux": ("pollux/workloads", "{}.csv"),
    }
)
"""Data set → (folder under the data, name of a file): `muri/trace3`, `philly/82k`, `pollux/workload-6`."""


def data_root() -> Path | None:
    """Where the data sets lie: the environment's PENSTOCK_DATA, else `../shared/data`; None if neither is there."""
    told = os.environ.get(DATA_VARIABLE)
    root = Path(told) if told else Path("../shared/data")
    return root if root.is_dir() else None


def locate(name: str) -> Path:
    """The file of a trace: a path, or `<data set>/<name>`. Raises `BadTrace` with both readings."""
    path = Path(name)
    if path.exists():
        return path
    data_set, _, rest = name.partition("/")
    if data_set not in SETS or not rest:
        known = ", ".join(f"{known}/…" for known in SETS)
        raise BadTrace(name, [Problem(0, "", f"no such file, and no trace of a data set ({known})")])
    root = data_root()
    if root is None:
        raise BadTrace(
            name, [Problem(0, "", f"the data sets are not here; set {DATA_VARIABLE} to their folder")]
        )
    folder, pattern = SETS[data_set]
    path = root / folder / pattern.format(rest)
    if not path.exists():
        names = sorted(
            found.stem.removeprefix(pattern.split("{}")[0])
            for found in (root / folder).glob(pattern.format("*"))
        )
        raise BadTrace(name, [Problem(0, "", f"no such trace; there are {', '.join(names) or 'none'}")])
    return path


def read_trace(path: Path, *, most_gpus: int | None = None, skip_bad: bool = False) -> Trace:
    """Reads a trace; jobs in order of arrival, equal times in the order of the file.

    `most_gpus`: a larger job is a problem of its line. Raises `BadTrace` with all problems; with `skip_bad`
    only for those that no line can be blamed for.
    """
    text = text_of(path)
    columns = header_of(path, text)
    name, form = _format(path, frozenset(columns))
    problems: list[Problem] = []
    jobs: list[TraceJob] = []
    seen: dict[str, int] = {}
    present = frozenset(columns)
    gpu_column = next(
        column for column in ("num_gpu", "num_gpus", "num_replicas", "gpus") if column in form.columns
    )
    for line, job in rows(text, columns, lambda row: form.read(row, present), problems):
        if job.job_id in seen:
            problems.append(Problem(line, "", f"job {job.job_id} stands already in line {seen[job.job_id]}"))
        elif most_gpus is not None and job.gpus > most_gpus:
            problems.append(Problem(line, gpu_column, f"{job.gpus} GPUs; the whole cluster has {most_gpus}"))
        else:
            seen[job.job_id] = line
            jobs.append(job)
    problems.sort(key=lambda problem: problem.line)
    if problems and not skip_bad:
        raise BadTrace(str(path), problems)
    if not jobs:
        raise BadTrace(str(path), [*problems, Problem(0, "", "no job in it")])
    jobs.sort(key=lambda job: job.submit_s)
    if form.relative:
        first_s = jobs[0].submit_s
        jobs = [job._replace(submit_s=job.submit_s - first_s) for job in jobs]
    return Trace(path.stem, name, jobs, problems)


def _format(path: Path, columns: frozenset[str]) -> tuple[str, Format]:
    """The first format whose columns are all there. Raises `BadTrace` for the one that is nearest."""
    for name, form in FORMATS.items():
        if form.columns <= columns:
            return name, form
    name, form = max(FORMATS.items(), key=lambda item: len(item[1].columns & columns) / len(item[1].columns))
    missing = sorted(form.columns - columns)
    raise BadTrace(str(path), [Problem(1, column, f"missing (format {name})") for column in missing])
