"""Drafts the one ledger record that answers an input (LAW 2), from the input's bytes. Shared by the shell and
by replay."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from penstock.ledger.fold.evolve import answered, begin, evolve
from penstock.ledger.record.record import Draft, RawRecord
from penstock.ledger.state.state import CellState
from penstock.model.decisions.ledger_events import ChoiceFailed, TermStarted, TimerFired
from penstock.model.schema.errors import EventError, Reason
from penstock.model.schema.event import Event, wire_type
from penstock.model.wire.envelope import Envelope, Headers, from_wire
from penstock_services.placer.core.step import MAX_REASON, UNDECIDED, Failure, PlacerCore, Step

FAILED = "failed: "
"""Begins the reason of a record whose input could not be folded."""
FORGED = "forged: "
"""Begins the reason of a record whose input is not from the sender that it names."""
CHOICE_FAILED = wire_type(ChoiceFailed)


class Moment(NamedTuple):
    """Position of the next record, and the ledger's time for it."""

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


class Forgery(NamedTuple):
    """An input from another sender than the one that it names."""

    why: str
    facts: Sequence[Event] = ()
    """Facts of the record that the sender is to receive."""


class Answer(NamedTuple):
    """The record to write, the reason and text of its dead letter, if there is one,
    and the exceptions of deciding."""

    draft: Draft
    envelope: Envelope | None = None
    letter: "tuple[Reason, str] | None" = None
    errors: Sequence[Exception] = ()


def answer_input(
    core: PlacerCore,
    moment: Moment,
    found: Input,
    failure: Failure | None = None,
    forged: Callable[[CellState, Input, Envelope], Forgery | None] = lambda *_: None,
) -> Answer:
    """Folds and decides one input. `failure`: that of an earlier attempt; `forged`: whether another sender
    than the named one wrote it."""
    begin(core.state, *_order(moment))
    place = (found.topic, found.partition, found.offset)
    cause: dict[str, object] = {
        "topic": found.topic,
        "partition": found.partition,
        "offset": found.offset,
        "event_id": "",
    }
    try:
        envelope = from_wire(found.headers, found.value, found.topic)
    except EventError as error:
        answered(core.state, *place, "")
        reason = f"{error.reason}: {error}"[:MAX_REASON]
        return Answer(
            Draft(moment.term, moment.now_ms, cause, "dead_lettered", reason, ()),
            None,
            (error.reason, reason),
        )
    answered(core.state, *place, envelope.id)
    cause["event_id"] = envelope.id
    if (forgery := forged(core.state, found, envelope)) is not None:
        for fact in forgery.facts:
            evolve(core.state, fact)
        reason = f"{FORGED}{forgery.why}"[:MAX_REASON]
        draft = Draft(moment.term, moment.now_ms, cause, "dead_lettered", reason, forgery.facts)
        return Answer(draft, None, ("forged", reason))
    if failure is not None and failure.unfoldable:
        reason = f"{FAILED}{failure.error}"[:MAX_REASON]
        draft = Draft(moment.term, moment.now_ms, cause, "dead_lettered", reason, ())
        return Answer(draft, envelope, ("failed", reason))
    step = core.step(envelope.data, envelope.id, failure)
    letter: tuple[Reason, str] | None = None
    if step.outcome == "dead_lettered":
        letter = "failed", step.reason or ""
    return Answer(_draft(moment, cause, step), envelope, letter, step.errors)


def answer_timer(core: PlacerCore, moment: Moment, timer_id: str, failure: Failure | None = None) -> Answer:
    """Folds and decides one due timer. One that cannot be folded is only removed."""
    begin(core.state, *_order(moment))
    fact = TimerFired(timer_id=timer_id)
    cause: dict[str, object] = {"timer_id": timer_id}
    if failure is not None and failure.unfoldable:
        core.state.timers.pop(timer_id, None)
        reason = f"{FAILED}{failure.error}"[:MAX_REASON]
        return Answer(Draft(moment.term, moment.now_ms, cause, "dead_lettered", reason, (fact,)))
    step = core.step(fact, f"timer-{timer_id}-{moment.seq}", failure)
    return Answer(_draft(moment, cause, step), errors=step.errors)


def _draft(moment: Moment, cause: dict[str, object], step: Step) -> Draft:
    return Draft(moment.term, moment.now_ms, cause, step.outcome, step.reason, step.facts, step.explanation)


def failure_of(record: RawRecord) -> Failure | None:
    """The failure of this record's placer, so that its input is answered the same way again."""
    if record.outcome != "dead_lettered" or record.reason is None:
        return None
    if record.reason.startswith(FAILED):
        return Failure(record.reason.removeprefix(FAILED))
    if not record.reason.startswith(UNDECIDED):
        return None
    jobs: dict[str, str] = {}
    for n, raw in enumerate(record.facts):
        fact = raw.event() if raw.type == CHOICE_FAILED else None
        if isinstance(fact, ChoiceFailed):
            if fact.job_id is None:
                return Failure(fact.error, n - 1, jobs)
            jobs[fact.job_id] = fact.error
    return Failure(jobs=jobs)


def forgery_of(record: RawRecord) -> Forgery | None:
    """The verdict of this record's placer on its input, so that a replay needs no keys."""
    if record.outcome != "dead_lettered" or record.reason is None or not record.reason.startswith(FORGED):
        return None
    return Forgery(record.reason.removeprefix(FORGED), tuple(raw.event() for raw in record.facts))


def answer_term(core: PlacerCore, moment: Moment, fact: TermStarted, accepted: Sequence[Event] = ()) -> Draft:
    """The record that begins a term (LAW 3). `accepted`: facts that an operator accepts with it."""
    begin(core.state, *_order(moment))
    step = core.step(fact, f"term-{fact.term}")
    for other in accepted:
        evolve(core.state, other)
    step = msgspec.structs.replace(step, facts=[*step.facts, *accepted])
    return _draft(moment, {"placer_id": fact.placer_id}, step)


def _order(moment: Moment) -> tuple[int, int, int]:
    """In the order of `begin`'s parameters."""
    return moment.seq, moment.now_ms, moment.term
