"""Progress of a running job, folded from its tasks' reports: phases, iterations, step times, losses.

Everything here is bounded per job, however often it reports: windows are merged in pairs, the loss curve has
means over spans that grow with the iteration, published remaining times are thinned. Times of one task are
compared with each other only (its node's clock); across tasks and jobs the ledger's clock counts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import nan
from typing import Literal, NamedTuple

import numpy as np

from penstock.model.inputs.external_events import StepsMeasured
from penstock.model.nouns.types import TaskPlacement
from penstock_services.estimator.core.eta.curves import MAX_VALUE
from penstock_services.estimator.core.eta.remaining import Bounds
from penstock_services.estimator.core.records.conditions import (
    NONE,
    UNKNOWN_CONDITIONS,
    Conditions,
    Disturbance,
    placed,
)
from penstock_services.estimator.core.records.history import UNKNOWN
from penstock_services.estimator.core.records.placements import (
    Cell,
    Measurement,
    why_no_placement,
    why_rejected,
)
from penstock_services.estimator.core.records.runs import EtaAtHalf, Steps

Phase = Literal["launch", "ready", "train", "save"]
PHASES: tuple[Phase, ...] = ("launch", "train", "save")

MAX_WINDOWS = 32  # enough for a mean and its spread
SPAN = (
    1.15  # a span of the curve ends at so many times its first iteration: a million make 100, 2^53 make 270
)
MAX_SPANS = 512  # not reached by rising iterations; a hard bound
MAX_PUBLISHED = 32  # bounds the state; an evaluation asks for the one nearest half of the run
SLACK = 1.5  # a window may seem so many times longer than its task has run, since clocks are coarse
SLACK_MS = 1_000.0  # and so much more: the first window of a task that has just begun is not odd
MAX_CONDITIONS = 8  # with stored step times; the latest, those of the placement and the usual ones
SMALL = 0.1
"""Part of an attempt's time. A run that had other cores than the settled ones, or was slowed, for no longer,
is typical of the next run, whose cores are searched for as well; its run time is wrong by a tenth at most,
where it made no progress meanwhile."""


def ring_of(places: Sequence[TaskPlacement]) -> tuple[int, ...]:
    """GPUs on each node, in the order of the workers; empty without GPUs or with parts of one."""
    found: dict[str, int] = {}
    for place in places:
        if not place.gpus or place.gpu_share_milli < 1_000:
            return ()
        found[place.node_id] = found.get(place.node_id, 0) + len(place.gpus)
    ring = tuple(found.values())
    return () if why_no_placement(ring) else ring


@dataclass(slots=True)
class TaskPhases:
    """One task's time in each phase, by its node's clock. A script may train and save in turn."""

    phase: Phase | None = None
    since_ms: int = 0
    began_ms: int | None = None
    spent_ms: dict[Phase, float] = field(default_factory=dict)
    reported: bool = False
    broken: bool = False
    """Its clock stepped back, or the fold began in the middle: none of its phases is known."""
    ready_ms: int | None = None
    """End of its launch, where that was before its start was reported: it waited for its GPUs."""

    @property
    def waited_ms(self) -> float:
        """Time for which it waited for its GPUs after its launch."""
        return self.spent_ms.get("ready", 0.0)

    def started(self, at_ms: int) -> None:
        self.began_ms = at_ms
        if self.phase is None:
            self.phase, self.since_ms = "launch", at_ms
            if self.ready_ms is not None:
                self.changed("ready", self.ready_ms)

    def changed(self, phase: Phase, at_ms: int) -> None:
        if self.phase is None and phase in ("launch", "ready"):  # its start is reported when it has its GPUs
            self.ready_ms = at_ms if phase == "ready" else None
            return
        self._close(at_ms)
        self.phase, self.since_ms, self.reported = phase, at_ms, True

    def _close(self, at_ms: int) -> None:
        if self.phase is None:
            self.broken = True
            return
        if at_ms < self.since_ms:
            self.broken = True
        self.spent_ms[self.phase] = self.spent_ms.get(self.phase, 0.0) + at_ms - self.since_ms

    def exited(self, at_ms: int) -> None:
        self._close(at_ms)
        self.phase = None


@dataclass(slots=True)
class Windows:
    """Step times since the placement: [steps, ms in all] of successive windows."""

    parts: list[tuple[int, float]] = field(default_factory=list)

    def add(self, steps: int, step_ms: float) -> None:
        self.parts.append((steps, steps * step_ms))
        if len(self.parts) > MAX_WINDOWS:
            pairs = zip(self.parts[::2], self.parts[1::2], strict=False)
            merged = [(one + other, ms + more) for (one, ms), (other, more) in pairs]
            self.parts = [*merged, *self.parts[2 * len(merged) :]]

    @property
    def steps(self) -> int:
        return sum(steps for steps, _ in self.parts)

    @property
    def mean_ms(self) -> float:
        """NaN without any window."""
        steps = self.steps
        return sum(ms for _, ms in self.parts) / steps if steps else nan

    def equal(self) -> tuple[float, ...]:
        """Mean steps of as many windows, each of the same number of steps; ms.

        Windows are reported at growing intervals, so that their plain mean would be that of the first
        seconds.
        """
        if not self.parts:
            return ()
        steps, times = (np.cumsum([0.0, *column]) for column in zip(*self.parts, strict=True))
        cuts = np.interp(np.linspace(0.0, steps[-1], len(self.parts) + 1), steps, times)
        return tuple((np.diff(cuts) / (steps[-1] / len(self.parts))).tolist())


class _Span(NamedTuple):
    """Sums over the points of one span of the curve."""

    first: int
    points: int
    steps: float
    values: float


@dataclass(slots=True)
class LossCurve:
    """Means of the loss over spans that grow with the iteration."""

    spans: list[_Span] = field(default_factory=list)

    def add(self, step: int, value: float | None) -> None:
        if value is None or step <= 0 or not abs(value) <= MAX_VALUE:
            return
        last = self.spans[-1] if self.spans else None
        if last is not None and (step < SPAN * last.first or len(self.spans) >= MAX_SPANS):
            self.spans[-1] = _Span(last.first, last.points + 1, last.steps + step, last.values + value)
        else:
            self.spans.append(_Span(step, 1, float(step), value))

    def drop_after(self, step: int) -> None:
        """Removes later points: a job that resumed from its checkpoint repeats later iterations."""
        while self.spans and self.spans[-1].first > step:
            self.spans.pop()

    def points(self) -> tuple[tuple[float, float], ...]:
        """(iteration, loss), rising."""
        return tuple((span.steps / span.points, span.values / span.points) for span in self.spans)


class Published(NamedTuple):
    """A remaining time in the ledger."""

    at_ms: int
    left_ms: Bounds
    done: int = 0


@dataclass(slots=True)
class Progress:
    """Of a job's current attempt; iterations and losses are the job's.
    `evolve` (state.py) is the only writer."""

    attempt: int
    placed_ms: int
    ring: tuple[int, ...]
    gpu: str
    """Model; empty: unknown or several."""
    tasks: dict[str, TaskPhases]
    """Workers."""
    done: int = 0
    total: int | None = None
    """As reported by the script."""
    at_ms: int = 0
    """Ledger time of the newest report; 0: this attempt reported nothing."""
    started_ms: int | None = None
    """Ledger time."""
    placed: Conditions = UNKNOWN_CONDITIONS
    """The conditions of its placement, alone on its GPUs."""
    usual: Conditions = UNKNOWN_CONDITIONS
    """As `placed`, but with the cores with which the search for them has ended."""
    conditions: Conditions = UNKNOWN_CONDITIONS
    since_ms: int = 0
    """Ledger time since which the present conditions hold."""
    disturbed: Disturbance = NONE
    """All disturbances since its placement, however short; `met` weighs them."""
    lasted_ms: dict[Conditions, int] = field(default_factory=dict)
    """Cores and caps before the present ones → how long they held; those that held longest."""
    windows_of: dict[Conditions, Windows] = field(default_factory=dict)
    """The last used one is at the end."""
    first: tuple[int, int] | None = None
    """(iterations, ledger time) of this attempt's first report."""
    curve: LossCurve = field(default_factory=LossCurve)
    published: list[Published] = field(default_factory=list)
    odd: int = 0
    """Reports that cannot be true: iterations that went back, windows longer than the task has run."""

    @property
    def gpus(self) -> int:
        return sum(self.ring)

    def task(self, task_id: str) -> TaskPhases:
        """Phases of one of its workers; for any other task an object that is discarded."""
        return self.tasks.get(task_id) or TaskPhases()

    @property
    def windows(self) -> Windows:
        """Measured in the present conditions, on this placement."""
        return self.windows_of.get(self.conditions) or Windows()

    @property
    def undisturbed(self) -> Windows:
        """Measured in its usual conditions, and alone on its GPUs."""
        return self.windows_of.get(self.usual) or Windows()

    @property
    def elsewhere(self) -> Windows:
        """Undisturbed, else measured in the latest other conditions."""
        others = [self.usual, self.placed, *reversed(self.windows_of)]
        return next((self.windows_of[one] for one in others if one in self.windows_of), Windows())

    def meet(self, conditions: Conditions, now_ms: int) -> None:
        """These conditions hold from now on."""
        if conditions == self.conditions:
            return
        before = self.conditions._replace(neighbours=())
        self.lasted_ms[before] = self.lasted_ms.get(before, 0) + self._lasted_ms(now_ms)
        if len(self.lasted_ms) > MAX_CONDITIONS:
            del self.lasted_ms[min(self.lasted_ms, key=lambda one: (self.lasted_ms[one], one))]
        self.conditions, self.since_ms = conditions, now_ms
        self.disturbed |= conditions.apart(self.placed)

    def settle(self, worker: int, cores: int) -> None:
        """The search for its cores has ended: it stays with this number."""
        self.usual = self.usual.with_cores(worker, cores)

    def met(self, now_ms: int) -> Disturbance:
        """Disturbances of an attempt that ends now, against its usual conditions with the settled cores.
        Source: none of the papers; a run under the contention-guard teaches the run time of the next one,
        unless other conditions held for most of it."""
        if not self.disturbed:
            return NONE
        changed = self.disturbed & (Disturbance.CORES | Disturbance.CAPPED)
        if not changed or self._unusual_ms(now_ms) > SMALL * self._ran_ms(now_ms):
            return self.disturbed
        return self.disturbed & ~changed | Disturbance.BRIEFLY

    def _unusual_ms(self, now_ms: int) -> float:
        """Time with other cores than the settled ones, or a cap.
        Unknown time, from before a restart, counts."""
        usual_ms = self.lasted_ms.get(self.usual, 0)
        if self.conditions._replace(neighbours=()) == self.usual:
            usual_ms += self._lasted_ms(now_ms)
        return self._ran_ms(now_ms) - usual_ms

    def _ran_ms(self, now_ms: int) -> int:
        return now_ms - (self.placed_ms if self.started_ms is None else self.started_ms)

    def _lasted_ms(self, now_ms: int) -> int:
        """How long the present conditions have held; launching does not count."""
        return max(0, now_ms - max(self.since_ms, self.started_ms or 0))

    def skipped_ms(self) -> float | None:
        """Time that the iterations before this attempt take on its placement, undisturbed,
        ≥ 0; None: not known."""
        step_ms = self.undisturbed.mean_ms
        if self.first is None or self.started_ms is None or step_ms != step_ms:
            return None
        done, at_ms = self.first
        return max(0.0, done * step_ms - (at_ms - self.started_ms))

    def start(self, task_id: str, node_ms: int, now_ms: int) -> None:
        if task_id in self.tasks:
            self.tasks[task_id].started(node_ms)
            self.started_ms = now_ms if self.started_ms is None else min(self.started_ms, now_ms)

    def step(self, report: StepsMeasured, now_ms: int) -> bool:
        """Takes the report. Returns whether it has news."""
        first = not self.at_ms
        if report.done <= self.done and not first:
            self.odd += report.done < self.done
            return False
        if first:
            self.curve.drop_after(report.done)
            self.first = report.done, now_ms
        if report.steps:
            if self._window_is_odd(report):
                self.odd += 1
            elif self._in_one_piece:
                self._add_window(report)
        self.done, self.at_ms = report.done, now_ms
        if report.total is not None:
            self.total = report.total if report.total >= report.done else None
        self.curve.add(report.done, report.loss)
        return True

    @property
    def _in_one_piece(self) -> bool:
        """Whether a window that ends now was measured in the present conditions alone: it begins at the
        previous report."""
        began_ms = self.at_ms or self.started_ms
        return began_ms is None or began_ms >= self.since_ms

    def _add_window(self, report: StepsMeasured) -> None:
        windows = self.windows_of.pop(self.conditions, None) or Windows()
        windows.add(report.steps, report.step_ms)
        self.windows_of[self.conditions] = windows
        if len(self.windows_of) > MAX_CONDITIONS:
            stay = self.placed, self.usual
            del self.windows_of[next(one for one in self.windows_of if one not in stay)]

    def _window_is_odd(self, report: StepsMeasured) -> bool:
        began_ms = self.task(report.task_id).began_ms
        most_ms = nan if began_ms is None else SLACK * (report.at_ms - began_ms) + SLACK_MS
        too_long = report.steps * report.step_ms > most_ms
        return bool(
            too_long
            or report.steps > report.done
            or why_rejected(Measurement(Cell(self.ring or (1,), 1.0), report.step_ms / 1_000.0))
        )

    def publish(self, found: Published) -> None:
        """A remaining time was written to the ledger. Thinned to every second one;
        the first and the last stay."""
        self.published.append(found)
        if len(self.published) > MAX_PUBLISHED:
            last = self.published[-1:] if len(self.published) % 2 == 0 else []
            self.published = [*self.published[::2], *last]

    def max_iterations(self, asked: int | None) -> int | None:
        """Iterations in all: as the script reports, else as the job asked for;
        None: unknown, or passed already."""
        total = asked if self.total is None else self.total
        return total if total is not None and total >= self.done else None

    def phases_ms(self) -> dict[Phase, float]:
        """Of the ended attempt: the longest over its workers; a phase that no worker reported is NaN."""
        known = [task.spent_ms for task in self.tasks.values() if task.reported and not task.broken]
        if not known:
            return dict.fromkeys(PHASES, UNKNOWN)
        return {phase: max(spent.get(phase, 0.0) for spent in known) for phase in PHASES}

    def eta_at_half(self, end_ms: int) -> EtaAtHalf | None:
        """The ETA in the ledger at half of the attempt, less the time since then, and the true time left."""
        began_ms = self.placed_ms if self.started_ms is None else self.started_ms
        lasted_ms = end_ms - began_ms
        half_ms = began_ms + lasted_ms / 2
        before = [one for one in self.published if one.at_ms <= half_ms]
        if not before or lasted_ms <= 0:
            return None
        gone_ms = half_ms - before[-1].at_ms
        middle, low, high = (max(0.0, part - gone_ms) for part in before[-1].left_ms)
        return EtaAtHalf(middle, low, high, end_ms - half_ms)


def begun(
    attempt: int,
    placed_ms: int,
    places: Sequence[TaskPlacement],
    gpu: str,
    before: Progress | None = None,
) -> Progress:
    """Progress of a new attempt. The job's iterations and losses stay;
    step times only if it is placed as before."""
    ring, alone = ring_of(places), placed(places)
    found = Progress(
        attempt,
        placed_ms,
        ring,
        gpu,
        {place.task_id: TaskPhases() for place in places},
        placed=alone,
        usual=alone,
        conditions=alone,
        since_ms=placed_ms,
    )
    if before is not None:
        found.done, found.total, found.curve, found.odd = before.done, before.total, before.curve, before.odd
        if (before.ring, before.gpu) == (ring, gpu):
            found.windows_of = before.windows_of
    return found


def steps_of(progress: Progress) -> tuple[Steps | None, str]:
    """(the ended job's steps, why they are implausible); one of them is empty, or both."""
    if not progress.at_ms:
        return None, ""
    windows, ring = progress.undisturbed, progress.ring
    mean_ms = windows.mean_ms
    if windows.parts:
        if reason := why_rejected(Measurement(Cell(ring or (1,), 1.0), mean_ms / 1_000.0)):
            return None, f"steps: {reason}"
    elif progress.odd:
        return None, f"steps: {progress.odd} reports that cannot be true, and none that can"
    return Steps(ring, windows.equal(), progress.curve.points()), ""


def measured_steps(progress: Progress, steps: Steps | None) -> Mapping[str, float]:
    """Fields of `Run` that the ended attempt measured; the iterations are those of all attempts."""
    phases = {f"{phase}_ms": spent for phase, spent in progress.phases_ms().items()}
    if steps is None:
        return phases
    return {**phases, "iterations": float(progress.done), "step_ms": progress.undisturbed.mean_ms}
