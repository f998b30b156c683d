"""Main loop of the estimator service: fold the ledger, estimate submissions, append, wait for the append.

After a restart it folds the ledger (with Postgres from a snapshot on), estimates every job without an
estimate in the ledger, and reads on from the placer's position. An estimate that is sent twice has the same
id, and the placer rejects the second. The `Learner` stores the finished runs, beside this loop.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from hashlib import sha256
from typing import Any

from msgspec.structs import replace

from penstock.clock import wall_ms
from penstock.errors import StoreError
from penstock.ledger.record.record import UndecodableRecord
from penstock.log.open import open_log
from penstock.log.port import MAX_BATCH_RECORDS, Log, Message, Partition, Reader, Record
from penstock.model.inputs.estimates import JobEstimated
from penstock.model.inputs.external_events import JobSubmitted
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.nouns.types import WHOLE_GPU, Estimate
from penstock.model.schema.errors import EventError
from penstock.model.schema.topics import Topic
from penstock.model.wire.codec import encode
from penstock.model.wire.envelope import Envelope, from_wire
from penstock.runtime.failpoints import hit
from penstock.runtime.following.amended_log import AmendedLog, Repairs
from penstock.runtime.following.snapshots import check_beginning
from penstock.runtime.race import first_of
from penstock.runtime.settings import Settings
from penstock.runtime.tracing.tracer import Attribute, Tracing, tracing
from penstock_services.estimator.core.fold.from_snapshot import recall, recall_from
from penstock_services.estimator.core.fold.live import LiveJob
from penstock_services.estimator.core.fold.state import State
from penstock_services.estimator.core.model_lifecycle import InUse
from penstock_services.estimator.core.records.history import key_of
from penstock_services.estimator.core.resource_model.tier import ModelTier
from penstock_services.estimator.core.resource_model.training import RESOURCES
from penstock_services.estimator.core.resources.bounds import Bounds
from penstock_services.estimator.core.resources.cores import CoresTier
from penstock_services.estimator.core.resources.estimate import HistoryTier, Tier, estimate
from penstock_services.estimator.core.resources.nearest import NearestTier
from penstock_services.estimator.core.step_time.prior import WIDE
from penstock_services.estimator.core.step_time.profiling import Asked, profile
from penstock_services.estimator.core.step_time.run_time import StepTier
from penstock_services.estimator.core.step_time.training import STEPS
from penstock_services.estimator.shell.eta_publisher import EtaPublisher
from penstock_services.estimator.shell.learner import Learner
from penstock_services.estimator.shell.publisher import Publisher

LOG = logging.getLogger(__name__)

BATCH_MS = 20  # under load a poll costs more than the records that it returns; after idle there is no delay


class Estimator:
    """One cell's estimator on one log."""

    def __init__(self, settings: Settings, log: Log, traces: Tracing) -> None:
        self._log = log
        self._traces = traces
        self._jobs = Partition(Topic.JOBS, settings.cell_index)
        self._ledger_partition = Partition(Topic.LEDGER, settings.cell_index)
        estimates = Partition(Topic.ESTIMATES, settings.cell_index)
        self._publisher = Publisher(log, estimates, settings.cell)
        state = self.state = State(self._jobs.topic, self._jobs.index)
        self._bounds = Bounds(state.kills, state.nodes)
        self._model = ModelTier(state.nodes)
        self._steps = StepTier(state.history, state.nearest, state.nodes)
        self.etas = EtaPublisher(state, self._steps, self._publisher)
        self._tiers: Sequence[Tier] = (
            HistoryTier(state.history),
            self._steps,
            self._model,
            NearestTier(state.nearest),
            CoresTier(state.past_cores, state.nodes),
        )
        use: dict[str, Callable[[InUse[Any]], None]] = {
            RESOURCES.name: self._model.use,
            STEPS.name: self._steps.use,
        }
        self.learner = (
            Learner(settings.dsn, settings.cell, self._publisher.send_once, use) if settings.dsn else None
        )

    async def catch_up(self) -> Reader:
        """Folds the existing ledger and estimates jobs without an estimate;
        returns the reader to go on with."""
        offset = await self.fold_ledger()
        reader = self._log.reader(
            {self._jobs: self.state.jobs_offset, self._ledger_partition: offset}, batch_ms=BATCH_MS
        )
        unestimated = self.state.unestimated()
        self._prepare([live.job.spec for live in unestimated])
        missing = [self._again(live) for live in unestimated]
        self.state.forgotten()  # included above
        LOG.info(
            "folded the ledger to seq %d (%d void records), %d live jobs, %d of them not estimated",
            self.state.seq,
            self.state.void,
            len(self.state.live),
            len(missing),
        )
        missing += self._stages()
        for start in range(0, len(missing), MAX_BATCH_RECORDS):
            await self._send(missing[start : start + MAX_BATCH_RECORDS])
        self.etas.caught_up()
        return reader

    async def fold_ledger(self) -> int:
        """Folds the existing records; returns the offset of the next record to read."""
        start = known = 0
        if self.learner is not None:
            try:
                start = await self.learner.begin(self.state, self._log, self._ledger_partition)
                known = self.learner.learned_from
                begin = await self._log.begin_offsets([self._ledger_partition])
                since = max(recall_from(self.state, start), begin[self._ledger_partition])
                recall(self.state, [record.value async for record in self._ledger(since, start)])
            except StoreError as error:
                LOG.warning("%s; folding from the beginning", error)
        end = (await self._log.end_offsets([self._ledger_partition]))[self._ledger_partition]
        await check_beginning(self._log, self._ledger_partition, start)
        async for record in self._ledger(start, end):
            self.state.learning = record.offset >= known
            self.state.fold(record.value, record.offset)
        self.state.learning = True
        self._folded_to(end)
        return end

    async def _ledger(self, since: int, until: int) -> AsyncIterator[Record]:
        """Records of the ledger from one offset up to another, which is left out."""
        reader = self._log.reader({self._ledger_partition: since})
        try:
            while reader.position(self._ledger_partition) < until:
                for record in await reader.read():
                    if record.offset < until:
                        yield record
        finally:
            await reader.close()

    def _folded_to(self, offset: int) -> None:
        if self.learner is not None:
            self.learner.folded(self.state, offset)
        else:  # without a learner the rows are not stored
            self.state.finished.clear()
            self.state.stage_rows.clear()
            self.state.interference.take()

    async def work(self, reader: Reader) -> None:
        """For ever: one read, one append."""
        while True:
            records = await reader.read()
            hit("estimator.input_read")
            for record in records:
                if record.partition == self._ledger_partition:
                    self.state.fold(record.value, record.offset)
            self._folded_to(reader.position(self._ledger_partition))
            self.etas.folded()
            submissions = [
                found
                for record in records
                if record.partition == self._jobs and (found := self._submission(record)) is not None
            ]
            self._prepare([submitted.spec for submitted, _ in submissions])
            messages = [
                self._message(submitted.job_id, submitted.spec, envelope.id, envelope.traceparent)
                for submitted, envelope in submissions
            ]
            messages += [self._again(live) for live in self.state.forgotten()]
            messages += self._stages()
            if messages:
                await self._send(messages)

    def _prepare(self, specs: Sequence[JobSpec]) -> None:
        """Queries the models about all of them in one batch, which costs little more than one."""
        specs = [spec.least for spec in specs]
        self._model.prepare(specs)
        self._steps.prepare(specs)

    def _submission(self, record: Record) -> tuple[JobSubmitted, Envelope] | None:
        """Submission in one record of the jobs topic; None when there is none, or it cannot be decoded: the
        placer writes a dead letter."""
        try:
            envelope = from_wire(record.headers, record.value, self._jobs.topic)
        except EventError:
            return None
        submitted = envelope.data
        return (submitted, envelope) if isinstance(submitted, JobSubmitted) else None

    def _again(self, live: LiveJob) -> Message:
        """The estimate of a job that is in the ledger: its first,
        or that of the attempt after a failed one."""
        job = live.job
        key = live.info.key if job.spec.min_workers is None else None
        return self._message(job.job_id, job.spec, live.event_id, None, key, job.awaited_estimate or 0)

    def _message(
        self,
        job_id: str,
        spec: JobSpec,
        cause: str,
        traceparent: str | None,
        key: bytes | None = None,
        attempt: int = 0,
    ) -> Message:
        """`cause`: id of the submission's event; `traceparent`: its context, if it is still known; `key`:
        None for that of `spec`."""
        started_ms, began_s = wall_ms(), time.perf_counter()
        found = self.estimate(spec, key)
        attributes: dict[str, Attribute] = {
            "penstock.job_id": job_id,
            "penstock.tier": found.tier,
            "penstock.confidence": found.confidence,
            "penstock.source": found.source,
        }
        ended_ms = started_ms + (time.perf_counter() - began_s) * 1_000
        parent = self._traces.in_job(job_id, traceparent)
        context = self._traces.span(
            "estimate",
            parent,
            started_ms,
            ended_ms,
            attributes,
            key=f"{cause}.{attempt}" if attempt else cause,
        )
        event = JobEstimated(job_id=job_id, estimate=found, attempt=attempt)
        event_id = f"estimate.{attempt}-{job_id}" if attempt else f"estimate-{job_id}"
        return self._publisher.message(event_id, event, cause, job_id, context)

    def estimate(self, spec: JobSpec, key: bytes | None = None) -> Estimate:
        """The estimate from the present state. `key`: None for that of `spec`."""
        found = estimate(spec, self._tiers, key_of(spec) if key is None else key, self._bounds)
        if spec.min_workers is not None or spec.timed:
            found = replace(found, options=self._steps.options(spec, found.worker.gpus))
        if pairs := self.state.interference.of(spec):
            found = replace(found, pairs=pairs)
        if found.worker.gpu_share_milli == WHOLE_GPU:
            found = replace(found, stages=self.state.stages.times(spec.least, found.worker.gpus))
        return found

    async def profile(self, asked: Asked) -> dict[str, Any]:
        """As `profiling.profile`, from the present state. Raises `NothingFits`, `StoreError`."""
        runs = [] if self.learner is None else await self.learner.runs()
        model = self._steps.model
        return profile(asked, self.state.nodes, runs, WIDE if model is None else model.model.prior)

    def _stages(self) -> list[Message]:
        """Stage profiles that are not published yet.
        The id is a digest of the content, so that a repeat is recognised."""
        messages = []
        for event, cause in self.state.stages.news():
            digest = sha256(encode(event)).hexdigest()[:32]
            messages.append(self._publisher.message(f"stages-{digest}", event, cause))
        return messages

    async def _send(self, messages: Sequence[Message]) -> None:
        await self._publisher.send(messages, "estimates")
        hit("estimator.estimate_sent")


async def run(
    settings: Settings,
    stop: asyncio.Event,
    *,
    log: Log | None = None,
    ready: asyncio.Event | None = None,
) -> None:
    """Works until `stop` is set; see penstock.runtime.service. The topics must exist. Raises `LogError`."""
    used = AmendedLog.over(
        await open_log(settings.log_url, "estimator", settings.archive).start() if log is None else log
    )
    repairs = Repairs("estimator", used, settings.cell_index)
    try:
        async with tracing("estimator", settings) as traces:
            while not stop.is_set():  # more than once only after a repair
                try:
                    await _until(stop, Estimator(settings, used, traces), ready)
                except UndecodableRecord as error:
                    if ready is not None:
                        ready.set()  # whoever starts the services starts those that a repair needs, too
                    await first_of(repairs.wait(error), stop.wait())
    finally:
        if log is None:
            await used.close()


async def _until(stop: asyncio.Event, estimator: Estimator, ready: asyncio.Event | None) -> None:
    """Runs the estimator; its own failure is raised, `stop` and cancellation end it."""

    async def serve() -> None:
        reader = await estimator.catch_up()
        try:
            if ready is not None:
                ready.set()
            await estimator.work(reader)
        finally:
            await reader.close()

    tasks = [asyncio.ensure_future(work) for work in (serve(), stop.wait(), estimator.etas.work())]
    if estimator.learner is not None:
        tasks.append(asyncio.ensure_future(estimator.learner.work()))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        if estimator.learner is not None:
            await estimator.learner.close()
    for outcome in ended:
        if isinstance(outcome, Exception):
            raise outcome
