"""Long work on the whole ledger: the services' own commands, run as a process each, awaited here.

`POST /v1/projections/verify|rebuild` are the projector's, `GET /v1/replay` is the placer's, `GET /v1/estimator/models`
and `GET /v1/jobs/ID/estimate/check` are the estimator's.

The answer is one JSON object. While it is worked on, blanks are sent ahead of it, so that no line in between
takes the silence for death.
"""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Sequence
from importlib.util import find_spec
from typing import Annotated

import orjson
from fastapi import APIRouter, Query, Request
from fastapi.responses import StreamingResponse

from penstock.model.external_events import JobEstimated, JobSubmitted
from penstock_services.gateway.core.problems import Problem
from penstock_services.gateway.shell.door import Door, door_of
from penstock_services.gateway.shell.jobs import find_job

router = APIRouter(prefix="/v1", tags=["checking"])

SIGN_OF_LIFE_S = 2.0
MAX_TOLD_BYTES = 2_000
ESTIMATOR = "penstock_services.estimator.evaluate"


@router.post("/projections/verify", response_class=StreamingResponse)
async def verify(request: Request) -> StreamingResponse:
    """Replays the ledger and compares every table row by row: `{"ok": true|false, "tables": …, "differences": […]}`."""
    return _answer(door_of(request), "penstock_services.projector", "verify")


@router.post("/projections/rebuild", response_class=StreamingResponse)
async def rebuild(request: Request) -> StreamingResponse:
    """Replays the ledger into new tables and puts them in place of the old ones, in one transaction."""
    return _answer(door_of(request), "penstock_services.projector", "rebuild")


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
    return _answer(door_of(request), "penstock_services.placer", "replay", *arguments)


@router.get("/estimator/models", response_class=StreamingResponse)
async def models(request: Request) -> StreamingResponse:
    """The models that are kept, newest first of each kind: `{"ok": true, "models": [{version, kind, runs, …, whole, in_use}]}`."""
    door = door_of(request)
    return _answer(door, ESTIMATOR, "models", lock=_asking(door))


@router.get("/jobs/{job_id}/estimate/check", response_class=StreamingResponse)
async def check(job_id: str, request: Request) -> StreamingResponse:
    """Asks the very model version that the job was estimated with again: `{"ok": true|false|null, "text": …, "models": […]}`.

    `ok` is null where no model was asked.
    """
    door = door_of(request)
    lock = _asking(door)
    await find_job(door, job_id)
    await door.fresh()
    rows = await door.store.rows(
        "SELECT json_build_object('seq', seq, 'type', type, 'data', data)::text FROM events WHERE job_id = $1 "
        "AND type = ANY($2) ORDER BY seq, n LIMIT 2",
        job_id,
        [JobSubmitted.TYPE, JobEstimated.TYPE],
    )
    found = {row["type"]: row for row in map(orjson.loads, rows)}
    if len(found) < 2:
        raise Problem(
            409,
            "not_estimated",
            f"job {job_id} has no estimate in the read models yet; ask again once it has",
        )
    submitted, estimated = found[JobSubmitted.TYPE], found[JobEstimated.TYPE]
    told = {
        "job_id": job_id,
        "spec": submitted["data"]["spec"],
        "submitted_seq": submitted["seq"],
        "estimate": estimated["data"]["estimate"],
        "estimated_seq": estimated["seq"],
    }
    return _answer(door, ESTIMATOR, "check", lock=lock, told=orjson.dumps(told))


def _asking(door: Door) -> asyncio.Lock:
    """Of questions to the estimator, which do not wait for a replay. Raises `Problem`."""
    if find_spec("scipy") is None or find_spec("penstock_services.estimator") is None:
        told = "models can be read where the estimator is installed; pip install 'penstock[estimator]' beside the gateway"
        raise Problem(503, "no_estimator", told)
    if door.asking.locked():
        raise Problem(429, "overloaded", "another question about models is being answered", retry_after_s=1)
    return door.asking


def _answer(
    door: Door, module: str, *arguments: str, lock: asyncio.Lock | None = None, told: bytes | None = None
) -> StreamingResponse:
    """`lock`: one such work at a time; `told`: what the command reads from its stdin."""
    if lock is None:
        lock = door.chores
        if lock.locked():
            raise Problem(409, "under_way", "a verify, rebuild or replay is under way", retry_after_s=5)
    return StreamingResponse(_work(door, module, arguments, lock, told), media_type="application/json")


async def _work(
    door: Door, module: str, arguments: Sequence[str], lock: asyncio.Lock, told: bytes | None
) -> AsyncIterator[bytes]:
    async with lock:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            module,
            *arguments,
            env={**os.environ, **door.settings.environment()},
            stdin=asyncio.subprocess.DEVNULL if told is None else asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        talking = asyncio.ensure_future(process.communicate(told))
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
