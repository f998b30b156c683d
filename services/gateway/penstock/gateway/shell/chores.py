"""Long work on the whole ledger: the services' own commands, run as a process each, awaited here.

`POST /v1/projections/verify|rebuild` are the projector's, `GET /v1/replay` is the placer's.

The answer is one JSON object. While it is worked on, blanks are sent ahead of it, so that no line in between
takes the silence for death.
"""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from typing import Annotated

import orjson
from fastapi import APIRouter, Query, Request
from fastapi.responses import StreamingResponse

from penstock.gateway.core.problems import Problem
from penstock.gateway.shell.door import Door, door_of

router = APIRouter(prefix="/v1", tags=["checking"])

SIGN_OF_LIFE_S = 2.0
MAX_TOLD_BYTES = 2_000


@router.post("/projections/verify", response_class=StreamingResponse)
async def verify(request: Request) -> StreamingResponse:
    """Replays the ledger and compares every table row by row: `{"ok": true|false, "tables": …, "differences": […]}`."""
    return _answer(door_of(request), "penstock.projector", "verify")


@router.post("/projections/rebuild", response_class=StreamingResponse)
async def rebuild(request: Request) -> StreamingResponse:
    """Replays the ledger into new tables and puts them in place of the old ones, in one transaction."""
    return _answer(door_of(request), "penstock.projector", "rebuild")


@router.get("/replay", response_class=StreamingResponse)
async def replay(
    request: Request,
    until: Annotated[int | None, Query(ge=0, description="up to this ledger record")] = None,
    decision: Annotated[
        str | None,
        Query(max_length=128, description="a ledger seq or a job: its record, decided again, in full"),
    ] = None,
) -> StreamingResponse:
    """Decides everything again from the log and compares byte for byte: `{"ok": true|false, "records": …, …}`."""
    arguments = [] if until is None else [f"--until={until}"]
    arguments += [] if decision is None else [f"--decision={decision}"]
    return _answer(door_of(request), "penstock.placer", "replay", *arguments)


def _answer(door: Door, module: str, *arguments: str) -> StreamingResponse:
    if door.chores.locked():
        raise Problem(409, "under_way", "a verify, rebuild or replay is under way", retry_after_s=5)
    return StreamingResponse(_work(door, module, *arguments), media_type="application/json")


async def _work(door: Door, module: str, *arguments: str) -> AsyncIterator[bytes]:
    async with door.chores:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            module,
            *arguments,
            env={**os.environ, **door.settings.environment()},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        talking = asyncio.ensure_future(process.communicate())
        try:
            while True:
                done, _ = await asyncio.wait({talking}, timeout=SIGN_OF_LIFE_S)
                if done:
                    break
                yield b" "
        finally:
            if process.returncode is None:
                process.kill()
                await asyncio.gather(talking, return_exceptions=True)
        out, err = talking.result()
        yield _told(out, err)


def _told(out: bytes, err: bytes) -> bytes:
    """The last line of its output, if that is the answer; else what it complained about."""
    lines = out.strip().splitlines()
    if lines and lines[-1].startswith(b"{"):
        return lines[-1]
    return orjson.dumps({"ok": False, "error": err[-MAX_TOLD_BYTES:].decode(errors="replace").strip()})
