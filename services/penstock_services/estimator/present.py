"""Estimates on demand, for jobs that are not submitted. The gateway calls these functions in a worker
process.

The same code as the service's: its tables and models, with the ledger folded to its end. Writes nothing,
except that missing tables are created.
"""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from penstock.log.open import open_log
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.wire.codec import as_written
from penstock.runtime.following.amended_log import AmendedLog
from penstock.runtime.settings import Settings
from penstock.runtime.tracing.tracer import Tracing
from penstock_services.estimator.core.step_time.profiling import Asked
from penstock_services.estimator.shell.service import Estimator


@asynccontextmanager
async def folded(settings: Settings) -> AsyncIterator[Estimator]:
    """The estimator as of the ledger's end. Raises `StoreError`, `LogError`, `ConfigurationError`."""
    log = await AmendedLog(open_log(settings.log_url, "estimator", settings.archive)).start()
    try:
        estimator = Estimator(settings, log, Tracing())
        try:
            await estimator.fold_ledger()
            yield estimator
        finally:
            if estimator.learner is not None:
                await estimator.learner.close()
    finally:
        await log.close()


async def estimate_now(settings: Settings, spec: JobSpec) -> dict[str, Any]:
    """`{"ok": true, "seq": …, "estimate": …}`. Raises as `folded`."""
    async with folded(settings) as estimator:
        return {
            "ok": True,
            "seq": estimator.state.seq,
            "estimate": as_written(estimator.estimate(spec)),
        }


async def profile_now(settings: Settings, asked: Mapping[str, Any]) -> dict[str, Any]:
    """`{"ok": true, "seq": …}` and the answer of `profiling.profile`.
    Raises as `folded`, and `NothingFits`."""
    async with folded(settings) as estimator:
        return {"ok": True, "seq": estimator.state.seq, **await estimator.profile(Asked(**asked))}
