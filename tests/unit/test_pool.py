"""Long computations must not hold up the loop, pile up, or outlive their service."""

import asyncio
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from penstock.runtime.pool import PoolBusy, WorkerDied, WorkerPool

LONG_S = 60.0


def compute(seconds: float) -> int:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass
    return os.getpid()


def refuse() -> None:
    raise LookupError("no such job")


async def ends(pid: int) -> bool:
    """A process that has ended and waits to be reaped, by the process that adopted it, holds neither memory nor a core."""
    for _ in range(100):
        with suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                await asyncio.sleep(0.05)
                continue
        return True
    return False


async def test_the_loop_goes_on_while_a_worker_computes() -> None:
    """A fold of 20,000 records takes a third of a second; decisions on the same loop must not notice."""
    pool = WorkerPool()
    await pool.run(compute, 0)
    longest, before = 0.0, time.monotonic()
    work = asyncio.ensure_future(pool.run(compute, 0.5))
    while not work.done():
        await asyncio.sleep(0.005)
        longest, before = max(longest, time.monotonic() - before), time.monotonic()
    assert work.result() != os.getpid()
    assert longest < 0.4, "the loop stood still while the worker computed"
    pool.close()


async def test_what_the_function_raises_reaches_the_caller() -> None:
    pool = WorkerPool()
    with pytest.raises(LookupError, match="no such job"):
        await pool.run(refuse)
    pool.close()


def manners() -> tuple[int, str | None]:
    return os.nice(0), os.environ.get("OMP_NUM_THREADS")


async def test_a_worker_stands_back_and_keeps_to_one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """A training on the machine of two cores that also answers: it must not take both, nor the one that is needed."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    nice, polite = WorkerPool(niceness=5), WorkerPool()
    assert await nice.run(manners) == (min(19, os.nice(0) + 5), "1")
    assert await polite.run(manners) == (os.nice(0), "1")
    nice.close()
    polite.close()


async def test_a_full_pool_refuses_at_once() -> None:
    """Everybody asks about the past at the same time: the ninth is refused for now, nothing piles up."""
    pool = WorkerPool(max_waiting=2)
    waiting = [asyncio.ensure_future(pool.run(compute, 0.1)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(PoolBusy):
        await pool.run(compute, 0.1)
    await asyncio.gather(*waiting)
    assert await pool.run(compute, 0) > 0
    pool.close()


async def test_a_killed_worker_costs_its_task_and_nothing_else() -> None:
    """The kernel kills a worker for its memory; the next question gets a new one."""
    pool = WorkerPool()
    first = await pool.run(compute, 0)
    work = asyncio.ensure_future(pool.run(compute, 5))
    await asyncio.sleep(0.2)
    os.kill(first, signal.SIGKILL)
    with pytest.raises(WorkerDied):
        await work
    assert await pool.run(compute, 0) != first
    pool.close()


async def test_idle_workers_end() -> None:
    """An idle gateway keeps no worker, and no process outlives a closed pool."""
    pool = WorkerPool(idle_s=0.1)
    first = await pool.run(compute, 0)
    assert await ends(first)
    second = await pool.run(compute, 0)
    assert second != first
    pool.close()
    assert await ends(second)


async def test_a_closed_pool_ends_the_task_that_it_works_on() -> None:
    """Nobody waits for the answer any more: a replay of a large ledger must not keep a core busy for minutes."""
    pool = WorkerPool()
    first = await pool.run(compute, 0)
    work = asyncio.ensure_future(pool.run(compute, 60))
    await asyncio.sleep(0.2)
    pool.close()
    assert await ends(first)
    with pytest.raises(WorkerDied):
        await work
    assert await pool.run(compute, 0) != first
    pool.close()


async def test_a_closed_pool_ends_all_of_its_tasks_also_where_its_worker_is_only_starting() -> None:
    """Ctrl-C just after a training was begun: its worker had not started, and computed to the end before the program could end."""
    pool = WorkerPool()
    work = [asyncio.ensure_future(pool.run(compute, LONG_S)) for _ in range(4)]
    await asyncio.sleep(0)
    executor = pool._executor
    assert executor is not None
    [worker] = executor._processes
    pool.close()
    ended = asyncio.gather(*work, return_exceptions=True)
    found = await asyncio.wait_for(ended, LONG_S / 2)
    assert [type(one) for one in found] == [WorkerDied] * 4
    assert await ends(worker)


async def test_a_caller_that_is_cancelled_is_not_told_that_the_worker_died() -> None:
    pool = WorkerPool()
    work = asyncio.ensure_future(pool.run(compute, 0.1))
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
    await asyncio.sleep(60)
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
    assert await ends(worker)
