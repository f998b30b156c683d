"""When to say how long a running job will still take, and what.

Said for each attempt once it has told its steps, and again when the time left has moved by more than a tenth against what
was said, less the time since then, or out of the interval that was said. Rests on the ledger's time alone.
"""

import math
from collections.abc import Iterator
from statistics import median
from typing import NamedTuple

from penstock.model import external_events
from penstock_services.estimator.core.eta.curves import curve
from penstock_services.estimator.core.eta.phases import phase_ms
from penstock_services.estimator.core.eta.remaining import LEVEL, Asked, Bounds, Eta, Learned, Step, eta
from penstock_services.estimator.core.progress import Progress, Told
from penstock_services.estimator.core.resources.history import Runs
from penstock_services.estimator.core.state import Ledger, LiveJob
from penstock_services.estimator.core.step_time.samples import cell_of, kind_of
from penstock_services.estimator.core.step_time.tier import MOST_SPREAD
from penstock_services.estimator.core.step_time.training import LearnedSteps, StepAsked, step_of

MOVED = 0.1  # of the time left: below, nobody plans otherwise
EDGE_MOVED = 0.25  # of the time left, for either end of the interval
LEAST_MOVED_MS = 1_000.0  # at the end of a job everything moves by a tenth
MOST_LEFT_MS = 3.2e12  # a hundred years: nobody waits longer
MOST_STEPS = float(1 << 53)
RUNS_APART = 0.15  # standard deviation of ln step between runs of one job on as many GPUs
UNKNOWN_KIND = Learned()
MAX_SAID = 1_000  # beyond this and the live jobs, what was said of ended ones is dropped


class _Said(NamedTuple):
    attempt: int
    told: Told


class Etas:
    """Over a ledger's fold, which it reads and never writes."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._model: LearnedSteps | None = None
        self._said: dict[str, _Said] = {}
        self._priors: dict[str, tuple[int, str | None, tuple[float, float] | None]] = {}

    def use(self, model: LearnedSteps) -> None:
        """From the next one on."""
        self._model = model

    def open(self) -> Iterator[str]:
        """Live jobs that told more than was answered in the ledger: to be answered after a restart."""
        for job_id in list(self._ledger.stepped):
            job = self._ledger.live.get(job_id)
            progress = None if job is None else job.progress
            if progress is not None and (not progress.told or progress.told[-1].done < progress.done):
                yield job_id

    def tell(self, job_id: str) -> external_events.EtaEstimated | None:
        """What is to be said now; None: nothing new, or nothing is known. What is returned counts as said."""
        job = self._ledger.live.get(job_id)
        progress = None if job is None else job.progress
        if job is None or progress is None or not progress.at_ms:
            return None
        found = self._reckon(job_id, job, progress)
        if found is None:
            return None
        left = _bounds(found.left_s, 1_000.0, MOST_LEFT_MS)
        told = Told(progress.at_ms, Bounds(left.middle, left.low, left.high), progress.done)
        if not moved(self._last(job_id, progress), told):
            return None
        self._remember(job_id, _Said(progress.attempt, told))
        return external_events.EtaEstimated(
            job_id=job_id,
            attempt=progress.attempt,
            at_ms=progress.at_ms,
            done=progress.done,
            left_ms=left,
            steps=_bounds(found.steps, 1.0, MOST_STEPS),
            step_ms=_bounds(found.step_s, 1_000.0, MOST_LEFT_MS),
            level=LEVEL,
            source=found.source,
            model_version=None if self._model is None else self._model.version,
        )

    def _last(self, job_id: str, progress: Progress) -> Told | None:
        """The newest of what was said and what the ledger holds of this attempt."""
        said = self._said.get(job_id)
        mine = said.told if said is not None and said.attempt == progress.attempt else None
        held = progress.told[-1] if progress.told else None
        if mine is None or (held is not None and held.at_ms > mine.at_ms):
            return held
        return mine

    def _remember(self, job_id: str, said: _Said) -> None:
        self._said[job_id] = said
        live = self._ledger.live
        if len(self._said) > len(live) + MAX_SAID:
            self._said = {job_id: kept for job_id, kept in self._said.items() if job_id in live}
            self._priors = {job_id: kept for job_id, kept in self._priors.items() if job_id in live}

    def _reckon(self, job_id: str, job: LiveJob, progress: Progress) -> Eta | None:
        runs = self._ledger.history.get(job.about.key)
        prior = self._prior(job_id, job, progress, runs)
        points = progress.curve.points()
        target = job.goal.target_loss
        asked = Asked(
            done=float(progress.done),
            step=Step(
                [window / 1_000.0 for window in progress.windows.equal()],
                None if prior is None else prior[0],
                0.0 if prior is None else prior[1],
            ),
            total=progress.most(job.goal),
            past_totals=runs.column("iterations") if runs else (),
            curve=curve(*zip(*points, strict=True)) if points and target is not None else None,
            target=target,
            kind=kind_of(job.about.model),
            after_s=phase_ms("save_ms", job.about, runs, self._ledger.nearest) / 1_000.0,
        )
        return eta(asked, UNKNOWN_KIND if self._model is None else self._model.durations.eta)

    def _prior(
        self, job_id: str, job: LiveJob, progress: Progress, runs: Runs | None
    ) -> tuple[float, float] | None:
        """(ln of the step in seconds, spread) before any window; reckoned once per attempt and model."""
        version = None if self._model is None else self._model.version
        attempt, by, prior = self._priors.get(job_id, (0, None, None))
        if attempt != progress.attempt or by != version:
            prior = self._learned(job, progress) or _own(runs, progress.gpus)
            self._priors[job_id] = (progress.attempt, version, prior)
        return prior

    def _learned(self, job: LiveJob, progress: Progress) -> tuple[float, float] | None:
        about = job.about
        if self._model is None or about.model is None or about.batch_size is None:
            return None
        if not progress.ring or not progress.gpu:
            return None
        cell = cell_of(progress.ring, about.batch_size, about.workers)
        asked = StepAsked(about.owner, about.model, progress.gpu, cell)
        told = step_of(self._model.durations, asked)
        return None if told is None or told.spread > MOST_SPREAD else (told.log_s, told.spread)


def _own(runs: Runs | None, gpus: int) -> tuple[float, float] | None:
    """From runs of the same job on as many GPUs."""
    if not runs:
        return None
    pairs = zip(runs.whole_column("step_ms"), runs.whole_column("total_gpus"), strict=True)
    steps_s = [step / 1_000.0 for step, had in pairs if step > 0 and had == gpus]
    return (math.log(median(steps_s)), RUNS_APART) if steps_s else None


def moved(last: Told | None, now: Told) -> bool:
    """Whether `now` says something else than `last` does after the time between them, or what `last` held impossible."""
    if last is None:
        return True
    gone_ms = now.at_ms - last.at_ms
    before = [max(0.0, part - gone_ms) for part in last.left_ms]
    wide = max(before[0], now.left_ms.middle)
    apart = [abs(one - other) for one, other in zip(before, now.left_ms, strict=True)]
    if max(apart) <= LEAST_MOVED_MS:
        return False
    if not before[1] <= now.left_ms.middle <= before[2]:
        return True
    return apart[0] > MOVED * wide or max(apart[1:]) > EDGE_MOVED * wide


def _bounds(found: Bounds, unit: float, most: float) -> external_events.Bounds:
    middle, low, high = (min(max(part * unit, 0.0), most) for part in found)
    return external_events.Bounds(middle=middle, low=min(low, middle), high=max(high, middle))
