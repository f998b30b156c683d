"""Input topics that are truncated or created anew: nothing is lost in silence, and going on is a decision on
record."""

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import pytest
from aiokafka import TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, RecordsToDelete
from aiokafka.client import AIOKafkaClient
from aiokafka.protocol.fetch import FetchRequest

from infra.devservers.kafka import KafkaBroker
from penstock.errors import ConfigurationError
from penstock.ledger.record.record import read
from penstock.log.kafka.aiokafka_gaps import UNKNOWN_TOPIC
from penstock.log.open import open_log
from penstock.log.port import Log, Message, Partition, Reader
from penstock.model.decisions.ledger_events import InputAccepted
from penstock.model.inputs.external_events import JobSubmitted
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.schema.event import Event
from penstock.model.schema.topics import CELL_TOPICS, Topic
from penstock.model.wire.envelope import Envelope, to_wire
from penstock.runtime.settings import Settings
from penstock_services.placer.shell.accept import accept_input
from penstock_services.placer.shell.service import run as run_placer
from tests.integration.placer.test_placer_service import SETTINGS, Cell
from tests.support.installation.services import while_alive
from tests.support.waiting import await_until

JOBS = Partition(Topic.JOBS, 0)
_cells = itertools.count(60)


async def submit(log: Log, *job_ids: str, index: int = 0) -> None:
    """All at once."""
    messages = []
    for job_id in job_ids:
        event: Event = JobSubmitted(job_id=job_id, spec=JobSpec(command=("true",)))
        headers, value = to_wire(Envelope(id=f"submit-{job_id}", source="/test", time_ms=1, data=event))
        messages.append(Message(Partition(Topic.JOBS, index), value, headers))
    await log.append(messages)


async def submitted(cell: Cell, *job_ids: str) -> None:
    await submit(cell.log("gateway"), *job_ids)
    await cell.until(lambda replica: set(job_ids) <= set(replica.state.jobs))


async def refused(cell: Cell) -> str:
    """How a placer that is started now ends."""
    with pytest.raises(ConfigurationError) as found:
        await run_placer(SETTINGS, asyncio.Event(), log=cell.log("placer"))
    return str(found.value)


LOSSES: dict[str, tuple[Callable[[Cell], None], tuple[str, ...], str]] = {
    "created anew": (lambda cell: cell.broker.restore(JOBS), (), "begins at 0 and ends at 0"),
    "created anew and shorter": (lambda cell: cell.broker.restore(JOBS), ("x",), "begins at 0 and ends at 1"),
    "created anew and longer": (
        lambda cell: cell.broker.restore(JOBS),
        ("x", "y", "z", "last"),
        "holds event 'submit-y' before that position, not 'submit-b'",
    ),
    "restored from a copy": (lambda cell: cell.broker.restore(JOBS, 1), (), "begins at 0 and ends at 1"),
    "truncated": (lambda cell: cell.broker.expire(JOBS, 4), (), "begins at 4 and ends at 4"),
}


@pytest.mark.parametrize("loss", LOSSES)
async def test_a_placer_does_not_begin_with_another_topic(loss: str) -> None:
    """Two jobs were answered, two more acknowledged while no placer ran, and then the topic is lost."""
    lose, later, how = LOSSES[loss]
    cell = Cell()
    async with cell.placer():
        await submitted(cell, "a", "b")
    with pytest.raises(ConfigurationError, match="the one that this ledger has answered, up to its offset 2"):
        await accept_input(SETTINGS, Topic.JOBS, 0, "a mistake", cell.log("placer"))
    await submit(cell.log("gateway"), "acknowledged-1", "acknowledged-2")
    lose(cell)
    await submit(cell.log("gateway"), *later)
    before = len(cell.broker.records(Partition(Topic.LEDGER, 0)))
    for standby in ("0", "1"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PENSTOCK_STANDBY", standby)
            error = await refused(cell)
    for part in (
        "penstock.jobs.v1 partition 0",
        "stands at its offset 2",
        how,
        "accept-input penstock.jobs.v1 --from",
    ):
        assert part in error
    assert len(cell.broker.records(Partition(Topic.LEDGER, 0))) == before, "nothing was written"
    first = cell.broker.first(JOBS)
    with pytest.raises(ConfigurationError, match="--from"):
        await accept_input(SETTINGS, Topic.JOBS, first + 9, "", cell.log("placer"))
    found = await accept_input(SETTINGS, Topic.JOBS, first, "the disk was lost", cell.log("placer"))
    assert found["seq"] == before + 1
    async with cell.placer():
        await submitted(cell, "after")
    state = cell.fold().state
    assert set(state.jobs) == {"a", "b", "after", *later}
    assert state.positions[JOBS] == len(cell.broker.records(JOBS))


@pytest.fixture(params=[False, True], ids=["read-back", "one-commit"])
def cell(request: pytest.FixtureRequest) -> Cell:
    return Cell(conditional=request.param)


async def test_a_topic_is_lost_under_a_running_placer(cell: Cell) -> None:
    """An administrator deletes a topic in the middle of the day: the placer stops and reports it."""
    stop = asyncio.Event()
    running = asyncio.create_task(run_placer(SETTINGS, stop, log=cell.log("placer")))
    await submitted(cell, "a", "b")
    cell.broker.restore(JOBS)
    await submit(cell.log("gateway"), "lost")
    with pytest.raises(
        ConfigurationError, match="stands at its offset 2, the partition begins at 0 and ends at 1"
    ):
        await running


async def test_what_was_accepted_is_on_record(cell: Cell) -> None:
    """A year later an auditor asks why jobs were answered twice from offset 0 on: the ledger names who went
    on, and from where."""
    async with cell.placer():
        await submitted(cell, "a", "b")
    cell.broker.restore(JOBS)
    await submit(cell.log("gateway"), "a")
    await accept_input(SETTINGS, Topic.JOBS, 0, "a new cluster", cell.log("placer"))
    last = read(cell.broker.records(Partition(Topic.LEDGER, 0))[-1].value)
    facts = [fact.event() for fact in last.facts]
    expected = InputAccepted(
        topic=Topic.JOBS, partition=0, position=2, offset=0, end=1, reason="a new cluster"
    )
    assert facts[1:] == [expected]
    async with cell.placer():
        await cell.until(lambda replica: replica.state.positions[JOBS] == 1)
    assert set(cell.fold().state.jobs) == {"a", "b"}, "a repeat is rejected as before"


async def recreate(admin: AIOKafkaAdminClient, settings: Settings, *job_ids: str) -> None:
    """Deletes the topic of submissions and creates it again with as many partitions, as the product would;
    these are in it at once."""
    [described] = await admin.describe_topics([Topic.JOBS])
    await admin.delete_topics([Topic.JOBS])

    async def gone() -> bool:
        return Topic.JOBS not in await admin.list_topics()

    await await_until(gone, "the topic's end")
    log = await open_log(settings.log_url, "test").start()
    await log.create({Topic.JOBS: len(described["partitions"])})
    await submit(log, *job_ids, index=settings.cell_index)
    await log.close()


async def truncate(admin: AIOKafkaAdminClient, index: int) -> None:
    await admin.delete_records({TopicPartition(Topic.JOBS, index): RecordsToDelete(-1)})


@pytest.fixture
def there_again(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Once a broker no longer knows a topic, fetches wait for this event: the topic was created anew between
    two of them."""
    event, missed, send = asyncio.Event(), asyncio.Event(), AIOKafkaClient.send

    async def held(client: AIOKafkaClient, node_id: object, request: object, **options: object) -> Any:
        if not isinstance(request, FetchRequest):
            return await send(client, node_id, request, **options)
        if missed.is_set():
            await event.wait()
        answer = await send(client, node_id, request, **options)
        if any(code == UNKNOWN_TOPIC for _, partitions in answer.topics for _, code, *_ in partitions):
            missed.set()
        return answer

    monkeypatch.setattr(AIOKafkaClient, "send", held)
    return event


@pytest.mark.kafka
@pytest.mark.usefixtures("patient_kafka")
@pytest.mark.parametrize("how", ["created anew", "created anew and longer", "truncated"])
async def test_on_a_real_broker(kafka: KafkaBroker, how: str, there_again: asyncio.Event) -> None:
    """`kafka-topics.sh --delete` and `--create`, or `kafka-delete-records.sh`, on the wrong cluster; a placer
    is at work, or comes back to it."""
    index = next(_cells)
    settings = Settings(log_url=f"kafka://{kafka.bootstrap}", cell_index=index)
    log = await open_log(settings.log_url, "test").start()
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka.bootstrap)
    await admin.start()
    ledger = log.reader({Partition(Topic.LEDGER, index): 0})
    try:
        await log.create(dict.fromkeys(CELL_TOPICS, index + 1))
        running = asyncio.create_task(run_placer(settings, stop := asyncio.Event()))
        await submit(log, "a", "b", index=index)
        await answered(ledger, "submit-b", running)
        if how != "truncated":
            if how == "created anew":
                there_again.set()
            await recreate(admin, settings, *(["x", "y", "z"] if how == "created anew and longer" else []))
            there_again.set()
            text = "stands at its offset 2, the partition begins at 0 and ends at "
        else:
            stop.set()
            await running
            await submit(log, "lost", index=index)
            await truncate(admin, index)
            running = asyncio.create_task(run_placer(settings, stop := asyncio.Event()))
            text = "stands at its offset 2, the partition begins at 3 and ends at 3"
        with pytest.raises(ConfigurationError, match=text):
            await running
        first = 3 if how == "truncated" else 0
        await accept_input(settings, Topic.JOBS, first, "", log)
        running = asyncio.create_task(run_placer(settings, stop := asyncio.Event()))
        await submit(log, "after", index=index)
        await answered(ledger, "submit-after", running)
        stop.set()
        await running
    finally:
        await admin.close()
        await log.close()


async def answered(ledger: Reader, event_id: str, placer: "asyncio.Task[None]") -> None:
    """Waits for the record that answers this event. Raises what ended the placer."""
    found: list[str | None] = []
    while event_id not in found:
        records = await while_alive(ledger.read(), placer)
        found = [read(record.value).cause.event_id for record in records]
