"""A reflector: what a list of objects of one kind is, and each change of that, for ever.

Begins with a list that arrives as a watch (`sendInitialEvents`), or in pages where the server has no such
lists. Goes on from the last bookmark after each end of the connection. A version that the server has
forgotten (410, as a status or as an event) begins a new list: the reader compares, and an object that is
missing there is gone without a proof.

Source: `k8s.io/client-go/tools/cache.Reflector`. Departure: no cache, and no resynchronisation by time.
"""

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import Generic, Literal, NamedTuple, TypeVar

import msgspec

from penstock.backoff import Backoff
from penstock_services.node_reporter.kubernetes.shell.api import GONE, Answer, ApiServer, Query, Unanswered

WATCH_S = (300, 600)  # of one connection, drawn anew for each: reconnections of many readers spread
SILENCE_S = 15.0  # beyond the connection's own end: then the other side is gone without a word
PAGE = 500  # objects, as kubectl asks for
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
INITIAL_EVENTS_END = "k8s.io/initial-events-end"

T = TypeVar("T")
Kind = Literal["ADDED", "MODIFIED", "DELETED"]


class Listed(NamedTuple, Generic[T]):
    """All objects that exist now."""

    objects: Sequence[T]


class Changed(NamedTuple, Generic[T]):
    """One change. A deleted object is as it last was."""

    kind: Kind
    object: T


class Resumed(NamedTuple):
    """The server answers again after `Broken`, and changes go on where they ended."""


class Broken(NamedTuple):
    """The connection ended by itself or was refused, and another one is begun. `status`: of a refusal, else
    0."""

    why: str
    status: int = 0


class _Meta(msgspec.Struct):
    resourceVersion: str = ""  # noqa: N815 - as on the wire
    annotations: dict[str, str] | None = None


class _Sign(msgspec.Struct):
    """The object of a bookmark, or the `Status` of an error."""

    metadata: _Meta = msgspec.field(default_factory=_Meta)
    code: int = 0


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw


class _ListMeta(msgspec.Struct):
    resourceVersion: str = ""  # noqa: N815 - as on the wire
    next: str = msgspec.field(default="", name="continue")


class _Page(msgspec.Struct):
    items: list[msgspec.Raw] = msgspec.field(default_factory=list)
    metadata: _ListMeta = msgspec.field(default_factory=_ListMeta)


class _Forgotten(Exception):
    """The server does not have this version any more."""


class _Refused(Exception):
    def __init__(self, answer: Answer) -> None:
        super().__init__(answer.reason)
        self.answer = answer


_event = msgspec.json.Decoder(_Event).decode
_sign = msgspec.json.Decoder(_Sign).decode
_page = msgspec.json.Decoder(_Page).decode


class Reflector(Generic[T]):
    """Of one path. `kind`: struct with the fields that are used; `version`: an object's resource version;
    `query`: selectors."""

    def __init__(
        self, api: ApiServer, path: str, kind: type[T], version: Callable[[T], str], query: Query = ()
    ) -> None:
        self._api, self._path, self._query, self._version_of = api, path, tuple(query), version
        self._decode = msgspec.json.Decoder(kind).decode
        self._version = ""
        """Resource version up to which everything was delivered; empty: a list is due."""
        self._in_pages = False
        """Whether the server refused a list as a watch."""
        self._broken = False
        """Whether `Broken` was the last news."""

    async def follow(self) -> AsyncIterator[Listed[T] | Changed[T] | Resumed | Broken]:
        """For ever. The first is `Listed` or `Broken`. After `Broken` comes `Resumed` or `Listed`."""
        backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        while True:
            asked_s, heard = 0.0, False
            try:
                async with aclosing(self._connection()) as connection:
                    async for found in connection:
                        heard, self._broken = True, False
                        backoff.reset()
                        yield found
                if heard:
                    continue
            except _Forgotten:
                self._version = ""
            except _Refused as error:
                asked_s, self._broken = error.answer.retry_after_s, True
                yield Broken(error.answer.reason, error.answer.status)
            except Unanswered as error:
                self._broken = True
                yield Broken(str(error))
            await asyncio.sleep(max(asked_s, backoff.next_s()))

    async def _connection(self) -> AsyncGenerator[Listed[T] | Changed[T] | Resumed, None]:
        """One list, if due, and one watch up to its end."""
        if not self._version and self._in_pages:
            yield Listed(await self._pages())
        lasts_s = WATCH_S[0] + secrets.randbelow(WATCH_S[1] - WATCH_S[0])
        query = [
            *self._query,
            ("watch", "1"),
            ("allowWatchBookmarks", "true"),
            ("timeoutSeconds", str(lasts_s)),
        ]
        initial: list[T] | None = None
        if self._version:
            query.append(("resourceVersion", self._version))
        else:
            query += [("sendInitialEvents", "true"), ("resourceVersionMatch", "NotOlderThan")]
            initial = []
        async with self._api.stream(self._path, query=query, silence_s=lasts_s + SILENCE_S) as lines:
            if isinstance(lines, Answer):
                if initial is not None and lines.status in (400, 422):
                    self._in_pages = True
                    return
                raise _Forgotten if lines.status == GONE else _Refused(lines)
            if self._broken and initial is None:
                yield Resumed()
            async for line in lines:
                event = _event(line)
                if event.type == "ERROR":
                    raise _error(event.object)
                if event.type == "BOOKMARK":
                    about = _sign(event.object).metadata
                    self._version = about.resourceVersion
                    if initial is not None and INITIAL_EVENTS_END in (about.annotations or {}):
                        yield Listed(initial)
                        initial = None
                    continue
                found = self._decode(event.object)
                if initial is not None:
                    initial.append(found)
                    continue
                self._version = self._version_of(found)
                yield Changed(event.type, found)  # type: ignore[arg-type]
        if initial is not None:  # a list that ended in its middle
            self._version = ""

    async def _pages(self) -> list[T]:
        objects: list[T] = []
        following = ""
        while True:
            query = [*self._query, ("limit", str(PAGE)), *([("continue", following)] if following else [])]
            answer = await self._api.call("GET", self._path, query=query)
            if answer.status == GONE:
                raise _Forgotten
            if not answer.done:
                raise _Refused(answer)
            page = _page(answer.body)
            objects += [self._decode(item) for item in page.items]
            following = page.metadata.next
            if not following:
                self._version = page.metadata.resourceVersion
                return objects


def _error(status: msgspec.Raw) -> Exception:
    code = _sign(status).code
    return _Forgotten() if code == GONE else _Refused(Answer(code, bytes(status)))
