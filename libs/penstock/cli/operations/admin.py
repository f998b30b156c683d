"""Checks of a cell for operators: verify or rebuild the projections, replay the ledger,
repair a record of it."""

import sys
from typing import Annotated, Any

import typer
from rich.text import Text

from penstock.cli.common import Output, gateway
from penstock.cli.output import Format, as_document, dump, present
from penstock.exits import Exit, Stop

MIN_PYTHON = (3, 11)
MAX_NAMED = 4  # nodes of one kind
MAX_LAG_RECORDS = 1_000  # behind the ledger; far below a second of work for the projector
MAX_CLOCK_STEP_MS = 120_000  # longer than records are under way
REPLAY_PATIENCE_S = 600.0  # a replay folds tens of thousands of records per second, and decides on each
NVIDIA_SMI_TIMEOUT_S = 10.0


def verify(ctx: typer.Context, output: Output = Format.TABLE) -> None:
    """Replay the ledger and compare the read models with it row by row; exit code 1 when they differ."""
    _verdict(gateway(ctx).post("/v1/projections/verify"), output)


def rebuild(ctx: typer.Context, output: Output = Format.TABLE) -> None:
    """Empty the read models and fill them again from the ledger."""
    _verdict(gateway(ctx).post("/v1/projections/rebuild"), output)


def _verdict(answer: dict[str, Any], output: Format) -> None:
    dump(answer, as_document(output))
    if answer.get("ok") is False:
        raise typer.Exit(int(Exit.PROBLEM))


def replay(
    ctx: typer.Context,
    until: Annotated[
        int | None, typer.Option(metavar="SEQ", min=0, help="Replay up to this ledger record.")
    ] = None,
    decision: Annotated[
        str | None, typer.Option(metavar="ID", help="A record's seq or a job: show its decision as repeated.")
    ] = None,
    fresh: Annotated[
        bool,
        typer.Option(
            "--fresh", help="From the newest snapshot on, by a decider that knows nothing of before."
        ),
    ] = False,
    output: Output = Format.TABLE,
) -> None:
    """Repeat all decisions from the log and compare byte for byte; exit code 1 when something differs."""
    asked = {"fresh": "true"} if fresh else {}
    asked |= {
        name: str(value) for name, value in (("until", until), ("decision", decision)) if value is not None
    }
    _verdict(gateway(ctx).get("/v1/replay", patience_s=REPLAY_PATIENCE_S, **asked), output)


def repair(
    ctx: typer.Context,
    at: Annotated[
        int,
        typer.Option(
            "--at",
            metavar="OFFSET",
            min=0,
            help="Of the record, as `penstock doctor` and the services' logs name it.",
        ),
    ],
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Stored with the amendment.")] = "",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be amended; write nothing.")
    ] = False,
    output: Output = Format.TABLE,
) -> None:
    """Amend a ledger record that cannot be decoded, before which its cell stands still. For operators.

    Fields beyond their bounds become the nearest legal value; a fact that this cannot mend is left out. The
    record itself stays.
    """
    client = gateway(ctx)
    found: dict[str, Any] = client.get(f"/v1/repair/{at}")
    if not dry_run:
        if not yes:
            _confirm(found)
        found = client.post(f"/v1/repair/{at}", {"sha256": found["sha256"], "reason": reason})
    present(found, output, lambda: Text(_repaired(found, dry_run=dry_run)))


def _confirm(found: dict[str, Any]) -> None:
    """Raises `Stop` unless a person agrees."""
    question = f"{_changes(found)}\nAmend the record so, for every reader and for good?"
    if not sys.stdin.isatty():
        raise Stop(
            Exit.BAD_SPEC,
            f"{question} There is no terminal to answer on: give --yes, or --dry-run to look only",
        )
    if not typer.confirm(question, err=True):
        raise Stop(Exit.PROBLEM, f"the record at offset {found['offset']}: not amended")


def _changes(found: dict[str, Any]) -> str:
    """One line per change: `timer.set.v1 at_ms: 9007199254740993 becomes 9007199254740992 (…)`."""
    lines = [f"the record at offset {found['offset']} (seq {found['seq']}):"]
    for change in found["changes"]:
        kind = change["type"].removeprefix("penstock.")
        what = (
            f"{change['field']}: {change['given']} becomes {change['becomes']}"
            if change["field"]
            else "is left out"
        )
        lines.append(f"  {kind} {what} ({change['problem']})")
    return "\n".join(lines)


def _repaired(found: dict[str, Any], *, dry_run: bool) -> str:
    if dry_run:
        return f"{_changes(found)}\nnothing was written; without --dry-run the record is amended"
    done = (
        "amended; all services go on"
        if found["applied"]
        else "the amendment is in the log; the gateway has not read it yet"
    )
    return f"{_changes(found)}\n{done}"
