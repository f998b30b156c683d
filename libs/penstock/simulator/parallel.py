"""Process pool for simulation runs: one forked process per run. The order of the runs does not affect any
result.

It is not the worker pool of services (`penstock.runtime.pool`), whose workers are shared by tasks: a run
inherits the parsed trace, its memory is freed at its end, it reports its progress, and a run that the kernel
kills does not end another.
"""

import math
import mmap
import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import NamedTuple

from penstock.simulator.engine import Durations
from penstock.simulator.runs import STOP_SIGNALS, OnProgress, Progress, Result, first_interrupt_waits

REPORT_EVERY_S = 0.2
STOP_WITHIN_S = 20.0  # after Ctrl-C


class Task(NamedTuple):
    """A run to perform. `draws`: whether charts are wanted. `name`: of its variant;
    by default the profile."""

    profile: str
    seed: int
    draws: bool
    durations: Durations = "known"
    name: str = ""

    def __str__(self) -> str:
        return f"{self.name or self.profile} with seed {self.seed}"


Do = Callable[[Task, OnProgress], Result]


class Failed(NamedTuple):
    """A run without a result, and the reason."""

    task: Task
    why: str


@dataclass(slots=True)
class Outcome:
    """`failed` and `results` in order of their ends, not sorted.
    `results` may hold stopped runs: not `whole`."""

    results: list[Result] = field(default_factory=list)
    failed: list[Failed] = field(default_factory=list)
    interrupted: bool = False


@dataclass(slots=True)
class _Running:
    task: Task
    process: BaseProcess
    progress: Progress | None = None


class Look(NamedTuple):
    """Data for a progress bar. `waiting`: runs that have not begun."""

    done: int
    events: int
    running: Mapping[Task, Progress | None]
    waiting: int


def run_all(
    tasks: Iterable[Task],
    do: Do,
    workers: int,
    then: Callable[[Result], Iterable[Task]] = lambda result: (),
    look: Callable[[Look], None] = lambda look: None,
) -> Outcome:
    """Performs all tasks, and those that `then` returns after a result; at most `workers` at once.

    Ctrl-C or SIGTERM stops the runs in progress between two steps: their figures so far are results, too. A
    second one, or STOP_WITHIN_S, ends them without results. `look` is called a few times a second. In the
    main thread only.
    """
    outcome, waiting = Outcome(), deque(tasks)
    running: dict[Connection, _Running] = {}
    stop, until_s = mmap.mmap(-1, 1), math.inf
    try:
        with first_interrupt_waits() as stopped:
            while (waiting or running) and time.monotonic() < until_s:
                if stopped() and not outcome.interrupted:
                    outcome.interrupted, stop[0] = True, 1
                    until_s = time.monotonic() + STOP_WITHIN_S
                    waiting.clear()
                while waiting and len(running) < workers:
                    task = waiting.popleft()
                    reader, process = _start(task, do, stop)
                    running[reader] = _Running(task, process)
                for found in wait(list(running), timeout=REPORT_EVERY_S):
                    assert isinstance(found, Connection)
                    result = _receive(found, running, outcome)
                    if result is not None and not outcome.interrupted:
                        waiting.extend(then(result))
                look(_look(outcome, running, len(waiting)))
    except KeyboardInterrupt:
        outcome.interrupted = True
    finally:
        for reader, own in running.items():
            own.process.kill()  # it has nothing to clean up
            own.process.join()
            reader.close()
    return outcome


def _look(outcome: Outcome, running: Mapping[Connection, _Running], waiting: int) -> Look:
    events = sum(result.figures.events for result in outcome.results)
    under_way = {own.task: own.progress for own in running.values()}
    events += sum(progress.events for progress in under_way.values() if progress is not None)
    return Look(len(outcome.results) + len(outcome.failed), events, under_way, waiting)


def _receive(reader: Connection, running: dict[Connection, _Running], outcome: Outcome) -> Result | None:
    """Receives one message of a run: its progress, its result, or its end without one. Returns the result."""
    own = running[reader]
    try:
        message = reader.recv()
    except EOFError:
        own.process.join()
        message = f"its process ended with code {own.process.exitcode}"
    if isinstance(message, Progress):
        own.progress = message
        return None
    del running[reader]
    reader.close()
    own.process.join()
    if isinstance(message, Result):
        outcome.results.append(message)
        return message
    outcome.failed.append(Failed(own.task, message))
    return None


def _start(task: Task, do: Do, stop: mmap.mmap) -> tuple[Connection, BaseProcess]:
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(writer, reader, do, task, stop, os.getpid()), daemon=True)
    process.start()
    writer.close()
    return reader, process


def _work(writer: Connection, reader: Connection, do: Do, task: Task, stop: mmap.mmap, parent: int) -> None:
    """Runs in the new process. Ctrl-C and SIGTERM are left to the parent, which requests the end by the byte
    `stop`, in shared memory without a lock. The process ends when its parent does.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    reader.close()
    reported_s = 0.0

    def report(progress: Progress) -> bool:
        nonlocal reported_s
        now_s = time.monotonic()
        if now_s - reported_s >= REPORT_EVERY_S:
            if os.getppid() != parent:
                return False
            reported_s = now_s
            writer.send(progress)
        return not stop[0]

    with closing(writer):
        try:
            message: Result | str = do(task, report)
        except ValueError as error:  # a trace that is bad only with this seed
            message = str(error)
        writer.send(message)
