"""`penstock export`: the jobs that a cell ran, as a trace that can be run again under another policy."""

import argparse
import re
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from rich.console import Console

from penstock.ledger.record import GENESIS, read_valid
from penstock.runtime.json_lines import json_lines
from penstock.runtime.reading import BadFile, Problem
from penstock.simulator.commands.exits import OK, BadCommand
from penstock.simulator.traces.history import History, Left, Told, node_rows
from penstock.simulator.traces.writing import trace_lines, write_lines

UNITS_MS = {"m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 7 * 86_400_000}
AGO = re.compile(r"([1-9][0-9]{0,5})([mhdw])")


class Streamed(msgspec.Struct):
    """One event as the gateway streams it."""

    at_ms: int
    type: str
    data: msgspec.Raw


def add_arguments(to: argparse.ArgumentParser) -> None:
    source = to.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--ledger",
        type=Path,
        metavar="FILE",
        help="a ledger, one record a line, as `penstock simulate --ledger` writes",
    )
    source.add_argument(
        "--events",
        type=Path,
        metavar="FILE",
        help="events as the gateway streams them, one JSON a line; -: stdin",
    )
    to.add_argument(
        "--from",
        dest="since",
        metavar="WHEN",
        help="jobs submitted from then on: a date and time, or 30d, 12h, 45m before the last record",
    )
    to.add_argument("--until", metavar="WHEN", help="jobs submitted before then")
    to.add_argument(
        "--nodes", type=Path, metavar="FILE", help="also write the cell's nodes, for --cluster FILE"
    )
    to.add_argument("-o", "--output", type=Path, metavar="FILE", help="the trace; by default stdout")


def run(asked: argparse.Namespace, errors: Console) -> int:
    """Raises `BadCommand`, `BadFile`."""
    for name, text in (("--from", asked.since), ("--until", asked.until)):
        _moment_ms(text, 0, name)
    history = History()
    for told in read_ledger(asked.ledger, history) if asked.ledger else read_events(asked.events, history):
        errors.print(f"penstock: {told}", markup=False)
    since_ms = _moment_ms(asked.since, history.last_ms, "--from")
    until_ms = _moment_ms(asked.until, history.last_ms, "--until")
    found, left = history.jobs(since_ms, until_ms)
    if not found:
        raise BadCommand(
            f"no job that ran was submitted in this time; {_told_left(left) or 'none at all was'}"
        )
    try:
        write_lines(asked.output, lines_of(found))
        if asked.nodes is not None:
            write_lines(asked.nodes, node_rows(history.nodes))
            mixed = [node.node_id for node in history.nodes.values() if node.mixed]
            if mixed:
                told = f"{len(mixed)} nodes have GPUs of several kinds and stand there with the first: {mixed[0]}, …"
                errors.print(f"penstock: {told}", markup=False)
    except OSError as error:
        raise BadCommand(f"{error.filename or asked.output}: {error.strerror}") from error
    told = _told_left(left)
    errors.print(f"penstock: {len(found)} jobs written{f'; {told}' if told else ''}", markup=False)
    return OK


def lines_of(found: Sequence[Told]) -> Iterator[Sequence[str]]:
    """A trace's lines, with each job's outcome as a column for people."""
    yield from trace_lines([one.job for one in found], {"outcome": [one.outcome for one in found]})


def _told_left(left: Left) -> str:
    parts = []
    if left.still_running:
        parts.append(f"{left.still_running} of them still run, and stand there with the time so far")
    if left.never_ran:
        parts.append(f"{left.never_ran} never ran and are left out")
    if left.unknown:
        parts.append(f"{left.unknown} were submitted before the first record that is kept and are left out")
    return "; ".join(parts)


def _moment_ms(text: str | None, last_ms: int, option: str) -> int | None:
    """The time of an option, ms since the epoch. Raises `BadCommand`."""
    if text is None:
        return None
    ago = AGO.fullmatch(text)
    if ago is not None:
        return last_ms - int(ago[1]) * UNITS_MS[ago[2]]
    try:
        found = datetime.fromisoformat(text)
    except ValueError as error:
        raise BadCommand(f"{option} {text}: neither a date and time nor a span as 30d, 12h, 45m") from error
    return round((found if found.tzinfo is not None else found.replace(tzinfo=UTC)).timestamp() * 1_000)


def read_ledger(path: Path, history: History) -> Iterator[str]:
    """Folds a ledger's file; yields remarks. A record that does not follow the chain is void (LAW 3), and counted.

    Raises `BadFile`.
    """
    head, void, line = GENESIS, [], 0
    for line, value in ledger_lines(path):
        found = read_valid(head, value)
        if found is None:
            void.append(line)
            continue
        head, record = found
        try:
            for fact in record.facts:
                history.take(record.now_ms, fact.type.rpartition(".v")[0], fact.data)
        except msgspec.DecodeError as error:
            raise BadFile(str(path), [Problem(line, "", f"a fact that cannot be read: {error}")]) from error
    if head.seq == 0:
        told = (
            f"no ledger: none of its {line} lines is a first record"
            if line
            else "empty: a ledger was expected"
        )
        raise BadFile(str(path), [Problem(0, "", told)])
    if void:
        yield f"{path}: {len(void)} records do not follow the one before and are void; the first in line {void[0]}"


def read_events(path: Path, history: History) -> Iterator[str]:
    """Folds the gateway's events. Raises `BadFile`."""
    decode = msgspec.json.Decoder(Streamed).decode
    line = 0
    for line, value in ledger_lines(path):
        try:
            event = decode(value)
            history.take(event.at_ms, event.type, event.data)
        except msgspec.DecodeError as error:
            raise BadFile(str(path), [Problem(line, "", f"no event: {error}")]) from error
    if not line:
        raise BadFile(str(path), [Problem(0, "", "empty: events were expected")])
    yield from ()


def ledger_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(number, bytes) of each line that is not blank. Raises `BadFile`."""
    try:
        yield from json_lines(path)
    except OSError as error:
        raise BadFile(str(path), [Problem(0, "", error.strerror or str(error))]) from error
