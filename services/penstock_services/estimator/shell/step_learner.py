"""The model of step times: trained when due, beside the resource model and in the same worker process."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from penstock.errors import KernelError
from penstock.runtime.pool import WorkerPool
from penstock_services.estimator.core.due import StepsDue
from penstock_services.estimator.core.resource_model.saved import BadModel
from penstock_services.estimator.core.resource_model.training import Trained
from penstock_services.estimator.core.step_time.training import LearnedSteps, read_steps
from penstock_services.estimator.shell.store import STEPS, RunStore
from penstock_services.estimator.shell.trainer import train_steps_on_latest

LOG = logging.getLogger(__name__)

TRAINED_ON = 10_000  # newest runs with steps
OF_ONE = 5_000  # of one owner among them


class StepLearner:
    """One cell's. `use` gets each model that answers from now on."""

    def __init__(
        self,
        dsn: str,
        cell: str,
        use: Callable[[LearnedSteps], None],
        tell_model: Callable[[Trained], Awaitable[None]],
    ) -> None:
        self._dsn, self._cell = dsn, cell
        self._use = use
        self._tell_model = tell_model
        self._current: Trained | None = None
        self.due = StepsDue()

    async def begin(self, store: RunStore) -> None:
        """The newest promoted model that is whole answers again."""
        self.due.seen(await store.after_training(STEPS))
        for stored in await store.promoted_models(STEPS):
            try:
                learned = await asyncio.to_thread(read_steps, stored.body, stored.sha256)
            except BadModel as error:
                LOG.warning("model %s is refused (%s); trying an older one", stored.version, error)
                continue
            self._use(learned)
            self._current = stored
            self.due.resumed(stored.runs)
            return

    async def train(self, store: RunStore, pool: WorkerPool) -> None:
        """One model, in a worker process. What fails is told and tried with later runs."""
        why = self.due.reason
        current = None if self._current is None else self._current.body
        try:
            done = await pool.run(train_steps_on_latest, self._dsn, self._cell, TRAINED_ON, OF_ONE, current)
            self.due.trained(done.runs)
            trained = done.trained
            if trained is None:
                LOG.info("%s, but too few of them say on which GPUs, network and batch size", why)
                return
            model = trained
            LOG.info("model %s: %s; %s", model.version, why, "promoted" if model.promoted else "not promoted")
            await self._take(store, model, done.seq)
            await store.forget()
        except (KernelError, ValueError, ArithmeticError) as error:
            LOG.warning("no new model of step times (%s): %s", why, error)
            self.due.trained(0)

    async def _take(self, store: RunStore, model: Trained, seq: int) -> None:
        """Kept, told, used: in this order, so that an estimate never names a model that nobody has."""
        await store.save_model(model, seq, STEPS)
        learned = await asyncio.to_thread(read_steps, model.body, model.sha256)
        await self._tell_model(model)
        if model.promoted:
            self._current = model
            self._use(learned)
