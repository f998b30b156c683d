"""Measured restart costs: times of saves by the size of the state, and of launches by Muri's start-up times.

**Save**: measured in a live cell by `python -m tests.bench.live.restart_cost`, from the decision to stop a
job to the end of its last process, by the size of the state that it writes and flushes to a disk. The size
follows from the model's published number of parameters: weights and two moments of Adam in single precision.
**Launch**: for jobs with GPUs the start-up times that Muri measured per model and number of GPUs (V100,
`stage_profiles.csv`), for other jobs the start that the same command measured. Penstock's decisions use none
of these figures.

Not measured: the interval of scripts' own saves (`INTERVAL_S`); the size of models that are not in
`PARAMETERS`, for which ResNet-50's is taken; the launch of models that Muri did not run, for which the median
of the measured ones is taken.
"""

from collections.abc import Mapping, Sequence
from statistics import median

from penstock.simulator.job_models.measurements.interpolation import interpolate
from penstock.simulator.job_models.model import Around, JobModel
from penstock.simulator.job_models.restarts import CostOf, RestartCost
from penstock.simulator.traces.jobs import TraceJob

STOPS_AND_STARTS: Sequence[tuple[float, float, float]] = (
    (1, 0.04, 0.10),
    (128, 0.21, 0.11),
    (512, 1.82, 0.21),
    (2_048, 4.13, 0.38),
)
"""(state in MiB, stop in s, start in s), rising; medians of three runs on a virtual machine of two cores,
NumPy, embedded log."""
PARAMETERS: Mapping[str, float] = {
    "a2c": 1.7,
    "dqn": 1.7,
    "shufflenet": 2.3,
    "shufflenetv2x10": 2.3,
    "mobilenet": 3.5,
    "resnet18": 11.7,
    "res18": 11.7,
    "resnet50": 25.6,
    "res50": 25.6,
    "inceptionv3": 27.2,
    "alexnet": 61.1,
    "transformer": 65.0,
    "bert": 110.0,
    "gpt2": 124.0,
    "vgg16": 138.4,
    "vgg19": 143.7,
}
"""Parameters in millions, by the model's name in small letters and digits. Source: the models' papers,
torchvision's documentation."""
UNKNOWN_MODEL = "resnet50"
BYTES_PER_PARAMETER = 12  # weight and two moments, four bytes each
INTERVAL_S = 1_800.0  # an assumption

StartUps = Mapping[tuple[str, int], float]
"""(model, GPUs) → seconds, at least one."""


def state_mib(model: str) -> float:
    """Size of a checkpoint of this model."""
    name = "".join(letter for letter in model.lower() if letter.isalnum())
    return PARAMETERS.get(name, PARAMETERS[UNKNOWN_MODEL]) * 1e6 * BYTES_PER_PARAMETER / (1 << 20)


def longest_save_s() -> float:
    """The longest save of all models."""
    return max(_stop_and_start_s(state_mib(model))[0] for model in PARAMETERS)


def measured_costs(start_ups_s: StartUps) -> CostOf:
    """The restart cost of any job."""
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
    """Stop and start times, linear between measured sizes; beyond the largest in proportion."""
    stop_s, start_s = interpolate(STOPS_AND_STARTS, mib)
    beyond = max(1.0, mib / STOPS_AND_STARTS[-1][0])
    return stop_s * beyond, start_s * beyond


class MeasuredPhases(Around):
    """Job model `measured-phases`: as `Phases`, with measured times: of a start per model, and of a save by
    the size of its state.

    Departure: `cost_of` was measured at restarts; a first start counts as long as a restart, and a last save
    as long as any.
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
