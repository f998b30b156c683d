"""Requests of both clients and what their answers mean: no input or output, so that the asynchronous client
and the blocking one share them."""

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self, TypedDict, TypeVar
from urllib.parse import quote

import httpx
import msgspec

from penstock.client.connection import TIMEOUT_S
from penstock.client.errors import ClientError, GatewayFault, NotFound
from penstock.client.models import Accepted, Job
from penstock.model.nouns.job_ids import STARTS_LIKE_AN_ID
from penstock.text.redaction import brief

T = TypeVar("T")

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

    def about(self, job: str) -> Self:
        """The request whose `path` goes on behind that of the job. Raises `NotFound`."""
        return self._replace(path=job_path(job, self.path))

    def options(self, timeout_s: float) -> dict[str, Any]:
        """Arguments of `httpx.Client.request`."""
        body = {} if self.body is None else {"content" if isinstance(self.body, bytes) else "json": self.body}
        return {"params": given(self.params), "headers": self.headers, "timeout": timeout_s, **body}


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


def read(response: httpx.Response, kind: type[T]) -> T:
    """The answer as a value. Raises `GatewayFault`."""
    try:
        return msgspec.json.decode(response.content, type=kind)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise GatewayFault(
            f"{response.request.url.path} answered with something that is not a {kind.__name__}: {error}"
        ) from error


def submitted(response: httpx.Response) -> Submitted:
    """The answer to a submission. Raises `GatewayFault`."""
    return Submitted(read(response, Accepted), response.status_code == REPEATED)


def key_header(key: str | None) -> dict[str, str]:
    """The header with the idempotency key; None: a random one."""
    return {"Idempotency-Key": key or f"client-{secrets.token_hex(16)}"}


def searches(text: str) -> list[dict[str, Any]]:
    """Parameters of the lists of jobs in which a job of this name, or prefix of its id, is searched, in
    order."""
    found: list[dict[str, Any]] = [{"name": text, "limit": 1}] if _NAME.match(text) else []
    if _ID.match(text):
        first = 0 if STARTS_LIKE_AN_ID.match(text) else len(found)
        found.insert(first, {"prefix": text, "limit": MAX_NAMED + 1})
    return found


def ambiguous(text: str, jobs: Sequence[Job]) -> ClientError:
    """The error of a prefix of several ids."""
    some = ", ".join(job.job_id for job in jobs[:MAX_NAMED])
    return NotFound(f"job {text}: several ids start so ({some}, …); give more of it")


def not_found(text: str, missing: NotFound) -> ClientError:
    """The error of a text that names no job. `missing`: the answer to the text as an id."""
    left = str(missing).partition(". ")[2]  # the hint that old jobs have left the tables
    where = f"job {_shown(text)}: not found; `penstock get jobs` lists them{'. ' * bool(left)}{left}"
    return NotFound(where, kind=NO_JOB)


def retry_after_s(response: httpx.Response) -> float:
    """The pause that an overloaded gateway asks for, 0.1 to `MAX_RETRY_AFTER_S` seconds; 1 where it names
    none."""
    try:
        asked_s = max(0.1, float(response.headers.get("Retry-After") or "1"))
    except ValueError:
        asked_s = 1.0
    return min(asked_s, MAX_RETRY_AFTER_S)
