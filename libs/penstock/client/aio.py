"""Asynchronous client of the gateway, over `httpx.AsyncClient`: `penstock.client.sync`, awaited."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any, Self, TypeVar, Unpack

import httpx
import httpx_sse

from penstock.client.connection import TIMEOUT_S, Connection
from penstock.client.errors import GatewayFault, JobNotSucceeded
from penstock.client.models import (
    Accepted,
    Checkpoint,
    Eta,
    Event,
    Job,
    Node,
    Page,
    Status,
    Task,
    TaskCores,
    Warned,
    Why,
)
from penstock.client.sessions import Session
from penstock.client.steps import (
    PAGE,
    Calls,
    LogPart,
    Looked,
    Pause,
    Request,
    Steps,
    Submitted,
    given,
    job_of,
)
from penstock.client.streams import (
    BROKEN,
    ENDED,
    ENDLESS,
    LEAST_S,
    RECONNECT_TRIES,
    Place,
    StreamEvent,
    Waiting,
)
from penstock.model.nouns.types import JobSpec
from penstock.sdk.code_archive import Packed
from penstock.session_lines import PROTOCOL, UPGRADE

T = TypeVar("T")


class AsyncClient:
    """One gateway; the methods are those of `Client`."""

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

    async def retry(self, job: str, *, key: str | None = None) -> "AsyncJobHandle":
        return AsyncJobHandle(self, await self.run(self._calls.retry(job, key)))

    async def send_code(self, packed: Packed) -> None:
        """Sends a folder that `penstock.sdk.code_archive.pack` has packed, once; a job runs in it with
        `sync="sha256:…"`."""
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

    async def all_jobs(
        self,
        *,
        status: str | None = None,
        owner: str | None = None,
        name: str | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> AsyncGenerator[Job, None]:
        cursor: int | None = None
        while True:
            page = await self.jobs(
                status=status, owner=owner, name=name, labels=labels, limit=PAGE, cursor=cursor
            )
            for job in page.jobs:
                yield job
            if (cursor := page.next_cursor) is None:
                return

    async def tasks(self, job: str) -> Sequence[Task]:
        return await self.run(self._calls.tasks(job))

    async def cancel(self, job: str, reason: str | None = None) -> Accepted:
        return await self.run(self._calls.act(job, "cancel", reason))

    async def hold(self, job: str, reason: str | None = None) -> Accepted:
        return await self.run(self._calls.act(job, "hold", reason))

    async def release(self, job: str, reason: str | None = None) -> Accepted:
        return await self.run(self._calls.act(job, "release", reason))

    async def checkpoint(self, job: str, reason: str | None = None) -> Checkpoint | None:
        return await self.run(self._calls.checkpoint(job, reason))

    async def cores(
        self, job: str, cores: int, *, task: str | None = None, reason: str | None = None
    ) -> Sequence[TaskCores]:
        return await self.run(self._calls.cores(job, cores, task, reason))

    async def wait(self, *jobs: str, timeout_s: float | None = None) -> list[Job]:
        waiting, looked = await self._look(jobs, timeout_s)
        ended = {job.job_id: job async for job in self._ends(looked, waiting)}
        return [ended[looked.jobs[text].job_id] for text in jobs]

    async def ended(
        self, jobs: Iterable[str], *, timeout_s: float | None = None
    ) -> AsyncGenerator[Job, None]:
        waiting, looked = await self._look(jobs, timeout_s)
        async with aclosing(self._ends(looked, waiting)) as ended:
            async for job in ended:
                yield job

    async def _look(self, jobs: Iterable[str], timeout_s: float | None) -> tuple[Waiting, Looked]:
        waiting = Waiting(timeout_s, jobs)
        return waiting, await self.run(self._calls.look(waiting.pending), waiting)

    async def _ends(self, looked: Looked, waiting: Waiting) -> AsyncGenerator[Job, None]:
        for job in waiting.found(looked.jobs.values()):
            yield job
        async with aclosing(
            self.stream("/v1/stream", str(looked.after), waiting, job=waiting.only, follows=waiting.followed)
        ) as happened:
            while waiting.pending:
                event = await anext(happened, None)
                if event is None:
                    raise waiting.error()
                if (job_id := waiting.took(event)) is not None:
                    yield await self.run(self._calls.ended(job_id), waiting)

    async def logs(self, job: str, **part: Unpack[LogPart]) -> str:
        return await self.run(self._calls.logs(job, **part))

    async def follow_logs(self, job: str, **part: Unpack[LogPart]) -> AsyncGenerator[str, None]:
        path = f"/v1/jobs/{(await self.job(job)).job_id}/logs"
        async with self.lines(path, **part, follow=1) as chunks:
            async for chunk in chunks:
                yield chunk

    async def why(self, job: str, at: int | None = None, *, at_ms: int | None = None) -> Why:
        return await self.run(self._calls.why(job, at, at_ms))

    async def eta(self, job: str) -> Eta:
        return await self.run(self._calls.eta(job))

    async def nodes(self) -> Sequence[Node]:
        return await self.run(self._calls.nodes())

    async def status(self) -> Status:
        return await self.run(self._calls.status())

    async def events(
        self, *, job_id: str | None = None, after: str | None = None
    ) -> AsyncGenerator[Event, None]:
        only = None if job_id is None else (await self.job(job_id)).job_id
        async with aclosing(self.stream("/v1/stream", after, job=only)) as happened:
            async for event in happened:
                yield event.typed()

    async def get(self, path: str, *, patience_s: float = TIMEOUT_S, **params: Any) -> Any:
        request = Request("GET", path, params, timeout_s=patience_s)
        return (await self.run(self._calls.request(request))).json()

    async def find(self, job: str, *, ended: bool = False) -> dict[str, Any]:
        calls = self._calls.find_ended(job) if ended else self._calls.find(job)
        found: dict[str, Any] = (await self.run(calls)).json()
        return found

    async def text(self, path: str, **params: Any) -> str:
        return (await self.run(self._calls.request(Request("GET", path, params)))).text

    async def post(self, path: str, body: Any = None, **more: Any) -> Any:
        return (await self.posted(path, body, **more))[1]

    async def posted(
        self,
        path: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        *,
        patience_s: float = TIMEOUT_S,
        **params: Any,
    ) -> tuple[int, Any]:
        request = Request("POST", path, params, body, headers or {}, patience_s)
        response = await self.run(self._calls.request(request))
        return response.status_code, response.json()

    @asynccontextmanager
    async def lines(self, path: str, body: Any = None, **params: Any) -> AsyncIterator[AsyncIterator[str]]:
        """As `Client.lines`."""
        method, sent = "GET" if body is None else "POST", {"params": given(params), "json": body}
        try:
            async with self._http.stream(method, path, **sent, timeout=ENDLESS) as response:
                if response.is_error:
                    await response.aread()
                    raise self._connection.refused(response)
                yield response.aiter_text()
        except httpx.HTTPError as error:
            raise self._connection.unreachable(error) from error

    @asynccontextmanager
    async def session(self, path: str, body: Any) -> AsyncIterator[Session]:
        """A session with what runs for this request. Raises `ClientError`."""
        try:
            async with self._http.stream(
                "POST", path, json=body, headers=UPGRADE, timeout=ENDLESS
            ) as response:
                if response.status_code != httpx.codes.SWITCHING_PROTOCOLS:
                    if response.is_error:
                        await response.aread()
                        raise self._connection.refused(response)
                    text = (
                        f"{self.server} does not go over to {PROTOCOL}; a proxy before it has to pass "
                        "`Upgrade` on"
                    )
                    raise GatewayFault(text)
                yield Session(self._connection, response)
        except httpx.HTTPError as error:
            raise self._connection.unreachable(error) from error

    async def stream(
        self, path: str, last_id: str | None = None, waiting: Waiting | None = None, **params: Any
    ) -> AsyncGenerator[StreamEvent, None]:
        place, waiting = Place(self._connection, path, last_id), waiting or Waiting()
        while not waiting.over:
            cause: Exception | None = None
            try:
                async with httpx_sse.aconnect_sse(
                    self._http,
                    "GET",
                    path,
                    params=given(params),
                    headers=place.headers(),
                    timeout=waiting.stream_timeout(),
                ) as source:
                    if source.response.is_error:
                        await source.response.aread()
                        raise place.refused(source.response)
                    frames = source.aiter_sse()
                    while (sse := await self._next(frames, waiting)) is not None:
                        if (event := place.took(sse)) is not None:
                            yield event
            except BROKEN as error:
                cause = error
            if not waiting.over:
                await asyncio.sleep(waiting.at_most_s(place.pause_s(cause)))

    async def _next(
        self, frames: AsyncIterator[httpx_sse.ServerSentEvent], waiting: Waiting
    ) -> httpx_sse.ServerSentEvent | None:
        """The next frame within the time limit, which bounds the read alone: between two events the caller's
        own code runs."""
        async with asyncio.timeout(waiting.left_s):
            return await anext(frames, None)

    async def run(self, steps: Steps[T], waiting: Waiting | None = None) -> T:
        waiting = waiting or Waiting()
        try:
            step = next(steps)
            while True:
                if isinstance(step, Pause):
                    if waiting.over:
                        step = steps.throw(TimeoutError())
                        continue
                    await asyncio.sleep(waiting.at_most_s(step.seconds))
                    step = next(steps)
                    continue
                step = step._replace(timeout_s=waiting.at_most_s(step.timeout_s, LEAST_S))
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
        self.deadline = submitted.accepted.deadline
        """As expected at the submission; None: the job has no deadline."""

    async def refresh(self) -> Job:
        return await self._client.job(self.job_id)

    async def wait(self, timeout_s: float | None = None) -> "AsyncFinishedJob":
        [job] = await self._client.wait(self.job_id, timeout_s=timeout_s)
        return AsyncFinishedJob(self._client, job)

    async def cancel(self, reason: str | None = None) -> None:
        await self._client.cancel(self.job_id, reason)

    async def hold(self, reason: str | None = None) -> None:
        await self._client.hold(self.job_id, reason)

    async def release(self, reason: str | None = None) -> None:
        await self._client.release(self.job_id, reason)

    async def checkpoint(self, reason: str | None = None) -> Checkpoint | None:
        return await self._client.checkpoint(self.job_id, reason)

    async def cores(
        self, cores: int, *, task: str | None = None, reason: str | None = None
    ) -> Sequence[TaskCores]:
        return await self._client.cores(self.job_id, cores, task=task, reason=reason)

    async def logs(self, **part: Unpack[LogPart]) -> str:
        return await self._client.logs(self.job_id, **part)

    async def events(self) -> AsyncGenerator[Event, None]:
        async with aclosing(self._client.events(job_id=self.job_id, after="0")) as happened:
            async for event in happened:
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
