"""The requests of every call, without IO: each is a generator that yields requests and pauses and is sent the answers.

`Client` and `AsyncClient` only carry them out, so that what is asked, repeated and made of the answers stands once.
"""

import getpass
import os
import secrets
from collections.abc import Generator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypedDict, TypeVar, Unpack

import httpx
import msgspec

from penstock.client.connection import TIMEOUT_S, Connection
from penstock.client.errors import BadField, BadRequest, GatewayFault, NotFound
from penstock.client.models import Accepted, Eta, Job, Node, Nodes, Page, Status, Task, Tasks, Why
from penstock.model.codec import as_written
from penstock.model.types import JobSpec
from penstock.retry import Backoff
from penstock.sdk.code_archive import Packed
from penstock.sdk.jobfile import BadJob, parse_job

T = TypeVar("T")

PASSING = frozenset({429, 503})  # overloaded, or the database is away: worth another try
MAX_OVERLOAD_TRIES = 5
MAX_RETRY_AFTER_S = 10.0
FIRST_PAUSE_S, LAST_PAUSE_S = 0.2, 5.0
OCTETS = {"Content-Type": "application/octet-stream"}
SEND_TIMEOUT_S = 60.0  # of code: for each write, and for the answer
MAX_ID_CHARS = 128  # of a job's id or name
MAX_NAMED = 3  # jobs in a sentence
REPEATED = 200  # status of a key that was seen before with the same job


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
        """Whether sending it twice is the same as once, also where the first one's answer was lost."""
        return self.method in ("GET", "PUT") or "Idempotency-Key" in self.headers

    def options(self) -> dict[str, Any]:
        """For `httpx.Client.request`."""
        body = {} if self.body is None else {"content" if isinstance(self.body, bytes) else "json": self.body}
        return {"params": given(self.params), "headers": self.headers, "timeout": self.timeout_s, **body}


class Pause(NamedTuple):
    """Wait before going on."""

    seconds: float


Steps: TypeAlias = Generator[Request | Pause, Any, T]


class Submitted(NamedTuple):
    """The gateway's acknowledgement. `repeated`: the key was seen before with the same job."""

    accepted: Accepted
    repeated: bool


class LogPart(TypedDict, total=False):
    """Which part of a job's output is wanted: without any, all of its latest attempt."""

    task: str | None
    """Only this task: its id, or w0, worker-0, ps1, …"""
    attempt: int | None
    tail: int | None
    """Only the last lines of each task."""
    since: str | None
    """Only what is no older, such as `"5m"`, by the clock of the node."""
    since_ms: int | None
    """Only what was printed at this time or later, in ms since 1970."""


def given(params: Mapping[str, Any]) -> dict[str, Any]:
    """Without what is None."""
    return {name: value for name, value in params.items() if value is not None}


def send(connection: Connection, request: Request, tries: int) -> Steps[httpx.Response]:
    """The answer. Sits out overload and outages (429, 503) within a bound; `tries`: attempts in all at a gateway that does not answer.

    A request that acts is sent again only if it carries a key, or no connection came about. Raises `ClientError`.
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
            yield Pause(backoff.next_s())
            continue
        overloads += 1
        if response.status_code not in PASSING or overloads == MAX_OVERLOAD_TRIES:
            break
        yield Pause(min(_seconds(response.headers.get("Retry-After")), MAX_RETRY_AFTER_S))
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
    """The job of a spec, or of the fields of a job file; owner and workdir default to who and where we are. Raises `BadRequest`."""
    if isinstance(job, JobSpec):
        return msgspec.structs.replace(job, **fields)
    named = {"owner": _user(), "workdir": os.getcwd(), **(job or {}), **fields}
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

    def get(self, kind: type[T], path: str, **params: Any) -> Steps[T]:
        response = yield from self.request(Request("GET", path, params))
        return read(response, kind)

    def submit(self, spec: JobSpec, key: str | None) -> Steps[Submitted]:
        headers = {"Idempotency-Key": key or f"client-{secrets.token_hex(16)}"}
        response = yield from self.request(
            Request("POST", "/v1/jobs", body=as_written(spec), headers=headers)
        )
        return Submitted(read(response, Accepted), response.status_code == REPEATED)

    def send_code(self, packed: Packed) -> Steps[None]:
        path = f"/v1/code/{packed.sha256}"
        response = yield from self.request(Request("GET", path))
        if not response.json()["stored"]:
            yield from self.request(
                Request("PUT", path, body=packed.data, headers=OCTETS, timeout_s=SEND_TIMEOUT_S)
            )

    def act(self, job_id: str, act: str, reason: str | None) -> Steps[Accepted]:
        path = f"/v1/jobs/{job_id}/{act}"
        response = yield from self.request(Request("POST", path, body=given({"reason": reason})))
        return read(response, Accepted)

    def find(self, text: str) -> Steps[httpx.Response]:
        """The job with this id; else the latest of this name; else the only one whose id starts so. Raises `NotFound`."""
        try:
            return (yield from self.request(Request("GET", f"/v1/jobs/{text}")))
        except NotFound as error:
            missing = error
        if len(text) > MAX_ID_CHARS:
            raise missing
        named = (yield from self.jobs(name=text, limit=1)).jobs
        starting = () if named else (yield from self.jobs(prefix=text, limit=MAX_NAMED + 1)).jobs
        if len(starting) > 1:
            some = ", ".join(job.job_id for job in starting[:MAX_NAMED])
            raise NotFound(f"job {text}: several ids start so ({some}, …); give more of it")
        if not named and not starting:
            raise NotFound(f"job {text}: not found; `penstock get jobs` lists them") from missing
        [found] = named or starting
        return (yield from self.request(Request("GET", f"/v1/jobs/{found.job_id}")))

    def job(self, text: str) -> Steps[Job]:
        return read((yield from self.find(text)), Job)

    def jobs(self, **params: Any) -> Steps[Page]:
        return self.get(Page, "/v1/jobs", **params)

    def tasks(self, job_id: str) -> Steps[Sequence[Task]]:
        return (yield from self.get(Tasks, f"/v1/jobs/{job_id}/tasks")).tasks

    def nodes(self) -> Steps[Sequence[Node]]:
        return (yield from self.get(Nodes, "/v1/nodes")).nodes

    def why(self, job_id: str, at: int | None, at_ms: int | None) -> Steps[Why]:
        return self.get(Why, f"/v1/jobs/{job_id}/why", at=at, at_ms=at_ms)

    def eta(self, job_id: str) -> Steps[Eta]:
        return self.get(Eta, f"/v1/jobs/{job_id}/eta")

    def status(self) -> Steps[Status]:
        return self.get(Status, "/v1/status")

    def logs(self, job_id: str, **part: Unpack[LogPart]) -> Steps[str]:
        return (yield from self.request(Request("GET", f"/v1/jobs/{job_id}/logs", {**part}))).text


def _seconds(text: str | None) -> float:
    try:
        return max(0.1, float(text or "1"))
    except ValueError:
        return 1.0
