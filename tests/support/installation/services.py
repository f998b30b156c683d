"""Services that a test starts: in its own process until they are ready, or as processes with a port of their
own choice."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, TypeVar

import psutil

Found = TypeVar("Found")


async def ready_or_ended(ready: asyncio.Event, service: "asyncio.Future[None]") -> None:
    """Until a service in this process is ready, or has ended: then the caller awaits it, which raises why."""
    waiting = asyncio.ensure_future(ready.wait())
    watched: set[asyncio.Future[Any]] = {service, waiting}
    try:
        await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()


@asynccontextmanager
async def beside(
    service: Coroutine[Any, Any, None], stop: asyncio.Event, ready: asyncio.Event
) -> AsyncIterator["asyncio.Task[None]"]:
    """A service in this process, ready and then ended by `stop`, beside the block. Where it ends before, the
    block ends, too, with what ended it."""
    block, task = asyncio.current_task(), asyncio.create_task(service)
    assert block is not None

    def ended(_: "asyncio.Task[None]") -> None:
        if not stop.is_set():
            block.cancel()

    try:
        await ready_or_ended(ready, task)
        task.add_done_callback(ended)
        yield task
    except asyncio.CancelledError:
        if not task.done() or not block.cancelling():
            raise
        block.uncancel()
        task.result()
        raise AssertionError("the service has ended by itself") from None
    finally:
        stop.set()
        await asyncio.wait({task})
    task.result()


def while_running(
    service: Coroutine[Any, Any, None], stop: asyncio.Event
) -> AbstractAsyncContextManager["asyncio.Task[None]"]:
    """The same for one that says nothing when it is ready."""
    at_once = asyncio.Event()
    at_once.set()
    return beside(service, stop, at_once)


async def while_alive(wanted: Awaitable[Found], *services: "asyncio.Future[Any]") -> Found:
    """What is awaited. Raises what ended one of the services before, from which it was to come."""
    coming = asyncio.ensure_future(wanted)
    try:
        watched: set[asyncio.Future[Any]] = {coming, *services}
        await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
        if not coming.done():
            raise AssertionError(f"ended by itself: {[each.result() for each in services if each.done()]}")
        return await coming
    finally:
        coming.cancel()


def port_of(pid: int) -> int:
    """The one TCP port at which a process that was given port 0 listens."""
    [port] = {one.laddr.port for one in psutil.Process(pid).net_connections("tcp") if one.status == "LISTEN"}
    return int(port)
