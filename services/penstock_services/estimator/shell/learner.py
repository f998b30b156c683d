"""Beside the loop that answers: writes finished runs down, and trains when a model is due.

Answers never wait for it. Where Postgres is away, runs wait here and are written later; what is lost with the
process is read again from the ledger, since runs and position are written together.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

from penstock.clock import wall_ms
from penstock.errors import AppendFailed, ConfigurationError, KernelError, StoreError
from penstock.log.port import Log, Message, Partition
from penstock.model.envelope import Envelope, to_wire
from penstock.model.event import Event
from penstock.model.external_events import ModelTrained
from penstock.runtime.failpoints import hit
from penstock.runtime.pool import WorkerPool
from penstock.runtime.snapshots import load_latest_from
from penstock_services.estimator.core.due import Due
from penstock_services.estimator.core.resource_model.training import (
    BadModel,
    Learned,
    Trained,
    read_model,
    rehearse,
)
from penstock_services.estimator.core.resources.history import MAX_KEYS, RUNS_PER_KEY
from penstock_services.estimator.core.runs import Card, Cards, FinishedRun
from penstock_services.estimator.core.stages.profile import StageKey
from penstock_services.estimator.core.stages.registry import Owned
from penstock_services.estimator.core.state import Ledger
from penstock_services.estimator.core.step_time.training import LearnedSteps
from penstock_services.estimator.shell.stages import Staged
from penstock_services.estimator.shell.step_learner import StepLearner
from penstock_services.estimator.shell.store import RunStore
from penstock_services.estimator.shell.trainer import train_on_latest

LOG = logging.getLogger(__name__)

SOURCE = "/penstock/estimator"
NEAREST_KNOWN = (
    5_000  # newest runs that a restart looks through for the nearest of a job, and for cores of old
)
KILLS_KNOWN = 10_000  # newest kills for memory that a restart remembers
TRAINED_ON = 10_000  # newest runs; more say little about today's code, and training takes seconds
POSITION_RECORDS = 20_000  # so many records without a finished run, and the position is written all the same
MOST_PENDING = 50_000  # runs that wait for Postgres; beyond, the rest is read again after a restart
NICENESS = 10  # of the worker: where it shares a core with the answers, they get nine tenths of it
FIRST_PAUSE_S, LAST_PAUSE_S = 0.5, 30.0  # between attempts to reach Postgres


class Learner:
    """One cell's. `use` and `use_steps` get each model that answers from now on."""

    def __init__(
        self,
        dsn: str,
        cell: str,
        log: Log,
        estimates: Partition,
        use: Callable[[Learned], None],
        use_steps: Callable[[LearnedSteps], None],
    ) -> None:
        self._dsn = dsn
        self._cell = cell
        self._log = log
        self._estimates = estimates
        self._use = use
        self._pool = WorkerPool(niceness=NICENESS)
        self._store: RunStore | None = None
        self._cards = Cards()
        self._pending: list[FinishedRun] = []
        self._staged: dict[tuple[StageKey, str], Staged] = {}
        self._wake = asyncio.Event()
        self._offset = self._written = 0
        self._gap = False
        self._due = Due()
        self._steps = StepLearner(dsn, cell, use_steps, self._tell)
        self._current: Trained | None = None
        self.learned_from = 0
        """The ledger offset up to which runs are written down already."""

    def finished(self, run: FinishedRun) -> None:
        """A run that ended; for `Ledger`."""
        if len(self._pending) >= MOST_PENDING:
            self._gap = True
            return
        self._pending.append(run)

    def staged(self, seq: int, row: Owned) -> None:
        """A row of the stages that became another; for `Ledger`."""
        if len(self._staged) >= MOST_PENDING:
            self._gap = True
            return
        self._staged[row.key, row.owner] = Staged(seq, row)

    def read_to(self, next_offset: int) -> None:
        """The ledger was folded so far."""
        self._offset = next_offset
        if self._pending or self._staged or next_offset - self._written >= POSITION_RECORDS:
            self._wake.set()

    async def begin(self, ledger: Ledger, end: int) -> int:
        """Fills the ledger's fold from snapshot and runs; returns where to read on. `end`: of the ledger.

        Raises `ConfigurationError` when the runs belong to a longer log, `StoreError` without Postgres.
        """
        self._cards = ledger.cards
        store = self._store = await RunStore.open(self._dsn, self._cell)
        self.learned_from = self._written = self._offset = await store.position()
        if end < self.learned_from:
            raise ConfigurationError(
                f"the runs of cell {self._cell} were read from a longer ledger (offset {self.learned_from}, this one "
                f"ends at {end}); give each log its own database"
            )
        replica = await load_latest_from(self._dsn, self._cell, until_offset=self.learned_from)
        ledger.begin_at(replica)
        known = await store.history(ledger.history, MAX_KEYS, RUNS_PER_KEY)
        for run in await store.latest(NEAREST_KNOWN):
            ledger.nearest.add(run.about, run.measured)
            ledger.past_cores.add(run.about, run.given, run.measured)
        await store.kills(ledger.killed, KILLS_KNOWN)
        for row in await store.stages():
            ledger.stages.put(row)
        self._due.seen(await store.after_training())
        await self._load_model(store)
        await self._steps.begin(store)
        LOG.info("%d runs known up to ledger offset %d", known, self.learned_from)
        return replica.offset

    async def _load_model(self, store: RunStore) -> None:
        """The newest promoted model that is whole."""
        for stored in await store.promoted_models():
            try:
                self._use(read_model(stored.body, stored.sha256))
            except BadModel as error:
                LOG.warning("model %s is refused (%s); trying an older one", stored.version, error)
                continue
            self._current = stored
            self._due.resumed(stored.runs)
            return

    async def work(self) -> None:
        """For ever."""
        pause_s = FIRST_PAUSE_S
        while True:
            await self._wake.wait()
            self._wake.clear()
            try:
                await self._write()
                pause_s = FIRST_PAUSE_S
            except StoreError as error:
                LOG.warning("%s; trying again in %.1f s", error, pause_s)
                await self._drop_store()
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LAST_PAUSE_S)
                self._wake.set()
                continue
            if self._due.reason:
                await self._train(self._due.reason)
            if self._steps.due.reason and self._store is not None:
                await self._steps.train(self._store, self._pool)

    async def _write(self) -> None:
        if self._store is None:
            self._store = await RunStore.open(self._dsn, self._cell)
        runs, offset = tuple(self._pending), self._written if self._gap else self._offset
        staged, self._staged = self._staged, {}
        try:
            await self._store.add(runs, offset, staged.values())
        except StoreError:
            self._staged = staged | self._staged
            raise
        hit("estimator.runs_written")
        del self._pending[: len(runs)]
        self._written = offset
        self._due.seen(runs)
        self._steps.due.seen(runs)

    async def _drop_store(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            await store.close()

    async def _train(self, why: str) -> None:
        """One model, in a worker process; answers go on meanwhile. What fails is told and tried with later runs."""
        assert self._store is not None
        try:
            current = None if self._current is None else self._current.body
            done = await self._pool.run(train_on_latest, self._dsn, self._cell, TRAINED_ON, current)
            self._due.trained(done.runs)
            trained = done.trained
            if trained is None:
                LOG.info("%s, but the runs say nothing that a model could learn", why)
                return
            LOG.info(
                "model %s: %s; %s", trained.version, why, "promoted" if trained.promoted else "not promoted"
            )
            await self._take(trained, done.seq)
            await self._store.forget()
        except KernelError as error:
            LOG.warning("no new model (%s): %s", why, error)
            self._due.trained(0)

    async def _take(self, trained: Trained, seq: int) -> None:
        """Kept, told, used: in this order, so that an estimate never names a model that nobody has."""
        assert self._store is not None
        learned = await asyncio.to_thread(_ready, trained, self._cards.kinds)
        await self._store.save_model(trained, seq)
        hit("estimator.model_saved")
        await self._tell(trained)
        if trained.promoted:
            self._current = trained
            self._use(learned)

    async def _tell(self, model: Trained) -> None:
        event = ModelTrained(
            model_version=model.version,
            sha256=model.sha256,
            runs=model.runs,
            first_run_ms=model.first_run_ms,
            last_run_ms=model.last_run_ms,
            metrics={**model.metrics, "promoted": float(model.promoted)},
        )
        await self._append(f"model-{model.version}", event)

    async def _append(self, event_id: str, event: Event) -> None:
        """Once: nothing rests on these being told."""
        headers, value = to_wire(Envelope(id=event_id, source=SOURCE, time_ms=wall_ms(), data=event))
        try:
            await self._log.append([Message(self._estimates, value, headers, self._cell.encode())])
        except AppendFailed as error:
            LOG.warning("%s could not be told: %s", event_id, error)

    async def close(self) -> None:
        """Ends the worker; a training under way is lost and comes again."""
        self._pool.close()
        await self._drop_store()


def _ready(trained: Trained, cards: Sequence[Card]) -> Learned:
    """On a thread: answers go on."""
    return rehearse(read_model(trained.body, trained.sha256), cards)
