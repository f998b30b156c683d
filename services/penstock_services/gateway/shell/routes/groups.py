"""Groups: jobs that take turns on the same GPUs, the reason, and the predicted speed of each."""

from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from fastapi import APIRouter, Request
from fastapi.responses import Response

from penstock.ledger.state.job.job_state import JobState
from penstock.model.decisions.groups import GroupDecided
from penstock.model.inputs.external_events import StepsMeasured
from penstock.model.nouns.token import seq_of
from penstock_services.gateway.core.access import Role
from penstock_services.gateway.shell.access.roles import needs
from penstock_services.gateway.shell.gateway import Gateway, answer, gateway_of

router = APIRouter(prefix="/v1/groups", tags=["cell"])

Row = dict[str, Any]


@router.get("", dependencies=[needs(Role.READ)])
async def groups(request: Request) -> Response:
    """All groups as of the latest record, by their oldest member. `since_ms`: when its last member joined;
    `turns`: as predicted then (Muri's rotation, period and efficiency), null where the proposer predicted
    none."""
    gateway = gateway_of(request)
    await gateway.fresh()
    members = {
        group_id: sorted(jobs.values(), key=lambda job: job.order)
        for group_id, jobs in gateway.follower.state.groups.items()
    }
    return answer({"now_ms": gateway.follower.now_ms(), "groups": await rows_of(gateway, members)})


async def rows_of(gateway: Gateway, members: Mapping[str, Sequence[JobState]]) -> list[Row]:
    """A row of each group. `members`: at least one, oldest first."""
    seqs = sorted({max(seq_of(job.token) for job in jobs) for jobs in members.values()})
    texts = await gateway.store.rows(
        "SELECT json_build_object('seq', seq, 'at_ms', at_ms, 'data', data)::text FROM events "
        "WHERE seq = ANY($1::bigint[]) AND type = $2",
        seqs,
        GroupDecided.TYPE,
    )
    decided = {found["data"]["group_id"]: found for found in map(orjson.loads, texts)}
    rows = [_row(group_id, jobs, decided.get(group_id)) for group_id, jobs in members.items()]
    return sorted(rows, key=lambda row: (members[row["group_id"]][0].order, row["group_id"]))


async def of_job(gateway: Gateway, job: JobState) -> Row | None:
    """The row of its group; None: it is in none."""
    found = gateway.follower.state.groups.get(job.sharing.group, {})
    members = sorted(found.values(), key=lambda one: one.order)
    return (await rows_of(gateway, {job.sharing.group: members}))[0] if members else None


async def waits_of(gateway: Gateway, job: JobState) -> Row | None:
    """Waiting times for turns in a member's last report of its steps; None: it is in no group, or has
    reported none."""
    if not job.sharing.group:
        return None
    text = await gateway.store.row(
        "SELECT data::text FROM events WHERE job_id = $1 AND type = $2 ORDER BY seq DESC, n DESC LIMIT 1",
        job.job_id,
        StepsMeasured.TYPE,
    )
    if text is None:
        return None
    found = orjson.loads(text)
    return {name: found.get(name, 0) for name in ("at_ms", "step_ms", "waited_ms", "missed_turns")}


def _row(group_id: str, jobs: Sequence[JobState], decided: Row | None) -> Row:
    """`decided`: the record by which its youngest member joined; None: it has not been read yet."""
    found: Row = {} if decided is None else decided["data"]
    places = [task.place for task in jobs[0].tasks.values()]
    return {
        "group_id": group_id,
        "job_ids": [job.job_id for job in jobs],
        "nodes": list(dict.fromkeys(place.node_id for place in places)),
        "gpus": sum(len(place.gpus) for place in places),
        "since_ms": decided and decided["at_ms"],
        "seq": decided and decided["seq"],
        "by": found.get("by"),
        "reason": found.get("reason"),
        "turns": found.get("turns"),
    }
