"""In-memory replica of the cell in the gateway: one reader of the ledger, folded as everywhere; for answers
that the tables do not have."""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from penstock.clock import ReadersClock
from penstock.ledger.fold.evolve import evolve
from penstock.ledger.record.record import RawRecord, UndecodableRecord, UnfoldableRecord
from penstock.ledger.replica.replica import Replica
from penstock.ledger.state.state import CellState
from penstock.ledger.views import Ending, Row, job_row, unproven
from penstock.log.port import MAX_READ_RECORDS, Log, Partition, Reader
from penstock.model.decisions.ledger_events import JobEnded, PlacementDecided
from penstock.model.inputs.external_events import JobHoldRequested, JobSubmitted
from penstock.model.schema.topics import Topic
from penstock.runtime.crash_only import applying
from penstock.runtime.following.amended_log import Repairs
from penstock.runtime.following.state_digests import compare
from penstock_services.gateway.core.forecasts.forecast_errors import ForecastErrors

BATCH_MS = 20  # only queries wait for the replica
MAX_ENDED_ROWS = 5_000  # ended jobs that are answered from memory until the tables certainly have them
MAX_PENDING = 20_000  # acknowledged submissions that the placer has not answered yet


Before = Callable[[int], Awaitable[Replica]]
"""The latest snapshot up to this offset of the ledger."""


class Follower:
    """`replica` is the cell as of the last valid record read; `pending` are the acknowledged submissions that
    were not read yet."""

    def __init__(self, replica: Replica, before: Before | None = None) -> None:
        """`before`: None: the ledger is folded again from its beginning where that is needed."""
        self.replica = replica
        self._before = before
        self.pending: OrderedDict[str, Row] = OrderedDict()
        self.log_ms: int | None = None
        """The log's own timestamp of the latest valid record; None: none was read yet."""
        self.undecodable: UndecodableRecord | None = None
        """The record before which the replica stands until an operator amends it;
        the tables stand there, too."""
        self.forecasts = ForecastErrors()
        self._clock = ReadersClock()
        if replica.state.now_ms:  # of a snapshot, whose records have no stamps
            self._clock.read(replica.state.now_ms, replica.state.now_ms)
        self._ended: OrderedDict[str, Row] = OrderedDict()
        self._taken: OrderedDict[str, int] = OrderedDict()
        """Job → the record that accepted it, of the newest jobs that the tables may not hold yet."""
        self._changed = asyncio.Event()

    @property
    def state(self) -> CellState:
        return self.replica.state

    def now_ms(self) -> int:
        """The ledger's time now, which goes on without records."""
        return self._clock.now_ms()

    async def follow(self, log: Log, cell_index: int, caught_up: asyncio.Event) -> None:
        """Folds until cancelled; sets `caught_up` once all records that existed at the start are folded, or
        no more of them can be.

        Where a record cannot be decoded or folded, the replica stays before it until it is amended. Raises
        `LogError`.
        """
        ledger, repairs = (
            Partition(Topic.LEDGER, cell_index),
            Repairs("the gateway's replica", log, cell_index),
        )
        end = (await log.end_offsets([ledger]))[ledger]
        while True:
            reader = log.reader({ledger: self.replica.offset}, batch_ms=BATCH_MS)
            try:
                await self._follow(log, reader, end, caught_up)
            except UndecodableRecord as error:
                self.undecodable = error
                if isinstance(error, UnfoldableRecord):  # the state is half changed
                    self.replica = await self._up_to(log, ledger, error.offset)
                caught_up.set()
                self.wake()
                await repairs.wait(error)
            finally:
                await reader.close()

    async def _up_to(self, log: Log, ledger: Partition, offset: int) -> Replica:
        """The cell as of the record before this offset, folded anew."""
        replica = Replica() if self._before is None else await self._before(offset)
        reader = log.reader({ledger: replica.offset})
        try:
            while replica.offset < offset:
                for record in await reader.read(max_records=min(MAX_READ_RECORDS, offset - replica.offset)):
                    replica.take(record.value, record.offset)
        finally:
            await reader.close()
        return replica

    async def _follow(self, log: Log, reader: Reader, end: int, caught_up: asyncio.Event) -> None:
        while True:
            if self.replica.offset >= end:
                caught_up.set()
            found = False
            for record in await reader.read():
                place = f"ledger offset {record.offset}"
                taken = applying(place, partial(self.replica.take, record.value, record.offset, self._fold))
                if taken is not None:
                    self.undecodable = None
                    self.log_ms, found = record.timestamp_ms, True
                    self._refused(taken)
                    if caught_up.is_set():
                        await compare(log, "gateway", self.state, taken, record)
            if found:
                self._clock.read(self.state.now_ms, None if caught_up.is_set() else self.log_ms)
            self.wake()

    def _fold(self, record: RawRecord, n: int, fact: Any) -> None:
        """Folds one fact, and caches the rows of jobs that end."""
        state = self.replica.state
        ending = state.jobs.get(fact.job_id) if isinstance(fact, JobEnded) else None
        evolve(state, fact)
        if isinstance(fact, JobSubmitted):
            self.pending.pop(fact.job_id, None)
            self._taken[fact.job_id] = record.seq
            if len(self._taken) > MAX_PENDING:
                self._taken.popitem(last=False)
        if isinstance(fact, PlacementDecided):
            self.forecasts.placed(fact.job_id, state.now_ms)
        elif isinstance(fact, JobEnded | JobHoldRequested):
            self.forecasts.forget(fact.job_id)
        if ending is not None:
            how = Ending(fact.outcome, fact.exit_code, fact.reason, state.now_ms)
            self._ended[fact.job_id] = job_row(ending, record.seq, how)
            if len(self._ended) > MAX_ENDED_ROWS:
                self._ended.popitem(last=False)

    def _refused(self, record: RawRecord) -> None:
        """A refused submission is no longer pending."""
        if record.outcome != "committed" and record.cause.event_id is not None:
            self.pending.pop(record.cause.event_id.removeprefix("submit-"), None)

    def wake(self) -> None:
        """Something that is looked at beside the replica has changed, or the replica itself."""
        self._changed.set()
        self._changed = asyncio.Event()

    def next_change(self) -> asyncio.Event:
        """Set when the next record has been folded.
        Take it before reading the state, so that no change is missed."""
        return self._changed

    def acknowledged(self, job_id: str, row: Row) -> None:
        """A submission is in the log: the job exists from now on, even if the tables do not have it yet."""
        if job_id not in self.state.jobs and job_id not in self.state.ended:
            self.pending.setdefault(job_id, row)
            self.wake()
            if len(self.pending) > MAX_PENDING:
                self.pending.popitem(last=False)

    def unproven(self, job_id: str) -> list[dict[str, str]]:
        """The job's tasks on silent nodes, as of the latest record."""
        job = self.state.jobs.get(job_id)
        return [] if job is None else unproven(self.state.nodes, job)

    def job(self, job_id: str) -> Row | None:
        """The job's row from memory: live, ended recently, or just acknowledged; else None."""
        job = self.state.jobs.get(job_id)
        if job is not None:
            return job_row(job, self.state.seq)
        return self._ended.get(job_id) or self.pending.get(job_id)

    def newer_than(self, seq: int) -> list[Row]:
        """Rows of the jobs that were accepted after this record, or are acknowledged and not accepted yet;
        the latest first."""
        while self._taken and next(iter(self._taken.values())) <= seq:
            self._taken.popitem(last=False)
        found = (self.job(job_id) for job_id in (*self._taken, *self.pending))
        return [row for row in found if row is not None][::-1]
