"""Import of traces of real clusters; the first line of a file identifies its format.

| format | columns that it must have | times |
|---|---|---|
| `muri` | job_id, num_gpu, submit_time, iterations, model_name, batch_size, duration, iteration_time, resource_time_0 … _2 | ms |
| `tiresias` | job_id, num_gpu, submit_time, iterations, model_name, duration, interval | seconds |
| `philly` | timestamp, duration, num_gpus, cluster | date and time; seconds |
| `pollux` | name, time, application, num_replicas, batch_size | seconds |
| `openb` | name, cpu_milli, memory_mib, num_gpu, gpu_milli; may have gpu_spec and times | seconds |
| `gavel` | no header; ten fields between tabs, see `formats.py` | seconds |
| `shockwave` | no header; twelve fields between tabs | seconds |
| `csv` | job_id, submit_s, duration_s, gpus; may have the columns of `penstock traces convert` | seconds |

Other columns are allowed and ignored. Times count from the first job of a `philly` trace, else from 0. The readers
stand in `formats.py`.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from penstock.runtime.csv_import import BadFile, Problem, header_of, rows, shown, text_of
from penstock.simulator.traces.formats import FORMATS, Format
from penstock.simulator.traces.jobs import TraceJob

DATA_VARIABLE = "PENSTOCK_DATA"
DEFAULT_DATA = "../shared/data"
LIKELY = 0.8  # of 1, as `difflib` counts: so near to a column of ours, another one is a slip
OTHER_DELIMITERS = ";\t|"


class Trace(NamedTuple):
    """A trace as read. `skipped`: the problems of the lines left out, with `skip_bad` only."""

    name: str
    format: str
    jobs: Sequence[TraceJob]
    skipped: Sequence[Problem]
    lines: Mapping[str, int] = MappingProxyType({})
    """Job id → the line that it stands in."""
    left_out: Sequence[str] = ()
    """What the file holds and no job here can, by column."""
    likely: Mapping[str, str] = MappingProxyType({})
    """Columns that were not read → the one that was probably meant."""

    @property
    def skipped_lines(self) -> int:
        """How many lines were left out; one line may have several problems."""
        return len({problem.line for problem in self.skipped})

    def problem(self, job: TraceJob, field: str, text: str) -> Problem:
        """Something wrong with a job that only shows later, reported with its line and column."""
        column = FORMATS[self.format].column(field) if self.format in FORMATS else field
        return Problem(self.lines.get(job.job_id, 0), column, text)


Fits = Callable[[TraceJob], Iterable[tuple[str, str]]]
"""What keeps a job from ever running on a cluster: (field, what is wrong)."""


class DataSet(NamedTuple):
    """Where the traces of one origin lie below the data."""

    folder: str
    pattern: str
    """Of a file's name; `{}` is the trace's."""
    begins: str = ""
    """How the traces' names begin, where the folder holds more."""


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
"""Data set → its files: `muri/trace3`, `philly/82k`, `openb/default`, `gavel/max_min_fairness`, `tiresias/60`."""

SUMMARIES: Mapping[str, str] = MappingProxyType(
    {"helios": "helios/helios_cluster_summary.csv", "acme": "acme/cluster_summary.csv"}
)
"""Data sets of which only sums over whole clusters are here: `penstock traces describe helios` shows them."""


def data_root() -> Path | None:
    """Where the data sets lie: the environment's PENSTOCK_DATA, else `../shared/data`; None if neither is there."""
    found = os.environ.get(DATA_VARIABLE)
    root = Path(found) if found else Path(DEFAULT_DATA)
    return root if root.is_dir() else None


def data_path(where: str, who: str, file: str) -> Path:
    """A file or folder below the data. Raises `BadFile` of this file where it is not there."""
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
    """The file of a trace: a path, or `<data set>/<name>`; the start of a name will do where only one begins so.

    Raises `BadFile` with both readings.
    """
    path = Path(name)
    if path.exists():
        return path
    data_set, _, rest = name.partition("/")
    if data_set in SUMMARIES:
        message = f"only sums over whole clusters are here, no jobs; `penstock traces describe {data_set}` shows them"
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


def read_trace(path: Path, *, fits: Fits | None = None, skip_bad: bool = False) -> Trace:
    """Reads a trace; jobs in order of arrival, equal times in the order of the file.

    A job that `fits` finds a problem in is a problem of its line. Raises `BadFile` with all problems; with `skip_bad` only for those that no line can be blamed for.
    """
    text = text_of(path)
    name, form, columns = _format(path, text)
    problems: list[Problem] = []
    jobs: list[TraceJob] = []
    lines: dict[str, int] = {}
    first_seen: dict[str, int] = {}
    reading = rows(text, columns, form.read, problems, delimiter=form.delimiter, header=form.header)
    for line, job in reading:
        unfit = fits(job) if fits is not None else ()
        found = [Problem(line, form.column(field), message) for field, message in unfit]
        earlier = first_seen.get(job.job_id)
        first_seen.setdefault(job.job_id, line)
        if earlier is not None:
            found.append(Problem(line, "", f"job {job.job_id} stands already in line {earlier}"))
        problems += found
        if not found:
            lines[job.job_id] = line
            jobs.append(job)
    place = {column: index for index, column in enumerate(columns)}
    problems.sort(key=lambda problem: (problem.line, place.get(problem.column, -1)))
    if problems and not skip_bad:
        raise BadFile(str(path), problems)
    if not jobs:
        raise BadFile(str(path), [*problems, Problem(0, "", "no job in it")])
    jobs.sort(key=lambda job: job.submit_s)
    if form.relative:
        first_s = jobs[0].submit_s
        jobs = [job._replace(submit_s=job.submit_s - first_s) for job in jobs]
    ours = {*form.columns, *form.optional} if form.header else set(columns)
    left_out = [column for column in columns if column in form.left_out or column not in ours]
    unknown = [column for column in left_out if column not in form.left_out]
    free = sorted(ours - {*columns})
    likely = {column: near[0] for column in unknown if (near := get_close_matches(column, free, 1, LIKELY))}
    return Trace(path.stem, name, jobs, problems, lines, left_out, likely)


def _format(path: Path, text: str) -> tuple[str, Format, Sequence[str]]:
    """The format by the first line, and the columns. Raises `BadFile` for the nearest format."""
    first = text.partition("\n")[0]
    if "\t" in first:
        fields = first.count("\t") + 1
        for name, form in FORMATS.items():
            if not form.header and len(form.columns) == fields:
                return name, form, form.columns
    columns = header_of(path, text)
    known = frozenset(columns)
    headed = {name: form for name, form in FORMATS.items() if form.header}
    for name, form in headed.items():
        if known.issuperset(form.columns):
            return name, form, columns
    if len(columns) == 1 and (other := next((mark for mark in OTHER_DELIMITERS if mark in first), None)):
        message = f"no comma, but {other!r}: put commas between the columns"
        raise BadFile(str(path), [Problem(1, "", message)])
    nearest = sorted(headed.items(), key=lambda item: item[0] != "csv")
    name, form = max(
        nearest, key=lambda item: len(known.intersection(item[1].columns)) / len(item[1].columns)
    )
    if known.isdisjoint(form.columns):
        message = f"no header of any format; our own needs {', '.join(FORMATS['csv'].columns)}"
        raise BadFile(str(path), [Problem(1, "", message)])
    missing = [column for column in form.columns if column not in known]
    raise BadFile(str(path), [Problem(1, column, f"missing (format {name})") for column in sorted(missing)])
