"""Idempotent submission of jobs: once per key, durable before it is acknowledged,
with the forecast of its deadline."""

import asyncio
import secrets
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response
from msgspec.structs import replace

from penstock.clock import wall_ms
from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.views import job_row
from penstock.model.inputs.external_events import JobSubmitted
from penstock.model.jobs.job_spec import JobSpec
from penstock.runtime.tracing.context import well_formed
from penstock.sdk.job_file.job_warnings import Doubt, warnings_of
from penstock_services.gateway.core.access import Caller, Role
from penstock_services.gateway.core.impossible import impossible
from penstock_services.gateway.core.job_callers import descended, refuse_too_many
from penstock_services.gateway.core.problems import BadField, Problem, invalid
from penstock_services.gateway.core.requests.idempotency import (
    checked_key,
    fresh_job_id,
    keyed_job_id,
    own_key,
    tenants_key,
)
from penstock_services.gateway.core.requests.submission import (
    owned,
    spec_digest,
    spec_from_json,
    spec_from_yaml,
    submission,
)
from penstock_services.gateway.shell.access.roles import caller_of, needs
from penstock_services.gateway.shell.answers import admission
from penstock_services.gateway.shell.answers.absent_folders import absent_folders
from penstock_services.gateway.shell.answers.deadlines import at_submission
from penstock_services.gateway.shell.gateway import Gateway, answer, content_type, gateway_of, read_body
from penstock_services.gateway.shell.routes.code import refuse_missing
from penstock_services.gateway.shell.routes.jobs import accepted, append_event, cancel, find_job, spec_in
from penstock_services.gateway.shell.store import Key

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])

YAML_TYPES = frozenset({"application/yaml", "application/x-yaml", "text/yaml", "text/x-yaml"})

SPEC_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {"$ref": "#/components/schemas/JobSpec"},
                "example": {
                    "name": "digits",
                    "owner": "ana",
                    "command": ["python", "train.py"],
                    "resources": {"gpus": 1},
                },
            },
            "application/yaml": {
                "schema": {"type": "string", "description": "A job file, with human units."},
                "example": "name: digits\ncommand: [python, train.py]\nresources: {gpus: 1, gpu_memory: "
                "4GiB}\n",
            },
        },
    },
    "parameters": [
        {
            "name": "Idempotency-Key",
            "in": "header",
            "required": False,
            "schema": {"type": "string", "minLength": 1, "maxLength": 256},
            "description": "The same key and job: the same job, once. The same key and another job: 409.",
        }
    ],
}


KEY: dict[str, Any] = {
    "parameters": [
        SPEC_BODY["parameters"][0] | {"required": True, "description": "The key of the job's submission."}
    ]
}
ACCEPTED: dict[str, Any] = {"application/json": {"schema": {"$ref": "#/components/schemas/Accepted"}}}
ANSWERS: dict[int | str, dict[str, Any]] = {
    202: {"description": "It is in the log.", "content": ACCEPTED},
    200: {
        "description": "A repetition: this key and job were seen before. Or, with `dry_run`, what is "
        "expected.",
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/AcceptedOrExpected"}}},
    },
}


NOTHING: dict[str, Any] = {
    "type": "object",
    "properties": {name: {"type": ["string", "null"]} for name in ("job_id", "outcome")},
}
KEYS_ANSWERS: dict[int | str, dict[str, Any]] = {
    202: ANSWERS[202],
    200: {"description": "Nothing is to be cancelled.", "content": {"application/json": {"schema": NOTHING}}},
}


@router.post(
    "", status_code=202, responses=ANSWERS, openapi_extra=SPEC_BODY, dependencies=[needs(Role.SUBMIT)]
)
async def submit(
    request: Request,
    strict_deadline: Annotated[
        bool,
        Query(description="409 where it would not be in time with odds of 95 %; nothing is submitted then"),
    ] = False,
    dry_run: Annotated[bool, Query(description="Only what would be expected of it: 200")] = False,
    estimate: Annotated[
        bool,
        Query(description="Of a dry run: whether the estimator is queried, which takes seconds"),
    ] = True,
) -> Response:
    """Submit a job. 202 once it is durable; 200 for a known key with the same job.

    `deadline`: of a job with a deadline or a service class, its odds, and the shortest deadline that holds,
    as `GET /v1/deadlines` has it. With `dry_run` the answer has no `job_id`; `estimate`: the job's estimated
    resources, null with `problem` where the estimator cannot be queried, and null with `estimate=false`.
    """
    gateway = gateway_of(request)
    caller = well_formed(request.headers.get("traceparent"))
    key = checked_key(request.headers.get("idempotency-key"))
    kind = content_type(request)
    if kind != "application/json" and kind not in YAML_TYPES:
        raise Problem(415, "content_type", f"{kind or 'none'}: send application/json or application/yaml")
    body = await read_body(request)
    spec = spec_from_json(body) if kind == "application/json" else spec_from_yaml(body)
    who = caller_of(request)
    spec = descended(owned(spec, who.tenant), who)
    refuse_missing(gateway, who.tenant, spec)
    doubts = await _doubts(gateway, spec)
    if dry_run:
        return answer(await admission.dry_run(gateway, spec, doubts, estimated=estimate))
    return await _submitted(gateway, spec, key, who, caller, doubts, strict_deadline=strict_deadline)


@router.post(
    "/{job_id}/retry",
    status_code=202,
    responses={number: ANSWERS[number] for number in (200, 202)},
    openapi_extra={"parameters": SPEC_BODY["parameters"]},
    dependencies=[needs(Role.SUBMIT)],
)
async def retry(job_id: str, request: Request) -> Response:
    """Submit a job that has ended once more: the same spec under a new id, with the old id in `retry_of`,
    tied to no follower.

    202, and 200 for a known key, as of a submission; 409 for a job that has not ended.
    """
    gateway, who = gateway_of(request), caller_of(request)
    tenant = who.tenant
    key = checked_key(request.headers.get("idempotency-key"))
    job = await find_job(gateway, job_id)
    earlier = spec_in(job)
    who.demand_own_tree(job_id, earlier.parents, f"job {job_id}")
    if tenant not in (None, job["owner"]):
        detail = (
            f"job {job_id} belongs to {job['owner']}, and this token submits for {tenant}; use a token "
            f"of {job['owner']}"
        )
        raise Problem(403, "other_tenant", detail)
    if job["outcome"] is None:
        detail = f"job {job_id} has not ended ({job['status']}); wait for its end, or cancel it first"
        raise Problem(409, "job_not_ended", detail)
    spec = descended(replace(earlier, retry_of=job_id, tied_to=None), who)
    refuse_missing(gateway, tenant, spec)
    caller, doubts = well_formed(request.headers.get("traceparent")), await _doubts(gateway, spec)
    return await _submitted(gateway, spec, key, who, caller, doubts)


@router.post(
    "/cancel",
    status_code=202,
    responses=KEYS_ANSWERS,
    openapi_extra=KEY,
    dependencies=[needs(Role.SUBMIT, Role.OPERATE)],
)
async def cancel_of_key(request: Request) -> Response:
    """Ask for the job of an Idempotency-Key to be stopped; body as of `POST /v1/jobs/ID/cancel`.

    200 where nothing is to be cancelled: `job_id` is null for a key that was never used, else the job has
    ended.
    """
    gateway, tenant = gateway_of(request), caller_of(request).tenant
    key = checked_key(request.headers.get("idempotency-key"))
    if key is None:
        field = BadField("Idempotency-Key", "is missing", "send the header, or name the job in the path")
        raise invalid("no job is named", [field])
    key = tenants_key(tenant, key)
    job_id = keyed_job_id(gateway.settings.cell, key)
    async with gateway.submitting.setdefault(key, asyncio.Lock()):  # a submission that is under way
        exists = await _exists(gateway, job_id)
    outcome = (await find_job(gateway, job_id))["outcome"] if exists else None
    if not exists or outcome is not None:
        return answer({"job_id": job_id if exists else None, "outcome": outcome})
    return await cancel(job_id, request)


async def _submitted(
    gateway: Gateway,
    spec: JobSpec,
    key: str | None,
    who: Caller,
    caller: str | None,
    doubts: Sequence[Doubt],
    *,
    strict_deadline: bool = False,
) -> Response:
    """The acknowledgement, once the submission is in the log. `caller`: the submitter's trace context."""
    key = None if key is None else tenants_key(who.tenant, key)
    job_id = (
        fresh_job_id(wall_ms(), secrets.token_bytes(7))
        if key is None
        else keyed_job_id(gateway.settings.cell, key)
    )
    event, status = submission(job_id, spec), 202
    bounded = strict_deadline or who.lineage
    if bounded and (key is None or not await _exists(gateway, job_id)):
        if who.lineage:
            follower = gateway.follower
            refuse_too_many(who, follower.state.jobs.values(), map(spec_in, follower.pending.values()))
        if strict_deadline:
            await admission.refuse_late(gateway, spec)
    if key is None:
        await _append_submission(gateway, event, caller)
    else:
        job_id, status = await _submit_keyed(gateway, key, event, caller)
    return accepted(job_id, status, doubts, await at_submission(gateway, job_id, spec))


async def _doubts(gateway: Gateway, spec: JobSpec) -> list[Doubt]:
    """Warnings: requests that are accepted and yet hardly intended, or that this cell can never meet."""
    state = gateway.follower.state
    never = impossible(state, spec)
    folders = await absent_folders(spec, state.nodes.values())
    return [*warnings_of(spec), *([] if never is None else [never]), *folders]


async def _submit_keyed(
    gateway: Gateway, key: str, event: JobSubmitted, caller: str | None
) -> tuple[str, int]:
    """One append per key, for concurrent requests and after any crash. Returns the job's id, and 202 or, for
    a repetition, 200.

    The key is entered before the append and marked after it. In between, a crash leaves it unmarked; a repeat
    then appends the same event (same job id, same event id) again unless the tables know the job, and the
    placer rejects the duplicate.
    """
    lock = gateway.submitting.setdefault(key, asyncio.Lock())
    await lock.acquire()
    try:
        digest = spec_digest(event.spec)
        known = await gateway.store.enter_key(key, digest, event.job_id)
        if known.spec_sha256 != digest:
            raise _conflict(key, known, digest)
        if known.appended or (not known.fresh and await _exists(gateway, known.job_id)):
            lock.release()
            return known.job_id, 200
        await _append_submission(gateway, event, caller)
    except BaseException:
        lock.release()
        raise
    marking = asyncio.ensure_future(
        _mark(gateway, key, lock)
    )  # the response need not wait: the job is in the log
    gateway.marking.add(marking)
    marking.add_done_callback(gateway.marking.discard)
    return event.job_id, 202 if known.fresh else 200


async def _exists(gateway: Gateway, job_id: str) -> bool:
    """Whether this job was ever accepted: the ledger's fold drops ended jobs, the tables do not."""
    await gateway.fresh()
    try:
        await find_job(gateway, job_id)
    except Problem as problem:
        if problem.kind not in ("no_job", "no_read_models"):
            raise
        return False
    return True


async def _mark(gateway: Gateway, key: str, lock: asyncio.Lock) -> None:
    """Marks the key's job as in the log; until then other requests with the key wait."""
    try:
        await gateway.store.mark_appended(key)
    finally:
        lock.release()


def _conflict(key: str, known: Key, digest: str) -> Problem:
    return Problem(
        409,
        "key_conflict",
        f"Idempotency-Key {own_key(key)!r} belongs to job {known.job_id}, whose spec has sha256 "
        f"{known.spec_sha256}; this one has {digest}. Use another key for another job",
        [BadField("Idempotency-Key", f"stored {known.spec_sha256}, sent {digest}", "use another key")],
    )


async def _append_submission(gateway: Gateway, event: JobSubmitted, caller: str | None) -> None:
    job_id, now_ms = event.job_id, gateway.follower.now_ms()
    await append_event(gateway, "submit", f"submit-{job_id}", "submit", event, {"penstock.caller": caller})
    gateway.follower.acknowledged(job_id, job_row(JobState(job_id, event.spec, 0, now_ms), 0))
