"""Runs one node: lock, journal, recovery, join, live; and the same again after whatever ended that life."""

import asyncio
import logging
import os
from collections.abc import Coroutine
from contextlib import ExitStack, suppress
from typing import Any

from penstock.errors import LogError, OffsetOutOfRange
from penstock.log.open import open_log
from penstock.log.port import Log
from penstock.model.types import NodeSpec
from penstock.runtime.service import Run
from penstock.runtime.settings import Settings
from penstock.runtime.tracing.tracer import Tracing, tracing
from penstock_services.node_reporter.options import Options
from penstock_services.node_reporter.shell.faults import FaultInbox, watch_faults
from penstock_services.node_reporter.shell.folders import check_cgroup, make_folder
from penstock_services.node_reporter.shell.inventory import find_node
from penstock_services.node_reporter.shell.journal import Journal, JournalFailed
from penstock_services.node_reporter.shell.node import SERVICE, Node
from penstock_services.node_reporter.shell.processes import Immortal
from penstock_services.node_reporter.shell.recovery import recover
from penstock_services.node_reporter.shell.spawner import LauncherLost, lock_state

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 10.0

logger = logging.getLogger(__name__)


def runner(options: Options) -> Run:
    """The service's entry (see `penstock.runtime.service`) for one node with these options."""

    async def run(
        settings: Settings,
        stop: asyncio.Event,
        *,
        log: Log | None = None,
        ready: asyncio.Event | None = None,
    ) -> None:
        check_cgroup(options.cgroup)
        spec = find_node(options)
        own = await open_log(settings.log_url, SERVICE).start() if log is None else None
        try:
            async with tracing(SERVICE, settings) as traces:
                await _lives(options, settings, spec, own or log, traces, stop, ready)  # type: ignore[arg-type]
        finally:
            if own is not None:
                await own.close()

    return run


async def _lives(
    options: Options, settings: Settings, spec: NodeSpec, log: Log, traces: Tracing, stop: asyncio.Event,
    ready: asyncio.Event | None,
) -> None:  # fmt: skip
    """One life after another until `stop`. Raises `ConfigurationError` when the state folder is another's."""
    pause_s = FIRST_PAUSE_S
    anew = False
    faults = FaultInbox()
    if options.virtual_gpus is None and spec.gpus:
        watch_faults(spec.node_id, len(spec.gpus), faults.deliver)
    while not stop.is_set():
        started_s = asyncio.get_running_loop().time()
        try:
            await _life(options, settings, spec, log, traces, stop, ready, faults, anew=anew)
            return
        except (JournalFailed, LauncherLost, Immortal, LogError) as error:
            logger.error("no order is acted on until this is mended: %s; trying again", error)
            anew = isinstance(error, OffsetOutOfRange)
        if asyncio.get_running_loop().time() - started_s > LONGEST_PAUSE_S:
            pause_s = FIRST_PAUSE_S
        with suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


async def _life(
    options: Options, settings: Settings, spec: NodeSpec, log: Log, traces: Tracing, stop: asyncio.Event,
    ready: asyncio.Event | None, faults: FaultInbox, *, anew: bool,
) -> None:  # fmt: skip
    """From the lock to the stop. `anew`: the journal's position is not in the log; start at the log's end."""
    with ExitStack() as stack:
        make_folder(options.state_dir)
        lock = await lock_state(options.state_dir)
        stack.callback(os.close, lock)
        journal = Journal(options.state_dir / "journal.sqlite")
        stack.callback(journal.close)
        node = Node(options, settings, spec, log, journal, lock, traces)
        stack.callback(node.close)
        stack.callback(faults.detach)
        start = -1 if anew else journal.number("next_offset", -1)
        if start < 0:
            start = (await log.end_offsets([node.orders]))[node.orders]
            journal.write([], [], {"next_offset": start}, durable=True)
        recover(node)
        node.join()
        faults.attach(node.on_fault)
        logger.info("node %s: %d GPUs, %d cores", spec.node_id, len(spec.gpus), spec.cores)
        if ready is not None:
            ready.set()
        if await _until(stop, node.live(start)) and options.drain:
            await node.drain()


async def _until(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Runs `work` until it raises or `stop` is set; True: it was stopped, and has ended."""
    working = asyncio.ensure_future(work)
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait([working, stopping], return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
        return stop.is_set()
    finally:
        for task in (working, stopping):
            task.cancel()
        await asyncio.gather(working, stopping, return_exceptions=True)
