"""When a new model is due: by what has happened, never by the clock."""

from collections import deque
from collections.abc import Iterable

from penstock_services.estimator.core.runs import FinishedRun

MIN_RUNS = (
    50  # fewer say less than the history of their own keys. Source: Liquid §4 holds as many out for a test
)
MIN_STEP_RUNS = 20  # steps are told within a few percent, needs are not; so fewer runs say something
GROWTH = 0.2  # new runs, as a share of those that the last model was trained on
WATCHED = 50  # runs that a model had answered for: drift is judged on the latest of them
MOST_OVER = 13
"""Of `WATCHED` runs so many above the promised memory are drift: a promise that is broken by one run in ten, as it
may be, is broken so often by one stretch of 50 in 1,000 (binomial tail 0.001)."""


class Due:
    """Counts runs since the last training."""

    def __init__(self) -> None:
        self.new = 0
        self._trained_on = 0
        self._over: deque[bool] = deque(maxlen=WATCHED)

    def seen(self, runs: Iterable[FinishedRun]) -> None:
        """Finished runs, each once; those set aside do not count."""
        for run in runs:
            if run.set_aside:
                continue
            self.new += 1
            said = run.said
            if said is not None and said.tier == "model" and "gpu_memory_mib" not in run.about.asked:
                self._over.append(run.measured.gpu_memory_mib > said.gpu_memory_mib)

    def trained(self, runs: int) -> None:
        """A model was trained on so many; whether it was promoted does not matter."""
        self._trained_on = runs
        self.new = 0
        self._over.clear()

    def resumed(self, trained_on: int) -> None:
        """After a restart: the model in use was trained on so many; what was seen since stays counted."""
        self._trained_on = trained_on

    @property
    def reason(self) -> str:
        """Why one is due; empty: it is not."""
        if sum(self._over) >= MOST_OVER:
            return (
                f"drift: {sum(self._over)} of {len(self._over)} runs took more GPU memory than was promised"
            )
        if self.new >= max(MIN_RUNS, GROWTH * self._trained_on):
            return f"{self.new} new runs since a model of {self._trained_on}"
        return ""


class StepsDue:
    """As `Due`, for the model of step times."""

    def __init__(self) -> None:
        self.new = 0
        self._trained_on = 0
        self._missed: deque[bool] = deque(maxlen=WATCHED)

    def seen(self, runs: Iterable[FinishedRun]) -> None:
        """Finished runs, each once; those that tell no steps do not count."""
        for run in runs:
            if run.set_aside or run.steps is None:
                continue
            self.new += 1
            if run.eta is not None:
                self._missed.append(not run.eta.low_ms <= run.eta.actual_ms <= run.eta.high_ms)

    def trained(self, runs: int) -> None:
        """As in `Due`."""
        self._trained_on = runs
        self.new = 0
        self._missed.clear()

    def resumed(self, trained_on: int) -> None:
        """As in `Due`."""
        self._trained_on = trained_on

    @property
    def reason(self) -> str:
        """Why one is due; empty: it is not."""
        if sum(self._missed) >= MOST_OVER and self.new >= MIN_STEP_RUNS:
            return f"drift: {sum(self._missed)} of {len(self._missed)} remaining times lay outside their interval"
        if self.new >= max(MIN_STEP_RUNS, GROWTH * self._trained_on):
            return f"{self.new} new runs with steps since a model of {self._trained_on}"
        return ""
