"""Learning beside the estimating loop: stores finished runs, and trains models when they are due, in a worker
process.

Answers never wait for it. While Postgres is down, runs are buffered here and written later; runs that are
lost with the process are read again from the ledger, since runs and position are written together.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from penstock.backoff import retry
from penstock.errors import ConfigurationError, PenstockError, StoreError
from penstock.log.port import Log, Partition
from penstock.model.inputs.estimates import ModelTrained
from penstock.model.schema.event import Event
from penstock.runtime.failpoints import hit
from penstock.runtime.following.snapshots import Until, load_latest_from
from penstock.runtime.pool import WorkerPool
from penstock_services.estimator.core.fold.from_snapshot import begin_at
from penstock_services.estimator.core.fold.state import State, learn
from penstock_services.estimator.core.interference import Learned
from penstock_services.estimator.core.learning.limits import STEP_RUNS, STEP_RUNS_OF_ONE
from penstock_services.estimator.core.learning.saved import BadModel
from penstock_services.estimator.core.model_lifecycle import Due, InUse, ModelKind, Trained
from penstock_services.estimator.core.records.runs import FinishedRun
from penstock_services.estimator.core.resource_model.training import RESOURCES
from penstock_services.estimator.core.stages.profile import StageKey
from penstock_services.estimator.core.stages.registry import Owned
from penstock_services.estimator.core.step_time.training import STEPS
from penstock_services.estimator.shell.store import RunStore, estimator_schema

LOG = logging.getLogger(__name__)

RESOURCE_RUNS = 10_000  # newest; older ones are of other code, and training takes seconds
POSITION_RECORDS = 20_000  # after so many records without a finished run the position is written, too
MAX_PENDING = 50_000  # runs that wait for Postgres; beyond, the rest is read again after a restart
NICENESS = 10  # of the worker: on a shared core the estimating loop gets nine tenths
FIRST_PAUSE_S, LAST_PAUSE_S = 0.5, 30.0  # between attempts to reach Postgres

KINDS: tuple[ModelKind[Any], ...] = (RESOURCES, STEPS)


class Training(NamedTuple):
    """Result of one training. `trained`: None where the runs hold nothing that a model could learn."""

    runs: int
    """Number of runs that were read."""
    seq: int
    """Record number of the newest of them."""
    trained: Trained | None


class Learner:
    """One cell's learner. `use`: receives each model that answers from now on, by the name of its kind;
    `publish` appends an event."""

    def __init__(
        self,
        dsn: str,
        cell: str,
        publish: Callable[[str, Event], Awaitable[None]],
        use: dict[str, Callable[[InUse[Any]], None]],
    ) -> None:
        self._dsn = dsn
        self._cell = cell
        self._publish = publish
        self._pool = WorkerPool(niceness=NICENESS)
        self._store: RunStore | None = None
        self._runs: list[FinishedRun] = []
        self._stages: dict[tuple[StageKey, str], Owned] = {}
        self._pairs = Learned({}, {})
        self._wake = asyncio.Event()
        self._offset = self._written = 0
        self._gap = False
        self._use = use
        self._due = [Due(kind) for kind in KINDS]
        self._current: dict[str, Trained] = {}
        """Kind → its newest promoted model."""
        self.learned_from = 0
        """The ledger offset up to which runs are stored already."""

    async def runs(self) -> list[FinishedRun]:
        """All known runs, those that are not stored yet included. Raises `StoreError`."""
        stored = [] if self._store is None else [run async for run in self._store.runs()]
        return stored + self._runs

    def folded(self, state: State, next_offset: int) -> None:
        """The ledger was folded so far; takes the rows to store out of the state."""
        runs, state.finished = state.finished, []
        stages, state.stage_rows = state.stage_rows, []
        pairs = state.interference.take()
        pending = len(self._runs) + len(self._stages) + self._pairs.rows
        if pending + len(runs) + len(stages) + pairs.rows > MAX_PENDING:
            self._gap = True
        else:
            self._runs += runs
            self._stages |= {(one.key, one.owner): one for one in stages}
            self._pairs = self._pairs.then(pairs)
        self._offset = next_offset
        if self._runs or self._stages or self._pairs.rows or next_offset - self._written >= POSITION_RECORDS:
            self._wake.set()

    async def begin(self, state: State, log: Log, ledger: Partition) -> int:
        """Fills the state from snapshot and runs; returns the offset to read from.

        Raises `ConfigurationError` when the runs belong to a longer log, `StoreError` without Postgres.
        """
        store = self._store = await RunStore.open(self._dsn, self._cell)
        self.learned_from = self._written = self._offset = await store.position()
        end = (await log.end_offsets([ledger]))[ledger]  # later: the cell's own estimator may be writing
        if end < self.learned_from:
            raise ConfigurationError(
                f"the runs of cell {self._cell} were read from a longer ledger (offset {self.learned_from}, "
                f"this one ends at {end}). Give each log its own database; or, where this ledger has lost "
                f"records, drop schema {estimator_schema(self._cell)}: all of it is learned again from the "
                "ledger"
            )
        replica = await load_latest_from(self._dsn, self._cell, log, ledger, Until(offset=self.learned_from))
        begin_at(state, replica)
        known, trained = 0, [await store.trained_seq(due.kind.name) for due in self._due]
        async for run in store.runs():
            known += 1
            learn(state, run)
            for due, seq in zip(self._due, trained, strict=True):
                if run.seq > seq:
                    due.seen([run])
        for row in await store.stages():
            state.stages.put(row)
        state.interference.put(await store.pairs())
        for due in self._due:
            await self._load_model(store, due)
        LOG.info("%d runs known up to ledger offset %d", known, self.learned_from)
        return replica.offset

    async def _load_model(self, store: RunStore, due: Due) -> None:
        """The newest promoted model that is undamaged."""
        for stored in await store.promoted_models(due.kind.name):
            try:
                self._use[due.kind.name](await asyncio.to_thread(due.kind.read, stored.body, stored.sha256))
            except BadModel as error:
                LOG.warning("model %s is refused (%s); trying an older one", stored.version, error)
                continue
            self._current[due.kind.name] = stored
            due.resumed(stored.runs)
            return

    async def work(self) -> None:
        """For ever."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            await retry(
                self._write,
                (StoreError,),
                first_s=FIRST_PAUSE_S,
                longest_s=LAST_PAUSE_S,
                on_failure=lambda error, pause_s: LOG.warning("%s; trying again in %.1f s", error, pause_s),
            )
            for due in self._due:
                if due.reason and self._store is not None:
                    await self._train(self._store, due)

    async def _write(self) -> None:
        if self._store is None:
            self._store = await RunStore.open(self._dsn, self._cell)
        runs, offset = tuple(self._runs), self._written if self._gap else self._offset
        stages, self._stages = self._stages, {}
        pairs, self._pairs = self._pairs, Learned({}, {})
        try:
            await self._store.add(runs, offset, stages.values(), pairs)
        except StoreError:
            self._stages = stages | self._stages
            self._pairs = pairs.then(self._pairs)
            await self._drop_store()
            raise
        hit("estimator.runs_written")
        del self._runs[: len(runs)]
        self._written = offset
        for due in self._due:
            due.seen(runs)

    async def _drop_store(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            await store.close()

    async def _train(self, store: RunStore, due: Due) -> None:
        """Trains one model, in a worker process. A failure is logged and tried again with later runs.

        Stored, published, used: in this order, so that an estimate never names a model that is not stored.
        """
        why = due.reason
        try:
            done = await self._pool.run(
                train_on_latest, self._dsn, self._cell, due.kind.name, self._current.get(due.kind.name)
            )
            due.trained(done.runs)
            trained = done.trained
            if trained is None:
                LOG.info("%s, but the runs hold nothing that a model of %s could learn", why, due.kind.name)
                return
            promoted = "promoted" if trained.promoted else "not promoted"
            LOG.info("model %s: %s; %s", trained.version, why, promoted)
            learned = await asyncio.to_thread(due.kind.read, trained.body, trained.sha256)
            await store.save_model(trained, done.seq, due.kind.name)
            hit("estimator.model_saved")
            await self._publish(f"model-{trained.version}", _event(trained))
            if trained.promoted:
                self._current[due.kind.name] = trained
                self._use[due.kind.name](learned)
            await store.prune()
        except (PenstockError, ValueError, ArithmeticError) as error:
            LOG.warning("no new model of %s (%s): %s", due.kind.name, why, error)
            due.trained(0)

    async def close(self) -> None:
        """Ends the worker; a training under way is lost and becomes due again."""
        self._pool.close()
        await self._drop_store()


def train_on_latest(dsn: str, cell: str, kind: str, current: Trained | None) -> Training:
    """One training, in the worker process: it reads its runs itself, so that the estimating loop neither
    decodes 10,000 rows nor sends them on, which alone would block it for half a second. Raises
    `StoreError`."""
    [found] = [one for one in KINDS if one.name == kind]
    runs = asyncio.run(_latest(dsn, cell, found))
    model = None if current is None else found.read(current.body, current.sha256).model
    return Training(len(runs), int(runs[-1].seq) if runs else -1, found.train(runs, model))


async def _latest(dsn: str, cell: str, kind: ModelKind[Any]) -> list[FinishedRun]:
    store = await RunStore.open(dsn, cell)
    try:
        if kind.name == STEPS.name:
            return await store.latest_steps(STEP_RUNS, STEP_RUNS_OF_ONE)
        return await store.latest(RESOURCE_RUNS)
    finally:
        await store.close()


def _event(model: Trained) -> ModelTrained:
    return ModelTrained(
        model_version=model.version,
        sha256=model.sha256,
        runs=model.runs,
        first_run_ms=model.first_run_ms,
        last_run_ms=model.last_run_ms,
        metrics={**model.metrics, "promoted": float(model.promoted)},
    )
