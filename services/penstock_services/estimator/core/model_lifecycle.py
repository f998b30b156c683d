"""Life cycle of a learned model: when training is due, how a candidate is evaluated, when it is promoted, how
it is loaded again."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from penstock_services.estimator.core.learning.saved import digest_of, from_bytes, to_bytes, version_of
from penstock_services.estimator.core.records.runs import FinishedRun

HELD_OUT = 0.2  # the newest runs are the test set, the older ones the training set
WORSE_BY = 1.02  # a new model may be worse by so much on recent runs: smaller differences are noise
GROWTH = 0.2  # new runs that make a training due, as a share of the last model's training set
WATCHED = 50  # predictions with a known outcome: drift is tested on the latest of them
MAX_MISSED = 13
"""So many wrong ones of `WATCHED` predictions are drift: a promise that one run in ten may exceed is exceeded
so often in one stretch of 50 in 1,000 (binomial tail 0.001)."""

Model = TypeVar("Model")


class Trained(NamedTuple):
    """A model as bytes, and its error on the newest runs, which were held out."""

    version: str
    sha256: str
    body: bytes
    runs: int
    first_run_ms: int
    last_run_ms: int
    metrics: dict[str, float]
    promoted: bool


class InUse(NamedTuple, Generic[Model]):
    """The model that is in use."""

    version: str
    model: Model


@dataclass(frozen=True)
class ModelKind(Generic[Model]):
    """One kind of learned model. Pure: training runs in a worker process."""

    name: str
    """Begins the versions of its models, and is their `kind` in Postgres."""
    type: type[Model]
    teaching: Callable[[Sequence[FinishedRun]], Sequence[FinishedRun]]
    """The runs of its training set, in their order."""
    min_teaching: int
    """Fewer predict worse than the history of their own keys, and leave no test set."""
    fit: Callable[[Sequence[FinishedRun], Model | None], Model]
    """Trains on these runs; a model of nearly the same runs supplies slow-to-learn hyperparameters. Raises
    `ValueError`: nothing to learn."""
    evaluate: Callable[[Model, Sequence[FinishedRun]], dict[str, float]]
    """Its metrics on these runs, `error` among them."""
    error: str
    """The metric by which it is promoted: the lower, the better."""
    min_new: int
    """Runs after which a training is due, at least."""
    counts: Callable[[FinishedRun], bool]
    """Whether a sound run counts among those."""
    missed: Callable[[FinishedRun], bool | None]
    """Whether a sound run contradicts its prediction; None: there was none."""

    def train(self, runs: Sequence[FinishedRun], current: Model | None) -> Trained | None:
        """Learns from all runs; promoted if, learned from the older ones, it is no worse than `current` on
        the newest.

        Hyperparameters come from the older runs alone, so that the test set stays unseen. None if
        too few runs can be used. `current` was trained on some of the newest, which is in its favour.
        """
        teaching = self.teaching(runs)
        if len(teaching) < self.min_teaching:
            return None
        split = len(teaching) - max(1, int(HELD_OUT * len(teaching)))
        try:
            candidate = self.fit(teaching[:split], None)
            final = self.fit(runs, candidate)
        except ValueError:
            return None
        newest = teaching[split:]
        metrics, promoted = self.evaluate(candidate, newest), True
        if current is not None:
            before = self.evaluate(current, newest)
            metrics |= {f"before_{name}": value for name, value in before.items()}
            if self.error in before:
                promoted = metrics.get(self.error, math.inf) <= WORSE_BY * before[self.error]
        body = to_bytes(final)
        digest = digest_of(body)
        ended_ms = [run.measured.ended_ms for run in teaching]
        return Trained(
            version_of(self.name, digest),
            digest,
            body,
            len(teaching),
            int(min(ended_ms)),
            int(max(ended_ms)),
            metrics,
            promoted,
        )

    def read(self, body: bytes, digest: str) -> InUse[Model]:
        """Raises `BadModel`, also for another digest's model."""
        return InUse(version_of(self.name, digest), from_bytes(body, digest, self.type))


class Due:
    """Counts runs since the last training of one kind: by events, never by the clock."""

    def __init__(self, kind: ModelKind[Any]) -> None:
        self.kind = kind
        self.new = 0
        self._trained_on = 0
        self._missed: deque[bool] = deque(maxlen=WATCHED)

    def seen(self, runs: Iterable[FinishedRun]) -> None:
        """Finished runs, each once; rejected ones do not count."""
        for run in runs:
            if not run.rejected and self.kind.counts(run):
                self.new += 1
                if (missed := self.kind.missed(run)) is not None:
                    self._missed.append(missed)

    def trained(self, runs: int) -> None:
        """A model was trained on so many; whether it was promoted does not matter."""
        self._trained_on = runs
        self.new = 0
        self._missed.clear()

    def resumed(self, trained_on: int) -> None:
        """After a restart: the model in use was trained on so many; runs counted since then stay counted."""
        self._trained_on = trained_on

    @property
    def reason(self) -> str:
        """Why a training is due; empty: it is not."""
        if sum(self._missed) >= MAX_MISSED:
            return f"drift: {sum(self._missed)} of {len(self._missed)} runs contradict their predictions"
        if self.new >= max(self.kind.min_new, GROWTH * self._trained_on):
            return f"{self.new} new runs since a model of {self._trained_on}"
        return ""
