"""What estimates cost in the running service: one, a thousand at once, and while a model is trained on 10,000
runs.

The estimator is a process of its own (`watched_estimator`) on the embedded log, with the runs of a month in
its store and a model learned from them. Jobs are distinct in batch size and GPUs, so that no answer is
remembered from an earlier one. A second training begins by drift: runs that took more than was promised,
written to the ledger as the placer would.
"""

import asyncio
import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from time import perf_counter

import psutil

from penstock.clock import wall_ms
from penstock.ledger.record.record import GENESIS, Draft, write
from penstock.log.open import open_log
from penstock.log.port import Log, Message, Partition, Reader
from penstock.log.topic_settings import topic_partitions
from penstock.model.decisions.ledger_events import JobEnded, PlacementDecided, TermStarted
from penstock.model.inputs.estimates import JobEstimated, ModelTrained
from penstock.model.inputs.external_events import JobSubmitted, NodeJoined, TaskExited
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.nouns.settings import PlacerSettings
from penstock.model.nouns.types import Estimate, ResourceVector, TaskPlacement, Usage
from penstock.model.schema.event import Event
from penstock.model.schema.topics import Topic
from penstock.model.wire.envelope import Envelope, from_wire, to_wire
from penstock_services.estimator.core.model_lifecycle import MAX_MISSED
from penstock_services.estimator.core.resource_model.training import table
from penstock_services.estimator.shell.store import RunStore
from tests.bench.machine import Cpu
from tests.bench.servers import Servers, process, servers
from tests.bench.services.history import CARDS, Month
from tests.bench.services.watched_estimator import Read
from tests.papers.estimator.models.liquid import LiquidModel
from tests.support.cluster.driver import node_spec

JOBS, LEDGER, ESTIMATES = (Partition(topic, 0) for topic in (Topic.JOBS, Topic.LEDGER, Topic.ESTIMATES))
RUNS = 10_000
KINDS = 4  # of GPUs in the cell: the model is asked about each for every job
NODES = 1_000
WARM_UP = 50  # not counted: first imports, first products of that shape
ONE_BY_ONE = 500
AT_ONCE, TIMES = 1_000, 5
RATE_PER_S = 100.0
FOREST_RUNS, FOREST_ASKED = 2_000, 50
PROMISED_MIB = 500  # to the runs that break their promise
TRAINING_TIMEOUT_S, ANSWER_TIMEOUT_S = 300.0, 60.0


@dataclass(slots=True)
class Found:
    """Times in ms."""

    one: list[float] = field(default_factory=list)
    """Of one estimate, asked for alone."""
    one_cpu: list[float] = field(default_factory=list)
    """Of the processor alone, as all `…_cpu`: what others on the machine do hardly shows in it."""
    answered: list[float] = field(default_factory=list)
    """From record read to estimate appended, of the same."""
    together: list[float] = field(default_factory=list)
    """Of the model's answers to AT_ONCE jobs, per time."""
    at_once: list[float] = field(default_factory=list)
    """Of the estimates of those jobs by all tiers, the model's answers included."""
    together_cpu: list[float] = field(default_factory=list)
    at_once_cpu: list[float] = field(default_factory=list)
    at_once_appended: list[float] = field(default_factory=list)
    """From records read to all estimates appended."""
    ready_training: list[float] = field(default_factory=list)
    """From record read to the call of append: what is left then is the log's."""
    one_training: list[float] = field(default_factory=list)
    answered_training: list[float] = field(default_factory=list)
    training_cpu_s: float = 0.0
    training_s: float = 0.0
    others_cores: float = 0.0
    """While it trained."""
    rss_mib: float = 0.0
    forest: list[float] = field(default_factory=list)


class Cell:
    """The rest of the cell: submits, writes the ledger, and waits for the estimator's answers."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._head = GENESIS
        self._reader: Reader = log.reader({ESTIMATES: 0})
        self._answered: set[str] = set()
        self.models = 0

    async def record(self, *facts: Event, term: int | None = None) -> None:
        """One ledger record."""
        draft = Draft(term or self._head.term, wall_ms(), {"timer_id": "bench"}, "committed", None, facts)
        self._head, value = write(self._head, draft)
        await self._log.append([Message(LEDGER, value)])

    async def begin(self, nodes: int) -> int:
        """The cell's nodes; returns the ledger's length."""
        await self.record(TermStarted(term=1, placer_id="bench", settings=PlacerSettings()), term=1)
        joined = [
            NodeJoined(node=node_spec(f"n{i}", 8, model=card.model, memory_mib=card.memory_mib))
            for i in range(nodes)
            for card in (CARDS[i % KINDS],)
        ]
        await self.record(*joined)
        return (await self._log.end_offsets([LEDGER]))[LEDGER]

    async def submit(self, jobs: dict[str, JobSpec]) -> None:
        messages = []
        for job_id, spec in jobs.items():
            event = JobSubmitted(job_id=job_id, spec=spec)
            headers, value = to_wire(Envelope(job_id, "/bench", wall_ms(), event, correlation_id=job_id))
            messages.append(Message(JOBS, value, headers))
        await self._log.append(messages)

    async def broken_promise(self, job_id: str, spec: JobSpec, seq: int, used: Usage) -> None:
        """A whole run of a job that took more GPU memory than the model had promised."""
        place = TaskPlacement(
            task_id=f"{job_id}.1.w0",
            role="worker",
            rank=0,
            node_id="n0",
            gpus=tuple(range(spec.resources.gpus or 1)),
        )
        estimate = Estimate(
            worker=ResourceVector(gpus=1, cores=1, host_memory_mib=1_024, gpu_memory_mib=PROMISED_MIB),
            confidence=0.8,
            tier="model",
            source="the bench",
            model_version="resources-bench",
        )
        await self.record(
            JobSubmitted(job_id=job_id, spec=spec),
            JobEstimated(job_id=job_id, estimate=estimate),
            PlacementDecided(job_id=job_id, attempt=1, tasks=(place,)),
            TaskExited(
                node_id="n0",
                task_id=place.task_id,
                token=seq,
                cause="exited",
                exit_code=0,
                started_ms=0,
                exited_ms=60_000,
                usage=used,
            ),
            JobEnded(job_id=job_id, outcome="succeeded", exit_code=0),
        )

    async def look(self, timeout_ms: int | None = None) -> None:
        """Reads the answers since."""
        for record in await self._reader.read(timeout_ms=timeout_ms):
            answer = from_wire(record.headers, record.value, Topic.ESTIMATES).data
            if isinstance(answer, JobEstimated):
                self._answered.add(answer.job_id)
            elif isinstance(answer, ModelTrained):
                self.models += 1

    async def answered(self, jobs: dict[str, JobSpec]) -> None:
        """Waits until all are. Raises TimeoutError."""
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            while not jobs.keys() <= self._answered:
                await self.look()


def fresh_jobs(month: Month) -> Iterator[JobSpec]:
    """Jobs of which the model was not asked the like before; endless."""
    asked, number = set(), 0
    while True:
        number += 1
        job = month.job(number)
        known = (job.model, job.batch_size, job.resources.gpus)
        if known not in asked:
            asked.add(known)
            yield job


async def train(cell: Cell, jobs: Iterator[JobSpec], name: str, runs: int) -> None:
    """Has a model trained: so many runs end, each with a broken promise. Returns at once."""
    for number in range(runs):
        used = Usage(gpu_memory_mib=2 * PROMISED_MIB, gpu_utilisation_percent=50.0, gpu_utilisation_std=5.0)
        await cell.broken_promise(f"{name}-{number}", next(jobs), number + 1, used)


async def one_by_one(cell: Cell, jobs: Iterator[JobSpec], name: str, count: int) -> None:
    """Each is submitted when the one before is answered."""
    for number in range(count):
        one = {f"{name}-{number}": next(jobs)}
        await cell.submit(one)
        await cell.answered(one)


async def while_training(cell: Cell, jobs: Iterator[JobSpec], pid: int, pids: dict[str, int]) -> Found:
    """Submissions at a steady rate from the runs that call for a training to the model that comes of it."""
    found = Found()
    sent: dict[str, JobSpec] = {}
    await train(cell, jobs, "broken", MAX_MISSED)
    worker_s, began_s, cpu, models = _children_s(pid), perf_counter(), Cpu(pids), cell.models
    async with asyncio.timeout(TRAINING_TIMEOUT_S):
        while cell.models == models:
            due = int((perf_counter() - began_s) * RATE_PER_S)
            while len(sent) < due:
                one = {f"meanwhile-{len(sent)}": next(jobs)}
                await cell.submit(one)
                sent |= one
            await cell.look(timeout_ms=0)
            await asyncio.sleep(0.2 / RATE_PER_S)
    found.training_s = perf_counter() - began_s
    found.training_cpu_s = _children_s(pid) - worker_s
    found.others_cores = cpu.others_cores()
    await cell.answered(sent)
    return found


def _children_s(pid: int) -> float:
    """CPU seconds of the worker processes."""
    times = [child.cpu_times() for child in psutil.Process(pid).children(recursive=True)]
    return sum(one.user + one.system for one in times)


async def fill(found: Servers, month: Month, runs: int, ledger_end: int) -> None:
    """The store as it is after so many finished runs."""
    store = await RunStore.open(found.settings.need_dsn("the bench"), found.settings.cell)
    await store.add([month.run(seq + 1) for seq in range(runs)], ledger_end)
    await store.close()


async def measure(
    runs: int = RUNS, nodes: int = NODES, ones: int = ONE_BY_ONE, at_once: int = AT_ONCE, times: int = TIMES
) -> Found:
    """The whole bench of one estimator. `runs`: at least 100, or no model comes of them."""
    month = Month()
    jobs = fresh_jobs(Month(seed=2))
    async with servers("embedded") as servers_:
        log = await open_log(servers_.settings.log_url, "bench").start()
        await log.create(topic_partitions())
        cell, seen = Cell(log), servers_.folder / "seen.json"
        await fill(servers_, month, runs, await cell.begin(nodes))
        argv = ["-m", "tests.bench.services.watched_estimator", str(seen)]
        async with process("estimator", argv, servers_) as child:
            await train(cell, jobs, "first", 1)
            async with asyncio.timeout(TRAINING_TIMEOUT_S):
                while not cell.models:
                    await cell.look()
            await one_by_one(cell, jobs, "warm", min(ones, WARM_UP))
            await one_by_one(cell, jobs, "one", ones)
            for time in range(times):
                many = {f"many-{time}-{number}": next(jobs) for number in range(at_once)}
                await cell.submit(many)
                await cell.answered(many)
            rss_mib = psutil.Process(child.pid).memory_info().rss / 2**20
            found = await while_training(cell, jobs, child.pid, {**servers_.pids, "estimator": child.pid})
        found.rss_mib = rss_mib
        await log.close()
        reads = [Read(**entry) for entry in json.loads(await asyncio.to_thread(seen.read_text))]
    _sort(found, reads, at_once)
    found.forest = forest_ms(min(runs, FOREST_RUNS), min(ones, FOREST_ASKED))
    return found


def _sort(found: Found, reads: list[Read], at_once: int) -> None:
    """Of each phase its times. Every job must have been estimated once."""
    times: dict[str, Read] = {}
    for read in reads:
        phases = {job_id.rsplit("-", 1)[0] for job_id in read.jobs}
        for phase in phases:
            if phase.startswith("many"):
                one = times.setdefault(phase, Read())
                one.together_ms += read.together_ms
                one.together_cpu_ms += read.together_cpu_ms
                one.each_cpu_ms += read.each_cpu_ms
                one.each_ms += read.each_ms
                one.appended_ms += read.appended_ms
                one.jobs += read.jobs
            elif phase == "one":
                found.one += [read.together_ms + each for each in read.each_ms]
                found.one_cpu += [read.together_cpu_ms + each for each in read.each_cpu_ms]
                found.answered += [read.appended_ms] * len(read.jobs)
            elif phase == "meanwhile":
                found.one_training += [read.together_ms + each for each in read.each_ms]
                found.answered_training += [read.appended_ms] * len(read.jobs)
                found.ready_training += [read.computed_ms] * len(read.jobs)
    assert all(len(one.jobs) == at_once for one in times.values()), "one was answered twice or not at all"
    found.together = [one.together_ms for one in times.values()]
    found.at_once = [one.together_ms + sum(one.each_ms) for one in times.values()]
    found.together_cpu = [one.together_cpu_ms for one in times.values()]
    found.at_once_cpu = [one.together_cpu_ms + sum(one.each_cpu_ms) for one in times.values()]
    found.at_once_appended = [one.appended_ms for one in times.values()]


def forest_ms(runs: int, asked: int) -> list[float]:
    """One prediction with Liquid's forest through scikit-learn, all labels, in this process: the baseline."""
    month = Month()
    columns = table([month.run(seq + 1) for seq in range(runs)])
    forest, times = LiquidModel(columns), []
    for number in range(asked):
        began_s = perf_counter()
        forest.predict(columns.tasks[number : number + 1])
        times.append((perf_counter() - began_s) * 1_000)
    return times


if __name__ == "__main__":  # python -m tests.bench.services.estimator: for work on speed
    import uvloop

    from tests.bench.machine import keep_to_two_cores, quantile

    keep_to_two_cores()
    shown = uvloop.run(measure())
    times = [one.name for one in fields(shown) if isinstance(getattr(shown, one.name), list)]
    for name in times:
        values = getattr(shown, name)
        print(
            f"{name}: {len(values)}, p50 {statistics.median(values):.3f}, p99 {quantile(values, 0.99):.3f} ms"
        )
    print(
        f"training {shown.training_s:.1f} s, CPU {shown.training_cpu_s:.1f} s; others "
        f"{shown.others_cores:.2f} cores; "
        f"{shown.rss_mib:.0f} MiB"
    )
