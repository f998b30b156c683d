"""Main program of the gateway service: the replica's reader and the HTTP server in one event loop."""

import asyncio
import logging
import signal
import socket
from functools import partial
from typing import Any

from penstock.errors import ConfigurationError
from penstock.keepalive import keep_alive
from penstock.log.open import open_log
from penstock.log.port import Log, Partition
from penstock.model.schema.topics import CELL_TOPICS, Topic
from penstock.runtime.crash_only import crash_only
from penstock.runtime.following.amended_log import AmendedLog, Signer
from penstock.runtime.following.snapshots import Until, load_latest
from penstock.runtime.http.http_server import Server
from penstock.runtime.pool import start_fork_server
from penstock.runtime.settings import Settings
from penstock.runtime.tracing.tracer import tracing
from penstock_services.gateway.shell.access.tls import ServerCertificate
from penstock_services.gateway.shell.app import build_app
from penstock_services.gateway.shell.appender import Appender
from penstock_services.gateway.shell.followers import report
from penstock_services.gateway.shell.gateway import Gateway
from penstock_services.gateway.shell.nodes.log_reader import LogReader
from penstock_services.gateway.shell.options import Options, is_loopback
from penstock_services.gateway.shell.replica.follower import Follower
from penstock_services.gateway.shell.routes.connections import report_missing
from penstock_services.gateway.shell.routes.why import order_queue
from penstock_services.gateway.shell.store import Store

logger = logging.getLogger(__name__)

BACKLOG = 1_024
KEEP_ALIVE_S = 75
TOPICS: dict[str, int] = {Topic.DEAD_LETTERS: 1}


def listening_socket(options: Options) -> socket.socket:
    """Bound and listening. Raises `ConfigurationError` when the address is in use or not of this machine."""
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((options.host, options.port))
        found.listen(BACKLOG)
    except OSError as error:
        found.close()
        raise ConfigurationError(
            f"PENSTOCK_GATEWAY_BIND: {options.host}:{options.port} cannot be bound ({error.strerror}); "
            "stop what listens there or give another port"
        ) from error
    found.setblocking(False)
    keep_alive(found)
    if options.certificate is None and not is_loopback(options.host):
        logger.warning(
            "%s can be reached from other machines and is not encrypted: tokens and jobs pass in clear "
            "text; set PENSTOCK_GATEWAY_TLS_CERT and PENSTOCK_GATEWAY_TLS_KEY, or bind to 127.0.0.1 behind "
            "a proxy that encrypts",
            options.host,
        )
    return found


async def run(
    settings: Settings, stop: asyncio.Event, *, log: Log | None = None, ready: asyncio.Event | None = None
) -> None:
    """The gateway service until `stop`; see penstock.runtime.service."""
    options = Options.from_env()
    await serve(settings, options, stop, log=log, ready=ready)


async def run_alone(
    settings: Settings, stop: asyncio.Event, *, log: Log | None = None, ready: asyncio.Event | None = None
) -> None:
    """As `run`, in a process of its own, whose SIGHUP renews the certificate."""
    options = Options.from_env()
    tls = options.tls()
    if tls is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, tls.renew)
    await serve(settings, options, stop, log=log, ready=ready, tls=tls)


async def serve(
    settings: Settings,
    options: Options,
    stop: asyncio.Event,
    *,
    log: Log | None = None,
    ready: asyncio.Event | None = None,
    listener: socket.socket | None = None,
    tls: ServerCertificate | None = None,
) -> None:
    """As `run`, with given options and, for port 0, a socket that is already bound. `tls`: by default that of
    the options."""
    settings.need_dsn("the gateway")
    tls = tls or options.tls()
    listener = listener or listening_socket(options)
    ready = ready or asyncio.Event()
    try:
        await crash_only("gateway", lambda: _attempt(settings, options, tls, log, listener, ready), stop)
    finally:
        listener.close()


async def _attempt(
    settings: Settings,
    options: Options,
    tls: ServerCertificate | None,
    shared: Log | None,
    listener: socket.socket,
    ready: asyncio.Event,
) -> None:
    """One attempt: log, store, replica, server;
    ends by an exception or cancellation and leaves nothing open."""
    store = Store(settings.need_dsn("the gateway"), settings.cell, settings.log_url)
    start_fork_server()
    key = options.operator_key
    log = AmendedLog.over(
        shared
        if shared is not None
        else await open_log(settings.log_url, "gateway", settings.archive).start(),
        None if key is None else Signer(settings.cell, key),
    )
    try:
        await log.create(TOPICS | dict.fromkeys(CELL_TOPICS, settings.cell_index + 1))
        await store.start()
        with tracing("gateway", settings) as traces:
            latest = partial(
                load_latest, store.pool, settings.cell, log, Partition(Topic.LEDGER, settings.cell_index)
            )
            follower = Follower(await latest(), lambda offset: latest(Until(offset=offset)))
            stopping = asyncio.Event()
            gateway = Gateway(
                settings=settings,
                options=options,
                log=log,
                store=store,
                follower=follower,
                appender=Appender(
                    log, settings, options.max_in_flight, options.answer_within_s, options.operator_key
                ),
                traces=traces,
                logs=LogReader(options, follower, stopping),
                stopping=stopping,
            )
            try:
                await _serve(gateway, tls, listener.dup(), ready)
            finally:
                await gateway.logs.close()
                for pool in (gateway.workers, gateway.ledger.workers, gateway.models.workers):
                    pool.close()
    finally:
        await store.close()
        if shared is None:
            await log.close()


async def _serve(
    gateway: Gateway, tls: ServerCertificate | None, listener: socket.socket, ready: asyncio.Event
) -> None:
    """Catches up, then serves; ends with the first part that fails."""
    server = Server(
        build_app(gateway),
        gateway.stopping,
        tls=None if tls is None else tls.context,
        limits=gateway.options.http_limits,
        timeout_keep_alive=KEEP_ALIVE_S,
    )
    caught_up = asyncio.Event()
    following = asyncio.ensure_future(
        gateway.follower.follow(gateway.log, gateway.settings.cell_index, caught_up)
    )
    catching_up = asyncio.ensure_future(caught_up.wait())
    beside: list[asyncio.Future[None]] = []
    serving: asyncio.Future[None] | None = None
    try:
        await asyncio.wait({following, catching_up}, return_when=asyncio.FIRST_COMPLETED)
        if caught_up.is_set():
            order_queue(gateway.follower.state, gateway.follower.now_ms())
            serving = asyncio.ensure_future(server.serve(sockets=[listener]))
            await asyncio.sleep(0)
            ready.set()
            beside += map(
                asyncio.ensure_future, (report_missing(gateway), gateway.alarms.watch(), report(gateway))
            )
            host, port = listener.getsockname()[:2]
            logger.info("listening on %s://%s:%s", "http" if tls is None else "https", host, port)
            await asyncio.wait({following, serving}, return_when=asyncio.FIRST_COMPLETED)
        if following.done():
            following.result()
    finally:
        gateway.stopping.set()
        parts: list[asyncio.Future[Any]] = [following, catching_up, *beside, *gateway.broken.values()]
        for part in parts:
            part.cancel()
        if serving is not None:
            await asyncio.gather(serving, return_exceptions=True)
        await asyncio.gather(*parts, *gateway.marking, return_exceptions=True)
