"""Jobs: requests to submit, cancel and query them."""

import secrets
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, TypeVar

import orjson
from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import Response
from msgspec.structs import replace
from pydantic import Field

from penstock.clock import wall_ms
from penstock.ledger.derived.stages import profile_of
from penstock.ledger.state.job.job_state import HOLDING
from penstock.ledger.views import Row, adjustments, checkpoint, fragment
from penstock.model.inputs.command_runs import JobCommandRun
from penstock.model.inputs.external_events import (
    JobCancelRequested,
    JobCheckpointRequested,
    JobHoldRequested,
    JobReleaseRequested,
    JobSubmitted,
)
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.nouns.transitions import TERMINAL, JobStatus
from penstock.model.schema.validation import checked
from penstock.model.wire.envelope import Envelope
from penstock.runtime.tracing.tracer import Attributes
from penstock.sdk.job_file.job_warnings import Doubt
from penstock_services.gateway.core.access import Caller, Role
from penstock_services.gateway.core.cursor import MAX_SEQ
from penstock_services.gateway.core.forecasts import deadline
from penstock_services.gateway.core.forecasts.deadline import Outlook
from penstock_services.gateway.core.problems import Problem
from penstock_services.gateway.core.requests.acts import Act, read_act
from penstock_services.gateway.core.visible import job_for, sees_all
from penstock_services.gateway.shell.access.roles import caller_of, needs
from penstock_services.gateway.shell.answers.deadlines import outlook_of
from penstock_services.gateway.shell.answers.eta import eta_of
from penstock_services.gateway.shell.answers.explained import move_of
from penstock_services.gateway.shell.answers.starts import start_of
from penstock_services.gateway.shell.gateway import (
    Gateway,
    answer,
    gateway_of,
    json_body,
    require_live,
    row_json,
)
from penstock_services.gateway.shell.routes import groups

Command = JobCancelRequested | JobHoldRequested | JobReleaseRequested | JobCheckpointRequested | JobCommandRun

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])

MAX_LISTED = 1_000
SOURCE = "/penstock/gateway"
Limit = Annotated[int, Query(ge=1, le=MAX_LISTED)]


async def append_event(
    gateway: Gateway,
    span: str,
    event_id: str,
    key: str,
    event: JobSubmitted | Command,
    attributes: Attributes,
) -> None:
    """Appends, and writes the span of the envelope's context: from the request until it is durable.

    The submitter's own trace context is an attribute of the span, never a parent in the job's trace.
    """
    job_id, began_ms, began_s = event.job_id, wall_ms(), time.perf_counter()
    root, error = gateway.traces.start_job_trace(job_id), None
    envelope = Envelope(
        id=event_id,
        source=SOURCE,
        time_ms=began_ms,
        data=event,
        traceparent=gateway.traces.upcoming(span, root, key),
        correlation_id=job_id,
    )
    try:
        await gateway.appender.append([envelope])
    except Problem as problem:
        error = problem.detail
        raise
    finally:
        ended_ms = began_ms + (time.perf_counter() - began_s) * 1_000
        found = {"penstock.job_id": job_id, **attributes}
        gateway.traces.span(span, root, began_ms, ended_ms, found, key=key, error=error)


def accepted(
    job_id: str, status: int, doubts: Sequence[Doubt] = (), outlook: Outlook | None = None
) -> Response:
    links = {"self": f"/v1/jobs/{job_id}", "why": f"/v1/jobs/{job_id}/why", "logs": f"/v1/jobs/{job_id}/logs"}
    found: dict[str, Any] = {"job_id": job_id, "links": links}
    if outlook is not None:
        found["deadline"] = deadline.answer(outlook)
        doubts = [*doubts, *filter(None, [deadline.warning(outlook)])]
    if doubts:
        found["warnings"] = [doubt._asdict() for doubt in doubts]
    return answer(found, status, {"Location": links["self"]})


@router.post("/{job_id}/cancel", status_code=202, dependencies=[needs(Role.SUBMIT, Role.OPERATE)])
async def cancel(job_id: str, request: Request) -> Response:
    """Ask for the job to be stopped. Body (optional): `{"reason": "…"}`. Ended jobs: 409."""
    return await _cancel(request, job_id, read_act(await json_body(request, optional=True)))


@router.delete("/{job_id}", status_code=202, dependencies=[needs(Role.SUBMIT, Role.OPERATE)])
async def delete(job_id: str, request: Request) -> Response:
    """The same as cancel, without a reason."""
    return await _cancel(request, job_id, Act())


async def _cancel(request: Request, job_id: str, act: Act) -> Response:
    gateway, caller = gateway_of(request), caller_of(request)
    await commanded(request, job_id)
    event = as_asked_by(caller, JobCancelRequested(job_id=job_id))
    if act.reason is not None:
        event = replace(event, reason=act.reason)
    event_id = f"cancel-{job_id}-{secrets.token_hex(8)}"
    await append_event(gateway, "cancel", event_id, event_id, event, {"penstock.reason": event.reason})
    return accepted(job_id, 202)


async def commanded(request: Request, job_id: str) -> Row:
    """The job, if the caller may act on it. Raises `Problem` 404, 403 for another tenant's, and for one that
    the calling job did not submit, and 409 for one that has ended."""
    job = await find_job(gateway_of(request), job_id)
    demand_act(caller_of(request), job)
    if job["outcome"] is not None:
        raise Problem(409, "job_ended", f"job {job_id} has already ended: {job['outcome']}")
    return job


def demand_act(caller: Caller, job: Row) -> None:
    """Raises `Problem` 403 unless the caller may act on this job."""
    what = f"job {job['job_id']}"
    caller.demand_tenant(job["owner"], what)
    if caller.lineage:
        caller.demand_own_tree(job["job_id"], spec_in(job).parents, what)


def spec_in(job: Row) -> JobSpec:
    """The specification in a job's row."""
    return checked(JobSpec, orjson.loads(orjson.dumps(job["spec"])), unknown="ignore")


C = TypeVar("C", bound=Command)


def as_asked_by(caller: Caller, event: C) -> C:
    """The event with its caller; the placer compares the tenant with the job's owner, independent of this
    gateway's state."""
    tenant = None if Role.OPERATE in caller.roles else caller.tenant
    return replace(event, by=caller.by, tenant=tenant)


async def own_job(request: Request, job_id: str, what: str) -> Row:
    """The job, if the caller may read all of it. Raises `Problem` 404, and 403 for another tenant's."""
    job = await find_job(gateway_of(request), job_id)
    caller_of(request).demand_tenant(job["owner"], f"the {what} of job {job_id}")
    return job


async def find_job(gateway: Gateway, job_id: str) -> Row:
    """The job from replica or tables. Raises `Problem` 404."""
    found = gateway.follower.job(job_id)
    if found is not None:
        return found
    text = await gateway.store.row("SELECT row_to_json(jobs)::text FROM jobs WHERE job_id = $1", job_id)
    if text is None:
        raise Problem(
            404, "no_job", f"no job {job_id!r}; GET /v1/jobs lists them" + await _forgotten(gateway, job_id)
        )
    row: Row = orjson.loads(text)
    return row


async def _forgotten(gateway: Gateway, job_id: str) -> str:
    """Where to find a job that ended so long ago that it has left the tables; empty: no such job."""
    query = "SELECT forgotten_ms::text FROM positions WHERE cell = $1"
    forgotten_ms = int(await gateway.store.row(query, gateway.settings.cell) or 0)
    if not forgotten_ms:
        return ""
    day = datetime.fromtimestamp(forgotten_ms / 1_000, UTC).date().isoformat()
    return (
        f". Jobs that ended up to {day} have left the tables (PENSTOCK_ENDED_JOBS_DAYS): the ledger and its "
        f"archive have them, `penstock replay --decision {job_id}` shows the last placement"
    )


Label = Annotated[str, Field(pattern="^[^=]+=")]
LABEL = "NAME=VALUE: only jobs with this label; given several times, with all of them"
Labels = Annotated[list[Label] | None, Query(max_length=64, description=LABEL)]
Text = Annotated[str | None, Query(max_length=128)]
Prefix = Annotated[str | None, Query(max_length=128, description="Only jobs whose id starts so")]


def _chosen(
    caller: Caller, labels: Sequence[str], name: str | None, **given: str | None
) -> tuple[str, list[Any]]:
    """The WHERE clause of a listing and its arguments, without unused conditions, so that an index serves.

    Name and labels of another tenant's job are hidden, so these filters do not match it.
    """
    conditions = {
        "owner = $": given["owner"],
        "status = $": given["status"],
        "starts_with(job_id, $)": given["prefix"],
    }
    if given["status"] in TERMINAL:
        conditions["outcome = $"] = conditions.pop("status = $")
    found = [(condition, value) for condition, value in conditions.items() if value is not None]
    found += [
        ("labels::jsonb @> $::jsonb", orjson.dumps(dict([text.split("=", 1)])).decode()) for text in labels
    ]
    found += [("name = $", name)] if name is not None else []
    if (labels or name is not None) and not sees_all(caller):
        found.append(("owner = $", caller.tenant or ""))
    texts = [condition.replace("$", f"${number}") for number, (condition, _) in enumerate(found, start=1)]
    texts += ["outcome IS NULL"] if given["status"] is not None and given["status"] not in TERMINAL else []
    return " AND ".join(texts) or "true", [value for _, value in found]


def _fits(row: Row, caller: Caller, labels: Sequence[str], name: str | None, **given: str | None) -> bool:
    """As `_chosen`, for a row in memory."""
    if (labels or name is not None) and not sees_all(caller) and row["owner"] != (caller.tenant or ""):
        return False
    return (
        given["owner"] in (None, row["owner"])
        and given["status"] in (None, row["status"])
        and row["job_id"].startswith(given["prefix"] or "")
        and name in (None, row["name"])
        and all(row["labels"].get(text.split("=", 1)[0]) == text.split("=", 1)[1] for text in labels)
    )


def _without(recent: Sequence[Row], rows: Sequence[str]) -> list[str]:
    """The recent jobs that are not in the tables, in the tables' format."""
    stored = {orjson.loads(row)["job_id"] for row in rows} if recent else ()
    return [orjson.dumps(row).decode() for row in recent if row["job_id"] not in stored]


@router.get("", dependencies=[needs(Role.READ)])
async def jobs(
    request: Request,
    owner: Text = None,
    name: Text = None,
    prefix: Prefix = None,
    status: JobStatus | None = None,
    label: Labels = None,
    limit: Limit = 50,
    cursor: Annotated[int | None, Query(ge=0, description="`next_cursor` of the page before")] = None,
    eta: Annotated[
        bool, Query(description="With the key `eta`, as `/v1/jobs/ID/eta` answers; null where not running")
    ] = False,
) -> Response:
    """Jobs, the latest first. `total`: the number of matching jobs on all pages."""
    gateway = gateway_of(request)
    await gateway.fresh()
    caller = caller_of(request)
    state = None if status is None else str(status)
    asked = {"owner": owner, "status": state, "prefix": prefix}
    where, given = _chosen(caller, label or (), name, **asked)
    recent = gateway.follower.newer_than(gateway.store.projected_seq) if cursor is None else []
    rows = await gateway.store.rows(
        f"SELECT row_to_json(jobs)::text FROM jobs WHERE {where} AND (${len(given) + 1}::bigint IS NULL OR "
        f"submitted_seq < ${len(given) + 1}) ORDER BY submitted_seq DESC LIMIT ${len(given) + 2}",
        *given,
        cursor,
        limit,
    )
    recent = [row for row in recent if _fits(row, caller, label or (), name, **asked)]
    newest = _without(recent, rows)  # the tables lag: recent submissions are added from memory
    rows = [*newest, *rows][:limit]
    last = (orjson.loads(rows[-1])["submitted_seq"] or MAX_SEQ) if len(rows) == limit else None
    total = len(rows)
    if last is not None or cursor is not None:
        total = int(await gateway.store.row(f"SELECT count(*)::text FROM jobs WHERE {where}", *given) or 0)
        total += len(newest)
    if eta or not sees_all(caller):
        listed: Sequence[Any] = [job_for(caller, row) for row in _with_more(gateway, rows, eta=eta)]
    else:
        listed = [_with_unproven(gateway, row) for row in rows]
    now_ms = gateway.follower.now_ms()
    return answer({"now_ms": now_ms, "jobs": listed, "next_cursor": last, "total": total})


def _with_unproven(gateway: Gateway, row: str) -> orjson.Fragment:
    """The row with the key `unproven`; its text is decoded only while a node is silent."""
    state = gateway.follower.state
    silent = state.index.known & ~state.index.gone & ~state.index.placeable
    found = gateway.follower.unproven(orjson.loads(row)["job_id"]) if silent else []
    return row_json(f'{row[:-1]},"unproven":{orjson.dumps(found).decode()}}}')


def _with_more(gateway: Gateway, rows: Sequence[str], *, eta: bool) -> list[Row]:
    """The rows with the key `unproven`, and if requested with `eta`."""
    found: list[Row] = [orjson.loads(row) for row in rows]
    if not eta:
        return [{**job, "unproven": gateway.follower.unproven(job["job_id"])} for job in found]
    return [
        {
            **job,
            "unproven": gateway.follower.unproven(job["job_id"]),
            "eta": eta_of(gateway, job) if job["status"] in HOLDING else None,
        }
        for job in found
    ]


@router.get("/{job_id}", dependencies=[needs(Role.READ)])
async def job(job_id: str, request: Request) -> Response:
    """One job: its request, its placement, its times; `unproven`: its tasks on silent nodes; `trace_id`: null
    without traces.

    `stages`: the stage times of similar jobs' iterations (`penstock.stages.profiled`); null where none was
    measured, and once it has ended. `shares_gpus_with`: ids of jobs that hold parts of the same GPUs, or take
    turns on them, sorted; `group`: as `GET /v1/groups` lists it, `waits`: its last report of waiting for
    turns, both null for a job in no group. `unfollowed_ms`: since when a job with `tied_to` has had no
    follower; null: it has one.
    """
    gateway = gateway_of(request)
    found = await find_job(gateway, job_id)
    more: Row = {"unproven": gateway.follower.unproven(job_id), "trace_id": gateway.traces.trace_id(job_id)}
    live = gateway.follower.state.jobs.get(job_id)
    more["stages"] = fragment(None if live is None else profile_of(gateway.follower.state, live))
    more["adjustments"] = [] if live is None else adjustments(live)
    more["checkpoint"] = None if live is None else checkpoint(gateway.follower.state, live)
    more["unsaved"] = None if live is None else fragment(live.saving.unsaved)
    more["move"] = None if live is None else await move_of(gateway, live)
    more["group"] = None if live is None else await groups.of_job(gateway, live)
    more["waits"] = None if live is None else await groups.waits_of(gateway, live)
    more["shares_gpus_with"] = [] if live is None else list(live.sharing.jobs)
    more["unfollowed_ms"] = None if live is None else live.following.absent_ms
    more["now_ms"] = gateway.follower.now_ms()
    return answer(job_for(caller_of(request), found | more))


@router.get("/{job_id}/eta", dependencies=[needs(Role.READ), Depends(require_live)])
async def eta(job_id: str, request: Request) -> Response:
    """Its remaining time, with an interval; `answer` names the source, `due` whether it is late.

    `start`: the expected start of a job in the queue, as `why` answers; null for other jobs. `deadline`: of a
    job with a deadline or a service class, as `GET /v1/deadlines` has it; null for others, and for another
    tenant's.
    """
    gateway = gateway_of(request)
    row = await find_job(gateway, job_id)
    own = sees_all(caller_of(request)) or caller_of(request).may_act_for(row["owner"])
    found = deadline.answer(outlook_of(gateway, job_id)) if own else None
    return answer(eta_of(gateway, row) | {"start": start_of(gateway, job_id), "deadline": found})


@router.get("/{job_id}/tasks", dependencies=[needs(Role.READ)])
async def tasks(job_id: str, request: Request) -> Response:
    """Its tasks, of all attempts; `unproven`: those of them on silent nodes."""
    gateway = gateway_of(request)
    await own_job(request, job_id, "tasks")
    rows = await gateway.fresh_rows(
        "SELECT row_to_json(tasks)::text FROM tasks WHERE job_id = $1 ORDER BY attempt, rank", job_id
    )
    return answer(
        {"tasks": rows, "unproven": gateway.follower.unproven(job_id), "now_ms": gateway.follower.now_ms()}
    )


@router.get("/{job_id}/events", dependencies=[needs(Role.READ)])
async def events(job_id: str, request: Request, limit: Limit = MAX_LISTED) -> Response:
    """Its events, in order."""
    gateway = gateway_of(request)
    await own_job(request, job_id, "events")
    rows = await gateway.fresh_rows(
        "SELECT row_to_json(events)::text FROM events WHERE job_id = $1 ORDER BY seq, n LIMIT $2",
        job_id,
        limit,
    )
    return answer({"events": rows})
