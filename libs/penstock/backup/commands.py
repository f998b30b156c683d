"""`penstock backup` and `penstock restore`: for administrators of the log and the database."""

import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Annotated, Any

import typer
import uvloop

from penstock.backup.manifest import Manifest
from penstock.backup.place import running_or_stopped, stopped
from penstock.backup.progress import Progress
from penstock.backup.restore import restore as restoring
from penstock.backup.take import take
from penstock.backup.verify import verify as verifying
from penstock.cli.common import Output
from penstock.cli.output import Format, as_document, dump, remark
from penstock.screen import bar, console

Copy = Annotated[Path, typer.Argument(metavar="COPY", help="Folder of the copy.")]
Folder = Annotated[
    Path | None,
    typer.Option(
        help="The folder of `penstock up`; else PENSTOCK_LOG and PENSTOCK_DSN name log and database."
    ),
]


def backup(
    ctx: typer.Context,
    copy: Copy,
    folder: Folder = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Take no copy: check every digest of this one, and its ledger.")
    ] = False,
    output: Output = Format.TABLE,
) -> None:
    """Copy a running cell consistently: ledger, inputs, tables, keys. The copy is as secret as they are.

    PENSTOCK_LOG and PENSTOCK_DSN must be an administrator's. Exit codes: 0 the copy is whole; 1 log or
    database failed; 2 a wrong setting, a folder that is not empty, or (--verify) a copy that cannot be
    restored.
    """
    copy, folder = copy.absolute(), folder and folder.absolute()

    async def work(progress: Progress) -> dict[str, Any]:
        if verify:
            manifest, count = await verifying(copy, progress)
            return {**described(manifest), "files": count}
        async with running_or_stopped(folder) as place:
            return described(await take(copy, place.settings, place.env, progress))

    dump(_run("verify" if verify else "backup", work), as_document(output))


def restore(
    ctx: typer.Context,
    copy: Copy,
    folder: Folder = None,
    epoch: Annotated[
        int | None,
        typer.Option(
            min=1, help="Above every epoch that was used, where COPY was moved away from the others."
        ),
    ] = None,
    reason: Annotated[str, typer.Option(help="Stored in the ledger.")] = "",
    output: Output = Format.TABLE,
) -> None:
    """Restore a copy into an empty log and database, in a new epoch: orders from after it count no more.

    Stop all services and node-reporters first. Exit codes: 0 restored, the services may start; 1 log or
    database failed: empty both and repeat; 2 a wrong setting, a damaged copy, or a target that is not empty:
    nothing was changed.
    """
    copy, folder = copy.absolute(), folder and folder.absolute()

    async def work(progress: Progress) -> dict[str, Any]:
        async with stopped(folder) as place:
            found = await restoring(copy, place.settings, place.env, progress, epoch, reason)
        if found.left:
            remark(f"not put back, since the environment does not name them: {', '.join(found.left)}")
        return {**described(found.manifest), "epoch": found.epoch, "left": found.left}

    dump(_run("restore", work), as_document(output))


def described(manifest: Manifest) -> dict[str, Any]:
    """The summary that the commands print."""
    return {
        "ok": True,
        "cell": manifest.cell,
        "taken_ms": manifest.taken_ms,
        "seq": manifest.head.seq,
        "head": manifest.head.id,
        "epoch": manifest.head.epoch,
        "records": manifest.records,
        "rows": manifest.rows,
    }


def _run(what: str, work: Callable[[Progress], Coroutine[Any, Any, dict[str, Any]]]) -> dict[str, Any]:
    began_s = time.monotonic()
    with bar(console(stderr=True), what) as show:
        found = uvloop.run(work(Progress(show)))
    return {**found, "seconds": round(time.monotonic() - began_s, 1)}
