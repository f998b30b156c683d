"""A placer that sleeps, is replaced, and wakes up believing that it is still in office."""

import asyncio
import itertools
import signal
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from infra.devservers.kafka import KafkaBroker
from penstock.clock import wall_ms
from penstock.ledger.record.record import GENESIS, RawRecord, read_valid
from penstock.log.port import Message, Partition
from penstock.model.inputs.external_events import JobCancelRequested
from penstock.model.schema.topics import Topic
from penstock.model.wire.envelope import Envelope, to_wire
from tests.faults.conftest import TAKEOVER_MS, MakeCell
from tests.faults.processes.fault_cell import FaultCell
from tests.faults.processes.judge import ends_of, judge, read_all
from tests.faults.processes.slots import Slot
from tests.faults.rules.ledger_book import Book
from tests.support.waiting import await_until

AT_ONCE = 8
ROUNDS = 3  # at least, and until some zombie has written something
BURST = 2_000  # rejected requests, which keep a placer busy for about a quarter of a second
AT_WORK_S = 0.05  # after the burst is in the log
LEDGER = Partition(Topic.LEDGER, 0)
PLACER = "penstock_services.placer"

EMBEDDED, KAFKA = [pytest.mark.postgres], [pytest.mark.postgres, pytest.mark.kafka]
SLOW = pytest.mark.slow


@pytest_asyncio.fixture
async def cell(request: pytest.FixtureRequest, make_cell: MakeCell, dsn: str) -> AsyncIterator[FaultCell]:
    """A cell with judges and an estimator; no placer yet."""
    url = dsn
    if request.param == "kafka":
        broker: KafkaBroker = request.getfixturevalue("broker")
        url = broker.url()
    found = await make_cell(url, dsn)
    await found.start(*found.judges(3), *found.services("estimator", armed=False))
    yield found


def placer(name: str, *, standby: bool = False) -> Slot:
    return Slot(name, PLACER, env={"PENSTOCK_STANDBY": "1"} if standby else {})


async def records(cell: FaultCell) -> list[RawRecord]:
    """The valid ones."""
    head, valid = GENESIS, []
    for record in await read_all(cell.log, LEDGER):
        found = read_valid(head, record.value)
        if found is not None:
            head, raw = found
            valid.append(raw)
    return valid


async def count_void(cell: FaultCell) -> int:
    book = Book()
    for record in await read_all(cell.log, LEDGER):
        book.take(record.value)
    return book.void


def starts(valid: list[RawRecord]) -> list[RawRecord]:
    return [raw for raw in valid if raw.cause.placer_id is not None]


def by(cell: FaultCell, name: str, start: RawRecord) -> bool:
    """Whether the process that now runs as `name` started this term."""
    return f"placer-{pid_of(cell, name)}-" in str(start.cause.placer_id)


def in_office(cell: FaultCell, valid: list[RawRecord]) -> str:
    """The placer that started the last term."""
    last = starts(valid)[-1]
    (name,) = (name for name, slot in cell.slots.items() if slot.module == PLACER and by(cell, name, last))
    return name


def takeovers(cell: FaultCell) -> int:
    """How many standby placers have lost their patience so far."""
    return sum(log.read_text().count("taking over: ") for log in cell.folder.glob("standby-*.log"))


async def replaced(cell: FaultCell, name: str) -> list[RawRecord]:
    """The ledger itself, for the follower may be far behind; nothing as long as this placer is in office."""
    found = await records(cell)
    return [] if in_office(cell, found) == name else found


def send(cell: FaultCell, name: str, number: signal.Signals) -> None:
    process = cell.slots[name].process
    assert process is not None
    cell.zygote.signal(process, number)


async def stop_at_work(cell: FaultCell, name: str, turn: int) -> None:
    """Stops a placer in the middle of a read: it wakes up with records that it has decided on and not yet
    written."""
    burst = []
    for number in range(BURST):
        event = JobCancelRequested(job_id=f"nobody-{turn}-{number}")
        headers, value = to_wire(Envelope(event.job_id, "/test/users", wall_ms(), event))
        burst.append(Message(Partition(Topic.JOBS, 0), value, headers))
    await cell.users.insist(*burst)
    await asyncio.sleep(AT_WORK_S)  # clock: it may stop anywhere; rounds go on until it stopped at work
    send(cell, name, signal.SIGSTOP)


def pid_of(cell: FaultCell, name: str) -> int:
    process = cell.slots[name].process
    assert process is not None
    assert process.pid is not None
    return process.pid


async def rest_and_judge(cell: FaultCell) -> int:
    """Returns how many void records the ledger's partition holds."""
    await cell.rest()
    await cell.stop()
    verdict = await judge(cell.log, cell.histories, cell.users.acknowledged, cell.answered)
    print(f"\n{verdict.summary()}")
    assert verdict.problems == []
    assert cell.crashes == []
    return verdict.void


@pytest.mark.parametrize(
    "cell",
    [pytest.param("embedded", marks=[*EMBEDDED, SLOW]), pytest.param("kafka", marks=KAFKA)],
    indirect=True,
)
async def test_a_zombie_wakes_up(cell: FaultCell) -> None:
    """The machine of placer A swaps itself to death in the middle of work; B takes over; A's machine
    recovers.

    What A still writes is void, what it still orders is refused or was never sent, and then it stands by: in
    the next round it is B that sleeps, and A that takes over.
    """
    await cell.start(placer("a"))
    await cell.start(placer("b", standby=True))
    submitting = cell.background(cell.users.keep_submitting(cell.follower, AT_ONCE))
    replica = cell.follower.replica
    await cell.until(lambda: len(replica.state.ended) >= 10, "jobs flow")
    for turn in itertools.count():
        # In turns, unless the machine is so busy that the standby placer took over without our doing.
        sleeper = in_office(cell, await records(cell))
        await stop_at_work(cell, sleeper, turn)
        asleep = await await_until(lambda who=sleeper: replaced(cell, who), f"a successor of {sleeper}")
        ended = len(replica.state.ended)
        await cell.until(lambda n=ended: len(replica.state.ended) > n + 5, "jobs flow again")
        woken_ms = wall_ms()
        send(cell, sleeper, signal.SIGCONT)
        await asyncio.sleep(3 * TAKEOVER_MS / 1_000)  # clock: it must not take over, and could in this time
        later = (await records(cell))[len(asleep) :]
        for first in starts(later):
            # On a busy machine either may find the other too slow, as a standby placer may: never before its
            # patience is over.
            if by(cell, sleeper, first):
                assert first.now_ms >= woken_ms + TAKEOVER_MS, "the zombie took the office back"
        assert {raw.term for raw in later} <= {raw.term for raw in starts(later)} | {asleep[-1].term}
        if turn + 1 >= ROUNDS and (cell.log.conditional or await count_void(cell) > 0):
            break
    submitting.cancel()
    void = await rest_and_judge(cell)
    print(f"{void} void records of zombies")
    if cell.log.conditional:  # tests/integration/placer/test_placer_service.py proves that it refuses them
        assert void == 0, "compare-and-append lets nobody write a void record"
    else:
        assert void > 0, "no zombie wrote anything after it was replaced: this showed nothing"


@pytest.mark.parametrize(
    "cell",
    [pytest.param("embedded", marks=EMBEDDED), pytest.param("kafka", marks=[*KAFKA, SLOW])],
    indirect=True,
)
async def test_a_standby_takes_over_from_the_dead(cell: FaultCell) -> None:
    """The placer is gone for good. Nobody sends heartbeats: another one notices because an input stays
    unanswered.

    On a busy machine the standby placer may find the other one too slow just before its death, and be on its
    way into office: then once more.
    """
    await cell.start(placer("a"))
    for number in itertools.count():
        await cell.start(placer(f"standby-{number}", standby=True))
        for _ in range(5):
            await cell.users.submit(("/bin/sleep", "0.01"))
        await cell.settle()
        before = await records(cell)
        quiet = await ends(cell)
        victim, process = (name := in_office(cell, before)), cell.slots[name].process
        assert process is not None
        cell.slots[victim].keep = False
        cell.kill(victim)
        await cell.until(process.ended.is_set, f"the death of {victim}")
        await asyncio.sleep(3 * TAKEOVER_MS / 1_000)  # clock: nobody must take over, and could in this time
        if len(await records(cell)) == len(before):
            break
    assert quiet == await ends(cell), "nothing waits, so nobody needs to write"
    begun, asked_ms = takeovers(cell), wall_ms()
    await cell.users.submit(("/bin/sleep", "0.01"))
    await cell.until(lambda: cell.follower.replica.state.term > before[-1].term, "a successor")
    await cell.settle()
    new = (await records(cell))[len(before) :]
    assert not by(cell, victim, starts(new)[0])
    answered_ms = next(raw.now_ms for raw in new if raw.now_ms > before[-1].now_ms)
    assert begun or answered_ms >= asked_ms + TAKEOVER_MS, "it took over before its patience was over"
    await rest_and_judge(cell)


async def ends(cell: FaultCell) -> list[int]:
    """Of all topics but the ledger."""
    places = [Partition(topic, 0) for topic in Topic if topic != Topic.LEDGER]
    return list((await ends_of(cell.log, places)).values())
