"""Work of most job models: progress at constant speed between changes; a stop loses no work.

A run goes through phases: *launch* for `start_up_s`, *train* while work is left, *save* for `save_s`. Only a
job in training computes: it and the other jobs on its nodes slow each other down from the beginning of its
training until its work is complete or it is stopped. A stop ends the run; the next one launches anew, and a
job that was stopped while it saved has only to save again.
"""

import heapq
from bisect import insort
from collections.abc import Sequence
from enum import Enum, auto
from math import inf

from penstock.model.inputs.external_events import JobProgress
from penstock.simulator.job_models.model import (
    End,
    Instant,
    JobModel,
    LossReport,
    Neighbour,
    Pace,
    PhaseChange,
    Placement,
    Work,
)
from penstock.simulator.traces.jobs import TraceJob


class At(Enum):
    """State of a run."""

    REST = auto()
    LAUNCH = auto()
    READY = auto()
    """Has launched, and waits for its GPUs."""
    TRAIN = auto()
    CHECKPOINT = auto()
    """Stands still until a checkpoint is saved, and trains on."""
    SAVE = auto()


class Run:
    """One job's work."""

    __slots__ = (
        "at",
        "gated",
        "job",
        "left_s",
        "placement",
        "report_s",
        "seen",
        "since_s",
        "speed",
        "to_report",
        "version",
        "work_s",
    )

    def __init__(self, job: TraceJob, work_s: float) -> None:
        self.job = job
        self.work_s = self.left_s = work_s
        self.placement: Placement = {}
        self.seen = Neighbour(job, {}, {}, {})
        """The job as a neighbour of others."""
        self.at = At.REST
        self.gated = False
        """Whether it launches before it holds its GPUs alone."""
        self.since_s = self.speed = 0.0
        self.report_s = inf
        """Time of its next loss report."""
        self.to_report = False
        """Whether its next moment is a report, not the end of its work."""
        self.version = 0


class SteadyWork(Work):
    """`loss_every_s`: time between two reports of a job's training loss while it trains; infinite: it reports
    none. `watched`: see `Work.paces`."""

    def __init__(self, job_model: JobModel, loss_every_s: float = inf, *, watched: bool = False) -> None:
        super().__init__()
        self._watched = watched
        self._paced: dict[str, TraceJob] = {}
        """Jobs whose speed was set since the last call of `paces`."""
        self._job_model = job_model
        self._loss_every_s = loss_every_s
        self._runs: dict[str, Run] = {}
        self._on_node: dict[str, list[str]] = {}
        """Node → the jobs that compute on it, by id; empty unless neighbours matter."""
        self._moments: list[tuple[float, str, int]] = []

    def alone_s(self, job: TraceJob) -> float:
        return self._job_model.work_s(job)

    def start_up_s(self, job: TraceJob) -> float:
        return self._job_model.start_up_s(job)

    def save_s(self, job: TraceJob) -> float:
        return self._job_model.save_s(job)

    def admit(self, job: TraceJob, now_s: float) -> JobProgress | None:
        self._runs[job.job_id] = Run(job, self._job_model.work_s(job))
        return None

    def launching(self, job_id: str, placement: Placement, now_s: float) -> None:
        run = self._runs[job_id]
        run.gated = True
        self._launch(run, placement, now_s)

    def started(self, job_id: str, placement: Placement, now_s: float) -> None:
        run = self._runs[job_id]
        if not run.gated:
            self._launch(run, placement, now_s)
            return
        run.gated = False
        if run.at is At.READY:
            run.at = At.LAUNCH
            self._at(run, now_s)

    def _launch(self, run: Run, placement: Placement, now_s: float) -> None:
        run.placement = placement
        run.seen = self._job_model.neighbour(run.job, placement)
        start_up_s = self._launch_s(run, now_s)
        run.at = At.LAUNCH
        if start_up_s > 0 or run.gated:
            self._at(run, now_s + start_up_s)
        else:
            self._train(run, now_s)

    def changed(self, job_id: str, placement: Placement, now_s: float) -> None:
        run = self._runs.get(job_id)
        if run is None or run.at is At.REST:
            return
        assert placement.keys() == run.placement.keys(), job_id
        run.placement = placement
        run.seen = self._job_model.neighbour(run.job, placement)
        if run.at is At.TRAIN:
            self._settle(run, now_s)
            self._set_speed(run)
            self._others_change(run, now_s)

    def share(self, job_id: str, now_s: float) -> float | None:
        run = self._runs.get(job_id)
        if run is None:
            return None
        left_s = run.left_s
        if run.at is At.TRAIN:
            left_s -= max(0.0, now_s - run.since_s) * run.speed
        return 1.0 - max(0.0, left_s) / run.work_s

    def stopped(self, job_id: str, now_s: float) -> None:
        run = self._runs.get(job_id)
        if run is None or run.at is At.REST:
            return
        if run.at is At.TRAIN:
            self._settle(run, now_s)
            self._compute_no_more(run, now_s)
        run.at = At.REST
        run.gated = False
        run.version += 1

    def paces(self) -> Sequence[Pace]:
        if not self._paced:
            return ()
        paced, self._paced = self._paced, {}
        found = []
        for job_id, job in paced.items():
            run = self._runs.get(job_id)
            if run is not None and run.at is At.TRAIN:
                found.append(Pace(job_id, job, run.work_s, run.speed, run.seen.traffic))
            else:
                found.append(Pace(job_id, job, 0.0, 0.0, {}))
        return found

    def next_s(self) -> float | None:
        while self._moments:
            at_s, job_id, version = self._moments[0]
            run = self._runs.get(job_id)
            if run is not None and run.version == version:
                return at_s
            heapq.heappop(self._moments)
        return None

    def advance(self, now_s: float) -> Instant:
        ended: list[End] = []
        losses: list[LossReport] = []
        phases: list[PhaseChange] = []
        while (due_s := self.next_s()) is not None and due_s <= now_s:
            run = self._runs[heapq.heappop(self._moments)[1]]
            if run.at is At.LAUNCH and run.gated:
                phases.append(PhaseChange(run.job.job_id, "ready", due_s))
                run.at = At.READY
                run.version += 1
            elif run.at is At.LAUNCH:
                phases.append(PhaseChange(run.job.job_id, "train", due_s))
                self._train(run, due_s)
            elif run.at is At.TRAIN and run.to_report:
                losses.append(self._report(run, due_s))
            elif run.at is At.TRAIN and (save_s := self._done(run, due_s)) > 0:
                phases.append(PhaseChange(run.job.job_id, "save", due_s))
                run.at = At.SAVE
                self._at(run, due_s + save_s)
            elif run.at is At.CHECKPOINT:
                self._train(run, due_s)
            else:
                ended.append(End(run.job.job_id, due_s))
                del self._runs[run.job.job_id]
        return Instant(ended, (), phases, losses)

    def _at(self, run: Run, at_s: float) -> None:
        """Sets the run's next moment; earlier entries become void."""
        run.version += 1
        heapq.heappush(self._moments, (at_s, run.job.job_id, run.version))

    def _launch_s(self, run: Run, now_s: float) -> float:
        """Seconds until a run that starts now trains."""
        return self._job_model.start_up_s(run.job)

    def _train(self, run: Run, now_s: float) -> None:
        run.at = At.TRAIN
        run.since_s = now_s
        if self._loss_every_s < inf and self._job_model.loss(run.job, 0.0) is not None:
            run.report_s = now_s + self._loss_every_s
        if self._job_model.neighbours_matter:
            for node_id in run.placement:
                here = self._on_node.setdefault(node_id, [])
                if run.job.job_id not in here:
                    insort(here, run.job.job_id)
        self._set_speed(run)
        self._others_change(run, now_s)

    def _done(self, run: Run, now_s: float) -> float:
        """Ends the run's work; returns the seconds of its save."""
        run.left_s = 0.0
        self._compute_no_more(run, now_s)
        return self._job_model.save_s(run.job)

    def _report(self, run: Run, now_s: float) -> LossReport:
        self._settle(run, now_s)
        run.report_s = now_s + self._loss_every_s
        progress = 1.0 - run.left_s / run.work_s
        loss = self._job_model.loss(run.job, progress)
        assert loss is not None, run.job
        self._set_moment(run)
        return LossReport(run.job.job_id, loss, progress, now_s)

    def _settle(self, run: Run, now_s: float) -> None:
        """Records the work done since the last change."""
        run.left_s = max(0.0, run.left_s - max(0.0, now_s - run.since_s) * run.speed)
        run.since_s = now_s

    def _set_speed(self, run: Run) -> None:
        neighbours: list[Neighbour] = []
        if self._job_model.neighbours_matter:
            neighbours = [self._runs[other].seen for other in self._others(run)]
        run.speed = self._job_model.speed(run.job, run.placement, neighbours)
        self._goes_on(run)

    def _goes_on(self, run: Run) -> None:
        """The run computes from now on, at its speed."""
        if self._watched:
            self._paced[run.job.job_id] = run.job
        self._set_moment(run)

    def _set_moment(self, run: Run) -> None:
        """Sets the next moment: the end of its work, or a loss report before that."""
        end_s = run.since_s + run.left_s / run.speed
        run.to_report = run.report_s < end_s
        self._at(run, min(run.report_s, end_s))

    def _compute_no_more(self, run: Run, now_s: float) -> None:
        if self._watched:
            self._paced[run.job.job_id] = run.job
        if self._job_model.neighbours_matter:
            for node_id in run.placement:
                self._on_node[node_id].remove(run.job.job_id)
            self._others_change(run, now_s)

    def _others(self, run: Run) -> list[str]:
        """Other jobs that compute on its nodes, by id."""
        here = [self._on_node[node_id] for node_id in run.placement]
        ids = here[0] if len(here) == 1 else sorted(set[str]().union(*here))
        return [other for other in ids if other != run.job.job_id]

    def _others_change(self, run: Run, now_s: float) -> None:
        if self._job_model.neighbours_matter:
            for other in self._others(run):
                neighbour = self._runs[other]
                self._settle(neighbour, now_s)
                if self._job_model.slowed_by_others(neighbour.job):
                    self._set_speed(neighbour)
                else:
                    self._goes_on(neighbour)
