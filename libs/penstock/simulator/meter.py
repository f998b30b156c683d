"""Metrics of a simulation: completion times, queueing, utilisation; collected while it runs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.simulator.job_models.model import Charges
from penstock.simulator.traces.jobs import TraceJob

SECONDS_PER_HOUR = 3_600


class Figures(NamedTuple):
    """Figures of one run. Means are over finished jobs; seconds are of virtual time."""

    avg_jct_s: float
    p50_jct_s: float
    p99_jct_s: float
    makespan_s: float
    """The last end, from the trace's start."""
    avg_queue_s: float
    """JCT less the run time of the job."""
    gpu_utilisation: float
    """Work of finished jobs at their speed alone, in GPU seconds, over all GPUs until the last end."""
    gpu_allocation: float
    """GPU seconds that jobs held, over all GPUs until the last end; if none ends, until the last event."""
    fragmentation: float
    """Free GPU seconds while a job waited, over all GPUs until the last end."""
    events: int
    """Arrivals and completions."""
    events_per_s: float
    """Per second of processor time: this runs on one core."""
    full_load_allocation: float
    """Mean share of all GPUs that jobs held after each arrival at which all jobs so far asked for 100 % of
    the GPUs, rounded to a whole per cent; if one arrival skips 100 %, the share held at the end; 0 if they
    never asked for so much. Meaningful if no job ends."""
    ledger_hash: str
    """Id of the last record: it covers every byte of the ledger."""
    finished_jobs: int
    unfinished_jobs: int
    preemptions: int
    restarts_per_job: float
    """Starts after the first, mean over all jobs that have started."""
    save_gpu_h: float
    """GPU hours of saves at stops or by order."""
    launch_gpu_h: float
    """GPU hours of launches of jobs that had run before."""
    lost_gpu_h: float
    """GPU hours of lost work, which has to be done again."""
    records: int
    """Number of ledger records."""
    cpu_s: float
    wall_s: float


@dataclass(slots=True)
class Life:
    """One job's times, seconds from the trace's start."""

    job: TraceJob
    ran_s: float = 0.0
    running_since_s: float | None = None
    end_s: float | None = None
    starts: int = 0
    first_start_s: float | None = None

    @property
    def jct_s(self) -> float:
        assert self.end_s is not None, self.job.job_id
        return self.end_s - self.job.submit_s


@dataclass(slots=True)
class Meter:
    """Collects the figures, fed by the engine; time never goes back."""

    gpus: int
    lives: dict[str, Life] = field(default_factory=dict)
    held: float = 0
    """GPUs held now; half a GPU is 0.5."""
    asked: float = 0.0
    """GPUs that all jobs so far have asked for."""
    waiting: int = 0
    """Jobs that wait now."""
    events: int = 0
    preemptions: int = 0
    finished: int = 0
    _now_s: float = 0.0
    _asked_before: float = 0.0
    _full_load: tuple[float, int] = (0.0, 0)
    _held_s: float = 0.0
    _wasted_s: float = 0.0
    _last_end_s: float = 0.0
    _until_last_end: tuple[float, float] = (0.0, 0.0)

    def at(self, now_s: float) -> None:
        """Integrates held GPUs and waiting jobs from the last call until now."""
        passed_s = now_s - self._now_s
        if passed_s > 0:
            self._held_s += passed_s * self.held
            if self.waiting:
                self._wasted_s += passed_s * (self.gpus - self.held)
            self._now_s = now_s
            self._sample()

    def _sample(self) -> None:
        """After an arrival: samples the allocation if the load has just reached the whole cluster."""
        if self.asked == self._asked_before:
            return
        self._asked_before = self.asked
        if round(100 * self.asked / self.gpus) == 100:
            held, samples = self._full_load
            self._full_load = held + self.held, samples + 1

    def arrived(self, job: TraceJob) -> None:
        self.lives[job.job_id] = Life(job)
        self.asked += job.whole_gpus
        self.events += 1

    def started(self, job_id: str, now_s: float) -> None:
        life = self.lives[job_id]
        life.running_since_s = now_s
        life.starts += 1
        if life.first_start_s is None:
            life.first_start_s = now_s

    def stopped(self, job_id: str, now_s: float) -> None:
        life = self.lives[job_id]
        if life.running_since_s is not None:
            life.ran_s += now_s - life.running_since_s
            life.running_since_s = None

    def finished_work(self, job_id: str, at_s: float) -> None:
        """The job completed its work at `at_s`, not later than now, and no longer runs."""
        self.stopped(job_id, at_s)
        self.lives[job_id].end_s = at_s
        self._last_end_s = max(self._last_end_s, at_s)

    def ended(self, job_id: str) -> None:
        """The placer has recorded the job's end."""
        self.events += 1
        self.finished += 1
        self._until_last_end = self._held_s, self._wasted_s

    def figures(
        self,
        alone_s: Mapping[str, float],
        ledger_hash: str,
        records: int,
        wall_s: float,
        cpu_s: float,
        charges: Charges,
    ) -> Figures:
        """All figures. `alone_s`: per finished job its work in seconds. `charges`: costs of restarts."""
        self._sample()
        full_load, samples = self._full_load
        if not samples and 0 < self.gpus <= self.asked:
            full_load, samples = self.held, 1
        done = [life for life in self.lives.values() if life.end_s is not None]
        jcts = sorted(life.jct_s for life in done)
        count = len(done)
        starts = [life.starts for life in self.lives.values() if life.starts]
        until_s, (held_s, wasted_s) = self._last_end_s, self._until_last_end
        if not done:
            until_s, held_s, wasted_s = self._now_s, self._held_s, self._wasted_s
        capacity_s = self.gpus * until_s or 1.0
        return Figures(
            avg_jct_s=sum(jcts) / count if count else 0.0,
            p50_jct_s=jcts[count // 2] if count else 0.0,
            p99_jct_s=jcts[min(count - 1, count * 99 // 100)] if count else 0.0,
            makespan_s=self._last_end_s,
            avg_queue_s=sum(life.jct_s - life.ran_s for life in done) / count if count else 0.0,
            gpu_utilisation=sum(alone_s[life.job.job_id] * life.job.whole_gpus for life in done) / capacity_s,
            gpu_allocation=held_s / capacity_s,
            fragmentation=wasted_s / capacity_s,
            events=self.events,
            events_per_s=self.events / cpu_s if cpu_s > 0 else 0.0,
            full_load_allocation=full_load / samples / self.gpus if samples else 0.0,
            ledger_hash=ledger_hash,
            finished_jobs=count,
            unfinished_jobs=len(self.lives) - count,
            preemptions=self.preemptions,
            restarts_per_job=(sum(starts) - len(starts)) / len(starts) if starts else 0.0,
            save_gpu_h=charges.save_gpu_s / SECONDS_PER_HOUR,
            launch_gpu_h=charges.launch_gpu_s / SECONDS_PER_HOUR,
            lost_gpu_h=charges.lost_gpu_s / SECONDS_PER_HOUR,
            records=records,
            cpu_s=cpu_s,
            wall_s=wall_s,
        )
