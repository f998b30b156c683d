"""Server-sent events with reconnection: the position to resume from, the bound on attempts, and the time
limit of a wait."""

import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import httpx
import httpx_sse
import msgspec

from penstock.backoff import Backoff
from penstock.client.connection import TIMEOUT_S, Connection
from penstock.client.errors import ClientError, GatewayFault, WaitTimeout
from penstock.client.models import Event, Job
from penstock.client.requests import FIRST_PAUSE_S, LAST_PAUSE_S, PASSING
from penstock.model.inputs.followers import MAX_FOLLOWED

# The gateway sends comments into idle streams more often; silence beyond this means a dead connection.
SILENCE_S = 60.0
ENDLESS = httpx.Timeout(TIMEOUT_S, read=None)
RECONNECT_TRIES = 8
LEAST_S = 1.0  # a look at a job may last so long, also when the time limit is over: a limit of 0 is one look
ENDED = "penstock.job.ended"
BROKEN = (httpx.HTTPError, httpx.StreamError, httpx_sse.SSEError, OSError)


class StreamEvent(NamedTuple):
    """One event of the gateway's stream. `data`: its JSON."""

    id: str
    type: str
    data: dict[str, Any]

    def typed(self) -> Event:
        """Raises `GatewayFault`."""
        try:
            return msgspec.convert(self.data, Event)
        except msgspec.ValidationError as error:
            raise GatewayFault(f"event {self.id} of the stream cannot be decoded: {error}") from error


class Place:
    """Position in a stream: the id of its last event (`Last-Event-ID`), and the number of breaks since."""

    def __init__(self, connection: Connection, path: str, last_id: str | None) -> None:
        self._connection = connection
        self._path = path
        self._last_id = last_id
        self._backoff, self._failures = Backoff(FIRST_PAUSE_S, LAST_PAUSE_S), 0

    def headers(self) -> dict[str, str]:
        return {"Last-Event-ID": self._last_id} if self._last_id else {}

    def took(self, sse: httpx_sse.ServerSentEvent) -> StreamEvent | None:
        """The frame's event, whose id is now the position; None: a frame without data. Raises
        `GatewayFault`."""
        self._connection.answered()
        self._last_id = sse.id or self._last_id
        self._failures = 0
        self._backoff.reset()
        try:
            return StreamEvent(sse.id, sse.event, sse.json()) if sse.data else None
        except ValueError as error:
            text = f"{self._connection.server}{self._path} sent something that is not an event: {error}"
            raise GatewayFault(text) from error

    def refused(self, response: httpx.Response) -> Exception:
        """The exception for an answer that is an error; its body has been read."""
        error = self._connection.refused(response)
        return Passing(error) if response.status_code in PASSING else error

    def pause_s(self, cause: Exception | None) -> float:
        """Pause before the next attempt. `cause`: the connection's error, None: the gateway ended it. Raises
        `ClientError` to give up."""
        if cause is not None and (misfit := self._connection.misfit(cause)) is not None:
            raise misfit from cause
        self._failures += 1
        if self._failures >= RECONNECT_TRIES:
            raise (
                cause.error if isinstance(cause, Passing) else self._connection.unreachable(cause)
            ) from cause
        return self._backoff.next_s()


class Passing(httpx.TransportError):
    """The gateway is overloaded, or its database is away: worth another try. `error`: its answer."""

    def __init__(self, error: ClientError) -> None:
        super().__init__(str(error))
        self.error = error


class Waiting:
    """A wait for jobs, for `limit_s` at most; None: for ever. `pending`: the jobs not known to have ended."""

    def __init__(self, limit_s: float | None = None, jobs: Iterable[str] = ()) -> None:
        self._limit_s = limit_s
        self._ends_s = None if limit_s is None else time.monotonic() + limit_s
        self.pending = dict.fromkeys(jobs)
        self._total = len(self.pending)
        self.followed: list[str] | None = None
        """Those of the jobs that are tied to their follower, which this wait is."""

    @property
    def left_s(self) -> float | None:
        return None if self._ends_s is None else max(0.0, self._ends_s - time.monotonic())

    @property
    def over(self) -> bool:
        return self.left_s == 0.0

    def at_most_s(self, seconds: float, least_s: float = 0.0) -> float:
        """`seconds`, or the time left if that is less; the time left counts as `least_s` at least."""
        return seconds if self.left_s is None else min(seconds, max(self.left_s, least_s))

    def patience_s(self, seconds: float) -> float:
        """Time limit of one request of this wait, of `seconds` at most."""
        return self.at_most_s(seconds, LEAST_S)

    def found(self, jobs: Iterable[Job]) -> list[Job]:
        """The jobs that have ended; the others become `pending`."""
        by_id = {job.job_id: job for job in jobs}
        self.pending = {job_id: None for job_id, job in by_id.items() if job.outcome is None}
        self._total = len(by_id)
        tied = [one.job_id for one in by_id.values() if one.outcome is None and one.spec and one.spec.tied_to]
        self.followed = tied[:MAX_FOLLOWED] or None
        return [job for job in by_id.values() if job.outcome is not None]

    @property
    def only(self) -> str | None:
        """The one job that is left."""
        return next(iter(self.pending)) if len(self.pending) == 1 else None

    def took(self, event: StreamEvent) -> str | None:
        """The pending job whose end this event is; None: another event."""
        job_id = event.data["job_id"]
        if event.data["type"] != ENDED or job_id not in self.pending:
            return None
        del self.pending[job_id]
        return str(job_id)

    def error(self) -> ClientError:
        limit = f"within {self._limit_s:g} s"
        if self._total == 1:
            return WaitTimeout(f"job {self.only} has not ended {limit}; it goes on")
        return WaitTimeout(f"{len(self.pending)} of {self._total} jobs have not ended {limit}; they go on")

    def stream_timeout(self) -> httpx.Timeout:
        return httpx.Timeout(self.at_most_s(TIMEOUT_S, LEAST_S), read=self.at_most_s(SILENCE_S, LEAST_S))
