"""What finished runs used, per key: the same owner, command, model and batch size."""

import math
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import sha256
from itertools import chain
from typing import NamedTuple

from penstock.model.types import JobSpec

RUNS_PER_KEY = (
    32  # older runs say little about today's code and data; their median is stable from about ten on
)
MAX_KEYS = 10_000  # least recently used ones go; a full history takes about 45 MiB
KEYS_PER_OWNER = 2_500  # so that one owner's sweep pushes out no more than a quarter of what others ran
MAX_VALUE = 1 << 53  # the largest whole number that a float holds exactly, and the nouns' largest range

UNKNOWN = math.nan


class Run(NamedTuple):
    """One finished, succeeded job: over its workers the largest of each, utilisation the mean. NaN: not measured."""

    ended_ms: float
    seq: float
    """Of the ledger record that ended it."""
    run_ms: float = UNKNOWN
    gpus: float = UNKNOWN
    """Given, per worker; how many of them it needed is not measured."""
    busy_cores: float = UNKNOWN
    """CPU time / run time."""
    host_memory_mib: float = UNKNOWN
    gpu_memory_mib: float = UNKNOWN
    gpu_utilisation_percent: float = UNKNOWN
    gpu_utilisation_std: float = UNKNOWN
    total_gpus: float = UNKNOWN
    """Of all its workers."""
    iterations: float = UNKNOWN
    """In all, those of earlier attempts too."""
    step_ms: float = UNKNOWN
    """Mean of one iteration on its last placement."""
    launch_ms: float = UNKNOWN
    train_ms: float = UNKNOWN
    save_ms: float = UNKNOWN


WIDTH = len(Run._fields)


def bounded(value: float | None) -> float:
    """A measured value as the history keeps it: ≥ 0, ≤ MAX_VALUE; NaN for None and for what is no number."""
    if value is None or value != value:
        return UNKNOWN
    return float(min(max(value, 0), MAX_VALUE))


def key_of(spec: JobSpec) -> bytes:
    """Digest of owner, command, model and batch size: 32 bytes, however long the command is.

    The separator cannot occur in a command, and identifiers hold no NUL.
    """
    parts = (spec.owner, spec.model or "", str(spec.batch_size or ""), *spec.command)
    return sha256("\0".join(parts).encode()).digest()


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
        self._values.extend(bounded(value) for value in run)
        if len(self) > RUNS_PER_KEY:
            del self._values[:WIDTH]
        self.version += 1

    def whole_column(self, name: str) -> Sequence[float]:
        """Of all runs, oldest first; NaN where it was not measured."""
        return self._values[Run._fields.index(name) :: WIDTH]

    def column(self, name: str) -> list[float]:
        """The measured values of one field of `Run`, oldest first; runs without it are left out."""
        values: Sequence[float] = self._values[Run._fields.index(name) :: WIDTH]
        return [value for value in values if value == value]


class History:
    """Key → runs; bounded, least recently used out first, of an owner with many keys his own."""

    def __init__(self, max_keys: int = MAX_KEYS, keys_per_owner: int = KEYS_PER_OWNER) -> None:
        self._max_keys = max_keys
        self._keys_per_owner = keys_per_owner
        self._runs: OrderedDict[bytes, Runs] = OrderedDict()
        self._owner_of: dict[bytes, str] = {}
        self._keys_of: dict[str, OrderedDict[bytes, None]] = {}
        """Least recently run first."""

    def __len__(self) -> int:
        return len(self._runs)

    def add(self, key: bytes, run: Run, owner: str = "") -> None:
        """A sound run of this owner, to whom the key belongs; "": to nobody."""
        runs = self._runs.get(key)
        if runs is None:
            runs = self._runs[key] = Runs()
        if owner:
            self._owner_of[key] = owner
            mine = self._keys_of.setdefault(owner, OrderedDict())
            mine[key] = None
            mine.move_to_end(key)
            if len(mine) > self._keys_per_owner:
                self._drop(next(iter(mine)))
        self._runs.move_to_end(key)
        if len(self._runs) > self._max_keys:
            self._drop(next(iter(self._runs)))
        runs.add(run)

    def get(self, key: bytes) -> Runs | None:
        """The runs of this key, which thereby was used."""
        runs = self._runs.get(key)
        if runs is not None:
            self._runs.move_to_end(key)
        return runs

    def _drop(self, key: bytes) -> None:
        del self._runs[key]
        owner = self._owner_of.pop(key, "")
        if owner:
            mine = self._keys_of[owner]
            del mine[key]
            if not mine:
                del self._keys_of[owner]
