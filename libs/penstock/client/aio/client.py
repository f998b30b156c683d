"""Client of the gateway: every call about jobs and the cell. Threads may share a blocking one."""

from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Self, Unpack

import httpx

from penstock.backoff import Backoff
from penstock.client.aio.gateway import AsyncGateway
from penstock.client.connection import TIMEOUT_S, WORKER_TIMEOUT_S
from penstock.client.errors import GatewayFault, JobNotSucceeded, NotFound, NotPermitted
from penstock.client.models import (
    Accepted,
    Checkpoint,
    CoresChanged,
    Eta,
    Event,
    Job,
    Node,
    Nodes,
    Page,
    Saved,
    Status,
    Task,
    TaskCores,
    Tasks,
    Warned,
    Why,
)
from penstock.client.requests import (
    FIRST_PAUSE_S,
    LAST_PAUSE_S,
    LOOKS_AFTER_END,
    NO_JOB,
    OCTETS,
    PAGE,
    SEND_TIMEOUT_S,
    LogPart,
    Looked,
    Request,
    Submitted,
    ambiguous,
    given,
    job_path,
    key_header,
    not_found,
    read,
    searches,
    submitted,
)
from penstock.client.streams import ENDED, Waiting
from penstock.client.waits_async import sleep

if TYPE_CHECKING:
    from penstock.model.jobs.job_spec import JobSpec
    from penstock.sdk.code_archive import Packed


class AsyncClient(AsyncGateway):
    """One gateway. Arguments that are None come from PENSTOCK_SERVER, PENSTOCK_TOKEN_FILE and PENSTOCK_CA, as
    for the command line.

    `tries`: attempts at a gateway that does not answer, over about 16 s. Every call raises `ClientError`.
    """

    # ------------------------------------------------------------------------------------------ jobs

    async def submit(
        self, job: "JobSpec | Mapping[str, Any] | None" = None, *, key: str | None = None, **fields: Any
    ) -> "AsyncJobHandle":
        """Submits a job: a spec, or the fields of a job file. The same key with the same job submits it once.

        Returns once it is in the log. After a lost answer the request is sent again under the same key,
        random unless given.
        """
        from penstock.client.submission import job_of, written  # the checks of a job file take 200 ms

        spec = written(job_of(job, fields))
        response = await self._send(Request("POST", "/v1/jobs", body=spec, headers=key_header(key)))
        return AsyncJobHandle(self, submitted(response))

    async def retry(self, job: str, *, key: str | None = None) -> "AsyncJobHandle":
        """Submits a job that has ended once more: the same spec, a new id, `spec.retry_of` with the old one.
        Raises `Conflict`.

        `key`: as of `submit`.
        """
        response = await self._about(job, Request("POST", "/retry", headers=key_header(key)))
        return AsyncJobHandle(self, submitted(response))

    async def send_code(self, packed: "Packed") -> None:
        """Sends a folder that `penstock.sdk.code_archive.pack` has packed, once; a job runs in it with
        `sync="sha256:…"`."""
        path = f"/v1/code/{packed.sha256}"
        answer = await self.get(path)
        if not answer["stored"]:
            request = Request("PUT", path, body=packed.data, headers=OCTETS, timeout_s=SEND_TIMEOUT_S)
            await self._send(request)

    async def handle(self, job: str) -> "AsyncJobHandle":
        """The job with this id, the start of one, or a name (then the latest)."""
        found = await self.job(job)
        return AsyncJobHandle(self, Submitted(Accepted(job_id=found.job_id), True))

    async def job(self, job: str) -> Job:
        """The present state of the job, named as for `handle`."""
        return read(await self._find(job), Job)

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
        """One page of jobs, the latest first; `labels`: with all of them; `cursor`: `next_cursor` of the page
        before."""
        label = [f"{name}={value}" for name, value in (labels or {}).items()] or None
        wanted = {"status": status, "owner": owner, "name": name, "label": label}
        request = Request("GET", "/v1/jobs", {**wanted, "limit": limit, "cursor": cursor})
        return read(await self._send(request), Page)

    async def all_jobs(
        self,
        *,
        status: str | None = None,
        owner: str | None = None,
        name: str | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> AsyncGenerator[Job, None]:
        """As `jobs`, over all pages; a job that is submitted meanwhile is left out."""
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
        """The tasks of all attempts."""
        return read(await self._about(job, Request("GET", "/tasks")), Tasks).tasks

    async def cancel(self, job: str, reason: str | None = None) -> Accepted:
        """Cancels the job: SIGTERM, its grace, SIGKILL. Raises `Conflict` for a job that has ended."""
        return read(await self._act(job, "/cancel", reason=reason), Accepted)

    async def hold(self, job: str, reason: str | None = None) -> Accepted:
        """Holds the job: it does not start until it is released; its running tasks run on. Raises
        `Conflict`."""
        return read(await self._act(job, "/hold", reason=reason), Accepted)

    async def release(self, job: str, reason: str | None = None) -> Accepted:
        """Ends a hold. Raises `Conflict` for a job that is not held."""
        return read(await self._act(job, "/release", reason=reason), Accepted)

    async def checkpoint(self, job: str, reason: str | None = None) -> Checkpoint | None:
        """Has the job save a checkpoint and train on; returns it, or None: the job was asked and reports it
        later.

        Raises `Conflict` for a job that does not run or does not save.
        """
        return read(await self._act(job, "/checkpoint", reason=reason), Saved).checkpoint

    async def cores(
        self, job: str, cores: int, *, task: str | None = None, reason: str | None = None
    ) -> Sequence[TaskCores]:
        """Gives each running worker, or one task such as "w0", this number of cores for this attempt; returns
        what each has now.

        For operators. Raises `Conflict` if its nodes have fewer cores free; then nothing was changed.
        """
        changed = await self._act(job, "/cores", cores=cores, task=task, reason=reason)
        return read(changed, CoresChanged).tasks

    async def wait(self, *jobs: str, timeout_s: float | None = None) -> list[Job]:
        """The jobs as they ended, in the order given. Raises `WaitTimeout`; with `timeout_s` 0 after one
        look."""
        waiting = Waiting(timeout_s, jobs)
        looked = await self._look(waiting)
        ended = {job.job_id: job async for job in self._ends(looked, waiting)}
        return [ended[looked.jobs[text].job_id] for text in jobs]

    async def ended(
        self, jobs: Iterable[str], *, timeout_s: float | None = None
    ) -> AsyncGenerator[Job, None]:
        """Each job once it has ended. Raises `WaitTimeout`."""
        waiting = Waiting(timeout_s, jobs)
        async with aclosing(self._ends(await self._look(waiting), waiting)) as ended:
            async for job in ended:
                yield job

    async def logs(self, job: str, **part: Unpack[LogPart]) -> str:
        """The output of its tasks; of several tasks, each line starts with its task. `part`: `task`,
        `attempt`, `tail`, `since`, `since_ms`."""
        response = await self._about(job, Request("GET", "/logs", {**part}))
        return response.text

    async def follow_logs(self, job: str, **part: Unpack[LogPart]) -> AsyncGenerator[str, None]:
        """As `logs`, in pieces as they come, over retries until the job ends; with `attempt` until that
        attempt ends."""
        found = await self.job(job)
        async with self.lines(job_path(found.job_id, "/logs"), **part, follow=1) as chunks:
            async for chunk in chunks:
                yield chunk

    async def why(self, job: str, at: int | None = None, *, at_ms: int | None = None) -> Why:
        """Why the job waits or is placed where it is: now, as of ledger record `at`, or of the latest record
        at `at_ms` or before."""
        past = at is not None or at_ms is not None
        bound_s = WORKER_TIMEOUT_S if past else TIMEOUT_S
        request = Request("GET", "/why", {"at": at, "at_ms": at_ms}, timeout_s=bound_s)
        return read(await self._about(job, request), Why)

    async def eta(self, job: str) -> Eta:
        """Remaining time of the job."""
        return read(await self._about(job, Request("GET", "/eta")), Eta)

    async def find(self, job: str, *, ended: bool = False) -> dict[str, Any]:
        """As `job`, but the gateway's JSON. `ended`: its end was in the stream, so wait until it is shown as
        ended."""
        response = await (self._find_ended(job) if ended else self._find(job))
        found: dict[str, Any] = response.json()
        return found

    # ------------------------------------------------------------------------------------------ cell

    async def nodes(self) -> Sequence[Node]:
        return read(await self._send(Request("GET", "/v1/nodes")), Nodes).nodes

    async def status(self) -> Status:
        return await self._status()

    async def events(
        self, *, job_id: str | None = None, after: str | None = None
    ) -> AsyncGenerator[Event, None]:
        """Events as they happen, for ever: from now on, or those behind the event with id `after` (`"0"`: all
        that are stored).

        After a broken connection it goes on behind the last event: none is left out and none comes twice.
        Raises `NotFound` for the job.
        """
        found = None if job_id is None else await self.job(job_id)
        only = None if found is None else found.job_id
        async with aclosing(self.stream("/v1/stream", after, job=only)) as happened:
            async for event in happened:
                yield event.typed()

    # --------------------------------------------------------------------------------- requests about jobs

    async def _status(self, waiting: Waiting | None = None) -> Status:
        return read(await self._send(Request("GET", "/v1/status"), waiting), Status)

    async def _act(self, job: str, act: str, **body: Any) -> httpx.Response:
        return await self._about(job, Request("POST", act, body=given(body)))

    async def _about(self, job: str, request: Request) -> httpx.Response:
        """The answer to a request about a job, whose `path` goes on behind the job's. The job is searched by
        name only if its text is not an id. Raises `NotFound`."""
        try:
            return await self._send(request.about(job))
        except NotFound as missing:
            if missing.kind != NO_JOB:
                raise
            try:
                found = await self.job(job)
            except NotPermitted:  # a token that may submit and not read
                raise missing from None
        return await self._send(request.about(found.job_id))

    async def _find(self, text: str, waiting: Waiting | None = None) -> httpx.Response:
        """The job with this id; else the latest of this name; else the only one with this prefix of its id.
        Raises `NotFound`.

        A prefix as tables show it comes before a name: a job's name may have the same form.
        """
        try:
            return await self._send(Request("GET", job_path(text)), waiting)
        except NotFound as error:
            missing = error
        named: Sequence[Job] = ()
        for search in searches(text):
            if not named:
                named = read(await self._send(Request("GET", "/v1/jobs", search), waiting), Page).jobs
        if len(named) > 1:
            raise ambiguous(text, named)
        if not named:
            raise not_found(text, missing) from missing
        return await self._send(Request("GET", job_path(named[0].job_id)), waiting)

    async def _find_ended(self, job_id: str, waiting: Waiting | None = None) -> httpx.Response:
        """A job whose end was in the stream, once the answering gateway has read that end, too. Raises
        `GatewayFault`."""
        backoff, waiting = Backoff(FIRST_PAUSE_S / 4, LAST_PAUSE_S), waiting or Waiting()
        for _ in range(LOOKS_AFTER_END):
            response = await self._find(job_id, waiting)
            if read(response, Job).outcome is not None:
                return response
            if waiting.over:
                break
            await sleep(waiting.at_most_s(backoff.next_s()))
        raise GatewayFault(f"{self.server}: job {job_id} has ended, and is still shown as not ended")

    async def _look(self, waiting: Waiting) -> Looked:
        """The jobs, with the stream's position from before they were read: several gateways may have read to
        different records."""
        status = await self._status(waiting)
        found, after = {}, min(status.seq, status.projected_seq)
        for text in waiting.pending:
            job = found[text] = read(await self._find(text, waiting), Job)
            if job.outcome is None and job.seq:
                after = min(after, job.seq)
        return Looked(found, after)

    async def _ends(self, looked: Looked, waiting: Waiting) -> AsyncGenerator[Job, None]:
        for job in waiting.found(looked.jobs.values()):
            yield job
        position = str(looked.after)
        async with aclosing(
            self.stream("/v1/stream", position, waiting, job=waiting.only, follows=waiting.followed)
        ) as happened:
            while waiting.pending:
                event = await anext(happened, None)
                if event is None:
                    raise waiting.error()
                if (job_id := waiting.took(event)) is not None:
                    yield read(await self._find_ended(job_id, waiting), Job)


class AsyncJobHandle:
    """A job that was submitted."""

    def __init__(self, client: AsyncClient, submitted: Submitted) -> None:
        self._client = client
        self.job_id = submitted.accepted.job_id
        self.repeated = submitted.repeated
        """The key was used before with the same job: this is that job."""
        self.warnings: Sequence[Warned] = submitted.accepted.warnings
        self.deadline = submitted.accepted.deadline
        """As expected at the submission; None: the job has no deadline."""

    async def wait(self, timeout_s: float | None = None) -> "AsyncFinishedJob":
        """Waits until it has ended. Raises `WaitTimeout`."""
        [job] = await self._client.wait(self.job_id, timeout_s=timeout_s)
        return AsyncFinishedJob(self._client, job)

    async def cancel(self, reason: str | None = None) -> None:
        """Raises `Conflict` if it has ended."""
        await self._client.cancel(self.job_id, reason)

    async def hold(self, reason: str | None = None) -> None:
        """Raises `Conflict` if it has ended or is held."""
        await self._client.hold(self.job_id, reason)

    async def release(self, reason: str | None = None) -> None:
        """Raises `Conflict` if it is not held."""
        await self._client.release(self.job_id, reason)

    async def checkpoint(self, reason: str | None = None) -> Checkpoint | None:
        """Raises `Conflict` if it does not run or does not save."""
        return await self._client.checkpoint(self.job_id, reason)

    async def cores(
        self, cores: int, *, task: str | None = None, reason: str | None = None
    ) -> Sequence[TaskCores]:
        """For operators. Raises `Conflict` if its nodes have fewer cores free."""
        return await self._client.cores(self.job_id, cores, task=task, reason=reason)

    async def logs(self, **part: Unpack[LogPart]) -> str:
        return await self._client.logs(self.job_id, **part)

    async def events(self) -> AsyncGenerator[Event, None]:
        """The job's events from its submission on, as they happen, to its end."""
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
