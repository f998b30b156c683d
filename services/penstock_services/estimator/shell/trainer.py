"""One training, in the worker process: it reads its runs itself.

So the loop that answers neither decodes 10,000 rows nor sends them on: that alone would hold it up for half a second.
"""

import asyncio
from typing import NamedTuple

import asyncpg

from penstock.errors import StoreError
from penstock_services.estimator.core.resource_model.training import Trained, train
from penstock_services.estimator.core.runs import FinishedRun
from penstock_services.estimator.core.step_time.training import train_steps
from penstock_services.estimator.shell.store import RunStore


class Training(NamedTuple):
    """What came of it. `trained`: None where the runs say nothing that a model could learn."""

    runs: int
    """That were looked at."""
    seq: int
    """Of the newest of them."""
    trained: Trained | None


def train_on_latest(dsn: str, cell: str, most: int, current: bytes | None) -> Training:
    """Learns from the newest `most` runs; see `train`. Raises `StoreError` where Postgres cannot be read."""
    runs = asyncio.run(_latest(dsn, cell, most))
    return Training(len(runs), int(runs[-1].seq) if runs else -1, train(runs, current))


class StepTraining(NamedTuple):
    """As `Training`."""

    runs: int
    seq: int
    trained: Trained | None


def train_steps_on_latest(dsn: str, cell: str, most: int, of_one: int, current: bytes | None) -> StepTraining:
    """As `train_on_latest`, from runs that told steps, at most `of_one` of one owner; see `train_steps`."""
    runs = asyncio.run(_latest_steps(dsn, cell, most, of_one))
    return StepTraining(len(runs), int(runs[-1].seq) if runs else -1, train_steps(runs, current))


async def _latest_steps(dsn: str, cell: str, most: int, of_one: int) -> list[FinishedRun]:
    store = await RunStore.open(dsn, cell)
    try:
        return await store.latest_steps(most, of_one)
    finally:
        await store.close()


async def _latest(dsn: str, cell: str, most: int) -> list[FinishedRun]:
    store = await RunStore.open(dsn, cell)
    try:
        return await store.latest(most)
    except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, TimeoutError) as error:
        raise StoreError(f"the runs to learn from could not be read: {error}") from error
    finally:
        await store.close()
