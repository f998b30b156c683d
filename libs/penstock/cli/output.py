"""Formats of `-o`, and states, durations and sizes as text."""

import json
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any

from rich.console import RenderableType

from penstock.model.nouns.job_ids import IN_TEXT
from penstock.screen import console, write_data, write_json

SHORT_ID_CHARS = 12  # 55 bits of the gateway's ids: enough to name a job with, see `find_job`


class Format(StrEnum):
    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    YAML = "yaml"


def remark(text: str) -> None:
    """Prints one line on stderr, beside the answer."""
    console(stderr=True).print(text, markup=False, soft_wrap=True)


def as_document(form: Format) -> Format:
    """For an answer that no table suits: YAML in place of one."""
    return Format.YAML if form in (Format.TABLE, Format.WIDE) else form


def dump(data: Any, form: Format) -> None:
    """The gateway's own data, unchanged, as JSON or YAML on stdout."""
    if form is Format.YAML:
        import yaml  # 25 ms that other forms do not need

        write_data(yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=100).encode())
    else:
        write_json(data)


def present(data: Any, form: Format, draw: Callable[[], RenderableType | None]) -> None:
    """The answer of a command: its data for `json` and `yaml`, else what `draw` returns or prints itself."""
    if form in (Format.JSON, Format.YAML):
        dump(data, form)
    elif (shown := draw()) is not None:
        console(whole=form is Format.WIDE).print(shown)


def present_one(data: Any, form: Format, draw: Callable[[], None]) -> None:
    """One of several answers that follow each other: a line of JSON, a YAML document, or what `draw`
    prints."""
    if form is Format.JSON:
        write_data(json.dumps(data, ensure_ascii=False).encode() + b"\n")
    elif form is Format.YAML:
        print("---", flush=True)
        dump(data, form)
    else:
        draw()


STATE_STYLE: Mapping[str, str] = {
    "submitted": "dim",
    "queued": "yellow",
    "backoff": "yellow",
    "launching": "cyan",
    "running": "cyan",
    "stopping": "magenta",
    "succeeded": "green",
    "failed": "red",
    "cancelled": "magenta",
    "timed_out_queued": "red",
    "timed_out_running": "red",
    "unschedulable": "red",
    "ready": "green",
    "suspect": "yellow",
    "gone": "red",
    "free": "green",
    "used": "cyan",
    "shared": "cyan",
    "faulted": "red",
}


def state(name: str) -> str:
    """A state in its colour."""
    style = STATE_STYLE.get(name, "")
    return f"[{style}]{name}[/]" if style else name


def short_id(job_id: str) -> str:
    """The start of a job's id; the commands take it for the whole."""
    return job_id[:SHORT_ID_CHARS]


def with_short_ids(text: str) -> str:
    """A sentence as people read it: of each whole id that the gateway gave, its start."""
    return IN_TEXT.sub(lambda found: short_id(found[0]), text)


def duration(ms: float | None) -> str:
    """`0.42 s`, `12.3 s`, `4m 05s`, `3h 12m`, `2d 4h`; `–` for None."""
    if ms is None:
        return "–"
    seconds = max(0.0, ms / 1_000)
    if seconds < 9.995:
        return f"{seconds:.2f} s"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3_600:
        return f"{whole // 60}m {whole % 60:02d}s"
    if whole < 86_400:
        return f"{whole // 3_600}h {whole % 3_600 // 60:02d}m"
    return f"{whole // 86_400}d {whole % 86_400 // 3_600}h"


def memory(mib: float | None) -> str:
    """`512 MiB`, `16 GiB`, `1.5 GiB`; `–` for None."""
    if mib is None:
        return "–"
    if mib < 1_024:
        return f"{mib:.0f} MiB"
    return f"{mib / 1_024:.1f}".removesuffix(".0") + " GiB"
