"""`python -m tests.bench.services.restore [RECORDS]`: how long a cell with so many ledger records is without
decisions when its volumes are lost.

A ledger of 1,000,000 records by default (100 nodes × 8 GPUs at 90 % load) and as many inputs lie on a real
Kafka, the tables in a real Postgres. `penstock backup` copies them, `penstock restore` puts the copy into an
empty Kafka and an empty Postgres, and once more into an empty Postgres that is the log as well. RTO: from the
start of `restore` to the first placement, which a placer decides that was started behind it, after each node
has joined anew.
"""

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from infra.devservers.kafka import kafka_broker
from penstock.clock import wall_ms
from penstock.log.open import open_log
from penstock.log.port import MAX_BATCH_RECORDS, Log, Message, Partition
from penstock.log.topic_settings import topic_partitions
from penstock.model.decisions.ledger_events import TermStarted
from penstock.model.inputs.external_events import NodeJoined
from penstock.model.schema.event import Event
from penstock.model.schema.topics import Topic
from penstock.model.wire.envelope import Envelope, to_wire
from penstock.runtime.database.migrations import schema_of
from penstock.runtime.keys.node_keys import OPERATOR_KEY, key_file_at
from penstock.runtime.settings import Settings
from penstock_services.placer.shell.term import ledger_headers
from penstock_services.projector.shell.rebuild import rebuild
from penstock_services.projector.shell.service import prepare_schema
from tests.bench.scheduling.core import GPUS_PER_NODE, CoreBench
from tests.bench.servers import Servers, bench_folder, start_process
from tests.support.cli.command_process import PENSTOCK
from tests.support.cluster.driver import node_spec
from tests.support.installation.postgres import embedded_postgres

RECORDS = 1_000_000
NODES = 100
ANSWER_TIMEOUT_MS = 300_000
LEDGER = Partition(Topic.LEDGER, 0)
PLACED = b'"penstock.placement.decided.v'


class WholeCell(CoreBench):
    """A cell whose inputs are kept as well: they lie at the offsets that the ledger names."""

    def __init__(self, nodes: int) -> None:
        self.inputs: list[Message] = []
        super().__init__(nodes, partition=0)

    def step(self, event: Event) -> None:
        if not isinstance(event, TermStarted):
            place = Partition(str(event.TOPIC), 0)
            offset = self.state.positions.get((place.topic, place.index), 0)
            headers, value = to_wire(Envelope(f"{place.topic}-{offset}", "/bench", 1, event))
            self.inputs.append(Message(place, value, headers))
        super().step(event)


class Figures(NamedTuple):
    """Seconds, and bytes of the copy on disk."""

    backup_s: float
    copy_bytes: int
    verify_s: float
    restore_s: dict[str, float]
    rto_s: dict[str, float]


async def append_all(log: Log, messages: Sequence[Message]) -> None:
    for start in range(0, len(messages), MAX_BATCH_RECORDS):
        await log.append(messages[start : start + MAX_BATCH_RECORDS])


async def fill(settings: Settings, records: int) -> None:
    """Log and tables of a cell with so many ledger records."""
    cell = WholeCell(NODES)
    cell.fill()
    cell.churn(max(0, records - len(cell.ledger)))
    say(f"{len(cell.ledger):,} ledger records and {len(cell.inputs):,} inputs were made")
    log = await open_log(settings.log_url, "bench").start()
    await log.create(topic_partitions())
    ledger = [
        Message(LEDGER, value, ledger_headers(settings.cell, seq)) for seq, value in enumerate(cell.ledger, 1)
    ]
    await asyncio.gather(append_all(log, ledger), append_all(log, cell.inputs))
    say("the log is written")
    await prepare_schema(settings.need_dsn("the bench"), schema_of(settings.cell))
    await rebuild(settings, log)
    say("the tables are written")
    await log.close()


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


async def command(settings: Settings, *arguments: str) -> tuple[float, dict[str, Any]]:
    """Seconds that a `penstock …` takes, with the start of its process, and its answer."""
    began = time.perf_counter()
    env = {**os.environ, **settings.environment()}
    process = await asyncio.create_subprocess_exec(*PENSTOCK, *arguments, "-o", "json", env=env, stdout=-1)
    out, _ = await process.communicate()
    assert process.returncode == 0, arguments
    return time.perf_counter() - began, json.loads(out)


async def first_placement(settings: Settings, folder: Path) -> None:
    """Returns when a new placer has placed a job: each node joins anew, and what ran on it is placed
    again."""
    log = await open_log(settings.log_url, "bench").start()
    reader = log.reader({LEDGER: (await log.end_offsets([LEDGER]))[LEDGER]})
    placer = start_process("placer", ["-m", "penstock_services.placer"], Servers(folder, settings, {}))
    try:
        joinings = []
        for number in range(NODES):
            spec = node_spec(f"n{number:05}", GPUS_PER_NODE, rack=f"r{number // 32:04}", cores=64)
            event = NodeJoined(node=spec, incarnation=wall_ms())
            headers, value = to_wire(Envelope(f"again-{number}", "/bench", wall_ms(), event))
            joinings.append(Message(Partition(Topic.NODES, 0), value, headers))
        await log.append(joinings)
        while True:
            found = await reader.read(timeout_ms=ANSWER_TIMEOUT_MS)
            assert found, f"no placement: {placer.log_tail()}"
            if any(PLACED in record.value for record in found):
                return
    finally:
        await asyncio.to_thread(placer.kill9)
        await reader.close()
        await log.close()


@contextlib.asynccontextmanager
async def empty_servers(folder: Path, kind: str) -> AsyncIterator[Settings]:
    """A new Postgres, and with "kafka" a new broker, which then has the log."""
    with contextlib.ExitStack() as stack:
        async with embedded_postgres(folder / "pg") as dsn:
            url = dsn
            if kind == "kafka":
                broker = await asyncio.to_thread(stack.enter_context, kafka_broker())
                url = broker.url()
            yield Settings(log_url=url, dsn=dsn)


async def measure(records: int = RECORDS) -> Figures:
    with bench_folder() as folder:
        os.environ[OPERATOR_KEY] = str(key_file_at(folder / "operator.key"))
        copy = folder / "copies" / "first"
        async with empty_servers(folder / "lost", "kafka") as settings:
            await fill(settings, records)
            backup_s, _ = await command(settings, "backup", str(copy))
            say(f"backup {backup_s:.1f} s")
        size = sum(path.stat().st_size for path in copy.rglob("*") if path.is_file())
        verify_s, _ = await command(settings, "backup", str(copy), "--verify")
        say(f"verify {verify_s:.1f} s, {size / 1e6:.0f} MB")
        restore_s: dict[str, float] = {}
        rto_s: dict[str, float] = {}
        for kind in ("kafka", "embedded"):
            async with empty_servers(folder / kind, kind) as settings:
                began = time.perf_counter()
                restore_s[kind], _ = await command(settings, "restore", str(copy))
                say(f"{kind}: restore {restore_s[kind]:.1f} s")
                await first_placement(settings, folder)
                rto_s[kind] = time.perf_counter() - began
                say(f"{kind}: RTO {rto_s[kind]:.1f} s")
        return Figures(backup_s, size, verify_s, restore_s, rto_s)


if __name__ == "__main__":
    import uvloop

    print(uvloop.run(measure(*map(int, sys.argv[1:]))), psutil.getloadavg())
