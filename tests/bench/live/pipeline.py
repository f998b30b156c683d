"""The whole pipeline under load: submitted → estimated → placed → ordered → started → exited → projected.

On Kafka every service is a process of its own, as in production; on the embedded log all share one process.
Jobs arrive at a fixed rate whatever the system does (an open loop), and a job's latency counts from the
moment at which it was due, so that a stalled system cannot hide its own stall.

Contended: the cell has 1,000 GPUs, 4,500 jobs are there at the start, and jobs arrive as fast as these GPUs
end them: the queue stands. There counts how long a GPU is vacant between two tasks.
"""

import argparse
import asyncio
import contextlib
import os
import time
from dataclasses import dataclass, field
from typing import NamedTuple
from unittest.mock import patch

import asyncpg
import msgspec
import uvloop

from penstock.clock import wall_ms
from penstock.log.open import open_log
from penstock.log.port import Log, Message, Partition
from penstock.log.topic_settings import topic_partitions
from penstock.model.inputs.external_events import JobSubmitted
from penstock.model.jobs.job_parts import ResourceRequest
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.schema.topics import Topic
from penstock.model.wire.envelope import Envelope, to_wire
from penstock.runtime.database.migrations import schema_of
from penstock.runtime.service import settle_gc
from penstock.runtime.settings import Settings
from penstock_services.estimator.shell.service import run as run_estimator
from penstock_services.placer.shell.service import run as run_placer
from penstock_services.projector.shell.service import run as run_projector
from tests.bench.cases import BY_NAME, DEFAULT, Case
from tests.bench.live.nodes import RUN_MS, fake_nodes
from tests.bench.machine import Cpu, keep_to_two_cores, quantile
from tests.bench.servers import Servers, process, servers
from tests.support.node_reporter.fake_nodes import Seen

NODES, GPUS_PER_NODE = 1_000, 8
RATE_PER_S = 1_050  # offered; above the 1,000 to be reached, so that reaching it is no accident of the pacing
TICK_S = 0.005  # between two looks of the generator at what is due
SAMPLE_S = 1.0  # between two looks at the backlog
RECORDS_PER_JOB = 4  # submitted, estimated, started, exited: one ledger record per input (LAW 2)
CONTENDED_NODES = 125
WAITING = 4_500  # jobs there at the start of a contended run
DRAIN_TIMEOUT_S = 300.0
JOIN_TIMEOUT_S = 60.0
SPEC = JobSpec(
    command=("true",),
    resources=ResourceRequest(gpus=1, cores=1, host_memory_mib=64, gpu_memory_mib=64, bandwidth_mbps=0),
)


class Load(NamedTuple):
    """What a run is given."""

    nodes: int = NODES
    rate_per_s: float = RATE_PER_S
    seconds: float = 60.0
    waiting: int = 0
    """Jobs beyond the rate, at the start."""
    run_ms: float = RUN_MS


def contended(seconds: float, nodes: int = CONTENDED_NODES, waiting: int = WAITING) -> Load:
    """With a queue that neither grows nor shrinks while jobs arrive, if no GPU were ever vacant."""
    return Load(nodes, nodes * GPUS_PER_NODE / RUN_MS * 1_000, seconds, waiting)


@dataclass(slots=True)
class Run:
    """What one run of the pipeline showed."""

    jobs: int = 0
    seconds: float = 0.0
    """From the first submission to the last projection, less the time that the last task ran."""
    latencies_ms: list[float] = field(default_factory=list)
    """Due → started, per job."""
    vacant_ms: list[int] = field(default_factory=list)
    """End of a task → start of the next on its GPU."""
    backlog: list[float] = field(default_factory=list)
    """Jobs' worth of ledger records not yet projected, every `SAMPLE_S` of the offering."""
    cpu_us_per_job: dict[str, float] = field(default_factory=dict)
    others_cores: float = 0.0
    """Cores that everybody else on the machine used meanwhile."""

    def take_cpu(self, cpu: Cpu) -> None:
        self.cpu_us_per_job = {name: used / self.jobs * 1e6 for name, used in cpu.used_s().items()}
        self.others_cores = cpu.others_cores()

    @property
    def jobs_per_s(self) -> float:
        return self.jobs / self.seconds

    @property
    def growth(self) -> float:
        """Mean backlog of the last third less that of the second; ≈ 0 while the system keeps up."""
        third = max(1, len(self.backlog) // 3)
        middle, last = self.backlog[third : 2 * third], self.backlog[-third:]
        return sum(last) / len(last) - sum(middle) / max(1, len(middle))


class Generator:
    """Offers jobs and follows how far they were projected."""

    def __init__(self, log: Log, settings: Settings, load: Load) -> None:
        self._log = log
        self._load = load
        self._dsn, cell = settings.need_dsn("the bench"), settings.cell
        self._positions = f"SELECT seq FROM {schema_of(cell)}.positions WHERE cell = $1"
        self._ended = f"SELECT count(*) FROM {schema_of(cell)}.jobs WHERE outcome = 'succeeded'"
        self._cell = cell
        self._run_s = load.run_ms / 1_000
        self.due_ms: dict[str, float] = {}
        self.run = Run()

    async def offer(self) -> None:
        """The load, then until the last job is projected. Raises TimeoutError if it never is."""
        load = self._load
        connection = await asyncpg.connect(self._dsn)
        first_seq = await connection.fetchval(self._positions, self._cell)
        began_s, began_ms = time.perf_counter(), time.time() * 1_000
        sampling = asyncio.ensure_future(self._sample(connection, first_seq, began_s))
        total = load.waiting + round(load.seconds * load.rate_per_s)
        try:
            while self.run.jobs < total:
                passed = int((time.perf_counter() - began_s) * load.rate_per_s) + 1
                due = min(total, load.waiting + passed)
                messages = []
                for number in range(self.run.jobs, due):
                    after_s = max(0, number - load.waiting) / load.rate_per_s
                    self.due_ms[f"j{number}"] = began_ms + after_s * 1_000
                    messages.append(_submission(f"j{number}"))
                self.run.jobs = due
                if messages:
                    await self._log.append(messages)
                await asyncio.sleep(TICK_S)
        finally:
            sampling.cancel()
            await asyncio.gather(sampling, return_exceptions=True)
        async with asyncio.timeout(DRAIN_TIMEOUT_S):
            goal = first_seq + RECORDS_PER_JOB * total
            while await connection.fetchval(self._positions, self._cell) < goal:
                await asyncio.sleep(0.01)
        self.run.seconds = time.perf_counter() - began_s - self._run_s
        ended = await connection.fetchval(self._ended)
        assert ended == total, f"{ended} of {total} jobs succeeded"
        await connection.close()

    async def _sample(self, connection: asyncpg.Connection, first_seq: int, began_s: float) -> None:
        """Ledger records that should be projected by now and are not, in jobs."""
        while True:
            await asyncio.sleep(SAMPLE_S)
            projected = await connection.fetchval(self._positions, self._cell) - first_seq
            age_s = time.perf_counter() - began_s - self._run_s
            exited = max(0, int(age_s * self._load.rate_per_s))
            due = self.run.jobs * (RECORDS_PER_JOB - 1) + exited
            self.run.backlog.append((due - projected) / RECORDS_PER_JOB)


def _submission(job_id: str) -> Message:
    headers, value = to_wire(
        Envelope(id=job_id, source="/bench", time_ms=wall_ms(), data=JobSubmitted(job_id=job_id, spec=SPEC))
    )
    return Message(Partition(Topic.JOBS, 0), value, headers)


async def joined(log: Log, count: int) -> None:
    """Waits until the placer has answered the joining of all nodes, one ledger record each."""
    ledger = Partition(Topic.LEDGER, 0)
    async with asyncio.timeout(JOIN_TIMEOUT_S):
        while (await log.end_offsets([ledger]))[ledger] < count + 1:  # and the term's own
            await asyncio.sleep(0.1)


async def projected(dsn: str, cell: str, seq: int) -> None:
    """Waits until the projector has come so far."""
    connection = await asyncpg.connect(dsn)
    async with asyncio.timeout(JOIN_TIMEOUT_S):
        query = f"SELECT seq FROM {schema_of(cell)}.positions WHERE cell = $1"
        while (await connection.fetchval(query, cell) or 0) < seq:
            await asyncio.sleep(0.1)
    await connection.close()


async def on_embedded(found: Servers, load: Load) -> Run:
    """One process, one log, as `penstock up` runs it."""
    settings, stop = found.settings, asyncio.Event()
    log = await open_log(settings.log_url, "bench").start()
    await log.create(topic_partitions())
    cell = fake_nodes(log, load.nodes, GPUS_PER_NODE, load.run_ms)
    tasks = [asyncio.ensure_future(cell.run())]
    for service in (run_placer, run_estimator, run_projector):
        ready = asyncio.Event()
        tasks.append(asyncio.ensure_future(service(settings, stop, log=log, ready=ready)))
        await asyncio.wait_for(ready.wait(), JOIN_TIMEOUT_S)
    await joined(log, load.nodes)
    await projected(found.settings.need_dsn("the bench"), settings.cell, load.nodes + 1)
    settle_gc()
    generator = Generator(log, settings, load)
    cpu = Cpu({**found.pids, "services": os.getpid()})
    try:
        await generator.offer()
        run = generator.run
        run.take_cpu(cpu)
        _judge(run, generator.due_ms, cell.seen)
    finally:
        stop.set()
        tasks[0].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await log.close()
    return run


async def on_kafka(found: Servers, load: Load) -> Run:
    """Every service a process; this one only offers jobs."""
    settings, seen_path = found.settings, found.folder / "seen.json"
    log = await open_log(settings.log_url, "bench").start()
    pids = {**found.pids, "generator": os.getpid()}
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(log.close)
        for name in ("placer", "estimator", "projector"):
            child = await stack.enter_async_context(process(name, ["-m", f"penstock_services.{name}"], found))
            pids[name] = child.pid
        argv = ["-m", "tests.bench.live.nodes", str(load.nodes), str(GPUS_PER_NODE), str(seen_path)]
        child = await stack.enter_async_context(process("nodes", argv, found))
        pids["nodes"] = child.pid
        await joined(log, load.nodes)
        await projected(found.settings.need_dsn("the bench"), settings.cell, load.nodes + 1)
        settle_gc()
        generator = Generator(log, settings, load)
        cpu = Cpu(pids)
        await generator.offer()
        run = generator.run
        run.take_cpu(cpu)
    seen = msgspec.json.decode(await asyncio.to_thread(seen_path.read_bytes), type=Seen)
    _judge(run, generator.due_ms, seen)
    return run


def _judge(run: Run, due_ms: dict[str, float], seen: Seen) -> None:
    """Fills in what the nodes have seen. Every job must have started once, and no GPU may have been
    shared."""
    assert not seen.collisions, seen.collisions[:3]
    assert len(seen.started) == len(due_ms), f"{len(seen.started)} of {len(due_ms)} jobs started"
    by_job = {task_id.rsplit(".", 2)[0]: at_ms for task_id, at_ms in seen.started.items()}
    run.latencies_ms = [by_job[job_id] - at_ms for job_id, at_ms in due_ms.items()]
    run.vacant_ms = seen.vacant_ms


async def measure(kind: str, case: Case, load: Load) -> Run:
    """One run on "embedded" or "kafka" (there tasks run for `RUN_MS`) under the case's profile."""
    with patch.dict(os.environ, {"PENSTOCK_PROFILE": case.profile}):
        async with servers(kind) as found:
            return await (on_kafka if kind == "kafka" else on_embedded)(found, load)


def main() -> None:
    parser = argparse.ArgumentParser(description="One run of the pipeline: for work on speed.")
    parser.add_argument("log", choices=("embedded", "kafka"))
    parser.add_argument("seconds", nargs="?", type=float, default=10.0)
    parser.add_argument("rate", nargs="?", type=float, default=RATE_PER_S, help="jobs/s, unless contended")
    parser.add_argument("--case", choices=tuple(BY_NAME), default=str(Case(DEFAULT, contended=False)))
    given = parser.parse_args()
    case = BY_NAME[given.case]
    load = contended(given.seconds) if case.contended else Load(rate_per_s=given.rate, seconds=given.seconds)
    keep_to_two_cores()
    shown = uvloop.run(measure(given.log, case, load))
    vacant = f"vacant p50 {quantile(shown.vacant_ms, 0.5):.0f} ms; " if case.contended else ""
    print(
        f"{shown.jobs_per_s:.0f} jobs/s, p50 {quantile(shown.latencies_ms, 0.5):.1f}, "
        f"p99 {quantile(shown.latencies_ms, 0.99):.1f}, max {max(shown.latencies_ms):.1f} ms; {vacant}"
        f"backlog grew by {shown.growth:.0f} jobs, max {max(shown.backlog, default=0):.0f}; us/job:",
        {name: round(used) for name, used in shown.cpu_us_per_job.items()},
        f"sum {sum(shown.cpu_us_per_job.values()):.0f}; others used {shown.others_cores:.2f} cores",
    )


if __name__ == "__main__":
    main()
