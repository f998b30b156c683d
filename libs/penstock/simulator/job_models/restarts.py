"""Restart cost: saving a checkpoint before a stop, work lost since the last one, launching again.

A job that is stopped gets SIGTERM, stops computing and saves for `save_s`, while it still holds its GPUs. If
it is killed before the end of the save, it loses its work since its last checkpoint. Every start after its
first makes no progress for `launch_s`. While it trains, its script saves each `interval_s` beside the
training: the trace's run times include that time already, so it is not charged again. A checkpoint that is
ordered (`CheckpointTask`) is charged: the training stands still for `save_s`.

A job without progress since its last checkpoint, such as one that still launches, has nothing to save.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import floor, inf
from typing import NamedTuple

from penstock.simulator.job_models.model import Checkpoint, Instant, JobModel
from penstock.simulator.job_models.steady import At, Run, SteadyWork
from penstock.simulator.traces.jobs import TraceJob


class RestartCost(NamedTuple):
    """Costs of a restart in seconds, ≥ 0. By default it costs nothing and loses no work."""

    save_s: float = 0.0
    launch_s: float = 0.0
    interval_s: float = 0.0
    """Between two checkpoints that the script makes by itself; 0: it saves only when asked."""
    begins_anew: bool = False
    """It never saves: at each stop all its work is lost."""


CostOf = Callable[[TraceJob], RestartCost]


@dataclass(slots=True)
class _Saved:
    """A job's latest checkpoint, and the state of its launch and save."""

    cost: RestartCost
    left_s: float
    """Work left at its latest checkpoint, seconds alone."""
    counted_s: float = 0.0
    """Time from which its own checkpoints are counted: the beginning of its training."""
    starts: int = 0
    launching_s: float | None = None
    """Beginning of its present relaunch; None: it does not relaunch."""
    saving_s: float | None = None
    """Beginning of its present save, at a stop or by order; None: it does not save."""


class RestartingWork(SteadyWork):
    """Steady work of jobs with restart costs. `cost_of` is called once for each job, when it arrives."""

    def __init__(
        self, job_model: JobModel, cost_of: CostOf, loss_every_s: float = inf, *, watched: bool = False
    ) -> None:
        super().__init__(job_model, loss_every_s, watched=watched)
        self._cost_of = cost_of
        self._saved: dict[str, _Saved] = {}
        self._checkpoints: list[Checkpoint] = []

    def restart_cost(self, job: TraceJob) -> RestartCost:
        return self._cost_of(job)

    def admit(self, job: TraceJob, now_s: float) -> None:
        super().admit(job, now_s)
        self._saved[job.job_id] = _Saved(self._cost_of(job), self._runs[job.job_id].left_s)

    def stopped(self, job_id: str, now_s: float) -> None:
        run = self._runs.get(job_id)
        if run is None or run.at is At.REST:
            return
        saved = self._saved[job_id]
        saves = self.saving_s(job_id, now_s) > 0
        if run.at is At.CHECKPOINT:  # the unfinished save is lost: it saves anew
            self._charge_save(run, now_s)
        self._charge_launch(run, now_s)
        super().stopped(job_id, now_s)
        saved.saving_s = now_s if saves else None
        if saved.cost.begins_anew:
            self.charges.lost_gpu_s += (run.work_s - run.left_s) * run.job.whole_gpus
            run.left_s = run.work_s
        if not saves:
            saved.left_s = run.left_s

    def saving_s(self, job_id: str, now_s: float) -> float:
        run = self._runs.get(job_id)
        if run is None:
            return 0.0
        saved = self._saved[job_id]
        if saved.cost.begins_anew:
            return 0.0
        if run.at is At.REST:
            return 0.0 if saved.saving_s is None else max(0.0, saved.saving_s + saved.cost.save_s - now_s)
        self._own_checkpoint(run, now_s)
        left_s = run.left_s
        if run.at is At.TRAIN:
            left_s -= max(0.0, now_s - run.since_s) * run.speed
        return saved.cost.save_s if left_s < saved.left_s else 0.0

    def gone(self, job_id: str, now_s: float, *, killed: bool) -> None:
        run = self._runs.get(job_id)
        if run is None or self._saved[job_id].saving_s is None:
            return
        saved = self._saved[job_id]
        whole = self._charge_save(run, now_s)
        if killed and not whole:
            self.charges.lost_gpu_s += (saved.left_s - run.left_s) * run.job.whole_gpus
            run.left_s = saved.left_s
        saved.left_s = run.left_s

    def checkpoint(self, job_id: str, now_s: float) -> None:
        run = self._runs.get(job_id)
        if run is None or run.at is not At.TRAIN:
            return
        self._settle(run, now_s)
        self._compute_no_more(run, now_s)
        saved = self._saved[job_id]
        saved.saving_s = now_s
        run.at = At.CHECKPOINT
        self._at(run, now_s + saved.cost.save_s)

    def advance(self, now_s: float) -> Instant:
        instant = super().advance(now_s)
        for job_id, _ in instant.ended:
            del self._saved[job_id]
        if not self._checkpoints:
            return instant
        found, self._checkpoints = self._checkpoints, []
        return instant._replace(checkpoints=found)

    def _launch_s(self, run: Run, now_s: float) -> float:
        saved = self._saved[run.job.job_id]
        saved.starts += 1
        saved.saving_s = None
        if saved.starts == 1:
            return super()._launch_s(run, now_s)
        saved.launching_s = now_s
        return super()._launch_s(run, now_s) + saved.cost.launch_s

    def _train(self, run: Run, now_s: float) -> None:
        saved = self._saved[run.job.job_id]
        if run.at is At.CHECKPOINT:
            self._charge_save(run, now_s)
            saved.left_s = run.left_s
            self._checkpoints.append(Checkpoint(run.job.job_id, now_s))
        self._charge_launch(run, now_s)
        saved.counted_s = now_s
        super()._train(run, now_s)

    def _done(self, run: Run, now_s: float) -> float:
        self._own_checkpoint(run, now_s)
        return super()._done(run, now_s)

    def _settle(self, run: Run, now_s: float) -> None:
        self._own_checkpoint(run, now_s)
        super()._settle(run, now_s)

    def _own_checkpoint(self, run: Run, now_s: float) -> None:
        """Records the last checkpoint that the script has made by itself since the work was recorded; the
        speed was steady since then."""
        saved = self._saved[run.job.job_id]
        interval_s = saved.cost.interval_s
        if run.at is not At.TRAIN or interval_s <= 0:
            return
        last_s = saved.counted_s + floor((now_s - saved.counted_s) / interval_s) * interval_s
        if last_s > run.since_s:
            saved.left_s = max(0.0, run.left_s - (last_s - run.since_s) * run.speed)

    def _charge_launch(self, run: Run, now_s: float) -> None:
        saved = self._saved[run.job.job_id]
        if saved.launching_s is not None:
            seconds = min(now_s - saved.launching_s, saved.cost.launch_s)
            self.charges.launch_gpu_s += seconds * run.job.whole_gpus
            saved.launching_s = None

    def _charge_save(self, run: Run, now_s: float) -> bool:
        """Charges a save up to now; returns whether it is complete."""
        saved = self._saved[run.job.job_id]
        assert saved.saving_s is not None, run.job
        done_s = saved.saving_s + saved.cost.save_s
        self.charges.save_gpu_s += (min(now_s, done_s) - saved.saving_s) * run.job.whole_gpus
        saved.saving_s = None
        return now_s >= done_s
