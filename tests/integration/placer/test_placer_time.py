"""Stories of time: clocks that jump, and timers that come due all at once."""

# clocks: the tests run in virtual time

import asyncio

import pytest

from penstock import clock
from penstock.clock import LedgerClock, wall_ms
from penstock.ledger.replica.replica import Replica
from penstock.log.port import Message, Partition
from penstock.model.inputs.external_events import JobSubmitted
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.schema.topics import Topic
from penstock.model.wire.envelope import Envelope, to_wire
from penstock.runtime.settings import Settings
from penstock_services.placer.shell import ledger_time, service, term
from tests.faults.processes.fault_cell import TOPICS
from tests.support.log.memory_log import MemoryBroker, MemoryLog
from tests.support.virtual_time import EPOCH_MS, run_virtually

SETTINGS = Settings(log_url="memory")
LEDGER = Partition(Topic.LEDGER, 0)
YEAR_MS = 365 * 24 * 3_600_000


def folded(broker: MemoryBroker) -> Replica:
    replica = Replica()
    for record in broker.records(LEDGER):
        replica.take(record.value, record.offset)
    return replica


async def submit(log: MemoryLog, job_id: str, queue_timeout_ms: int | None) -> None:
    spec = JobSpec(command=("true",), queue_timeout_ms=queue_timeout_ms)
    headers, value = to_wire(Envelope(f"submit-{job_id}", "/test", 1, JobSubmitted(job_id=job_id, spec=spec)))
    await log.append([Message(Partition(Topic.JOBS, 0), value, headers)])


async def one_placer(broker: MemoryBroker, seconds: float) -> None:
    stop = asyncio.Event()
    work = asyncio.ensure_future(service.run(SETTINGS, stop, log=MemoryLog(broker, "placer")))
    await asyncio.sleep(seconds)
    stop.set()
    await work


def test_a_clock_that_was_ahead_once_stops_no_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A placer ran for a while on a machine whose clock was a year ahead; then the clock was put right."""

    async def scenario() -> Replica:
        broker = MemoryBroker()
        broker.create(TOPICS)
        with monkeypatch.context() as wrong:
            wrong.setattr(term, "wall_ms", lambda: wall_ms() + YEAR_MS)
            await one_placer(broker, 1)
        await submit(MemoryLog(broker), "j1", 5_000)
        await one_placer(broker, 10)
        return folded(broker)

    assert run_virtually(scenario()).state.ended == {"j1": "timed_out_queued"}


def test_the_ledgers_clock_goes_on_by_the_time_since_boot(monkeypatch: pytest.MonkeyPatch) -> None:
    """It follows a wall clock that is a little ahead, slowly; not one that jumps by minutes or years; and
    never goes back."""
    wall, booted = [10_000], [0.0]
    monkeypatch.setattr(clock, "wall_ms", lambda: wall[0])
    ledger = LedgerClock(9_000, lambda: booted[0])
    assert ledger.now_ms() == 9_000
    booted[0] = 100.0
    wall[0] += 100_000
    assert (ledger.now_ms(), ledger.wall_ahead_ms) == (109_100, 0)  # a thousandth faster
    wall[0] += YEAR_MS
    booted[0] = 200.0
    assert ledger.now_ms() == 209_100
    assert ledger.wall_ahead_ms > YEAR_MS - 1_000_000
    wall[0] = 0  # and back
    for _ in range(1_000):
        booted[0] += 0.000_4
        last = ledger.now_ms()
    assert last == 209_500
    assert ledger.now_ms(300_000) == 300_000


def test_a_clock_that_jumps_by_years_fires_no_deadline(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """While a placer runs, and again before the next one begins; the log stands on a machine whose clock is
    right."""

    async def scenario() -> Replica:
        broker = MemoryBroker()
        broker.create(TOPICS)
        await submit(MemoryLog(broker), "j1", 60_000)
        with monkeypatch.context() as wrong:
            working = asyncio.ensure_future(one_placer(broker, 10))
            await asyncio.sleep(5)
            wrong.setattr(clock, "wall_ms", lambda: wall_ms() + YEAR_MS)
            await submit(MemoryLog(broker), "j2", 60_000)
            await working
            wrong.setattr(term, "wall_ms", lambda: wall_ms() + YEAR_MS)
            await one_placer(broker, 10)
        assert not folded(broker).state.ended
        await one_placer(broker, 60)
        return folded(broker)

    assert set(run_virtually(scenario()).state.ended) == {"j1", "j2"}
    assert any("ahead of the ledger's time" in record.message for record in caplog.records)


def test_time_passes_while_nobody_writes() -> None:
    """The placer was away for two hours, on a machine whose clock is years behind; a deadline of one hour is
    over."""

    async def scenario() -> Replica:
        broker = MemoryBroker()
        broker.create(TOPICS)
        await submit(MemoryLog(broker), "j1", 3_600_000)
        await one_placer(broker, 1)
        await asyncio.sleep(7_200)
        await one_placer(broker, 1)
        return folded(broker)

    assert run_virtually(scenario()).state.ended == {"j1": "timed_out_queued"}


@pytest.mark.parametrize("queue_timeout_ms", [3_600_000, None])
def test_a_log_whose_clock_stepped_by_years_while_nobody_wrote(
    queue_timeout_ms: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Log and placer on one machine, which comes back from the workshop in the wrong decade: an alarm, no
    deadline, and no time that stays wrong when the clock is right again, also where no deadline was
    pending."""
    error_ms = [0]

    async def scenario() -> Replica:
        broker = MemoryBroker()
        broker.create(TOPICS)
        await submit(MemoryLog(broker), "j1", queue_timeout_ms)
        await one_placer(broker, 1)
        error_ms[0] = 10 * YEAR_MS
        await submit(MemoryLog(broker), "j2", None)
        await one_placer(broker, 1)
        error_ms[0] = 0
        await one_placer(broker, 1)
        return folded(broker)

    state = run_virtually(scenario(), lambda: error_ms[0]).state
    assert not state.ended
    assert state.now_ms < EPOCH_MS + 10_000
    assert any("no deadline fires" in record.message for record in caplog.records)


def test_a_cell_that_was_away_for_long_is_given_its_time_by_an_operator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It stood in a store for 60 days, and its clock is right: the setting that the alarm names believes
    it."""

    async def scenario() -> Replica:
        broker = MemoryBroker()
        broker.create(TOPICS)
        await submit(MemoryLog(broker), "j1", None)
        await one_placer(broker, 1)
        await asyncio.sleep(60 * 86_400)
        await one_placer(broker, 1)
        await submit(MemoryLog(broker), "j2", None)
        await one_placer(broker, 1)
        assert folded(broker).state.now_ms < EPOCH_MS + 10_000
        monkeypatch.setattr(ledger_time, "MAX_ABSENCE_MS", 61 * 86_400_000)
        await submit(MemoryLog(broker), "j3", None)
        await one_placer(broker, 1)
        return folded(broker)

    assert run_virtually(scenario()).state.now_ms > EPOCH_MS + 60 * 86_400_000


def test_thousands_of_due_timers_leave_others_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The placer was away over night while 1,000 jobs ran into their queue time-outs; services share its
    loop."""
    fired: list[int] = []
    turns = [True]
    original = service.Term._fire_due

    def fire_due(self: service.Term) -> list[Message]:
        assert turns.pop(), "nobody had a turn since the last timers"
        messages = original(self)
        fired.append(len(messages))
        asyncio.get_running_loop().call_soon(turns.append, True)
        return messages

    async def scenario() -> Replica:
        broker = MemoryBroker()
        broker.create(TOPICS)
        log = MemoryLog(broker)
        for number in range(1_000):
            await submit(log, f"j{number}", 60_000)
        await one_placer(broker, 1)
        await asyncio.sleep(120)
        monkeypatch.setattr(service.Term, "_fire_due", fire_due)
        await one_placer(broker, 5)
        return folded(broker)

    assert set(run_virtually(scenario()).state.ended.values()) == {"timed_out_queued"}
    assert sum(fired) == 1_000
    assert max(fired) == service.MAX_TIMERS_PER_TURN
