"""HTTP client of the gateway: requests, its event stream, and errors with a remedy.

Every failure becomes `Stop` with the exit code of `exits.py` and one line: what, where, remedy.
"""

import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import httpx_sse

from penstock.bearer import bearer_token
from penstock.errors import ConfigurationError
from penstock.exits import Exit, Stop
from penstock.redaction import without_password
from penstock.retry import Backoff
from penstock.tls import SYSTEM_CA, client_context, misfit

DEFAULT_SERVER = "http://127.0.0.1:8742"
TIMEOUT_S = 10.0  # connect, and wait for a first byte
STREAM_TIMEOUT_S = (
    60.0  # the gateway comments into idle streams more often; silence beyond this is a dead line
)
PASSING = frozenset({429, 503})  # overloaded, or the database is away: worth another try
MAX_OVERLOAD_TRIES = 5
MAX_RETRY_AFTER_S = 10.0
RECONNECT_TRIES = 8
FIRST_PAUSE_S, LAST_PAUSE_S = 0.2, 5.0


_TOKEN = re.compile(r"[!-~]+\Z")
"""What HTTP can carry of a token."""


class StreamEvent(NamedTuple):
    """One event of the gateway's stream."""

    id: str
    type: str
    data: dict[str, Any]


class Gateway:
    """One gateway. `server`: its URL; `token`: sent as a bearer token; `ca`: PEM file of the authority of its certificate."""

    def __init__(self, server: str, token: str | None = None, ca: str | None = None) -> None:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        if token and not _TOKEN.match(token):
            raise Stop(
                Exit.NOT_ALLOWED,
                "--token-file (PENSTOCK_TOKEN_FILE) does not hold one token in one line; `penstock token` makes one",
            )
        self.server = without_password(server).rstrip("/")
        """For messages: what it is connected to, without a password."""
        server = server.rstrip("/")
        self._ca = ca or SYSTEM_CA
        encrypted = not server.startswith("http://")  # to read the system's certificates takes 25 ms
        if ca and not encrypted:
            raise Stop(
                Exit.BAD_SPEC,
                f"--server {self.server} is not encrypted, and --ca (PENSTOCK_CA) names an authority: write https://, or leave "
                "--ca out",
            )
        try:
            verify = client_context(self._ca, "--ca") if encrypted else False
            self._http = httpx.Client(
                base_url=server, headers=headers, timeout=TIMEOUT_S, trust_env=False, verify=verify
            )
        except ConfigurationError as error:
            raise Stop(Exit.BAD_SPEC, str(error)) from error
        except (httpx.InvalidURL, ValueError) as error:
            raise Stop(
                Exit.BAD_SPEC, f"--server {self.server}: no usable address; give http://host:port"
            ) from error

    def close(self) -> None:
        self._http.close()

    def get(self, path: str, *, patience_s: float = TIMEOUT_S, **params: Any) -> Any:
        """The JSON at this path; parameters that are None are left out."""
        return self._send("GET", path, params=_given(params), timeout=patience_s).json()

    def text(self, path: str, **params: Any) -> str:
        """The text at this path."""
        return self._send("GET", path, params=_given(params)).text

    def post(self, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Any:
        """Posts JSON and returns the JSON answer. Sits out overload and outages (429, 503) within a bound."""
        return self.posted(path, body, headers)[1]

    def posted(
        self, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, Any]:
        """As `post`: the status, by which a repetition is known, and the JSON answer."""
        response = self._send("POST", path, json=body, headers=headers)
        return response.status_code, response.json()

    def _send(self, method: str, path: str, **options: Any) -> httpx.Response:
        for last in (*[False] * (MAX_OVERLOAD_TRIES - 1), True):
            try:
                response = self._http.request(method, path, **options)
            except httpx.HTTPError as error:
                raise self._unreachable(error) from error
            if response.status_code not in PASSING or last:
                break
            time.sleep(min(_seconds(response.headers.get("Retry-After")), MAX_RETRY_AFTER_S))
        if response.is_error:
            raise self._refused(response)
        return response

    @contextmanager
    def lines(self, path: str, **params: Any) -> Iterator[Iterator[str]]:
        """The text at this path, as it comes."""
        timeout = httpx.Timeout(TIMEOUT_S, read=None)
        try:
            with self._http.stream("GET", path, params=_given(params), timeout=timeout) as response:
                if response.is_error:
                    response.read()
                    raise self._refused(response)
                yield response.iter_text()
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error

    def events(self, path: str, last_id: str | None = None, **params: Any) -> Iterator[StreamEvent]:
        """The events of a stream, for ever; after a broken line it goes on where it was (`Last-Event-ID`).

        Raises `Stop` when the gateway stays away over RECONNECT_TRIES attempts.
        """
        backoff, failures = Backoff(FIRST_PAUSE_S, LAST_PAUSE_S), 0
        timeout = httpx.Timeout(TIMEOUT_S, read=STREAM_TIMEOUT_S)
        while True:
            headers = {"Last-Event-ID": last_id} if last_id else {}
            cause: Exception | None = None
            try:
                with httpx_sse.connect_sse(
                    self._http, "GET", path, params=_given(params), headers=headers, timeout=timeout
                ) as source:
                    if source.response.is_error:
                        source.response.read()
                        refusal = self._refused(source.response)
                        if source.response.status_code not in PASSING:
                            raise refusal
                        raise httpx.TransportError(str(refusal))
                    for sse in source.iter_sse():
                        last_id = sse.id or last_id
                        failures = 0
                        backoff.reset()
                        if sse.data:  # a frame may only set the time to reconnect
                            yield StreamEvent(sse.id, sse.event, sse.json())
            except (httpx.HTTPError, httpx_sse.SSEError) as error:
                cause = error
                if (stop := self._misfit(error)) is not None:
                    raise stop from error
            except ValueError as error:
                raise Stop(Exit.PROBLEM, f"{self.server}{path} sent what is no event: {error}") from error
            failures += 1
            if failures >= RECONNECT_TRIES:
                raise self._unreachable(cause) from cause
            time.sleep(backoff.next_s())

    def _unreachable(self, error: Exception | None) -> Stop:
        if isinstance(error, httpx.UnsupportedProtocol | httpx.InvalidURL):
            return Stop(Exit.BAD_SPEC, f"--server {self.server}: no usable address; give http://host:port")
        if (stop := self._misfit(error)) is not None:
            return stop
        why = "it does not answer" if isinstance(error, httpx.TimeoutException) else _plain(error)
        return Stop(
            Exit.UNREACHABLE,
            f"no gateway at {self.server} ({why.rstrip('.')}); start one with `penstock up`, or name it with "
            "--server or PENSTOCK_SERVER",
        )

    def _misfit(self, error: Exception | None) -> Stop | None:
        """For what no repetition mends."""
        why = misfit(error, self.server, self._ca, "--ca or PENSTOCK_CA")
        return None if why is None else Stop(Exit.BAD_SPEC, f"--server {self.server}: {why}")

    def _refused(self, response: httpx.Response) -> Stop:
        """The gateway's problem+json (RFC 9457) as one line with our exit code."""
        problem = _problem(response)
        detail = problem.get("detail") or problem.get("title") or f"HTTP {response.status_code}"
        status = response.status_code
        if status in (401, 403):
            remedy = "; name the file that holds your token with --token-file or PENSTOCK_TOKEN_FILE"
            return Stop(Exit.NOT_ALLOWED, f"{self.server}: {detail}{remedy if status == 401 else ''}")
        if status == 409 and response.request.method == "POST" and response.request.url.path == "/v1/jobs":
            return Stop(Exit.KEY_CONFLICT, f"{detail}")
        if status in (400, 413, 415, 422):
            return Stop(Exit.BAD_SPEC, detail)
        if status in PASSING:
            return Stop(Exit.UNREACHABLE, f"{self.server}: {detail}; it stayed so, try again later")
        return Stop(Exit.PROBLEM, f"{detail}")


def gateway_from(server: str | None, token_file: Path | None, ca: Path | None = None) -> Gateway:
    """The gateway that flags or the environment name."""
    path = token_file or (Path(name) if (name := os.environ.get("PENSTOCK_TOKEN_FILE")) else None)
    try:
        token = None if path is None else bearer_token(path, "--token-file (PENSTOCK_TOKEN_FILE)")
    except ConfigurationError as error:
        raise Stop(Exit.NOT_ALLOWED, str(error)) from error
    authority = str(ca) if ca else os.environ.get("PENSTOCK_CA")
    return Gateway(server or os.environ.get("PENSTOCK_SERVER") or DEFAULT_SERVER, token, authority)


def _given(params: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in params.items() if value is not None}


def _problem(response: httpx.Response) -> dict[str, Any]:
    try:
        found = response.json()
    except ValueError:
        return {"detail": f"HTTP {response.status_code} from {without_password(str(response.request.url))}"}
    return found if isinstance(found, dict) else {}


def _plain(error: Exception | None) -> str:
    """`[Errno 111] Connection refused` without the number, for people."""
    text = re.sub(r"^\[Errno -?\d+\] ", "", str(error or ""))
    return text[:1].lower() + text[1:] or "the line broke"


def _seconds(text: str | None) -> float:
    try:
        return max(0.1, float(text or "1"))
    except ValueError:
        return 1.0
