"""Recorded explanations of decisions: of a job's placement, and of its latest move."""

from typing import Any

import orjson

from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.views import Row, move
from penstock_services.gateway.core.cursor import MAX_SEQ
from penstock_services.gateway.shell.gateway import Gateway

PLACED, MOVING = "penstock.placement.decided", "penstock.move.decided"


async def placement_of(
    gateway: Gateway, job_id: str, until_seq: int, kind: str = PLACED, attempt: int | None = None
) -> dict[str, Any] | None:
    """The explanation recorded with its latest placement, or decision to move, up to `until_seq`; of this
    attempt where one is given."""
    await gateway.store.projected(min(until_seq, gateway.follower.state.seq), 1.0)
    text = await gateway.store.row(
        "SELECT (coalesce(explanation::jsonb, '{}'::jsonb) || jsonb_build_object('seq', seq, 'at_ms', at_ms, "
        "'attempt', data->'attempt', 'tasks', (SELECT jsonb_agg(given || jsonb_build_object('gpu_uuids', "
        "coalesce(to_jsonb(tasks.gpu_uuids), '[]')) ORDER BY n) "
        "FROM jsonb_array_elements(data::jsonb->'tasks') WITH ORDINALITY AS given_tasks (given, n) "
        "LEFT JOIN tasks ON tasks.task_id = given->>'task_id')))::text FROM decisions "
        "WHERE job_id = $1 AND kind = $3 AND seq <= $2 AND ($4::int IS NULL OR (data->>'attempt')::int = $4) "
        "ORDER BY seq DESC LIMIT 1",
        job_id,
        until_seq,
        kind,
        attempt,
    )
    return None if text is None else orjson.loads(text)


async def move_of(gateway: Gateway, job: JobState) -> Row | None:
    """Its latest move with its reasons; None: it was never moved."""
    row = move(job)
    return None if row is None else await with_reasons(gateway, job.job_id, row)


async def with_reasons(gateway: Gateway, job_id: str, row: Row, at: int = MAX_SEQ) -> Row:
    """The move with `target`, the explanation recorded with the decision, and `moved`: the source nodes, and
    the cost as far as known."""
    target = await placement_of(gateway, job_id, at, MOVING, row["attempt"])
    reached = None
    if row["outcome"] == "arrived":
        reached = await placement_of(gateway, job_id, at, PLACED, row["attempt"] + 1)
    return {**row, "target": target, "moved": ((reached or {}).get("moved") or (target or {}).get("moved"))}
