"""Runs as a small cluster would measure them: memory by a line that we know, speed by what the GPU can do."""

import math

import numpy as np

from penstock_services.estimator.core.resource_model.gpus import facts_of
from penstock_services.estimator.core.resource_model.measurements import (
    MEMORY,
    THROUGHPUT,
    UTILISATION,
    UTILISATION_STD,
    Runs,
    Task,
    card_mib,
    half_precision,
    runs_of,
)

LINES = {"resnet50": (1_500.0, 60.0), "bert": (3_000.0, 220.0), "ncf": (900.0, 25.0)}
"""Workload → MiB that it takes in any case, and per sample of its batch."""
GPUS = ("2080Ti", "V100-16", "RTX6000", "A100")


def memory_mib(task: Task) -> float:
    """The truth, without noise."""
    fixed, each = LINES[task.model]
    return min(fixed + each * task.batch_size, 0.98 * card_mib(task))


def measured(task: Task, noise: np.random.Generator) -> dict[str, float]:
    """What one run of it shows."""
    facts = facts_of(task.gpu)
    assert facts is not None
    rate = facts.half_tflops if half_precision(task.precision) else facts.full_tflops
    used = memory_mib(task)
    busy = min(55 + 8 * math.log(task.batch_size) - 2 * task.gpus, 99)
    return {
        MEMORY: min(used * math.exp(noise.normal(0, 0.02)), card_mib(task)),
        UTILISATION: float(np.clip(busy + noise.normal(0, 2), 0, 100)),
        UTILISATION_STD: float(np.clip(30 - busy / 4 + noise.normal(0, 1), 0, 50)),
        THROUGHPUT: 40 * task.gpus**0.95 * rate**0.7 * math.exp(noise.normal(0, 0.03)),
    }


def tasks(gpus: tuple[str, ...] = GPUS, owner: str = "") -> list[Task]:
    """Every workload and precision on 1, 2 and 4 of each GPU, with two batch sizes."""
    return [
        Task(model, gpu, float(count), precision, float(batch), owner=owner)
        for model in LINES
        for gpu in gpus
        for count in (1, 2, 4)
        for precision in ("FP32", "FP16")
        for batch in (8, 48)
    ]


def runs(seed: int = 0, gpus: tuple[str, ...] = GPUS) -> Runs:
    """One run of each of `tasks`."""
    noise = np.random.default_rng(seed)
    wanted = tasks(gpus)
    return runs_of(wanted, [measured(task, noise) for task in wanted])
