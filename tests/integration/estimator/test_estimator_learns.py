"""The estimator learns while it serves: runs end, a model is trained beside the answers, told, kept, and used
again."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import asyncpg
import numpy as np
import pytest

from penstock.errors import ConfigurationError
from penstock.log.port import Log
from penstock.model.decisions.ledger_events import JobEnded, PlacementDecided
from penstock.model.inputs.estimates import JobEstimated, ModelTrained
from penstock.model.inputs.external_events import JobSubmitted, NodeJoined, TaskExited
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.nouns.types import TaskPlacement, Usage
from penstock.model.schema.topics import Topic
from penstock.model.wire.envelope import from_wire
from penstock.runtime.pool import WorkerPool
from penstock.runtime.settings import Settings
from penstock_services.estimator.core.resource_model.training import MIN_NEW
from penstock_services.estimator.core.resources.estimate import estimate
from penstock_services.estimator.shell.store import RunStore, estimator_schema
from tests.integration.estimator.test_estimator_service import ESTIMATES, Placer, prepared, serving
from tests.support.cluster.driver import node_spec
from tests.support.log.memory_log import MemoryBroker, MemoryLog
from tests.support.waiting import await_until, wait_until

pytestmark = pytest.mark.postgres

MIB_PER_SAMPLE = {"resnet50": 90, "bert": 220, "vgg16": 120}


def spec(model: str, batch: int, owner: str = "ada") -> JobSpec:
    return JobSpec(owner=owner, command=("python", f"{model}-{batch}.py"), model=model, batch_size=batch)


async def finish(placer: Placer, number: int) -> None:
    """One succeeded run of a small cell's month, in one record: what it is made of does not matter here."""
    noise = np.random.default_rng(number)
    model, batch = list(MIB_PER_SAMPLE)[number % 3], (8, 16, 32, 48)[number % 4]
    job_id, used = f"run-{number}", 800 + MIB_PER_SAMPLE[model] * batch
    place = TaskPlacement(task_id=f"{job_id}.1.w0", role="worker", rank=0, node_id="node-1", gpus=(0,))
    exited = TaskExited(
        node_id="node-1",
        task_id=place.task_id,
        token=1,
        cause="exited",
        exit_code=0,
        started_ms=0,
        exited_ms=60_000,
        usage=Usage(gpu_memory_mib=int(used * noise.uniform(0.98, 1.02)), gpu_utilisation_percent=70.0),
    )
    await placer.record(
        JobSubmitted(job_id=job_id, spec=spec(model, batch, f"user-{number % 5}")),
        JobEstimated(job_id=job_id, estimate=estimate(spec(model, batch), ())),
        PlacementDecided(job_id=job_id, attempt=1, tasks=(place,)),
        exited,
        JobEnded(job_id=job_id, outcome="succeeded", exit_code=0),
    )


async def loaded(log: Log, count: int = 1) -> list[ModelTrained]:
    reader = log.reader({ESTIMATES: 0})
    found: list[ModelTrained] = []
    while len(found) < count:
        events = [from_wire(r.headers, r.value, Topic.ESTIMATES).data for r in await reader.read()]
        found += [event for event in events if isinstance(event, ModelTrained)]
    await reader.close()
    return found


async def answer(placer: Placer, log: Log, job_id: str, job: JobSpec) -> JobEstimated:
    await placer.submit(job_id, spec=job)
    reader = log.reader({ESTIMATES: 0})
    while True:
        for record in await reader.read():
            data = from_wire(record.headers, record.value, Topic.ESTIMATES).data
            if isinstance(data, JobEstimated) and data.job_id == job_id:
                await reader.close()
                return data


def settings(dsn: str) -> Settings:
    return Settings(log_url="unused: the log is given", dsn=dsn, cell_index=1)


async def cell(runs: int) -> tuple[Log, Placer]:
    log: Log = MemoryLog(MemoryBroker())
    await log.start()
    placer = await prepared(log)
    await placer.record(NodeJoined(node=node_spec("node-1", 4, model="T4", memory_mib=15_360)))
    for number in range(runs):
        await finish(placer, number)
    return log, placer


async def test_a_cell_learns_what_a_new_batch_size_needs(dsn: str) -> None:
    """Three networks ran with four batch sizes each; a colleague tries a fifth one. After a restart the same
    model answers, and the runs are not learned twice."""
    log, placer = await cell(MIN_NEW - 1)
    async with serving(log, settings(dsn)):
        first = await answer(placer, log, "before", spec("bert", 24))
        assert first.estimate.tier == "nearest"
        await finish(placer, MIN_NEW - 1)
        [trained] = await loaded(log)
        assert (trained.runs, trained.first_run_ms) == (MIN_NEW, 1_000)
        assert trained.metrics["promoted"] == 1
        await answer(placer, log, "meanwhile", spec("bert", 24))  # told first, used then
        found = await answer(placer, log, "after", spec("bert", 24))
        assert (found.estimate.tier, found.estimate.model_version) == ("model", trained.model_version)
        assert found.estimate.worker.gpu_memory_mib == pytest.approx(800 + 220 * 24, rel=0.3)
    async with serving(log, settings(dsn)):
        again = await answer(placer, log, "later", spec("bert", 24, owner="bob"))
        assert again.estimate.model_version == trained.model_version
    store = await RunStore.open(dsn, "default")
    assert len(await store.latest(1_000)) == MIN_NEW
    await store.close()
    await log.close()


async def test_a_tampered_model_is_not_used(dsn: str) -> None:
    """Somebody changed a byte in the database: the service says so and answers without it."""
    log, placer = await cell(MIN_NEW)
    async with serving(log, settings(dsn)):
        await loaded(log)
    connection = await asyncpg.connect(dsn)
    await connection.execute(
        f"UPDATE {estimator_schema('default')}.models SET body = set_byte(body, length(body) - 1, 7)"
    )
    await connection.close()
    async with serving(log, settings(dsn)):
        found = await answer(placer, log, "job", spec("bert", 24))
        assert found.estimate.tier == "nearest"
    await log.close()


def gated(gate: Path, function: Callable[..., Any], *arguments: Any) -> Any:
    """In the worker process: the training, once the gate is there."""
    gate.with_suffix(".begun").touch()
    wait_until(gate.exists, gate.name)
    return function(*arguments)


async def test_answers_do_not_wait_for_a_training(
    dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training takes seconds, in the worker process; meanwhile submissions are answered as ever. Here it
    goes on when they were."""
    gate, run = tmp_path / "answered", WorkerPool.run

    async def held(pool: WorkerPool, function: Callable[..., Any], *arguments: Any) -> Any:
        return await run(pool, gated, gate, function, *arguments)

    monkeypatch.setattr(WorkerPool, "run", held)
    log, placer = await cell(MIN_NEW)
    async with serving(log, settings(dsn)):
        await await_until(gate.with_suffix(".begun").exists, "the training")
        for number in range(5):
            await answer(placer, log, f"job-{number}", spec("vgg16", 20))
        gate.touch()
        await loaded(log)
    await log.close()


async def test_without_postgres_it_answers_from_the_ledger(closed_port: int) -> None:
    """The database is away at the start: the whole ledger is folded, and nobody waits for an estimate."""
    log, placer = await cell(3)
    away = f"postgresql://nobody@127.0.0.1:{closed_port}/none"
    async with serving(log, settings(away)):
        found = await answer(placer, log, "job", spec("resnet50", 8, owner="user-0"))
        assert found.estimate.tier == "history"
    await log.close()


async def test_runs_of_a_longer_log_are_refused(dsn: str) -> None:
    """Two logs on one database: what one cell learned must not be taken for another's."""
    store = await RunStore.open(dsn, "default")
    await store.add([], 10_000)
    await store.close()
    log, _ = await cell(1)
    with pytest.raises(ConfigurationError, match="Give each log its own database"):
        async with serving(log, settings(dsn)) as task:
            await task
    await log.close()
