"""Interference model: slowdown of jobs by their neighbours on a node, fitted to measured step times.

Model: with a share s of a node's allocated cores (its own over those of all running tasks) a job's steps take
s^-e times as long as alone on the node. The exponent e is 0 where cores suffice for all tasks, as with tasks
pinned to cores of their own, and 1 where all share the same cores in turns. It is fitted by least squares to
logarithms: each job's step times in two consecutive windows, against its mean share in them; a job is
compared only with itself. Jobs with and without GPUs have one exponent each. Pure: its input is ledger facts,
no clock.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from math import exp, log
from types import MappingProxyType
from typing import NamedTuple

from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.state import CellState
from penstock.model.inputs.external_events import StepsMeasured
from penstock.model.nouns.transitions import JobStatus, TaskStatus
from penstock.scheduling.acting.settling import AGREES

# weight of the prior e = 0, in squared logarithms: three changes by a third of the share outweigh it
PRIOR = 0.25
MAX_STEPS = 4_096
"""In the loads of all nodes, or as many as jobs run, before all jobs account for them."""


class Progress(NamedTuple):
    """Remaining work and core share of a job."""

    left_s: float
    """Remaining run time alone on its node, ≥ 0."""
    share: float
    """Share of the allocated cores of its most crowded node, 0 – 1."""


class _Load:
    """Cores of the running tasks on one node over time: `cores[i]` from `since_ms[i]` on, ascending."""

    __slots__ = ("cores", "since_ms")

    def __init__(self, now_ms: int) -> None:
        self.since_ms = [now_ms]
        self.cores = [0]

    def change(self, cores: int, now_ms: int) -> None:
        """Adds so many cores, possibly none or a negative number. A time before the last step counts as the
        last step's: who asks about progress may be ahead of the ledger's records."""
        if now_ms <= self.since_ms[-1]:
            self.cores[-1] += cores
        else:
            self.since_ms.append(now_ms)
            self.cores.append(self.cores[-1] + cores)

    def at(self, at_ms: int) -> int:
        """The cores at this time; before the first step the number of the first step."""
        return self.cores[max(0, bisect_right(self.since_ms, at_ms) - 1)]

    def steps(self, from_ms: int) -> Sequence[int]:
        """Times of the steps from this time on."""
        return self.since_ms[bisect_left(self.since_ms, from_ms) :]

    def drop_past(self) -> None:
        """Drops all but the last step."""
        del self.since_ms[:-1], self.cores[:-1]


class _Followed:
    """Measurements of one running attempt."""

    __slots__ = (
        "area",
        "cores",
        "done",
        "done_s",
        "gpus",
        "log_share",
        "log_step",
        "mean",
        "since_ms",
        "step_s",
        "token",
        "total",
        "window_ms",
    )

    def __init__(self, job: JobState, cores: Mapping[str, int], now_ms: int) -> None:
        self.token = job.token
        self.gpus = has_gpus(job)
        self.cores = cores
        """Node id → cores of its tasks there; each task counts for at least one."""
        self.log_share = 0.0
        self.since_ms = self.window_ms = now_ms
        """Time until which it is accounted for; start of the window. `log_share` applies from then on, once
        the loads since then are accounted for."""
        self.area = 0.0
        """Integral of the logarithm of the share over the window, in ms."""
        self.mean = self.log_step = 0.0
        """Previous window: mean logarithm of the share, logarithm of the step time;
        `step_s` 0: there was none."""
        self.step_s = 0.0
        """Time of a step alone on the node."""
        self.done = 0
        self.total = 0
        """Steps done at the latest report, and planned steps; 0: not reported."""
        self.done_s = 0.0
        """Work done since the latest report, or since its start, in seconds of running alone."""


class Crowding:
    """Tracks all running jobs of a cell.

    Ideal: each change of a node's tasks updates the shares of all jobs there. Departure: the nodes' loads are
    stored over time, and a job accounts for them when it is asked about, which most attempts never are.
    """

    def __init__(self) -> None:
        self._jobs: dict[str, _Followed] = {}
        self._fit: dict[bool, tuple[float, float]] = {}
        """Whether the job has GPUs → sums of the regression."""
        self._running: dict[str, Mapping[str, int]] = {}
        """Job id → node id → cores of its running tasks, as they are in the loads."""
        self._loads: dict[str, _Load] = {}
        """By node id; none for a node on which no task has run for long."""
        self._steps = 0
        """Upper bound of the number of steps in the loads."""
        self._begun = False
        """Whether the jobs that ran before the first call are counted."""

    def exponent(self, *, gpus: bool) -> float:
        """The exponent e of jobs with or without GPUs, 0 – 1; 0 until it is measured."""
        xy, xx = self._fit.get(gpus, (0.0, 0.0))
        return min(1.0, max(0.0, xy / (xx + PRIOR)))

    def matters(self) -> bool:
        """Whether a slowdown by neighbours was ever measured."""
        return any(self.exponent(gpus=gpus) > 0.0 for gpus in self._fit)

    def changed(self, state: CellState, job_id: str, now_ms: int) -> None:
        """Takes a change: the job started, stopped, left a node or got other cores."""
        self._begin(state, now_ms)
        job = state.jobs.get(job_id)
        cores, running = cores_of(job)
        self._count(job_id, cores, running, now_ms)
        self._track(job_id, job, cores, now_ms)
        if self._steps > max(MAX_STEPS, len(self._jobs)):
            self._drop_past()

    def _begin(self, state: CellState, now_ms: int) -> None:
        """At the first call: counts the tasks that run already, then tracks their jobs."""
        if self._begun:
            return
        self._begun = True
        found = [(job, *cores_of(job)) for job in state.holding.values()]
        for job, cores, running in found:
            self._count(job.job_id, cores, running, now_ms)
        for job, cores, _ in found:
            self._track(job.job_id, job, cores, now_ms)

    def _count(self, job_id: str, cores: Mapping[str, int], running: Mapping[str, int], now_ms: int) -> None:
        """Updates the loads of the job's nodes. `cores`, `running`: `cores_of` the job now."""
        before = self._running.pop(job_id, NO_CORES)
        if running:
            self._running[job_id] = running
        for node_id in {**cores, **before}:
            load = self._loads.get(node_id)
            if load is None:
                load = self._loads[node_id] = _Load(now_ms)
            load.change(running.get(node_id, 0) - before.get(node_id, 0), now_ms)
            self._steps += 1

    def _track(self, job_id: str, job: JobState | None, cores: Mapping[str, int], now_ms: int) -> None:
        """Follows the job's attempt while all its tasks run, with these cores from now on."""
        if job is None or job.status is not JobStatus.RUNNING:
            self._jobs.pop(job_id, None)
            return
        known = self._jobs.get(job_id)
        if known is None or known.token != job.token:
            self._follow(job, cores, now_ms)
        elif known.cores != cores:
            self._settle(known)
            known.cores = cores

    def _drop_past(self) -> None:
        """Has all jobs account for the past, and drops it."""
        self._settle_all()
        self._loads = {node_id: load for node_id, load in self._loads.items() if load.cores[-1]}
        for load in self._loads.values():
            load.drop_past()
        self._steps = len(self._loads)

    def _settle_all(self) -> None:
        for known in self._jobs.values():
            self._settle(known)

    def _settle(self, known: _Followed) -> None:
        """Accounts for the time until the last step of the job's nodes, and updates the share."""
        loads = self._loads_of(known.cores)
        for at_ms in sorted({at_ms for _, load in loads for at_ms in load.steps(known.since_ms)}):
            self._pass(known, at_ms)
            known.log_share = _log_share(loads, at_ms)

    def _loads_of(self, cores: Mapping[str, int]) -> Sequence[tuple[int, _Load]]:
        """A job's cores on each of its nodes, with the node's load."""
        return [(own, load) for node_id, own in cores.items() if (load := self._loads.get(node_id))]

    def _follow(self, job: JobState, cores: Mapping[str, int], now_ms: int) -> None:
        """Starts tracking. For the attempt's time before now the current share is assumed: earlier neighbours
        are not known."""
        found = self._jobs[job.job_id] = _Followed(job, cores, now_ms)
        if job.running_ms is not None and now_ms > job.running_ms:
            self._settle(found)
            ran_s = (now_ms - job.running_ms) / 1_000
            found.done_s = ran_s * exp(self.exponent(gpus=found.gpus) * found.log_share)

    def _pass(self, known: _Followed, now_ms: int) -> None:
        if now_ms == known.since_ms:
            return
        passed_ms = max(0, now_ms - known.since_ms)
        known.area += known.log_share * passed_ms
        known.done_s += passed_ms / 1_000 * exp(self.exponent(gpus=known.gpus) * known.log_share)
        known.since_ms = now_ms

    def measured(self, state: CellState, steps: StepsMeasured, now_ms: int) -> None:
        """Ends the job's window at a report of its steps."""
        job = state.jobs.get(steps.task_id.rsplit(".", 2)[0])
        known = None if job is None else self._jobs.get(job.job_id)
        if job is None or known is None or steps.token != known.token or job.sharing.group:
            return
        self._settle(known)
        self._pass(known, now_ms)
        window_ms = now_ms - known.window_ms
        if steps.steps and steps.step_ms > 0 and window_ms > 0:
            mean, log_step = known.area / window_ms, log(steps.step_ms / 1_000)
            if known.step_s:
                self._learn(known.gpus, mean - known.mean, log_step - known.log_step)
            known.mean, known.log_step = mean, log_step
            known.step_s = exp(log_step + self.exponent(gpus=known.gpus) * mean)
        known.area, known.window_ms, known.done_s = 0.0, now_ms, 0.0
        known.done, known.total = steps.done, steps.total or 0

    def _learn(self, gpus: bool, share: float, step: float) -> None:
        """Adds one data point: changes of the logarithms of share and step time. If the share changes by
        less, step times differ by no more than those of equal speed do."""
        if abs(share) >= AGREES:
            self._settle_all()  # with the exponent of that time
            xy, xx = self._fit.get(gpus, (0.0, 0.0))
            self._fit[gpus] = (xy - share * step, xx + share * share)

    def follow(self, state: CellState, job: JobState, now_ms: int) -> None:
        """Starts tracking a running job that ran before the first call of `changed`."""
        self._begin(state, now_ms)
        known = self._jobs.get(job.job_id)
        if known is None or known.token != job.token:
            self.changed(state, job.job_id, now_ms)

    def progress(self, state: CellState, job: JobState, now_ms: int) -> Progress | None:
        """Progress of a job; None: it does not run.

        Remaining work: the remaining steps, at the step time alone; without reported steps the estimated run
        time less the work done; without an estimate as much as it has done: with long-tailed run times a job
        is expected to be half done at any time.
        """
        if job.status is not JobStatus.RUNNING:
            return None
        self.follow(state, job, now_ms)
        known = self._jobs[job.job_id]
        self._settle(known)
        exponent = self.exponent(gpus=known.gpus)
        done_s = known.done_s + max(0, now_ms - known.since_ms) / 1_000 * exp(exponent * known.log_share)
        share = exp(known.log_share)
        if known.total and known.step_s:
            return Progress(max(0.0, (known.total - known.done) * known.step_s - done_s), share)
        done_s += job.progress.served_ms / 1_000
        run_ms = None if job.estimate is None else job.estimate.run_ms
        return Progress(done_s if run_ms is None else max(0.0, run_ms / 1_000 - done_s), share)


def has_gpus(job: JobState) -> bool:
    return any(task.place.gpus for task in job.tasks.values())


NO_CORES: Mapping[str, int] = MappingProxyType({})


def cores_of(job: JobState | None) -> tuple[Mapping[str, int], Mapping[str, int]]:
    """Node id → cores of the job's tasks, and of those that run; each task counts for at least one."""
    if job is None:
        return NO_CORES, NO_CORES
    own: dict[str, int] = {}
    running: dict[str, int] = {}
    for task in job.tasks.values():
        node_id, cores = task.place.node_id, len(task.place.cores) or 1
        own[node_id] = own.get(node_id, 0) + cores
        if task.status is TaskStatus.RUNNING:
            running[node_id] = running.get(node_id, 0) + cores
    return own, running


def _log_share(loads: Sequence[tuple[int, _Load]], at_ms: int) -> float:
    """Logarithm of a job's cores over those of all running tasks, on its most crowded node; ≤ 0. `loads`: of
    its nodes, each with the job's cores there."""
    return log(min([own / max(own, load.at(at_ms)) for own, load in loads], default=1.0))
