"""Errors of events.

EventError
├── Undecodable      bytes that are not a JSON object, or headers that are not a CloudEvent
├── UnknownType      a type string that this version does not know
├── UnknownVersion   a known type, but a version that no upcaster reaches
│   └── NeedsNewer   a fact that only a later version of Penstock may fold
├── Invalid          the fields do not fit the model; names field and remedy
└── TooBig           the value exceeds MAX_EVENT_BYTES
"""

from typing import ClassVar, Literal

Reason = Literal["undecodable", "unknown_type", "unknown_version", "invalid", "too_large", "failed", "forged"]
"""Why a record is dead-lettered; `failed`: it was read, but applying it failed; `forged`: its signature is
not the node's."""


class EventError(Exception):
    """An event could not be read. `reason` is one of the closed list that dead letters use."""

    reason: ClassVar[Reason] = "undecodable"


class Undecodable(EventError):
    reason = "undecodable"


class UnknownType(EventError):
    reason = "unknown_type"


class UnknownVersion(EventError):
    reason = "unknown_version"


class NeedsNewer(UnknownVersion):
    """`version`: the lowest that may."""

    def __init__(self, version: str, own: str) -> None:
        super().__init__(f"this ledger needs Penstock {version} or later; this is {own}")
        self.version = version


class Invalid(EventError):
    reason = "invalid"


class TooBig(EventError):
    reason = "too_large"
