"""Process pool for simulation runs: one forked process per run. Which run is served first makes no difference to any result.

It is not the worker pool of services (`penstock.runtime.pool`), whose workers are shared by tasks: a run inherits the trace
that was read, its memory goes with it, it reports its progress, and a run that the kernel kills ends no other.
"""

import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import NamedTuple

from penstock.simulator.runs import OnProgress, Progress, Result

REPORT_EVERY_S = 0.2
PATIENCE_S = 5.0  # for a process that was asked to end


class Task(NamedTuple):
    """A run to come. `draws`: whether charts are wanted."""

    profile: str
    seed: int
    draws: bool

    def __str__(self) -> str:
        return f"{self.profile} with seed {self.seed}"


Do = Callable[[Task, OnProgress], Result]


class Failed(NamedTuple):
    """A run without a result, and why."""

    task: Task
    why: str


@dataclass(slots=True)
class Outcome:
    """`failed` and `results` in order of their ends, not sorted."""

    results: list[Result] = field(default_factory=list)
    failed: list[Failed] = field(default_factory=list)
    interrupted: bool = False


@dataclass(slots=True)
class _Running:
    process: BaseProcess
    progress: Progress | None = None


class Look(NamedTuple):
    """What a progress bar may show. `runs`: share of each run that is under way."""

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
    """Performs all tasks, and those that `then` asks for after a result; at most `workers` at once.

    Ctrl-C ends the runs under way; what was finished stands. `look` is called a few times a second.
    """
    outcome, waiting = Outcome(), deque(tasks)
    running: dict[Connection, tuple[Task, _Running]] = {}
    with ExitStack() as stack:
        stack.callback(_end, running)
        try:
            while waiting or running:
                while waiting and len(running) < workers:
                    task = waiting.popleft()
                    reader, process = _start(task, do)
                    running[reader] = task, _Running(process)
                for found in wait(list(running), timeout=REPORT_EVERY_S):
                    assert isinstance(found, Connection)
                    waiting.extend(_take(found, running, outcome, then))
                events = sum(result.figures.events for result in outcome.results)
                under_way = {task: own.progress for task, own in running.values()}
                events += sum(progress.events for progress in under_way.values() if progress is not None)
                done = len(outcome.results) + len(outcome.failed)
                look(Look(done, events, under_way, len(waiting)))
        except KeyboardInterrupt:
            outcome.interrupted = True
    return outcome


def _take(
    reader: Connection,
    running: dict[Connection, tuple[Task, _Running]],
    outcome: Outcome,
    then: Callable[[Result], Iterable[Task]],
) -> Iterable[Task]:
    """One message of a run: how far it is, its result, or its end without one."""
    task, own = running[reader]
    try:
        message = reader.recv()
    except EOFError:
        own.process.join()
        message = f"its process ended with code {own.process.exitcode}"
    if isinstance(message, Progress):
        own.progress = message
        return ()
    del running[reader]
    reader.close()
    own.process.join()
    if isinstance(message, Result):
        outcome.results.append(message)
        return then(message)
    outcome.failed.append(Failed(task, message))
    return ()


def _start(task: Task, do: Do) -> tuple[Connection, BaseProcess]:
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(writer, reader, do, task, os.getpid()), daemon=True)
    process.start()
    writer.close()
    return reader, process


def _work(writer: Connection, reader: Connection, do: Do, task: Task, parent: int) -> None:
    """In the new process. Ctrl-C is the parent's; the process ends when its parent does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
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
        return True

    with closing(writer):
        try:
            message: Result | str = do(task, report)
        except ValueError as error:  # a trace that only this seed makes bad
            message = str(error)
        writer.send(message)


def _end(running: Mapping[Connection, tuple[Task, _Running]]) -> None:
    """Ends what still runs."""
    for _, own in running.values():
        own.process.terminate()
    for reader, (_, own) in running.items():
        own.process.join(PATIENCE_S)
        if own.process.is_alive():
            own.process.kill()
            own.process.join()
        reader.close()
