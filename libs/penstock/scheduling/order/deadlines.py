"""Deadlines: expected completion time of a job, and the probability of meeting it. Derived from the state,
never written.

The deadline is GENIE's expected completion (§III, eq. 4). The probability is our addition: the run time is
assumed to be log-normal, with 90 % of the probability within the prediction's interval. The start is known,
or one of several that are equally likely. For a running job it is conditional on the job not having ended
yet.
"""

from collections import Counter
from collections.abc import Sequence
from math import erf, exp, inf, log, sqrt
from statistics import NormalDist, fmean
from typing import NamedTuple

from penstock.ledger.derived.speed import slowed_ms
from penstock.ledger.state.job.job_state import JobState
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.nouns.types import Qos, ShapeOption

LATENCIES: dict[Qos, float] = {"urgent": 0.0, "prior": 1.0, "normal": 2.0}
"""Expected completion, in multiples of the latency alone on one GPU. Source: eq. 4."""

SURE = 0.95  # probability that counts as certain: the upper end of a 90 % interval, as predictions have
NINE_IN_TEN = 1.6449  # its half-width in standard deviations
OVERDUE = 0.99  # quantile of the predicted run time; if the job has run longer, the prediction was wrong
LEAST_MS = 1.0  # a time of 0 has no logarithm
WIDEST = 1e12  # ratio of an interval's ends: an estimate may claim 0 beside a day, which has no logarithm
CLOSE = 1e-3  # relative accuracy of a quantile of several run times


def expected_ms(spec: JobSpec, alone_ms: float) -> float:
    """e_i, counted from the submission: the user's own deadline, else by class. `alone_ms`: l̄ of the job on
    ⟨1, 1⟩; infinite where not known. Source: eq. 4."""
    if spec.deadline_ms is not None:
        return float(spec.deadline_ms)
    times = LATENCIES[spec.qos or "normal"]
    return times * alone_ms if times else 0.0


def urgent(spec: JobSpec) -> bool:
    """Whether the job has no expected completion (eq. 4), and should end as soon as possible."""
    return spec.qos == "urgent" and spec.deadline_ms is None


def due_ms(job: JobState) -> float | None:
    """Ledger time of the job's deadline. Infinite: the deadline depends on its run time, which is not known;
    None: it names no deadline, or is urgent."""
    if not job.spec.timed or urgent(job.spec):
        return None
    run_ms = None if job.estimate is None else job.estimate.run_ms
    return job.submitted_ms + expected_ms(job.spec, inf if run_ms is None else float(run_ms))


def latency_ms(job: JobState, option: ShapeOption) -> float:
    """l_ij including the launch ν: the iterations' time is scaled by the option's iteration time over that
    with the fewest GPUs. Source: eq. 2."""
    estimate = job.estimate
    if estimate is None or estimate.run_ms is None:
        return inf
    startup_ms = min(estimate.launch_ms or 0, estimate.run_ms)
    return startup_ms + (estimate.run_ms - startup_ms) * option.step_ms / estimate.options[0].step_ms


class RunTime(NamedTuple):
    """Log-normal run time of a job of which `gone_ms` have elapsed at `from_ms`."""

    from_ms: float
    """Ledger time in ms."""
    middle_ms: float
    """Median, > 0."""
    below: float
    """Standard deviation of its logarithm below the median, ≥ 0, and `above` it."""
    above: float
    gone_ms: float = 0.0
    speed: float = 1.0
    """Speed from now on, relative to the prediction."""

    @property
    def overdue(self) -> bool:
        """Whether it has run longer than the prediction allows."""
        return self._share(self.gone_ms) >= OVERDUE

    def odds(self, due_ms: float) -> float:
        """Probability that it ends by then, 0 – 1; 0 if that time is past, or the job is overdue."""
        left_ms = (due_ms - self.from_ms) * self.speed
        before = self._share(self.gone_ms)
        if left_ms <= 0 or before >= OVERDUE:
            return 0.0
        return (self._share(self.gone_ms + left_ms) - before) / (1.0 - before)

    def by_ms(self, odds: float) -> float | None:
        """Ledger time in ms by which it ends with this probability, 0 – 1 exclusive;
        None where it is overdue."""
        before = self._share(self.gone_ms)
        if before >= OVERDUE:
            return None
        away = NormalDist().inv_cdf(before + odds * (1.0 - before))
        whole_ms = self.middle_ms * exp(away * (self.above if away > 0 else self.below))
        return self.from_ms + max(0.0, whole_ms - self.gone_ms) / self.speed

    def _share(self, ms: float) -> float:
        """Cumulative distribution: probability of a run time shorter than `ms`."""
        if ms <= 0:
            return 0.0
        away = log(ms / self.middle_ms)
        spread = self.above if away > 0 else self.below
        return float(away >= 0) if spread <= 0 else 0.5 * (1.0 + erf(away / spread / sqrt(2)))


class RunTimes(NamedTuple):
    """One job's run time after each of several starts, all equally likely."""

    each: Sequence[RunTime]
    """At least one; none is overdue."""

    def odds(self, due_ms: float) -> float:
        """As `RunTime.odds`."""
        return fmean([one.odds(due_ms) for one in self.each])

    def by_ms(self, odds: float) -> float:
        """As `RunTime.by_ms`, by bisection between the earliest and the latest of all."""
        found = [by_ms for one in self.each if (by_ms := one.by_ms(odds)) is not None]
        assert len(found) == len(self.each), self
        low, high = min(found), max(found)
        while high - low > max(LEAST_MS, CLOSE * (high - self.each[0].from_ms)):
            middle = (low + high) / 2
            low, high = (middle, high) if self.odds(middle) < odds else (low, middle)
        return high


def odds(job: JobState, option: ShapeOption, due_ms: float, start_ms: float) -> float:
    """Probability that the job is done by `due_ms` if it starts on this option at `start_ms`, 0 – 1; 0 where
    no time is known."""
    found = run_time(job, option, start_ms)
    return 0.0 if found is None else found.odds(due_ms)


def sure_ms(job: JobState, option: ShapeOption) -> float:
    """Time from its start on this option to its end, with probability `SURE`;
    infinite where no time is known."""
    found = run_time(job, option, 0.0)
    by_ms = None if found is None else found.by_ms(SURE)
    return inf if by_ms is None else by_ms


def run_time(job: JobState, option: ShapeOption, start_ms: float) -> RunTime | None:
    """Run time from this start on this option; None where no time is known.
    The launch time is assumed to be known."""
    estimate, middle_ms = job.estimate, latency_ms(job, option)
    if estimate is None or middle_ms == inf:
        return None
    startup_ms = min(estimate.launch_ms or 0, estimate.run_ms or 0)
    wide = min(max(option.high_ms / option.low_ms, 1 / WIDEST), WIDEST)
    spread = log(wide) / (2 * NINE_IN_TEN)
    return RunTime(start_ms + startup_ms, max(LEAST_MS, middle_ms - startup_ms), spread, spread)


def time_left(job: JobState, now_ms: int) -> RunTime | None:
    """Run time of a job that holds resources: by the estimator's latest answer, else by its option; None
    where no interval is known."""
    speed, eta = job.pace.speed, job.progress.eta
    if eta is not None and eta.attempt == job.attempt:
        left, level = eta.left_ms, eta.level
        width = NormalDist().inv_cdf((1.0 + level) / 2.0)
        low, middle, high = (max(LEAST_MS, ms) for ms in (left.low, left.middle, left.high))
        gone_ms = eta.passed_ms(job.running_ms, now_ms) - slowed_ms(job, now_ms)
        return RunTime(now_ms, middle, log(middle / low) / width, log(high / middle) / width, gone_ms, speed)
    option = option_of(job)
    found = None if option is None else run_time(job, option, now_ms)
    if found is None or job.running_ms is None:
        return found
    ran_ms = now_ms - job.running_ms - slowed_ms(job, now_ms) - (found.from_ms - now_ms)
    return found._replace(from_ms=now_ms + max(0.0, -ran_ms), gone_ms=max(0.0, ran_ms), speed=speed)


def option_of(job: JobState) -> ShapeOption | None:
    """The option of the job's present places, or the first with as many workers where none has these nodes;
    None: there is none."""
    options = () if job.estimate is None else job.estimate.options
    alike = [option for option in options if option.workers == job.workers]
    gpus = Counter(task.place.node_id for task in job.tasks.values() for _ in task.place.gpus)
    shape = len(gpus), max(gpus.values(), default=0)
    return min(alike, key=lambda option: (option.nodes, option.gpus_per_node) != shape, default=None)
