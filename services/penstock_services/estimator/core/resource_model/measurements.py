"""Data set of the resource models: jobs, and the measured use of their finished runs.

A job is described by what is known before it starts; a run adds the labels. Columns, not rows: a model is
trained on all of them at once.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from penstock_services.estimator.core.learning.gaussian_process import Floats, Indexes, Mask
from penstock_services.estimator.core.resource_model.gpus import facts_of

MEMORY = "gpu_memory_mib"
UTILISATION = "gpu_utilisation_percent"
UTILISATION_STD = "gpu_utilisation_std"
BANDWIDTH = "bandwidth_mbps"
THROUGHPUT = "throughput"
LABELS = (MEMORY, UTILISATION, UTILISATION_STD, BANDWIDTH, THROUGHPUT)
"""GPU memory: the largest measured on one GPU; utilisation: mean and standard deviation over the run,
percent; bandwidth: of the network; throughput: of the whole job, per second, in the workload's own unit."""

MIB_PER_GIB = 1_024  # a unit


@dataclass(frozen=True, slots=True)
class Task:
    """One job as the models see it. NaN: not known."""

    model: str
    gpu: str
    """The GPU's model, by any name."""
    gpus: float = 1.0
    precision: str = "FP32"
    batch_size: float = math.nan
    card_mib: float = math.nan
    """Memory of one GPU; NaN: as in the table of GPUs."""
    parameter_servers: float = math.nan
    workers: float = math.nan
    batches: float = math.nan
    owner: str = ""


@dataclass(frozen=True, slots=True)
class Runs:
    """Finished runs: `tasks` and, per label, one value each (NaN: not measured).
    Shape of each label: (runs,)."""

    tasks: tuple[Task, ...]
    labels: Mapping[str, Floats]

    def __len__(self) -> int:
        return len(self.tasks)

    def pick(self, which: Mask | Indexes) -> "Runs":
        """Those runs, in the order given."""
        rows = np.flatnonzero(which) if which.dtype == np.bool_ else which
        return Runs(
            tuple(self.tasks[row] for row in rows),
            {name: column[rows] for name, column in self.labels.items()},
        )


def runs_of(tasks: Sequence[Task], measured: Sequence[Mapping[str, float]]) -> Runs:
    """Rows to columns; labels that no run has are left out."""
    names = [name for name in LABELS if any(not math.isnan(row.get(name, math.nan)) for row in measured)]
    labels = {
        name: np.array([row.get(name, math.nan) for row in measured], dtype=np.float64) for name in names
    }
    return Runs(tuple(tasks), labels)


def card_mib(task: Task) -> float:
    """Memory of one of the job's GPUs, MiB; NaN where neither the run nor the table of GPUs has it."""
    if not math.isnan(task.card_mib):
        return task.card_mib
    facts = facts_of(task.gpu)
    return facts.memory_gib * MIB_PER_GIB if facts is not None else math.nan


@lru_cache(maxsize=1_024)
def half_precision(precision: str) -> bool:
    """Whether most arithmetic is 16 bits wide: all but FP32, TF32 and FP64."""
    return precision.upper() not in ("FP32", "TF32", "FP64", "")


def cell_of(task: Task) -> tuple[str, float, str, str]:
    """Cell of a job: repeats of a measurement have the same GPU model, number of GPUs,
    workload and precision."""
    return (task.gpu, task.gpus, task.model, task.precision)
