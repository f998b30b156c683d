"""The client of programs with an event loop, over `httpx.AsyncClient`: as `penstock.client.sync`, awaited."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar, Unpack

import httpx
import httpx_sse

from penstock.client.connection import Connection
from penstock.client.errors import JobNotSucceeded
from penstock.client.models import Accepted, Eta, Event, Job, Node, Page, Status, Task, Warned, Why
from penstock.client.steps import Calls, LogPart, Pause, Steps, Submitted, given, job_of
from penstock.client.streams import (
    BROKEN,
    ENDED,
    ENDLESS,
    RECONNECT_TRIES,
    STREAM_TIMEOUT,
    Deadline,
    Place,
    StreamEvent,
)
from penstock.model.types import JobSpec
from penstock.sdk.code_archive import Packed

T = TypeVar("T")


class AsyncClient:
    """One gateway; see `Client`, whose methods these are."""

    def __init__(
        self,
        server: str | None = None,
        *,
        token: str | None = None,
        token_file: Path | str | None = None,
        ca: Path | str | None = None,
        tries: int = RECONNECT_TRIES,
    ) -> None:
        self._connection = Connection(server, token, token_file, ca)
        self._http = httpx.AsyncClient(**self._connection.options())
        self._calls = Calls(self._connection, tries)
        self.server = self._connection.server

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    async def submit(
        self, job: JobSpec | Mapping[str, Any] | None = None, *, key: str | None = None, **fields: Any
    ) -> "AsyncJobHandle":
        return AsyncJobHandle(self, await self.run(self._calls.submit(job_of(job, fields), key)))

    async def send_code(self, packed: Packed) -> None:
        """Sends a folder that `penstock.sdk.code_archive.pack` has packed, once; a job runs in it with `sync="sha256:…"`."""
        await self.run(self._calls.send_code(packed))

    async def handle(self, job: str) -> "AsyncJobHandle":
        found = await self.job(job)
        return AsyncJobHandle(self, Submitted(Accepted(job_id=found.job_id), True))

    async def job(self, job: str) -> Job:
        return await self.run(self._calls.job(job))

    async def jobs(
        self,
        *,
        status: str | None = None,
        owner: str | None = None,
        name: str | None = None,
        labels: Mapping[str, str] | None = None,
        limit: int = 50,
        cursor: int | None = None,
    ) -> Page:
        label = [f"{name}={value}" for name, value in (labels or {}).items()] or None
        return await self.run(
            self._calls.jobs(status=status, owner=owner, name=name, label=label, limit=limit, cursor=cursor)
        )

    async def tasks(self, job_id: str) -> Sequence[Task]:
        return await self.run(self._calls.tasks(job_id))

    async def cancel(self, job_id: str, reason: str | None = None) -> Accepted:
        return await self.run(self._calls.act(job_id, "cancel", reason))

    async def hold(self, job_id: str, reason: str | None = None) -> Accepted:
        return await self.run(self._calls.act(job_id, "hold", reason))

    async def release(self, job_id: str, reason: str | None = None) -> Accepted:
        return await self.run(self._calls.act(job_id, "release", reason))

    async def wait(self, *job_ids: str, timeout_s: float | None = None) -> list[Job]:
        ended = {job_id: await self.job(job_id) async for job_id in self.ended(job_ids, timeout_s=timeout_s)}
        return [ended[job_id] for job_id in job_ids]

    async def ended(self, job_ids: Iterable[str], *, timeout_s: float | None = None) -> AsyncIterator[str]:
        deadline, pending = Deadline(timeout_s), dict.fromkeys(job_ids)
        total, seen = len(pending), (await self.status()).projected_seq
        for job_id in list(pending):
            if (await self.job(job_id)).outcome is not None:
                del pending[job_id]
                yield job_id
        only = next(iter(pending)) if len(pending) == 1 else None
        happened = self.stream("/v1/stream", str(seen), job=only)
        while pending:
            try:
                event = await asyncio.wait_for(anext(happened), deadline.left_s)
            except TimeoutError:
                raise deadline.error(set(pending), total) from None
            if event.data["type"] == ENDED and event.data["job_id"] in pending:
                del pending[event.data["job_id"]]
                yield event.data["job_id"]

    async def logs(self, job_id: str, **part: Unpack[LogPart]) -> str:
        return await self.run(self._calls.logs(job_id, **part))

    async def follow_logs(self, job_id: str, **part: Unpack[LogPart]) -> AsyncIterator[str]:
        params = given({**part, "follow": 1})
        try:
            async with self._http.stream(
                "GET", f"/v1/jobs/{job_id}/logs", params=params, timeout=ENDLESS
            ) as response:
                if response.is_error:
                    await response.aread()
                    raise self._connection.refused(response)
                async for chunk in response.aiter_text():
                    yield chunk
        except httpx.HTTPError as error:
            raise self._connection.unreachable(error) from error

    async def why(self, job_id: str, at: int | None = None, *, at_ms: int | None = None) -> Why:
        return await self.run(self._calls.why(job_id, at, at_ms))

    async def eta(self, job_id: str) -> Eta:
        return await self.run(self._calls.eta(job_id))

    async def nodes(self) -> Sequence[Node]:
        return await self.run(self._calls.nodes())

    async def status(self) -> Status:
        return await self.run(self._calls.status())

    async def events(self, *, job_id: str | None = None, after: str | None = None) -> AsyncIterator[Event]:
        async for event in self.stream("/v1/stream", after, job=job_id):
            yield event.typed()

    async def stream(
        self, path: str, last_id: str | None = None, **params: Any
    ) -> AsyncIterator[StreamEvent]:
        """The events of a stream, for ever; after a broken line it goes on where it was."""
        place = Place(self._connection, path, last_id)
        while True:
            cause: Exception | None = None
            try:
                async with httpx_sse.aconnect_sse(
                    self._http,
                    "GET",
                    path,
                    params=given(params),
                    headers=place.headers(),
                    timeout=STREAM_TIMEOUT,
                ) as source:
                    if source.response.is_error:
                        await source.response.aread()
                        raise place.refused(source.response)
                    async for sse in source.aiter_sse():
                        if (event := place.took(sse)) is not None:
                            yield event
            except BROKEN as error:
                cause = error
            await asyncio.sleep(place.pause_s(cause))

    async def run(self, steps: Steps[T]) -> T:
        """Carries the steps of a call out."""
        try:
            step = next(steps)
            while True:
                if isinstance(step, Pause):
                    await asyncio.sleep(step.seconds)
                    step = next(steps)
                    continue
                try:
                    response = await self._http.request(step.method, step.path, **step.options())
                except httpx.HTTPError as error:
                    step = steps.throw(error)
                else:
                    step = steps.send(response)
        except StopIteration as end:
            value: T = end.value
            return value


class AsyncJobHandle:
    """A job that was submitted; see `JobHandle`."""

    def __init__(self, client: AsyncClient, submitted: Submitted) -> None:
        self._client = client
        self.job_id = submitted.accepted.job_id
        self.repeated = submitted.repeated
        self.warnings: Sequence[Warned] = submitted.accepted.warnings

    async def refresh(self) -> Job:
        return await self._client.job(self.job_id)

    async def wait(self, timeout_s: float | None = None) -> "AsyncFinishedJob":
        [job] = await self._client.wait(self.job_id, timeout_s=timeout_s)
        return AsyncFinishedJob(self._client, job)

    async def cancel(self, reason: str | None = None) -> None:
        await self._client.cancel(self.job_id, reason)

    async def logs(self, **part: Unpack[LogPart]) -> str:
        return await self._client.logs(self.job_id, **part)

    async def events(self) -> AsyncIterator[Event]:
        async for event in self._client.events(job_id=self.job_id, after="0"):
            yield event
            if event.type == ENDED:
                return

    async def why(self, at: int | None = None, *, at_ms: int | None = None) -> Why:
        return await self._client.why(self.job_id, at, at_ms=at_ms)

    async def eta(self) -> Eta:
        return await self._client.eta(self.job_id)


class AsyncFinishedJob(AsyncJobHandle):
    """A job that has ended."""

    def __init__(self, client: AsyncClient, job: Job) -> None:
        super().__init__(client, Submitted(Accepted(job_id=job.job_id), False))
        self.job = job

    @property
    def outcome(self) -> str:
        return str(self.job.outcome)

    def raise_for_outcome(self) -> Self:
        """Raises `JobNotSucceeded` unless it succeeded."""
        if self.job.code:
            why = f": {self.job.reason}" if self.job.reason else ""
            raise JobNotSucceeded(f"job {self.job_id} ended {self.outcome}{why}", self.job.code)
        return self
