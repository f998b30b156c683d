"""`penstock estimator report`: what was said of the jobs that a cell ran, against what they used."""

import argparse
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import orjson
from rich.console import Console
from rich.table import Table

from penstock.estimator.core.follow import HANDLERS, At, Ledger
from penstock.estimator.core.reckoning import Reckoning, reckon
from penstock.estimator.core.runs import FinishedRun
from penstock.events.codec import decode_trusted
from penstock.events.errors import EventError
from penstock.events.topics import Topic
from penstock.kernel.json_lines import json_lines

OK, BAD_INPUT = 0, 2
BARS = "▁▂▃▄▅▆▇█"
FULL_BAR = math.log(4)  # a median that is off by a factor of four or more fills the bar


class _Event(msgspec.Struct):
    """One event as the gateway streams it; `type` carries no version: the gateway writes current ones."""

    seq: int
    at_ms: int
    type: str
    data: msgspec.Raw


class BadSource(ValueError):
    """The ledger or the events cannot be read; the message says where."""


def add_arguments(to: argparse.ArgumentParser) -> None:
    source = to.add_mutually_exclusive_group(required=True)
    source.add_argument("--ledger", type=Path, metavar="FILE", help="a ledger, one record a line")
    source.add_argument(
        "--events",
        type=Path,
        metavar="FILE",
        help="events as the gateway streams them, one JSON a line; -: stdin",
    )
    to.add_argument("-o", "--output", choices=("table", "json"), default="table")


def run(asked: argparse.Namespace) -> int:
    """Exit codes: 0 done, 2 nothing that could be read."""
    runs: list[FinishedRun] = []
    fold = Ledger(Topic.JOBS, 0, runs.append)
    try:
        if asked.ledger is not None:
            _fold_ledger(asked.ledger, fold)
        else:
            _fold_events(asked.events, fold)
    except BadSource as error:
        print(f"penstock: {error}", file=sys.stderr)
        return BAD_INPUT
    found = reckon(runs)
    if asked.output == "json":
        sys.stdout.buffer.write(
            orjson.dumps(plain(found), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
        )
        sys.stdout.buffer.flush()
    else:
        show(found, Console(highlight=False))
    return OK


def _fold_ledger(path: Path, fold: Ledger) -> None:
    for _, value in _lines(path):
        fold.fold(value)
    if not fold.seq:
        raise BadSource(f"{path}: no ledger: no line is a first record")
    if fold.void:
        print(
            f"penstock: {path}: {fold.void} records do not follow the one before and are void",
            file=sys.stderr,
        )


def _fold_events(path: Path, fold: Ledger) -> None:
    decode = msgspec.json.Decoder(_Event).decode
    versions = {name.rpartition(".v")[0]: name for name in HANDLERS}
    for number, value in _lines(path):
        try:
            event = decode(value)
            name = versions.get(event.type)
            if name is not None:
                HANDLERS[name](fold, At(event.seq, event.at_ms), decode_trusted(name, event.data))
        except (msgspec.DecodeError, EventError) as error:
            raise BadSource(f"{path}: line {number}: no event: {error}") from error


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Raises `BadSource`."""
    try:
        yield from json_lines(path)
    except OSError as error:
        raise BadSource(f"{path}: {error.strerror or error}") from error


def plain(found: Reckoning) -> Mapping[str, Any]:
    """For JSON; what has no value there is null."""
    return {
        "runs": found.runs,
        "set_aside": dict(found.set_aside),
        "tiers": {
            tier: {name: _numbers(score._asdict()) for name, score in fields.items()}
            for tier, fields in found.tiers.items()
        },
        "drift": {name: list(values) for name, values in found.drift.items()},
        "over_asking": [one._asdict() for one in found.over_asking],
        "worst": [one._asdict() for one in found.worst],
    }


def _numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: None if isinstance(v, float) and math.isnan(v) else v for name, v in values.items()}


def show(found: Reckoning, console: Console) -> None:
    """For people: tiers, drift, who over-asks, the worst jobs."""
    console.print(f"{found.runs} finished runs, {sum(found.set_aside.values())} of them set aside")
    for reason, count in found.set_aside.items():
        console.print(f"  {count} × {reason} that cannot be true")
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
    if found.over_asking:
        console.print("\nWho asks for more than is used:")
        for one in found.over_asking:
            console.print(
                f"  {one.owner}: {one.asked_to_used:.1f} times the {one.field}, over {one.runs} runs"
            )
    if found.worst:
        console.print("\nThe estimates that were farthest off:")
        for job in found.worst:
            console.print(
                f"  {job.job_id} ({job.owner}): {job.field} {job.used:,.0f} used, {job.said:,.0f} said by {job.tier}"
            )


def bars(values: Sequence[float]) -> str:
    """A bar per stretch of runs."""
    top = len(BARS) - 1
    return "".join(BARS[min(top, int(value / FULL_BAR * top + 0.5))] for value in values)
