"""Reader of one task's output, from the node where it ran, else from the archive; across restarts of that
node's reporter."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from penstock.backoff import Backoff
from penstock.errors import ConfigurationError, PenstockError
from penstock.model.nouns.nodes import LogServer
from penstock.runtime.files.task_logs import Output, Wanted
from penstock.runtime.keys.log_keys import VARIABLE, LogKey, key_in_file, key_of_token
from penstock.runtime.race import first_of
from penstock_services.gateway.core.log_text import (
    Ask,
    Line,
    Member,
    NoAnswer,
    NoFile,
    Text,
    Trouble,
    Unreadable,
)
from penstock_services.gateway.shell.access.tokens import TokenFile
from penstock_services.gateway.shell.options import Options
from penstock_services.gateway.shell.replica.follower import Follower

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 5.0
QUIET_FAILURES = 4  # a restart of a reporter takes about so many attempts; after them the error is reported

if TYPE_CHECKING:
    from penstock_services.gateway.shell.nodes.node_log import NodeLogs, Reading
    from penstock_services.gateway.shell.nodes.node_session import NodeSession

logger = logging.getLogger(__name__)


class LogReader:
    """One per gateway."""

    def __init__(self, options: Options, follower: Follower, stopping: asyncio.Event) -> None:
        """Raises `ConfigurationError`."""
        self._options, self._follower, self._stopping = options, follower, stopping
        self._tokens = None if options.tokens is None else TokenFile(options.tokens)
        self._key = None if options.node_log_key is None else key_in_file(options.node_log_key)
        self._nodes: NodeLogs | None = None
        self._archive = None
        if options.node_log_archive is not None:
            from penstock.runtime.files.log_archive import LogArchive

            self._archive = LogArchive(options.node_log_archive)

    async def close(self) -> None:
        if self._nodes is not None:
            await self._nodes.close()

    async def read(
        self, member: Member, ask: Ask, follow: bool, over: Callable[[], bool]
    ) -> AsyncIterator[Text | Line | Trouble]:
        """The present output; with `follow` also further output, until `over` holds: the task has exited by
        the ledger."""
        offset: int | None = None
        backoff, failures = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S), 0
        while not self._stopping.is_set():
            last = not follow or over()  # read before the last read of the log
            served, failed = self._served(member), None
            try:
                async with self._reading(member, ask, offset, follow=not last) as reading:
                    try:
                        while piece := await self._next(reading, over if not last else None):
                            failures = 0
                            backoff.reset()
                            yield _shown(member, piece, last)
                    finally:
                        offset = reading.offset if reading.opened else offset
                if last:
                    return
                continue
            except Unreadable as error:
                failed, failures = error, failures + 1
            if last:
                try:
                    async for piece in self._archived(member, ask, offset, failed):
                        offset = piece.position
                        yield _shown(member, piece, last)
                    return
                except Unreadable as error:
                    # The reporter, from which output was read before, may be restarting.
                    if offset is None or not isinstance(error, NoAnswer) or failures >= QUIET_FAILURES:
                        if member.started or not isinstance(error, NoFile):
                            yield Trouble(str(error), member)
                        return
            if failures == QUIET_FAILURES:
                yield Trouble(f"{failed}; waiting for it", member, final=False)
            await self._pause(member, served, backoff.next_s(), over if not last else None)

    async def _pause(
        self, member: Member, served: object, pause_s: float, over: Callable[[], bool] | None
    ) -> None:
        """Ends early where the node's server has moved, or the task is over; other records of the ledger do
        not matter."""
        loop = asyncio.get_running_loop()
        ends_s = loop.time() + pause_s
        while (left_s := ends_s - loop.time()) > 0 and not self._stopping.is_set():
            change = self._follower.next_change()
            if self._served(member) != served or (over is not None and over()):
                return
            await first_of(change.wait(), self._stopping.wait(), timeout_s=left_s)

    def _served(self, member: Member) -> tuple[str, LogServer | None] | None:
        node = self._follower.state.nodes.get(member.node_id)
        return None if node is None else (node.spec.address, node.spec.logs)

    def _reading(self, member: Member, ask: Ask, offset: int | None, *, follow: bool) -> "Reading":
        """Raises `Unreadable`."""
        url, key = self.server_of(member.node_id)
        return self._clients().reading(url, key, member, ask, offset, follow=follow)

    def _clients(self) -> "NodeLogs":
        if self._nodes is None:
            from penstock_services.gateway.shell.nodes.node_log import (
                NodeLogs,  # an HTTP client that most cells never need
            )

            self._nodes = NodeLogs(self._options.node_log_ca)
        return self._nodes

    async def _next(self, reading: "Reading", over: Callable[[], bool] | None) -> Output | None:
        """The next piece; None: the output has ended, or the task is over. Raises `Unreadable`."""
        if over is None:
            return await reading.piece()
        coming = asyncio.ensure_future(reading.piece())
        try:
            while not coming.done() and not over() and not self._stopping.is_set():
                change = self._follower.next_change()
                if not over():
                    await first_of(asyncio.shield(coming), change.wait(), self._stopping.wait())
            return coming.result() if coming.done() else None
        finally:
            coming.cancel()
            with suppress(asyncio.CancelledError, Unreadable):
                await coming

    async def _archived(
        self, member: Member, ask: Ask, offset: int | None, error: Unreadable
    ) -> AsyncIterator[Output]:
        """The log, or the rest of it, from the archive. `error`: why the node cannot be read; raised with
        details where the archive cannot help."""
        if self._archive is None:
            raise error
        wanted = Wanted(ask.tail, ask.since(), offset)
        try:
            with await asyncio.to_thread(self._archive.open, member.job_id, member.task_id, wanted) as log:
                while (piece := await asyncio.to_thread(self._archive.read, log)) is not None:
                    yield piece
        except FileNotFoundError as absent:
            more = f"the archive does not have it either ({absent.strerror or absent})"
            raise type(error)(f"{error}; {more}") from absent
        except PenstockError as failed:
            logger.warning("%s", failed)
            raise type(error)(f"{error}; {failed}") from failed

    async def session(self, node_id: str, path: str, asked: Mapping[str, str], body: bytes) -> "NodeSession":
        """A session with what this node runs for this request. Raises `Unreadable`."""
        url, key = self.server_of(node_id)
        return await self._clients().session(url, key, node_id, path, asked, body)

    def server_of(self, node_id: str) -> tuple[str, LogKey]:
        """URL and secret of a node's log server. Raises `Unreadable`."""
        node = self._follower.state.nodes.get(node_id)
        if node is None:
            raise Unreadable(f"node {node_id} has left the cell")
        if node.spec.logs is None:
            raise Unreadable(
                f"node {node_id} serves no output; start its node-reporter with --gateway-token-file, or "
                f"with {VARIABLE} as here"
            )
        keys = [] if self._key is None else [self._key]
        if self._tokens is not None:
            try:
                keys += [key_of_token(digest) for digest in self._tokens.digests_of(node_id)]
            except ConfigurationError as error:
                raise Unreadable(str(error)) from error
        for key in keys:
            if key.id == node.spec.logs.key:
                host = f"[{node.spec.address}]" if ":" in node.spec.address else node.spec.address
                scheme = "https" if node.spec.logs.tls else "http"
                return f"{scheme}://{host}:{node.spec.logs.port}", key
        raise Unreadable(
            f"this gateway does not have the secret of node {node_id}: its token in PENSTOCK_TOKENS, or the "
            f"same file {VARIABLE}"
        )


def _shown(member: Member, piece: Output, last: bool) -> Text | Line:
    """`last`: nothing follows, so that an unfinished line stays."""
    if not piece.line:
        return Text(member, piece.data)
    state = piece.data.removeprefix(b"\r")
    return Text(member, state) if last else Line(member, state, redrawn=state != piece.data)
