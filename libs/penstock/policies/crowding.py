"""Interference model: slowdown of jobs by their neighbours on a node, fitted to measured step times.

Model: with a share s of a node's allocated cores (its own over those of all running tasks) a job's steps take s^-e times as long as alone
on the node. The exponent e is 0 where cores suffice for all tasks, as with tasks pinned to cores of their own, and 1 where all
share the same cores in turns. It is fitted by least squares to logarithms: each job's step times in two consecutive windows, against its mean
share in them; a job is compared only with itself. Jobs with and without GPUs have one exponent each. Pure: its input is ledger facts, no clock.
"""

from collections.abc import Callable
from functools import cache, partial
from math import exp, log
from typing import NamedTuple

from penstock.ledger.job_state import JobState
from penstock.ledger.state import CellState
from penstock.model.external_events import StepsMeasured
from penstock.model.transitions import JobStatus, TaskStatus

PRIOR = 0.25  # weight of the prior e = 0, in squared logarithms: three changes by a third of the share outweigh it
LEAST_CHANGE = 0.05  # of the logarithm of the share: after smaller changes noise of the step times dominates


class Progress(NamedTuple):
    """Remaining work and core share of a job."""

    left_s: float
    """Remaining run time alone on its node, ≥ 0."""
    share: float
    """Share of the allocated cores of its most crowded node, 0 – 1."""


class _Followed:
    """Measurements of one running attempt."""

    __slots__ = (
        "area",
        "done",
        "done_s",
        "log_share",
        "log_step",
        "mean",
        "since_ms",
        "step_s",
        "token",
        "total",
        "window_ms",
    )

    def __init__(self, token: int, log_share: float, now_ms: int) -> None:
        self.token = token
        self.log_share = log_share
        self.since_ms = self.window_ms = now_ms
        """Start of the current share; start of the window."""
        self.area = 0.0
        """Integral of the logarithm of the share over the window, in ms."""
        self.mean = self.log_step = 0.0
        """Previous window: mean logarithm of the share, logarithm of the step time; `step_s` 0: there was none."""
        self.step_s = 0.0
        """Time of a step alone on the node."""
        self.done = 0
        self.total = 0
        """Steps done at the latest report, and planned steps; 0: not reported."""
        self.done_s = 0.0
        """Work done since the latest report, or since its start, in seconds of running alone."""


class Crowding:
    """Tracks all running jobs of a cell."""

    def __init__(self) -> None:
        self._jobs: dict[str, _Followed] = {}
        self._fit: dict[bool, tuple[float, float]] = {}
        """Whether the job has GPUs → sums of the regression."""

    def exponent(self, *, gpus: bool) -> float:
        """The exponent e of jobs with or without GPUs, 0 – 1; 0 until it is measured."""
        xy, xx = self._fit.get(gpus, (0.0, 0.0))
        return min(1.0, max(0.0, xy / (xx + PRIOR)))

    def matters(self) -> bool:
        """Whether a slowdown by neighbours was ever measured."""
        return any(self.exponent(gpus=gpus) > 0.0 for gpus in self._fit)

    def changed(self, state: CellState, job_id: str, now_ms: int, node_id: str = "") -> None:
        """Updates the shares of a job and its neighbours after it started, stopped, left a node or got other cores."""
        job = state.jobs.get(job_id)
        if job is None or job.status is not JobStatus.RUNNING:
            self._jobs.pop(job_id, None)
        around = {node_id} if job is None else {node_id, *(task.place.node_id for task in job.tasks.values())}
        busy = cache(partial(busy_cores, state))
        for other in {
            other for one in around & state.nodes.keys() for other in state.nodes[one].tasks.values()
        }:
            self._settle(state, other, now_ms, busy)

    def _settle(self, state: CellState, job_id: str, now_ms: int, busy: Callable[[str], int]) -> None:
        """Accounts the time until now, and updates the share. `busy`: `busy_cores` of this state."""
        job = state.jobs.get(job_id)
        if job is None or job.status is not JobStatus.RUNNING:
            self._jobs.pop(job_id, None)
            return
        share = log(share_of(job, busy))
        known = self._jobs.get(job_id)
        if known is None or known.token != job.token:
            self._follow(job, share, now_ms)
            return
        self._pass(job, known, now_ms)
        known.log_share = share

    def _follow(self, job: JobState, log_share: float, now_ms: int) -> _Followed:
        """Starts tracking. For the attempt's time before now the current share is assumed: earlier neighbours are not known."""
        found = self._jobs[job.job_id] = _Followed(job.token, log_share, now_ms)
        ran_ms = 0 if job.running_ms is None else max(0, now_ms - job.running_ms)
        found.done_s = ran_ms / 1_000 * exp(self.exponent(gpus=has_gpus(job)) * log_share)
        return found

    def _pass(self, job: JobState, known: _Followed, now_ms: int) -> None:
        if now_ms == known.since_ms:  # many jobs change at the same time
            return
        passed_ms = max(0, now_ms - known.since_ms)
        known.area += known.log_share * passed_ms
        known.done_s += passed_ms / 1_000 * exp(self.exponent(gpus=has_gpus(job)) * known.log_share)
        known.since_ms = now_ms

    def measured(self, state: CellState, steps: StepsMeasured, now_ms: int) -> None:
        """Ends the job's window at a report of its steps."""
        job = state.jobs.get(steps.task_id.rsplit(".", 2)[0])
        known = None if job is None else self._jobs.get(job.job_id)
        if job is None or known is None or steps.token != known.token or job.group:
            return
        self._pass(job, known, now_ms)
        window_ms = now_ms - known.window_ms
        if steps.steps and steps.step_ms > 0 and window_ms > 0:
            mean, log_step = known.area / window_ms, log(steps.step_ms / 1_000)
            if known.step_s:
                self._learn(has_gpus(job), mean - known.mean, log_step - known.log_step)
            known.mean, known.log_step = mean, log_step
            known.step_s = exp(log_step + self.exponent(gpus=has_gpus(job)) * mean)
        known.area, known.window_ms, known.done_s = 0.0, now_ms, 0.0
        known.done, known.total = steps.done, steps.total or 0

    def _learn(self, gpus: bool, share: float, step: float) -> None:
        """Adds one data point: changes of the logarithms of share and step time."""
        if abs(share) >= LEAST_CHANGE:
            xy, xx = self._fit.get(gpus, (0.0, 0.0))
            self._fit[gpus] = (xy - share * step, xx + share * share)

    def follow(self, state: CellState, job: JobState, now_ms: int) -> None:
        """Starts tracking a running job that ran before the first call of `changed`."""
        known = self._jobs.get(job.job_id)
        if known is None or known.token != job.token:
            self._follow(job, log(share_of(job, partial(busy_cores, state))), now_ms)

    def progress(self, state: CellState, job: JobState, now_ms: int) -> Progress | None:
        """Progress of a job; None: it does not run.

        Remaining work: the remaining steps, at the step time alone; without reported steps the estimated run time less the work done;
        without an estimate as much as it has done: with long-tailed run times a job is expected to be half done at any time.
        """
        if job.status is not JobStatus.RUNNING:
            return None
        self.follow(state, job, now_ms)
        known = self._jobs[job.job_id]
        exponent = self.exponent(gpus=has_gpus(job))
        done_s = known.done_s + max(0, now_ms - known.since_ms) / 1_000 * exp(exponent * known.log_share)
        share = exp(known.log_share)
        if known.total and known.step_s:
            return Progress(max(0.0, (known.total - known.done) * known.step_s - done_s), share)
        done_s += job.served_ms / 1_000
        run_ms = None if job.estimate is None else job.estimate.run_ms
        return Progress(done_s if run_ms is None else max(0.0, run_ms / 1_000 - done_s), share)


def has_gpus(job: JobState) -> bool:
    for task in job.tasks.values():  # noqa: SIM110 - called for each job on a node after each change: `any` takes twice as long
        if task.place.gpus:
            return True
    return False


def share_of(job: JobState, busy: Callable[[str], int]) -> float:
    """The job's cores over those of all running tasks on its most crowded node; > 0, at most 1. `busy`: node id → cores of all running tasks."""
    if len(job.tasks) == 1:
        [task] = job.tasks.values()
        cores = max(1, len(task.place.cores))
        return cores / max(cores, busy(task.place.node_id))
    found = 1.0
    own: dict[str, int] = {}
    for task in job.tasks.values():
        own[task.place.node_id] = own.get(task.place.node_id, 0) + max(1, len(task.place.cores))
    for node_id, cores in own.items():
        found = min(found, cores / max(cores, busy(node_id)))
    return found


def busy_cores(state: CellState, node_id: str) -> int:
    """Cores of the running tasks on the node; each task counts for at least one."""
    found, jobs = 0, state.jobs
    for task_id, job_id in state.nodes[node_id].tasks.items():
        job = jobs.get(job_id)
        task = None if job is None else job.tasks.get(task_id)
        if task is not None and task.status is TaskStatus.RUNNING:
            found += len(task.place.cores) or 1
    return found
