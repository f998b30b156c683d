"""Publication of ETAs: when a job's remaining time is published, and with which value.

Once per attempt as soon as it has reported steps, and again when the time left has changed by more than a
tenth against the published one, less the time since then, or has left the published interval. Depends on the
ledger's time alone.
"""

import math
from collections.abc import Iterator
from statistics import median

from penstock.model.inputs import estimates
from penstock.model.inputs.estimates import EtaEstimated
from penstock_services.estimator.core.eta.curves import curve
from penstock_services.estimator.core.eta.quantiles import LEVEL, MAX_LEFT_MS
from penstock_services.estimator.core.eta.remaining import Asked, Bounds, Eta, Learned, Step, eta
from penstock_services.estimator.core.fold.live import LiveJob
from penstock_services.estimator.core.fold.progress import Progress, Published
from penstock_services.estimator.core.fold.state import State
from penstock_services.estimator.core.records.history import Runs
from penstock_services.estimator.core.resources.nearest import phase_ms
from penstock_services.estimator.core.step_time.run_time import StepTier
from penstock_services.estimator.core.step_time.training import StepQuestion
from penstock_services.estimator.core.step_time.training_set import cell_of, kind_of

MOVED = 0.1  # of the time left: smaller changes do not alter a plan
EDGE_MOVED = 0.25  # of the time left, for either end of the interval
MIN_MOVED_MS = 1_000.0  # near the end of a job every change exceeds a tenth
MAX_STEPS = float(1 << 53)  # whole numbers up to here are exact
RUNS_APART = 0.15  # standard deviation of ln step between runs of one job on as many GPUs
CONDITIONS_APART = 0.42
"""Standard deviation of ln step between conditions: nine in ten within a factor of two, the loss of two jobs
that take turns on a GPU."""
UNKNOWN_KIND = Learned()
MAX_ENDED = 1_000  # jobs that have ended and are still cached here


class EtaUpdates:
    """Reads the state and never writes it. `steps`: predicts the step before any window."""

    def __init__(self, state: State, steps: StepTier) -> None:
        self._state = state
        self._steps = steps
        self._published: dict[str, tuple[int, Published]] = {}
        """Job → attempt, the latest published remaining time."""

    def open(self) -> Iterator[str]:
        """Live jobs with reports newer than the latest published time in the ledger:
        to be answered after a restart."""
        for job_id in list(self._state.stepped):
            job = self._state.live.get(job_id)
            progress = None if job is None else job.progress
            if progress is not None and (
                not progress.published or progress.published[-1].done < progress.done
            ):
                yield job_id

    def next(self, job_id: str) -> EtaEstimated | None:
        """The ETA to publish now; None: nothing new, or nothing is known.
        A returned value counts as published."""
        job = self._state.live.get(job_id)
        progress = None if job is None else job.progress
        if job is None or progress is None or not progress.at_ms:
            return None
        found, model = self._estimate(job, progress), self._steps.model
        if found is None:
            return None
        left = _bounds(found.left_s, 1_000.0, MAX_LEFT_MS)
        now = Published(progress.at_ms, Bounds(left.middle, left.low, left.high), progress.done)
        if not moved(self._latest(job_id, progress), now):
            return None
        self._published[job_id] = progress.attempt, now
        live = self._state.live
        if len(self._published) > len(live) + MAX_ENDED:
            self._published = {job_id: one for job_id, one in self._published.items() if job_id in live}
        return EtaEstimated(
            job_id=job_id,
            attempt=progress.attempt,
            at_ms=progress.at_ms,
            done=progress.done,
            left_ms=left,
            steps=_bounds(found.steps, 1.0, MAX_STEPS),
            step_ms=_bounds(found.step_s, 1_000.0, MAX_LEFT_MS),
            level=LEVEL,
            source=found.source
            + ("; first of its kind: no finished run of its network" if found.first_of_kind else ""),
            model_version=None if model is None else model.version,
            first_of_kind=found.first_of_kind,
        )

    def _latest(self, job_id: str, progress: Progress) -> Published | None:
        """The newer of the time published from here and the one in the ledger of this attempt."""
        attempt, mine = self._published.get(job_id, (0, None))
        known = progress.published[-1:] + ([mine] if mine and attempt == progress.attempt else [])
        return max(known, key=lambda one: one.at_ms, default=None)

    def _estimate(self, job: LiveJob, progress: Progress) -> Eta | None:
        runs = self._state.history.get(job.info.key)
        points = progress.curve.points()
        target, model = job.info.target_loss, self._steps.model
        prior = in_conditions(progress, self._predicted(job, progress) or _own(runs, progress.gpus))
        asked = Asked(
            done=float(progress.done),
            step=Step(
                [window / 1_000.0 for window in progress.windows.equal()],
                None if prior is None else prior[0],
                0.0 if prior is None else prior[1],
            ),
            total=progress.max_iterations(job.info.iterations),
            past_totals=runs.column("iterations") if runs else (),
            curve=curve(*zip(*points, strict=True)) if points and target is not None else None,
            target=target,
            kind=kind_of(job.info.model),
            after_s=phase_ms("save_ms", job.info, runs, self._state.nearest) / 1_000.0,
        )
        return eta(asked, UNKNOWN_KIND if model is None else model.model.eta)

    def _predicted(self, job: LiveJob, progress: Progress) -> tuple[float, float] | None:
        info = job.info
        if info.model is None or info.batch_size is None or not progress.ring or not progress.gpu:
            return None
        cell = cell_of(progress.ring, info.batch_size, info.workers)
        found = self._steps.answer(StepQuestion(info.owner, info.model, progress.gpu, cell))
        return None if found is None else (found.log_s, found.spread)


def in_conditions(progress: Progress, undisturbed: tuple[float, float] | None) -> tuple[float, float] | None:
    """(ln step in s, its standard deviation) before any window of the present conditions, from the
    undisturbed step.

    Or from the job's own step in other conditions here. Each holds less precisely in these conditions; the
    more precise one counts.
    """
    found = []
    if undisturbed is not None:
        apart = 0.0 if progress.conditions == progress.usual else CONDITIONS_APART
        found.append((undisturbed[0], math.hypot(undisturbed[1], apart)))
    elsewhere_ms = progress.elsewhere.mean_ms
    if not progress.windows.parts and elsewhere_ms > 0:
        found.append((math.log(elsewhere_ms / 1_000.0), CONDITIONS_APART))
    return min(found, key=lambda one: one[1], default=None)


def _own(runs: Runs | None, gpus: int) -> tuple[float, float] | None:
    """From runs of the same job on as many GPUs."""
    steps_ms = runs.steps_ms(gpus) if runs else []
    return (math.log(median(steps_ms) / 1_000.0), RUNS_APART) if steps_ms else None


def moved(last: Published | None, now: Published) -> bool:
    """Whether `now` differs from `last` less the time between them, or is outside of its interval."""
    if last is None:
        return True
    gone_ms = now.at_ms - last.at_ms
    before = [max(0.0, part - gone_ms) for part in last.left_ms]
    wide = max(before[0], now.left_ms.middle)
    apart = [abs(one - other) for one, other in zip(before, now.left_ms, strict=True)]
    if max(apart) <= MIN_MOVED_MS:
        return False
    if not before[1] <= now.left_ms.middle <= before[2]:
        return True
    return apart[0] > MOVED * wide or max(apart[1:]) > EDGE_MOVED * wide


def _bounds(found: Bounds, unit: float, limit: float) -> estimates.Bounds:
    middle, low, high = (min(max(part * unit, 0.0), limit) for part in found)
    return estimates.Bounds(middle=middle, low=min(low, middle), high=max(high, middle))
