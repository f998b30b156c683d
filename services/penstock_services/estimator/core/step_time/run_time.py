"""Run time tier for jobs with a number of iterations: iterations × the measured or learned step time, and the
job's phases."""

import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from statistics import median
from typing import NamedTuple

from penstock.model.jobs.job_spec import JobSpec
from penstock.model.nouns.types import WHOLE_GPU, ShapeOption
from penstock_services.estimator.core.model_lifecycle import InUse
from penstock_services.estimator.core.node_capacity import NodeCapacity, densest
from penstock_services.estimator.core.records.history import MAX_VALUE, History, Runs, key_of
from penstock_services.estimator.core.records.placements import Placement
from penstock_services.estimator.core.resources.estimate import DEFAULT_GPUS, Guess
from penstock_services.estimator.core.resources.nearest import AROUND, Nearest, phase_ms
from penstock_services.estimator.core.step_time.training import (
    Durations,
    StepAnswer,
    StepQuestion,
    answer,
    knows,
)
from penstock_services.estimator.core.step_time.training_set import cell_of

MAX_CACHED = 4_096  # answers of the model
RUNS_APART = 0.1  # a single measurement deviates from its own mean by 12 % at p95 (tests/papers/README.md)
MAX_SPREAD = 1.0  # of ln step: a larger spread is only the prior that all networks share


class StepTier:
    """Answers the run time only, and only of a job that names its iterations; for a job with a target it is
    an upper bound.

    The step is that of the same job's runs on as many GPUs, else the model's for the densest ring of the GPUs
    asked for, on the allowed and known GPU model of which the cell has most.
    """

    def __init__(self, history: History, nearest: Nearest, nodes: NodeCapacity) -> None:
        """All of them are kept up to date by the caller."""
        self._history, self._nearest, self._nodes = history, nearest, nodes
        self.model: InUse[Durations] | None = None
        self._answers: OrderedDict[StepQuestion, StepAnswer | None] = OrderedDict()

    def use(self, model: InUse[Durations]) -> None:
        """Uses this model from the next estimate on."""
        self.model = model
        self._answers.clear()

    def prepare(self, specs: Iterable[JobSpec]) -> None:
        """Predicts for all of them in one batch, each on the first kind of GPU that the model knows; `guess`
        finds the answers in the cache. Optional, and much cheaper."""
        if self.model is None:
            return
        asked: dict[StepQuestion, None] = {}
        for spec in specs:
            if spec.iterations is None:
                continue
            gpus = _gpus_each(spec, self._history.get(key_of(spec)))
            known = (one for one, _ in self._askable(spec, gpus) if knows(self.model.model, one))
            if (first := next(known, None)) is not None and first not in self._answers:
                asked[first] = None
        self._ask(asked)

    def guess(self, spec: JobSpec, key: bytes) -> Guess | None:
        if spec.iterations is None:
            return None
        runs = self._history.get(key)
        each = _gpus_each(spec, runs)
        found = _measured_s(runs, each * spec.workers) or self._learned_s(spec, each)
        if found is None:
            return None
        step_s, by, version = found
        around_ms = sum(phase_ms(name, spec, runs, self._nearest) for name in AROUND)
        run_ms = spec.iterations * step_s * 1_000.0 + around_ms
        phases = f" and {around_ms / 1_000.0:,.0f} s to launch and save" if around_ms else ""
        most = "at most " if spec.target_loss is not None else ""
        return Guess(
            tier="model",
            confidence=0.0,
            source="",
            run_ms=min(math.ceil(run_ms), MAX_VALUE),
            model_version=version,
            partly=f"run time: {most}{spec.iterations:,} iterations of {step_s:.4g} s, {by}{phases}",
        )

    def answer(self, asked: StepQuestion) -> StepAnswer | None:
        """The model's answer, through an LRU cache;
        None where it has only the prior that all networks share."""
        if self.model is None:
            return None
        if asked not in self._answers:
            self._ask([asked])
        found = self._answers[asked]
        return None if found is None or found.spread > MAX_SPREAD else found

    def options(self, spec: JobSpec, gpus_each: int) -> tuple[ShapeOption, ...]:
        """Known step times of a moldable job, on the kind of GPU of which most is known;
        the shapes that are offered."""
        if gpus_each < 1 or (spec.resources.gpu_share_milli or WHOLE_GPU) < WHOLE_GPU:
            return ()
        found: tuple[ShapeOption, ...] = ()
        for gpu, sizes in self._nodes.gpu_nodes(spec.gpu_models):
            rings = {n: ring for n in spec.offered if (ring := densest(gpus_each, n, sizes))}
            here = tuple(self._options_on(gpu, spec, rings))
            found = max(found, here, key=len)
        return found

    def _options_on(self, gpu: str, spec: JobSpec, rings: Mapping[int, Placement]) -> Iterator[ShapeOption]:
        """Steps of the job's own runs in a shape, else the model's, which predicts all of them in one batch.
        `rings`: by number of workers."""
        asked: dict[int, StepQuestion] = {}
        for workers, ring in rings.items():
            each = spec.shaped(workers).batch_size
            if spec.model is not None and each is not None:
                asked[workers] = StepQuestion(spec.owner, spec.model, gpu, cell_of(ring, each, workers))
        if self.model is not None:
            self._ask({one: None for one in asked.values() if one not in self._answers})
        for workers, ring in rings.items():
            runs = self._history.get(key_of(spec.shaped(workers)))
            step = _measured_ms(runs, sum(ring))
            if step is None and workers in asked and (known := self.answer(asked[workers])) is not None:
                step = Interval(
                    *(math.exp(known.log_s + wide) * 1_000.0 for wide in (0.0, -known.width, known.width))
                )
            if step is not None:
                yield ShapeOption(
                    workers=workers,
                    nodes=len(ring),
                    gpus_per_node=max(ring),
                    step_ms=step.middle,
                    low_ms=step.low,
                    high_ms=step.high,
                )

    def _learned_s(self, spec: JobSpec, gpus_each: int) -> tuple[float, str, str | None] | None:
        if self.model is None:
            return None
        for asked, ring in self._askable(spec, gpus_each):
            if (found := self.answer(asked)) is not None:
                whose = "own runs" if found.own else "all owners' runs"
                on = f"{_shape(ring)} {asked.gpu}"
                by = f"{self.model.version} on {on} from {found.cells} cells of {whose}"
                return math.exp(found.log_s), by, self.model.version
        return None

    def _askable(self, spec: JobSpec, gpus_each: int) -> Iterator[tuple[StepQuestion, Placement]]:
        """The model queries for the job: for each kind of GPU that may hold it, the most GPUs first."""
        share = spec.resources.gpu_share_milli or WHOLE_GPU
        if spec.model is None or spec.batch_size is None or gpus_each < 1 or share < WHOLE_GPU:
            return
        for gpu, sizes in self._nodes.gpu_nodes(spec.gpu_models):
            if ring := densest(gpus_each, spec.workers, sizes):
                cell = cell_of(ring, spec.batch_size, spec.workers)
                yield StepQuestion(spec.owner, spec.model, gpu, cell), ring

    def _ask(self, asked: Iterable[StepQuestion]) -> None:
        assert self.model is not None
        self._answers.update(answer(self.model.model, asked))
        while len(self._answers) > MAX_CACHED:
            self._answers.popitem(last=False)


class Interval(NamedTuple):
    middle: float
    low: float
    high: float


def _measured_ms(runs: Runs | None, gpus: int) -> Interval | None:
    """Median, smallest and largest step of the same job's runs on as many GPUs; no narrower than the scatter
    of single measurements, since they are few."""
    steps_ms = runs.steps_ms(gpus) if runs else []
    if not steps_ms:
        return None
    middle = median(steps_ms)
    apart = RUNS_APART * middle
    return Interval(middle, min(*steps_ms, middle - apart), max(*steps_ms, middle + apart))


def _shape(ring: Placement) -> str:
    """Text for users: a gang may be on 256 nodes, and a source is a short text."""
    return f"{sum(ring)} GPUs of {len(ring)} nodes," if len(ring) > 1 else str(ring[0])


def _gpus_each(spec: JobSpec, runs: Runs | None) -> int:
    """Per worker: as requested, else as in earlier runs."""
    if spec.resources.gpus is not None:
        return spec.resources.gpus
    had = runs.column("gpus") if runs else []
    return round(median(had)) if had else DEFAULT_GPUS


def _measured_s(runs: Runs | None, gpus: int) -> tuple[float, str, str | None] | None:
    """The same job's step time on as many GPUs."""
    steps_ms = runs.steps_ms(gpus) if runs else []
    if not steps_ms:
        return None
    count = len(steps_ms)
    return median(steps_ms) / 1_000.0, f"median of {count} run{'s' if count > 1 else ''} like it", None
