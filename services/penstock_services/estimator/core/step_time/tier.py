"""Run time of a job that says how many iterations it runs: these × the step that was measured or learned, and its phases."""

import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from statistics import median

from penstock.model.types import WHOLE_GPU, JobSpec
from penstock_services.estimator.core.eta.phases import AROUND, phase_ms
from penstock_services.estimator.core.resources.estimate import DEFAULT_GPUS, Guess
from penstock_services.estimator.core.resources.history import MAX_VALUE, History, Runs, key_of
from penstock_services.estimator.core.resources.nearest import Nearest
from penstock_services.estimator.core.resources.node_sizes import NodeSizes, densest
from penstock_services.estimator.core.step_time.placements import Placement
from penstock_services.estimator.core.step_time.samples import cell_of
from penstock_services.estimator.core.step_time.training import (
    LearnedSteps,
    StepAsked,
    StepTold,
    knows,
    steps_of,
)

MAX_REMEMBERED = 4_096  # answers of the model
MOST_SPREAD = 1.0  # of ln step: more is no knowledge, but what all networks have in common


class StepTier:
    """Says the run time only, and only to a job that told its iterations; of one with a target it is the longest.

    The step is that of the same job's runs on as many GPUs, else the model's for the densest ring of the GPUs asked for,
    on the GPU model of which the cell has most among those allowed that it knows.
    """

    def __init__(self, history: History, nearest: Nearest, nodes: NodeSizes) -> None:
        """All of them kept up to date by the caller."""
        self._history, self._nearest, self._nodes = history, nearest, nodes
        self._model: LearnedSteps | None = None
        self._known: OrderedDict[StepAsked, StepTold | None] = OrderedDict()

    def use(self, model: LearnedSteps) -> None:
        """From the next estimate on."""
        self._model = model
        self._known.clear()

    def prepare(self, specs: Iterable[JobSpec]) -> None:
        """Asks the model about all of them at once, each on the first kind of GPU that it knows something of; `guess` finds
        the answers. Optional, and much cheaper."""
        if self._model is None:
            return
        asked: dict[StepAsked, None] = {}
        for spec in specs:
            if spec.iterations is None:
                continue
            gpus = _gpus_each(spec, self._history.get(key_of(spec)))
            known = (one for one, _ in self._askable(spec, gpus) if knows(self._model.durations, one))
            if (first := next(known, None)) is not None and first not in self._known:
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

    def _learned_s(self, spec: JobSpec, gpus_each: int) -> tuple[float, str, str | None] | None:
        if self._model is None:
            return None
        for asked, ring in self._askable(spec, gpus_each):
            if asked not in self._known:
                self._ask([asked])
            told = self._known[asked]
            if told is not None and told.spread <= MOST_SPREAD:
                whose = "own runs" if told.own else "all owners' runs"
                on = f"{_shape(ring)} {asked.gpu}"
                by = f"{self._model.version} on {on} from {told.cells} cells of {whose}"
                return math.exp(told.log_s), by, self._model.version
        return None

    def _askable(self, spec: JobSpec, gpus_each: int) -> Iterator[tuple[StepAsked, Placement]]:
        """What the model can be asked about the job: for each kind of GPU that may hold it, the most GPUs first."""
        share = spec.resources.gpu_share_milli or WHOLE_GPU
        if spec.model is None or spec.batch_size is None or gpus_each < 1 or share < WHOLE_GPU:
            return
        for gpu, sizes in self._nodes.kinds(spec.gpu_models):
            if ring := densest(gpus_each, spec.workers, sizes):
                cell = cell_of(ring, spec.batch_size, spec.workers)
                yield StepAsked(spec.owner, spec.model, gpu, cell), ring

    def _ask(self, asked: Iterable[StepAsked]) -> None:
        assert self._model is not None
        self._known.update(steps_of(self._model.durations, asked))
        while len(self._known) > MAX_REMEMBERED:
            self._known.popitem(last=False)


def _shape(ring: Placement) -> str:
    """For people: a gang may be on 256 nodes, and a source is a short text."""
    return f"{sum(ring)} GPUs of {len(ring)} nodes," if len(ring) > 1 else str(ring[0])


def _gpus_each(spec: JobSpec, runs: Runs | None) -> int:
    """Per worker: asked for, else as earlier runs had."""
    if spec.resources.gpus is not None:
        return spec.resources.gpus
    had = runs.column("gpus") if runs else []
    return round(median(had)) if had else DEFAULT_GPUS


def _measured_s(runs: Runs | None, gpus: int) -> tuple[float, str, str | None] | None:
    """The same job's step on as many GPUs."""
    if not runs:
        return None
    pairs = zip(runs.whole_column("step_ms"), runs.whole_column("total_gpus"), strict=True)
    steps_ms = [step for step, had in pairs if step == step and had == gpus]
    if not steps_ms:
        return None
    count = len(steps_ms)
    return median(steps_ms) / 1_000.0, f"median of {count} run{'s' if count > 1 else ''} like it", None
