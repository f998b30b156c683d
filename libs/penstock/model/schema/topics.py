"""Topics of the log, their keys, partitions and size limits. Source: architecture §2."""

from enum import StrEnum


class Topic(StrEnum):
    JOBS = "penstock.jobs.v1"
    ESTIMATES = "penstock.estimates.v1"
    NODES = "penstock.nodes.v1"
    PROPOSALS = "penstock.proposals.v1"
    LEDGER = "penstock.ledger.v1"
    AMENDMENTS = "penstock.amendments.v1"
    ORDERS = "penstock.orders.v1"
    TELEMETRY = "penstock.telemetry.v1"
    GUARD_WINDOWS = "penstock.guard-windows-changelog.v1"
    DEAD_LETTERS = "penstock.deadletters.v1"


CELL_TOPICS = (Topic.JOBS, Topic.ESTIMATES, Topic.NODES, Topic.PROPOSALS, Topic.LEDGER, Topic.AMENDMENTS)
"""Keyed by cell: partition = the cell's index."""

INPUT_TOPICS = (Topic.JOBS, Topic.ESTIMATES, Topic.NODES, Topic.PROPOSALS)
"""Topics that the placer reads; each of their records yields exactly one ledger record (LAW 2)."""

NODE_TOPICS = (Topic.ORDERS, Topic.TELEMETRY, Topic.GUARD_WINDOWS)
"""Keyed by node."""

NODE_PARTITIONS = 16
"""Partitions of the topics keyed by node. With more nodes than partitions, nodes share a partition and skip
each other's records."""

COMPACTED_TOPICS = frozenset({Topic.GUARD_WINDOWS})
"""On Kafka only the newest record of each key is retained."""

GUARD_GROUPS = "penstock.guard-windows."
"""Prefix of the consumer groups of the contention-guards on Kafka, before the cell's index.
There are no others."""

MAX_EVENT_BYTES = 65_536
"""Maximum size of an event's JSON value on every topic; larger ones are dead-lettered."""

MAX_PLAN_BYTES = 4 * MAX_EVENT_BYTES
"""Maximum size of a proposed plan: 256 units with a sentence of 200 characters each, and 2,048 versions that
were read."""


def node_partition(node_id: str) -> int:
    """The partition of orders and telemetry for this node: FNV-1a of its id, stable everywhere."""
    digest = 0x811C9DC5
    for byte in node_id.encode():
        digest = ((digest ^ byte) * 0x01000193) & 0xFFFFFFFF
    return digest % NODE_PARTITIONS
