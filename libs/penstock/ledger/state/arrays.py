"""Resource arrays of a cell: their sizes, and the history from which these follow. Source: CODA §V-C.

The history is two tumbling windows of whole numbers: O(1) per event, bounded, exact. What is older than two
windows is dropped.
"""

from penstock.model.nouns.types import Value

LARGE_GPUS = 4
"""A job with at least so many GPUs belongs to the 4-GPU sub-array. Source: CODA §V-C."""


class Window(Value, frozen=True):
    """What was measured in one window of the history."""

    gpu_ms: int = 0
    """GPU milliseconds of the attempts that ended, of jobs with GPUs."""
    core_ms: int = 0
    """Core milliseconds of the same attempts."""
    large_peak: int = 0
    """The most GPUs that jobs of the 4-GPU sub-array, running and waiting, asked for at once."""
    small_peak: int = 0
    """As `large_peak`, of the other jobs with GPUs."""


class Arrays(Value, frozen=True):
    """Sizes and history of a cell."""

    cores_per_gpu_milli: int = -1
    """As in `ArraysSized`; -1: the arrays were never sized, and any job may have any core."""
    large_nodes: int = 0
    large_gpus: int = 0
    """GPUs that living jobs of the 4-GPU sub-array ask for."""
    small_gpus: int = 0
    since_ms: int = 0
    """Ledger time at which the current window began."""
    now: Window = Window()
    before: Window = Window()
    """The previous window; empty where nothing happened in it."""


class ArrayUse(Value, frozen=True):
    """What one job has of the arrays (`evolve_arrays`)."""

    reclaims: int = 0
    """How often cores that it had borrowed were reclaimed (`CoresReclaimed`): it is then first in its array's
    queue."""
    borrows: bool = False
    """Its attempt was placed with cores that are reserved for jobs with GPUs."""
    counted_gpus: int = 0
    """GPUs that the cell's `arrays` count for it."""


NO_ARRAY_USE = ArrayUse()
