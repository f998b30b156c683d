"""Which ledger events are decisions of the placer, as shown to users who trace decisions."""

from penstock.model.decisions.ledger_events import TimerFired, TimerSet
from penstock.model.schema.event import Event, UnknownFact


def is_decision(event: Event) -> bool:
    """Whether the event exists only inside ledger records, and is neither a timer's nor an unknown one."""
    return event.TOPIC is None and not isinstance(event, TimerSet | TimerFired | UnknownFact)
