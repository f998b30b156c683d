"""Postgres, Kafka and service processes for the benches: fresh for each, gone afterwards."""

import asyncio
import contextlib
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import psutil

from infra.devservers.kafka import kafka_broker
from infra.devservers.processes import Child
from penstock.log.topic_settings import topic_partitions
from penstock.runtime.keys.node_keys import OPERATOR_KEY, key_file_at
from penstock.runtime.settings import Settings
from tests.support.installation.postgres import embedded_postgres

READY_TIMEOUT_S = 60.0
KINDS = ("embedded", "kafka")


@dataclass(frozen=True, slots=True)
class Servers:
    """What is up. `pids`: the servers' own processes, by name."""

    folder: Path
    settings: Settings
    pids: dict[str, int]


@contextlib.contextmanager
def bench_folder() -> Iterator[Path]:
    """A short path that Postgres' own user can reach, also when we are root."""
    with tempfile.TemporaryDirectory(prefix="psbench-", dir="/tmp") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@contextlib.asynccontextmanager
async def servers(kind: str) -> AsyncIterator[Servers]:
    """Postgres always; with "kafka" also a broker, which then carries the log."""
    async with contextlib.AsyncExitStack() as stack:
        folder = stack.enter_context(bench_folder())
        dsn = await stack.enter_async_context(embedded_postgres(folder / "pg"))
        pids = {"postgres": _postgres_pid()}
        url = dsn
        if kind == "kafka":
            broker = stack.enter_context(await asyncio.to_thread(_Broker))
            pids["broker"] = broker.pid
            url = broker.url
        key = str(key_file_at(folder / "operator.key"))
        stack.enter_context(patch.dict(os.environ, {OPERATOR_KEY: key}))
        yield Servers(folder, Settings(log_url=url, dsn=dsn), pids)


class _Broker:
    """A running broker with Penstock's topics; made in a thread, since a start takes seconds."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        broker = self._stack.enter_context(kafka_broker())
        broker.create_topics(topic_partitions())
        self.pid, self.url = broker.pid, broker.url()

    def __enter__(self) -> "_Broker":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def _postgres_pid() -> int:
    """Of the postmaster that this process has just started."""
    return next(child.pid for child in psutil.Process().children() if "postgres" in child.name())


@contextlib.asynccontextmanager
async def process(
    name: str, argv: Sequence[str], found: Servers, env: Mapping[str, str] | None = None
) -> AsyncIterator[Child]:
    """`python ARGV…` with the servers' settings, once it has printed "ready"."""
    child = start_process(name, argv, found, env)
    try:
        await asyncio.to_thread(
            child.wait_ready, lambda: b"ready\n" in child.log_path.read_bytes(), READY_TIMEOUT_S
        )
        yield child
    finally:
        await asyncio.to_thread(child.stop)


def start_process(
    name: str, argv: Sequence[str], found: Servers, env: Mapping[str, str] | None = None
) -> Child:
    """The same without waiting; stopping it is the caller's."""
    return Child(
        name,
        [sys.executable, *argv],
        log_path=found.folder / f"{name}.log",
        env={**os.environ, **found.settings.environment(), "PENSTOCK_LOG_LEVEL": "WARNING", **(env or {})},
    )
