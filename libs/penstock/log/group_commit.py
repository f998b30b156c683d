"""Client-side group commit: one write in flight, the next batch gathers meanwhile.

Ideal: every append is written at once. Departure: appends that arrive during a write share the next one,
since a write costs a round trip and an fsync whatever its size. Where all services share one log, those costs
use up a core once writes follow each other without a break: such a stream of writes is paced
(penstock.log.batching); the first ones after a quiet moment are not delayed.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from penstock.errors import AppendFailed, PenstockError, TooLarge
from penstock.log.batching import TokenBucket
from penstock.log.port import MAX_BATCH_RECORDS, MAX_RECORD_BYTES, Message

MAX_BATCH_BYTES = 8_000_000  # value bytes per write; bounds memory at both ends and keeps a write short
MAX_PENDING_RECORDS = 100_000  # appends beyond this wait before they queue; about 50 full batches
HEADERS_MAX_BYTES = 16_384  # names and values of one record's headers; a trace and an event need under 1 KiB

Write = Callable[[list[Message]], Awaitable[list[int]]]


class PartlyFailed(Exception):
    """Raised by a `Write` with the result of each message: its offset, or the error if it was not written."""

    def __init__(self, outcomes: Sequence[int | PenstockError]) -> None:
        super().__init__(
            f"{sum(not isinstance(outcome, int) for outcome in outcomes)} of {len(outcomes)} failed"
        )
        self.outcomes = outcomes


def check_sizes(messages: Sequence[Message]) -> None:
    """Raises `TooLarge` before anything of the call is queued."""
    for message in messages:
        if len(message.value) > MAX_RECORD_BYTES:
            raise TooLarge(
                f"{len(message.value)} bytes for {message.partition}; the bound is {MAX_RECORD_BYTES}"
            )
        label_bytes = len(message.key or b"")
        for name, value in message.headers:
            label_bytes += len(name) + len(value)
        if label_bytes > HEADERS_MAX_BYTES:
            raise TooLarge(
                f"{label_bytes} bytes of key and headers for {message.partition}; the bound is "
                f"{HEADERS_MAX_BYTES}"
            )


class _Call:
    __slots__ = ("done", "messages", "offsets", "taken")

    def __init__(self, messages: Sequence[Message], done: "asyncio.Future[list[int]]") -> None:
        self.messages = messages
        self.done = done
        self.offsets: list[int] = []
        self.taken = 0


class GroupCommit:
    """Feeds `write` with batches in call order; resolves each call once all its records are written.

    `write` raises a `PenstockError`: every call in that batch gets it; calls that were still queued go on.
    """

    def __init__(self, write: Write, *, name: str, batch_ms: int = 0) -> None:
        self._write = write
        self._name = name
        self._bucket = TokenBucket(batch_ms, time.monotonic)
        self._queue: deque[_Call] = deque()
        self._pending_records = 0
        self._arrived = asyncio.Event()
        self._drained = asyncio.Event()
        self._drained.set()
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    async def append(self, messages: Sequence[Message]) -> list[int]:
        """Queues the messages, waits until they are durable, returns their offsets in the order given."""
        check_sizes(messages)
        if not messages:
            return []
        while self._pending_records >= MAX_PENDING_RECORDS and not self._closed:
            await self._drained.wait()
        if self._closed:
            raise AppendFailed(f"{self._name} is closed")
        call = _Call(messages, asyncio.get_running_loop().create_future())
        self._queue.append(call)
        self._pending_records += len(messages)
        if self._pending_records >= MAX_PENDING_RECORDS:
            self._drained.clear()
        self._arrived.set()
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name=f"group commit {self._name}")
        return await call.done

    async def close(self) -> None:
        """Stops the writer; unresolved calls get `AppendFailed`, since their outcome may be unknown."""
        self._closed = True
        self._drained.set()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        self._fail(list(self._queue), AppendFailed(f"{self._name} was closed during the append"))
        self._queue.clear()

    async def _run(self) -> None:
        while True:
            if not self._queue:
                self._arrived.clear()
                await self._arrived.wait()
            delay_s = self._bucket.delay_s()
            if delay_s > 0 and self._pending_records < MAX_BATCH_RECORDS:
                await asyncio.sleep(delay_s)
            batch, shares = self._take()
            if not batch:
                continue
            self._bucket.took()
            try:
                offsets = await self._write(batch)
            except asyncio.CancelledError:
                self._fail(
                    [call for call, _ in shares], AppendFailed(f"{self._name} was closed during the append")
                )
                raise
            except PartlyFailed as error:
                self._resolve_partly(shares, error.outcomes)
            except PenstockError as error:
                self._fail([call for call, _ in shares], error)
            except Exception as error:  # noqa: BLE001 - every caller below gets it; the writer lives on
                failed = AppendFailed(f"{self._name}: {type(error).__name__}: {error}")
                failed.__cause__ = error
                self._fail([call for call, _ in shares], failed)
            else:
                self._resolve(shares, offsets)

    def _take(self) -> tuple[list[Message], list[tuple[_Call, int]]]:
        """Up to one batch from the front of the queue, and the number of its records from each call."""
        batch: list[Message] = []
        shares: list[tuple[_Call, int]] = []
        batch_bytes = 0
        while self._queue and len(batch) < MAX_BATCH_RECORDS and batch_bytes < MAX_BATCH_BYTES:
            call = self._queue[0]
            start = call.taken
            if not call.done.done():  # else its caller has gone, or an earlier part of it failed
                for message in call.messages[start:]:
                    if batch and (
                        len(batch) >= MAX_BATCH_RECORDS or batch_bytes + len(message.value) > MAX_BATCH_BYTES
                    ):
                        break
                    batch.append(message)
                    batch_bytes += len(message.value)
                    call.taken += 1
                if call.taken > start:
                    shares.append((call, call.taken - start))
                if call.taken < len(call.messages):
                    break
            self._queue.popleft()
            self._pending_records -= len(call.messages)
        if self._pending_records < MAX_PENDING_RECORDS:
            self._drained.set()
        return batch, shares

    def _resolve(self, shares: list[tuple[_Call, int]], offsets: list[int]) -> None:
        at = 0
        for call, count in shares:
            call.offsets += offsets[at : at + count]
            at += count
            if len(call.offsets) == len(call.messages) and not call.done.done():
                call.done.set_result(call.offsets)

    def _resolve_partly(
        self, shares: list[tuple[_Call, int]], outcomes: Sequence[int | PenstockError]
    ) -> None:
        """Resolves each call by its own messages only:
        a forbidden write of another call is not its failure."""
        at = 0
        for call, count in shares:
            part = outcomes[at : at + count]
            at += count
            offsets = [outcome for outcome in part if isinstance(outcome, int)]
            errors = [outcome for outcome in part if isinstance(outcome, PenstockError)]
            if not errors:
                self._resolve([(call, count)], offsets)
            elif offsets or call.offsets:
                self._fail([call], AppendFailed(f"written in part; the rest: {errors[0]}"))
            else:
                self._fail([call], errors[0])

    @staticmethod
    def _fail(calls: list[_Call], error: PenstockError) -> None:
        for call in calls:
            if not call.done.done():
                own = type(error)(
                    *error.args
                )  # one object per caller: tracebacks would pile up on a shared one
                own.__cause__ = error.__cause__
                call.done.set_exception(own)
