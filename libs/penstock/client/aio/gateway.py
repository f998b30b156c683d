"""Requests to the gateway: retries, overload, text in pieces, and streams that resume."""

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any, Self

import httpx
import httpx_sse

from penstock.backoff import Backoff
from penstock.client.connection import TIMEOUT_S, Connection
from penstock.client.requests import (
    FIRST_PAUSE_S,
    LAST_PAUSE_S,
    MAX_OVERLOAD_TRIES,
    PASSING,
    Request,
    given,
    retry_after_s,
)
from penstock.client.streams import BROKEN, ENDLESS, RECONNECT_TRIES, Place, StreamEvent, Waiting
from penstock.client.waits_async import frames, sleep


class AsyncGateway:
    """The gateway's own JSON and text, for requests without a method in the client."""

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
        self._tries = tries
        self.server = self._connection.server
        """The gateway's URL without a password, for messages."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    async def get(self, path: str, *, patience_s: float = TIMEOUT_S, **params: Any) -> Any:
        """The JSON at this path; parameters that are None are left out."""
        response = await self._send(Request("GET", path, params, timeout_s=patience_s))
        return response.json()

    async def text(self, path: str, **params: Any) -> str:
        """The text at this path."""
        response = await self._send(Request("GET", path, params))
        return response.text

    async def post(self, path: str, body: Any = None, **more: Any) -> Any:
        """Posts JSON and returns the JSON answer. `more`: as of `posted`."""
        _, answer = await self.posted(path, body, **more)
        return answer

    async def posted(
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
        response = await self._send(Request("POST", path, params, body, headers or {}, patience_s))
        return response.status_code, response.json()

    @asynccontextmanager
    async def lines(self, path: str, body: Any = None, **params: Any) -> AsyncIterator[AsyncIterator[str]]:
        """The text at this path, or of the answer to this body, in pieces as they come."""
        method, sent = "GET" if body is None else "POST", {"params": given(params), "json": body}
        try:
            async with self._http.stream(method, path, **sent, timeout=ENDLESS) as response:
                if response.is_error:
                    await response.aread()
                    raise self._connection.refused(response)
                yield response.aiter_text()
        except httpx.HTTPError as error:
            raise self._connection.unreachable(error) from error

    async def stream(
        self, path: str, last_id: str | None = None, waiting: Waiting | None = None, **params: Any
    ) -> AsyncGenerator[StreamEvent, None]:
        """The events of a stream until `waiting` is over; after a broken connection it resumes.

        Raises `Unreachable` when the gateway stays away over RECONNECT_TRIES attempts.
        """
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
                    async with aclosing(frames(source, waiting)) as found:
                        async for frame in found:
                            if (event := place.took(frame)) is not None:
                                yield event
            except BROKEN as error:
                cause = error
            if not waiting.over:
                await sleep(waiting.at_most_s(place.pause_s(cause)))

    async def _send(self, request: Request, waiting: Waiting | None = None) -> httpx.Response:
        """The answer. Waits out overload and outages (429, 503) within a bound, and within the time limit of
        `waiting`.

        A request with an effect is sent again only if it carries a key, or no connection came about. Raises
        `ClientError`.
        """
        waiting = waiting or Waiting()
        backoff, tries, overloads = Backoff(FIRST_PAUSE_S, LAST_PAUSE_S), self._tries, 0
        while True:
            try:
                sent = request.options(waiting.patience_s(request.timeout_s))
                response = await self._http.request(request.method, request.path, **sent)
            except httpx.HTTPError as error:
                tries -= 1
                again = request.repeatable or isinstance(error, httpx.ConnectError)
                if not again or tries <= 0 or waiting.over or self._connection.misfit(error) is not None:
                    raise self._connection.unreachable(error) from error
                await sleep(waiting.at_most_s(backoff.next_s()))
                continue
            self._connection.answered()
            overloads += 1
            if response.status_code not in PASSING or overloads == MAX_OVERLOAD_TRIES or waiting.over:
                break
            await sleep(waiting.at_most_s(retry_after_s(response)))
        if response.is_error:
            raise self._connection.refused(response)
        return response
