"""Import of workload traces; the first line of a file, or its keys, identifies its format.

| format | columns that it must have | times |
|---|---|---|
| `csv` | job_id, submit_s, duration_s, gpus; may have the columns of `penstock traces convert` | seconds |
| `sacct` | JobID, Submit, Elapsed, AllocTRES or the like; between commas or bars | date and time |
| `helios` | job_id, gpu_num, submit_time, duration | date and time; seconds |
| `kubernetes` | output of `kubectl get jobs -o json`, or `get pods` | date and time |
| `muri` | job_id, num_gpu, submit_time, iterations, model_name, batch_size, duration, iteration_time,
resource_time_0 … _2 | ms |
| `tiresias` | job_id, num_gpu, submit_time, iterations, model_name, duration, interval | seconds |
| `philly-jobs` | JSON with jobid, attempts, submitted_time: the published `cluster_job_log` | date and time |
| `pai` | no header; ten fields between commas, one line per task: Alibaba's published `pai_task_table.csv` |
seconds |
| `philly` | timestamp, duration, num_gpus, cluster | date and time; seconds |
| `pollux` | name, time, application, num_replicas, batch_size | seconds |
| `openb` | name, cpu_milli, memory_mib, num_gpu, gpu_milli; may have gpu_spec and times | seconds |
| `gavel` | no header; ten fields between tabs, see `formats.py` | seconds |
| `shockwave` | no header; twelve fields between tabs | seconds |

Other columns are allowed and ignored. A plain number of a column is in the unit above, unless it is an epoch;
dates, epochs and clock times are read in every format (`penstock.runtime.files.times`). Dates and epochs
count from the first job, other times from 0. Objects in JSON are lines whose keys are the columns. The
readers are in `formats.py` and `batch_systems.py`.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from penstock.runtime.files.csv_import import BadFile, Problem, Row, shown
from penstock.simulator.traces.files.guessing import likely_slips
from penstock.simulator.traces.files.source import Source, open_source
from penstock.simulator.traces.jobs import TraceJob

DATA_VARIABLE = "PENSTOCK_DATA"
DEFAULT_DATA = "../shared/data"


class Trace(NamedTuple):
    """A parsed trace. `skipped`: the problems of the lines left out, with `skip_bad` only."""

    name: str
    format: str
    jobs: Sequence[TraceJob]
    skipped: Sequence[Problem]
    lines: Mapping[str, int] = MappingProxyType({})
    """Job id → its line."""
    left_out: Sequence[str] = ()
    """Columns of the file that have no field in a job here."""
    likely: Mapping[str, str] = MappingProxyType({})
    """Unread columns → the column that was probably meant."""
    passed: Mapping[str, int] = MappingProxyType({})
    """Kind → number of lines that are not jobs of a trace."""
    source: Source | None = None
    """The file; None: a generator made it."""

    @property
    def skipped_lines(self) -> int:
        """Number of lines left out; one line may have several problems."""
        return len({problem.line for problem in self.skipped})

    def problem(self, job: TraceJob, field: str, text: str) -> Problem:
        """A problem of a job that is found later, with its line and column."""
        line = self.lines.get(job.job_id, 0)
        return Problem(line, field, text) if self.source is None else self.source.problem(line, field, text)


Fits = Callable[[TraceJob], Iterable[tuple[str, str]]]
"""Check whether a job can ever run on a cluster: (field, problem) for each reason against it."""


class DataSet(NamedTuple):
    """Location of the traces of one origin below the data folder."""

    folder: str
    pattern: str
    """Pattern of a file's name; `{}` is the trace's name."""
    begins: str = ""
    """Prefix of the traces' names, if the folder has other files."""


SETS: Mapping[str, DataSet] = MappingProxyType(
    {
        "muri": DataSet("muri/trace-data", "{}.csv", begins="trace"),
        "philly": DataSet("", "philly_{}.csv"),
        "pollux": DataSet("pollux/workloads", "{}.csv"),
        "pollux-0.5": DataSet("pollux/workloads-0.5", "{}.csv"),
        "pollux-1.5": DataSet("pollux/workloads-1.5", "{}.csv"),
        "pollux-2.0": DataSet("pollux/workloads-2.0", "{}.csv"),
        "pollux-realistic": DataSet("pollux/workloads-realistic", "{}.csv"),
        "openb": DataSet("openb", "openb_pod_list_{}.csv"),
        "gavel": DataSet("gavel/traces", "{}.trace"),
        "shockwave": DataSet("shockwave", "{}.trace"),
        "tiresias": DataSet("tiresias", "{}_job.csv"),
    }
)
"""Data set → its files: `muri/trace3`, `philly/82k`, `openb/default`,
`gavel/max_min_fairness`, `tiresias/60`."""

SUMMARIES: Mapping[str, str] = MappingProxyType(
    {"helios": "helios/helios_cluster_summary.csv", "acme": "acme/cluster_summary.csv"}
)
"""Data sets with sums over whole clusters only: `penstock traces describe helios` shows them."""


def data_root() -> Path | None:
    """The folder of the data sets: the environment's PENSTOCK_DATA, else `../shared/data`;
    None if neither exists."""
    found = os.environ.get(DATA_VARIABLE)
    root = Path(found) if found else Path(DEFAULT_DATA)
    return root if root.is_dir() else None


def data_path(where: str, who: str, file: str) -> Path:
    """A file or folder below the data folder. Raises `BadFile` of this file if it does not exist."""
    root = data_root()
    if root is None or not (root / where).exists():
        message = f"{who} needs {where}; set {DATA_VARIABLE} to the folder that holds it"
        raise BadFile(file, [Problem(0, "", message)])
    return root / where


def names_in(root: Path, data_set: str) -> Sequence[str]:
    """The traces of a data set, by name."""
    folder, pattern, begins = SETS[data_set]
    before, after = pattern.split("{}")
    found = (path.name for path in (root / folder).glob(f"{before}{begins}*{after}") if path.is_file())
    return sorted(name.removeprefix(before).removesuffix(after) for name in found)


def locate(name: str) -> Path:
    """The file of a trace: a path, or `<data set>/<name>`; a unique prefix of the name is enough.

    Raises `BadFile` with both readings.
    """
    path = Path(name)
    if path.exists():
        return path
    data_set, _, rest = name.partition("/")
    if data_set in SUMMARIES:
        message = (
            f"only sums over whole clusters are here, no jobs; `penstock traces describe {data_set}` "
            "shows them"
        )
        raise BadFile(shown(name), [Problem(0, "", message)])
    if data_set not in SETS or not rest:
        known = ", ".join(f"{known}/…" for known in SETS)
        raise BadFile(shown(name), [Problem(0, "", f"no such file, and no trace of a data set ({known})")])
    root = data_root()
    if root is None:
        raise BadFile(
            name, [Problem(0, "", f"the data sets are not here; set {DATA_VARIABLE} to their folder")]
        )
    names = names_in(root, data_set)
    begun = [found for found in names if found.startswith(rest)]
    if rest not in names and len(begun) != 1:
        message = f"no such trace; there are {', '.join(names) or 'none'}"
        raise BadFile(shown(name), [Problem(0, "", message)])
    chosen = rest if rest in names else begun[0]
    return root / SETS[data_set].folder / SETS[data_set].pattern.format(chosen)


def read_trace(
    path: Path,
    *,
    columns: Mapping[str, str] = MappingProxyType({}),
    fits: Fits | None = None,
    skip_bad: bool = False,
) -> Trace:
    """Reads a trace; jobs in order of arrival, equal times in the order of the file.

    `columns`: a column of our own CSV → its name in the file. A problem that `fits` finds in a job is a
    problem of its line. Raises `BadFile` with all problems; with `skip_bad` only for problems that belong to
    no line.
    """
    return read_source(path, open_source(path, columns), fits=fits, skip_bad=skip_bad)


def read_source(path: Path, source: Source, *, fits: Fits | None = None, skip_bad: bool = False) -> Trace:
    """As `read_trace`, for a file whose format is known."""
    form = source.form
    reading = _Reading(source, fits)
    for row in source.rows(reading.problems):
        reading.take(row)
    jobs = reading.finished()
    place = {source.column(column): index for index, column in enumerate(source.columns)}
    problems = sorted(reading.problems, key=lambda problem: (problem.line, place.get(problem.column, -1)))
    if problems and not skip_bad:
        raise BadFile(str(path), problems)
    if not jobs:
        passed = passed_text(reading.passed)
        raise BadFile(
            str(path), [*problems, Problem(0, "", f"no job in it{f', but {passed}' if passed else ''}")]
        )
    ours = {*form.columns, *form.optional} if form.header else set(source.columns)
    named = [column for column in source.columns if column]  # `sacct -p` ends its lines with a bar
    left_out = [column for column in named if column in form.left_out or column not in ours]
    unknown = [column for column in left_out if column not in form.left_out]
    return Trace(
        path.stem,
        source.name,
        jobs,
        problems,
        reading.lines,
        [source.column(column) for column in left_out],
        likely_slips(unknown, source.columns, sorted(ours)),
        reading.passed,
        source,
    )


def passed_text(passed: Mapping[str, int]) -> str:
    """Text about lines that are not jobs of a trace."""
    return ", ".join(f"{what} ({count:,})" for what, count in passed.items())


class _Reading:
    """One pass over a file: its jobs, the problems of its lines, and lines that are not jobs."""

    def __init__(self, source: Source, fits: Fits | None) -> None:
        self.problems: list[Problem] = []
        self.lines: dict[str, int] = {}
        self.passed: dict[str, int] = {}
        self._source = source
        self._fits = fits
        self._jobs: dict[bool, list[TraceJob]] = {True: [], False: []}
        """Jobs whose times count from 1970, and those whose times count from the start of the trace."""
        self._first_seen: dict[str, int] = {}

    def take(self, row: Row) -> None:
        source, line = self._source, row.line
        if reason := source.form.passes(row):
            self.passed[reason] = self.passed.get(reason, 0) + 1
            return
        job = source.form.read(row)
        if row.problems:
            self.problems += [one._replace(column=source.column(one.column)) for one in row.problems]
            return
        found = [source.problem(line, field, text) for field, text in (self._fits(job) if self._fits else ())]
        earlier = self._first_seen.setdefault(job.job_id, line)
        if earlier != line:
            message = f"job {job.job_id} stands already in {source.unit} {earlier}"
            found.append(Problem(line, "", message, source.unit))
        self.problems += found
        if not found:
            self.lines[job.job_id] = line
            self._jobs[bool(row.dated)].append(job)

    def finished(self) -> Sequence[TraceJob]:
        """The jobs in order of arrival; dates and epochs as seconds from the first job. Times of the rarer
        kind are problems."""
        dated = len(self._jobs[True]) >= len(self._jobs[False])
        for job in self._jobs[not dated]:
            text = (
                f"{job.submit_s:g} counts from the start of the trace; other {self._source.unit}s have a "
                "date or an epoch"
            )
            if not dated:
                text = f"a date or an epoch; other {self._source.unit}s count from the start of the trace"
            self.problems.append(self._source.problem(self.lines.pop(job.job_id), "submit_s", text))
        jobs = sorted(self._jobs[dated], key=lambda job: job.submit_s)
        if dated and jobs:
            first_s = jobs[0].submit_s
            jobs = [job._replace(submit_s=job.submit_s - first_s) for job in jobs]
        return jobs
