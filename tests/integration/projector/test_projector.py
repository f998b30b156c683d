"""The projector on a real Postgres: killed anywhere, doubled, misled; the tables always equal a replay."""

import asyncio
import itertools
import os
import signal
import sys
import threading
from asyncio import FIRST_COMPLETED
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import asyncpg
import numpy as np
import pytest

from infra.devservers.kafka import KafkaBroker
from penstock.errors import ConfigurationError
from penstock.ledger.replica.replica import Replica
from penstock.ledger.replica.snapshot import dump
from penstock.log.open import open_log
from penstock.log.port import Message
from penstock.log.postgres.embedded import EmbeddedLog
from penstock.model.inputs.external_events import NodeLeft
from penstock.model.nouns.settings import PlacerSettings
from penstock.model.schema.topics import Topic
from penstock.runtime.database.migrations import load_migrations, migrate, schema_of
from penstock.runtime.following import snapshots
from penstock.runtime.following.snapshots import Until, load_latest, save_snapshot
from penstock.runtime.settings import Settings
from penstock_services.projector.core.projection import Projection
from penstock_services.projector.shell import service
from penstock_services.projector.shell.rebuild import rebuild, verify
from penstock_services.projector.shell.store import Store, Superseded
from tests.support.cluster.hand_placer import HandPlacer, node_spec
from tests.support.gateway import projector_cell
from tests.support.gateway.projector_cell import LEDGER, assert_equals_replay, busy, projecting, reached
from tests.support.waiting import await_until

pytestmark = pytest.mark.postgres
_cells = itertools.count(20)


log, cell = projector_cell.log, projector_cell.cell


@asynccontextmanager
async def projector_process(dsn: str, failpoint: str = "") -> AsyncIterator[asyncio.subprocess.Process]:
    environment = {**os.environ, "PENSTOCK_DSN": dsn, "PENSTOCK_LOG": dsn, "PENSTOCK_FAILPOINT": failpoint}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "penstock_services.projector", env=environment, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        assert (await process.stdout.readline()) == b"ready\n"
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize(
    "where", ["projector.batch_read", "projector.before_commit", "projector.after_commit"]
)
async def test_killed_anywhere_it_goes_on(
    dsn: str, log: EmbeddedLog, cell: Settings, where: str, nth: int
) -> None:
    """The machine kills the projector (out of memory, say) at the worst moment; its successor loses and
    doubles nothing."""
    placer = busy()
    async with projector_process(dsn, f"{where}:{nth}") as process:
        first, *others = values = placer.values
        await log.append([Message(LEDGER, first)])
        tables = asyncio.create_task(reached(dsn, 1))
        await asyncio.wait(
            {tables, dying := asyncio.create_task(process.wait())}, return_when=FIRST_COMPLETED
        )
        tables.cancel()
        await log.append(
            [Message(LEDGER, value) for value in others]
        )  # a second batch, whose reader may be dead
        assert await dying == -signal.SIGKILL
    async with projector_process(dsn):
        await reached(dsn, len(values))
    await assert_equals_replay(cell, log)


async def test_two_projectors_write_each_row_once(dsn: str, cell: Settings, log: EmbeddedLog) -> None:
    """A rolling update leaves two projectors alive for a while: the position lets only one of them write each
    batch."""
    other = await EmbeddedLog(dsn, "other").start()
    placer = busy(10)
    try:
        async with projecting(cell, log), projecting(cell, other):
            for seed in range(15):
                await placer.send(log)
                await reached(dsn, len(placer.values))
                placer.wander(np.random.default_rng(seed), 6)
            await placer.send(log)
            await reached(dsn, len(placer.values))
        await assert_equals_replay(cell, log)
    finally:
        await other.close()


async def test_a_projector_that_slept_writes_nothing(dsn: str, cell: Settings, log: EmbeddedLog) -> None:
    """One is stopped for minutes between reading and writing; its successor went on. Waking up, it writes its
    old rows: the position refuses them, even rows that no primary key would refuse."""
    placer = busy(30)
    await service.prepare_schema(dsn, "penstock")
    sleeper, successor = (
        await Store.open(dsn, "penstock", "default"),
        await Store.open(dsn, "penstock", "default"),
    )
    old, new = Projection(Replica()), Projection(Replica())
    for offset, value in enumerate(placer.values):
        new.take(value, offset)
        if offset < 12:
            old.take(value, offset)
    await placer.send(log)
    await successor.apply(new.replica, 0, new.drain())
    late = old.drain()
    late["decisions"] = late["events"] = []
    assert late["jobs"]
    with pytest.raises(Superseded):
        await sleeper.apply(old.replica, 0, late)
    await assert_equals_replay(cell, log)
    await sleeper.close()
    await successor.close()


async def test_void_records_move_the_position_and_nothing_else(
    dsn: str, cell: Settings, log: EmbeddedLog
) -> None:
    """A zombie placer woke up and wrote: its records are in the partition, and in no table."""
    placer = busy(20)
    async with projecting(cell, log):
        await placer.send(log)
        await log.append([Message(LEDGER, placer.values[3]), Message(LEDGER, b"{}")])
        placer.run(["late"])
        await placer.send(log)
        await reached(dsn, len(placer.values))
    await assert_equals_replay(cell, log)
    connection = await asyncpg.connect(dsn)
    assert await connection.fetchval("SELECT next_offset FROM penstock.positions") == len(placer.values) + 2
    await connection.close()


async def test_rows_of_forgotten_nodes_go(
    dsn: str, cell: Settings, log: EmbeddedLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Machines have a new name each day: the tables hold those that the ledger's fold still knows, and replay
    agrees."""
    monkeypatch.setattr("penstock.ledger.derived.departed.MAX_GONE_NODES", 2)
    placer = busy(20)
    async with projecting(cell, log):
        for number in range(12):
            placer.join(node_spec(f"day-{number}", 2))
            placer.feed(NodeLeft(node_id=f"day-{number}", boot_id="boot-1", proof="deleted"))
            placer.now_ms += PlacerSettings().freeze_window_ms
            await placer.send(log)
        await reached(dsn, len(placer.values))
    await assert_equals_replay(cell, log)
    connection = await asyncpg.connect(dsn)
    for table in ("nodes", "gpus"):
        rows = await connection.fetch(f"SELECT DISTINCT node_id FROM penstock.{table}")
        assert {row["node_id"] for row in rows} == set(placer.state.nodes)
    assert len(placer.state.nodes) < 9
    await connection.close()


async def test_a_clean_stop_leaves_a_snapshot(
    dsn: str, cell: Settings, log: EmbeddedLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Updates restart services all day: the next start folds from the snapshot, to the same state."""
    monkeypatch.setattr(service, "MIN_SNAPSHOT_RECORDS", 10)
    placer = busy()
    async with projecting(cell, log):
        await placer.send(log)
        await reached(dsn, len(placer.values))
    connection = await asyncpg.connect(dsn)
    found = await load_latest(connection, "default", log, LEDGER)
    assert found.head == placer.replica.head
    assert dump(found.state) == dump(placer.replica.state)
    assert found.offset == len(placer.values)
    earlier = await load_latest(connection, "default", log, LEDGER, Until(len(placer.values) - 1))
    assert earlier.head.seq == 0
    placer.run(["later"])
    async with projecting(cell, log):
        await placer.send(log)
        await reached(dsn, len(placer.values))
    await assert_equals_replay(cell, log)
    await connection.close()


async def test_a_damaged_snapshot_is_passed_over(dsn: str, cell: Settings, log: EmbeddedLog) -> None:
    """A bit flipped on disk: the older snapshot serves, and the tables go on as if nothing had been."""
    placer = busy()
    async with projecting(cell, log):
        await placer.send(log)
        await reached(dsn, len(placer.values))
    replica = Replica()
    connection = await asyncpg.connect(dsn)
    for offset, value in enumerate(placer.values):
        replica.take(value, offset)
        if offset in (20, 40):
            await save_snapshot(connection, "default", replica)
    assert (await load_latest(connection, "default", log, LEDGER)).head.seq == 41
    await connection.execute(
        "UPDATE penstock.snapshots SET body = set_byte(body, 30, get_byte(body, 30) # 1) WHERE seq = 41"
    )
    assert (await load_latest(connection, "default", log, LEDGER)).head.seq == 21
    await connection.execute("UPDATE penstock.snapshots SET body = 'x', sha256 = $1", "0" * 64)
    assert (await load_latest(connection, "default", log, LEDGER)).head.seq == 0
    placer.run(["later"])
    async with projecting(cell, log):
        await placer.send(log)
        await reached(dsn, len(placer.values))
    await assert_equals_replay(cell, log)
    await connection.close()


async def test_verify_finds_a_changed_row_and_rebuild_mends_it(
    dsn: str, cell: Settings, log: EmbeddedLog
) -> None:
    """Somebody repaired a row by hand: verify names it; rebuild makes the tables right under a running
    projector."""
    placer = busy()
    async with projecting(cell, log):
        await placer.send(log)
        await reached(dsn, len(placer.values))
        connection = await asyncpg.connect(dsn)
        await connection.execute("UPDATE penstock.jobs SET owner = 'mallory' WHERE submitted_seq < 20")
        await connection.execute(
            "DELETE FROM penstock.tasks WHERE task_id = (SELECT min(task_id) FROM penstock.tasks)"
        )
        found = await verify(cell, log)
        assert not found["ok"]
        tables = {difference["table"] for difference in found["differences"]}
        assert tables == {"jobs", "tasks"}
        assert any("mallory" in (difference["stored"] or "") for difference in found["differences"])
        assert any(difference["stored"] is None for difference in found["differences"])
        assert (await rebuild(cell, log))["ok"]
        placer.run(["after-the-rebuild"])
        await placer.send(log)
        await reached(dsn, len(placer.values))
        await assert_equals_replay(cell, log)
        left = await connection.fetch("SELECT nspname FROM pg_namespace WHERE nspname ~ 'verify|rebuild'")
        assert left == []
        await connection.close()


async def test_tables_of_another_log_are_refused(dsn: str, cell: Settings, log: EmbeddedLog) -> None:
    """The log was reset but not the database: going on would mix two histories. The message names the
    remedy."""
    placer = busy(30)
    async with projecting(cell, log):
        await placer.send(log)
        await reached(dsn, len(placer.values))
    connection = await asyncpg.connect(dsn)
    await connection.execute("UPDATE penstock.positions SET head_id = repeat('f', 32)")
    await connection.execute("TRUNCATE penstock.snapshots")
    with pytest.raises(ConfigurationError, match=r"another log.*projections rebuild"):
        await service.run(cell, asyncio.Event(), log=log)
    await connection.execute("UPDATE penstock.positions SET next_offset = 10000, head_offset = 9999")
    with pytest.raises(ConfigurationError, match=r"no record.*another log.*projections rebuild"):
        await service.run(cell, asyncio.Event(), log=log)
    assert (await rebuild(cell, log))["ok"]
    await assert_equals_replay(cell, log)
    await connection.close()


async def test_old_events_are_forgotten(
    dsn: str, cell: Settings, log: EmbeddedLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cell runs for years: the stream of events stays bounded, and verify knows."""
    monkeypatch.setenv("PENSTOCK_EVENTS_KEPT", "20")
    monkeypatch.setattr(service, "REMOVE_EVERY_RECORDS", 1)
    placer = busy()
    async with projecting(cell, log):
        await placer.send(log)
        await reached(dsn, len(placer.values))
        connection = await asyncpg.connect(dsn)

        async def forgotten() -> bool:
            oldest = await connection.fetchval("SELECT min(seq) FROM penstock.events")
            return bool(oldest >= len(placer.values) - 20)

        await await_until(forgotten, "the end of old events")
        assert await connection.fetchval("SELECT min(seq) FROM penstock.events") <= len(placer.values) - 15
        await connection.close()
    await assert_equals_replay(cell, log)


async def test_jobs_that_ended_long_ago_leave_the_tables(
    dsn: str, cell: Settings, log: EmbeddedLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cell runs for years: old jobs go a few at a time with the records that come, live ones stay, and
    verify knows."""
    monkeypatch.setenv("PENSTOCK_ENDED_JOBS_DAYS", "31")
    monkeypatch.setattr(service, "REMOVE_EVERY_RECORDS", 1)
    monkeypatch.setattr(service, "MAX_REMOVED_JOBS", 2)
    placer = HandPlacer()
    placer.join(node_spec("n0", 4), node_spec("n1", 1))
    placer.run([f"old-{number}" for number in range(9)])
    placer.submit("runs-for-a-year")
    placer.start("runs-for-a-year")
    connection = await asyncpg.connect(dsn)
    async with projecting(cell, log):
        await placer.send(log)
        await reached(dsn, len(placer.values))
        assert await connection.fetchval("SELECT count(*) FROM penstock.jobs") == 10
        placer.now_ms += 2 * service.DAY_MS
        placer.run(["30-days-ago"])
        placer.now_ms += 30 * service.DAY_MS
        placer.feed(NodeLeft(node_id="n1", boot_id="boot-1", proof="shutdown"))
        for number in range(8):
            placer.run([f"new-{number}"])
            await placer.send(log)
            await reached(dsn, len(placer.values))
    await assert_equals_replay(cell, log)
    rows = await connection.fetch("SELECT job_id FROM penstock.jobs ORDER BY job_id")
    left = {"runs-for-a-year", "30-days-ago", *(f"new-{number}" for number in range(8))}
    assert {row["job_id"] for row in rows} == left
    for table in ("tasks", "decisions"):
        found = await connection.fetch(
            f"SELECT DISTINCT job_id FROM penstock.{table} WHERE job_id IS NOT NULL"
        )
        assert {row["job_id"] for row in found} == left, table
    others = await connection.fetch("SELECT kind FROM penstock.decisions WHERE job_id IS NULL")
    assert {row["kind"] for row in others} == {"penstock.node.lost"}, "the term of 32 days ago has gone"
    assert (await rebuild(cell, log))["tables"]["jobs"] == 19, "rebuilt from the whole ledger"
    await assert_equals_replay(cell, log)
    await connection.close()


async def test_old_jobs_go_a_few_at_a_time_and_the_oldest_first(
    dsn: str, cell: Settings, log: EmbeddedLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an upgrade there are a million of them: no batch waits for all to go, and what is left is asked
    for again."""
    placer = HandPlacer()
    placer.join(node_spec("n0", 1))
    placer.run([f"old-{number}" for number in range(5)])
    async with projecting(cell, log):
        await placer.send(log)
        await reached(dsn, len(placer.values))
    store = await Store.open(dsn, schema_of(cell.cell), cell.cell)
    left = []
    for _ in range(4):
        more = await store.remove_jobs(placer.now_ms + 1, 2)
        rows = await store.connection.fetch("SELECT job_id FROM jobs ORDER BY job_id")
        left.append((more, [row["job_id"] for row in rows]))
    assert left == [
        (True, ["old-2", "old-3", "old-4"]),
        (True, ["old-4"]),
        (False, []),
        (False, []),
    ]
    await store.close()
    monkeypatch.setenv("PENSTOCK_ENDED_JOBS_DAYS", "30")
    with pytest.raises(ConfigurationError, match=r"PENSTOCK_ENDED_JOBS_DAYS.*give 31 or more"):
        service.Projector(cell, log, asyncio.Event())


async def test_a_nul_in_a_label_does_not_stop_it(dsn: str, cell: Settings, log: EmbeddedLog) -> None:
    """Whatever text a user manages to submit, the tables go on."""
    from penstock.model.jobs.job_spec import JobSpec

    placer = HandPlacer()
    placer.join(node_spec("n0", 1))
    placer.submit("odd", spec=JobSpec(command=("true",), labels={"k\0": "v\\\0", "\\u0000": "\ud7ff"}))
    async with projecting(cell, log):
        await placer.send(log)
        await reached(dsn, len(placer.values))
    await assert_equals_replay(cell, log)


async def test_cells_do_not_see_each_other(dsn: str, log: EmbeddedLog) -> None:
    """Two cells share a database: each has its own tables, whatever their names."""
    names = ["default", "blue", "Rack/7"]
    assert len({schema_of(name) for name in names}) == 3
    await log.create({Topic.LEDGER.value: 3})
    for index, name in enumerate(names):
        settings = Settings(log_url=dsn, dsn=dsn, cell=name, cell_index=index)
        placer = HandPlacer()
        placer.run([f"job-of-{index}"])
        async with projecting(settings, log):
            await placer.send(log, index)
            await reached(dsn, len(placer.values), schema_of(name))
        await assert_equals_replay(settings, log)


@pytest.mark.kafka
@pytest.mark.usefixtures("patient_kafka")
async def test_on_kafka_too(dsn: str, kafka: KafkaBroker) -> None:
    """The same on a real Kafka: offsets with other records between, a restart in the middle."""
    settings = Settings(log_url=f"kafka://{kafka.bootstrap}", dsn=dsn, cell_index=next(_cells))
    log = await open_log(settings.log_url, "projector").start()
    placer = busy()
    try:
        await log.create({Topic.LEDGER.value: settings.cell_index + 1})
        async with projecting(settings, log):
            await placer.send(log, settings.cell_index)
            await reached(dsn, len(placer.values))
        placer.run(["later"])
        async with projecting(settings, log):
            await placer.send(log, settings.cell_index)
            await reached(dsn, len(placer.values))
        await assert_equals_replay(settings, log)
    finally:
        await log.close()


async def test_a_snapshot_leaves_the_event_loop_alone(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cell with 100,000 jobs: while its snapshot is written or read, the services on the same loop
    answer."""
    threads: dict[str, list[threading.Thread]] = {}

    def watched(name: str) -> None:
        real = getattr(snapshots, name)

        def call(*given: object) -> object:
            threads.setdefault(name, []).append(threading.current_thread())
            return real(*given)

        monkeypatch.setattr(snapshots, name, call)

    watched("dump_parts")
    watched("load_lines")
    placer = busy(seed=3)
    connection = await asyncpg.connect(dsn)
    log = await EmbeddedLog(dsn, "test").start()
    await log.create({Topic.LEDGER.value: 1})
    await placer.send(log)
    await migrate(connection, "penstock", load_migrations(service.MIGRATIONS))
    replica = placer.replica
    replica.offset, replica.head_offset = len(placer.values), len(placer.values) - 1
    await save_snapshot(connection, "default", replica)
    found = await load_latest(connection, "default", log, LEDGER)
    await connection.close()
    await log.close()
    assert dump(found.state) == dump(placer.state)
    assert (found.head, found.offset) == (placer.head, len(placer.values))
    assert {name: len(used) for name, used in threads.items()} == {"dump_parts": 1, "load_lines": 1}
    assert all(thread is not threading.main_thread() for used in threads.values() for thread in used)
