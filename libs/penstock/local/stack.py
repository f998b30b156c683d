"""Supervisor of one local installation: starts its parts in order, watches them, ends them in the opposite
order.

Postgres → log → services (this process) → one node-reporter process per node. All state lies in the
folder: `postgres/`, `nodes/<id>/`, `logs/`. Nothing is written elsewhere.
"""

import asyncio
import logging
import os
import shutil
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.markup import escape

from penstock.errors import ConfigurationError
from penstock.ledger.record.record import UndecodableRecord
from penstock.local.children import (
    FIRST_BACKOFF_S,
    START_TIMEOUT_S,
    Command,
    all_ready,
    keep_running,
    watched,
)
from penstock.local.lock import announce, folder_lock, same_log
from penstock.local.options import Options
from penstock.local.services import NAMES, all_services, check_settings
from penstock.local.tasks import end_leftover_tasks, reap_orphans
from penstock.log.open import open_log
from penstock.log.port import Log
from penstock.model.schema.topics import CELL_TOPICS, NODE_PARTITIONS, Topic
from penstock.runtime.database.database_roles import node_urls
from penstock.runtime.database.postgres import resolve_dsn
from penstock.runtime.database.postgres_binaries import DSN_VARIABLE
from penstock.runtime.database.postgres_server import PostgresServer, free_port
from penstock.runtime.files.task_logs import ARCHIVE
from penstock.runtime.keys.log_keys import VARIABLE as LOG_KEY
from penstock.runtime.keys.node_keys import OPERATOR_KEY, key_file_at
from penstock.runtime.parents import adopt_orphans
from penstock.runtime.race import cancelled
from penstock.runtime.settings import Settings

logger = logging.getLogger(__name__)

RACKS = 2  # over which virtual nodes are spread, so that the network levels differ
DRAIN_GRACE_MS = 1_500  # running tasks get so long after SIGTERM; all of `up` must end within 5 s
TASK_LOGS = "task-logs"  # inside the folder: JOB/TASK.log
KEYS = "keys"
CODE = "code"  # folders sent with jobs
OWN_FOLDERS = (
    KEYS,
    CODE,
    "postgres",
    "nodes",
    "logs",
    TASK_LOGS,
)  # which jobs see as empty; the rest of the folder may belong to the user
LOG_BYTES = 16 << 20  # a log file larger than this starts anew


class Running(NamedTuple):
    """The running installation."""

    url: str
    failed: "asyncio.Future[None]"
    """Pending while all is well;
    gets the first error of a service, node-reporter or server that cannot go on."""

    async def until_failure(self) -> None:
        """Never returns; raises that error."""
        await asyncio.shield(self.failed)


@asynccontextmanager
async def running(options: Options, screen: Console) -> AsyncIterator[Running]:
    """A whole installation inside the block; prints a line for each part that is up, and for each failure.

    Raises `ConfigurationError` (folder in use, port taken, …) or the error of the service that cannot start.
    """
    last_s = time.perf_counter()

    def step(what: str, detail: str) -> None:
        nonlocal last_s
        now_s = time.perf_counter()
        screen.print(f"  [bold]{what:<10}[/] {escape(detail):<60} [dim]{now_s - last_s:5.1f} s[/]")
        last_s = now_s

    def warn(text: str) -> None:
        screen.print(f"  [yellow]![/] {escape(text)}", soft_wrap=True)

    async with AsyncExitStack() as stack:
        adopt_orphans()
        stack.callback(reap_orphans)
        lock = stack.enter_context(folder_lock(options.folder))
        same_log(options.folder, options.log)
        logs = options.folder / "logs"
        logs.mkdir(exist_ok=True)
        handler = _log_to(logs / "services.log")
        stack.callback(handler.close)
        stack.callback(logging.getLogger().removeHandler, handler)
        telling = StandingStill(warn)
        logging.getLogger().addHandler(telling)
        stack.callback(logging.getLogger().removeHandler, telling)
        port = _port(options.port)
        (options.folder / CODE).mkdir(mode=0o700, exist_ok=True)
        bind = {
            "PENSTOCK_GATEWAY_BIND": f"127.0.0.1:{port}",
            ARCHIVE: (options.folder / TASK_LOGS).as_uri(),  # for output of nodes that are gone
            LOG_KEY: str(key_file_at(_keys(options.folder) / "logs.key")),
            "PENSTOCK_CODE_DIR": str(options.folder / CODE),
        }
        bind[OPERATOR_KEY] = str(key_file_at(_keys(options.folder) / "operator.key"))
        check_settings({**os.environ, **bind})
        failed = asyncio.get_running_loop().create_future()
        stack.callback(lambda: failed.cancel() or failed.exception())  # marks the exception as retrieved
        dsn = await _postgres(options.folder / "postgres", warn, failed, stack)
        step("Postgres", DSN_VARIABLE if os.environ.get(DSN_VARIABLE) else "embedded")
        archive = os.environ.get("PENSTOCK_ARCHIVE") or None
        settings = Settings(log_url=options.log or dsn, dsn=dsn, archive=archive, otlp=options.otlp)
        log = await _log(settings, stack)
        nodes = await _of_node_reporters(settings, options.node_ids(), warn)
        if not os.environ.get(DSN_VARIABLE) and not (options.folder / "postgres" / "data").exists():
            warn(
                f"the database's user cannot reach {options.folder}: nothing is stored after the end; use "
                "another --folder"
            )
        step("log", "Kafka" if options.log else "in Postgres")
        stack.enter_context(_environment({**settings.environment(), **bind}))
        await stack.enter_async_context(all_services(settings, log, logs / "services.log", failed))
        step("services", ", ".join(NAMES))
        url = f"{'https' if os.environ.get('PENSTOCK_GATEWAY_TLS_CERT') else 'http'}://127.0.0.1:{port}"
        stack.callback(end_leftover_tasks, options.folder / "nodes")
        await stack.enter_async_context(_node_reporters(options, url, nodes, warn, failed))
        step("nodes", _describe_nodes(options))
        if os.geteuid() == 0:
            warn(
                "you are root, and so are the jobs, with few of root's rights; elsewhere node-reporters ask "
                "for --task-user"
            )
        announce(lock, url)
        yield Running(url, failed)


async def _postgres(
    folder: Path, warn: Callable[[str], None], failed: "asyncio.Future[None]", stack: AsyncExitStack
) -> str:
    """The DSN of the configured server, or of an embedded one that is started again whenever it dies."""
    dsn, server = await resolve_dsn(folder)
    if server is not None:
        _write_private(folder / "url", dsn)
        stack.push_async_callback(server.stop)
        stack.push_async_callback(
            cancelled, [watched(_keep_postgres(server, folder, warn), failed, "postgres")]
        )
    return dsn


async def _keep_postgres(server: PostgresServer, folder: Path, warn: Callable[[str], None]) -> None:
    """Restarts the server whenever it dies; ends only by cancellation, or when it cannot be started again."""
    while server.pid is not None:
        await _ended(server.pid)
        warn("Postgres died; starting it again")
        await asyncio.sleep(FIRST_BACKOFF_S)
        await server.start(folder)


async def _ended(pid: int) -> None:
    """Returns when this child process has ended; nothing is polled."""
    loop, over = asyncio.get_running_loop(), asyncio.Event()
    descriptor = os.pidfd_open(pid)
    loop.add_reader(descriptor, over.set)
    try:
        await over.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


async def _log(settings: Settings, stack: AsyncExitStack) -> Log | None:
    """Creates the topics. Returns the log that all services share, None on Kafka: there each has its own."""
    log = await open_log(settings.log_url, "local", settings.archive).start()
    topics = {topic.value: 1 for topic in CELL_TOPICS}
    topics |= {Topic.ORDERS: NODE_PARTITIONS, Topic.TELEMETRY: NODE_PARTITIONS, Topic.DEAD_LETTERS: 1}
    try:
        await log.create(topics)
    except BaseException:
        await log.close()
        raise
    if settings.log_url.startswith("kafka://"):
        await log.close()
        return None
    stack.push_async_callback(log.close)
    return log


async def _of_node_reporters(
    settings: Settings, node_ids: Sequence[str], warn: Callable[[str], None]
) -> dict[str, Settings]:
    """Node → settings without the database, and on an embedded server with the node's own role: it may append
    events about nodes and no others, and read the orders for this node."""
    urls = dict.fromkeys(node_ids, settings.log_url)
    if settings.log_url == settings.dsn:
        if os.environ.get(DSN_VARIABLE, "").strip():
            warn(
                f"the node-reporters have all rights of {DSN_VARIABLE}; start services apart, with a role "
                "for each, where jobs are not trusted"
            )
        else:
            urls = await node_urls(settings.log_url, node_ids)
    return {
        node_id: settings.model_copy(update={"log_url": url, "dsn": None}) for node_id, url in urls.items()
    }


@asynccontextmanager
async def _node_reporters(
    options: Options,
    url: str,
    settings: Mapping[str, Settings],
    warn: Callable[[str], None],
    failed: "asyncio.Future[None]",
) -> AsyncIterator[None]:
    """One process per node of `settings`, restarted when it crashes; all are ended, concurrently, when the
    block ends. `url`: of the gateway, for jobs."""

    def on_crash(name: str, code: int, backoff_s: float) -> None:
        warn(f"{name} ended with code {code}; starting it again in {backoff_s:.1f} s")

    ready = [asyncio.Event() for _ in settings]
    tasks = []
    for number, (node_id, own) in enumerate(settings.items()):
        command = _node_command(options, url, own, number, node_id)
        tasks.append(watched(keep_running(command, ready[number], on_crash), failed, node_id))
    try:
        if not await all_ready(ready, failed, START_TIMEOUT_S):
            raise ConfigurationError(
                f"the node-reporters were not ready within {START_TIMEOUT_S:.0f} s; see "
                f"{options.folder / 'logs'}"
            )
        yield
    finally:
        await cancelled(tasks)


def _node_command(options: Options, url: str, settings: Settings, number: int, node_id: str) -> Command:
    """Command line of one node's node-reporter."""
    state = options.folder / "nodes" / node_id
    state.mkdir(parents=True, exist_ok=True)
    argv = [
        sys.executable,
        "-P",  # the user's folder may hold a queue.py
        "-m",
        "penstock_services.node_reporter",
        "--node-id",
        node_id,
        "--state-dir",
        str(state),
    ]
    argv += ["--log-dir", str(options.folder / TASK_LOGS), "--drain", "--drain-grace-ms", str(DRAIN_GRACE_MS)]
    argv += ["--rack", f"rack-{number % RACKS}", "--task-gateway", url]
    for name in OWN_FOLDERS:
        argv += ["--hide", str(options.folder / name)]
    argv += ["--allow-root"] if os.geteuid() == 0 else []
    if not options.real:
        argv += ["--virtual-gpus", str(options.virtual_gpus), "--virtual-gpu-model", options.gpu_model]
        argv += ["--virtual-gpu-memory", f"{options.gpu_memory_mib}MiB", "--cores", str(options.cores)]
    log_path = options.folder / "logs" / f"{node_id}.log"
    _start_anew(log_path)
    return Command(node_id, argv, _node_environment(settings, state / "log-url"), log_path)


def _node_environment(settings: Settings, log_url: Path) -> dict[str, str]:
    """Environment of a node-reporter: the log's password is in a file, the database's is left out, as it is
    not needed."""
    _write_private(log_url, settings.log_url)
    found = {**os.environ, **settings.environment(), "PENSTOCK_LOG_FILE": str(log_url)}
    absent = ("PENSTOCK_LOG", DSN_VARIABLE, "PENSTOCK_DSN_FILE")
    return {name: value for name, value in found.items() if name not in absent}


def _keys(folder: Path) -> Path:
    """The folder of keys, which jobs see as empty."""
    found = folder / KEYS
    found.mkdir(mode=0o700, exist_ok=True)
    return found


def _write_private(path: Path, text: str) -> None:
    path.touch(mode=0o600)
    path.write_text(text)


def _describe_nodes(options: Options) -> str:
    if options.real:
        return "node-0 with this machine's GPUs"
    ids = options.node_ids()
    names = ", ".join(ids) if len(ids) <= 4 else f"{ids[0]} … {ids[-1]}"
    memory = f"{options.gpu_memory_mib / 1024:.0f} GiB"
    return f"{names}: {options.virtual_gpus} virtual {options.gpu_model} ({memory}) each"


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables that services in this process read, and restores them after the block."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _port(asked: int) -> int:
    """The port, if it is free now; 0 asks for any."""
    if asked == 0:
        return free_port()
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", asked))
        except OSError as error:
            raise ConfigurationError(
                f"--port {asked}: in use on 127.0.0.1 ({error.strerror}); stop what listens there or give "
                "another"
            ) from error
    return asked


def _log_to(path: Path) -> logging.Handler:
    """Sends this process's log to a file: the screen belongs to the user."""
    _start_anew(path)
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(os.environ.get("PENSTOCK_LOG_LEVEL", "INFO").upper())
    return handler


class StandingStill(logging.Handler):
    """Tells the user once of each ledger record before which services stand still; they go on by themselves
    after its repair."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        super().__init__()
        self._warn = warn
        self._told: set[int] = set()

    def emit(self, record: logging.LogRecord) -> None:
        found = getattr(record, "undecodable", None)
        if isinstance(found, UndecodableRecord) and found.offset not in self._told:
            self._told.add(found.offset)
            self._warn(f"{found}. No service of this cell reads on, until you repair it: {found.remedy}")


def _start_anew(path: Path) -> None:
    if path.exists() and path.stat().st_size > LOG_BYTES:
        shutil.move(path, path.with_suffix(".old"))
