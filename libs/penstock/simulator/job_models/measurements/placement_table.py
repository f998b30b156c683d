"""Job model `placement-table`: look-up of measured step times and gradient noise of six models on 16 × 4 T4
(Pollux, OSDI '21).

A job trains with one process per GPU and a fixed total batch. The time of an iteration is looked up by the
GPUs that it holds on each node; the progress of an iteration follows from the measured gradient noise, in
iterations of the smallest batch. After each start there is no progress for half a minute. There is no
interference.

With `tick_s` the source's stepping is repeated, its rounding included: an epoch ends at a whole second,
counted from the beginning of the step. Without it, epochs end at their exact times.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, floor, inf

from penstock.model.inputs.external_events import JobProgress
from penstock.simulator.job_models.measurements.interpolation import interpolate
from penstock.simulator.job_models.model import End, Instant, NotMeasured, Placement, Work
from penstock.simulator.traces.jobs import TraceJob

RESTART_S = 30.0
MAX_NODES = 16  # of the measured cluster; the source treats more as 16
TOLERANCE = 1e-8  # of the source's ceilings
LOCAL_BATCH_LIMIT: Mapping[str, int] = {"yolov3": 8}
"""Largest local batch where the source allows less than was measured."""

Curve = Sequence[tuple[float, float, float]]
"""(local batch, step time, synchronising time within it), by rising batch; seconds."""


@dataclass(frozen=True, slots=True)
class Epoch:
    """One measured epoch. `ends_at`: progress at its end. `noise`: per batch size (batch, squared gradient,
    its variance)."""

    ends_at: float
    noise: Sequence[tuple[float, float, float]]


@dataclass(frozen=True, slots=True)
class Model:
    """Measurements of one model."""

    name: str
    smallest_batch: int
    largest_batch: int
    local_max: int
    epochs: Sequence[Epoch]
    placements: Mapping[str, Curve]
    """GPUs per node as a string, its lexicographically smallest rotation → curve."""
    between: Callable[[Sequence[tuple[float, float, float]]], Sequence[Sequence[float]]]
    """(nodes, GPUs, local batch) → (step time, synchronising); NaN beyond the measured points."""
    _step: dict[tuple[tuple[int, ...], int], tuple[float, float]] = field(default_factory=dict, compare=False)

    def batching(self, gpus: int, batch: int) -> tuple[int, int]:
        """(local batch, accumulation steps) for this total batch on `gpus` GPUs."""
        each = ceil(batch / gpus - TOLERANCE)
        steps = ceil(each / self.local_max - TOLERANCE) - 1
        if gpus == 1 and batch > self.smallest_batch:
            steps = max(1, steps)
        local = min(
            ceil(each / (steps + 1) - TOLERANCE),
            floor(self.largest_batch / (gpus * (steps + 1)) + TOLERANCE),
        )
        return local, steps

    def iteration_s(self, placement: tuple[int, ...], local: int, steps: int) -> float:
        """Time of an iteration. `placement`: GPUs per node, in order of allocation."""
        step_s, sync_s = self.step(placement, local)
        return step_s + steps * (step_s - sync_s)

    def step(self, placement: tuple[int, ...], local: int) -> tuple[float, float]:
        """(seconds of a step with `local` samples per GPU, synchronising seconds within it)."""
        found = self._step.get((placement, local))
        if found is None:
            found = self._step[placement, local] = self._looked_up(placement, local)
        return found

    def _looked_up(self, placement: tuple[int, ...], local: int) -> tuple[float, float]:
        key = "".join(map(str, placement))
        key = min(key[turn:] + key[:turn] for turn in range(len(key)))
        curve = self.placements.get(key)
        step_s, sync_s = interpolate(curve, local) if curve is not None else self._alike(placement, local)
        return step_s, sync_s

    def _alike(self, placement: tuple[int, ...], local: int) -> tuple[float, float]:
        """As `step`, linear over (nodes, GPUs, local batch) between the measured points,
        by the source's triangulation."""
        asked = (float(min(len(placement), MAX_NODES)), float(sum(placement)), float(local))
        step_s, sync_s = (float(value) for value in self.between([asked])[0])
        if not step_s > 0:
            raise NotMeasured(
                f"{self.name} on {placement} GPUs with {local} samples each: beyond all measurements"
            )
        return step_s, sync_s

    def rate(self, epoch: Epoch, batch: int, iteration_s: float) -> float:
        """Progress per second."""
        squared, variance = interpolate(epoch.noise, batch)
        gain = (variance + squared) / (variance * self.smallest_batch / batch + squared)
        return gain / iteration_s


def packed(gpus: int, gpus_per_node: int) -> tuple[int, ...]:
    """GPUs per node on as few nodes as hold them."""
    full, rest = divmod(gpus, gpus_per_node)
    return (gpus_per_node,) * full + ((rest,) if rest else ())


class _Run:
    __slots__ = ("batch", "epoch", "iteration_s", "job", "local", "model", "progress", "resting_s", "steps")

    def __init__(self, job: TraceJob, model: Model) -> None:
        assert job.batch_size is not None, job
        self.job = job
        self.model = model
        self.local, self.steps = model.batching(job.gpus, job.batch_size)
        self.batch = job.gpus * self.local * (self.steps + 1)
        self.iteration_s = inf
        self.progress = 0.0
        self.epoch = 0
        self.resting_s = 0.0

    def place(self, gpus_per_node: tuple[int, ...]) -> None:
        self.iteration_s = self.model.iteration_s(gpus_per_node, self.local, self.steps)
        self.resting_s = RESTART_S

    def run(self, seconds: float, *, whole_seconds: bool) -> float:
        """Works for at most `seconds`; returns the time left when the job completes, else 0."""
        rested = min(seconds, self.resting_s)
        self.resting_s -= rested
        seconds -= rested
        epochs = self.model.epochs
        while self.epoch < len(epochs):
            epoch = epochs[self.epoch]
            rate = self.model.rate(epoch, self.batch, self.iteration_s)
            needs_s = max(0.0, epoch.ends_at - self.progress) / rate
            if needs_s > seconds:  # compared before it is rounded, as in the source
                self.progress += rate * seconds
                return 0.0
            seconds -= round(needs_s) if whole_seconds else needs_s
            self.progress = epoch.ends_at
            self.epoch += 1
        return seconds

    def needs_s(self) -> float:
        """Seconds until its completion, if nothing changes."""
        total, progress = self.resting_s, self.progress
        for epoch in self.model.epochs[self.epoch :]:
            total += max(0.0, epoch.ends_at - progress) / self.model.rate(epoch, self.batch, self.iteration_s)
            progress = max(progress, epoch.ends_at)
        return total


class TableWork(Work):
    """`models` by name; `tick_s` 0: exact. Placements must be given in order of allocation."""

    def __init__(self, models: Mapping[str, Model], gpus_per_node: int, tick_s: float = 0.0) -> None:
        super().__init__()
        self._models = models
        self._gpus_per_node = gpus_per_node
        self._tick_s = tick_s
        self._runs: dict[str, _Run] = {}
        self._running: dict[str, _Run] = {}
        self._now_s = 0.0
        self._next_s: float | None = None

    def alone_s(self, job: TraceJob) -> float:
        """The job's size on as few nodes as hold it."""
        run = _Run(job, self._models[job.model])
        run.place(packed(job.gpus, self._gpus_per_node))
        return run.needs_s() - RESTART_S

    def start_up_s(self, job: TraceJob) -> float:
        return RESTART_S

    def admit(self, job: TraceJob, now_s: float) -> JobProgress | None:
        self._runs[job.job_id] = _Run(job, self._models[job.model])
        return None

    def started(self, job_id: str, placement: Placement, now_s: float) -> None:
        run = self._running[job_id] = self._runs[job_id]
        self._flow(now_s)
        run.place(tuple(len(allocation.gpus) for allocation in placement.values()))
        self._next_s = None

    def stopped(self, job_id: str, now_s: float) -> None:
        self._flow(now_s)
        self._running.pop(job_id, None)
        self._next_s = None

    def next_s(self) -> float | None:
        if not self._running:
            return None
        if self._next_s is None:
            if self._tick_s:
                self._next_s = (floor(self._now_s / self._tick_s) + 1) * self._tick_s
            else:
                self._next_s = self._now_s + min(run.needs_s() for run in self._running.values())
        return self._next_s

    def advance(self, now_s: float) -> Instant:
        due = None if self._tick_s else self._next_s
        ended = self._flow(now_s)
        if due is not None and due <= now_s and not ended:  # its end was rounded away
            job_id = min(self._running, key=lambda job_id: (self._running[job_id].needs_s(), job_id))
            ended = [End(job_id, now_s)]
            del self._running[job_id]
        self._next_s = None
        return Instant(ended, ())

    def _flow(self, now_s: float) -> list[End]:
        passed_s = now_s - self._now_s
        self._now_s = now_s
        ended: list[End] = []
        if passed_s > 0:
            for job_id, run in self._running.items():
                left_s = run.run(passed_s, whole_seconds=self._tick_s > 0)
                if run.epoch == len(run.model.epochs):
                    ended.append(End(job_id, now_s - left_s))
            for end in ended:
                del self._running[end.job_id]
        return ended
