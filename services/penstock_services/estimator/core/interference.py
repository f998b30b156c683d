"""Interference between jobs that share a GPU: their slowdown, learned per pair of kinds (model, batch size)
and GPU model.

Speed beside another = time of a step alone / time of a step beside it, both as scripts report them; alone as
the same job was measured before or after, else as jobs of its kind were. Runs of a pair are averaged. Only
jobs of one GPU, and only two at a time, are measured. Source: Gavel (OSDI '20) §3.2 measures pairs
beforehand; here the cell's own runs are the measurements.

A pair's speeds are facts about programs, and a name does not prove which program runs: jobs of other owners
may have it (decision 70). So an owner's estimates use only the pairs that this owner's jobs were part of.
"""

from collections import OrderedDict
from math import isfinite
from typing import NamedTuple

from penstock.model.jobs.job_spec import JobSpec
from penstock.model.nouns.types import MAX_PAIRS, PairSpeed
from penstock_services.estimator.core.records.runs import JobInfo

MAX_KINDS = 4_096
"""Of each table; the kind measured longest ago is evicted first."""
MOST_RUNS = 32
"""At most so many runs weigh in a mean, so that older values fade out."""
MAX_SPEED = 2.0
"""A larger value is a clock error, or a step alone that was measured in another phase."""


class Kind(NamedTuple):
    """Key of jobs that are treated as alike."""

    owner: str
    model: str
    batch_size: int | None
    gpu_model: str


class Measured(NamedTuple):
    """One job of a pair. Times in ms, NaN where they were not measured."""

    kind: Kind
    alone_ms: float
    beside_ms: float


class Mean(NamedTuple):
    own: float
    other: float
    runs: int

    def with_run(self, own: float, other: float) -> "Mean":
        weight = 1 / min(self.runs + 1, MOST_RUNS)
        return Mean(
            self.own + weight * (own - self.own), self.other + weight * (other - self.other), self.runs + 1
        )


class Learned(NamedTuple):
    """Rows of the tables, as they are stored; measured longest ago first."""

    alone_ms: dict[Kind, float]
    pairs: dict[tuple[Kind, Kind], Mean]
    """Speed of the first beside the second, and the speed that it leaves to the second."""

    def then(self, later: "Learned") -> "Learned":
        """Updated with the rows of a later one."""
        return Learned(self.alone_ms | later.alone_ms, self.pairs | later.pairs)

    @property
    def rows(self) -> int:
        return len(self.alone_ms) + len(self.pairs)


class Interference:
    """Folded by the estimator's state."""

    def __init__(self) -> None:
        self._alone_ms: OrderedDict[Kind, float] = OrderedDict()
        self._pairs: OrderedDict[Kind, OrderedDict[Kind, Mean]] = OrderedDict()
        self._new = Learned({}, {})

    def take(self) -> Learned:
        """Rows that have changed since the last call; the caller stores them."""
        new, self._new = self._new, Learned({}, {})
        return new

    def put(self, stored: Learned) -> None:
        """Restores stored rows. Only before anything is measured."""
        for kind, step_ms in stored.alone_ms.items():
            self._put_alone(kind, step_ms)
        for (kind, other), mean in stored.pairs.items():
            self._put(kind, other, mean)

    def alone(self, kind: Kind, step_ms: float) -> None:
        """A job of this kind had a GPU to itself;
        NaN: its steps were not measured, and nothing is learned."""
        if isfinite(step_ms) and step_ms > 0:
            self._put_alone(kind, step_ms)
            self._new.alone_ms[kind] = step_ms

    def _put_alone(self, kind: Kind, step_ms: float) -> None:
        self._alone_ms[kind] = step_ms
        self._alone_ms.move_to_end(kind)
        if len(self._alone_ms) > MAX_KINDS:
            self._alone_ms.popitem(last=False)

    def together(self, one: Measured, other: Measured) -> bool:
        """Two jobs shared a GPU. Returns whether their speeds are known."""
        own, its = self._speed(one), self._speed(other)
        if own is None or its is None:
            return False
        self._add(one.kind, other.kind, own, its)
        if one.kind != other.kind:
            self._add(other.kind, one.kind, its, own)
        return True

    def _speed(self, found: Measured) -> float | None:
        alone_ms = found.alone_ms
        if not (isfinite(alone_ms) and alone_ms > 0):
            alone_ms = self._alone_ms.get(found.kind, 0.0)
        if not (isfinite(found.beside_ms) and found.beside_ms > 0) or alone_ms <= 0:
            return None
        speed = alone_ms / found.beside_ms
        return speed if 0 < speed <= MAX_SPEED else None

    def _add(self, kind: Kind, other: Kind, own: float, its: float) -> None:
        known = self._pairs.get(kind)
        before = None if known is None else known.get(other)
        mean = (before or Mean(0.0, 0.0, 0)).with_run(own, its)
        self._put(kind, other, mean)
        self._new.pairs[kind, other] = mean

    def _put(self, kind: Kind, other: Kind, mean: Mean) -> None:
        of_kind = self._pairs.setdefault(kind, OrderedDict())
        self._pairs.move_to_end(kind)
        of_kind[other] = mean
        of_kind.move_to_end(other)
        if len(of_kind) > MAX_PAIRS:
            of_kind.popitem(last=False)
        if len(self._pairs) > MAX_KINDS:
            self._pairs.popitem(last=False)

    def of(self, spec: JobSpec) -> tuple[PairSpeed, ...]:
        """For `Estimate.pairs`: at most MAX_PAIRS, the most often measured first; ties by name."""
        found = [
            PairSpeed(
                model=other.model,
                batch_size=other.batch_size,
                gpu_model=kind.gpu_model,
                own=mean.own,
                other=mean.other,
                runs=mean.runs,
            )
            for kind, of_kind in self._pairs.items()
            if (kind.owner, kind.model, kind.batch_size) == (spec.owner, spec.model or "", spec.batch_size)
            for other, mean in of_kind.items()
        ]
        found.sort(key=lambda pair: (-pair.runs, pair.gpu_model, pair.model, pair.batch_size or 0))
        return tuple(found[:MAX_PAIRS])


def kind_of(info: JobInfo, gpu_model: str) -> Kind:
    return Kind(info.owner, info.model or "", info.batch_size, gpu_model)
