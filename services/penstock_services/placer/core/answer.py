"""From one input's bytes to the draft of its one ledger record (LAW 2). Shared by the shell and by replay."""

from typing import NamedTuple

from penstock.ledger.evolve import begin
from penstock.ledger.record import Draft
from penstock.model.envelope import Envelope, Headers, from_wire
from penstock.model.errors import EventError, Reason
from penstock.model.ledger_events import TermStarted, TimerFired
from penstock_services.placer.core.step import PlacerCore

MAX_REASON = 1_024


class Moment(NamedTuple):
    """Where the next record will stand, and the ledger's time for it."""

    seq: int
    term: int
    now_ms: int


class Input(NamedTuple):
    """One record of an input topic."""

    topic: str
    partition: int
    offset: int
    headers: Headers
    value: bytes

    @property
    def place(self) -> str:
        return f"{self.topic}/{self.partition}/{self.offset}"


class Answer(NamedTuple):
    """The record to write, and the reason and text of its dead letter, if there is one."""

    draft: Draft
    envelope: Envelope | None
    letter: "tuple[Reason, str] | None" = None


def answer_input(core: PlacerCore, moment: Moment, found: Input, poison: str | None = None) -> Answer:
    """Folds and decides one input. `poison`: an earlier attempt failed on it with this; it is dead-lettered."""
    begin(core.state, *_order(moment))
    core.state.positions[found.topic, found.partition] = found.offset + 1
    cause: dict[str, object] = {
        "topic": found.topic,
        "partition": found.partition,
        "offset": found.offset,
        "event_id": "",
    }
    try:
        envelope = from_wire(found.headers, found.value, found.topic)
    except EventError as error:
        reason = f"{error.reason}: {error}"[:MAX_REASON]
        return Answer(
            Draft(moment.term, moment.now_ms, cause, "dead_lettered", reason, ()),
            None,
            (error.reason, reason),
        )
    cause["event_id"] = envelope.id
    if poison is not None:
        reason = f"failed: {poison}"[:MAX_REASON]
        draft = Draft(moment.term, moment.now_ms, cause, "dead_lettered", reason, ())
        return Answer(draft, envelope, ("failed", reason))
    step = core.step(envelope.data, envelope.id)
    draft = Draft(moment.term, moment.now_ms, cause, step.outcome, step.reason, step.facts, step.explanation)
    return Answer(draft, envelope)


def answer_timer(core: PlacerCore, moment: Moment, timer_id: str, poison: str | None = None) -> Draft:
    """Folds and decides one due timer. A poisoned one is only removed."""
    begin(core.state, *_order(moment))
    fact = TimerFired(timer_id=timer_id)
    cause: dict[str, object] = {"timer_id": timer_id}
    if poison is not None:
        core.state.timers.pop(timer_id, None)
        return Draft(
            moment.term, moment.now_ms, cause, "dead_lettered", f"failed: {poison}"[:MAX_REASON], (fact,)
        )
    step = core.step(fact, f"timer-{timer_id}-{moment.seq}")
    return Draft(moment.term, moment.now_ms, cause, step.outcome, step.reason, step.facts, step.explanation)


def answer_term(core: PlacerCore, moment: Moment, fact: TermStarted) -> Draft:
    """The record that begins a term (LAW 3)."""
    begin(core.state, *_order(moment))
    step = core.step(fact, f"term-{fact.term}")
    return Draft(
        moment.term, moment.now_ms, {"placer_id": fact.placer_id}, step.outcome, step.reason, step.facts
    )


def _order(moment: Moment) -> tuple[int, int, int]:
    """As `begin` takes them."""
    return moment.seq, moment.now_ms, moment.term
