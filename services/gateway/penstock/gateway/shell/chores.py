"""`POST /v1/projections/verify|rebuild`: the projector's own commands, run as a process, awaited here.

The answer is one JSON object. While it is worked on, blanks are sent ahead of it, so that no line in between
takes the silence for death.
"""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from typing import Literal

import orjson
from fastapi import APIRouter, Request
from fastapi.responses import StreamingResponse

from penstock.gateway.core.problems import Problem
from penstock.gateway.shell.door import Door, door_of

router = APIRouter(prefix="/v1/projections", tags=["projections"])

SIGN_OF_LIFE_S = 2.0
MAX_TOLD_BYTES = 2_000


@router.post("/verify", response_class=StreamingResponse)
async def verify(request: Request) -> StreamingResponse:
    """Replays the ledger and compares every table row by row: `{"ok": true|false, "tables": …, "differences": […]}`."""
    return _answer(door_of(request), "verify")


@router.post("/rebuild", response_class=StreamingResponse)
async def rebuild(request: Request) -> StreamingResponse:
    """Replays the ledger into new tables and puts them in place of the old ones, in one transaction."""
    return _answer(door_of(request), "rebuild")


def _answer(door: Door, what: Literal["verify", "rebuild"]) -> StreamingResponse:
    if door.chores.locked():
        raise Problem(409, "under_way", "a verify or rebuild is under way", retry_after_s=5)
    return StreamingResponse(_work(door, what), media_type="application/json")


async def _work(door: Door, what: str) -> AsyncIterator[bytes]:
    async with door.chores:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "penstock.projector",
            what,
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
