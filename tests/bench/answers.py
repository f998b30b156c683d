"""`why` and `queue` of the gateway with 4,500 waiting jobs: `python -m tests.bench.answers [--profile FILE]`.

The cell of `tests.bench.scheduling.core`, contended, under the default profile, all running jobs started. A
follower's replica folds its ledger; the routes' own functions answer from the replica, to the encoded JSON.
Between two answers the replica takes a record, as in a live cell: what a policy has cached of the former
state does not count. Times are those of the processor. HTTP, roles and Postgres are not in them.
"""

import argparse
import asyncio
import cProfile
import gc
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from time import process_time
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
from fastapi import Request
from fastapi.responses import Response

from penstock.ledger.replica.replica import Replica
from penstock.model.nouns.transitions import JobStatus
from penstock_services.gateway.core.access import local_caller
from penstock_services.gateway.shell.access.roles import CALLER
from penstock_services.gateway.shell.replica.follower import Follower
from penstock_services.gateway.shell.routes import cluster, why
from tests.bench.cases import DEFAULT, Case
from tests.bench.machine import quantile
from tests.bench.scheduling.core import WAITING, CoreBench, prepared

NODES = 1_000
ANSWERS = 50
LISTED = 100  # rows of one answer to `queue`, as the CLI asks


class Measured(NamedTuple):
    """One time per answer, ms of the processor."""

    why_ms: list[float]
    queue_ms: list[float]
    waiting: int
    """Jobs in the queue at the end."""


class Cell:
    """A gateway's replica that stands `records` before the end of a contended cell's ledger."""

    def __init__(self, nodes: int, waiting: int, records: int) -> None:
        bench = prepared(Case(DEFAULT, contended=False), nodes)
        _start(bench)
        bench.queue_up(waiting)
        _start(bench)
        bench.churn(records)
        self._ledger = bench.ledger
        self.follower = Follower(Replica())
        while len(self._ledger) - self.follower.replica.offset > records:
            self.take()
        gateway = SimpleNamespace(follower=self.follower)
        app = SimpleNamespace(state=SimpleNamespace(gateway=gateway))
        why.order_queue(self.follower.state, self.follower.now_ms())  # as the service before it is ready
        self.request = Request({"type": "http", "app": app, CALLER: local_caller("bench")})

    def take(self) -> None:
        """The next record."""
        replica = self.follower.replica
        assert replica.take(self._ledger[replica.offset], replica.offset) is not None

    def queued(self, share: float) -> str:
        """The job at this part of the queue, by arrival."""
        queue = list(self.follower.state.queue.values())
        return queue[int(share * len(queue))]

    async def why(self, share: float) -> Response:
        """The answer about the job at this part of the queue."""
        return await why.why(self.queued(share), self.request)

    async def queue(self, _share: float) -> Response:
        """The first rows of the queue."""
        return await cluster.queue(self.request, await cluster.filters_of(), LISTED)


def _start(bench: CoreBench) -> None:
    """All placed jobs report their start; faster before there is a queue than after."""
    for job in list(bench.state.jobs.values()):
        if job.status is JobStatus.LAUNCHING:
            bench.start(job.job_id)


async def _times_ms(
    cell: Cell, ask: Callable[[float], Awaitable[Response]], shares: Sequence[float]
) -> list[float]:
    times_ms = []
    for share in shares:
        cell.take()
        began = process_time()
        answer = await ask(share)
        times_ms.append((process_time() - began) * 1_000)
        assert answer.status_code == 200
    return times_ms


def measure(
    nodes: int = NODES,
    waiting: int = WAITING,
    answers: int = ANSWERS,
    profiler: cProfile.Profile | None = None,
) -> Measured:
    """So many answers of each kind; `why` of jobs all along the queue. `profiler`: of the answers alone."""
    cell = Cell(nodes, waiting, 2 * answers)
    shares = np.random.default_rng(1).random(answers).tolist()
    gc.collect()
    gc.freeze()
    with profiler or nullcontext():
        why_ms = asyncio.run(_times_ms(cell, cell.why, shares))
        queue_ms = asyncio.run(_times_ms(cell, cell.queue, shares))
    gc.unfreeze()
    return Measured(why_ms, queue_ms, len(cell.follower.state.queue))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Answers of the gateway with a long queue.")
    parser.add_argument("--profile", metavar="FILE", help="write a profile of the answers")
    used = cProfile.Profile() if (path := parser.parse_args().profile) else None
    found = measure(profiler=used)
    for name, times_ms in (("why", found.why_ms), ("queue", found.queue_ms)):
        p50, p99 = (quantile(times_ms, share) for share in (0.5, 0.99))
        print(f"{name}: p50 {p50:.1f} ms, p99 {p99:.1f} ms with {found.waiting} waiting")
    if used is not None:
        used.dump_stats(path)
