"""A ledger that is restored from an older copy: it is noticed, accepted on record, and no token is given out
twice."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import asyncpg
import pytest

from penstock.errors import ConfigurationError, LogError
from penstock.ledger.replica.replica import Replica
from penstock.log.port import Log, Message, Partition
from penstock.log.postgres.embedded import EmbeddedLog
from penstock.log.topic_settings import topic_partitions
from penstock.model.decisions.orders import StartTask, StopTask
from penstock.model.inputs.external_events import NodeJoined, RunningTask, TaskExited, TaskStarted
from penstock.model.nouns.token import seq_of, token_of
from penstock.model.schema.event import Event
from penstock.model.schema.topics import Topic, node_partition
from penstock.model.wire.codec import decode
from penstock.model.wire.envelope import Envelope, from_wire, to_wire
from penstock.runtime.settings import Settings
from penstock.runtime.tracing.tracer import tracing
from penstock_services.estimator.shell.service import run as run_estimator
from penstock_services.placer.shell import standby
from penstock_services.placer.shell.ledger_trace import LedgerTrace
from penstock_services.placer.shell.service import run as run_placer
from penstock_services.placer.shell.standby import stand_by
from penstock_services.placer.shell.term import acquire
from penstock_services.projector.shell.rebuild import rebuild
from penstock_services.projector.shell.service import run as run_projector
from tests.integration.ledger.test_changed_inputs import cell, submitted  # noqa: F401 - `cell` is a fixture
from tests.integration.placer.test_placer_service import SETTINGS, Cell
from tests.support.cluster.driver import node_spec
from tests.support.gateway.projector_cell import projecting, reached
from tests.support.installation.services import while_alive
from tests.support.waiting import await_until

LEDGER = Partition(Topic.LEDGER, 0)


async def test_it_is_restored_under_a_running_placer(cell: Cell) -> None:  # noqa: F811 - the fixture
    """A broker comes back with an older disk: the placer in office does not go on at the shorter end."""
    running = asyncio.create_task(run_placer(SETTINGS, asyncio.Event(), log=cell.log("placer")))
    await submitted(cell, "a", "b", "x", "y")  # more than it writes at the shorter end
    head = cell.fold().head
    cell.broker.restore(LEDGER, 2)
    await cell.submit("c")
    missing = (
        rf"record {head.seq} \({head.id}\) was read at its offset {head.seq - 1}, where there is no "
        r"record now"
    )
    with pytest.raises(ConfigurationError, match=rf"{missing}.*penstock-placer accept-ledger"):
        await running


async def test_what_went_on_in_place_of_void_records_is_noticed(
    cell: Cell,  # noqa: F811 - the fixture
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The restored copy lacks void records only, and the placer in office has written in their place before
    the one that stands by looks again: it would take over on a history that ends where the copy did."""
    monkeypatch.setattr(standby, "TAKEOVER_MS", 100)
    async with cell.placer():
        await submitted(cell, "a", "b")
    *kept, last = cell.broker.records(LEDGER)
    replaced, written = ([Message(LEDGER, value)] for value in (kept[0].value, last.value))
    cell.broker.restore(LEDGER, len(kept))
    cell.broker.append("a placer that was replaced", replaced)
    replica, trace = Replica(), LedgerTrace(tracing("placer", SETTINGS))
    following = asyncio.create_task(stand_by(cell.log("placer"), replica, 0, trace))
    while replica.offset <= len(kept):
        await asyncio.sleep(0)
    cell.broker.restore(LEDGER, len(kept))
    cell.broker.append("placer", written)
    with pytest.raises(LogError, match="where void records were"):
        await following


async def test_restored_between_the_last_look_and_the_term(cell: Cell) -> None:  # noqa: F811 - the fixture
    """A placer that has decided to take over sleeps. Meanwhile an older copy is put back, and what another
    placer writes there is void: the ledger is as long as it was, and the sleeper's term would follow a record
    that is gone, with tokens that were given out before."""
    async with cell.placer():
        await submitted(cell, "a", "b")
    replica, records = cell.fold(), cell.broker.records(LEDGER)
    cell.broker.restore(LEDGER, 1)
    cell.broker.append("a placer that was replaced", [Message(LEDGER, records[-1].value)] * len(records))
    log, trace = cell.log("placer"), LedgerTrace(tracing("placer", SETTINGS))
    before = len(cell.broker.records(LEDGER))
    with pytest.raises(
        LogError, match=f"record {replica.head.seq} is gone from the ledger that was followed"
    ):
        await acquire(log, log.reader({LEDGER: replica.offset}), replica, LEDGER, "cell", "sleeper", trace)
    assert len(cell.broker.records(LEDGER)) == before, "a term was begun"


class Site:
    """A cell on a real Postgres, and the reports of its one node."""

    def __init__(self, dsn: str, log: Log) -> None:
        self.dsn = dsn
        self.log = log
        self.settings = Settings(log_url=dsn, dsn=dsn)
        self.services: list[asyncio.Task[None]] = []
        self._sent = 0

    async def report(self, event: Event) -> None:
        self._sent += 1
        headers, value = to_wire(Envelope(f"report-{self._sent}", "/test", 1, event))
        await self.log.append([Message(Partition(event.TOPIC or "", 0), value, headers)])

    async def joins(self, incarnation: int, *running: RunningTask) -> None:
        await self.report(NodeJoined(node=node_spec("n0"), incarnation=incarnation, tasks=running))

    async def folded(self) -> Replica:
        replica, end = Replica(), (await self.log.end_offsets([LEDGER]))[LEDGER]
        reader = self.log.reader({LEDGER: 0})
        while replica.offset < end:
            for record in await reader.read():
                replica.take(record.value, record.offset)
        await reader.close()
        return replica

    async def until(self, holds: str) -> Replica:
        """Until this expression about the state is true."""

        async def found() -> Replica | None:
            replica = await while_alive(self.folded(), *self.services)
            return replica if eval(holds, {"state": replica.state}) else None

        return await await_until(found, holds)

    async def orders(self) -> list[StartTask | StopTask]:
        place = Partition(Topic.ORDERS, node_partition("n0"))
        reader, found = self.log.reader({place: 0}), []
        while reader.position(place) < (await self.log.end_offsets([place]))[place]:
            found += [from_wire(record.headers, record.value).data for record in await reader.read()]
        await reader.close()
        return found  # type: ignore[return-value]

    @asynccontextmanager
    async def at_work(self) -> AsyncIterator[None]:
        stop = asyncio.Event()
        work = self.services = [
            asyncio.create_task(run(self.settings, stop, log=self.log)) for run in (run_placer, run_estimator)
        ]
        try:
            yield
        finally:
            stop.set()
            await asyncio.gather(*work)

    async def restore(self, end: int) -> None:
        """The log's tables as an older backup has them; the other topics were mirrored elsewhere, and are
        whole."""
        connection = await asyncpg.connect(self.dsn)
        [row] = await connection.fetch(
            "UPDATE penstock_log.partitions SET head = $1 WHERE topic = $2 RETURNING id", end, LEDGER.topic
        )
        await connection.execute(
            "DELETE FROM penstock_log.records WHERE partition_id = $1 AND position >= $2", row["id"], end
        )
        await connection.close()


async def command(dsn: str, *arguments: str) -> tuple[int, str, str]:
    env = {**os.environ, "PENSTOCK_DSN": dsn, "PENSTOCK_LOG": dsn}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "penstock_services.placer", *arguments, env=env, stdout=-1, stderr=-1
    )
    out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


@pytest.mark.postgres
async def test_a_restored_backup_gives_out_no_token_twice(dsn: str) -> None:
    """Monday's backup is restored on Tuesday. A job that was placed on Tuesday runs on; the cell learns of it
    from its node, stops it, and only then lets the job run anew, under a token that no order of Tuesday
    had."""
    log = await EmbeddedLog(dsn, "test").start()
    await log.create(topic_partitions())
    site = Site(dsn, log)
    async with projecting(site.settings, log), site.at_work():
        await site.joins(1)
        monday = (await site.until("'n0' in state.nodes")).offset
        await site.report(submission("j1"))
        lost = await site.until("'j1' in state.jobs and state.jobs['j1'].tasks")
        await reached(dsn, lost.head.seq)
    [start] = [order for order in await site.orders() if isinstance(order, StartTask)]
    code, _, err = await command(dsn, "accept-ledger")
    assert (code, "not known to have lost any" in err) == (2, True), err
    await site.restore(monday)
    log_again = await EmbeddedLog(dsn, "test").start()
    await log.close()
    site.log = log_again

    code, _, err = await command(dsn)
    assert (code, "accept-ledger" in err) == (2, True), err
    code, out, err = await command(dsn, "accept-ledger", "--reason", "Monday's backup")
    assert code == 0, err
    assert json.loads(out)["epoch"] == 1
    with pytest.raises(ConfigurationError, match="another log"):
        await run_projector(site.settings, asyncio.Event(), log=site.log)
    assert (await rebuild(site.settings, site.log))["ok"]

    running = RunningTask(task_id=start.task_id, token=start.token)
    async with projecting(site.settings, site.log), site.at_work():
        await site.until("'j1' in state.jobs and state.jobs['j1'].estimate")
        assert "join anew" in (await site.folded()).state.frozen
        await site.joins(2, running)
        await site.until("state.nodes['n0'].incarnation == 2")
        assert (await site.folded()).state.jobs["j1"].tasks == {}, "it may still run"
        [stop] = [order for order in await site.orders() if isinstance(order, StopTask)]
        assert stop.task_id == start.task_id
        assert stop.token > start.token
        times = {"started_ms": 1, "exited_ms": 2}
        await site.report(
            TaskExited(node_id="n0", task_id=start.task_id, token=start.token, cause="stopped", **times)
        )
        again = await site.until("state.jobs['j1'].tasks")
        state = again.state
        assert (state.frozen, state.epoch) == ("", 1)
        placed = state.jobs["j1"].token
        assert placed == token_of(1, seq_of(placed)) > stop.token
        [_, fresh] = [order for order in await site.orders() if isinstance(order, StartTask)]
        assert (fresh.token, fresh.task_id) == (placed, start.task_id)
        late = TaskStarted(node_id="n0", task_id=start.task_id, token=start.token, pid=7, started_ms=1)
        await site.report(late)
        await site.report(TaskStarted(**{**as_fields(late), "token": placed}))
        state = (await site.until("state.jobs['j1'].status == 'running'")).state
        await reached(dsn, state.seq)
    async with site.at_work():
        await site.until("state.term == 4")
    await site.log.close()


def submission(job_id: str) -> Event:
    return decode(
        "penstock.job.submitted.v1", json.dumps({"job_id": job_id, "spec": {"command": ["true"]}}).encode()
    )


def as_fields(event: Event) -> dict[str, object]:
    return {name: getattr(event, name) for name in event.__struct_fields__}
