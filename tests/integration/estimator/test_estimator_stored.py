"""What the estimator must not forget over a restart: kills for memory, stages, and what jobs take from each
other; and that stages are told once."""

from collections.abc import Iterable
from math import nan

import pytest

from penstock.log.port import Log, Partition
from penstock.model.decisions.ledger_events import JobEnded, PlacementDecided
from penstock.model.inputs.estimates import JobEstimated, StagesProfiled
from penstock.model.inputs.external_events import JobSubmitted, StageSample, StagesMeasured, TaskExited
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.nouns.types import Estimate, TaskPlacement
from penstock.model.schema.topics import CELL_TOPICS, Topic
from penstock.model.wire.envelope import from_wire
from penstock.runtime.settings import Settings
from penstock.runtime.tracing.tracer import Tracing
from penstock_services.estimator.core.fold.state import State, learn
from penstock_services.estimator.core.interference import Interference, Kind, Learned, Measured
from penstock_services.estimator.core.resources.memory_kills import FIRST_WORKER_MIB
from penstock_services.estimator.core.stages.profile import StageKey, StageProfile
from penstock_services.estimator.core.stages.registry import Owned
from penstock_services.estimator.shell import store as module
from penstock_services.estimator.shell.service import Estimator
from penstock_services.estimator.shell.store import RunStore
from tests.integration.estimator.test_estimator_runs import run
from tests.integration.estimator.test_estimator_service import (
    ESTIMATES,
    LEDGER,
    SETTINGS,
    SPEC,
    Placer,
    answered,
    estimate_of,
    estimates,
    prepared,
    serving,
)
from tests.support.log.memory_log import MemoryBroker, MemoryLog

TRAINING = JobSpec(owner="ada", command=("python", "train.py"), model="resnet18", batch_size=64)


async def begin(placer: Placer, job_id: str, found: Estimate, spec: JobSpec = SPEC) -> None:
    place = TaskPlacement(task_id=f"{job_id}/1/0", role="worker", rank=0, node_id="node-1", gpus=(0, 1))
    await placer.record(
        JobSubmitted(job_id=job_id, spec=spec),
        JobEstimated(job_id=job_id, estimate=found),
        PlacementDecided(job_id=job_id, attempt=1, tasks=(place,)),
    )


async def kill(placer: Placer, job_id: str) -> None:
    exited = TaskExited(
        node_id="node-1",
        task_id=f"{job_id}/1/0",
        token=1,
        cause="out_of_memory",
        signal=9,
        started_ms=0,
        exited_ms=9,
    )
    await placer.record(exited, JobEnded(job_id=job_id, outcome="failed"))


def measured(job_id: str, storage_ms: float) -> StagesMeasured:
    samples = (StageSample(lasted_ms=20 * storage_ms, storage=5), StageSample(lasted_ms=1_200, gpu=90))
    return StagesMeasured(
        node_id="node-1", task_id=f"{job_id}/1/0", token=1, at_ms=1, iterations=20, samples=samples
    )


async def predicted(log: Log) -> list[StagesProfiled]:
    """All stages told so far."""
    end = (await log.end_offsets([ESTIMATES]))[ESTIMATES]
    reader, found = log.reader({ESTIMATES: 0}), []
    while reader.position(ESTIMATES) < end:
        for record in await reader.read():
            data = from_wire(record.headers, record.value, Topic.ESTIMATES).data
            if isinstance(data, StagesProfiled):
                found.append(data)
    await reader.close()
    return found


async def folded(placer: Placer, job_id: str) -> None:
    """Waits until the estimator has folded the ledger so far: a read of the log in memory holds all that is
    there, and a job is answered after the records of its read."""
    await estimate_of(placer, job_id)


@pytest.fixture(params=[None, pytest.param("postgres", marks=pytest.mark.postgres)])
def settings(request: pytest.FixtureRequest) -> Settings:
    """Without a database the whole ledger is folded again, with one only what came later."""
    if request.param is None:
        return SETTINGS
    return Settings(log_url="unused", cell_index=1, dsn=str(request.getfixturevalue("dsn")))


async def test_a_kill_is_not_forgotten_over_a_restart(settings: Settings) -> None:
    """Killed with the default of 2 GiB; the estimator is restarted, and the next job has eight."""
    log: Log = MemoryLog(MemoryBroker())
    placer = await prepared(log)
    async with serving(log, settings):
        first = await estimate_of(placer, "job-1")
        await begin(placer, "job-1", first)
        await kill(placer, "job-1")
        await folded(placer, "other")
    async with serving(log, settings):
        found = await estimate_of(placer, "job-2")
    assert (first.worker.host_memory_mib, found.worker.host_memory_mib) == (2_048, FIRST_WORKER_MIB)
    assert found.source.endswith("more than the 2048 MiB that this command ran out of")


async def test_stages_are_predicted_once_and_again_when_they_moved(settings: Settings) -> None:
    """Measured by a job, told, and committed by the placer; a restart repeats nothing; slower storage is told
    then."""
    log: Log = MemoryLog(MemoryBroker())
    placer = await prepared(log)
    async with serving(log, settings):
        await begin(placer, "job-1", await estimate_of(placer, "job-1", TRAINING), TRAINING)
        await placer.record(measured("job-1", 20))
        await folded(placer, "then")
        [profile] = await predicted(log)
        await placer.record(profile)
        await folded(placer, "later")
    assert (profile.model, profile.batch_size, profile.gpus) == ("resnet18", 64, 2)
    assert (profile.storage_ms, profile.gpu_ms, profile.iteration_ms) == (20, 60, 80)
    async with serving(log, settings):
        await folded(placer, "again")
        assert await predicted(log) == [profile]
        await placer.record(measured("job-1", 60))
        await folded(placer, "last")
        slower = (await predicted(log))[1:]
    assert [(one.storage_ms, one.gpu_ms, one.iterations) for one in slower] == [(40, 60, 40)]


async def test_stages_that_were_never_published_are_predicted_after_a_restart() -> None:
    """MemoryKills between reading a measurement and telling of it: what the ledger knows to be told decides,
    not the fold."""
    log: Log = MemoryLog(MemoryBroker())
    placer = await prepared(log)
    async with serving(log):
        await placer.submit("job-1", spec=TRAINING)
        (found,) = await estimates(log, 1)
    await begin(placer, "job-1", answered(found).estimate, TRAINING)
    await placer.record(measured("job-1", 20))
    for _ in range(2):
        async with serving(log):
            await folded(placer, "next")
    repeats = await predicted(log)
    assert [one.storage_ms for one in repeats] == [20, 20], (
        "told again, since the placer never wrote that it was told"
    )


class Growing(MemoryLog):
    """A ledger that grows by a record as soon as its end was asked for; the cell's own estimator has read and
    stored it."""

    def __init__(self, broker: MemoryBroker, dsn: str) -> None:
        super().__init__(broker)
        self._dsn = dsn
        self.placer = Placer(self)

    async def end_offsets(self, partitions: Iterable[Partition]) -> dict[Partition, int]:
        found = await super().end_offsets(partitions)
        await self.placer.record(JobSubmitted(job_id=f"late-{found[LEDGER]}", spec=SPEC))
        store = await RunStore.open(self._dsn, "default")
        await store.add((), found[LEDGER] + 1)
        await store.close()
        return found


@pytest.mark.postgres
async def test_a_question_is_answered_while_the_cells_estimator_stores_runs(dsn: str) -> None:
    """The gateway asks in a process of its own, which finds more stored than the ledger had when its end was
    asked for."""
    log = Growing(MemoryBroker(), dsn)
    await log.create(dict.fromkeys(CELL_TOPICS, 2))
    await log.placer.start_term()
    for _ in range(2):
        estimator = Estimator(Settings(log_url="unused", cell_index=1, dsn=dsn), log, Tracing())
        assert await estimator.fold_ledger() == estimator.state.seq
        assert estimator.learner is not None
        await estimator.learner.close()


@pytest.mark.postgres
async def test_a_larger_promise_that_sufficed_ends_a_kill_in_the_database_too(dsn: str) -> None:
    """Two kills of one command, then a run with more than the first had; another command's kill stands."""

    def of(seq: int, promised_mib: int, key: bytes, refused: str = "out_of_memory: killed") -> object:
        one = run(seq, key=key, rejected=refused)
        assert one.estimate is not None
        return one._replace(estimate=one.estimate._replace(host_memory_mib=promised_mib))

    store = await RunStore.open(dsn, "default")
    runs = [
        of(1, 1_000, b"a"),
        of(2, 4_000, b"a"),
        of(3, 2_000, b"a", ""),
        of(4, 500, b"b"),
        of(5, 9_000, b"c"),
        of(6, 9_001, b"c", ""),
    ]
    await store.add(runs, 7)  # type: ignore[arg-type]
    state = State(Topic.JOBS, 0)
    async for one in store.runs():
        learn(state, one)
    killed = state.kills.host
    found = [
        killed.floor(JobSpec(owner="ada", command=("x",)), key, near=False) for key in (b"a", b"b", b"c")
    ]
    assert [None if least is None else least.promised_mib for least in found] == [4_000, 500, None]
    assert [stored.seq for stored in await store.latest(10)] == [3, 6]
    await store.close()


@pytest.mark.postgres
async def test_stages_come_back_in_order_and_old_ones_go(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows change and keep the place of their first measurement; what changed longest ago goes first."""

    def row(seq: int, owner: str, storage_ms: float, batch: int = 64) -> Owned:
        profile = StageProfile(storage_ms, 0, 60, 0, 0, 60 + storage_ms, 20)
        return Owned(StageKey("resnet18", batch, 4), owner, profile, seq)

    store = await RunStore.open(dsn, "default")
    await store.add([], 5, [row(1, "zoe", 20), row(2, "ada", 30), row(3, "", 20)])
    later = row(6, "zoe", 25), row(7, "ada", 30, batch=8)
    await store.add([], 9, later)
    assert await store.stages() == [later[0], row(2, "ada", 30), row(3, "", 20), later[1]]
    monkeypatch.setattr(module, "MAX_STAGES", 2)
    await store.prune()
    assert await store.stages() == [*later]
    await store.close()


@pytest.mark.postgres
async def test_what_jobs_take_from_each_other_is_not_forgotten_over_a_restart(dsn: str) -> None:
    """Two kinds shared a GPU; the estimator restarts, and the next job of one of them is answered with what
    it has beside the other."""
    log: Log = MemoryLog(MemoryBroker())
    settings = Settings(log_url="unused", cell_index=1, dsn=dsn)
    placer = await prepared(log)
    async with serving(log, settings):
        assert (await estimate_of(placer, "job-1", TRAINING)).pairs == ()
    store = await RunStore.open(dsn, settings.cell)
    await store.add([], await store.position(), (), taught(50.0))
    await store.close()
    async with serving(log, settings):
        (pair,) = (await estimate_of(placer, "job-2", TRAINING)).pairs
    assert (pair.model, pair.batch_size, pair.own, pair.other, pair.runs) == ("vgg16", None, 0.5, 0.4, 1)


TRAINS, OTHER = Kind("ada", "resnet18", 64, "T4"), Kind("eve", "vgg16", None, "T4")


def taught(alone_ms: float) -> Learned:
    learned = Interference()
    learned.alone(TRAINS, alone_ms)
    assert learned.together(Measured(TRAINS, nan, 2 * alone_ms), Measured(OTHER, 40.0, 100.0))
    return learned.take()


@pytest.mark.postgres
async def test_pairs_come_back_as_they_were_and_old_ones_go(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await RunStore.open(dsn, "default")
    first, later = taught(50.0), taught(60.0)
    await store.add([], 5, (), first)
    assert await store.pairs() == first
    lone = Learned({OTHER: 7.0}, {})
    await store.add([], 6, (), lone)
    await store.add([], 7, (), later)
    assert await store.pairs() == lone.then(later)
    monkeypatch.setattr(module, "MAX_PAIR_ROWS", 1)
    await store.prune()
    assert (await store.pairs()).alone_ms == later.alone_ms
    await store.close()
