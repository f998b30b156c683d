"""The estimator as a service, on a log in memory and on Postgres: it answers, it survives, it learns."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from unittest.mock import patch

import pytest
import pytest_asyncio
from msgspec.structs import replace

from penstock.errors import NotAllowed
from penstock.ledger.record.record import GENESIS, Draft, Head, write
from penstock.log.port import Headers, Log, Message, Partition
from penstock.log.postgres.embedded import EmbeddedLog
from penstock.model.decisions.ledger_events import JobEnded, PlacementDecided, TermStarted
from penstock.model.inputs.estimates import JobEstimated
from penstock.model.inputs.external_events import JobCancelRequested, JobSubmitted, NodeJoined, TaskExited
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.nouns.settings import PlacerSettings
from penstock.model.nouns.types import Estimate, TaskPlacement, Usage
from penstock.model.schema.event import Event
from penstock.model.schema.topics import CELL_TOPICS, Topic
from penstock.model.wire.envelope import Envelope, from_wire, to_wire
from penstock.runtime.settings import Settings
from penstock.runtime.tracing.context import job_context, to_traceparent
from penstock_services.estimator.core.resources.estimate import estimate
from penstock_services.estimator.shell import learner, publisher
from penstock_services.estimator.shell.service import run
from tests.support.installation.services import beside
from tests.support.log.memory_log import MemoryBroker, MemoryLog
from tests.unit.estimator.reports import JOB, Reports
from tests.unit.estimator.service.test_estimator import unlike

SETTINGS = Settings(log_url="unused: the log is given", cell_index=1)
SPEC = JobSpec(owner="ada", command=("python", "train.py"))
JOBS, LEDGER, ESTIMATES = (Partition(topic, 1) for topic in (Topic.JOBS, Topic.LEDGER, Topic.ESTIMATES))


class Placer:
    """Writes a ledger as the placer would, and submissions as the gateway would."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self.head: Head = GENESIS

    async def submit(self, *job_ids: str, headers: Headers = (), spec: JobSpec = SPEC) -> list[int]:
        """Appends submissions; their offsets."""
        messages = []
        for job_id in job_ids:
            event = JobSubmitted(job_id=job_id, spec=spec)
            found, value = to_wire(Envelope(f"submit-{job_id}", "/test", 1_000, event, correlation_id=job_id))
            messages.append(Message(JOBS, value, found + headers))
        return await self.log.append(messages)

    async def record(self, *facts: Event, offset: int | None = None, term: int | None = None) -> None:
        cause: dict[str, object] = {"timer_id": "t"}
        if offset is not None:
            cause = {"topic": Topic.JOBS, "partition": 1, "offset": offset, "event_id": f"submit-{offset}"}
        draft = Draft(term or self.head.term, 1_000, cause, "committed", None, facts)
        self.head, value = write(self.head, draft)
        await self.log.append([Message(LEDGER, value)])

    async def start_term(self) -> None:
        began = TermStarted(term=1, placer_id="placer-1", settings=PlacerSettings())
        await self.record(began, NodeJoined(node=unlike()), term=1)

    async def finish(self, job_id: str, memory_mib: int, offset: int) -> None:
        """A whole successful job, from submission to exit."""
        place = TaskPlacement(task_id=f"{job_id}/1/0", role="worker", rank=0, node_id="node-1", gpus=(0, 1))
        exited = TaskExited(
            node_id="node-1",
            task_id=place.task_id,
            token=1,
            cause="exited",
            exit_code=0,
            started_ms=0,
            exited_ms=5_000,
            usage=Usage(host_memory_mib=memory_mib),
        )
        await self.record(JobSubmitted(job_id=job_id, spec=SPEC), offset=offset)
        await self.record(
            JobEstimated(job_id=job_id, estimate=estimate(SPEC, ())),
            PlacementDecided(job_id=job_id, attempt=1, tasks=(place,)),
        )
        await self.record(exited, JobEnded(job_id=job_id, outcome="succeeded", exit_code=0))


async def prepared(log: Log) -> Placer:
    await log.create(dict.fromkeys(CELL_TOPICS, 2))
    placer = Placer(log)
    await placer.start_term()
    return placer


@pytest.fixture(params=["memory", pytest.param("embedded", marks=pytest.mark.postgres)])
def log_dsn(request: pytest.FixtureRequest) -> str | None:
    """The database of an embedded log, None for one in memory."""
    return str(request.getfixturevalue("dsn")) if request.param == "embedded" else None


@pytest_asyncio.fixture
async def log(log_dsn: str | None) -> AsyncIterator[Log]:
    opened: Log = MemoryLog(MemoryBroker()) if log_dsn is None else EmbeddedLog(log_dsn, "estimator")
    await opened.start()
    yield opened
    await opened.close()


@asynccontextmanager
async def serving(log: Log, settings: Settings = SETTINGS) -> AsyncIterator[asyncio.Task[None]]:
    """A running estimator, stopped at the end. Its trainings do not yield to other processes of a busy
    machine."""
    stop, ready = asyncio.Event(), asyncio.Event()
    with patch.object(learner, "NICENESS", 0):
        async with beside(run(settings, stop, log=log, ready=ready), stop, ready) as task:
            yield task


async def estimates(log: Log, count: int) -> Sequence[Envelope]:
    """The first `count` estimates, or some more."""
    reader = log.reader({ESTIMATES: 0})
    found: list[Envelope] = []
    while len(found) < count:
        found += [from_wire(record.headers, record.value, Topic.ESTIMATES) for record in await reader.read()]
    await reader.close()
    return found


def answered(envelope: Envelope) -> JobEstimated:
    assert isinstance(envelope.data, JobEstimated)
    return envelope.data


async def estimate_of(placer: Placer, job_id: str, spec: JobSpec = SPEC) -> Estimate:
    """Submits the job and waits for its first estimate."""
    await placer.submit(job_id, spec=spec)
    reader = placer.log.reader({ESTIMATES: 0})
    while True:
        for record in await reader.read():
            data = from_wire(record.headers, record.value, Topic.ESTIMATES).data
            if isinstance(data, JobEstimated) and data.job_id == job_id:
                await reader.close()
                return data.estimate


async def test_a_submission_is_estimated(log: Log) -> None:
    """A user submits; 5 ms later the placer reads what the job needs, and whose submission that answers."""
    placer = await prepared(log)
    async with serving(log):
        await placer.submit("job-1")
        (envelope,) = await estimates(log, 1)
    assert (envelope.id, envelope.causation_id, envelope.correlation_id) == (
        "estimate-job-1",
        "submit-job-1",
        "job-1",
    )
    assert envelope.source == "/penstock/estimator"
    assert (answered(envelope).job_id, answered(envelope).estimate.tier) == ("job-1", "default")


async def test_submissions_from_before_the_start_are_estimated(log: Log) -> None:
    """The estimator is down for a minute while the gateway goes on accepting."""
    placer = await prepared(log)
    await placer.submit("job-1", "job-2")
    async with serving(log):
        found = await estimates(log, 2)
    assert [answered(envelope).job_id for envelope in found] == ["job-1", "job-2"]


async def test_a_restart_loses_no_job(log: Log) -> None:
    """Killed at the worst place: job-0 is answered, job-1 is in the ledger but its estimate was never sent,
    job-2 is on the jobs topic but not read by anyone, and job-3 comes later."""
    placer = await prepared(log)
    first, second, _ = await placer.submit("job-0", "job-1", "job-2")
    await placer.record(JobSubmitted(job_id="job-0", spec=SPEC), offset=first)
    await placer.record(JobSubmitted(job_id="job-1", spec=SPEC), offset=second)
    async with serving(log):
        known = await estimates(log, 3)
    await placer.record(answered(known[0]))
    assert {answered(envelope).job_id for envelope in known} == {"job-0", "job-1", "job-2"}
    await placer.submit("job-3")
    async with serving(log):
        found = (await estimates(log, 6))[3:]
    assert {answered(envelope).job_id for envelope in found} == {"job-1", "job-2", "job-3"}
    assert {e.id: e.data for e in known}["estimate-job-1"] == {e.id: e.data for e in found}["estimate-job-1"]


async def test_history_changes_the_estimate(log: Log) -> None:
    """The first run used 700 MiB; the second submission of the same command is promised that and 10 %,
    by the estimator that saw the run as well as by its successor that folded it."""
    placer = await prepared(log)
    async with serving(log):
        (offset,) = await placer.submit("job-1")
        await estimates(log, 1)
        await placer.finish("job-1", 700, offset)
        for number in itertools.count(2):  # nothing shows when the ledger has been folded
            second = await estimate_of(placer, f"job-{number}")
            if second.tier == "history":
                break
    assert (second.tier, second.worker.host_memory_mib, second.worker.gpus) == ("history", 770, 2)
    async with serving(log):
        assert await estimate_of(placer, "later") == second


async def test_what_cannot_be_read_is_left_to_the_placer(log: Log) -> None:
    """Garbage, a cancellation and a trace context of 10,000 characters stand between submissions. Only the
    context of the job's own trace is handed on: a submitter's would lead the reader of a trace elsewhere."""
    own = to_traceparent(job_context("job-3", 1))
    placer = await prepared(log)
    cancel = to_wire(Envelope("c", "/test", 1, JobCancelRequested(job_id="job-1")))
    async with serving(log):
        await log.append(
            [
                Message(JOBS, b"\xff\x00"),
                Message(JOBS, b"{}", (("ce_id", b"\xff"),)),
                Message(JOBS, cancel[1], cancel[0]),
            ]
        )
        await placer.submit("job-1", headers=(("traceparent", b"x" * 10_000),))
        await placer.submit(
            "job-2", headers=(("traceparent", b"00-" + b"1" * 32 + b"-" + b"2" * 16 + b"-01"),)
        )
        await placer.submit("job-3", headers=(("traceparent", own.encode()),))
        found = [(answer.correlation_id, answer.traceparent) for answer in await estimates(log, 3)]
    assert found == [("job-1", None), ("job-2", None), ("job-3", own)]


async def test_an_append_of_unknown_outcome_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The broker restarts under the estimator's hands, before the write and once more after it."""
    monkeypatch.setattr(publisher, "FIRST_BACKOFF_S", 0.01)
    broker = MemoryBroker()
    log = MemoryLog(broker)
    placer = await prepared(log)
    async with serving(log):
        broker.fail_next_append(after_write=False)
        broker.fail_next_append(after_write=True)
        broker._faults.insert(0, None)  # type: ignore[arg-type]  # the submission itself gets through
        await placer.submit("job-1")
        found = await estimates(log, 2)
    assert [envelope.id for envelope in found] == ["estimate-job-1"] * 2
    assert found[0].data == found[1].data


async def test_without_the_right_to_write_it_says_so_and_ends() -> None:
    """The cluster's rights were set up wrongly: no endless retry hides that."""
    broker = MemoryBroker(allow={Topic.ESTIMATES: {"estimator"}})
    placer = await prepared(MemoryLog(broker))
    await placer.submit("job-1")
    with pytest.raises(NotAllowed):
        await run(SETTINGS, asyncio.Event(), log=MemoryLog(broker, "somebody"))


async def test_a_moldable_job_is_told_what_its_shapes_took(log: Log) -> None:
    """Ada's job may have one to four workers. It ran with two, on a GPU of two nodes each; the next time she
    submits it the placer reads how long an iteration took so. What a worker needs is estimated for the
    fewest, who have the largest batches, from the runs nearest to that."""
    spec = replace(JOB, workers=4, min_workers=1, batch_size=None, global_batch_size=128)
    past = Reports()
    past.begin("past", (1, 1), spec=spec)
    past.phase("past", "train", after_ms=4_000)
    for done in (100, 200, 300, 400):
        past.report("past", done, 100, 250.0)
    past.end("past")
    await log.create(dict.fromkeys(CELL_TOPICS, 2))
    await log.append([Message(LEDGER, value) for value in past.values])
    placer = Placer(log)
    async with serving(log):
        await placer.submit("next", spec=spec)
        (envelope,) = await estimates(log, 1)
    found = answered(envelope).estimate
    assert [(one.workers, one.step_ms) for one in found.options] == [(2, 250.0)]
    assert found.tier == "nearest", "with one worker it has never run"
