"""The estimator learns how long steps take, says how long new jobs run and how long running ones still
take."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import asyncpg
import pytest

from penstock.ledger.record.record import Draft, write
from penstock.ledger.replica.replica import Replica
from penstock.log.port import Log, Message
from penstock.model.decisions.ledger_events import JobEnded, PlacementDecided
from penstock.model.inputs.estimates import EtaEstimated, JobEstimated, ModelTrained
from penstock.model.inputs.external_events import (
    JobSubmitted,
    NodeJoined,
    StepsMeasured,
    TaskExited,
    TaskPhaseChanged,
    TaskStarted,
)
from penstock.model.jobs.job_parts import ResourceRequest
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.nouns.types import TaskPlacement, Usage
from penstock.model.schema.event import Event
from penstock.model.schema.topics import CELL_TOPICS, Topic
from penstock.model.wire.envelope import Envelope, from_wire
from penstock.runtime.database.migrations import load_migrations, migrate, schema_of
from penstock.runtime.following.snapshots import save_snapshot
from penstock_services.estimator.core.fold.from_snapshot import recall
from penstock_services.estimator.core.fold.state import State
from penstock_services.estimator.core.resources.estimate import estimate
from penstock_services.estimator.core.step_time.training import MIN_NEW
from penstock_services.estimator.shell import service as module
from penstock_services.estimator.shell.store import RunStore, estimator_schema
from tests.integration.estimator.test_estimator_learns import answer, settings
from tests.integration.estimator.test_estimator_service import ESTIMATES, LEDGER, Placer, serving
from tests.support.cluster.driver import node_spec
from tests.support.log.memory_log import MemoryBroker, MemoryLog
from tests.support.waiting import await_until
from tests.unit.estimator.service.test_estimator import unlike

pytestmark = pytest.mark.postgres

Kind = TypeVar("Kind", bound=Event)

LAUNCH_MS, SAVE_MS = 4_000, 2_000


def step_ms(gpus: int, batch: int) -> float:
    """What a step of resnet50 really takes: computing, and synchronising from two GPUs on."""
    return 50 + 2 * batch / gpus + (0 if gpus == 1 else 30)


def spec(batch: int, owner: str, iterations: int, gpus: int, number: int = 0) -> JobSpec:
    return JobSpec(
        owner=owner,
        command=("python", f"train-{number}.py"),
        model="resnet50",
        batch_size=batch,
        iterations=iterations,
        resources=ResourceRequest(gpus=gpus),
    )


class Cell(Placer):
    """A placer whose clock goes on, and the nodes' reports that it commits."""

    now_ms = 1_000_000

    def __init__(self, log: Log) -> None:
        super().__init__(log)
        self.nodes: dict[str, str] = {}
        """Task → where it runs."""

    async def record(self, *facts: Event, offset: int | None = None, term: int | None = None) -> None:
        cause: dict[str, object] = {"timer_id": "t"}
        if isinstance(facts[0], StepsMeasured):
            event_id = f"{facts[0].task_id}-at-{facts[0].done}"
            cause = {"topic": Topic.NODES, "partition": 1, "offset": self.head.seq, "event_id": event_id}
        draft = Draft(term or self.head.term, self.now_ms, cause, "committed", None, facts)
        self.head, value = write(self.head, draft)
        await self.log.append([Message(LEDGER, value)])

    async def begin(self, job_id: str, job: JobSpec, node_id: str = "node-1") -> str:
        """Submitted, placed, started and training; the worker's task id."""
        task, gpus = f"{job_id}.1.w0", tuple(range(job.resources.gpus or 0))
        place = TaskPlacement(task_id=task, role="worker", rank=0, node_id=node_id, gpus=gpus)
        if node_id not in ("node-1", *self.nodes.values()):
            await self.record(NodeJoined(node=unlike(node_id)))
        self.nodes[task] = node_id
        await self.record(JobSubmitted(job_id=job_id, spec=job))
        await self.record(JobEstimated(job_id=job_id, estimate=estimate(job, ())))
        await self.record(PlacementDecided(job_id=job_id, attempt=1, tasks=(place,)))
        started_ms = self.now_ms
        self.now_ms += LAUNCH_MS
        await self.record(
            TaskStarted(node_id=node_id, task_id=task, token=1, pid=7, started_ms=started_ms),
            self.phase(task, "train"),
        )
        return task

    def phase(self, task: str, phase: str) -> TaskPhaseChanged:
        return TaskPhaseChanged(
            node_id=self.nodes[task], task_id=task, token=1, phase=phase, at_ms=self.now_ms
        )

    async def steps(self, task: str, steps: int, done: int, each_ms: float) -> None:
        """So many iterations more, told at their end."""
        self.now_ms += round(steps * each_ms)
        await self.record(
            StepsMeasured(
                node_id=self.nodes[task],
                task_id=task,
                token=1,
                at_ms=self.now_ms,
                done=done,
                steps=steps,
                step_ms=each_ms,
            )
        )

    async def whole(self, job_id: str, job: JobSpec, wobble: float) -> None:
        """One whole successful job, which tells its steps twice; the first tenth took so much longer."""
        task = await self.begin(job_id, job)
        assert job.batch_size is not None
        assert job.iterations is not None
        began_ms = self.now_ms
        each_ms, early = step_ms(job.resources.gpus or 0, job.batch_size), job.iterations // 10
        await self.steps(task, early, early, (1 + wobble) * each_ms)
        await self.steps(task, job.iterations - early, job.iterations, each_ms)
        saved_ms = self.now_ms
        self.now_ms += SAVE_MS
        exited = TaskExited(
            node_id="node-1",
            task_id=task,
            token=1,
            cause="exited",
            exit_code=0,
            usage=Usage(gpu_memory_mib=900),
            started_ms=began_ms - LAUNCH_MS,
            exited_ms=self.now_ms,
        )
        save = TaskPhaseChanged(node_id="node-1", task_id=task, token=1, phase="save", at_ms=saved_ms)
        await self.record(save, exited, JobEnded(job_id=job_id, outcome="succeeded", exit_code=0))


async def predicted(log: Log, enough: Callable[[list[Envelope]], bool]) -> list[Envelope]:
    """Estimates until there are enough."""
    reader = log.reader({ESTIMATES: 0})
    found: list[Envelope] = []
    while not enough(found):
        found += [from_wire(r.headers, r.value, Topic.ESTIMATES) for r in await reader.read()]
    await reader.close()
    return found


async def first(kind: type[Kind], log: Log) -> Kind:
    """The first of its kind."""
    found = await predicted(log, lambda found: any(isinstance(envelope.data, kind) for envelope in found))
    return next(envelope.data for envelope in found if isinstance(envelope.data, kind))


async def etas(log: Log, count: int) -> list[tuple[Envelope, EtaEstimated]]:
    """At least so many of the job that runs."""

    def mine(found: list[Envelope]) -> list[tuple[Envelope, EtaEstimated]]:
        return [
            (one, one.data)
            for one in found
            if isinstance(one.data, EtaEstimated) and one.correlation_id == "running"
        ]

    return mine(await predicted(log, lambda found: len(mine(found)) >= count))


async def models(log: Log, count: int) -> list[ModelTrained]:
    """The first ones that were told."""

    def those(found: list[Envelope]) -> list[ModelTrained]:
        return [one.data for one in found if isinstance(one.data, ModelTrained)]

    return those(await predicted(log, lambda found: len(those(found)) >= count))


async def ran(placer: Cell, since: int, until: int) -> None:
    """Ada and Bob tried resnet50 on one, two and four GPUs with four batch sizes, each from a script of its
    own."""
    for number in range(since, until):
        batch, gpus = (16, 32, 64, 128)[number % 4], (1, 2, 4)[number % 3]
        job = spec(batch, ("ada", "bob")[number % 2], 500 + 100 * number, gpus, number)
        await placer.whole(f"run-{number}", job, 0.05 * (-1) ** number)


async def cell(runs: int) -> tuple[Log, Cell]:
    """A node with eight cards, and so many finished runs."""
    log: Log = MemoryLog(MemoryBroker())
    await log.start()
    await log.create(dict.fromkeys(CELL_TOPICS, 2))
    placer = Cell(log)
    await placer.start_term()
    await placer.record(NodeJoined(node=node_spec("node-1", 8, model="T4", memory_mib=15_360)))
    await ran(placer, 0, runs)
    return log, placer


async def test_a_cell_learns_how_long_jobs_take(dsn: str) -> None:
    """Eve never ran resnet50; its step on four GPUs with her batch size is between what others measured. Her
    job is told its run time, and once it runs the time that is left; the estimator restarts in the middle and
    says nothing twice."""
    log, placer = await cell(MIN_NEW)
    job, true_ms = spec(96, "eve", 10_000, 4, 99), step_ms(4, 96)
    async with serving(log, settings(dsn)):
        trained = await first(ModelTrained, log)
        version = trained.model_version
        assert version.startswith("steps-")
        assert trained.metrics["promoted"] == 1
        await answer(placer, log, "meanwhile", job)  # told first, used then
        estimate = (await answer(placer, log, "running", job)).estimate
        assert estimate.run_ms == pytest.approx(10_000 * true_ms + LAUNCH_MS + SAVE_MS, rel=0.15)
        assert "run time: 10,000 iterations of 0.1" in estimate.source
        assert version in estimate.source
        assert estimate.tier == "nearest", "of needs nothing was learned yet"
        task = await placer.begin("running", job)
        await placer.steps(task, 100, 100, 1.1 * true_ms)
        [(envelope, eta)] = await etas(log, 1)
        assert (envelope.id, envelope.causation_id) == (f"eta-{task}-at-100", f"{task}-at-100")
        assert (eta.attempt, eta.done, eta.model_version) == (1, 100, version)
        assert eta.left_ms.low < 9_900 * 1.1 * true_ms + SAVE_MS < eta.left_ms.high
        assert eta.left_ms.low < eta.left_ms.middle < eta.left_ms.high
        await placer.record(eta)
    async with serving(log, settings(dsn)):
        await placer.steps(task, 900, 1_000, 1.1 * true_ms)  # as was said
        await placer.steps(task, 4_000, 5_000, 2 * true_ms)  # a neighbour came
        found = await etas(log, 2)
        last = found[-1][1]
        assert [one.done for _, one in found] == [100, 5_000]
        assert (last.model_version, last.at_ms) == (version, placer.now_ms)
        again = (await answer(placer, log, "later", job)).estimate
        assert (again.run_ms, again.source) == (estimate.run_ms, estimate.source)
    await log.close()


async def test_what_was_published_is_judged_when_the_job_ends(dsn: str) -> None:
    """The report wants to know how good remaining times were: what stood in the ledger at half of the run is
    kept with the run, in Postgres, beside its phases and steps."""
    log, placer = await cell(0)
    async with serving(log, settings(dsn)):
        job = spec(64, "eve", 1_000, 2)
        task = await placer.begin("running", job)
        await placer.steps(task, 100, 100, 100.0)
        [(_, eta)] = await etas(log, 1)
        await placer.record(eta)
        await placer.steps(task, 900, 1_000, 100.0)
        exited = TaskExited(
            node_id="node-1",
            task_id=task,
            token=1,
            cause="exited",
            exit_code=0,
            started_ms=placer.now_ms - 100_000 - LAUNCH_MS,
            exited_ms=placer.now_ms,
        )
        await placer.record(exited, JobEnded(job_id="running", outcome="succeeded", exit_code=0))
        store = await RunStore.open(dsn, "default")
        runs = await await_until(lambda: store.latest_steps(10, 10), "the stored run")
        await store.close()
    [run] = runs
    assert (run.measured.iterations, run.measured.step_ms, run.measured.train_ms) == (1_000, 100, 100_000)
    assert run.measured.launch_ms == LAUNCH_MS
    assert run.steps is not None
    assert (run.steps.placement, run.steps.windows_ms) == ((2,), (100, 100))
    assert run.eta is not None
    assert run.eta.actual_ms == 50_000
    assert run.eta.low_ms < run.eta.actual_ms < run.eta.high_ms
    await log.close()


async def test_a_tampered_model_of_steps_is_not_used_and_an_older_one_answers(dsn: str) -> None:
    """Somebody changed a byte in the database, in the newest model and then in all: the service says so, and
    runs on."""
    log, placer = await cell(MIN_NEW)
    job = spec(96, "eve", 10_000, 4, 99)
    async with serving(log, settings(dsn)):
        older = (await first(ModelTrained, log)).model_version
        await ran(placer, MIN_NEW, 2 * MIN_NEW)
        newest = (await models(log, 2))[1]
        assert newest.metrics["promoted"] == 1
    connection = await asyncpg.connect(dsn)
    change = (
        f"UPDATE {estimator_schema('default')}.models SET body = set_byte(body, length(body) - 1, 7) "
        "WHERE version = $1"
    )
    sources = []
    for version in (newest.model_version, older):
        assert await connection.execute(change, version) == "UPDATE 1"
        async with serving(log, settings(dsn)):
            sources.append((await answer(placer, log, f"after-{version}", job)).estimate.source)
    await connection.close()
    assert older in sources[0]
    assert "steps-" not in sources[1]
    await log.close()


async def test_a_restart_beside_a_snapshot_goes_on_where_it_was(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The projector has kept a snapshot of the cell while a job runs: what that job told before is read
    again, so that one step more, as long as the others, is no news."""
    log, placer = await cell(1)
    async with serving(log, settings(dsn)):
        task = await placer.begin("running", spec(64, "eve", 10_000, 2))
        await placer.steps(task, 1_000, 1_000, 100.0)
        [(_, eta)] = await etas(log, 1)
        await placer.record(eta)
        store = await RunStore.open(dsn, "default")
        await await_until(lambda: store.latest(10), "the stored run of before")
        await store.close()
    connection = await asyncpg.connect(dsn)
    await migrate(connection, schema_of("default"), load_migrations("penstock_services.projector.migrations"))
    reader, replica = log.reader({LEDGER: 0}), Replica()
    end = (await log.end_offsets([LEDGER]))[LEDGER]
    while replica.offset < end:
        for record in await reader.read():
            replica.take(record.value, record.offset)
    await reader.close()
    await save_snapshot(connection, "default", replica)
    await connection.close()
    store = await RunStore.open(dsn, "default")
    await store.add([], end)  # as it is after 20,000 records, or the next finished run
    await store.close()
    recalled: list[int] = []

    def spied(state: State, values: Sequence[bytes]) -> None:
        recall(state, values)
        recalled.extend(job.progress.done for job in state.live.values() if job.progress is not None)

    monkeypatch.setattr(module, "recall", spied)
    async with serving(log, settings(dsn)):
        await placer.steps(task, 1, 1_001, 100.0)
        await placer.steps(task, 1_000, 2_001, 500.0)
        found = await etas(log, 2)
    assert [eta.done for _, eta in found] == [1_000, 2_001]
    assert recalled == [1_000]
    assert found[1][1].step_ms.middle == pytest.approx(300, rel=0.1), "windows of both lives"
    await log.close()
