"""Synchronous client of the gateway, over `httpx.Client`. Threads may share one."""

import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Self, TypeVar, Unpack

import httpx
import httpx_sse

from penstock.client.connection import TIMEOUT_S, Connection
from penstock.client.errors import JobNotSucceeded
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

T = TypeVar("T")


class Client:
    """One gateway. Arguments that are None come from PENSTOCK_SERVER, PENSTOCK_TOKEN_FILE and PENSTOCK_CA, as
    for the command line.

    `tries`: attempts at a gateway that does not answer, over about 16 s. Every call raises `ClientError`.
    """

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
        self._http = httpx.Client(**self._connection.options())
        self._calls = Calls(self._connection, tries)
        self.server = self._connection.server
        """The gateway's URL without a password, for messages."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    # ------------------------------------------------------------------------------------------ jobs

    def submit(
        self, job: JobSpec | Mapping[str, Any] | None = None, *, key: str | None = None, **fields: Any
    ) -> "JobHandle":
        """Submits a job: a spec, or the fields of a job file. The same key with the same job submits it once.

        Returns once it is in the log. After a lost answer the request is sent again under the same key,
        random unless given.
        """
        return JobHandle(self, self.run(self._calls.submit(job_of(job, fields), key)))

    def retry(self, job: str, *, key: str | None = None) -> "JobHandle":
        """Submits a job that has ended once more: the same spec, a new id, `spec.retry_of` with the old one.
        Raises `Conflict`.

        `key`: as of `submit`.
        """
        return JobHandle(self, self.run(self._calls.retry(job, key)))

    def send_code(self, packed: Packed) -> None:
        """Sends a folder that `penstock.sdk.code_archive.pack` has packed, once; a job runs in it with
        `sync="sha256:…"`."""
        self.run(self._calls.send_code(packed))

    def handle(self, job: str) -> "JobHandle":
        """The job with this id, the start of one, or a name (then the latest)."""
        found = self.job(job)
        return JobHandle(self, Submitted(Accepted(job_id=found.job_id), True))

    def job(self, job: str) -> Job:
        """The present state of the job, named as for `handle`."""
        return self.run(self._calls.job(job))

    def jobs(
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
        return self.run(
            self._calls.jobs(status=status, owner=owner, name=name, label=label, limit=limit, cursor=cursor)
        )

    def all_jobs(
        self,
        *,
        status: str | None = None,
        owner: str | None = None,
        name: str | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> Generator[Job, None, None]:
        """As `jobs`, over all pages; a job that is submitted meanwhile is left out."""
        cursor: int | None = None
        while True:
            page = self.jobs(status=status, owner=owner, name=name, labels=labels, limit=PAGE, cursor=cursor)
            yield from page.jobs
            if (cursor := page.next_cursor) is None:
                return

    def tasks(self, job: str) -> Sequence[Task]:
        """The tasks of all attempts."""
        return self.run(self._calls.tasks(job))

    def cancel(self, job: str, reason: str | None = None) -> Accepted:
        """Cancels the job: SIGTERM, its grace, SIGKILL. Raises `Conflict` for a job that has ended."""
        return self.run(self._calls.act(job, "cancel", reason))

    def hold(self, job: str, reason: str | None = None) -> Accepted:
        """Holds the job: it does not start until it is released; its running tasks run on. Raises
        `Conflict`."""
        return self.run(self._calls.act(job, "hold", reason))

    def release(self, job: str, reason: str | None = None) -> Accepted:
        """Ends a hold. Raises `Conflict` for a job that is not held."""
        return self.run(self._calls.act(job, "release", reason))

    def checkpoint(self, job: str, reason: str | None = None) -> Checkpoint | None:
        """Has the job save a checkpoint and train on; returns it, or None: the job was asked and reports it
        later.

        Raises `Conflict` for a job that does not run or does not save.
        """
        return self.run(self._calls.checkpoint(job, reason))

    def cores(
        self, job: str, cores: int, *, task: str | None = None, reason: str | None = None
    ) -> Sequence[TaskCores]:
        """Gives each running worker, or one task such as "w0", this number of cores for this attempt; returns
        what each has now.

        For operators. Raises `Conflict` if its nodes have fewer cores free; then nothing was changed.
        """
        return self.run(self._calls.cores(job, cores, task, reason))

    def wait(self, *jobs: str, timeout_s: float | None = None) -> list[Job]:
        """The jobs as they ended, in the order given. Raises `WaitTimeout`; with `timeout_s` 0 after one
        look."""
        waiting, looked = self._look(jobs, timeout_s)
        ended = {job.job_id: job for job in self._ends(looked, waiting)}
        return [ended[looked.jobs[text].job_id] for text in jobs]

    def ended(self, jobs: Iterable[str], *, timeout_s: float | None = None) -> Generator[Job, None, None]:
        """Each job once it has ended. Raises `WaitTimeout`."""
        waiting, looked = self._look(jobs, timeout_s)
        yield from self._ends(looked, waiting)

    def _look(self, jobs: Iterable[str], timeout_s: float | None) -> tuple[Waiting, Looked]:
        waiting = Waiting(timeout_s, jobs)
        return waiting, self.run(self._calls.look(waiting.pending), waiting)

    def _ends(self, looked: Looked, waiting: Waiting) -> Generator[Job, None, None]:
        yield from waiting.found(looked.jobs.values())
        with closing(
            self.stream("/v1/stream", str(looked.after), waiting, job=waiting.only, follows=waiting.followed)
        ) as happened:
            while waiting.pending:
                event = next(happened, None)
                if event is None:
                    raise waiting.error()
                if (job_id := waiting.took(event)) is not None:
                    yield self.run(self._calls.ended(job_id), waiting)

    def logs(self, job: str, **part: Unpack[LogPart]) -> str:
        """The output of its tasks; of several tasks, each line starts with its task. `part`: `task`,
        `attempt`, `tail`, `since`, `since_ms`."""
        return self.run(self._calls.logs(job, **part))

    def follow_logs(self, job: str, **part: Unpack[LogPart]) -> Generator[str, None, None]:
        """As `logs`, in pieces as they come, over retries until the job ends; with `attempt` until that
        attempt ends."""
        with self.lines(f"/v1/jobs/{self.job(job).job_id}/logs", **part, follow=1) as chunks:
            yield from chunks

    def why(self, job: str, at: int | None = None, *, at_ms: int | None = None) -> Why:
        """Why the job waits or is placed where it is: now, as of ledger record `at`, or of the latest record
        at `at_ms` or before."""
        return self.run(self._calls.why(job, at, at_ms))

    def eta(self, job: str) -> Eta:
        """Remaining time of the job."""
        return self.run(self._calls.eta(job))

    # ------------------------------------------------------------------------------------------ cell

    def nodes(self) -> Sequence[Node]:
        return self.run(self._calls.nodes())

    def status(self) -> Status:
        return self.run(self._calls.status())

    def events(self, *, job_id: str | None = None, after: str | None = None) -> Generator[Event, None, None]:
        """Events as they happen, for ever: from now on, or those behind the event with id `after` (`"0"`: all
        that are stored).

        After a broken connection it goes on behind the last event: none is left out and none comes twice.
        Raises `NotFound` for the job.
        """
        only = None if job_id is None else self.job(job_id).job_id
        with closing(self.stream("/v1/stream", after, job=only)) as happened:
            for event in happened:
                yield event.typed()

    # ------------------------------------------------------------------------------ the gateway's JSON

    def get(self, path: str, *, patience_s: float = TIMEOUT_S, **params: Any) -> Any:
        """The JSON at this path, for requests without a method here; parameters that are None are left
        out."""
        return self.run(self._calls.request(Request("GET", path, params, timeout_s=patience_s))).json()

    def find(self, job: str, *, ended: bool = False) -> dict[str, Any]:
        """As `job`, but the gateway's JSON. `ended`: its end was in the stream, so wait until it is shown as
        ended."""
        calls = self._calls.find_ended(job) if ended else self._calls.find(job)
        found: dict[str, Any] = self.run(calls).json()
        return found

    def text(self, path: str, **params: Any) -> str:
        """The text at this path."""
        return self.run(self._calls.request(Request("GET", path, params))).text

    def post(self, path: str, body: Any = None, **more: Any) -> Any:
        """Posts JSON and returns the JSON answer. `more`: as of `posted`."""
        return self.posted(path, body, **more)[1]

    def posted(
        self,
        path: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        *,
        patience_s: float = TIMEOUT_S,
        **params: Any,
    ) -> tuple[int, Any]:
        """As `post`, with the status, which shows a repetition. `params` that are None are left out; a query
        in `path` would be lost."""
        request = Request("POST", path, params, body, headers or {}, patience_s)
        response = self.run(self._calls.request(request))
        return response.status_code, response.json()

    @contextmanager
    def lines(self, path: str, body: Any = None, **params: Any) -> Iterator[Iterator[str]]:
        """The text at this path, or of the answer to this body, in pieces as they come."""
        method = "GET" if body is None else "POST"
        try:
            with self._http.stream(
                method, path, params=given(params), json=body, timeout=ENDLESS
            ) as response:
                if response.is_error:
                    response.read()
                    raise self._connection.refused(response)
                yield response.iter_text()
        except httpx.HTTPError as error:
            raise self._connection.unreachable(error) from error

    def stream(
        self, path: str, last_id: str | None = None, waiting: Waiting | None = None, **params: Any
    ) -> Generator[StreamEvent, None, None]:
        """The events of a stream until `waiting` is over; after a broken connection it resumes.

        Raises `Unreachable` when the gateway stays away over RECONNECT_TRIES attempts.
        """
        place, waiting = Place(self._connection, path, last_id), waiting or Waiting()
        while not waiting.over:
            cause: Exception | None = None
            try:
                with (
                    httpx_sse.connect_sse(
                        self._http,
                        "GET",
                        path,
                        params=given(params),
                        headers=place.headers(),
                        timeout=waiting.stream_timeout(),
                    ) as source,
                    waiting.cutting(source.response),
                ):
                    if source.response.is_error:
                        source.response.read()
                        raise place.refused(source.response)
                    for sse in source.iter_sse():
                        if (event := place.took(sse)) is not None:
                            yield event
            except BROKEN as error:
                cause = error
            if not waiting.over:
                time.sleep(waiting.at_most_s(place.pause_s(cause)))

    def run(self, steps: Steps[T], waiting: Waiting | None = None) -> T:
        """Carries out the steps of a call; those of a wait only within its time limit."""
        waiting = waiting or Waiting()
        try:
            step = next(steps)
            while True:
                if isinstance(step, Pause):
                    if waiting.over:
                        step = steps.throw(TimeoutError())
                        continue
                    time.sleep(waiting.at_most_s(step.seconds))
                    step = next(steps)
                    continue
                step = step._replace(timeout_s=waiting.at_most_s(step.timeout_s, LEAST_S))
                try:
                    response = self._http.request(step.method, step.path, **step.options())
                except httpx.HTTPError as error:
                    step = steps.throw(error)
                else:
                    step = steps.send(response)
        except StopIteration as end:
            value: T = end.value
            return value


class JobHandle:
    """A job that was submitted."""

    def __init__(self, client: Client, submitted: Submitted) -> None:
        self._client = client
        self.job_id = submitted.accepted.job_id
        self.repeated = submitted.repeated
        """The key was used before with the same job: this is that job."""
        self.warnings: Sequence[Warned] = submitted.accepted.warnings
        self.deadline = submitted.accepted.deadline
        """As expected at the submission; None: the job has no deadline."""

    def refresh(self) -> Job:
        """The job's present state."""
        return self._client.job(self.job_id)

    def wait(self, timeout_s: float | None = None) -> "FinishedJob":
        """Waits until it has ended. Raises `WaitTimeout`."""
        [job] = self._client.wait(self.job_id, timeout_s=timeout_s)
        return FinishedJob(self._client, job)

    def cancel(self, reason: str | None = None) -> None:
        """Raises `Conflict` if it has ended."""
        self._client.cancel(self.job_id, reason)

    def hold(self, reason: str | None = None) -> None:
        """Raises `Conflict` if it has ended or is held."""
        self._client.hold(self.job_id, reason)

    def release(self, reason: str | None = None) -> None:
        """Raises `Conflict` if it is not held."""
        self._client.release(self.job_id, reason)

    def checkpoint(self, reason: str | None = None) -> Checkpoint | None:
        """Raises `Conflict` if it does not run or does not save."""
        return self._client.checkpoint(self.job_id, reason)

    def cores(self, cores: int, *, task: str | None = None, reason: str | None = None) -> Sequence[TaskCores]:
        """For operators. Raises `Conflict` if its nodes have fewer cores free."""
        return self._client.cores(self.job_id, cores, task=task, reason=reason)

    def logs(self, **part: Unpack[LogPart]) -> str:
        return self._client.logs(self.job_id, **part)

    def events(self) -> Generator[Event, None, None]:
        """The job's events from its submission on, as they happen, to its end."""
        with closing(self._client.events(job_id=self.job_id, after="0")) as happened:
            for event in happened:
                yield event
                if event.type == ENDED:
                    return

    def why(self, at: int | None = None, *, at_ms: int | None = None) -> Why:
        return self._client.why(self.job_id, at, at_ms=at_ms)

    def eta(self) -> Eta:
        return self._client.eta(self.job_id)


class FinishedJob(JobHandle):
    """A job that has ended."""

    def __init__(self, client: Client, job: Job) -> None:
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
