"""Transformation of each label before learning: its unit, its columns, and its bounds.

The unit is chosen so that errors are alike over its range, and known physics is in the offset, not learned.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from penstock_services.estimator.core.learning.gaussian_process import Floats
from penstock_services.estimator.core.resource_model.features import BANDWIDTH as SPEED
from penstock_services.estimator.core.resource_model.features import (
    BATCH,
    CARD,
    FILL,
    GPUS,
    RATE,
    YEAR,
    Inputs,
)
from penstock_services.estimator.core.resource_model.measurements import (
    BANDWIDTH,
    LABELS,
    MEMORY,
    THROUGHPUT,
    UTILISATION,
    UTILISATION_STD,
)

MAX_STD = 50.0  # of anything between 0 and 100 %
ABOVE_FULL = 101.0  # percent; one above 100, so that the root's slope stays finite


@dataclass(frozen=True, slots=True)
class Unit:
    """`learned` maps measured values to the learned unit, `measured` back; both rise, so intervals map by
    their ends.

    Shape (jobs,), of `measured` also (any, jobs).
    """

    columns: tuple[int, ...]
    learned: Callable[[Floats, Inputs], Floats]
    measured: Callable[[Floats, Inputs], Floats]


def _memory_learned(y: Floats, inputs: Inputs) -> Floats:
    return np.log(y) - inputs.log_card - inputs.log_line


def _memory_measured(z: Floats, inputs: Inputs) -> Floats:
    return np.exp(np.minimum(z + inputs.log_line, 0.0) + inputs.log_card)


UNITS: Mapping[str, Unit] = MappingProxyType(
    {
        # The batch is in the line alone, which rises with it: so memory never falls as the batch grows.
        MEMORY: Unit((GPUS, CARD, RATE, YEAR), _memory_learned, _memory_measured),
        UTILISATION: Unit(
            (GPUS, CARD, RATE, BATCH, FILL),
            lambda y, _: -np.sqrt(ABOVE_FULL - y),
            lambda z, _: np.clip(ABOVE_FULL - np.minimum(z, 0.0) ** 2, 0.0, 100.0),
        ),
        UTILISATION_STD: Unit(
            (GPUS, CARD, RATE, BATCH, FILL), lambda y, _: y, lambda z, _: np.clip(z, 0.0, MAX_STD)
        ),
        BANDWIDTH: Unit(
            (GPUS, CARD, RATE, SPEED, BATCH, FILL),
            lambda y, _: np.log1p(y),
            lambda z, _: np.expm1(np.clip(z, 0.0, 35.0)),
        ),
        # Per GPU: a linear speed-up with n GPUs is the offset; the loss against it is learned.
        THROUGHPUT: Unit(
            (GPUS, CARD, RATE, SPEED, BATCH, FILL),
            lambda y, inputs: np.log(y) - inputs.log_gpus,
            lambda z, inputs: np.exp(np.clip(z + inputs.log_gpus, -35.0, 35.0)),
        ),
    }
)
assert set(UNITS) == set(LABELS)
