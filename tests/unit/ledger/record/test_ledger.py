"""LAWs 2 and 3: which records count, for everybody alike."""

import msgspec
import orjson
import pytest

from penstock.ledger.check.check import check
from penstock.ledger.fold.evolve import evolve
from penstock.ledger.record.record import (
    GENESIS,
    Draft,
    Head,
    RawRecord,
    extend,
    read,
    read_valid,
    record_id,
    write,
)
from penstock.ledger.replica.replica import Replica
from penstock.ledger.replica.snapshot import dump
from penstock.ledger.state.index import NodeIndex, bits
from penstock.ledger.state.state import CellState
from penstock.model.decisions.ledger_events import JobEnded, TermStarted
from penstock.model.inputs.external_events import JobSubmitted
from penstock.model.nouns.settings import PlacerSettings
from penstock.model.nouns.transitions import IllegalTransition
from penstock.model.schema.event import Event, wire_type
from tests.support.cluster.driver import CellDriver, job_spec, node_spec

CAUSE: dict[str, object] = {"topic": "penstock.jobs.v1", "partition": 0, "offset": 0, "event_id": "e"}


def term(number: int, who: str = "p") -> TermStarted:
    return TermStarted(term=number, placer_id=who, settings=PlacerSettings())


def begin_term(head: Head, number: int, who: str = "p") -> tuple[Head, bytes]:
    return write(head, Draft(number, 1, {"placer_id": who}, "committed", None, [term(number, who)]))


def answer(head: Head, now_ms: int = 2) -> tuple[Head, bytes]:
    """A record without facts, in the head's term."""
    return write(head, Draft(head.term, now_ms, CAUSE, "rejected", "duplicate_job", ()))


def test_the_chain_accepts_its_own_children() -> None:
    head, first = begin_term(GENESIS, 1)
    after, second = answer(head)
    assert extend(GENESIS, read(first), first) == head
    assert extend(head, read(second), second) == after


@pytest.mark.parametrize(("field", "value"), [("seq", 7), ("parent", "f" * 32), ("term", 2), ("seq", 1)])
def test_a_record_that_does_not_extend_the_chain_is_void(field: str, value: object) -> None:
    """Each of the three links is checked: dropping any one lets a zombie's record in."""
    head, _ = begin_term(GENESIS, 1)
    _, good = answer(head)
    bad = orjson.dumps({**orjson.loads(good), field: value})
    assert read_valid(head, good) is not None
    assert read_valid(head, bad) is None


def test_only_a_term_started_record_may_raise_the_term_and_only_by_one() -> None:
    head, _ = begin_term(GENESIS, 1)
    _, by_one = begin_term(head, 2)
    _, by_two = begin_term(head, 3)
    _, same = begin_term(head, 1)
    assert read_valid(head, by_one) is not None
    assert read_valid(head, by_two) is None
    assert read_valid(head, same) is None


def test_a_zombies_late_record_is_void_for_every_reader() -> None:
    """A was stopped in the middle of a write; B began term 2; A's record arrives after it, in A's old
    term."""
    head, first = begin_term(GENESIS, 1, "a")
    _, late = answer(head)
    successor, second = begin_term(head, 2, "b")
    _, third = answer(successor)
    readers = [Replica(), Replica()]
    for offset, value in enumerate([first, second, late, third, late]):
        for reader in readers:
            reader.take(value, offset)
    assert readers[0].head == readers[1].head
    assert (readers[0].head.seq, readers[0].head.term, readers[0].offset) == (3, 2, 5)


def test_a_changed_byte_breaks_the_chain() -> None:
    """Nobody can rewrite history unseen: the next record names the id of the bytes that were there."""
    head, first = begin_term(GENESIS, 1)
    _, second = answer(head)
    forged = first.replace(b'"placer_id":"p"', b'"placer_id":"q"')
    assert forged != first
    forged_head = extend(GENESIS, read(forged), forged)
    assert forged_head is not None
    assert read_valid(forged_head, second) is None


@pytest.mark.parametrize("garbage", [b"", b"null", b"[]", b"{", b"\xff\xfe", b'{"seq": "x"}', b"[" * 100_000])
def test_bytes_that_are_no_record_are_void(garbage: bytes) -> None:
    assert read_valid(GENESIS, garbage) is None


def test_equal_drafts_give_equal_bytes() -> None:
    """Replay rests on it."""
    assert begin_term(GENESIS, 1)[1] == begin_term(GENESIS, 1)[1]
    assert record_id(begin_term(GENESIS, 1)[1]) == begin_term(GENESIS, 1)[0].id


def test_an_illegal_move_stops_the_fold_with_a_trace() -> None:
    """A ledger that ends a job which is only submitted as succeeded is wrong: stop, do not guess."""
    state = CellState()
    evolve(state, JobSubmitted(job_id="j1", spec=job_spec()))
    with pytest.raises(IllegalTransition, match=r"job j1 at seq 0: submitted may not become succeeded"):
        evolve(state, JobEnded(job_id="j1", outcome="succeeded"))


def test_the_check_notices_each_kind_of_damage() -> None:
    """A judge that cannot see damage proves nothing."""
    cell = CellDriver()
    cell.join(node_spec("n1"))
    cell.submit("a")
    cell.submit("b")
    state, node = cell.state, cell.state.nodes["n1"]
    assert check(state) == []
    place = cell.job("a").tasks["a.1.w0"].place
    cell.job("b").tasks["b.1.w0"].place = msgspec.structs.replace(place, task_id="b.1.w0")
    assert any("given to both" in problem for problem in check(state))
    node.free_host_memory_mib -= 1
    assert any("books" in problem for problem in check(state))
    state.index = NodeIndex()
    assert any("index" in problem for problem in check(state))
    state.ended["a"] = "failed"
    assert any("both live and ended" in problem for problem in check(state))
    del cell.job("a").tasks["a.1.w0"]
    assert any("all or nothing" in problem for problem in check(state))


def test_bits_come_in_rising_order() -> None:
    assert list(bits(0b1011_0000_0001)) == [0, 8, 9, 11]


def test_a_hook_sees_the_state_before_and_after_each_fact() -> None:
    """The gateway remembers a job that ends: it is in the state before the fact, and gone after it."""
    cell = CellDriver()
    cell.join(node_spec("n1"))
    cell.submit("a")
    cell.start("a")
    cell.exit("a.1.w0")
    replica, seen = Replica(), []

    def hook(record: RawRecord, n: int, fact: Event) -> None:
        before = "a" in replica.state.jobs
        evolve(replica.state, fact)
        assert record.facts[n].type == wire_type(type(fact))
        seen.append((type(fact).__name__, before, "a" in replica.state.jobs))

    for offset, value in enumerate(cell.values):
        assert replica.take(value, offset, hook) is not None
    assert ("JobSubmitted", False, True) in seen
    assert seen[-1] == ("JobEnded", True, False)
    assert dump(replica.state) == dump(cell.follower.state)
