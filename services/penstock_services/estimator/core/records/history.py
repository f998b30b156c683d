"""History of finished runs by job key: the same owner, command, model and batch size."""

import math
from array import array
from collections.abc import Iterable, Sequence
from hashlib import sha256
from itertools import chain
from typing import NamedTuple

from penstock.model.jobs.job_spec import JobSpec
from penstock_services.estimator.core.learning.limits import HISTORY_KEYS, HISTORY_KEYS_OF_ONE
from penstock_services.estimator.core.learning.owner_table import OwnerTable
from penstock_services.estimator.core.records.conditions import comparable

RUNS_PER_KEY = 32  # older runs had older code and data; the median is stable from about ten runs on
MAX_VALUE = 1 << 53  # the largest whole number that a float holds exactly, and the wire types' largest range

UNKNOWN = math.nan


class Run(NamedTuple):
    """One finished, succeeded job: the maximum over its workers,
    of utilisation the mean. NaN: not measured."""

    ended_ms: float
    seq: float
    """Number of the ledger record that ended it."""
    run_ms: float = UNKNOWN
    gpus: float = UNKNOWN
    """Allocation, per worker; the number of GPUs needed is not measured."""
    busy_cores: float = UNKNOWN
    """CPU time / run time."""
    host_memory_mib: float = UNKNOWN
    gpu_memory_mib: float = UNKNOWN
    gpu_utilisation_percent: float = UNKNOWN
    gpu_utilisation_std: float = UNKNOWN
    total_gpus: float = UNKNOWN
    """Of all its workers."""
    iterations: float = UNKNOWN
    """In all, including those of earlier attempts."""
    step_ms: float = UNKNOWN
    """Mean of one iteration on its last placement."""
    launch_ms: float = UNKNOWN
    train_ms: float = UNKNOWN
    save_ms: float = UNKNOWN
    disturbed: float = 0.0
    """Sum of `Disturbance`s."""


WIDTH = len(Run._fields)


def bounded(value: float | None) -> float:
    """A measured value as the history stores it: ≥ 0, ≤ MAX_VALUE;
    NaN for None and for values that are not finite."""
    if value is None or value != value:
        return UNKNOWN
    return float(min(max(value, 0), MAX_VALUE))


def key_of(spec: JobSpec) -> bytes:
    """Digest of owner, command, model and batch size: 32 bytes, however long the command is. Of a moldable
    job with its fewest workers.

    The separator cannot occur in a command, and identifiers hold no NUL.
    """
    batch_size = spec.least.batch_size
    parts = (spec.owner, spec.model or "", str(batch_size or ""), *spec.command)
    return sha256("\0".join(parts).encode()).digest()


def of_comparable(name: str, values: Sequence[float], disturbed: Sequence[float]) -> list[float]:
    """The values of runs that are comparable in this field; of all runs where none is comparable. Without
    NaN.

    Ideal: comparable runs alone. Departure: a job whose runs all shared a GPU would be estimated as if it had
    never run.
    """
    known = [(value, by) for value, by in zip(values, disturbed, strict=True) if value == value]
    return [value for value, by in known if comparable(name, by)] or [value for value, _ in known]


class Runs:
    """The last RUNS_PER_KEY runs of one key, oldest first, as one flat array (4 KiB instead of 14)."""

    __slots__ = ("__weakref__", "_values", "version")

    def __init__(self, runs: Iterable[Run] = ()) -> None:
        """`runs`: oldest first, at most RUNS_PER_KEY, of bounded values."""
        self._values = array("d", list(chain.from_iterable(runs)))
        self.version = 0
        """Rises with every run."""

    def __len__(self) -> int:
        return len(self._values) // WIDTH

    def add(self, run: Run) -> None:
        self._values.extend(map(bounded, run))
        if len(self) > RUNS_PER_KEY:
            del self._values[:WIDTH]
        self.version += 1

    def whole_column(self, name: str) -> Sequence[float]:
        """Of all runs, oldest first; NaN where it was not measured."""
        return self._values[Run._fields.index(name) :: WIDTH]

    def column(self, name: str) -> list[float]:
        """The measured values of one field of `Run`, oldest first; of comparable runs, or of all where none
        is comparable."""
        return of_comparable(name, self.whole_column(name), self.whole_column("disturbed"))

    def steps_ms(self, gpus: int) -> list[float]:
        """The mean steps of the runs on so many GPUs in all."""
        pairs = zip(self.whole_column("step_ms"), self.whole_column("total_gpus"), strict=True)
        return [step for step, had in pairs if step > 0 and had == gpus]


class History:
    """Key → runs; least recently used keys are evicted, of an owner with many keys the owner's own."""

    def __init__(self, keys: int = HISTORY_KEYS, keys_of_one: int = HISTORY_KEYS_OF_ONE) -> None:
        self._runs: OwnerTable[bytes, Runs] = OwnerTable(keys, keys_of_one)

    def __len__(self) -> int:
        return len(self._runs)

    def add(self, key: bytes, run: Run, owner: str = "") -> None:
        """A sound run of this owner of the key; "": the key has no owner."""
        runs = self._runs.get(key, owner) or Runs()
        runs.add(run)
        self._runs.put(key, owner, runs)

    def get(self, key: bytes) -> Runs | None:
        """The runs of this key. Counts as a use."""
        runs = next(iter(self._runs.of_key(key).values()), None)
        if runs is not None:
            self._runs.use(key)
        return runs
