"""Admin requests that read the whole ledger or the learned models: verify, rebuild, replay, models, check.

The services' own functions answer them, in worker processes; see penstock.runtime.pool. The answer is one
JSON object. While a worker is busy, spaces are sent before it, so that no proxy in between closes an idle
connection.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Annotated

import orjson
from fastapi import APIRouter, Query, Request
from fastapi.responses import Response, StreamingResponse
from msgspec.structs import replace

from penstock.errors import PenstockError
from penstock.log.open import open_log
from penstock.model.inputs.estimates import JobEstimated
from penstock.model.inputs.external_events import JobSubmitted
from penstock.model.schema.topics import MAX_EVENT_BYTES
from penstock.model.wire.codec import as_written
from penstock.runtime.following.amended_log import AmendedLog
from penstock.runtime.settings import Settings
from penstock_services.gateway.core.access import Role
from penstock_services.gateway.core.problems import Problem
from penstock_services.gateway.core.requests.acts import read_fields
from penstock_services.gateway.core.requests.profiling import ProfileAsked
from penstock_services.gateway.shell.access.roles import caller_of, needs
from penstock_services.gateway.shell.answers.models import (
    Answer,
    answer_about_models,
    answer_of,
    failed,
    require_free_models,
)
from penstock_services.gateway.shell.document import request_body
from penstock_services.gateway.shell.gateway import (
    Exclusive,
    Gateway,
    answer,
    content_type,
    gateway_of,
    read_body,
)
from penstock_services.gateway.shell.routes.jobs import own_job
from penstock_services.placer.shell.replay import replay as replay_ledger
from penstock_services.placer.shell.replay import replay_fresh
from penstock_services.projector.shell.admin import perform

router = APIRouter(prefix="/v1", tags=["checking"])

BLANK_EVERY_S = 2.0


@router.post("/projections/verify", response_class=StreamingResponse, dependencies=[needs(Role.OPERATE)])
async def verify(request: Request) -> StreamingResponse:
    """Replays the ledger and compares every table row by row:
    `{"ok": true|false, "tables": …, "differences": […]}`."""
    return _over_ledger(request, "verify", partial(perform, "verify"))


@router.post("/projections/rebuild", response_class=StreamingResponse, dependencies=[needs(Role.OPERATE)])
async def rebuild(request: Request) -> StreamingResponse:
    """Replays the ledger into new tables and puts them in place of the old ones, in one transaction."""
    return _over_ledger(request, "rebuild", partial(perform, "rebuild"))


@router.get("/replay", response_class=StreamingResponse, dependencies=[needs(Role.OPERATE)])
async def replay(
    request: Request,
    until: Annotated[int | None, Query(ge=0, description="up to this ledger record")] = None,
    decision: Annotated[
        str | None,
        Query(max_length=128, description="a ledger seq or a job: its record, decided again, in full"),
    ] = None,
    fresh: Annotated[
        bool,
        Query(description="by a decider that starts from the newest snapshot and knows nothing of before"),
    ] = False,
) -> StreamingResponse:
    """Decides everything again from the log and compares byte for byte:
    `{"ok": true|false, "records": …, …}`."""
    if fresh and (until is not None or decision is not None):
        raise Problem(
            400,
            "fresh_replay",
            "fresh decides all records after the newest snapshot; leave out until and decision",
        )
    work = replay_fresh if fresh else partial(replay_ledger, until=until, decision=decision)
    return _over_ledger(request, "replay", work)


@router.get("/estimator/models", response_class=StreamingResponse, dependencies=[needs(Role.READ)])
async def models(request: Request) -> StreamingResponse:
    """The stored models, newest first of each kind:
    `{"ok": true, "models": [{version, kind, runs, …, whole, in_use}]}`."""
    return _of_models(gateway_of(request), partial(ask_estimator, None))


@router.get(
    "/jobs/{job_id}/estimate/check", response_class=StreamingResponse, dependencies=[needs(Role.READ)]
)
async def check(job_id: str, request: Request) -> StreamingResponse:
    """Queries again exactly the model version in the job's estimate: `{"ok": true|false|null, "text": …,
    "models": […]}`.

    `ok` is null where no model was used.
    """
    gateway = gateway_of(request)
    require_free_models(gateway)
    await own_job(request, job_id, "estimate")
    await gateway.fresh()
    rows = await gateway.store.rows(
        "SELECT json_build_object('seq', seq, 'type', type, 'data', data)::text FROM events WHERE job_id = "
        "$1 AND type = ANY($2) ORDER BY seq, n LIMIT 2",
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
    recorded = {
        "job_id": job_id,
        "spec": submitted["data"]["spec"],
        "submitted_seq": submitted["seq"],
        "estimate": estimated["data"]["estimate"],
        "estimated_seq": estimated["seq"],
    }
    return _of_models(gateway, partial(ask_estimator, orjson.dumps(recorded)))


@router.post(
    "/estimator/profile", openapi_extra=request_body(ProfileAsked), dependencies=[needs(Role.SUBMIT)]
)
async def profile(request: Request) -> Response:
    """What is known of a network's iterations with these numbers of workers and batches, and which runs would
    reduce the uncertainty most.

    `cells`: each with the interval of nine in ten, null where nothing was measured on this `gpu`; `plan`: the
    runs, the most useful first, with the root of the mean variance of ln t over the cells before and after.
    Nothing is submitted. `owner`: whose runs count first; of a token its tenant.
    """
    body = await read_body(request, MAX_EVENT_BYTES)
    if content_type(request) != "application/json":
        raise Problem(
            415,
            "content_type",
            'send application/json: {"model": "resnet50", "workers": [1, 2], "batches": [64]}',
        )
    asked = read_fields(body, ProfileAsked)
    asked = replace(asked, owner=caller_of(request).tenant or asked.owner)
    found = await answer_about_models(
        gateway_of(request), partial(ask_profile, orjson.dumps(as_written(asked)))
    )
    if not found["ok"]:
        raise Problem(409, "no_profile", found["error"])
    return answer(found)


def ask_profile(asked: bytes, settings: Settings) -> Answer:
    """For a worker: it loads the estimator's libraries."""
    from penstock_services.estimator import present

    return asyncio.run(present.profile_now(settings, orjson.loads(asked)))


def _over_ledger(request: Request, name: str, work: Callable[[Settings], Answer]) -> StreamingResponse:
    """Runs one such request at a time. Raises `Problem`."""
    gateway = gateway_of(request)
    if gateway.ledger.lock.locked():
        raise Problem(409, "under_way", "a verify, rebuild or replay is under way", retry_after_s=5)
    return _stream(gateway.settings, name, gateway.ledger, work)


def _of_models(gateway: Gateway, work: Callable[[Settings], Answer]) -> StreamingResponse:
    """A question to the estimator, which does not wait for a replay. Raises `Problem`."""
    require_free_models(gateway)
    return _stream(gateway.settings, "penstock", gateway.models, work)


def ask_estimator(recorded: bytes | None, settings: Settings) -> Answer:
    """The stored models, or the check of one job's recorded estimate.
    For a worker: it loads the estimator's libraries."""
    from penstock_services.estimator import registry

    async def check(job: registry.Recorded) -> Answer:
        log = await AmendedLog(open_log(settings.log_url, "estimator", settings.archive)).start()
        try:
            return await registry.check(settings, log, job)
        finally:
            await log.close()

    return asyncio.run(registry.models(settings) if recorded is None else check(registry.recorded(recorded)))


def _stream(
    settings: Settings, name: str, exclusive: Exclusive, work: Callable[[Settings], Answer]
) -> StreamingResponse:
    async def chunks() -> AsyncIterator[bytes]:
        async with exclusive.lock:
            working = asyncio.ensure_future(exclusive.workers.run(answer_of, name, work, settings))
            try:
                while not (await asyncio.wait({working}, timeout=BLANK_EVERY_S))[0]:
                    yield b" "
            finally:
                if not working.done():  # the client has gone
                    exclusive.workers.close()
                    await asyncio.gather(working, return_exceptions=True)
            try:
                yield working.result()
            except PenstockError as error:  # the worker was killed
                yield orjson.dumps(failed(name, error))

    return StreamingResponse(chunks(), media_type="application/json")
