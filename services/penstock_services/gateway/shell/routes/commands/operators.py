"""Operators' commands on nodes: cordon, drain, uncordon, fence. Each is an event that names the operator, by
the token, and the reason."""

import asyncio
import secrets
from collections.abc import Callable
from typing import NamedTuple

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response

from penstock.clock import wall_ms
from penstock.ledger.state.node.node_state import NodeState
from penstock.model.inputs.external_events import NodeCordoned, NodeLeft, NodeUncordoned
from penstock.model.nouns.transitions import NodeStatus
from penstock.model.schema.event import Event
from penstock.model.wire.envelope import Envelope
from penstock_services.gateway.core.access import Role
from penstock_services.gateway.core.problems import Problem
from penstock_services.gateway.core.requests.acts import read_act
from penstock_services.gateway.shell.access.roles import caller_of, needs
from penstock_services.gateway.shell.gateway import Gateway, answer, gateway_of, read_body

router = APIRouter(prefix="/v1/nodes", tags=["operators"])

SOURCE = "/penstock/gateway"
APPLIED_WITHIN_S = 5.0  # the response waits so long for the placer's record
MAX_BODY_BYTES = 8_192
Holds = Callable[[NodeState], bool]


class Asked(NamedTuple):
    """The operator, the reason, and the node as of the latest record, which is `seq`."""

    by: str
    reason: str
    node: NodeState
    seq: int


@router.post("/{node_id:path}/cordon", status_code=202, dependencies=[needs(Role.OPERATE)])
async def cordon(node_id: str, request: Request) -> Response:
    """No new task is placed on the node until it is uncordoned; running tasks run on.
    Body: `{"reason": …}`."""
    return await _cordon(node_id, request, drain=False)


@router.post("/{node_id:path}/drain", status_code=202, dependencies=[needs(Role.OPERATE)])
async def drain(node_id: str, request: Request) -> Response:
    """A cordon, and the node's jobs are stopped with their grace and placed elsewhere."""
    return await _cordon(node_id, request, drain=True)


async def _cordon(node_id: str, request: Request, *, drain: bool) -> Response:
    asked = await _asked(node_id, request)
    if asked.node.cordon is not None and asked.node.cordon.drain == drain:
        how = "being drained" if drain else "cordoned"
        raise Problem(409, "already_cordoned", f"node {node_id} is {how} already, by {asked.node.cordon.by}")
    event = NodeCordoned(node_id=node_id, drain=drain, by=asked.by, reason=asked.reason, after=asked.seq)
    return await _order(
        gateway_of(request),
        node_id,
        event,
        lambda found: found.cordon is not None and found.cordon.drain == drain,
    )


@router.post("/{node_id:path}/uncordon", status_code=202, dependencies=[needs(Role.OPERATE)])
async def uncordon(node_id: str, request: Request) -> Response:
    """The node is used again: ends a cordon, a drain with it, and the suspicion after jobs failed there."""
    asked = await _asked(node_id, request)
    if asked.node.cordon is None and asked.node.distrust is None:
        raise Problem(
            409, "not_cordoned", f"node {node_id} is neither cordoned nor suspect; nothing was changed"
        )
    event = NodeUncordoned(node_id=node_id, by=asked.by, reason=asked.reason, after=asked.seq)
    return await _order(gateway_of(request), node_id, event, _in_use)


def _in_use(node: NodeState) -> bool:
    return node.cordon is None and node.distrust is None


@router.post("/{node_id:path}/fence", status_code=202, dependencies=[needs(Role.OPERATE)])
async def fence(node_id: str, request: Request) -> Response:
    """States that the machine is certainly dead (power cut, destroyed): its jobs are placed elsewhere at
    once.

    If it is not dead, two attempts of a job run at the same time.
    """
    asked = await _asked(node_id, request)
    if asked.node.status is NodeStatus.GONE:
        raise Problem(409, "already_gone", f"node {node_id} is gone already; nothing was changed")
    event = NodeLeft(
        node_id=node_id,
        boot_id=asked.node.spec.boot_id,
        proof="fenced",
        incarnation=asked.node.incarnation,  # sent again after the node's return, it ends nothing
        by=asked.by,
        reason=asked.reason,
    )
    return await _order(gateway_of(request), node_id, event, lambda found: found.status is NodeStatus.GONE)


async def _asked(node_id: str, request: Request) -> Asked:
    """Raises `Problem`."""
    act, state = read_act(await read_body(request, MAX_BODY_BYTES)), gateway_of(request).follower.state
    node = state.nodes.get(node_id)
    if node is None:
        raise Problem(404, "no_node", f"no node {node_id!r}; GET /v1/nodes lists them")
    return Asked(caller_of(request).by, act.reason or "", node, state.seq)


async def _order(gateway: Gateway, node_id: str, event: Event, holds: Holds) -> Response:
    """Appends the event and waits for its effect; `applied` is false if that does not come in time."""
    envelope = Envelope(id=f"operator-{secrets.token_hex(8)}", source=SOURCE, time_ms=wall_ms(), data=event)
    await gateway.appender.append([envelope])
    applied = True
    try:
        async with asyncio.timeout(APPLIED_WITHIN_S):
            await _until(gateway, node_id, holds)
    except TimeoutError:
        applied = False
    node = gateway.follower.state.nodes.get(node_id)
    cordon = None if node is None or node.cordon is None else msgspec.structs.asdict(node.cordon)
    found = {
        "node_id": node_id,
        "event_id": envelope.id,
        "applied": applied,
        "status": None if node is None else str(node.status),
        "cordon": cordon,
        "jobs": [] if node is None else jobs_on(node),
    }
    return answer(found, 200 if applied else 202)


async def _until(gateway: Gateway, node_id: str, holds: Holds) -> None:
    while True:
        changed = gateway.follower.next_change()
        node = gateway.follower.state.nodes.get(node_id)
        if node is not None and holds(node):
            return
        await changed.wait()


def jobs_on(node: NodeState) -> list[str]:
    """Ids of the jobs with a task on the node that is not proven ended."""
    return sorted(set(node.tasks.values()))
