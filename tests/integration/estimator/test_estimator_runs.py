"""What the estimator keeps in Postgres: each finished run once, with the place in the ledger that it stands
for."""

import math

import asyncpg
import msgspec
import pytest

from penstock.errors import StoreError
from penstock_services.estimator.core.fold.state import State, learn
from penstock_services.estimator.core.model_lifecycle import Trained
from penstock_services.estimator.core.records.history import RUNS_PER_KEY, Run
from penstock_services.estimator.core.records.runs import (
    Allocation,
    Card,
    EstimateSummary,
    FinishedRun,
    JobInfo,
)
from penstock_services.estimator.shell import store as module
from penstock_services.estimator.shell.store import RunStore

pytestmark = pytest.mark.postgres


def run(seq: int, *, key: bytes = b"k", memory_mib: float = 1_000, rejected: str = "") -> FinishedRun:
    return FinishedRun(
        seq,
        f"job-{seq}",
        JobInfo(key, "ada", None, 64, 2, 0, ("gpus",)),
        Allocation(1, 500, 4, Card("T4", 15_360)),
        EstimateSummary("history", None, 0.5, None, 2, 900, 0, 100.0),
        Run(ended_ms=seq * 1_000.0, seq=seq, run_ms=60_000, gpus=1, host_memory_mib=memory_mib),
        rejected,
    )


def same(one: FinishedRun, other: FinishedRun) -> bool:
    """NaN, for *not measured*, equals NaN."""
    numbers = zip(one.measured, other.measured, strict=True)
    return one._replace(measured=Run(0, 0)) == other._replace(measured=Run(0, 0)) and all(
        a == b or (math.isnan(a) and math.isnan(b)) for a, b in numbers
    )


async def test_runs_come_back_as_they_were_and_only_once(dsn: str) -> None:
    """Killed between the append and its answer: the successor reads the same records again and writes them
    again."""
    store = await RunStore.open(dsn, "default")
    await store.add([run(5), run(9, rejected="gpu_memory_mib: 17300 on a card of 16384")], 12)
    await store.add([run(5), run(7)], 9)
    assert await store.position() == 12, "a position never goes back"
    found = await store.latest(10)
    assert [stored.seq for stored in found] == [5, 7], "what was rejected teaches nothing"
    assert same(found[0], run(5))
    await store.close()


async def test_a_restart_knows_the_history(dsn: str) -> None:
    """Of each key the newest runs, of jobs that were killed nothing but that: as the memory before the
    restart had them."""
    store = await RunStore.open(dsn, "default")
    runs = [run(seq, key=bytes([seq % 3]), memory_mib=seq) for seq in range(1, 200)]
    await store.add(
        [*runs, run(200, key=bytes([0]), memory_mib=17_300, rejected="host_memory_mib: wrong")], 201
    )
    state = State("penstock.jobs.v1", 0)
    async for one in store.runs():
        learn(state, one)
    assert len(state.history) == 3
    newest = state.history.get(bytes([0]))
    assert newest is not None
    assert newest.column("host_memory_mib") == [*range(198 - 3 * (RUNS_PER_KEY - 1), 199, 3)]
    await store.close()


async def test_old_runs_go_and_the_model_in_use_stays(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cell of years: neither runs nor models grow for ever, but what answers today must survive a
    restart."""
    monkeypatch.setattr(module, "MAX_RUNS", 3)
    monkeypatch.setattr(module, "MAX_MODELS", 2)
    store = await RunStore.open(dsn, "a-cell")
    await store.add([run(seq) for seq in range(1, 9)], 9)
    for number in range(5):
        model = Trained(f"m{number}", "0" * 64, b"body", 8, 1, 2, {"r2": 0.5}, promoted=number == 1)
        await store.save_model(model, number, "resources")
    await store.prune()
    assert [stored.seq for stored in await store.latest(10)] == [6, 7, 8]
    [model] = await store.promoted_models("resources")
    assert (model.version, model.metrics) == ("m1", {"r2": 0.5})
    await store.close()


async def test_cells_do_not_see_each_other(dsn: str) -> None:
    """Two cells on one database: another cluster's runs say nothing about ours."""
    one, other = await RunStore.open(dsn, "one"), await RunStore.open(dsn, "other")
    await one.add([run(1)], 2)
    assert await other.latest(5) == []
    assert await other.position() == 0
    await one.close()
    await other.close()


async def test_a_lost_connection_is_reported(dsn: str) -> None:
    """Postgres restarts during a write: the caller keeps the runs and tries again."""
    store = await RunStore.open(dsn, "default")
    await store.close()
    with pytest.raises(StoreError, match="1 runs were not written"):
        await store.add([run(1)], 2)


async def test_no_postgres_is_reported(closed_port: int) -> None:
    with pytest.raises(StoreError, match="cannot be reached"):
        await RunStore.open(f"postgresql://x@127.0.0.1:{closed_port}/x", "default")


async def test_a_run_that_a_newer_version_wrote_costs_that_run_alone(dsn: str) -> None:
    """The estimator is set back; the other one had stored a run with a cause that this one does not know."""
    store = await RunStore.open(dsn, "default")
    await store.add([run(1), run(2), run(3)], 4)
    connection = await asyncpg.connect(dsn)
    body = msgspec.msgpack.decode(
        await connection.fetchval("SELECT body FROM penstock_learned.runs WHERE seq = 2")
    )
    body[11] = "patience"
    await connection.execute(
        "UPDATE penstock_learned.runs SET body = $1 WHERE seq = 2", msgspec.msgpack.encode(body)
    )
    await connection.close()
    assert [found.seq async for found in store.runs()] == [1, 3]
    assert [found.seq for found in await store.latest(2)] == [3]
    await store.close()
