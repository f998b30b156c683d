"""Liveness by standing connections of node-reporters: one that breaks, and is not replaced at once, makes its
node suspect (decision 39).

A reporter opens a request whose answer never ends. Nothing is sent on it: both kernels detect a break.
Postgres has the latest connection of each node, so that a connection that is replaced at another gateway of
the cell does not count as broken.
"""

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from penstock.backoff import retry
from penstock.clock import wall_ms
from penstock.model.inputs.external_events import NodeSuspected
from penstock.model.wire.envelope import Envelope
from penstock.runtime.race import first_of
from penstock_services.gateway.core.access import Role
from penstock_services.gateway.core.problems import Problem
from penstock_services.gateway.shell.access.roles import caller_of, needs
from penstock_services.gateway.shell.gateway import Gateway, answer, gateway_of

router = APIRouter(prefix="/v1/nodes", tags=["nodes"])

REPLACED_WITHIN_S = 8.0  # a reporter that restarts, or loses a router's connection, is connected by then
RETURNED_WITHIN_S = (
    60.0  # after a gateway's start; a reporter tries again every 5 s, a balancer may need longer
)
TAKEN_IN_S = 0.005  # per connection, at another gateway: 2.5 ms of CPU with TLS, 1 ms without
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 10.0
BEGUN = b'{"connected": true}\n'

logger = logging.getLogger(__name__)

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Standing(Response):
    """A response that ends with its connection, or with the gateway."""

    def __init__(self, gateway: Gateway, node_id: str) -> None:
        super().__init__(media_type="application/x-ndjson")
        del self.headers["content-length"]
        self._gateway = gateway
        self._node_id = node_id
        self._id = secrets.token_hex(16)

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        connections = self._gateway.connections
        connections[self._node_id] = self
        _is_back(self._gateway, self._node_id)
        entered = False
        try:
            entered = await self._gateway.store.enter_connection(self._node_id, self._id)
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": BEGUN, "more_body": True})
            await first_of(self._gateway.stopping.wait(), _disconnected(receive))
        finally:
            self._gateway.store.lost_connection(self._id)
            if connections.get(self._node_id) is self:
                del connections[self._node_id]
                if not self._gateway.stopping.is_set():
                    connection_id = self._id if entered else None
                    report = asyncio.ensure_future(_suspect(self._gateway, self._node_id, connection_id))
                    self._gateway.broken[self._node_id] = report
        await send({"type": "http.response.body", "body": b""})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _is_back(gateway: Gateway, node_id: str) -> None:
    """A new connection, or a goodbye: an earlier break is not reported."""
    report = gateway.broken.pop(node_id, None)
    if report is not None:
        report.cancel()


async def _suspect(gateway: Gateway, node_id: str, connection_id: str | None) -> None:
    """Cancelled when the node reconnects meanwhile. `connection_id`: the broken one; None: Postgres was down
    when it began."""
    await asyncio.sleep(REPLACED_WITHIN_S)
    await asyncio.sleep(TAKEN_IN_S * (len(gateway.broken) - 1))  # a balancer moves all of them at once
    if connection_id is not None and not await gateway.store.is_latest_connection(node_id, connection_id):
        gateway.broken.pop(node_id, None)
        return
    await _report(gateway, node_id, "its connection to the gateway broke, and was not replaced")
    if connection_id is not None:
        await gateway.store.remove_connection(node_id, connection_id)
    gateway.broken.pop(node_id, None)


async def report_missing(gateway: Gateway) -> None:
    """After a start: suspects the nodes whose latest connection ended together with its gateway, and that
    reconnected to none."""

    async def missing() -> list[tuple[str, str]]:
        moment, entries = await gateway.store.call_roll()
        if not entries:
            return []
        await asyncio.sleep(RETURNED_WITHIN_S + TAKEN_IN_S * entries)
        return await gateway.store.unanswered_since(moment)

    found = await retry(missing, (Problem,), first_s=FIRST_PAUSE_S, longest_s=LONGEST_PAUSE_S)
    for node_id, connection_id in found:
        await _report(gateway, node_id, "its connection ended with its gateway, and it did not come back")
        await gateway.store.remove_connection(node_id, connection_id)


async def _report(gateway: Gateway, node_id: str, reason: str) -> None:
    """Retries until the event is in the log."""
    envelope = Envelope(
        id=f"connection-{secrets.token_hex(8)}",
        source="/penstock/gateway",
        time_ms=wall_ms(),
        data=NodeSuspected(node_id=node_id, reason=reason),
    )
    logger.warning("node %s: %s", node_id, reason)
    await retry(
        lambda: gateway.appender.append([envelope]),
        (Problem,),
        first_s=FIRST_PAUSE_S,
        longest_s=LONGEST_PAUSE_S,
    )


@router.post("/{node_id:path}/connection", dependencies=[needs(Role.NODE)])
async def connection(node_id: str, request: Request) -> Response:
    """Stays open as long as the node's reporter runs. Its break without a goodbye makes the node suspect."""
    caller_of(request).demand_node(node_id, "a standing connection")
    return Standing(gateway_of(request), node_id)


@router.delete("/{node_id:path}/connection", dependencies=[needs(Role.NODE)])
async def goodbye(node_id: str, request: Request) -> Response:
    """The reporter shuts down regularly: the end of its connection does not count as broken."""
    caller_of(request).demand_node(node_id, "a standing connection")
    gateway = gateway_of(request)
    gateway.connections.pop(node_id, None)
    _is_back(gateway, node_id)
    await gateway.store.remove_connection(node_id)
    return answer({"node_id": node_id, "connected": False})
