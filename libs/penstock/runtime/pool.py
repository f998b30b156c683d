"""Long computations leave the event loop: pure functions in worker processes, their answer as a result.

The loop of a service also carries its decisions, so nothing on it may compute for more than a few
milliseconds. Workers start with the first task, end after a while without one, and die with their parent.
"""

import asyncio
import ctypes
import multiprocessing
import os
import signal
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import ParamSpec, TypeVar

from penstock.errors import KernelError
from penstock.runtime.single_thread import use_one_thread

WORKERS = 1  # a machine's cores belong to its jobs
MAX_WAITING = 8  # tasks in the pool; beyond, the caller is told at once
IDLE_S = 60.0  # then the workers end: a start costs half a second, an idle one 60 MiB
PR_SET_PDEATHSIG = 1

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class PoolBusy(KernelError):
    """`MAX_WAITING` tasks are under way; try again later."""


class WorkerDied(KernelError):
    """The worker was killed (out of memory?); the task's outcome is lost, the pool starts anew."""


def _begin_worker(parent: int, niceness: int) -> None:
    """A worker leaves signals from the terminal to its parent, ends with it, and keeps to one core."""
    os.nice(niceness)
    use_one_thread()  # before the function that it runs imports numpy
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended while we started
        os._exit(1)


class WorkerPool:
    """A bounded pool, started on demand. Functions and arguments must be importable and picklable."""

    def __init__(
        self,
        *,
        workers: int = WORKERS,
        max_waiting: int = MAX_WAITING,
        idle_s: float = IDLE_S,
        niceness: int = 0,
    ) -> None:
        """`niceness`: 0–19; how far the workers stand back where cores are short."""
        self._workers = workers
        self._niceness = niceness
        self._max_waiting = max_waiting
        self._idle_s = idle_s
        self._under_way = 0
        self._executor: ProcessPoolExecutor | None = None
        self._ending: asyncio.TimerHandle | None = None

    async def run(
        self, function: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Result:
        """The function's result, or what it raised. Raises `PoolBusy` at once, `WorkerDied` when it was killed.

        Cancelling the caller does not end a task that has begun.
        """
        if self._under_way >= self._max_waiting:
            raise PoolBusy(f"{self._under_way} tasks are under way")
        if self._ending is not None:
            self._ending.cancel()
        if self._executor is None:
            self._executor = ProcessPoolExecutor(
                self._workers,
                multiprocessing.get_context("spawn"),
                _begin_worker,
                (os.getpid(), self._niceness),
            )
        executor = self._executor
        self._under_way += 1
        loop = asyncio.get_running_loop()
        future = executor.submit(function, *args, **kwargs)
        future.add_done_callback(lambda _: loop.call_soon_threadsafe(self._done))
        try:
            return await asyncio.wrap_future(future)
        except BrokenProcessPool as error:
            if self._executor is executor:
                self._executor = None
            raise WorkerDied("a worker process was killed") from error

    def _done(self) -> None:
        self._under_way -= 1
        if self._under_way == 0 and self._executor is not None:
            self._ending = asyncio.get_running_loop().call_later(self._idle_s, self.close)

    def close(self) -> None:
        """Ends the workers without waiting for them; the next `run` starts new ones."""
        if self._ending is not None:
            self._ending.cancel()
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown(wait=False, cancel_futures=True)
