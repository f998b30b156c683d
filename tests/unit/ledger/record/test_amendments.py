"""A ledger record that cannot be decoded, and what readers take in its place."""

import json
import pickle
from typing import Any

import msgspec
import pytest

from penstock.ledger.fold.evolve import evolve
from penstock.ledger.record.amendment import NotAmendable, amend, digest, place_as_written, propose
from penstock.ledger.record.record import (
    Amended,
    Draft,
    Head,
    RawRecord,
    UndecodableRecord,
    UnfoldableRecord,
    read,
    record_id,
    write,
)
from penstock.ledger.replica.replica import Replica
from penstock.ledger.replica.snapshot import dump
from penstock.model.decisions.ledger_events import JobEnded, TermStarted, TimerSet, TimerSubject
from penstock.model.decisions.plans import PlanAdopted, PlanUnit
from penstock.model.inputs.amendments import AmendedFact, LedgerAmended
from penstock.model.nouns.settings import PlacerSettings
from penstock.model.nouns.types import MAX_MS
from penstock.model.schema.event import Event
from penstock.model.schema.topics import Topic
from penstock_services.estimator.core.fold.state import State
from penstock_services.projector.core.projection import Projection
from tests.support.cluster.driver import CellDriver, node_spec

ABOUT = TimerSubject(kind="ending", id="cell", attempt=0)
LATE = TimerSet(timer_id="cell:ending", at_ms=MAX_MS + 1, about=ABOUT)


def ledger(*facts: Event) -> list[bytes]:
    """A term, a record with these facts, and a successor."""
    head, values = Head(0, "0" * 32, 0), []
    first = TermStarted(term=1, placer_id="p1", settings=PlacerSettings())
    timer = TimerSet(timer_id="cell:next", at_ms=5, about=ABOUT)
    for number, group in enumerate([(first,), facts, (timer,)], 1):
        draft = Draft(1, number, {"timer_id": "t"}, "committed", None, group)
        head, value = write(head, draft)
        values.append(value)
    return values


def amendment(value: bytes, offset: int = 1, **changes: Any) -> LedgerAmended:
    """As the operator confirms it."""
    fields = {"offset": offset, **changes}
    if not {"seq", "sha256", "facts"} <= changes.keys():
        found = propose(value, offset)
        fields = {"seq": found.seq, "sha256": found.sha256, "facts": found.facts, **fields}
    return LedgerAmended(by="ops/on-call", reason="drill", at_ms=7, **fields)


def test_a_reader_stops_before_the_record_and_stays_as_it_was() -> None:
    """Facts in front of the broken one are not folded either: answers from the replica stay those of the
    record before."""
    values = ledger(TimerSet(timer_id="cell:good", at_ms=9, about=ABOUT), LATE)
    reader = Replica()
    reader.take(values[0], 0)
    before = dump(reader.state)
    for _ in range(2):
        with pytest.raises(
            UndecodableRecord, match=r"offset 1 \(seq 2\) .*penstock.timer.set.v1: at_ms"
        ) as error:
            reader.take(values[1], 1)
        assert (error.value.offset, error.value.seq, error.value.kind) == (1, 2, "penstock.timer.set.v1")
        assert "`penstock repair --at 1`" in error.value.remedy
        assert (dump(reader.state), reader.offset, reader.head.seq) == (before, 1, 1)


def test_the_chain_is_the_same_with_an_amendment() -> None:
    """The record's successors were written before the amendment; they follow the record as it was."""
    values = ledger(LATE)
    amended = amend(values[1], amendment(values[1]))
    assert amended is not None
    assert (amended, record_id(amended)) == (values[1], record_id(values[1]))
    reader = Replica()
    for offset, value in enumerate([values[0], amended, values[2]]):
        assert reader.take(value, offset) is not None
    assert reader.state.timers["cell:ending"].at_ms == MAX_MS
    assert reader.head.seq == 3


def test_an_amended_record_survives_the_way_to_a_worker() -> None:
    """Questions about the past are answered in another process."""
    value = ledger(LATE)[1]
    amended = amend(value, amendment(value))
    assert amended is not None
    sent = pickle.loads(pickle.dumps(amended))
    assert isinstance(sent, Amended)
    assert (sent, sent.text) == (amended, amended.text)


def test_every_field_beyond_its_bounds_becomes_the_nearest_legal_value() -> None:
    """Numbers, nested ones, and texts; all else stays byte for byte."""
    unit = PlanUnit(job_id="a", nodes=("n1",), expected_ms=MAX_MS + 5)
    plan = PlanAdopted(units=(PlanUnit(job_id="b", nodes=("n1",)), unit))
    ended = JobEnded(job_id="a", outcome="failed", exit_code=-3, reason="x" * 5_000)
    value = ledger(plan, LATE, ended)[1]
    found = propose(value, 1)
    assert [(change.n, change.field, change.becomes) for change in found.changes][:3] == [
        (0, "units.1.expected_ms", MAX_MS),
        (1, "at_ms", MAX_MS),
        (2, "exit_code", 0),
    ]
    amended = amend(value, amendment(value))
    assert amended is not None
    facts = read(amended).events(1)
    assert isinstance(facts[2], JobEnded)
    assert len(facts[2].reason) < 5_000
    assert (facts[0], facts[1]) == (
        msgspec.structs.replace(
            plan, units=(plan.units[0], msgspec.structs.replace(unit, expected_ms=MAX_MS))
        ),
        msgspec.structs.replace(LATE, at_ms=MAX_MS),
    )


def test_a_fact_that_no_bound_mends_is_left_out() -> None:
    """Its subject has a name that no identifier may have; the record's other facts count."""
    strange = TimerSubject(kind="ending", id="no identifier", attempt=0)
    good = TimerSet(timer_id="cell:good", at_ms=9, about=ABOUT)
    value = ledger(TimerSet(timer_id="cell:bad", at_ms=9, about=strange), good)[1]
    found = propose(value, 1)
    assert found.facts == (AmendedFact(n=0),)
    [change] = found.changes
    assert (change.field, change.becomes) == ("", None)
    amended = amend(value, amendment(value))
    assert amended is not None
    assert read(amended).events(1) == [good]


def test_a_record_of_another_version_is_not_amended() -> None:
    """A newer placer wrote it: the operator is told to run that version, not to throw its decision away."""
    value = ledger(LATE)[1].replace(b"penstock.timer.set.v1", b"penstock.timer.set.v9")
    with pytest.raises(NotAmendable, match="version of the placer"):
        propose(value, 1)
    with pytest.raises(UndecodableRecord) as error:
        read(value).events(1)
    assert "run the version" in error.value.remedy


@pytest.mark.parametrize("value", [b"no record", ledger()[1]])
def test_what_needs_no_amendment_gets_none(value: bytes) -> None:
    """Bytes that are no record are skipped by all readers; a record without a fault has nothing to repair."""
    with pytest.raises(NotAmendable, match=r"skip it|nothing to repair"):
        propose(value, 1)


def test_an_amendment_is_of_one_record_alone_and_must_help() -> None:
    """Another record at the offset (the log was restored from a backup), or an amendment that leaves the
    fault in."""
    value, other = ledger(LATE)[1], ledger(LATE, LATE)[1]
    mends = amendment(value)
    assert amend(other, mends) is None
    fault = json.dumps(
        {"timer_id": "t", "at_ms": MAX_MS + 2, "about": {"kind": "ending", "id": "c", "attempt": 0}}
    )
    assert amend(value, amendment(value, facts=(AmendedFact(n=0, data=fault),))) is None
    assert digest(value) == mends.sha256


def test_the_event_stream_shows_who_amended_what_and_why() -> None:
    """`penstock events` of the job that the record is about."""
    cell = CellDriver()
    cell.join(node_spec("n1"))
    cell.submit("j1")
    ended = JobEnded(job_id="j1", outcome="failed", exit_code=300, reason="")
    _, value = write(cell.head, Draft(1, cell.now_ms, {"timer_id": "t"}, "committed", None, [ended]))
    offset = len(cell.values)
    projection = Projection(Replica())
    for number, one in enumerate(cell.values):
        projection.take(one, number)
    amended = amend(value, amendment(value, offset))
    assert amended is not None
    projection.drain()
    projection.take(amended, offset)
    [event] = [row for row in projection.drain()["events"] if row["type"] == "penstock.record.amended"]
    assert (event["job_id"], event["data"]["by"], event["data"]["reason"]) == ("j1", "ops/on-call", "drill")
    assert (event["data"]["offset"], event["data"]["facts"]) == (offset, [0])


def test_the_estimator_stops_where_every_reader_stops() -> None:
    """Also at a fact that estimates do not need: its state is the cell's (LAW 3)."""
    for broken in (LATE, JobEnded(job_id="j", outcome="cancelled", exit_code=300, reason="")):
        values, state = ledger(broken), State(Topic.JOBS, 0)
        state.fold(values[0], 0)
        with pytest.raises(UndecodableRecord) as error:
            state.fold(values[1], 1)
        assert (error.value.offset, state.seq) == (1, 1)


def test_hooks_see_the_amended_facts() -> None:
    """Readers that derive something from single facts fold by a hook."""
    values = ledger(LATE)
    amended, seen, reader = amend(values[1], amendment(values[1])), [], Replica()

    def hook(record: RawRecord, n: int, fact: Event) -> None:
        evolve(reader.state, fact)
        seen.append(fact)

    assert amended is not None
    reader.take(values[0], 0)
    reader.take(amended, 1, hook)
    assert seen == [msgspec.structs.replace(LATE, at_ms=MAX_MS)]


def test_a_fact_that_no_fold_takes_is_named_and_left_out() -> None:
    """A placer of tomorrow ends a job that this version has never heard of. All of it can be decoded."""
    gone = JobEnded(job_id="never-was", outcome="cancelled", reason="")
    timer = TimerSet(timer_id="cell:ending", at_ms=7, about=ABOUT)
    values = ledger(gone, timer, gone)
    reader = Replica()
    assert reader.take(values[0], 0) is not None
    with pytest.raises(
        UnfoldableRecord, match=r"offset 1 \(seq 2\) cannot be folded: penstock.job.ended.v1: "
    ) as error:
        reader.take(values[1], 1)
    assert error.value.n == 0
    found = propose(values[1], 1, {0: error.value.cause, 2: error.value.cause})
    assert [(change.n, change.becomes) for change in found.changes] == [(0, None), (2, None)]
    amended = amend(values[1], amendment(values[1], facts=found.facts, seq=2, sha256=found.sha256))
    assert amended is not None
    again = Replica()
    for offset, value in enumerate((values[0], amended, values[2])):
        assert again.take(value, offset) is not None
    assert sorted(again.state.timers) == ["cell:ending", "cell:next"]


def test_places_in_an_amended_record_are_found_in_the_one_that_was_written() -> None:
    left_out = [AmendedFact(n=0), AmendedFact(n=3), AmendedFact(n=1, data="{}")]
    assert [place_as_written(left_out, n) for n in range(3)] == [1, 2, 4]
