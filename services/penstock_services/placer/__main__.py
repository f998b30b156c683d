"""`penstock-placer [replay | archive | verify-archive | accept-input | accept-ledger]`, or `python -m
penstock_services.placer`: the placer and its admin commands."""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Annotated, Any

import orjson
import typer

from penstock import commandline
from penstock.exits import Exit, Stop
from penstock.log.open import open_log
from penstock.log.port import Log
from penstock.model.schema.topics import INPUT_TOPICS, Topic
from penstock.runtime.service import main as serve
from penstock.runtime.settings import Settings
from penstock_services.placer.shell import accept
from penstock_services.placer.shell import archive as archiving
from penstock_services.placer.shell import replay as replaying
from penstock_services.placer.shell.service import run

app = commandline.new_app(invoke_without_command=True)


@app.callback()
def placer(ctx: typer.Context) -> None:
    """Run the placer until SIGTERM; settings come from the environment (`penstock.runtime.settings`)."""
    if ctx.invoked_subcommand is None:
        serve("placer", run)


@app.command()
def replay(
    until: Annotated[
        int | None,
        typer.Option(metavar="SEQ", help="Replay up to this ledger record; default: the last one."),
    ] = None,
    decision: Annotated[
        str | None,
        typer.Option(metavar="ID", help="A ledger seq or a job: show its record as repeated."),
    ] = None,
) -> int:
    """Repeat all decisions from the log and compare; prints one JSON object.

    Exit codes: 0 everything is identical; 1 something differs; 2 a wrong setting.
    """
    try:
        found = replaying.replay(Settings.from_env(), until, decision, _show_progress)
    except LookupError as error:
        raise Stop(Exit.PROBLEM, str(error)) from error
    print(orjson.dumps(found).decode())
    return Exit.OK if found["ok"] else Exit.PROBLEM


@app.command("accept-input")
def accept_input(
    topic: Annotated[
        Topic,
        typer.Argument(
            metavar="TOPIC",
            show_choices=False,
            help=f"The input that was truncated or created anew: {', '.join(INPUT_TOPICS)}.",
        ),
    ],
    offset: Annotated[
        int, typer.Option("--from", metavar="OFFSET", min=0, help="Offset of the next record to answer.")
    ],
    reason: Annotated[str, typer.Option(help="Stored in the ledger.")] = "",
) -> None:
    """Accept an input topic that was truncated or created anew; the ledger records it.

    Exit codes: 0 accepted; 1 another placer came first, or the log failed; 2 a wrong setting or offset.
    """
    settings = Settings.from_env()
    found = asyncio.run(_with_log(settings, partial(accept.accept_input, settings, topic, offset, reason)))
    print(orjson.dumps(found).decode())


@app.command("accept-ledger")
def accept_ledger(
    epoch: Annotated[
        int | None,
        typer.Option(
            min=1, help="Epoch above all that were ever used; needed where Postgres was restored, too."
        ),
    ] = None,
    reason: Annotated[str, typer.Option(help="Stored in the ledger.")] = "",
) -> None:
    """Accept a ledger that has lost records; the ledger records it, and no token is issued twice.

    Exit codes: 0 accepted; 1 another placer came first, or the log failed; 2 a wrong setting or epoch.
    """
    settings = Settings.from_env()
    found = asyncio.run(_with_log(settings, partial(accept.accept_ledger, settings, epoch, reason)))
    print(orjson.dumps(found).decode())


@app.command()
def archive(
    leave: Annotated[
        int,
        typer.Option(metavar="RECORDS", min=0, help="Minimum number of ledger records that stay in the log."),
    ] = archiving.LEAVE_RECORDS,
    delete: Annotated[
        bool, typer.Option("--delete/--copy-only", help="Whether archived records are deleted from the log.")
    ] = True,
) -> None:
    """Move the ledger below a verified snapshot, and the inputs that it answers, to the directory
    PENSTOCK_ARCHIVE.

    All services may run. On a Kafka with rights PENSTOCK_LOG must be an administrator's. Prints one JSON
    object. Exit codes: 0 done; 1 the log failed; 2 a wrong setting, or an archive of another ledger: nothing
    was deleted.
    """
    settings = Settings.from_env()
    found = asyncio.run(
        _with_log(settings, lambda log: archiving.archive(settings, log, leave, delete=delete), whole=False)
    )
    print(orjson.dumps(found).decode())


@app.command("verify-archive")
def verify_archive() -> None:
    """Read every segment of the archive and prove the ledger's chain; prints one JSON object.

    Exit codes: 0 whole; 1 the log failed; 2 a segment is missing or altered, the archive is another ledger's,
    or empty.
    """
    settings = Settings.from_env()
    found = asyncio.run(_with_log(settings, lambda log: archiving.verify(settings, log), whole=False))
    print(orjson.dumps(found).decode())


async def _with_log(
    settings: Settings, work: Callable[[Log], Awaitable[dict[str, Any]]], *, whole: bool = True
) -> dict[str, Any]:
    """`whole`: with the archive as part of the log."""
    log = await open_log(settings.log_url, "placer", settings.archive if whole else None).start()
    try:
        return await work(log)
    finally:
        await log.close()


def _show_progress(records: int) -> None:
    print(f"{records} records", file=sys.stderr, flush=True)


def main() -> None:
    """The console script; never returns."""
    commandline.start(app, "penstock-placer")


if __name__ == "__main__":
    main()
