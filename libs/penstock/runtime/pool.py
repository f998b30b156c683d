"""Process pool for long computations, outside the event loop.

A service also makes its decisions on its loop, so no computation there may take more than a few milliseconds.
Workers are forked from a small fork server, so that a task starts no interpreter once the server runs
(`start_fork_server`). They end after `IDLE_S` without a task, and with their parent.
"""

import asyncio
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from penstock.errors import PenstockError
from penstock.runtime.single_thread import use_one_thread

if TYPE_CHECKING:
    from multiprocessing.sharedctypes import SynchronizedArray

WORKERS = 1  # a machine's cores belong to its jobs
MAX_WAITING = 8  # tasks in the pool; beyond, `run` raises at once
IDLE_S = 60.0  # then the workers end: an idle one holds 60 MiB
CLOSED = -1  # index of the flag behind the workers' process ids
SAFE_PATH = "PYTHONSAFEPATH"  # as the option -P; not for jobs, whose scripts import their neighbours
LOCK_S = 1.0  # a worker that was killed while it wrote its id holds the lock for ever

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class PoolBusy(PenstockError):
    """`MAX_WAITING` tasks are under way; try again later."""


class WorkerDied(PenstockError):
    """The worker was killed (out of memory?); the task's outcome is lost, the pool starts new workers."""


def start_fork_server() -> None:
    """Starts the process that workers are forked from, 12 MiB; idempotent. It ends with this process.

    The library starts it by `python -c`, for which modules in the current folder, a user's, would come first.
    """
    multiprocessing.set_forkserver_preload([])  # by default it would load the whole program
    before = os.environ.get(SAFE_PATH)
    os.environ[SAFE_PATH] = "1"
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        del os.environ[SAFE_PATH]
        if before is not None:
            os.environ[SAFE_PATH] = before


def _begin_worker(niceness: int, pids: "SynchronizedArray[int]") -> None:
    """Initialiser of a worker: it leaves signals from the terminal to its parent, ends with it,
    and uses one core."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with pids.get_lock():
        closed = pids[CLOSED]
        pids[pids[:].index(0)] = os.getpid()
    if closed:
        os._exit(1)
    os.nice(niceness)
    use_one_thread()  # before the function that it runs imports numpy
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _end_with_parent() -> None:
    """Ends the worker with its parent. The kernel's death signal would follow the fork server, which lives as
    long as its workers."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _end_workers(pids: "SynchronizedArray[int]") -> None:
    """Kills the workers that have started; the others end themselves at their start."""
    locked = pids.get_lock().acquire(timeout=LOCK_S)
    values: Any = pids.get_obj()  # read without the lock
    values[CLOSED] = 1
    for pid in values[:CLOSED]:
        if pid:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    if locked:
        pids.get_lock().release()


class WorkerPool:
    """A bounded pool, started on demand. Functions and arguments must be importable and picklable."""

    def __init__(
        self,
        *,
        max_waiting: int = MAX_WAITING,
        idle_s: float = IDLE_S,
        niceness: int = 0,
    ) -> None:
        """`niceness`: 0–19, of the workers."""
        self._niceness = niceness
        self._max_waiting = max_waiting
        self._idle_s = idle_s
        self._under_way = 0
        self._executor: ProcessPoolExecutor | None = None
        self._pids: SynchronizedArray[int] | None = None
        self._ending: asyncio.TimerHandle | None = None

    async def run(
        self, function: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Result:
        """The function's result or exception. Raises `PoolBusy` at once, `WorkerDied` when the worker was
        killed or the pool closed.

        Cancelling the caller does not end a task that has begun.
        """
        if self._under_way >= self._max_waiting:
            raise PoolBusy(f"{self._under_way} tasks are under way")
        if self._ending is not None:
            self._ending.cancel()
        if self._executor is None:
            start_fork_server()
            context = multiprocessing.get_context("forkserver")
            self._pids = context.Array("i", WORKERS + 1)
            self._executor = ProcessPoolExecutor(
                WORKERS, context, _begin_worker, (self._niceness, self._pids)
            )
        executor = self._executor
        self._under_way += 1
        loop = asyncio.get_running_loop()
        future = executor.submit(function, *args, **kwargs)
        future.add_done_callback(lambda _: self._count_down(loop))
        try:
            return await asyncio.wrap_future(future)
        except BrokenProcessPool as error:
            if self._executor is executor:
                self._executor = None
            raise WorkerDied("a worker process was killed") from error
        except asyncio.CancelledError as error:
            caller = asyncio.current_task()
            if not future.cancelled() or (caller is not None and caller.cancelling()):
                raise
            raise WorkerDied("the pool was closed before the task began") from error

    def _count_down(self, loop: asyncio.AbstractEventLoop) -> None:
        """Counts a task as ended. Runs on a thread of the executor, perhaps after the loop has ended."""
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(self._done)

    def _done(self) -> None:
        self._under_way -= 1
        if self._under_way == 0 and self._executor is not None:
            self._ending = asyncio.get_running_loop().call_later(self._idle_s, self.close)

    def close(self) -> None:
        """Ends the workers and their tasks (their callers get `WorkerDied`);
        the next `run` starts new ones."""
        if self._ending is not None:
            self._ending.cancel()
        executor, self._executor = self._executor, None
        if executor is None:
            return
        executor.shutdown(wait=False, cancel_futures=True)
        if self._under_way and self._pids is not None:  # without a task workers end by themselves
            _end_workers(self._pids)
