"""`POST /v1/events`: CloudEvents from clients, validated and appended before they are acknowledged."""

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from msgspec.structs import replace

from penstock.clock import wall_ms
from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.views import job_row
from penstock.model.inputs.command_runs import JobCommandRun
from penstock.model.inputs.external_events import (
    JobCancelRequested,
    JobCheckpointRequested,
    JobHoldRequested,
    JobReleaseRequested,
    JobSubmitted,
)
from penstock.model.nouns.job_ids import is_generated
from penstock.model.nouns.types import MAX_JOB_ID_CHARS
from penstock.model.schema.topics import INPUT_TOPICS, MAX_PLAN_BYTES, Topic
from penstock.model.wire.envelope import Envelope, topic_of
from penstock.model.wire.speakers import Speaker, speaker_of
from penstock.runtime.tracing.context import well_formed
from penstock_services.gateway.core.access import Caller, Role
from penstock_services.gateway.core.problems import BadField, Problem, invalid
from penstock_services.gateway.core.requests.acts import check_command, check_proposal
from penstock_services.gateway.core.requests.cloudevents import (
    BATCHED,
    MAX_BATCH_EVENTS,
    STRUCTURED,
    batch,
    binary,
    structured,
)
from penstock_services.gateway.core.requests.submission import owned
from penstock_services.gateway.shell.access.roles import caller_of, needs
from penstock_services.gateway.shell.gateway import Gateway, answer, content_type, gateway_of, read_body
from penstock_services.gateway.shell.routes.jobs import as_asked_by, find_job

router = APIRouter(prefix="/v1/events", tags=["events"])

ENVELOPE_BYTES = 8_192  # attributes beside the data in structured mode
MAX_BATCH_BYTES = 1 << 20

EXAMPLE = {
    "specversion": "1.0",
    "id": "ci-4711",
    "source": "/ci/runner-3",
    "type": "penstock.job.submitted.v1",
    "data": {"job_id": "ci-4711", "spec": {"command": ["python", "train.py"]}},
}
CLOUD_EVENT = {"$ref": "#/components/schemas/CloudEvent"}
BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "description": "In binary mode (application/json, or no type at all) the attributes stand in ce-* "
        "headers.",
        "content": {
            STRUCTURED: {"schema": CLOUD_EVENT, "example": EXAMPLE},
            BATCHED: {
                "schema": {
                    "type": "array",
                    "minItems": 1,
                    "maxItems": MAX_BATCH_EVENTS,
                    "items": CLOUD_EVENT,
                },
                "example": [EXAMPLE],
            },
            "application/json": {
                "schema": {"$ref": "#/components/schemas/EventData"},
                "example": EXAMPLE["data"],
            },
        },
    }
}


@router.post("", status_code=202, openapi_extra=BODY, dependencies=[needs(Role.SUBMIT, Role.OPERATE)])
async def post(request: Request) -> Response:
    """Send events of jobs; with the role operate also estimates and proposals. 202 once all are durable;
    sending one again is harmless."""
    gateway = gateway_of(request)
    kind = content_type(request)
    if kind == STRUCTURED:
        envelopes = [structured(await read_body(request, MAX_PLAN_BYTES + ENVELOPE_BYTES))]
    elif kind == BATCHED:
        envelopes = batch(await read_body(request, MAX_BATCH_BYTES))
    elif kind == "application/json" or (not kind and "ce-specversion" in request.headers):
        # Without a datacontenttype an event's data are JSON (CloudEvents 1.0.2, JSON format, 3.1), and the
        # SDK sends no type.
        envelopes = [binary(request.headers, await read_body(request, MAX_PLAN_BYTES))]
    else:
        detail = f"{kind or 'none'}: send {STRUCTURED}, {BATCHED}, or application/json with ce-* headers"
        raise Problem(415, "content_type", detail)
    envelopes = [await _permitted(gateway, caller_of(request), envelope) for envelope in envelopes]
    for envelope in envelopes:
        _check_accepted(envelope)
    began_ms = wall_ms()
    await gateway.appender.append([_in_own_trace(gateway, envelope) for envelope in envelopes])
    for envelope in envelopes:
        _acknowledge(gateway, envelope, began_ms)
    return answer({"ids": [envelope.id for envelope in envelopes]}, 202)


async def _permitted(gateway: Gateway, caller: Caller, envelope: Envelope) -> Envelope:
    """The event as this caller may send it: a job belongs to its tenant. Raises `Problem` 403.

    Facts about nodes and tasks come from the reporter of the node alone, through the log, where its signature
    proves the origin.
    """
    event, what = envelope.data, f"POST /v1/events of {envelope.type}"
    if caller.lineage:
        raise Problem(403, "jobs_token", f"{what} is refused with a job's token: use POST /v1/jobs")
    if event.TOPIC == Topic.NODES:
        node_id = getattr(event, "node_id", None) or event.subject()
        raise Problem(
            403,
            "node_events",
            f"{what} is refused: facts about nodes and tasks come from {node_id}'s own reporter; "
            "operators use POST /v1/nodes/ID/cordon, drain, uncordon or fence",
        )
    if isinstance(event, JobCommandRun):
        raise Problem(
            403, "gateways_event", f"{what} is refused: POST /v1/jobs/ID/exec runs and records commands"
        )
    if speaker_of(event) is Speaker.GATEWAY:
        raise Problem(
            403, "gateway_events", f"{what} is refused: a gateway reports its own connections alone"
        )
    if isinstance(event, JobSubmitted):
        caller.demand(what, Role.SUBMIT)
        event = replace(event, spec=owned(event.spec, caller.tenant))
        _check_free(gateway, event)
        return replace(envelope, data=event)
    if not isinstance(
        event, JobCancelRequested | JobHoldRequested | JobReleaseRequested | JobCheckpointRequested
    ):
        caller.demand(what, Role.OPERATE)
        check_proposal(event)
        return envelope
    check_command(event)
    if Role.OPERATE not in caller.roles:
        job = await find_job(gateway, event.job_id)
        caller.demand_tenant(job["owner"], f"job {event.job_id}")
    return replace(envelope, data=as_asked_by(caller, event))


def _check_free(gateway: Gateway, event: JobSubmitted) -> None:
    """Raises `Problem` for the id of another tenant's job.
    The placer refuses events that pass another gateway."""
    known = gateway.follower.job(event.job_id)
    if known is not None and known["owner"] != event.spec.owner:
        raise Problem(409, "job_id_taken", f"job {event.job_id} belongs to {known['owner']}; give another id")


def _check_accepted(envelope: Envelope) -> None:
    """Old versions of a type were upcast before: the result is validated again.

    Events that the placer would reject are refused here, where the sender gets the answer.
    """
    if envelope.data.TOPIC not in INPUT_TOPICS:
        field = BadField(
            "type", f"{envelope.type} is not accepted here", "send job, estimate or proposal events"
        )
        raise invalid("this event cannot be accepted", [field])
    if isinstance(envelope.data, JobSubmitted) and (detail := _unusable(envelope.data.job_id)):
        field = BadField("data.job_id", *detail)
        raise invalid("this event cannot be accepted", [field])


def _unusable(job_id: str) -> tuple[str, str] | None:
    """Why a job's id is not usable although it is an identifier, and the remedy."""
    if len(job_id) > MAX_JOB_ID_CHARS:
        return f"has {len(job_id)} characters", f"give at most {MAX_JOB_ID_CHARS}: task ids grow out of it"
    if is_generated(job_id):
        return "has the form of the gateway's own ids", "choose another, such as one with a '-'"
    if "/" in job_id:
        return "holds a '/'", "write '-' instead: /v1/jobs/a/b could not be requested"
    return None


def _in_own_trace(gateway: Gateway, envelope: Envelope) -> Envelope:
    """A submission belongs to its job's trace, not to the trace it was sent in;
    other contexts are passed on."""
    if isinstance(envelope.data, JobSubmitted):
        root = gateway.traces.start_job_trace(envelope.data.job_id)
        return replace(envelope, traceparent=gateway.traces.upcoming("submit", root, "submit"))
    return replace(envelope, traceparent=well_formed(envelope.traceparent))


def _acknowledge(gateway: Gateway, envelope: Envelope, began_ms: int) -> None:
    data = envelope.data
    if isinstance(data, JobSubmitted) and topic_of(data):
        row = job_row(JobState(data.job_id, data.spec, 0, envelope.time_ms), 0)
        gateway.follower.acknowledged(data.job_id, row)
        root = gateway.traces.start_job_trace(data.job_id)
        found = {"penstock.job_id": data.job_id, "penstock.caller": well_formed(envelope.traceparent)}
        gateway.traces.span("submit", root, began_ms, wall_ms(), found, key="submit")
