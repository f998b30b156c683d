"""Checks of a cell for operators: verify or rebuild the projections, replay the ledger."""

from typing import Annotated, Any

import typer

from penstock.cli.common import Output, gateway
from penstock.cli.output import Format, dump
from penstock.exits import Exit

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
    dump(answer, Format.YAML if output in (Format.TABLE, Format.WIDE) else output)
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
    output: Output = Format.TABLE,
) -> None:
    """Repeat all decisions from the log and compare byte for byte; exit code 1 when something differs."""
    client = gateway(ctx)
    _verdict(client.get("/v1/replay", patience_s=REPLAY_PATIENCE_S, until=until, decision=decision), output)
