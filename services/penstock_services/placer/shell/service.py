"""Main loop of the placer service: reads inputs, lets the core decide, writes the ledger, reads it back,
sends orders.

Four coroutines per term, each with a bounded queue behind it:

    inputs ─▶ decide ─▶ append ─▶ ledger ─▶ read back ─▶ dispatch ─▶ orders

Any failure ends them all and the next term begins from the log (crash-only). A placer that reads another's
valid record has been replaced: it stands by, and takes over again only when an input stays unanswered.
"""

import asyncio
import logging
import os
import secrets
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

import asyncpg
from msgspec.structs import replace

from penstock.clock import LedgerClock
from penstock.errors import OffsetTaken
from penstock.ledger.record.record import Head, read_valid, write
from penstock.ledger.replica.digest import DIGEST_EVERY, digest
from penstock.ledger.replica.replica import Replica
from penstock.log.dead_letters import dead_letter
from penstock.log.open import open_log
from penstock.log.port import MAX_RECORD_BYTES, Log, Message, Partition, Reader, Record
from penstock.model.decisions.ledger_events import PlacementExplanation
from penstock.model.schema.event import Event
from penstock.model.schema.topics import CELL_TOPICS, NODE_PARTITIONS, Topic
from penstock.runtime.crash_only import Poisoned, applying, crash_only
from penstock.runtime.failpoints import hit
from penstock.runtime.following.amended_log import AmendedLog, Repairs, Signer
from penstock.runtime.following.snapshots import (
    CONNECT_TIMEOUT_S,
    Written,
    head_id_at,
    load_replica,
    projected,
)
from penstock.runtime.keys.node_keys import OPERATOR_KEY, TRUST_LOG, PlacerKeys, operator_key
from penstock.runtime.keys.signatures import SEED_BYTES
from penstock.runtime.settings import Settings
from penstock.runtime.tracing.context import well_formed
from penstock.runtime.tracing.tracer import Tracing, tracing
from penstock_services.placer.core.answer import Answer, Input, Moment, answer_input, answer_timer
from penstock_services.placer.core.step import DecisionNotFolded, Failure, PlacerCore
from penstock_services.placer.shell.dispatch import Dispatcher
from penstock_services.placer.shell.identity import Identity
from penstock_services.placer.shell.inputs import input_positions
from penstock_services.placer.shell.ledger_time import ClockAlarm
from penstock_services.placer.shell.ledger_trace import LedgerTrace
from penstock_services.placer.shell.standby import StandbySettings, stand_by
from penstock_services.placer.shell.term import Fenced, acquire, ledger_headers, overlooked

logger = logging.getLogger(__name__)

MAX_INPUTS_PER_READ = 256  # steps between two turns of the event loop, ≈ 20 ms
MAX_TIMERS_PER_TURN = 256  # as above; after a long absence thousands are due at once
MAX_APPEND_BYTES = 1 << 18  # beyond one read of inputs; the adapters hold several copies of a batch
MAX_IN_FLIGHT = 4_096  # records appended and not read back
INPUT_BATCH_MS = 10  # under load a poll costs more than the records that it returns
TOPICS: dict[str, int] = {Topic.ORDERS: NODE_PARTITIONS, Topic.DEAD_LETTERS: 1}


def _bytes(messages: Sequence[Message]) -> int:
    return sum(len(message.value) for message in messages)


class Pending(NamedTuple):
    """A record on its way to the log and back."""

    head: Head
    value: bytes
    now_ms: int
    facts: Sequence[Event]
    explanation: Sequence[PlacementExplanation]


class Term:
    """One term of one placer, from its valid `TermStarted` to its end."""

    def __init__(
        self,
        settings: Settings,
        log: Log,
        replica: Replica,
        poisoned: dict[str, Failure],
        ledger_trace: LedgerTrace,
        clock: LedgerClock,
        keys: PlacerKeys,
        operator: bytes | None,
    ) -> None:
        self._settings = settings
        self._log = log
        self._core = PlacerCore(replica.state)
        self._tail = self._valid = replica.head
        self._valid_offset = replica.head_offset
        self._term = replica.head.term
        self._ledger = Partition(Topic.LEDGER, settings.cell_index)
        self._poisoned = poisoned
        self._clock = clock
        self._clock_alarm = ClockAlarm()
        self._pending: deque[Pending] = deque()
        self._to_append: asyncio.Queue[list[Message]] = asyncio.Queue(maxsize=16)
        self._room = asyncio.Event()
        self._room.set()
        self._next_offset: int | None = None  # of the ledger; None: the log has no compare-and-append
        self._identity = Identity(settings.cell, keys, operator)
        self._dispatcher = Dispatcher(log, replica.state, settings, ledger_trace, keys, operator)

    def seen(self) -> Written:
        """The last record that was read back."""
        return Written(self._valid, self._valid_offset, self._core.state.epoch)

    async def serve(self, ledger_reader: Reader, ready: asyncio.Event) -> None:
        """Works until cancelled or until something fails."""
        await self._dispatcher.repeat_outstanding(self._valid.seq)
        if self._log.conditional:
            self._next_offset = ledger_reader.position(self._ledger)
        start = input_positions(self._core.state, self._settings.cell_index)
        inputs = self._log.reader(start, batch_ms=INPUT_BATCH_MS)
        ready.set()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._decide(inputs))
                group.create_task(self._append())
                group.create_task(self._read_back(ledger_reader))
                group.create_task(self._dispatcher.send())
        finally:
            await inputs.close()

    # ---------------------------------------------------------------------------------------- decide

    async def _decide(self, inputs: Reader) -> None:
        while True:
            await self._room.wait()
            records = await inputs.read(max_records=MAX_INPUTS_PER_READ, timeout_ms=self._until_timer())
            if records:
                hit("placer.input_read")
            messages: list[Message] = []
            messages += self._fire_due()
            for record in records:
                messages += self._answer(record)
            if messages:
                await self._to_append.put(messages)
                await asyncio.sleep(0)  # neither read nor put may have waited, and other coroutines must run
            if len(self._pending) > MAX_IN_FLIGHT:
                self._room.clear()

    def _now_ms(self) -> int:
        """The ledger's time."""
        now_ms = self._clock.now_ms(self._core.state.now_ms)
        self._clock_alarm.look(self._clock)
        return now_ms

    def _until_timer(self) -> int | None:
        due = self._core.state.next_timer()
        return None if due is None else max(0, due[0] - self._now_ms())

    def _fire_due(self) -> list[Message]:
        """The records of timers that are due; a bounded number, the others come after the next inputs."""
        messages: list[Message] = []
        fired = 0
        while (due := self._core.state.next_timer()) is not None and due[0] <= self._now_ms():
            if fired == MAX_TIMERS_PER_TURN:
                break
            messages += self._fire(due[1])
            fired += 1
        return messages

    def _fire(self, timer_id: str) -> list[Message]:
        place = f"timer {timer_id}"
        moment = Moment(self._tail.seq + 1, self._term, self._now_ms())
        failure = self._poisoned.pop(place, None)
        answer = applying(place, lambda: answer_timer(self._core, moment, timer_id, failure))
        return self._record(place, answer, failure)

    def _answer(self, record: Record) -> list[Message]:
        """Exactly one ledger record for one input record (LAW 2),
        and a dead letter where it cannot be applied."""
        found = Input(*record.partition, record.offset, record.headers, record.value)
        moment = Moment(self._tail.seq + 1, self._term, self._now_ms())
        place = found.place
        failure = self._poisoned.pop(place, None)
        answer = applying(
            place, lambda: answer_input(self._core, moment, found, failure, self._identity.forged)
        )
        messages = self._record(place, answer, failure)
        if answer.letter is not None:
            messages.append(dead_letter(record, "placer", *answer.letter))
        return messages

    def _record(self, place: str, answer: Answer, failure: Failure | None) -> list[Message]:
        """The ledger record, and the orders that may be written in one commit with it."""
        draft, envelope, _, errors = answer
        for error in errors:
            logger.error("%s, record %d: %s", place, self._tail.seq + 1, draft.reason, exc_info=error)
        if (self._tail.seq + 1) % DIGEST_EVERY == 0:
            draft = replace(draft, digest=digest(self._core.state))
        self._tail, value = write(self._tail, draft)
        if len(value) > MAX_RECORD_BYTES:
            detail = f"its ledger record would take {len(value)} bytes of {MAX_RECORD_BYTES}"
            decisions_are_large = failure is None and len(draft.facts) > 1
            raise Poisoned(place, detail) from DecisionNotFolded(0, detail) if decisions_are_large else None
        self._pending.append(Pending(self._tail, value, draft.now_ms, draft.facts, draft.explanation))
        found = (
            (envelope.id, envelope.correlation_id, well_formed(envelope.traceparent))
            if envelope
            else (None, None, None)
        )
        labels, at = ledger_headers(self._settings.cell, self._tail.seq, *found), self._next_offset
        if at is None:
            return [Message(self._ledger, value, labels)]
        self._next_offset = at + 1
        record = Message(self._ledger, value, labels, at=at)
        return [record, *self._dispatcher.orders(self._tail.seq, draft.facts)]

    # -------------------------------------------------------------------------------- append, read back

    async def _append(self) -> None:
        """One append at a time, each with all records decided meanwhile (client-side group commit)."""
        while True:
            messages = await self._to_append.get()
            size = _bytes(messages)
            while not self._to_append.empty() and size < MAX_APPEND_BYTES:
                more = self._to_append.get_nowait()
                messages += more
                size += _bytes(more)
            letters = [message for message in messages if message.partition.topic == Topic.DEAD_LETTERS]
            # Ideal: one commit with the record. On Kafka first: a crash in between leaves a letter twice,
            # never none.
            if letters and self._next_offset is None:
                await self._log.append(letters)
                messages = [message for message in messages if message.partition.topic != Topic.DEAD_LETTERS]
            await self._log.append(messages)
            hit("placer.record_appended")
            if self._next_offset is not None and any(m.partition.topic == Topic.ORDERS for m in messages):
                hit("placer.orders_sent")

    async def _read_back(self, reader: Reader) -> None:
        while True:
            proven = False
            for record in await reader.read():
                pending = self._pending[0] if self._pending else None
                if pending is not None and pending.value == record.value:
                    self._pending.popleft()
                    self._valid, self._valid_offset = pending.head, record.offset
                    hit("placer.record_read_back")
                    self._dispatcher.take(
                        pending.head.seq, pending.now_ms, pending.facts, pending.explanation
                    )
                elif read_valid(self._valid, record.value) is not None:
                    raise Fenced(f"another placer wrote seq {self._valid.seq + 1}; term {self._term} is over")
                elif not proven:
                    # A late record of a replaced placer; or the ledger was restored, and goes on without this
                    # placer's last records.
                    if await head_id_at(self._log, self._ledger, self._valid_offset) != self._valid.id:
                        raise Fenced(
                            f"record {self._valid.seq} is no longer in the ledger; term {self._term} is over"
                        )
                    if await overlooked(
                        self._log, self._ledger, self._valid, self._valid_offset, record.offset
                    ):
                        raise Fenced(
                            f"another placer wrote seq {self._valid.seq + 1}; term {self._term} is over"
                        )
                    proven = True
            await self._dispatcher.flush()
            if len(self._pending) <= MAX_IN_FLIGHT // 2:
                self._room.set()


def failure_from(error: Poisoned) -> Failure:
    """The parts that the next attempt at this input must leave out."""
    cause = error.__cause__
    decisions = cause.decisions if isinstance(cause, DecisionNotFolded) else None
    return Failure(str(cause) if decisions is not None else error.detail, decisions)


class Start(NamedTuple):
    """Start parameters of one placer."""

    placer_id: str
    standing_by: bool
    load: Callable[[Settings, Log], Awaitable[Replica]]
    """The replica with which each of its terms begins."""
    projected: Callable[[Settings], Awaitable[Written | None]]
    """The newest record of this cell's ledger in its read models; None: not known."""
    seed: bytes
    """Seed of this process's key for nodes."""
    operator: bytes | None
    """The key that gateway and placers share (`penstock.runtime.keys.node_keys.operator_key`)."""


def start_of_process(who: str, operator: bytes | None, *, standing_by: bool) -> Start:
    """With an id that begins with `who` and that no other process has."""
    return Start(
        f"{who}-{os.getpid()}-{secrets.token_hex(4)}",
        standing_by,
        load_replica,
        newest_projected,
        secrets.token_bytes(SEED_BYTES),
        operator,
    )


class PlacerService:
    """Terms, one after another."""

    def __init__(
        self, settings: Settings, log: Log, ready: asyncio.Event, traces: Tracing, start: Start
    ) -> None:
        self._settings = settings
        self._log = log
        self._ready = ready
        self._traces = traces
        self._poisoned: dict[str, Failure] = {}
        self._seen: Written | None = None
        """The last record read back before the end of this process's last term."""
        self._placer_id, self._standing_by, self._load, self._projected, seed, self._operator = start
        self._keys = PlacerKeys(seed)

    def failed(self, error: BaseException) -> None:
        """Takes the end of this attempt into account for the next one."""
        if isinstance(error, Poisoned):
            self._poisoned[error.place] = failure_from(error)
        if isinstance(error, Fenced | OffsetTaken):
            self._standing_by = True

    async def one_term(self) -> None:
        """Loads, stands by if replaced, acquires, serves; ends by an exception or cancellation."""
        ledger = Partition(Topic.LEDGER, self._settings.cell_index)
        replica = await self._load(self._settings, self._log)
        seen = (await self._projected(self._settings), self._seen)
        ledger_trace = LedgerTrace(self._traces)
        if self._standing_by:
            self._ready.set()
            await stand_by(self._log, replica, self._settings.cell_index, ledger_trace, seen)
            seen = (await self._projected(self._settings), self._seen)  # others may have written meanwhile
        reader = self._log.reader({ledger: replica.offset})
        cell = self._settings.cell
        try:
            clock = await acquire(
                self._log, reader, replica, ledger, cell, self._placer_id, ledger_trace, seen
            )
            self._standing_by = False
            term = Term(
                self._settings,
                self._log,
                replica,
                self._poisoned,
                ledger_trace,
                clock,
                self._keys,
                self._operator,
            )
            try:
                await term.serve(reader, self._ready)
            finally:
                self._seen = term.seen()
        finally:
            await reader.close()


async def newest_projected(settings: Settings) -> Written | None:
    """The newest record in the read models; None where Postgres is not available."""
    if settings.dsn is None:
        return None
    try:
        connection = await asyncpg.connect(settings.dsn, timeout=CONNECT_TIMEOUT_S)
        try:
            return await projected(connection, settings.cell)
        finally:
            await connection.close()
    except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
        return None


async def run(
    settings: Settings,
    stop: asyncio.Event,
    *,
    log: Log | None = None,
    ready: asyncio.Event | None = None,
    start: Start | None = None,
) -> None:
    """The placer service until `stop`; see penstock.runtime.service.
    `start`: instead of the environment's."""
    shared = log is not None
    start = start or _start()
    signer = None if start.operator is None else Signer(settings.cell, start.operator)
    log = AmendedLog.over(
        log if log is not None else await open_log(settings.log_url, "placer", settings.archive).start(),
        signer,
    )
    ready, repairs = ready or asyncio.Event(), Repairs("placer", log, settings.cell_index)
    async with tracing("placer", settings) as traces:
        service = PlacerService(settings, log, ready, traces, start)
        try:
            await log.create(TOPICS | dict.fromkeys(CELL_TOPICS, settings.cell_index + 1))
            await crash_only("placer", lambda: repairs.attempt(service.one_term, ready), stop, service.failed)
        finally:
            if not shared:
                await log.close()


def _start() -> Start:
    """From the environment. Raises `ConfigurationError`."""
    operator = operator_key()
    if operator is None:
        logger.warning("%s is %s: each writer of %s may fence nodes", OPERATOR_KEY, TRUST_LOG, Topic.NODES)
    return start_of_process("placer", operator, standing_by=StandbySettings.from_env().standby)
