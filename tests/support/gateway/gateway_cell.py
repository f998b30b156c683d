"""A gateway and a projector on a real Postgres, a log that can be put into trouble, and a placer driven by
hand."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from unittest.mock import patch

import httpx

from penstock.client import connection, requests, streams
from penstock.errors import LogError
from penstock.log.over import LogOver
from penstock.log.port import Log, Message, Partition, Reader, Record
from penstock.log.postgres.embedded import EmbeddedLog
from penstock.model.schema.topics import CELL_TOPICS, Topic
from penstock.model.wire.envelope import Envelope, from_wire
from penstock.runtime.settings import Settings
from penstock.tls import client_context
from penstock_services.gateway.shell import service as gateway_service
from penstock_services.gateway.shell.options import Options
from penstock_services.gateway.shell.routes.commands import checkpoints, cores, holds, moves, operators
from penstock_services.projector.shell import service as projector_service
from tests.support.cluster.hand_placer import HandPlacer
from tests.support.installation.services import ready_or_ended
from tests.support.node_reporter.forgeries import GATEWAYS
from tests.support.story import told
from tests.support.waiting import await_until

DAY_S = 86_400.0
"""In place of the gateway's own bounds: longer than any run of the tests."""
JSON = {"content-type": "application/json"}
SPEC = {"command": ["true"], "name": "digits", "owner": "ana"}


class Faulty(LogOver):
    """A log whose appends can be held up, or fail, and whose reads can, as when its disk or broker is in
    trouble."""

    def __init__(self, inner: Log) -> None:
        super().__init__(inner)
        self.gate, self.reads = asyncio.Event(), asyncio.Event()
        self.error: LogError | None = None
        self.gate.set()
        self.reads.set()

    async def start(self) -> Self:
        return self

    async def append(self, messages: Sequence[Message]) -> list[int]:
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        return await super().append(messages)

    def reader(self, start: Mapping[Partition, int], *, batch_ms: int = 0) -> Reader:
        return _Late(super().reader(start, batch_ms=batch_ms), self.reads)

    async def close(self) -> None:
        return None


class _Late:
    """A reader whose records come only while `gate` is set."""

    def __init__(self, inner: Reader, gate: asyncio.Event) -> None:
        self._inner, self._gate = inner, gate

    async def read(self, *, max_records: int = 1_000, timeout_ms: int | None = None) -> list[Record]:
        found = await self._inner.read(
            max_records=max_records, timeout_ms=timeout_ms
        )  # clock: the caller's own bound
        await self._gate.wait()
        return found

    def position(self, partition: Partition) -> int:
        return self._inner.position(partition)

    async def close(self) -> None:
        await self._inner.close()


@dataclass
class Cell:
    """A gateway and a projector that run, a placer driven by hand, and a client."""

    log: Faulty
    placer: HandPlacer
    http: httpx.AsyncClient
    url: str
    dsn: str
    services: Sequence["asyncio.Task[None]"] = ()

    async def tell(self) -> None:
        """The placer's records so far, in the log."""
        await self.placer.send(self.log.inner)

    async def caught_up(self, headers: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Waits until gateway and projector have read everything appended; the status then."""
        status: dict[str, Any] = {}

        async def of_both() -> dict[str, Any]:
            nonlocal status
            self.look_at_services()
            status = (await self.http.get("/v1/status", headers=headers)).json()
            last = min(status.get("seq", 0), status.get("projected_seq", 0))
            return status if last >= len(self.placer.values) else {}

        return await await_until(of_both, lambda: f"record {len(self.placer.values)} in both: {status}")

    def look_at_services(self) -> None:
        """Raises what ended one of them, for which nothing waits in vain."""
        for service in self.services:
            if service.done():
                service.result()
                raise AssertionError(f"{service.get_name()} has ended by itself")

    async def written(self, topic: Topic) -> list[Envelope]:
        """Everything on an input topic."""
        place = Partition(topic, 0)
        end = (await self.log.inner.end_offsets([place]))[place]
        reader = self.log.inner.reader({place: 0})
        records: list[Record] = []
        while len(records) < end:
            records += await reader.read()
        await reader.close()
        return [from_wire(record.headers, record.value, topic) for record in records]


@asynccontextmanager
async def running(dsn: str, ca: Path | None = None, **changes: Any) -> AsyncIterator[Cell]:
    """`changes`: of the gateway's options; `ca`: authority of the certificate among them.

    The gateway waits for its log however long that takes, unless `answer_within_s` is changed; clients in
    this process, for the gateway.
    """
    inner = await EmbeddedLog(dsn, "test").start()
    await inner.create(dict.fromkeys(CELL_TOPICS, 1))
    log, settings = Faulty(inner), Settings(log_url=dsn, dsn=dsn)
    options = Options(
        **{"host": "127.0.0.1", "port": 0, "operator_key": GATEWAYS, "answer_within_s": DAY_S, **changes}
    )
    listener = gateway_service.listening_socket(options)
    url = f"{'https' if ca else 'http'}://127.0.0.1:{listener.getsockname()[1]}"
    verify = client_context(str(ca), "ca") if ca else False
    stop, ready, clients = asyncio.Event(), [asyncio.Event(), asyncio.Event()], ExitStack()
    tasks = [
        asyncio.create_task(
            projector_service.run(settings, stop, log=inner, ready=ready[0]), name="projector"
        ),
        asyncio.create_task(
            gateway_service.serve(settings, options, stop, log=log, ready=ready[1], listener=listener),
            name="gateway",
        ),
    ]
    try:
        async with httpx.AsyncClient(base_url=url, timeout=None, verify=verify) as http:
            clients.enter_context(_unhurried_clients())
            cell = Cell(log, HandPlacer(), http, url, dsn, tasks)
            with told("the placer driven by hand, last records", lambda: cell.placer.story()):
                for task, event in zip(tasks, ready, strict=True):
                    await ready_or_ended(event, task)
                cell.look_at_services()
                yield cell
    finally:
        stop.set()
        clients.close()
        log.gate.set()
        log.reads.set()
        await asyncio.gather(*tasks)
        await inner.close()


@contextmanager
def _unhurried_clients() -> Iterator[None]:
    """Their requests take as long as they take; what the caller limits is limited as ever."""
    new = requests.Request.__new__
    with ExitStack() as stack:
        stack.enter_context(patch.object(streams, "LEAST_S", DAY_S))
        for used in (connection, streams):
            stack.enter_context(patch.object(used, "TIMEOUT_S", DAY_S))
        stack.enter_context(patch.object(new, "__defaults__", (*(new.__defaults__ or ())[:-1], DAY_S)))
        yield


@contextmanager
def patient() -> Iterator[None]:
    """Answers that wait for the placer wait for it however long that takes: a hand drives it, on a busy
    machine."""
    with ExitStack() as stack:
        for module in (operators, holds, cores):
            stack.enter_context(patch.object(module, "APPLIED_WITHIN_S", DAY_S))
        stack.enter_context(patch.object(moves, "DECIDED_WITHIN_S", DAY_S))
        stack.enter_context(patch.object(checkpoints, "SAVED_WITHIN_S", DAY_S))
        yield


def problem(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    body: dict[str, Any] = response.json()
    assert set(body) == {"type", "title", "status", "detail", "errors"}
    assert body["status"] == status
    return body
