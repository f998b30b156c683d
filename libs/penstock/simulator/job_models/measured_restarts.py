"""Measured restart costs: how long jobs save and launch, by the size of their state and by Muri's start-up times.

**Save**: measured in a live cell by `python -m tests.bench.restart_cost`, from the decision to stop a job to the end of its last process, by the
size of what it writes and flushes to a disk. The size follows from the model's published number of parameters: weights and two moments of
Adam in single precision. **Launch**: of jobs with GPUs the start-up times that Muri measured per model and number of GPUs (V100,
`stage_profiles.csv`), of the others the start that the same command measured. Nothing here is a model that Penstock decides with.

Not measured: how far apart scripts save by themselves (`INTERVAL_S`); the size of models that are not in `PARAMETERS`, which are taken to be
as large as ResNet-50; the launch of models that Muri did not run, which have the median of those that it did.
"""

from collections.abc import Mapping, Sequence
from statistics import median

from penstock.simulator.job_models.interpolation import interpolate
from penstock.simulator.job_models.model import Around, JobModel
from penstock.simulator.job_models.restarts import CostOf, RestartCost
from penstock.simulator.traces.jobs import TraceJob

STOPS_AND_STARTS: Sequence[tuple[float, float, float]] = (
    (1, 0.04, 0.10),
    (128, 0.21, 0.11),
    (512, 1.82, 0.21),
    (2_048, 4.13, 0.38),
)
"""(state in MiB, stop in s, start in s), rising; medians of three on a virtual machine of two cores, NumPy, embedded log."""
PARAMETERS: Mapping[str, float] = {
    "a2c": 1.7, "dqn": 1.7, "shufflenet": 2.3, "shufflenetv2x10": 2.3, "mobilenet": 3.5, "resnet18": 11.7, "res18": 11.7,
    "resnet50": 25.6, "res50": 25.6, "inceptionv3": 27.2, "alexnet": 61.1, "transformer": 65.0, "bert": 110.0,
    "gpt2": 124.0, "vgg16": 138.4, "vgg19": 143.7,
}  # fmt: skip
"""Millions, by the model's name in small letters and digits. Source: the models' papers, torchvision's documentation."""
UNKNOWN_MODEL = "resnet50"
BYTES_PER_PARAMETER = 12  # weight and two moments, four bytes each
INTERVAL_S = 1_800.0  # an assumption

StartUps = Mapping[tuple[str, int], float]
"""(model, GPUs) → seconds, at least one."""


def state_mib(model: str) -> float:
    """What a job of this model saves."""
    name = "".join(letter for letter in model.lower() if letter.isalnum())
    return PARAMETERS.get(name, PARAMETERS[UNKNOWN_MODEL]) * 1e6 * BYTES_PER_PARAMETER / (1 << 20)


def longest_save_s() -> float:
    """Of all models."""
    return max(_stop_and_start_s(state_mib(model))[0] for model in PARAMETERS)


def measured_costs(start_ups_s: StartUps) -> CostOf:
    """What a restart of any job costs."""
    by_gpus: dict[int, list[float]] = {}
    for (_, gpus), seconds in start_ups_s.items():
        by_gpus.setdefault(gpus, []).append(seconds)
    medians = [(gpus, median(found)) for gpus, found in sorted(by_gpus.items())]

    def cost_of(job: TraceJob) -> RestartCost:
        save_s, launch_s = _stop_and_start_s(state_mib(job.model))
        if job.gpus:
            (of_others,) = interpolate(medians, job.gpus)
            launch_s = start_ups_s.get((job.model, job.gpus), of_others)
        return RestartCost(save_s, launch_s, INTERVAL_S)

    return cost_of


def _stop_and_start_s(mib: float) -> tuple[float, float]:
    """Linear between measured sizes; beyond the largest in proportion."""
    stop_s, start_s = interpolate(STOPS_AND_STARTS, mib)
    beyond = max(1.0, mib / STOPS_AND_STARTS[-1][0])
    return stop_s * beyond, start_s * beyond


class MeasuredPhases(Around):
    """Job model `measured-phases`: as `Phases`, with times that were measured: of each model how long a start takes, and to save a state of its size.

    Departure: `cost_of` was measured of restarts; a first start is taken to be as long, and a last save as long as any.
    """

    name = "measured-phases"

    def __init__(self, inner: JobModel, cost_of: CostOf) -> None:
        super().__init__(inner)
        self.neighbours_matter = inner.neighbours_matter
        self._cost_of = cost_of

    def start_up_s(self, job: TraceJob) -> float:
        return self._cost_of(job).launch_s + self.inner.start_up_s(job)

    def save_s(self, job: TraceJob) -> float:
        return self._cost_of(job).save_s + self.inner.save_s(job)
