"""How long a cell is without decisions when its placer is restarted on a long ledger.

A ledger of 100,000 records (1,000 nodes × 8 GPUs at 90 % load, about 7,000 GPUs in use) lies on the embedded
log. The clock starts before the placer's process is started and stops when the ledger holds the answer to a
job that was submitted meanwhile: interpreter, imports, connections, snapshot, fold and the new term are all
in it.

With snapshots, as the projector takes them, the newest is as old as it can be: one record short of the next.
"""

import asyncio
import time

import asyncpg

from penstock.clock import wall_ms
from penstock.ledger.record.record import read
from penstock.ledger.replica.replica import Replica
from penstock.log.open import open_log
from penstock.log.port import MAX_BATCH_RECORDS, Log, Message, Partition
from penstock.log.topic_settings import topic_partitions
from penstock.model.inputs.external_events import JobSubmitted
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.schema.topics import Topic
from penstock.model.wire.envelope import Envelope, to_wire
from penstock.runtime.database.migrations import schema_of
from penstock.runtime.following.snapshots import save_snapshot
from penstock_services.placer.shell.term import ledger_headers
from penstock_services.projector.shell.service import SNAPSHOT_RECORDS, prepare_schema
from tests.bench.scheduling.core import CoreBench
from tests.bench.servers import Servers, servers, start_process

LEDGER_RECORDS = 100_000
NODES = 1_000
ANSWER_TIMEOUT_MS = 60_000
LEDGER = Partition(Topic.LEDGER, 0)


def make_ledger(records: int, nodes: int) -> list[bytes]:
    """A ledger of exactly so many records, or of the filled cell if that is more."""
    bench = CoreBench(nodes)
    bench.fill()
    if len(bench.ledger) < records:
        bench.churn(records - len(bench.ledger))
    return bench.ledger[:records]


async def write_ledger(log: Log, cell: str, ledger: list[bytes]) -> None:
    for start in range(0, len(ledger), MAX_BATCH_RECORDS):
        part = ledger[start : start + MAX_BATCH_RECORDS]
        await log.append(
            [Message(LEDGER, value, ledger_headers(cell, start + i + 1)) for i, value in enumerate(part)]
        )


async def write_snapshot(found: Servers, ledger: list[bytes], records: int) -> None:
    """The snapshot that the projector would have taken after so many records."""
    dsn, cell = found.settings.need_dsn("the bench"), found.settings.cell
    await prepare_schema(dsn, schema_of(cell))
    replica = Replica()
    for offset, value in enumerate(ledger[:records]):
        replica.take(value, offset)
    connection = await asyncpg.connect(dsn)
    await save_snapshot(connection, cell, replica)
    await connection.close()


async def restart_s(found: Servers, log: Log, job_id: str) -> float:
    """Seconds from the start of the process to the ledger's answer to this job."""
    event = JobSubmitted(job_id=job_id, spec=JobSpec(command=("true",)))
    headers, value = to_wire(Envelope(id=job_id, source="/bench", time_ms=wall_ms(), data=event))
    await log.append([Message(Partition(Topic.JOBS, 0), value, headers)])
    reader = log.reader({LEDGER: (await log.end_offsets([LEDGER]))[LEDGER]})
    began = time.perf_counter()
    placer = start_process("placer", ["-m", "penstock_services.placer"], found)
    try:
        while True:
            records = await reader.read(timeout_ms=ANSWER_TIMEOUT_MS)
            assert records, f"no answer: {placer.log_tail()}"
            if any(read(record.value).cause.event_id == job_id for record in records):
                return time.perf_counter() - began
    finally:
        await asyncio.to_thread(placer.kill9)
        await reader.close()


async def measure(records: int = LEDGER_RECORDS, nodes: int = NODES, repeats: int = 3) -> tuple[float, float]:
    """(median seconds with a snapshot, median seconds without any)."""
    ledger = make_ledger(records, nodes)
    async with servers("embedded") as found:
        log = await open_log(found.settings.log_url, "bench").start()
        await log.create(topic_partitions())
        await write_ledger(log, found.settings.cell, ledger)
        without = [await restart_s(found, log, f"without-{number}") for number in range(repeats)]
        await write_snapshot(found, ledger, max(1, len(ledger) - SNAPSHOT_RECORDS + 1))
        with_one = [await restart_s(found, log, f"with-{number}") for number in range(repeats)]
        await log.close()
    return sorted(with_one)[repeats // 2], sorted(without)[repeats // 2]


if __name__ == "__main__":  # python -m tests.bench.services.restart: for work on speed
    import uvloop

    from tests.bench.machine import keep_to_two_cores

    keep_to_two_cores()
    print("with a snapshot {:.2f} s, without {:.2f} s".format(*uvloop.run(measure())))
