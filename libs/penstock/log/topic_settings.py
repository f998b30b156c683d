"""Topic configuration: retention and durability of each topic, as Kafka names them.

One table for creating topics, for verifying those that exist, and for the documentation.
"""

from collections.abc import Mapping
from types import MappingProxyType

from penstock.model.schema.topics import (
    CELL_TOPICS,
    COMPACTED_TOPICS,
    INPUT_TOPICS,
    NODE_PARTITIONS,
    NODE_TOPICS,
    Topic,
)

Rights = Mapping[str, Mapping[str, list[str]]]
"""Service → "read" | "write" → topics, and "join" → prefixes of consumer groups, as infra/kafka/acls.yaml."""

JOIN = "join"
"""The right to join consumer groups, not a right on topics; it exists on Kafka alone."""

DAY_MS = 86_400_000
FOR_EVER = -1
MAX_REPLICAS = 3
MAX_MESSAGE_BYTES = 1_048_588  # Kafka's default; our largest record with its headers is below

RETENTION_MS: Mapping[str, int] = MappingProxyType(
    {
        # The ledger alone rebuilds the state. An input must stay until the ledger has answered it, however
        # long the
        # placer was stopped: no retention time is safe.
        **dict.fromkeys((str(Topic.LEDGER), *map(str, INPUT_TOPICS)), FOR_EVER),
        str(Topic.AMENDMENTS): FOR_EVER,  # part of the ledger: every later fold needs them
        # Computed from the ledger: a node whose position is gone joins again, and its orders are repeated
        # then.
        str(Topic.ORDERS): 7 * DAY_MS,
        str(Topic.TELEMETRY): 7 * DAY_MS,  # no state depends on it
        str(Topic.DEAD_LETTERS): 90 * DAY_MS,  # no state depends on it; people read it
        **dict.fromkeys(
            map(str, COMPACTED_TOPICS), FOR_EVER
        ),  # by time; compaction removes overwritten records
    }
)
"""Topic → minimum retention of a record in ms, or `FOR_EVER`."""

SEGMENT_MS = 10 * 60_000
"""Compaction skips the newest segment, which by default grows for seven days."""

_AT_LEAST = frozenset({"min.insync.replicas", "max.message.bytes"})
_AT_LEAST_OR_FOR_EVER = frozenset({"retention.ms", "retention.bytes"})
_LOSES_NOTHING = frozenset({"segment.ms"})


def topic_partitions(cells: int = 1) -> dict[str, int]:
    """Topic → partitions of an installation with `cells` cells (≥ 1)."""
    by_cell = {str(topic): cells for topic in CELL_TOPICS}
    by_node = {str(topic): NODE_PARTITIONS for topic in NODE_TOPICS}
    return {**by_cell, **by_node, str(Topic.DEAD_LETTERS): 1}


def topic_settings(topic: str, replicas: int) -> dict[str, str]:
    """Every setting that decides whether an acknowledged record stays, for a topic with `replicas` replicas
    (≥ 1).

    A topic that is not in the table retains its records for ever.
    """
    compacted = {"segment.ms": str(SEGMENT_MS)} if topic in COMPACTED_TOPICS else {}
    return {
        "retention.ms": str(RETENTION_MS.get(topic, FOR_EVER)),
        "retention.bytes": str(FOR_EVER),
        "cleanup.policy": "compact" if topic in COMPACTED_TOPICS else "delete",
        # Acknowledged means: in two replicas at least, where one of three may be missing. With two replicas
        # in all, this
        # would stop all writes while one is missing.
        "min.insync.replicas": str(max(1, min(replicas, MAX_REPLICAS) - 1)),
        # The broker's clock: retention by a client's clock would follow the client's errors, and by default a
        # broker
        # refuses records that are stamped an hour ahead.
        "message.timestamp.type": "LogAppendTime",
        "unclean.leader.election.enable": "false",  # a replica that lacks records must not become the leader
        "max.message.bytes": str(MAX_MESSAGE_BYTES),
        **compacted,
    }


def suffices(setting: str, found: str, wanted: str) -> bool:
    """Whether a topic with this value retains every record that it would retain with the wanted value."""
    if found == wanted or setting in _LOSES_NOTHING:
        return True
    if setting in _AT_LEAST:
        return int(found) >= int(wanted)
    if setting in _AT_LEAST_OR_FOR_EVER:
        return found == str(FOR_EVER) or (wanted != str(FOR_EVER) and int(found) >= int(wanted))
    return False
