"""`penstock token`: generates a bearer token; the gateway's file gets its hash, the caller gets the token."""

import fcntl
import os
import secrets
from pathlib import Path
from typing import Annotated

import typer

from penstock.exits import Exit, Stop
from penstock_services.gateway.core.access import Caller, Role, parse_tokens, token_line

TOKEN_BYTES = 32


def token(
    ctx: typer.Context,
    tokens: Annotated[
        Path,
        typer.Option(
            metavar="FILE", envvar="PENSTOCK_TOKENS", help="The gateway's file of tokens; a line is added."
        ),
    ],
    roles: Annotated[
        str, typer.Option(metavar="submit,read", help=f"Roles of the token: some of {', '.join(Role)}.")
    ],
    tenant: Annotated[str | None, typer.Option(help="Owner of the jobs submitted with the token.")] = None,
    node: Annotated[
        str | None, typer.Option(help="The node that the token authenticates, with the role node.")
    ] = None,
    name: Annotated[
        str, typer.Option(help="Stored as TENANT/NAME with its actions; default: a part of the token's hash.")
    ] = "",
) -> None:
    """Make a token for the gateway: its hash is added to the gateway's file,
    the token is printed to stdout once."""
    made = secrets.token_urlsafe(TOKEN_BYTES)
    try:
        caller = Caller(frozenset(map(Role, filter(None, roles.split(",")))), tenant, node, name)
        line = token_line(made, caller)
        _append(tokens, line)
    except OSError as error:
        raise Stop(
            Exit.BAD_SPEC,
            f"--tokens {tokens}: no token was made: {error.strerror}; name a file in a folder that exists",
        ) from error
    except ValueError as error:
        raise Stop(Exit.BAD_SPEC, f"--tokens {tokens}: no token was made: {error}") from error
    print(made)


def _append(path: Path, line: str) -> None:
    """Adds the line, in a file that only its owner can use: its present owner, also where root adds the line.

    One process at a time, so that no line is lost.
    Raises `ValueError` or OSError, and then changes nothing.
    """
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)  # the file itself is replaced
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        _replace(path, line)
    finally:
        os.close(folder)


def _replace(path: Path, line: str) -> None:
    known = path.stat() if path.exists() else None
    before = path.read_text(encoding="utf-8") if known else ""
    text = before + ("" if before.endswith("\n") or not before else "\n") + line + "\n"
    parse_tokens(text)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(
            os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8"
        ) as file:
            if known and known.st_uid != os.geteuid():
                os.fchown(file.fileno(), known.st_uid, known.st_gid)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
