"""Port for services of a simulated cell: they read the ledger and telemetry in order, and publish answers and
proposals.

A service is a core with a loop around it: it reads new records, computes, publishes, and reads the records
that have come meanwhile. So a simulated service receives a record `delay_s` after it was written; its events
reach the placer after the *planning time*, simulated time that passes while it computes; and until then it
receives nothing new. Records received together are one batch.

The placer checks proposals (LAW 1): late, repeated or invalid ones are refused, on its record, and affect no
job. Values that could never be on the service's topic are dropped here, as the topic's rights and the event's
schema do on a log: values that are not events, events of other topics, fields out of range.
"""

from collections import deque
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import NamedTuple, Protocol

from penstock.model.inputs.external_events import TelemetrySampled
from penstock.model.schema.errors import EventError
from penstock.model.schema.event import Event, wire_type
from penstock.model.schema.topics import Topic
from penstock.model.wire.codec import decode, encode

Input = bytes | TelemetrySampled
"""A record of the ledger, as its bytes, or a sample."""


class Service(Protocol):
    """A service of the cell, without IO. An implementation can take part in a simulation.

    It may hold state folded from its inputs, and must use neither clock nor unseeded random numbers, so that
    runs repeat.
    """

    writes: Topic
    """The one topic that it may write to."""

    def answer(self, inputs: Sequence[Input]) -> Sequence[Event]:
        """Takes all records and samples since the last call, at least one, in the ledger's order; returns its
        events, in order."""
        ...


class Attached(NamedTuple):
    """A service of a run, with its latencies in seconds, ≥ 0."""

    service: Service
    delay_s: float = 0.0
    """Time from a record to its reading."""
    planning_s: float | None = 0.0
    """Time from the reading to the answer, if there is one; None: the real computing time, so that runs do
    not repeat."""


class Services:
    """All services of one run; those attached first are served first."""

    def __init__(self, attached: Sequence[Attached], now_s: Callable[[], float]) -> None:
        self._running = [_Running(one) for one in attached]
        self._now_s = now_s

    def deliver(self, value: Input) -> None:
        """Gives all services a record or sample, at the present time."""
        for one in self._running:
            one.inbox.append((self._now_s() + one.attached.delay_s, value))

    def next_s(self) -> float | None:
        """The next time at which one of them reads or publishes."""
        return min((at_s for one in self._running if (at_s := one.next_s()) is not None), default=None)

    def due(self) -> Sequence[Event]:
        """The next events for the placer at this moment; empty: none are left."""
        now_s = self._now_s()
        for one in self._running:
            while (at_s := one.next_s()) is not None and at_s <= now_s:
                if events := one.go_on(now_s):
                    return events
        return ()


class _Running:
    def __init__(self, attached: Attached) -> None:
        self.attached = attached
        self.inbox: deque[tuple[float, Input]] = deque()
        self.dropped = 0
        self._planned: Sequence[Event] = ()
        self._until_s: float | None = None
        """End of the present planning."""

    def next_s(self) -> float | None:
        if self._until_s is not None:
            return self._until_s
        return self.inbox[0][0] if self.inbox else None

    def go_on(self, now_s: float) -> Sequence[Event]:
        """Publishes the planned events, or reads and plans; call it at `next_s`."""
        if self._until_s is not None:
            self._until_s = None
            return self._planned
        inputs: list[Input] = []
        while self.inbox and self.inbox[0][0] <= now_s:
            inputs.append(self.inbox.popleft()[1])
        began_s = perf_counter()
        answer = self.attached.service.answer(inputs)
        planning_s = self.attached.planning_s
        if planning_s is None:
            planning_s = perf_counter() - began_s
        writes = self.attached.service.writes
        events = [event for one in answer if (event := _published(one, writes)) is not None]
        self.dropped += len(answer) - len(events)
        if not events or planning_s <= 0:
            return events
        self._planned, self._until_s = events, now_s + planning_s
        return ()


def _published(event: object, writes: Topic) -> Event | None:
    """The event as it would be read from its topic; None: it could not be there."""
    if not isinstance(event, Event) or event.TOPIC is not writes:
        return None
    try:
        return decode(wire_type(type(event)), encode(event))
    except (EventError, TypeError, ValueError):
        return None


def to_both(
    first: Callable[[bytes], object], second: Callable[[bytes], object] | None
) -> Callable[[bytes], object]:
    """Passes each record to both."""
    if second is None:
        return first

    def take(value: bytes) -> None:
        first(value)
        second(value)

    return take
