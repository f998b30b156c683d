"""Run time of a job that says how many iterations it runs: these × the step that was measured or learned, and its phases."""

import math
from collections import OrderedDict
from statistics import median

from penstock.cluster.nouns import WHOLE_GPU, JobSpec
from penstock.estimator.core.estimate import DEFAULT_GPUS, Guess
from penstock.estimator.core.history import MAX_VALUE, History, Runs
from penstock.estimator.core.nearest import Nearest
from penstock.estimator.core.node_sizes import NodeSizes, densest
from penstock.estimator.core.phases import AROUND, phase_ms
from penstock.estimator.core.step_samples import cell_of
from penstock.estimator.core.step_training import LearnedSteps, StepTold, step_of
from penstock.estimator.core.throughput.placements import Placement

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
        self._known: OrderedDict[tuple[object, ...], StepTold | None] = OrderedDict()

    def use(self, model: LearnedSteps) -> None:
        """From the next estimate on."""
        self._model = model
        self._known.clear()

    def guess(self, spec: JobSpec, key: bytes) -> Guess | None:
        if spec.iterations is None:
            return None
        runs = self._history.get(key)
        gpus = _gpus_each(spec, runs) * spec.workers
        found = _measured_s(runs, gpus) or self._learned_s(spec, gpus)
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

    def _learned_s(self, spec: JobSpec, gpus: int) -> tuple[float, str, str | None] | None:
        share = spec.resources.gpu_share_milli or WHOLE_GPU
        if self._model is None or spec.model is None or spec.batch_size is None:
            return None
        if gpus < 1 or share < WHOLE_GPU:
            return None
        each = gpus // spec.workers
        for gpu, sizes in self._nodes.kinds(spec.gpu_models):
            ring = densest(each, spec.workers, sizes)
            told = None if not ring else self._ask(spec.owner, spec.model, gpu, ring, spec.batch_size)
            if told is not None and told.spread <= MOST_SPREAD:
                whose = "own runs" if told.own else "all owners' runs"
                by = f"{self._model.version} on {_shape(ring)} {gpu} from {told.cells} cells of {whose}"
                return math.exp(told.log_s), by, self._model.version
        return None

    def _ask(self, owner: str, network: str, gpu: str, ring: Placement, batch: int) -> StepTold | None:
        assert self._model is not None
        asked = (owner, network, gpu, ring, batch)
        if asked not in self._known:
            cell = cell_of(ring, batch)
            self._known[asked] = step_of(self._model.durations, owner, network, gpu, cell)
            if len(self._known) > MAX_REMEMBERED:
                self._known.popitem(last=False)
        return self._known[asked]


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
