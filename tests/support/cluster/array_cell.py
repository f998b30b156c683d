"""Cells of nodes with five GPUs and 28 cores, for stories of cores that are reserved for GPUs, and jobs of
one task that come and end in any order."""

from collections.abc import Callable, Iterator, Sequence

from penstock.model.nouns.nodes import NodeSpec
from penstock.model.nouns.transitions import JobStatus
from penstock_services.placer.core.step import Step
from tests.support.cluster import builders as b
from tests.support.cluster.driver import CellDriver

MINUTE_MS = 60_000


def node(name: str, gpus: int = 5, cores: int = 28) -> NodeSpec:
    return b.node(name, gpus=gpus, cores=cores)


def stopped(driver: CellDriver, job_id: str) -> Step:
    """Its process has ended on SIGTERM."""
    [task_id] = driver.job(job_id).tasks
    return driver.exit(task_id, 143, cause="stopped", signal=None)


def until_all_have_ended(
    driver: CellDriver, submit: Sequence[Callable[[], object]], order: object, minutes: int = 1
) -> Iterator[int]:
    """Submits these, the last first, and ends jobs in any order, each so many minutes; yields what time it
    is, in minutes. `order`: Hypothesis's random numbers."""
    waiting, now = list(submit), 0
    while waiting or driver.state.jobs:
        if waiting and order.random() < 0.6:  # type: ignore[attr-defined]
            waiting.pop()()
        now += minutes
        driver.at(now * MINUTE_MS)
        for job in sorted(driver.state.jobs.values(), key=lambda job: job.order):
            if job.status is JobStatus.LAUNCHING:
                driver.start(job.job_id)
        live = sorted(driver.state.holding.values(), key=lambda job: job.order)
        assert live or not driver.state.queue, "a cell in which nothing runs has room"
        for job in live:
            if job.status is JobStatus.STOPPING:
                stopped(driver, job.job_id)
        running = [job for job in live if job.status is JobStatus.RUNNING and job.job_id in driver.state.jobs]
        if running:
            [task_id] = order.choice(running).tasks  # type: ignore[attr-defined]
            driver.exit(task_id)
        yield now
