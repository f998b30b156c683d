"""Output of one task, from the node where it ran, else from the archive; over restarts of that node's reporter."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import NamedTuple
from urllib.parse import urlencode

import httpx

from penstock.clock import wall_ms
from penstock.errors import ConfigurationError
from penstock.retry import Backoff
from penstock.runtime.keepalive import SOCKET_OPTIONS
from penstock.runtime.log_keys import OFFSET, PATH, VARIABLE, LogKey, key_in_file, key_of_token
from penstock.runtime.race import first_of
from penstock.runtime.task_logs import CHUNK_BYTES, Wanted
from penstock.tls import SYSTEM_CA, client_context
from penstock_services.gateway.core.log_text import Member, Trouble
from penstock_services.gateway.shell.follower import Follower
from penstock_services.gateway.shell.options import Options
from penstock_services.gateway.shell.tokens import TokenFile

MAX_CONNECTIONS = 1_024
CONNECT_TIMEOUT_S = 3.0
READ_TIMEOUT_S = 30.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 5.0
QUIET_FAILURES = 4  # a restart of a reporter takes about so many attempts; then the reader learns of it
MAX_REASON_BYTES = 1_024
CA = "PENSTOCK_NODE_LOG_CA"

logger = logging.getLogger(__name__)


class Ask(NamedTuple):
    """The part of each log that is wanted."""

    tail: int | None = None
    since_ms: int | None = None
    age_ms: int | None = None
    """Only what is no older, by the clock of the node."""


class Unreadable(Exception):
    """Why a log cannot be read, in one line."""


class NoFile(Unreadable):
    """The node answers and has no such log."""


class LogReader:
    """One per gateway."""

    def __init__(self, options: Options, follower: Follower, stopping: asyncio.Event) -> None:
        """Raises `ConfigurationError`."""
        self._options, self._follower, self._stopping = options, follower, stopping
        self._tokens = None if options.tokens is None else TokenFile(options.tokens)
        self._key = None if options.node_log_key is None else key_in_file(options.node_log_key)
        self._clients: dict[bool, httpx.AsyncClient] = {}
        self._archive = None
        if options.node_log_archive is not None:
            from penstock.runtime.log_archive import LogArchive

            self._archive = LogArchive(options.node_log_archive)

    async def close(self) -> None:
        for client in self._clients.values():
            await client.aclose()

    async def read(
        self, member: Member, ask: Ask, follow: bool, over: Callable[[], bool]
    ) -> AsyncIterator[bytes | Trouble]:
        """What is there now; with `follow` also what comes, until `over` holds: the ledger knows that the task has exited."""
        offset: int | None = None
        backoff, failures = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S), 0
        while not self._stopping.is_set():
            change = self._follower.next_change()
            last = not follow or over()  # asked before the last look at the log
            try:
                async with _Reading(self, member, ask, offset, follow=not last) as reading:
                    while chunk := await self._next(reading, over if not last else None):
                        offset = reading.offset
                        failures = 0
                        backoff.reset()
                        yield chunk
                if last:
                    return
            except Unreadable as error:
                if last:
                    async for found in self._archived(member, ask, offset, error):
                        yield found
                    return
                failures += 1
                if failures == QUIET_FAILURES:
                    yield Trouble(f"{error}; waiting for it", member, final=False)
                await first_of(change.wait(), self._stopping.wait(), timeout_s=backoff.next_s())

    async def _next(self, reading: "_Reading", over: Callable[[], bool] | None) -> bytes:
        """The next chunk; empty: it has ended, or the task is over. Raises `Unreadable`."""
        if over is None:
            return await reading.chunk()
        coming = asyncio.ensure_future(reading.chunk())
        try:
            while not coming.done() and not over() and not self._stopping.is_set():
                change = self._follower.next_change()
                if not over():
                    await first_of(asyncio.shield(coming), change.wait(), self._stopping.wait())
            return coming.result() if coming.done() else b""
        finally:
            coming.cancel()
            with suppress(asyncio.CancelledError, Unreadable):
                await coming

    async def _archived(
        self, member: Member, ask: Ask, offset: int | None, error: Unreadable
    ) -> AsyncIterator[bytes | Trouble]:
        """The log, or the rest of it, from the archive; `error`: why not from the node."""
        if self._archive is not None:
            since_ms = ask.since_ms if ask.age_ms is None else wall_ms() - ask.age_ms
            wanted = Wanted(ask.tail, since_ms, offset)
            try:
                file, _ = await asyncio.to_thread(self._archive.open, member.job_id, member.task_id, wanted)
                with file:
                    while chunk := await asyncio.to_thread(file.read, CHUNK_BYTES):
                        yield chunk
                return
            except FileNotFoundError:
                more = "the archive does not have it either"
            except Exception as failed:  # noqa: BLE001 - stores raise what they like, and one log is not the gateway's end
                logger.warning("archive %s: %r", self._archive.name, failed)
                more = f"the archive cannot be read: {type(failed).__name__}"
            error = type(error)(f"{error}; {more}")
        if isinstance(error, NoFile) and not member.started:
            return
        yield Trouble(str(error), member)

    def server_of(self, member: Member) -> tuple[str, LogKey]:
        """URL and secret of its node. Raises `Unreadable`."""
        node_id = member.node_id
        node = self._follower.state.nodes.get(node_id)
        if node is None:
            raise Unreadable(f"node {node_id} has left the cell")
        if node.spec.logs is None:
            raise Unreadable(
                f"node {node_id} serves no output; start its node-reporter with --gateway-token-file, or with {VARIABLE} as here"
            )
        keys = [] if self._key is None else [self._key]
        if self._tokens is not None:
            try:
                keys += [key_of_token(digest) for digest in self._tokens.digests_of(node_id)]
            except ConfigurationError as error:
                raise Unreadable(str(error)) from error
        for key in keys:
            if key.id == node.spec.logs.key:
                host = f"[{node.spec.address}]" if ":" in node.spec.address else node.spec.address
                scheme = "https" if node.spec.logs.tls else "http"
                return f"{scheme}://{host}:{node.spec.logs.port}", key
        raise Unreadable(
            f"this gateway does not have the secret of node {node_id}: its token in PENSTOCK_TOKENS, or the same file {VARIABLE}"
        )

    def client(self, encrypted: bool) -> httpx.AsyncClient:
        """Raises `Unreadable`."""
        found = self._clients.get(encrypted)
        if found is None:
            ca = SYSTEM_CA if self._options.node_log_ca is None else str(self._options.node_log_ca)
            try:
                verify = client_context(ca, CA) if encrypted else False
            except ConfigurationError as error:
                raise Unreadable(str(error)) from error
            limits = httpx.Limits(max_connections=MAX_CONNECTIONS, max_keepalive_connections=0)
            transport = httpx.AsyncHTTPTransport(
                verify=verify, limits=limits, socket_options=SOCKET_OPTIONS, trust_env=False
            )
            found = self._clients[encrypted] = httpx.AsyncClient(transport=transport, trust_env=False)
        return found


class _Reading:
    """One request to a node. A context manager, which opens it."""

    def __init__(
        self, reader: LogReader, member: Member, ask: Ask, offset: int | None, *, follow: bool
    ) -> None:
        self._reader, self._member = reader, member
        self.offset = offset or 0
        """Of what comes next."""
        asked = {"job": member.job_id, "task": member.task_id, "follow": 1 if follow else None}
        asked |= ask._asdict() if offset is None else {"offset": offset}
        self._query = urlencode({name: value for name, value in asked.items() if value is not None})
        self._timeout = httpx.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
        if follow:
            self._timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S, pool=CONNECT_TIMEOUT_S)
        self._response: httpx.Response | None = None

    async def __aenter__(self) -> "_Reading":
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._response is not None:
            await self._response.aclose()

    async def chunk(self) -> bytes:
        """Empty: it has ended. Raises `Unreadable`."""
        try:
            if self._response is None:
                self._response = await self._open()
                self._chunks = self._response.aiter_raw()
            found = await anext(self._chunks, b"")
        except httpx.HTTPError as error:
            raise Unreadable(f"node {self._member.node_id} does not answer ({_plain(error)})") from error
        self.offset += len(found)
        return found

    async def _open(self) -> httpx.Response:
        url, key = self._reader.server_of(self._member)
        node_id = self._member.node_id
        client = self._reader.client(url.startswith("https"))
        headers = {"Authorization": key.authorization(node_id, self._query), "Accept-Encoding": "identity"}
        request = client.build_request(
            "GET", f"{url}{PATH}?{self._query}", headers=headers, timeout=self._timeout
        )
        response = await client.send(request, stream=True)
        if response.status_code != httpx.codes.OK:
            try:
                reason = (await response.aread())[:MAX_REASON_BYTES].decode(errors="replace")
            finally:
                await response.aclose()
            kind = NoFile if response.status_code == httpx.codes.NOT_FOUND else Unreadable
            raise kind(f"node {node_id} at {url}: {reason}")
        self.offset = int(response.headers.get(OFFSET, 0))
        return response


def _plain(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
