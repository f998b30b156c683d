"""Main loop of one node in sessions: lock, journal, recovery, join, work;
after any failure the next session begins."""

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.backoff import Backoff
from penstock.errors import ConfigurationError, LogError, OffsetOutOfRange
from penstock.log.open import open_log
from penstock.log.port import Log
from penstock.model.inputs.external_events import GpuFaulted
from penstock.runtime.files.task_logs import is_at
from penstock.runtime.race import cancelled, first_of
from penstock.runtime.service import Run
from penstock.runtime.settings import Settings
from penstock.runtime.tracing.tracer import Tracing, tracing
from penstock_services.node_reporter.options import Options
from penstock_services.node_reporter.shell.journal import JournalFailed
from penstock_services.node_reporter.shell.link.address import own_address
from penstock_services.node_reporter.shell.linux import LinuxHost
from penstock_services.node_reporter.shell.node import SERVICE, Node
from penstock_services.node_reporter.shell.ports import Host, Immortal, JoinStale, LauncherLost, OtherMachine
from penstock_services.node_reporter.shell.recovery import recover
from penstock_services.node_reporter.shell.watchdogs.lease import LeaseLapsed

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 10.0
OTHER_MACHINE = (
    "give this one another --node-id, or fence the other first; if it is the same machine with a new "
    "/etc/machine-id, give it the former --machine-id"
)
MAX_WAITING_FAULTS = 256  # between two sessions

if TYPE_CHECKING:
    from penstock_services.node_reporter.shell.logs.archiver import Archiver

logger = logging.getLogger(__name__)


def runner(options: Options, host: Host | None = None, *, own_process: bool = False) -> Run:
    """The service's entry (see `penstock.runtime.service`) for one node with these options. `host`: this
    machine.

    `own_process`: the reporter is alone in this process, which is killed when it hangs (`reporter_watch`).
    """

    async def run(
        settings: Settings,
        stop: asyncio.Event,
        *,
        log: Log | None = None,
        ready: asyncio.Event | None = None,
    ) -> None:
        machine = host or LinuxHost(
            replace(options, address=await own_address(options.address, settings.log_url)),
            own_process=own_process,
        )
        own = await open_log(settings.log_url, SERVICE).start() if log is None else None
        try:
            async with AsyncExitStack() as stack:
                traces = await stack.enter_async_context(tracing(SERVICE, settings))
                await stack.enter_async_context(_connected(options))
                if isinstance(machine, LinuxHost):
                    await stack.enter_async_context(_serving_logs(machine))
                joined = own or log
                assert joined is not None, "opened above where the caller has none"
                await _sessions(options, settings, machine, joined, traces, stop, ready)
        finally:
            if own is not None:
                await own.close()

    return run


@asynccontextmanager
async def _connected(options: Options) -> AsyncIterator[None]:
    """With a standing connection to the gateway, if one is named."""
    if options.gateway is None:
        yield
        return
    from penstock_services.node_reporter.shell.link.connection import Connection

    connection = Connection(options.gateway, options.node_id, options.gateway_token_file, options.gateway_ca)
    keeping = asyncio.create_task(connection.keep(), name="standing connection")
    try:
        yield
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)


@asynccontextmanager
async def _serving_logs(host: LinuxHost) -> AsyncIterator[None]:
    """With a server of the tasks' output if gateway and node share a secret, and with copies to the archive,
    if one is named."""
    options, work = host.options, []
    if options.log_archive is not None and not is_at(options.log_archive, options.log_dir):
        from penstock.runtime.files.log_archive import LogArchive
        from penstock_services.node_reporter.shell.logs.archiver import Archiver

        archive = LogArchive(options.log_archive)
        host.archiver = Archiver(archive, options.state_dir / "archive", options.log_dir)
        work.append(_beside(_copies(host, host.archiver), "copies to the archive"))
    if options.log_key is not None or options.gateway_token_file is not None:
        from penstock_services.node_reporter.shell.checkpoints.checkpoint_server import PATH
        from penstock_services.node_reporter.shell.link.log_server import NotBound, TaskLogServer

        try:
            server = TaskLogServer(options, {PATH: host.checkpoint_server()}, host.commands())
        except NotBound as error:
            if options.log_bind is not None:
                raise
            logger.warning("tasks' output is not served: %s", error)
        else:
            host.spec = msgspec.structs.replace(host.spec, logs=server.announced)
            work.append(_beside(server.serve(), "the server of tasks' output"))
    try:
        yield
    finally:
        await cancelled(work)


async def _copies(host: LinuxHost, archiver: "Archiver") -> None:
    # Before, a task whose start is under way looks like one that has ended: neither has a record.
    await host.locked.wait()
    await archiver.run(host.has_ended)


def _beside(work: Coroutine[Any, Any, None], what: str) -> "asyncio.Task[None]":
    """Background work that no task and no order depends on: its end is only logged."""

    def ended(task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("%s ended, restart the node-reporter: %r", what, error)

    task = asyncio.create_task(work, name=what)
    task.add_done_callback(ended)
    return task


async def _sessions(
    options: Options,
    settings: Settings,
    host: Host,
    log: Log,
    traces: Tracing,
    stop: asyncio.Event,
    ready: asyncio.Event | None,
) -> None:
    """One session after another until `stop`.
    Raises `ConfigurationError` when another reporter has the state folder."""
    backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
    anew = False
    cleared = asyncio.Event()
    faults: asyncio.Queue[GpuFaulted] = asyncio.Queue(MAX_WAITING_FAULTS)

    def deliver(fault: GpuFaulted) -> None:
        with suppress(asyncio.QueueFull):
            faults.put_nowait(fault)

    host.watch_gpus(deliver)
    while not stop.is_set():
        started_s = asyncio.get_running_loop().time()
        try:
            await _session(options, settings, host, log, traces, stop, ready, faults, cleared, anew=anew)
            return
        except (JournalFailed, LauncherLost, Immortal, JoinStale, LeaseLapsed, LogError) as error:
            logger.error("orders are not carried out until this is mended: %s; trying again", error)
            anew = isinstance(error, OffsetOutOfRange)
        if asyncio.get_running_loop().time() - started_s > LONGEST_PAUSE_S:
            backoff.reset()
        await first_of(stop.wait(), timeout_s=backoff.next_s())


async def _session(
    options: Options,
    settings: Settings,
    host: Host,
    log: Log,
    traces: Tracing,
    stop: asyncio.Event,
    ready: asyncio.Event | None,
    faults: "asyncio.Queue[GpuFaulted]",
    cleared: asyncio.Event,
    *,
    anew: bool,
) -> None:
    """From the lock to the stop. `anew`: the journal's position is not in the log; start at the log's end.

    `cleared`: the faults of earlier starts are dropped, if that was requested.
    """
    with ExitStack() as stack:
        lock = await host.lock()
        stack.callback(host.unlock, lock)
        journal = host.open_journal()
        stack.callback(journal.close)
        if options.clear_gpu_faults and not cleared.is_set():
            journal.clear_faults()
            cleared.set()
        node = Node(options, settings, host, log, journal, lock, traces)
        stack.callback(node.close)
        start = -1 if anew else journal.number("next_offset", -1)
        end = (await log.end_offsets([node.orders]))[node.orders]
        if not 0 <= start <= end:
            start = end  # of another log: orders of this one up to that position would be skipped
            journal.write([], [], {"next_offset": start}, durable=True)
        recover(node)
        node.join()
        spec = node.spec
        logger.info(
            "node %s at %s: %d GPUs, %d cores", spec.node_id, spec.address, len(spec.gpus), spec.cores
        )
        if ready is not None:
            ready.set()
        try:
            await first_of(node.live(start, faults), stop.wait())
        except OtherMachine as error:
            logger.error("%s; its tasks here are stopped", error)
            await node.fence()
            raise ConfigurationError(f"{error}; {OTHER_MACHINE}") from error
        except LeaseLapsed as error:
            logger.error("%s: tasks are stopped, since the cell may take them for dead", error)
            await node.fence()
            raise
        if options.drain:
            await node.drain()
