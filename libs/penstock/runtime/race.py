"""Several coroutines at once: until the first of them ends, or until all have."""

import asyncio
from collections.abc import Awaitable, Collection
from typing import Any


async def cancelled(tasks: Collection[asyncio.Future[Any]]) -> None:
    """Cancels these tasks and waits for their ends; their exceptions are dropped."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def first_of(*work: Awaitable[Any], timeout_s: float | None = None) -> bool:
    """Runs these until the first ends and raises its exception, if any; the others are cancelled and awaited.

    False: none ended within `timeout_s`. A future that must survive is given as `asyncio.shield(future)`.
    """
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        ended, _ = await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            task.result()
        return bool(ended)
    finally:
        await cancelled(tasks)


async def all_of(*work: Awaitable[Any]) -> list[Any]:
    """Runs these until all have ended; returns their results in this order. The first exception cancels the
    others and is raised."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await cancelled(tasks)
