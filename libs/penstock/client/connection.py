"""Connection settings of the client (gateway, token, certificate authority), and the gateway's failures as
errors with a remedy."""

import os
import re
from pathlib import Path
from typing import Any

import httpx

from penstock.bearer import bearer_token
from penstock.client.errors import (
    BY_STATUS,
    BadRequest,
    ClientError,
    GatewayFault,
    KeyConflict,
    NotPermitted,
    Unreachable,
    fields_of,
)
from penstock.errors import ConfigurationError
from penstock.text.redaction import without_password
from penstock.tls import SYSTEM_CA, client_context, misfit, speaks_tls

DEFAULT_SERVER = "http://127.0.0.1:8742"
TIMEOUT_S = 10.0  # connect, and wait for a first byte
WORKER_TIMEOUT_S = 600.0
"""The same for a question that a worker process of the gateway answers: the past, and an estimate for a job
that was not submitted. The estimator may
fold the whole ledger, and a busy machine needs more than `TIMEOUT_S` to start the worker."""
LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=20)
"""Each stream has a connection of its own; the gateway bounds their number."""
IN_A_TASK = "PENSTOCK_JOB_ID"
"""Variable that each task has."""
TOKEN_SETTING = "--token-file (PENSTOCK_TOKEN_FILE)"
_TOKEN = re.compile(r"[!-~]+\Z")
"""The tokens that an HTTP header can carry."""


class Connection:
    """One gateway. Arguments that are None come from PENSTOCK_SERVER, PENSTOCK_TOKEN_FILE and PENSTOCK_CA, as
    for the command line.

    `server`: its URL; `token`: sent as a bearer token, else `token_file` holds it; `ca`: PEM file of the
    authority of its certificate.
    """

    def __init__(
        self,
        server: str | None = None,
        token: str | None = None,
        token_file: Path | str | None = None,
        ca: Path | str | None = None,
    ) -> None:
        server = (server or os.environ.get("PENSTOCK_SERVER") or DEFAULT_SERVER).rstrip("/")
        self.server = without_password(server)
        """The URL without a password, for messages."""
        self._url = server
        self._token = token or _token_in(token_file or os.environ.get("PENSTOCK_TOKEN_FILE"))
        authority = str(ca or os.environ.get("PENSTOCK_CA") or "")
        self._ca = authority or SYSTEM_CA
        self._speaks_tls: bool | None = None
        """Whether a server at an `http://` URL speaks TLS; None: neither probed nor answered yet."""
        self._encrypted = not server.startswith("http://")
        if self._token and not _TOKEN.match(self._token):
            text = f"{TOKEN_SETTING} does not hold one token in one line; `penstock token` makes one"
            raise NotPermitted(text)
        if authority and not self._encrypted:
            raise BadRequest(
                f"--server {self.server} is not encrypted, and --ca (PENSTOCK_CA) names an authority: write "
                "https://, or leave "
                "--ca out"
            )

    def options(self) -> dict[str, Any]:
        """Arguments of `httpx.Client` and `httpx.AsyncClient`. Raises `BadRequest`."""
        try:  # to read the system's certificates takes 25 ms
            verify = client_context(self._ca, "--ca") if self._encrypted else False
            httpx.URL(self._url)
        except ConfigurationError as error:
            raise BadRequest(str(error)) from error
        except (httpx.InvalidURL, ValueError) as error:
            raise self._no_address() from error
        headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        return {
            "base_url": self._url,
            "headers": headers,
            "timeout": TIMEOUT_S,
            "trust_env": False,
            "verify": verify,
            "limits": LIMITS,
        }

    def answered(self) -> None:
        """To be called when a request was answered: a connection that breaks later has another cause than
        TLS."""
        self._speaks_tls = False

    def _asks_for_tls(self, host: str, port: int) -> bool:
        """Whether the server speaks TLS; probed once per connection, as a probe may block an event loop for
        seconds."""
        if self._speaks_tls is None:
            self._speaks_tls = speaks_tls(host, port)
        return self._speaks_tls

    def unreachable(self, error: Exception | None) -> ClientError:
        """The error of a request that got no answer."""
        if isinstance(error, httpx.UnsupportedProtocol | httpx.InvalidURL):
            return self._no_address()
        if (misfit := self.misfit(error)) is not None:
            return misfit
        why = "it does not answer" if isinstance(error, httpx.TimeoutException) else _plain(error)
        if os.environ.get(IN_A_TASK) and not os.environ.get("PENSTOCK_SERVER"):
            return Unreachable(
                f"no gateway at {self.server} ({why.rstrip('.')}): a job's program reaches it only where the "
                "job may submit jobs: give the job `may_submit: true`, or --may-submit"
            )
        return Unreachable(
            f"no gateway at {self.server} ({why.rstrip('.')}); start one with `penstock up`, or name it with "
            "--server or PENSTOCK_SERVER"
        )

    def misfit(self, error: Exception | None) -> BadRequest | None:
        """The error of a failure that no retry can mend; None: another failure."""
        why = misfit(error, self.server, self._ca, "--ca or PENSTOCK_CA", self._asks_for_tls)
        return None if why is None else BadRequest(f"--server {self.server}: {why}")

    def refused(self, response: httpx.Response) -> ClientError:
        """The gateway's problem+json (RFC 9457) as an error."""
        problem = _problem(response)
        status = response.status_code
        text = str(problem.get("detail") or problem.get("title") or f"HTTP {status}")
        kind = str(problem.get("type", "")).rpartition(":")[2].rpartition("/")[2]
        error = BY_STATUS.get(status, GatewayFault)
        if status == 409 and kind == "key_conflict":
            error = KeyConflict
        elif error is NotPermitted:
            remedy = (
                "; name the file that holds your token with "
                f"{TOKEN_SETTING.replace(' (', ' or ').rstrip(')')}"
            )
            text = f"{self.server}: {text}{remedy if kind == 'no_token' else ''}"
        elif error is Unreachable:
            text = f"{self.server}: {text}; retries did not help, try again later"
        return error(text, fields=fields_of(problem), kind=kind, status=status)

    def _no_address(self) -> BadRequest:
        return BadRequest(f"--server {self.server}: no usable address; give http://host:port")


def _token_in(path: Path | str | None) -> str | None:
    """Raises `NotPermitted`."""
    try:
        return None if not path else bearer_token(Path(path), TOKEN_SETTING)
    except ConfigurationError as error:
        raise NotPermitted(str(error)) from error


def _problem(response: httpx.Response) -> dict[str, Any]:
    try:
        found = response.json()
    except ValueError:
        return {"detail": f"HTTP {response.status_code} from {without_password(str(response.request.url))}"}
    return found if isinstance(found, dict) else {}


def _plain(error: Exception | None) -> str:
    """`[Errno 111] Connection refused` without the number."""
    text = re.sub(r"^\[Errno -?\d+\] ", "", str(error or ""))
    return text[:1].lower() + text[1:] or "the line broke"
