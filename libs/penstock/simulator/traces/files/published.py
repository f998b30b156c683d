"""Importers of published traces whose files are no tables of jobs: Philly's JSON of attempts, and Alibaba's
table of PAI tasks.

Several lines or attempts make one job, so that its values are computed here, in the columns of our own CSV.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from math import ceil
from types import MappingProxyType
from typing import Any

from penstock.runtime.files.csv_import import Problem, Row, table_rows
from penstock.runtime.files.times import moment_of
from penstock.simulator.traces.files.batch_systems import NEVER_RAN, NOT_ENDED, NOT_IN_A_NAME, NOT_YET
from penstock.simulator.traces.files.fields import Format
from penstock.simulator.traces.files.formats import FORMATS

PASSED = "passed"
"""Column with the kind of a line that is not a job of a trace."""
COLUMNS = (
    "job_id",
    "submit_s",
    "duration_s",
    "gpus",
    "owner",
    "cores",
    "host_memory_mib",
    "gpu_share_milli",
    "gpu_models",
    "workers",
    "parameter_servers",
    PASSED,
)
PHILLY, PAI = "philly-jobs", "pai"
PHILLY_KEYS = frozenset(("jobid", "attempts", "submitted_time"))
PHILLY_NAMES: Mapping[str, str] = MappingProxyType(
    {"job_id": "jobid", "submit_s": "submitted_time", "duration_s": "attempts", "gpus": "attempts"}
)
"""Our column → the key of the file that problems name."""
PAI_COLUMNS = (
    "job_name",
    "task_name",
    "inst_num",
    "status",
    "start_time",
    "end_time",
    "plan_cpu",
    "plan_mem",
    "plan_gpu",
    "gpu_type",
)
PAI_JOB_COLUMNS = ("job_name", "inst_id", "user", "status", "start_time", "end_time")
PAI_STATES = frozenset(
    ("Terminated", "Failed", "Running", "Waiting", "Interrupted", "Ready", "Init", "Stopped", "Cancelled")
)
PAI_LINE = re.compile(
    rf"[^,\s]+,[^,]*,[0-9.]*,(?:{'|'.join(sorted(PAI_STATES))})?,[0-9.]*,[0-9.]*(?:,[0-9.]*){{3}},\w*\s*"
)
PAI_JOB_LINE = re.compile(rf"[^,\s]+,[^,\s]+,[^,\s]+,(?:{'|'.join(sorted(PAI_STATES))}),[0-9.]*,[0-9.]*\s*")
ANY_MODEL = frozenset(("", "MISC", "CPU"))
"""PAI's `gpu_type` of tasks without GPUs, and of GPUs of several older models."""
PERCENT, MIB_PER_GIB, WHOLE = 100, 1_024, 1_000
MAX_WORKERS = 256

_OWN = FORMATS["csv"]
PUBLISHED: Mapping[str, Format] = MappingProxyType(
    {
        PHILLY: _OWN._replace(
            optional=(*_OWN.optional, PASSED, "status", "vc"),
            left_out=("status", "vc"),
            passes=lambda row: row.text(PASSED),
        ),
        PAI: _OWN._replace(
            optional=(*_OWN.optional, PASSED, "status"),
            left_out=("status",),
            passes=lambda row: row.text(PASSED),
        ),
    }
)


# ----------------------------------------------------------------------------------------------- Philly


def philly_rows(items: Sequence[tuple[int, Any]], problems: list[Problem], unit: str) -> Iterator[Row]:
    """A line per job of `cluster_job_log`. Its run time is that of all attempts with a start and an end."""
    for number, one in items:
        if not isinstance(one, dict) or not one.keys() >= PHILLY_KEYS:
            problems.append(Problem(number, "", f"no job with {', '.join(sorted(PHILLY_KEYS))}", unit))
            continue
        wrong, values = _philly_values(one)
        problems += [Problem(number, column, text, unit) for column, text in wrong]
        if not wrong:
            yield Row(number, dict.fromkeys(COLUMNS, "") | values, unit)


def _philly_values(job: Mapping[str, Any]) -> tuple[list[tuple[str, str]], dict[str, str]]:
    wrong: list[tuple[str, str]] = []
    attempts = (
        [one for one in job["attempts"] or () if isinstance(one, dict)]
        if isinstance(job["attempts"], list)
        else []
    )
    ran_s, begun, first_start = 0.0, False, ""
    shapes: list[list[int]] = []
    for number, attempt in enumerate(attempts):
        start, end = (_time(attempt.get(name)) for name in ("start_time", "end_time"))
        begun = begun or bool(start)
        first_start = first_start or start
        if start and end:
            moments = moment_of(start), moment_of(end)
            if None in moments:
                wrong.append((f"attempts.{number}", f"{start[:32]!r} or {end[:32]!r} is not a date and time"))
                continue
            ran_s += max(0.0, moments[1].at_s - moments[0].at_s)  # type: ignore[union-attr]
        details = attempt.get("detail")
        places = (
            [one.get("gpus") for one in details if isinstance(one, dict)] if isinstance(details, list) else []
        )
        shapes.append([len(gpus) for gpus in places if isinstance(gpus, list)])
    shape = max(shapes, key=sum, default=[])
    submitted = _time(job["submitted_time"]) or first_start
    passed = "" if ran_s else NOT_ENDED if begun else NEVER_RAN
    equal = 0 < len(shape) <= MAX_WORKERS and len(set(shape)) == 1
    return wrong, {
        "job_id": NOT_IN_A_NAME.sub("-", str(job["jobid"])),
        "submit_s": submitted,
        "duration_s": repr(ran_s),
        "gpus": str(sum(shape)),
        "owner": _name(job.get("user")) or _name(job.get("vc")),
        "cores": "" if sum(shape) else "1",
        "workers": str(len(shape)) if equal else "",
        PASSED: passed if submitted else NEVER_RAN,
        "status": str(job.get("status", "")),
        "vc": str(job.get("vc", "")),
    }


def _time(value: object) -> str:
    """A date and time as text; empty: none."""
    text = "" if value is None else str(value).strip()
    return "" if text in NOT_YET else text


def _name(value: object) -> str:
    return "" if value is None else NOT_IN_A_NAME.sub("-", str(value)).lstrip("._:/-")


# -------------------------------------------------------------------------------------------------- PAI


def is_pai(first: str) -> bool:
    """Whether a file's first line is one of PAI's table of tasks, or its header."""
    return first.strip() == ",".join(PAI_COLUMNS) or PAI_LINE.fullmatch(first) is not None


def is_pai_jobs(first: str) -> bool:
    """Whether it is PAI's table of jobs, which has no resources."""
    return first.strip() == ",".join(PAI_JOB_COLUMNS) or PAI_JOB_LINE.fullmatch(first) is not None


def pai_rows(text: str, problems: list[Problem]) -> Iterator[Row]:
    """A line per job: its tasks (workers, parameter servers, an evaluator) run at the same time. Its
    submission counts as its start."""
    header = text.partition("\n")[0].strip() == ",".join(PAI_COLUMNS)
    jobs: dict[str, list[Row]] = {}
    for row in table_rows(text, PAI_COLUMNS, problems, delimiter=",", header=header):
        jobs.setdefault(row.text("job_name"), []).append(row)
    for name, rows in jobs.items():
        values = _pai_values(name, rows)
        wrong = [problem for row in rows for problem in row.problems]
        problems += wrong
        if not wrong:
            yield Row(rows[0].line, values)


def _number(row: Row, column: str) -> float:
    """A number ≥ 0; 0 where the line has none."""
    return row.number(column) if row.has(column) else 0.0


def _pai_values(name: str, rows: Sequence[Row]) -> dict[str, str]:
    starts = [row.number("start_time") for row in rows if row.has("start_time")]
    ends = [row.number("end_time") for row in rows if row.has("end_time")]
    counts = [max(1, round(_number(row, "inst_num"))) for row in rows]
    gpus = [count * _number(row, "plan_gpu") / PERCENT for row, count in zip(rows, counts, strict=True)]
    cores = sum(count * _number(row, "plan_cpu") / PERCENT for row, count in zip(rows, counts, strict=True))
    memory_gib = sum(count * _number(row, "plan_mem") for row, count in zip(rows, counts, strict=True))
    models = sorted({model for row in rows if (model := row.text("gpu_type")) not in ANY_MODEL})
    total = sum(gpus)
    shared = 0 < total < 1
    whole = ceil(round(total, 6))
    passed = NEVER_RAN if not starts else NOT_ENDED if not ends else ""
    return dict.fromkeys(COLUMNS, "") | {
        "job_id": NOT_IN_A_NAME.sub("-", name),
        "submit_s": repr(min(starts, default=0.0)),
        "duration_s": repr(max(0.0, max(ends, default=0.0) - min(starts, default=0.0)) or 1.0),
        "gpus": str(whole),
        "cores": repr(round(cores, 3)) if cores else ("" if whole else "1"),
        "host_memory_mib": str(ceil(memory_gib * MIB_PER_GIB)) if memory_gib else "",
        "gpu_share_milli": str(max(1, round(total * WHOLE))) if shared else "",
        "gpu_models": "|".join(models),
        PASSED: passed,
        "status": rows[0].text("status"),
    }
