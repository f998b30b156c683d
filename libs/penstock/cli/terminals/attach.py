"""`penstock attach`, and `penstock submit -it`: the terminal of a job on this machine's terminal."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Annotated, Any, cast

import typer

from penstock.cli.common import JobArgument, find_job_id, gateway
from penstock.cli.following import follow
from penstock.cli.output import remark
from penstock.cli.session import Session
from penstock.cli.signals import exit_code
from penstock.cli.terminals import terminal
from penstock.client import Client
from penstock.exits import Exit, Stop

DETACH_KEYS = "ctrl-p,ctrl-q"
NONE = "none"
CTRL = "ctrl-"
CONTROLS = "@abcdefghijklmnopqrstuvwxyz[\\]^_"
"""Keys that have a control character, in the order of these characters."""

KeysFlag = Annotated[
    str,
    typer.Option(metavar=DETACH_KEYS, help="Keys that leave the terminal, and not the job; none: no keys."),
]


def attach(
    ctx: typer.Context,
    job: JobArgument,
    task: Annotated[str | None, typer.Option(metavar="w0", help="Task; needed where several run.")] = None,
    detach_keys: KeysFlag = DETACH_KEYS,
) -> None:
    """Attach to the terminal of a job that was submitted with -it; ctrl-p ctrl-q detaches.

    All who are attached see the same and type into the same, as many as 8. The job goes on when this command
    ends. If the job ends, the exit code is that of the job, as of `submit`.
    """
    terminal.require_terminal("attach", f"to only read use `penstock logs -f {job}`")
    keys, client = DetachKeys(detach_keys), gateway(ctx)
    job_id = find_job_id(client, job)
    try:
        raise typer.Exit(_attached(ctx, client, job_id, task, keys, propagate=False))
    except KeyboardInterrupt as stop:
        with suppress(OSError):  # the terminal may be gone
            _goes_on(job_id)
        raise typer.Exit(exit_code(stop)) from stop


def with_term(interactive: bool | None, env: list[str] | None) -> list[str]:
    """The variables of a job, with the kind of this terminal for one that has a terminal."""
    found = list(env or [])
    if interactive and not any(entry.startswith("TERM=") for entry in found):
        found.append(f"TERM={terminal.kind()}")
    return found


def follower(
    ctx: typer.Context, interactive: bool | None, *, propagate: bool
) -> Callable[[Client, str], int] | None:
    """What follows an interactive job in place of `follow.to_end`; None: another job. Raises `Stop`."""
    if not interactive:
        return None
    terminal.require_terminal("--interactive", "leave it out, or give --detach and attach later")
    return partial(_follow, ctx, propagate=propagate)


def _follow(ctx: typer.Context, client: Client, job_id: str, *, propagate: bool) -> int:
    if not follow.to_start(client, job_id):
        return follow.exit_code(client.find(job_id, ended=True), propagate=propagate)
    return _attached(ctx, client, job_id, None, DetachKeys(DETACH_KEYS), propagate=propagate)


def _attached(
    ctx: typer.Context, client: Client, job_id: str, task: str | None, keys: "DetachKeys", *, propagate: bool
) -> int:
    asked: dict[str, Any] = {"terminal": terminal.size()} | ({} if task is None else {"task": task})
    opened = cast(Session, ctx.find_root().obj).session(f"/v1/jobs/{job_id}/attach", asked)
    if not terminal.join(opened, stdin=True, terminal=True, keys=keys):
        _goes_on(job_id)
        return 0
    return follow.exit_code(follow.to_end(client, job_id, follow.Shows.NOTHING), propagate=propagate)


def _goes_on(job_id: str) -> None:
    remark(f"\nDetached; {job_id} goes on.\n  penstock attach {job_id}\n  penstock cancel {job_id}")


class DetachKeys:
    """Looks for the keys that detach in what is typed; `terminal.Keys`. Their beginning is sent when another
    key follows."""

    def __init__(self, text: str) -> None:
        """Raises `Stop`."""
        self._keys = b"" if text == NONE else b"".join(_key(name, text) for name in text.split(","))
        self._held = b""

    def __call__(self, data: bytes) -> tuple[bytes, bool]:
        data = self._held + data
        if self._keys and (found := data.find(self._keys)) >= 0:
            return data[:found], True
        most = min(len(self._keys) - 1, len(data))
        begun = next((count for count in range(most, 0, -1) if data.endswith(self._keys[:count])), 0)
        self._held = data[len(data) - begun :]
        return data[: len(data) - begun], False


def _key(name: str, text: str) -> bytes:
    """Raises `Stop`."""
    last = name.removeprefix(CTRL)
    if len(last) == 1 and name != last and last in CONTROLS:
        return bytes([CONTROLS.index(last)])
    if len(name) == 1 and name.isascii():
        return name.encode()
    raise Stop(
        Exit.BAD_SPEC,
        f"--detach-keys {text}: {name!r} is not a key; give letters or ctrl-a … ctrl-z with commas between, "
        "or none",
    )
