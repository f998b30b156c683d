"""Fetches a job's checkpoint from the node that saved it, before the task starts here: bounded in time and
size, verified, whole or not at all."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode

import msgspec

from penstock.clock import wall_ms
from penstock.errors import ConfigurationError, PenstockError
from penstock.model.decisions.orders import CheckpointSource, StartTask
from penstock.model.inputs.external_events import CheckpointFetched
from penstock.model.nouns.types import MAX_TEXT
from penstock.runtime.keys.node_keys import NodeKeys, signed_by
from penstock.tls import SYSTEM_CA, client_context
from penstock_services.node_reporter.options import Options
from penstock_services.node_reporter.shell.checkpoints.checkpoint_bundle import (
    CHUNK_BYTES,
    BadBundle,
    Manifest,
    size_of,
    unpack,
)
from penstock_services.node_reporter.shell.checkpoints.checkpoint_folders import (
    CheckpointFolders,
    age,
    covers,
)
from penstock_services.node_reporter.shell.checkpoints.checkpoint_server import (
    PATH,
    SCHEME,
    SIZE,
    answers,
    asks,
)

LIMIT_S = 300.0  # for the whole transfer
PATIENCE_S = 15.0  # without a byte: a restarting reporter runs again by then, and has read the order
CONNECT_S, READ_S = 3.0, 5.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 1.0
RESERVE_BYTES = 1 << 30  # free space of the disk that is reserved for other uses
MAX_FETCHES = 16  # at once; as many as a node has GPUs
REASON_CHARS = 300
MIB = 1 << 20

logger = logging.getLogger(__name__)


class NotFetched(PenstockError):
    """The reason, with the remedy."""


class NotYet(NotFetched):
    """A retry may succeed."""


class Place(NamedTuple):
    """One request."""

    source: CheckpointSource
    query: str
    proof: str
    began_s: float
    ends: threading.Event
    """Set when the task is to stop: the fetch is not needed any more."""


class Stream:
    """The answer's body as a file; calls `came` when bytes arrive. Raises `NotYet` where they end early,
    `NotFetched` after `LIMIT_S`."""

    def __init__(self, chunks: Iterator[bytes], place: Place, came: Callable[[], None]) -> None:
        self._chunks, self._place, self._came = chunks, place, came
        self._rest = memoryview(b"")

    def read(self, size: int, /) -> bytes:
        found = []
        while size > 0:
            if not self._rest:
                if self._place.ends.is_set():
                    raise NotFetched("the task is to stop")
                if time.monotonic() - self._place.began_s > LIMIT_S:
                    raise NotFetched(f"it takes longer than {LIMIT_S:.0f} s")
                self._rest = memoryview(next(self._chunks, b""))
                self._came()
                if not self._rest:
                    break
            found.append(bytes(self._rest[:size]))
            self._rest = self._rest[size:]
            size -= len(found[-1])
        return b"".join(found)


class CheckpointFetcher:
    """Of one node. `keys`: its own."""

    def __init__(self, options: Options, folders: CheckpointFolders, keys: Callable[[], NodeKeys]) -> None:
        self._options, self._folders, self._keys = options, folders, keys
        self._threads = ThreadPoolExecutor(MAX_FETCHES, "checkpoint")

    async def fetch(self, order: StartTask, source: CheckpointSource) -> CheckpointFetched:
        """Never fails: where the checkpoint is not available, the event has the reason, and the task starts
        without it."""
        began_s = time.monotonic()
        fields: dict[str, Any] = {
            "node_id": self._options.node_id,
            "task_id": order.task_id,
            "token": order.token,
            "from_node": source.node_id,
        }
        try:
            found = await self._found(order, source, began_s)
        except NotFetched as error:
            logger.warning(
                "%s starts without its checkpoint from %s: %s", order.task_id, source.node_id, error
            )
            return CheckpointFetched(**fields, at_ms=wall_ms(), problem=str(error)[:MAX_TEXT])
        took_ms = round((time.monotonic() - began_s) * 1_000)
        iteration = age(found.name)[1]
        return CheckpointFetched(
            **fields,
            at_ms=wall_ms(),
            path=str(found),
            iteration=iteration,
            fetch_ms=took_ms,
            size_bytes=await asyncio.to_thread(size_of, found),
        )

    async def _found(self, order: StartTask, source: CheckpointSource, began_s: float) -> Path:
        """Raises `NotFetched`."""
        known = order.checkpoint or ""
        here = await asyncio.to_thread(self._folders.newest, order.job_id, order.attempt, known)
        if here is not None and covers(here.name, known):
            return here
        if not age(known):
            raise NotFetched(
                f"{order.checkpoint} is not a name that the SDK gives; save by penstock.sdk.checkpoint"
            )
        self._fits(source.size_bytes)
        query = urlencode({"job": order.job_id, "token": order.token, "after": known})
        proof = f"{SCHEME} {self._keys().sign(asks(source.node_id, query)).decode()}"
        place = Place(source, query, proof, began_s, threading.Event())
        came_s, pause_s = began_s, FIRST_PAUSE_S

        def came() -> None:
            nonlocal came_s
            came_s = time.monotonic()

        try:
            while True:
                try:
                    loop = asyncio.get_running_loop()
                    return await loop.run_in_executor(self._threads, self._fetched, order, place, came)
                except NotYet as error:
                    now_s = time.monotonic()
                    if now_s - came_s > PATIENCE_S or now_s - began_s > LIMIT_S:
                        raise NotFetched(str(error)) from error
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        finally:
            place.ends.set()

    def _fits(self, size_bytes: int) -> None:
        """Raises `NotFetched`."""
        limit = self._options.checkpoint_fetch_limit_mib * MIB
        if size_bytes > limit:
            raise NotFetched(
                f"it has {size_bytes // MIB} MiB, and this node fetches {limit // MIB} at most; raise "
                "--checkpoint-fetch-limit"
            )
        free = self._folders.free_bytes()
        if free < size_bytes + RESERVE_BYTES:
            raise NotFetched(
                f"it has {size_bytes // MIB} MiB, and {free // MIB} MiB are free in {self._folders.root}, "
                f"of which {RESERVE_BYTES // MIB} stay free; make room there"
            )

    def _fetched(self, order: StartTask, place: Place, came: Callable[[], None]) -> Path:
        """One attempt, in a thread. Raises `NotFetched`, `NotYet`."""
        import httpx  # 7 MiB that a node without such jobs never needs

        source = place.source
        host = f"[{source.address}]" if ":" in source.address else source.address
        url = f"{'https' if source.tls else 'http'}://{host}:{source.port}{PATH}?{place.query}"
        try:
            ca = SYSTEM_CA if self._options.log_ca is None else str(self._options.log_ca)
            verify = client_context(ca, "--log-ca") if source.tls else False
            timeout = httpx.Timeout(READ_S, connect=CONNECT_S)
            headers = {"Authorization": place.proof, "Accept-Encoding": "identity"}
            with (
                httpx.Client(verify=verify, timeout=timeout, trust_env=False) as client,
                client.stream("GET", url, headers=headers) as response,
            ):
                if response.status_code != httpx.codes.OK:
                    reason = response.read()[:REASON_CHARS].decode(errors="replace")
                    kind = NotFetched if response.status_code == httpx.codes.NOT_FOUND else NotYet
                    raise kind(f"node {source.node_id}: {reason}")
                self._fits(int(response.headers.get(SIZE, 0)))
                stream = Stream(response.iter_raw(CHUNK_BYTES), place, came)
                return self._stored(order, place, stream)
        except ConfigurationError as error:
            raise NotFetched(str(error)) from error
        except httpx.HTTPError as error:
            raise NotYet(f"node {source.node_id} at {source.address} does not answer: {error!r}") from error
        except BadBundle as error:
            raise NotYet(f"node {source.node_id}: {error}") from error
        except (OSError, ValueError) as error:
            raise NotFetched(f"it cannot be stored here: {error}; look at {self._folders.root}") from error

    def _stored(self, order: StartTask, place: Place, stream: Stream) -> Path:
        with self._folders.receiving() as into:
            limit = self._options.checkpoint_fetch_limit_mib * MIB
            received = unpack(stream, into, self._folders.owner, limit)
            signed = answers(place.query, received.manifest)
            if not signed_by(place.source.public_key, received.signature, signed):
                raise NotFetched(f"the received data is not signed by node {place.source.node_id}")
            name = msgspec.json.decode(received.manifest, type=Manifest).name
            if not age(order.checkpoint or "") <= age(name) < (order.attempt,):
                raise NotFetched(
                    f"node {place.source.node_id} sent {name[:REASON_CHARS]}, which is another checkpoint"
                )
            if place.ends.is_set():
                raise NotFetched("the task is to stop")
            return self._folders.adopt(into, order.job_id, name)
