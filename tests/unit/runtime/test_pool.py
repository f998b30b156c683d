"""Long computations must not hold up the loop, pile up, or outlive their service."""

import asyncio
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from penstock.runtime.pool import PoolBusy, WorkerDied, WorkerPool
from tests.support.waiting import await_until


def compute(begun: Path, enough: Path | None = None) -> int:
    """Computes until `enough` is there; None: for ever. Returns where."""
    begun.touch()
    while enough is None or not enough.exists():
        pass
    return os.getpid()


def refuse() -> None:
    raise LookupError("no such job")


async def end_of(pid: int) -> None:
    """A process that has ended and waits to be reaped, by the process that adopted it, holds neither memory
    nor a core."""

    def has_ended() -> bool:
        with suppress(psutil.NoSuchProcess):
            return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        return True

    await await_until(has_ended, f"the end of process {pid}")


async def test_the_loop_goes_on_while_a_worker_computes(tmp_path: Path) -> None:
    """A fold of 20,000 records takes a third of a second; decisions on the same loop must not notice. Here
    the loop ends it."""
    pool, begun, enough = WorkerPool(), tmp_path / "begun", tmp_path / "enough"
    work = asyncio.ensure_future(pool.run(compute, begun, enough))
    await await_until(lambda: begun.exists() or work.done(), "the worker")
    enough.touch()
    assert await work != os.getpid()
    pool.close()


async def test_what_the_function_raises_reaches_the_caller() -> None:
    pool = WorkerPool()
    with pytest.raises(LookupError, match="no such job"):
        await pool.run(refuse)
    pool.close()


def manners() -> tuple[int, str | None]:
    return os.nice(0), os.environ.get("OMP_NUM_THREADS")


async def test_a_worker_stands_back_and_keeps_to_one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """A training on the machine of two cores that also answers: it must not take both, nor the one that is
    needed."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    nice, polite = WorkerPool(niceness=5), WorkerPool()
    assert await nice.run(manners) == (min(19, os.nice(0) + 5), "1")
    assert await polite.run(manners) == (os.nice(0), "1")
    nice.close()
    polite.close()


async def test_a_full_pool_refuses_at_once(tmp_path: Path) -> None:
    """Everybody asks about the past at the same time: the ninth is refused for now, nothing piles up."""
    pool, begun, enough = WorkerPool(max_waiting=2), tmp_path / "begun", tmp_path / "enough"
    waiting = [asyncio.ensure_future(pool.run(compute, begun, enough)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(PoolBusy):
        await pool.run(os.getpid)
    enough.touch()
    await asyncio.gather(*waiting)
    assert await pool.run(os.getpid) > 0
    pool.close()


async def test_a_killed_worker_costs_its_task_and_nothing_else(tmp_path: Path) -> None:
    """The kernel kills a worker for its memory; the next question gets a new one."""
    pool, begun = WorkerPool(), tmp_path / "begun"
    first = await pool.run(os.getpid)
    work = asyncio.ensure_future(pool.run(compute, begun))
    await await_until(lambda: begun.exists() or work.done(), "the worker")
    os.kill(first, signal.SIGKILL)
    with pytest.raises(WorkerDied):
        await work
    assert await pool.run(os.getpid) != first
    pool.close()


async def test_idle_workers_end() -> None:
    """An idle gateway keeps no worker, and no process outlives a closed pool."""
    pool = WorkerPool(idle_s=0.1)
    first = await pool.run(os.getpid)
    await end_of(first)
    second = await pool.run(os.getpid)
    assert second != first
    pool.close()
    await end_of(second)


async def test_a_closed_pool_ends_the_task_that_it_works_on(tmp_path: Path) -> None:
    """Nobody waits for the answer any more: a replay of a large ledger must not keep a core busy for
    minutes."""
    pool, begun = WorkerPool(), tmp_path / "begun"
    first = await pool.run(os.getpid)
    work = asyncio.ensure_future(pool.run(compute, begun))
    await await_until(lambda: begun.exists() or work.done(), "the worker")
    pool.close()
    await end_of(first)
    with pytest.raises(WorkerDied):
        await work
    assert await pool.run(os.getpid) != first
    pool.close()


async def test_a_closed_pool_ends_all_of_its_tasks_also_where_its_worker_is_only_starting(
    tmp_path: Path,
) -> None:
    """Ctrl-C just after a training was begun: its worker had not started, and computed to the end before the
    program could end."""
    pool = WorkerPool()
    work = [asyncio.ensure_future(pool.run(compute, tmp_path / "begun")) for _ in range(4)]
    await asyncio.sleep(0)
    executor = pool._executor
    assert executor is not None
    [worker] = executor._processes
    pool.close()
    found = await asyncio.gather(*work, return_exceptions=True)
    assert [type(one) for one in found] == [WorkerDied] * 4
    await end_of(worker)


async def test_a_caller_that_is_cancelled_is_not_told_that_the_worker_died() -> None:
    pool = WorkerPool()
    work = asyncio.ensure_future(pool.run(os.getpid))
    await asyncio.sleep(0)
    work.cancel()
    pool.close()
    with pytest.raises(asyncio.CancelledError):
        await work


PARENT = """
import asyncio, os, sys
from penstock.runtime.pool import WorkerPool
async def main():
    pool = WorkerPool()
    print(await pool.run(os.getpid), flush=True)
    await asyncio.Event().wait()
if __name__ == "__main__":
    asyncio.run(main())
"""


async def test_a_worker_dies_with_its_service(tmp_path: Path) -> None:
    """The service is killed: its worker holds memory and perhaps a core, and nobody knows of it any more."""
    script = tmp_path / "service.py"
    script.write_text(PARENT)
    service = await asyncio.create_subprocess_exec(sys.executable, script, stdout=asyncio.subprocess.PIPE)
    assert service.stdout is not None
    worker = int(await service.stdout.readline())
    service.kill()
    await service.wait()
    await end_of(worker)
