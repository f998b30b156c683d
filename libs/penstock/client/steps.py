"""Sans-IO core of both clients: each call is a generator that yields requests and pauses and is sent the
answers.

`Client` and `AsyncClient` only carry them out, so that requests, retries and the parsing of answers are
defined once.
"""

import getpass
import os
import re
import secrets
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypedDict, TypeVar, Unpack
from urllib.parse import quote

import httpx
import msgspec

from penstock.client.connection import TIMEOUT_S, WORKER_TIMEOUT_S, Connection
from penstock.client.errors import BadField, BadRequest, GatewayFault, NotFound, NotPermitted
from penstock.client.models import (
    Accepted,
    Answer,
    Checkpoint,
    CoresChanged,
    Eta,
    Job,
    Node,
    Nodes,
    Page,
    Saved,
    Status,
    Task,
    TaskCores,
    Tasks,
    Why,
)
from penstock.model.nouns.job_ids import STARTS_LIKE_AN_ID
from penstock.model.nouns.types import JobSpec
from penstock.model.wire.codec import as_written
from penstock.retry import Backoff
from penstock.sdk.code_archive import Packed
from penstock.sdk.job_file.jobfile import BadJob, parse_job
from penstock.sdk.reporter.own_folder import is_a_tasks_own
from penstock.text.redaction import brief

T = TypeVar("T")
A = TypeVar("A", bound=Answer)

PASSING = frozenset({429, 503})  # overloaded, or the database is away: worth another try
MAX_OVERLOAD_TRIES = 5
MAX_RETRY_AFTER_S = 10.0
FIRST_PAUSE_S, LAST_PAUSE_S = 0.2, 5.0
OCTETS = {"Content-Type": "application/octet-stream"}
SEND_TIMEOUT_S = 60.0  # of code: for each write, and for the answer
LOOKS_AFTER_END = 8  # at a job whose end was in the stream: another gateway may be behind
PAGE = 200  # jobs
MAX_NAMED = 3  # jobs in a sentence
NO_JOB = "no_job"  # kind of the problem
REPEATED = 200  # status of a key that was used before with the same job


class Request(NamedTuple):
    """One HTTP request. Parameters that are None are left out."""

    method: str
    path: str
    params: Mapping[str, Any] = {}
    body: Any = None
    headers: Mapping[str, str] = {}
    timeout_s: float = TIMEOUT_S

    @property
    def repeatable(self) -> bool:
        """Whether the request is idempotent: a retry after a lost answer has no further effect."""
        return self.method in ("GET", "PUT") or "Idempotency-Key" in self.headers

    def options(self) -> dict[str, Any]:
        """Arguments of `httpx.Client.request`."""
        body = {} if self.body is None else {"content" if isinstance(self.body, bytes) else "json": self.body}
        return {"params": given(self.params), "headers": self.headers, "timeout": self.timeout_s, **body}


class Pause(NamedTuple):
    """A wait before the next request. `TimeoutError` is thrown in where the caller's time is over."""

    seconds: float


Steps: TypeAlias = Generator[Request | Pause, Any, T]


class Looked(NamedTuple):
    """Jobs by the texts that name them. `after`: the stream from this record on has every end that the jobs
    do not show."""

    jobs: dict[str, Job]
    after: int


class Submitted(NamedTuple):
    """The gateway's acknowledgement. `repeated`: the key was used before with the same job."""

    accepted: Accepted
    repeated: bool


class LogPart(TypedDict, total=False):
    """Filter of a job's output: without any field, all output of its latest attempt."""

    task: str | None
    """Only this task: its id, or w0, worker-0, ps1, …"""
    attempt: int | None
    tail: int | None
    """Only the last lines of each task."""
    since: str | None
    """Only output of this age at most, such as `"5m"`, by the clock of the node."""
    since_ms: int | None
    """Only output from this time on, in ms since 1970."""


def given(params: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters that are not None."""
    return {name: value for name, value in params.items() if value is not None}


_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}\Z")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}\Z")


def job_path(job_id: str, more: str = "") -> str:
    """The URL path of a job. Raises `NotFound` for a text that is not an id."""
    if not _ID.match(job_id):
        raise NotFound(f"job {_shown(job_id)}: not found; `penstock get jobs` lists them", kind=NO_JOB)
    return f"/v1/jobs/{quote(job_id)}{more}"


def _shown(text: str) -> str:
    return text if _NAME.match(text) else brief(text)


def send(connection: Connection, request: Request, tries: int) -> Steps[httpx.Response]:
    """The answer. Waits out overload and outages (429, 503) within a bound; `tries`: attempts in all at a
    gateway that does not answer.

    A request with an effect is sent again only if it carries a key, or no connection came about. Raises
    `ClientError`.
    """
    backoff, overloads = Backoff(FIRST_PAUSE_S, LAST_PAUSE_S), 0
    while True:
        try:
            response: httpx.Response = yield request
        except httpx.HTTPError as error:
            tries -= 1
            again = request.repeatable or isinstance(error, httpx.ConnectError)
            if not again or tries <= 0 or connection.misfit(error) is not None:
                raise connection.unreachable(error) from error
            try:
                yield Pause(backoff.next_s())
            except TimeoutError:
                raise connection.unreachable(error) from error
            continue
        connection.answered()
        overloads += 1
        if response.status_code not in PASSING or overloads == MAX_OVERLOAD_TRIES:
            break
        try:
            yield Pause(min(_seconds(response.headers.get("Retry-After")), MAX_RETRY_AFTER_S))
        except TimeoutError:
            break
    if response.is_error:
        raise connection.refused(response)
    return response


def read(response: httpx.Response, kind: type[T]) -> T:
    """The answer as a value. Raises `GatewayFault`."""
    try:
        return msgspec.json.decode(response.content, type=kind)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise GatewayFault(
            f"{response.request.url.path} answered what is no {kind.__name__}: {error}"
        ) from error


def job_of(job: JobSpec | Mapping[str, Any] | None, fields: Mapping[str, Any]) -> JobSpec:
    """The job of a spec, or of the fields of a job file; owner and workdir default to this user and folder.
    Raises `BadRequest`."""
    if isinstance(job, JobSpec):
        try:
            return msgspec.structs.replace(job, **fields)
        except TypeError as error:
            raise BadRequest(f"this is no job: {error}; give fields of JobSpec") from error
    here = {} if is_a_tasks_own(os.getcwd()) else {"workdir": os.getcwd()}
    named = {"owner": _user(), **here, **(job or {}), **fields}
    try:
        return parse_job(named)
    except BadJob as error:
        wrong = [BadField(problem.field, *_split(problem.text)) for problem in error.problems]
        raise BadRequest(f"this is no job: {error}", fields=wrong) from error


def _split(text: str) -> tuple[str, str]:
    message, _, remedy = text.rpartition("; ")
    return (message, remedy) if message else (text, "correct it")


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return f"uid-{os.getuid()}"


class Calls:
    """The calls of one gateway."""

    def __init__(self, connection: Connection, tries: int) -> None:
        self._connection = connection
        self._tries = tries

    def request(self, request: Request) -> Steps[httpx.Response]:
        return send(self._connection, request, self._tries)

    def get(self, kind: type[T], path: str, patience_s: float = TIMEOUT_S, **params: Any) -> Steps[T]:
        response = yield from self.request(Request("GET", path, params, timeout_s=patience_s))
        return read(response, kind)

    def submit(self, spec: JobSpec, key: str | None) -> Steps[Submitted]:
        headers = {"Idempotency-Key": key or f"client-{secrets.token_hex(16)}"}
        response = yield from self.request(
            Request("POST", "/v1/jobs", body=as_written(spec), headers=headers)
        )
        return Submitted(read(response, Accepted), response.status_code == REPEATED)

    def retry(self, job: str, key: str | None) -> Steps[Submitted]:
        headers = {"Idempotency-Key": key or f"client-{secrets.token_hex(16)}"}

        def ask(job_id: str) -> Steps[Submitted]:
            request = Request("POST", job_path(job_id, "/retry"), headers=headers)
            response = yield from self.request(request)
            return Submitted(read(response, Accepted), response.status_code == REPEATED)

        return (yield from self._of(job, ask))

    def send_code(self, packed: Packed) -> Steps[None]:
        path = f"/v1/code/{packed.sha256}"
        response = yield from self.request(Request("GET", path))
        if not response.json()["stored"]:
            yield from self.request(
                Request("PUT", path, body=packed.data, headers=OCTETS, timeout_s=SEND_TIMEOUT_S)
            )

    def act(self, job: str, act: str, reason: str | None) -> Steps[Accepted]:
        return self._act(Accepted, job, act, reason=reason)

    def checkpoint(self, job: str, reason: str | None) -> Steps[Checkpoint | None]:
        return (yield from self._act(Saved, job, "checkpoint", reason=reason)).checkpoint

    def cores(self, job: str, cores: int, task: str | None, reason: str | None) -> Steps[Sequence[TaskCores]]:
        asked = self._act(CoresChanged, job, "cores", cores=cores, task=task, reason=reason)
        return (yield from asked).tasks

    def _act(self, kind: type[A], job: str, act: str, **body: Any) -> Steps[A]:
        def ask(job_id: str) -> Steps[A]:
            request = Request("POST", job_path(job_id, f"/{act}"), body=given(body))
            return read((yield from self.request(request)), kind)

        return (yield from self._of(job, ask))

    def _of(self, job: str, ask: Callable[[str], Steps[T]]) -> Steps[T]:
        """The answer to `ask` for a job; the job is searched by name only if its text is not an id. Raises
        `NotFound`."""
        try:
            return (yield from ask(job))
        except NotFound as missing:
            if missing.kind != NO_JOB:
                raise
            try:
                found = yield from self.job(job)
            except NotPermitted:  # a token that may submit and not read
                raise missing from None
        return (yield from ask(found.job_id))

    def _about(self, kind: type[T], job: str, more: str, **params: Any) -> Steps[T]:
        return self._of(job, lambda job_id: self.get(kind, job_path(job_id, more), **params))

    def find(self, text: str) -> Steps[httpx.Response]:
        """The job with this id; else the latest of this name; else the only one with this prefix of its id.
        Raises `NotFound`.

        A prefix as tables show it comes before a name: a job's name may have the same form.
        """
        try:
            return (yield from self.request(Request("GET", job_path(text))))
        except NotFound as error:
            missing = error
        named: Sequence[Job] = ()
        searches: list[dict[str, Any]] = [{"name": text, "limit": 1}] if _NAME.match(text) else []
        if _ID.match(text):
            first = 0 if STARTS_LIKE_AN_ID.match(text) else len(searches)
            searches.insert(first, {"prefix": text, "limit": MAX_NAMED + 1})
        for search in searches:
            named = named or (yield from self.jobs(**search)).jobs
        if len(named) > 1:
            some = ", ".join(job.job_id for job in named[:MAX_NAMED])
            raise NotFound(f"job {text}: several ids start so ({some}, …); give more of it")
        if not named:
            left = str(missing).partition(". ")[2]  # the hint that old jobs have left the tables
            text = f"job {_shown(text)}: not found; `penstock get jobs` lists them{'. ' * bool(left)}{left}"
            raise NotFound(text, kind=NO_JOB) from missing
        return (yield from self.request(Request("GET", job_path(named[0].job_id))))

    def find_ended(self, job_id: str) -> Steps[httpx.Response]:
        """A job whose end was in the stream, once the answering gateway has read that end, too. Raises
        `GatewayFault`."""
        backoff = Backoff(FIRST_PAUSE_S / 4, LAST_PAUSE_S)
        for _ in range(LOOKS_AFTER_END):
            response = yield from self.find(job_id)
            if read(response, Job).outcome is not None:
                return response
            try:
                yield Pause(backoff.next_s())
            except TimeoutError:
                break
        raise GatewayFault(
            f"{self._connection.server}: job {job_id} has ended, and is still shown as not ended"
        )

    def job(self, text: str) -> Steps[Job]:
        return read((yield from self.find(text)), Job)

    def ended(self, job_id: str) -> Steps[Job]:
        return read((yield from self.find_ended(job_id)), Job)

    def look(self, jobs: Iterable[str]) -> Steps[Looked]:
        """The jobs, with the stream's position from before they were read: several gateways may have read to
        different records."""
        status = yield from self.status()
        found, after = {}, min(status.seq, status.projected_seq)
        for text in jobs:
            job = found[text] = yield from self.job(text)
            if job.outcome is None and job.seq:
                after = min(after, job.seq)
        return Looked(found, after)

    def jobs(self, **params: Any) -> Steps[Page]:
        return self.get(Page, "/v1/jobs", **params)

    def tasks(self, job: str) -> Steps[Sequence[Task]]:
        return (yield from self._about(Tasks, job, "/tasks")).tasks

    def nodes(self) -> Steps[Sequence[Node]]:
        return (yield from self.get(Nodes, "/v1/nodes")).nodes

    def why(self, job: str, at: int | None, at_ms: int | None) -> Steps[Why]:
        now = at is None and at_ms is None
        bound_s = TIMEOUT_S if now else WORKER_TIMEOUT_S
        return self._about(Why, job, "/why", patience_s=bound_s, at=at, at_ms=at_ms)

    def eta(self, job: str) -> Steps[Eta]:
        return self._about(Eta, job, "/eta")

    def status(self) -> Steps[Status]:
        return self.get(Status, "/v1/status")

    def logs(self, job: str, **part: Unpack[LogPart]) -> Steps[str]:
        def ask(job_id: str) -> Steps[str]:
            return (yield from self.request(Request("GET", job_path(job_id, "/logs"), {**part}))).text

        return self._of(job, ask)


def _seconds(text: str | None) -> float:
    try:
        return max(0.1, float(text or "1"))
    except ValueError:
        return 1.0
