"""`penstock estimator report`: accuracy of estimates, from a ledger or the gateway's events."""

import penstock.runtime.single_thread  # noqa: F401, I001 - first: before anything imports numpy
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import orjson
import typer
from rich.console import Console
from rich.table import Table

from penstock.exits import BadCommand
from penstock.model.codec import decode_fact
from penstock.model.errors import EventError
from penstock.model.topics import Topic
from penstock.runtime.json_lines import json_lines
from penstock_services.estimator.core.accuracy import Accuracy, accuracy_of
from penstock_services.estimator.core.runs import FinishedRun
from penstock_services.estimator.core.state import HANDLERS, At, State, evolve
from penstock_services.estimator.report_data import field_text, report_data, shown

BARS = "▁▂▃▄▅▆▇█"
PIPED_WIDTH = 1_000  # nothing is cut that goes into a pipe or a file
FULL_BAR = math.log(4)  # a median that is off by a factor of four or more fills the bar


class _Event(msgspec.Struct):
    """One event as the gateway streams it; `type` carries no version: the gateway writes current ones."""

    seq: int
    at_ms: int
    type: str
    data: msgspec.Raw


class BadSource(ValueError):
    """Something cannot be read, or not be written where it is asked for; the message says what and where."""


def report(
    ctx: typer.Context,
    ledger: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Read a ledger, one record a line, instead of the cell's."),
    ] = None,
    page: Annotated[
        Path | None,
        typer.Option("--report", metavar="FILE.html", help="Write a page with charts, whole in one file."),
    ] = None,
    png: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write the charts of the page there as PNG files.")
    ] = None,
    output: Annotated[Literal["table", "json"], typer.Option("--output", "-o")] = "table",
) -> None:
    """Report and draw how estimates did against what jobs used.

    Predicted against actual, per tier, over time, who over-asks, the worst jobs, and how often intervals of remaining
    time held.
    """
    fold = State(Topic.JOBS, 0)
    runs = fold.finished
    session = ctx.find_root().obj
    try:
        judge_places(page, png)
        if ledger is not None:
            _fold_ledger(ledger, fold)
        else:
            _fold_events(session.events(), fold)
        found = accuracy_of(runs)
        write(page, png, session.line, runs, found)
    except BadSource as error:
        raise BadCommand(str(error)) from error
    if output == "json":
        sys.stdout.buffer.write(
            orjson.dumps(plain(found), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
        )
        sys.stdout.buffer.flush()
    else:
        show(found, Console(highlight=False, width=None if sys.stdout.isatty() else PIPED_WIDTH))


def judge_places(page: Path | None, png: Path | None) -> None:
    """Before anything is read: whether page and PNG files can be written. Makes their folder. Raises `BadSource`."""
    if (page or png) and find_spec("altair") is None:
        option = "--report" if page else "--png"
        raise BadSource(f"{option} needs altair, which is not installed; pip install 'penstock[charts]'")
    if page is not None:
        if page.is_dir() or not page.parent.is_dir():
            why = (
                "is a folder; name a file"
                if page.is_dir()
                else f"there is no folder {page.parent}; make it first"
            )
            raise BadSource(f"--report {page}: {why}")
        if not os.access(page if page.exists() else page.parent, os.W_OK):
            raise BadSource(f"--report {page}: cannot be written; name a file of yours")
    if png is not None:
        try:
            png.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadSource(f"--png {png}: {error.strerror}; name a folder") from error
        if not os.access(png, os.W_OK):
            raise BadSource(f"--png {png}: cannot be written; name a folder of yours")


def write(
    html_path: Path | None, png: Path | None, line: str, runs: Sequence[FinishedRun], found: Accuracy
) -> None:
    """Page and PNG files, if asked for; `line`: the command line, for the page.

    Raises `BadSource` where the disk refuses, or without data.
    """
    if html_path is None and png is None:
        return
    data = report_data(runs, found)
    if not data.fields:
        raise BadSource(
            "nothing to draw: no job has succeeded yet of which anything was both said and measured"
        )
    from penstock.charts.render import html, save_all  # Altair takes 0.3 s
    from penstock_services.estimator.report_charts import page_of

    page = page_of(data, line)
    try:
        if html_path is not None:
            html_path.write_text(html(page), encoding="utf-8")
            print(f"wrote {html_path}", file=sys.stderr)
        if png is not None:
            print(f"wrote {len(save_all(page.sections, png))} pictures to {png}", file=sys.stderr)
    except OSError as error:
        raise BadSource(f"{error.filename}: {error.strerror}") from error


def _fold_ledger(path: Path, fold: State) -> None:
    for _, value in _lines(path):
        fold.fold(value)
    if not fold.seq:
        raise BadSource(f"{path}: no ledger: no line is a first record")
    if fold.void:
        print(
            f"penstock: {path}: {fold.void} records do not follow the one before and are void",
            file=sys.stderr,
        )


def _fold_events(events: Iterable[bytes], fold: State) -> None:
    decode = msgspec.json.Decoder(_Event).decode
    versions = {name.rpartition(".v")[0]: name for name in HANDLERS}
    for number, value in enumerate(events, start=1):
        try:
            event = decode(value)
            name = versions.get(event.type)
            if name is not None:
                evolve(fold, At(event.seq, event.at_ms), name, decode_fact(name, event.data))
        except (msgspec.DecodeError, EventError) as error:
            raise BadSource(f"the cell's events: line {number}: no event: {error}") from error


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Raises `BadSource`."""
    try:
        yield from json_lines(path)
    except OSError as error:
        raise BadSource(f"{path}: {error.strerror or error}") from error


def plain(found: Accuracy) -> Mapping[str, Any]:
    """For JSON; what has no value there is null."""
    return {
        "runs": found.runs,
        "set_aside": dict(found.rejected),
        "killed_for_memory": found.killed,
        "tiers": {
            tier: {name: _numbers(score._asdict()) for name, score in fields.items()}
            for tier, fields in found.tiers.items()
        },
        "drift": {name: list(values) for name, values in found.drift.items()},
        "over_asking": [one._asdict() for one in found.over_asking],
        "worst": [
            {"said" if name == "estimate" else name: value for name, value in one._asdict().items()}
            for one in found.worst
        ],
        "remaining": None
        if found.remaining is None
        else {**found.remaining._asdict(), "held": found.remaining.held._asdict()},
    }


def _numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: None if isinstance(v, float) and math.isnan(v) else v for name, v in values.items()}


def show(found: Accuracy, console: Console) -> None:
    """For people: tiers, drift, who over-asks, the worst jobs."""
    console.print(f"{found.runs} finished runs, {sum(found.rejected.values())} of them set aside")
    for reason, count in found.rejected.items():
        console.print(f"  {count} × {reason} that cannot be true")
    if found.killed:
        console.print(f"{found.killed} workers were killed for more host memory than they were promised")
    table = Table(
        "tier", "field", "runs", "said / used", "95 % within a factor of", "promise broken", box=None
    )
    for tier, fields in found.tiers.items():
        for name, score in fields.items():
            broken = "" if math.isnan(score.broken) else f"{score.broken:.1%}"
            table.add_row(
                tier, name, str(score.runs), f"{score.median_ratio:.2f}", f"{score.p95_off:.2f}", broken
            )
    console.print(table)
    drifting = {name: values for name, values in found.drift.items() if values}
    if drifting:
        console.print(
            "\nHow far off, by the median, from the oldest runs to the newest (a full bar: a factor of 4):"
        )
        for name, values in drifting.items():
            console.print(f"  {bars(values)}  {name}, now {math.exp(values[-1]):.2f}")
    if found.remaining is not None:
        told = found.remaining
        console.print(
            f"\nRemaining time, told at half of {told.runs:,} runs: {told.held.value:.1%} inside the {told.level:.0%} interval "
            f"({told.early:.1%} ended sooner, {told.late:.1%} later); by the median {told.median_off - 1:.1%} off"
        )
    if found.over_asking:
        console.print("\nWho asks for more than is used:")
        for one in found.over_asking:
            console.print(
                f"  {one.owner}: {one.asked_to_used:.1f} times the {field_text(one.field)}, over {one.runs} runs",
                markup=False,
            )
    if found.worst:
        console.print("\nThe estimates that were farthest off:")
        for job in found.worst:
            used, said = shown(job.field, job.used), shown(job.field, job.estimate)
            console.print(
                f"  {job.job_id} ({job.owner}): {field_text(job.field)} {used} used, {said} said by {job.tier}",
                markup=False,
            )


def bars(values: Sequence[float]) -> str:
    """A bar per stretch of runs."""
    top = len(BARS) - 1
    return "".join(BARS[min(top, int(value / FULL_BAR * top + 0.5))] for value in values)
