"""CSV export of traces: `read_trace` reads the same jobs back."""

import csv
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from urllib.parse import quote

from penstock.simulator.traces.jobs import WHOLE_GPU_MILLI, TraceJob


def _number(value: float | None) -> str:
    """The shortest text that reads as the same number."""
    return "" if value is None else repr(value).removesuffix(".0")


def _optional(value: int | None) -> str:
    return "" if value is None else str(value)


COLUMNS: Mapping[str, Callable[[TraceJob], str]] = MappingProxyType(
    {
        "job_id": lambda job: job.job_id,
        "submit_s": lambda job: _number(job.submit_s),
        "duration_s": lambda job: _number(job.duration_s) if job.duration_s else "",
        "gpus": lambda job: str(job.gpus),
        "model": lambda job: job.model,
        "batch_size": lambda job: _optional(job.batch_size),
        "owner": lambda job: job.owner,
        "iterations": lambda job: _optional(job.iterations),
        "cores": lambda job: _number(job.cores),
        "host_memory_mib": lambda job: _optional(job.host_memory_mib),
        "gpu_memory_mib": lambda job: _optional(job.gpu_memory_mib),
        "gpu_share_milli": lambda job: (
            "" if job.gpu_share_milli == WHOLE_GPU_MILLI else str(job.gpu_share_milli)
        ),
        "gpu_models": lambda job: "|".join(job.gpu_models),
        "workers": lambda job: _optional(job.workers),
        "parameter_servers": lambda job: str(job.parameter_servers) if job.parameter_servers else "",
        "server_gpus": lambda job: str(job.server_gpus) if job.server_gpus else "",
        "patience_s": lambda job: _number(job.patience_s),
        "inference": lambda job: "yes" if job.inference else "",
        "memory_bandwidth": lambda job: _number(job.memory_bandwidth) if job.memory_bandwidth else "",
        "labels": lambda job: "|".join(
            f"{quote(name, SAFE)}={quote(value, SAFE)}" for name, value in job.labels
        ),
    }
)
SAFE = ":/+,;@()[]~"
NEEDED = ("job_id", "submit_s", "duration_s", "gpus")


def trace_lines(
    jobs: Sequence[TraceJob], more: Mapping[str, Sequence[str]] = MappingProxyType({})
) -> Iterable[Sequence[str]]:
    """The header, then a line per job; columns in which no job has a value are left out.

    `more`: further columns for people; the reader ignores them.
    """
    columns = {name: [text(job) for job in jobs] for name, text in COLUMNS.items()}
    written = {name: values for name, values in columns.items() if name in NEEDED or any(values)}
    written.update({name: list(values) for name, values in more.items()})
    yield list(written)
    yield from zip(*written.values(), strict=True)


def write_lines(path: Path | None, lines: Iterable[Sequence[str]]) -> None:
    """Whole or not at all: beside the file first, then in its place. None: to stdout. Raises OSError."""
    if path is None:
        csv.writer(sys.stdout, lineterminator="\n").writerows(lines)
        sys.stdout.flush()
        return
    if path.exists() and not path.is_file():  # a pipe, a terminal: nothing can be put in its place
        with path.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(lines)
        return
    beside = path.with_name(f".{path.name}.part")
    try:
        with beside.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(lines)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
