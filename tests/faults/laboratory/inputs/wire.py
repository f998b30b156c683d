"""Events of users, watchers and operators, and of nodes that say what they should not, as messages for the
log."""

from functools import cache
from hashlib import sha256
from typing import Any

from msgspec.structs import replace

from penstock.clock import wall_ms
from penstock.log.port import Message, Partition
from penstock.model.schema.event import Event
from penstock.model.schema.topics import Topic, node_partition
from penstock.model.wire.envelope import SIGNATURE, Envelope, to_wire
from penstock.model.wire.speakers import by_operator
from penstock.runtime.keys.node_keys import CODE, NodeKeys
from tests.support.node_reporter.forgeries import GATEWAYS, proofs


def message(event: Event, event_id: str, source: str) -> Message:
    """To the cell's partition of the event's topic; an order to its node's partition. A node's events are
    signed by it, what operators and watches report by the gateway."""
    assert event.TOPIC is not None
    envelope = Envelope(event_id, source, wall_ms(), event)
    headers, value = to_wire(envelope)
    if event.TOPIC == Topic.NODES:
        node: Any = getattr(event, "node", event)
        key = GATEWAYS if by_operator(event) else keys_of(node.node_id)
        headers = (*headers, *proofs(key, envelope, value))
    if event.TOPIC == Topic.ORDERS:
        node_id: str = event.node_id  # type: ignore[attr-defined]
        return Message(orders_of(node_id), value, headers, node_id.encode())
    return Message(Partition(event.TOPIC, 0), value, headers)


def unsigned(found: Message) -> Message:
    """As a writer without the key sends it in the node's or the gateway's name."""
    return replace(
        found, headers=tuple((name, raw) for name, raw in found.headers if name not in (SIGNATURE, CODE))
    )


@cache
def keys_of(node_id: str) -> NodeKeys:
    """Of a name and not of a disk: the operator who installs a machine anew gives it its key back."""
    return NodeKeys(sha256(node_id.encode()).digest())


def orders_of(node_id: str) -> Partition:
    """The partition that a node's orders go to."""
    return Partition(Topic.ORDERS, node_partition(node_id))
