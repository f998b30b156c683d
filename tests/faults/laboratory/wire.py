"""Events of users, watchers and operators as messages for the log."""

from penstock.clock import wall_ms
from penstock.log.port import Message, Partition
from penstock.model.envelope import Envelope, to_wire
from penstock.model.event import Event
from penstock.model.topics import Topic, node_partition


def message(event: Event, event_id: str, source: str) -> Message:
    """To the cell's partition of the event's topic; an order to its node's partition."""
    assert event.TOPIC is not None
    headers, value = to_wire(Envelope(event_id, source, wall_ms(), event))
    if event.TOPIC == Topic.ORDERS:
        node_id: str = event.node_id  # type: ignore[attr-defined]
        return Message(orders_of(node_id), value, headers, node_id.encode())
    return Message(Partition(event.TOPIC, 0), value, headers)


def orders_of(node_id: str) -> Partition:
    """The partition that a node's orders go to."""
    return Partition(Topic.ORDERS, node_partition(node_id))
