"""Liquid's second model on runs that it was not shown: times to launch, of one training iteration, and to
save.

Beside its forest (§6.1) stands what answers in the service: the median of the nearest runs of the same
network, for launching and saving; the iteration is the step model's.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from penstock_services.estimator.core.learning.gaussian_process import Floats, Mask
from penstock_services.estimator.core.resource_model.measurements import Runs, Task
from penstock_services.estimator.core.resources.nearest import FARTHEST, NEAREST
from tests.papers.estimator.cross_validation import Judged, Predictions, folds, judge
from tests.papers.estimator.models.liquid import PHASES, PhaseModel

RESOURCES = ("cores", "host_memory_mib", "input_mib")
"""What the forest looks at beside the task. Source: Liquid §6.1."""
MOST_PHASE_S = 366 * 86_400.0  # a year: more is no measurement
FEWEST = 10  # runs: the forest splits no fewer
LIQUID, OURS = "liquid", "penstock"


class Phased(NamedTuple):
    """Runs whose three phases were measured."""

    tasks: tuple[Task, ...]
    resources: Floats
    """Shape (runs, 3), in the order of RESOURCES; ≥ 0, 0 where not told, since a forest splits on it as
    well."""
    phases_s: Floats
    """Shape (runs, 3), seconds, in the order of PHASES."""

    def pick(self, which: Mask) -> "Phased":
        rows = np.flatnonzero(which)
        return Phased(tuple(self.tasks[row] for row in rows), self.resources[rows], self.phases_s[rows])


def phased_of(
    tasks: Sequence[Task], resources: Sequence[Sequence[float]], phases_s: Sequence[Sequence[float]]
) -> Phased:
    """Rows to columns; runs of which a phase is NaN, for not measured, are left out."""
    sound = [row for row, phases in enumerate(phases_s) if all(map(math.isfinite, phases))]
    asked = np.array([resources[row] for row in sound], dtype=np.float64).reshape(-1, len(RESOURCES))
    seen = np.array([phases_s[row] for row in sound], dtype=np.float64).reshape(-1, len(PHASES))
    return Phased(
        tuple(tasks[row] for row in sound), np.nan_to_num(asked, nan=0.0, posinf=0.0, neginf=0.0), seen
    )


def judge_phases(runs: Phased, split: str, seed: int) -> Mapping[str, Mapping[str, Judged]]:
    """Model → phase → figures; each run predicted once, from folds without its group. Raises `TooFew`,
    `KeyError`."""
    predicted = {name: np.full(runs.phases_s.shape, math.nan) for name in (LIQUID, OURS)}
    for held_out in folds(Runs(runs.tasks, {}), split, seed):
        known, asked = runs.pick(~held_out), runs.pick(held_out)
        model = PhaseModel(known.tasks, known.resources, known.phases_s, seed)
        predicted[LIQUID][held_out] = model.predict(asked.tasks, asked.resources)
        predicted[OURS][held_out] = nearest_phases(known, asked.tasks)
    found: dict[str, dict[str, Judged]] = {name: {} for name in predicted}
    for name, values in predicted.items():
        for column, phase in enumerate(PHASES):
            if name == OURS and phase == "train_s":
                continue
            nothing = np.full(len(values), math.nan)
            found[name][phase] = judge(
                phase, runs.phases_s[:, column], Predictions(values[:, column], nothing, nothing)
            )
    return found


def nearest_phases(known: Phased, tasks: Sequence[Task]) -> Floats:
    """Shape (tasks, 3): medians of the nearest runs of the same network, those of all runs where none is
    near."""
    everywhere = np.median(known.phases_s, axis=0)
    names = np.array([task.model for task in known.tasks])
    batches = np.log(np.array([_batch(task) for task in known.tasks]))
    found = np.tile(everywhere, (len(tasks), 1))
    for row, task in enumerate(tasks):
        far = np.abs(batches - math.log(_batch(task)))
        near = np.flatnonzero((names == task.model) & (far <= math.log(FARTHEST)))
        if near.size:
            nearest = near[np.argsort(far[near], kind="stable")[:NEAREST]]
            found[row] = np.median(known.phases_s[nearest], axis=0)
    return found


def _batch(task: Task) -> float:
    return 1.0 if math.isnan(task.batch_size) else task.batch_size
