"""A placer that sleeps, is replaced, and wakes up believing that it is still in office."""

import asyncio
import signal
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from infra.devservers.kafka import KafkaBroker
from penstock.clock import wall_ms
from penstock.ledger.record import GENESIS, RawRecord, read_valid
from penstock.log.port import Message, Partition
from penstock.model.envelope import Envelope, to_wire
from penstock.model.external_events import JobCancelRequested
from penstock.model.topics import Topic
from tests.faults.fault_cell import FaultCell, Slot
from tests.faults.judge import judge, read_all
from tests.faults.ledger_book import Book

from .conftest import TAKEOVER_MS, MakeCell

AT_ONCE = 8
PATIENCE_S = 120.0
SLACK_MS = (
    5_000  # two loaded cores: reading, folding, appending and our own look at it; half a second on idle ones
)
ROUNDS = 3
MOST_ROUNDS = 9  # until some zombie has written something
BURST = 2_000  # rejected requests, which keep a placer busy for about a quarter of a second
LOOK_S = 0.2  # between two reads of the whole ledger
AT_WORK_S = 0.05  # after the burst is in the log
LEDGER = Partition(Topic.LEDGER, 0)


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
    return Slot(name, "penstock_services.placer", env={"PENSTOCK_STANDBY": "1"} if standby else {})


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
    """Which of `a` and `b` started the last term."""
    last = starts(valid)[-1]
    (name,) = (name for name in ("a", "b") if name in cell.slots and by(cell, name, last))
    return name


def send(cell: FaultCell, name: str, number: signal.Signals) -> None:
    process = cell.slots[name].process
    assert process is not None
    cell.zygote.signal(process, number)


async def stop_at_work(cell: FaultCell, name: str, turn: int) -> None:
    """Stops a placer in the middle of a read: it wakes up with records that it has decided on and not yet written."""
    burst = []
    for number in range(BURST):
        event = JobCancelRequested(job_id=f"nobody-{turn}-{number}")
        headers, value = to_wire(Envelope(event.job_id, "/test/users", wall_ms(), event))
        burst.append(Message(Partition(Topic.JOBS, 0), value, headers))
    await cell.log.append(burst)
    await asyncio.sleep(AT_WORK_S)
    send(cell, name, signal.SIGSTOP)


def pid_of(cell: FaultCell, name: str) -> int:
    process = cell.slots[name].process
    assert process is not None
    assert process.pid is not None
    return process.pid


async def rest_and_judge(cell: FaultCell) -> int:
    """Returns how many void records the ledger's partition holds."""
    await cell.rest(PATIENCE_S)
    await cell.stop()
    verdict = await judge(cell.log, cell.histories, cell.users.acknowledged)
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
    """The machine of placer A swaps itself to death in the middle of work; B takes over; A's machine recovers.

    What A still writes is void, what it still orders is refused or was never sent, and then it stands by: in
    the next round it is B that sleeps, and A that takes over.
    """
    await cell.start(placer("a"))
    await cell.start(placer("b", standby=True))
    submitting = cell.background(cell.users.keep_submitting(cell.follower, AT_ONCE))
    replica = cell.follower.replica
    await cell.until(lambda: len(replica.state.ended) >= 10, PATIENCE_S, "jobs flow")
    for turn in range(MOST_ROUNDS):
        # In turns, unless the machine is so busy that the standby placer took over without our doing.
        sleeper = in_office(cell, await records(cell))
        await stop_at_work(cell, sleeper, turn)
        async with asyncio.timeout(PATIENCE_S):  # the ledger itself: the follower may be far behind
            while in_office(cell, asleep := await records(cell)) == sleeper:
                await asyncio.sleep(LOOK_S)
        ended = len(replica.state.ended)
        await cell.until(lambda n=ended: len(replica.state.ended) > n + 5, PATIENCE_S, "jobs flow again")  # type: ignore[misc]
        woken_ms = wall_ms()
        send(cell, sleeper, signal.SIGCONT)
        await asyncio.sleep(3 * TAKEOVER_MS / 1_000)  # it would take over now, if it did not understand
        later = (await records(cell))[len(asleep) :]
        for first in starts(later):
            # On a busy machine either may find the other too slow, as a standby placer may: never before its patience is over.
            if by(cell, sleeper, first):
                assert first.now_ms >= woken_ms + TAKEOVER_MS, "the zombie took the office back"
        assert {raw.term for raw in later} <= {raw.term for raw in starts(later)} | {asleep[-1].term}
        if turn + 1 >= ROUNDS and (cell.log.conditional or await count_void(cell) > 0):
            break
    submitting.cancel()
    void = await rest_and_judge(cell)
    print(f"{void} void records of zombies")
    if cell.log.conditional:  # tests/integration/test_placer_service.py proves that it refuses them
        assert void == 0, "compare-and-append lets nobody write a void record"
    else:
        assert void > 0, "no zombie wrote anything after it was replaced: this showed nothing"


@pytest.mark.parametrize(
    "cell",
    [pytest.param("embedded", marks=EMBEDDED), pytest.param("kafka", marks=[*KAFKA, SLOW])],
    indirect=True,
)
async def test_a_standby_takes_over_from_the_dead(cell: FaultCell) -> None:
    """Placer A is gone for good. Nobody sends heartbeats: B notices because an input stays unanswered."""
    await cell.start(placer("a"))
    await cell.start(placer("b", standby=True))
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    for _ in range(5):
        await cell.users.submit(("/bin/sleep", "0.01"))
    await cell.settle(PATIENCE_S)
    usual_ms = (loop.time() - began_s) * 1_000
    quiet = [(await cell.log.end_offsets([Partition(topic, 0)])) for topic in Topic if topic != Topic.LEDGER]
    cell.slots["a"].keep = False
    cell.kill("a")
    await asyncio.sleep(3 * TAKEOVER_MS / 1_000)
    assert cell.follower.replica.state.term == 1, "nothing waits, so nobody needs to take over"
    assert quiet == [(await cell.log.end_offsets([Partition(t, 0)])) for t in Topic if t != Topic.LEDGER]
    asked_s = loop.time()
    await cell.users.submit(("/bin/sleep", "0.01"))
    await cell.until(lambda: cell.follower.replica.state.term == 2, PATIENCE_S, "B takes over")
    took_ms = (loop.time() - asked_s) * 1_000
    print(f"\ntook over {took_ms:.0f} ms after the first unanswered input (patience {TAKEOVER_MS} ms)")
    assert took_ms < TAKEOVER_MS + SLACK_MS + usual_ms, (
        "what five jobs took just before is how busy the machine is"
    )
    await rest_and_judge(cell)
