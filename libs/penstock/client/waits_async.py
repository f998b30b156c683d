"""Pauses, and frames of a stream within a time limit, for the asynchronous client; `waits` has the same for
the blocking one."""

import asyncio
from asyncio import sleep
from collections.abc import AsyncGenerator

import httpx_sse

from penstock.client.streams import Waiting

__all__ = ["frames", "sleep"]


async def frames(
    source: httpx_sse.EventSource, waiting: Waiting
) -> AsyncGenerator[httpx_sse.ServerSentEvent, None]:
    """The frames until the time limit, which bounds the read alone: between two frames the caller's own code
    runs. Raises TimeoutError."""
    found = source.aiter_sse()
    while True:
        async with asyncio.timeout(waiting.left_s):
            frame = await anext(found, None)
        if frame is None:
            return
        yield frame
