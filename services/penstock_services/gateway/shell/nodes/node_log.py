"""HTTP client of the nodes' log servers: requests for a task's output."""

from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from urllib.parse import urlencode

import httpx

from penstock.clock import wall_ms
from penstock.errors import ConfigurationError
from penstock.keepalive import SOCKET_OPTIONS
from penstock.runtime.files.task_logs import Frames, Output
from penstock.runtime.keys.log_keys import EXEC_PATH, OFFSET, PATH, LogKey
from penstock.session_lines import UPGRADE
from penstock.tls import SYSTEM_CA, client_context
from penstock_services.gateway.core.log_text import Ask, Member, NoAnswer, NoFile, Unreadable
from penstock_services.gateway.shell.nodes.node_session import NodeSession

MAX_CONNECTIONS = 1_024
CONNECT_TIMEOUT_S = 3.0
READ_TIMEOUT_S = 30.0
MAX_REASON_BYTES = 1_024
MAX_OFFSET_DIGITS = 18  # 64 bits
CA = "PENSTOCK_NODE_LOG_CA"


class NodeLogs:
    """The connections of one gateway to all log servers.
    `ca`: the authority of encrypting servers; None: the system's."""

    def __init__(self, ca: Path | None) -> None:
        self._ca = SYSTEM_CA if ca is None else str(ca)
        self._clients: dict[bool, httpx.AsyncClient] = {}

    async def close(self) -> None:
        for client in self._clients.values():
            await client.aclose()

    def reading(
        self, url: str, key: LogKey, member: Member, ask: Ask, offset: int | None, *, follow: bool
    ) -> "Reading":
        """One request to the server at `url`;
        `offset`: of the first wanted byte, None: `ask` decides. Raises `Unreadable`."""
        return Reading(self._client(url.startswith("https")), url, key, member, ask, offset, follow=follow)

    async def session(
        self, url: str, key: LogKey, node_id: str, path: str, asked: Mapping[str, str], body: bytes
    ) -> NodeSession:
        """A session with what the node runs for this request. Raises `Unreadable`."""
        client = self._client(url.startswith("https"))
        try:
            nonce = (await self._asked(client, url + EXEC_PATH, key, node_id, "GET", {}, b"")).text
            query = {**asked, "nonce": nonce, "sha256": sha256(body).hexdigest()}
            response = await self._asked(client, url + path, key, node_id, "POST", query, body)
        except httpx.HTTPError as error:
            raise NoAnswer(f"node {node_id} does not answer ({_plain(error)})") from error
        return NodeSession(node_id, response, key, nonce)

    async def _asked(
        self,
        client: httpx.AsyncClient,
        url: str,
        key: LogKey,
        node_id: str,
        method: str,
        fields: Mapping[str, str],
        body: bytes,
    ) -> httpx.Response:
        """The answer to a request about sessions: to a GET, which is read, or to a POST, which goes over to
        lines. Raises `Unreadable`, and httpx's errors."""
        query = urlencode(fields)
        headers = {"Authorization": key.authorization(node_id, query), "Accept-Encoding": "identity"}
        expected = httpx.codes.OK
        if method == "POST":
            headers, expected = headers | UPGRADE, httpx.codes.SWITCHING_PROTOCOLS
        place = f"{url}?{query}"
        timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S, pool=CONNECT_TIMEOUT_S)
        request = client.build_request(method, place, headers=headers, content=body, timeout=timeout)
        response = await client.send(request, stream=True, follow_redirects=False)
        try:
            if response.status_code != expected or _offset(response) is None:
                raise Unreadable(f"node {node_id} at {url}: {await _reason(response, _offset(response))}")
            if method == "GET":
                await response.aread()
        except BaseException:
            await response.aclose()
            raise
        return response

    def _client(self, encrypted: bool) -> httpx.AsyncClient:
        """Raises `Unreadable`."""
        found = self._clients.get(encrypted)
        if found is None:
            try:
                verify = client_context(self._ca, CA) if encrypted else False
            except ConfigurationError as error:
                raise Unreadable(str(error)) from error
            limits = httpx.Limits(max_connections=MAX_CONNECTIONS, max_keepalive_connections=0)
            transport = httpx.AsyncHTTPTransport(
                verify=verify, limits=limits, socket_options=SOCKET_OPTIONS, trust_env=False
            )
            found = self._clients[encrypted] = httpx.AsyncClient(transport=transport, trust_env=False)
        return found


class Reading:
    """One request to a node. A context manager, which opens it."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        url: str,
        key: LogKey,
        member: Member,
        ask: Ask,
        offset: int | None,
        *,
        follow: bool,
    ) -> None:
        self._client, self._url, self._key, self._member = client, url, key, member
        self.offset = offset or 0
        """Position of the next output, once it is opened."""
        self._frames = Frames()
        self._pieces: Iterator[Output] = iter(())
        self.opened = offset is not None
        asked = {"job": member.job_id, "task": member.task_id, "follow": 1 if follow else None}
        asked |= ask.parameters(wall_ms()) if offset is None else {"offset": offset}
        self._query = urlencode({name: value for name, value in asked.items() if value is not None})
        self._timeout = httpx.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
        if follow:
            self._timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S, pool=CONNECT_TIMEOUT_S)
        self._response: httpx.Response | None = None

    async def __aenter__(self) -> "Reading":
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._response is not None:
            await self._response.aclose()

    async def piece(self) -> Output | None:
        """The next one; None: the output has ended. Raises `Unreadable`."""
        while (found := next(self._pieces, None)) is None:
            chunk = await self._chunk()
            if not chunk:
                return None
            try:
                self._pieces = iter(tuple(self._frames.feed(chunk)))
            except ValueError as error:
                raise Unreadable(
                    f"node {self._member.node_id} sends something else than output ({error})"
                ) from error
        self.offset = found.position
        return found

    async def _chunk(self) -> bytes:
        """Empty: the answer has ended. Raises `Unreadable`."""
        try:
            if self._response is None:
                self._response = await self._open()
                self._chunks = self._response.aiter_raw()
            return await anext(self._chunks, b"")
        except httpx.PoolTimeout as error:
            raise Unreadable(
                f"this gateway reads the output of {MAX_CONNECTIONS} tasks already; ask again later"
            ) from error
        except httpx.HTTPError as error:
            kind = Unreadable if isinstance(error, httpx.ConnectTimeout) else NoAnswer
            trusted = f"; this gateway trusts {CA}" if "CERTIFICATE_VERIFY_FAILED" in str(error) else ""
            raise kind(f"node {self._member.node_id} does not answer ({_plain(error)}){trusted}") from error

    async def _open(self) -> httpx.Response:
        node_id = self._member.node_id
        headers = {
            "Authorization": self._key.authorization(node_id, self._query),
            "Accept-Encoding": "identity",
        }
        request = self._client.build_request(
            "GET", f"{self._url}{PATH}?{self._query}", headers=headers, timeout=self._timeout
        )
        response = await self._client.send(request, stream=True, follow_redirects=False)
        try:
            first = _offset(response)
            if response.status_code != httpx.codes.OK or first is None:
                kind = NoFile if response.status_code == httpx.codes.NOT_FOUND else Unreadable
                raise kind(f"node {node_id} at {self._url}: {await _reason(response, first)}")
        except BaseException:
            await response.aclose()
            raise
        self.offset, self.opened = first, True
        return response


def _offset(response: httpx.Response) -> int | None:
    """Where the answer begins in the log; None: it is not a node-reporter's."""
    text = response.headers.get(OFFSET, "")
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= MAX_OFFSET_DIGITS else None


async def _reason(response: httpx.Response, offset: int | None) -> str:
    """Of a refusal. Another server's text, perhaps meant for this machine alone, is not read."""
    if offset is None:
        status = response.status_code
        return (
            f"the answer, with status {status}, is not a node-reporter's; look at the node's address and port"
        )
    found = b""
    async for chunk in response.aiter_raw():
        found += chunk
        if len(found) >= MAX_REASON_BYTES:
            break
    return found[:MAX_REASON_BYTES].decode(errors="replace")


def _plain(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
