"""The nearest finished runs of the same network: for jobs whose own command was never seen.

Nearness is the ratio of batch sizes. Each owner counts with few runs only and the median decides, so that one
owner's runs, however many or strange, do not move what others are told beyond what their own runs span. Where only
he has run a network, his word counts as it is: nothing contradicts it.
"""

import math
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Sequence
from operator import itemgetter
from typing import NamedTuple

from penstock.model.types import JobSpec
from penstock_services.estimator.core.resources.estimate import (
    DEFAULT_HOST_MEMORY_MIB,
    Guess,
    guess_from,
    held_memory_mib,
)
from penstock_services.estimator.core.resources.history import Run, Runs, bounded
from penstock_services.estimator.core.runs import About

MAX_MODELS = 1_000  # least recently used ones go; about 20 MB when full
MODELS_PER_OWNER = 250  # so that one owner's sweep pushes out no more than a quarter of what others ran
MAX_OWNERS = 32  # of one network; the latest
RUNS_PER_OWNER = 4
NEAREST = 8  # runs of all owners together; odd counts are as good, more say less about this batch size
OWN_RUNS = 2  # of one owner among them
FARTHEST = 4.0  # times the batch size, or a quarter: beyond, memory and time are others
MOST_ABOVE = 2.0  # so far may one owner's memory, cores and time exceed everybody else's and be believed
MAX_REMEMBERED = 4_096  # answers
DIGITS = 9
LOG_FARTHEST = round(math.log(FARTHEST), DIGITS)
RANK = itemgetter(0, 1, 2)
DISCOUNT = 0.5  # of the confidence: another command, perhaps another person's


class _Kept(NamedTuple):
    log_batch: float | None
    workers: int
    run: Run
    """Bounded, as the history keeps it."""


class Nearest:
    """Network → owner → the latest runs; bounded."""

    def __init__(self) -> None:
        self._models: OrderedDict[str, OrderedDict[str, deque[_Kept]]] = OrderedDict()
        self._models_of: dict[str, OrderedDict[str, None]] = {}
        """Owner → the networks among these that he ran, least recently run first."""
        self._lines: dict[str, _Line] = {}
        """Of networks among these, as they were when they were last asked about."""

    def add(self, about: About, run: Run) -> None:
        """A sound run; one without the name of its network is near to nothing."""
        if about.model is None:
            return
        self._lines.pop(about.model, None)
        owners = self._models.setdefault(about.model, OrderedDict())
        self._models.move_to_end(about.model)
        owners.setdefault(about.owner, deque(maxlen=RUNS_PER_OWNER)).append(
            _Kept(_log(about.batch_size), about.workers, Run(*map(bounded, run)))
        )
        owners.move_to_end(about.owner)
        mine = self._models_of.setdefault(about.owner, OrderedDict())
        mine[about.model] = None
        mine.move_to_end(about.model)
        if len(owners) > MAX_OWNERS:
            self._drop(about.model, next(iter(owners)))
        if len(mine) > MODELS_PER_OWNER:
            self._drop(next(iter(mine)), about.owner)
        if len(self._models) > MAX_MODELS:
            oldest = next(iter(self._models))
            for owner in tuple(self._models[oldest]):
                self._drop(oldest, owner)

    def _drop(self, model: str, owner: str) -> None:
        """This owner's runs of this network."""
        self._lines.pop(model, None)
        owners, mine = self._models[model], self._models_of[owner]
        del owners[owner], mine[model]
        if not owners:
            del self._models[model]
        if not mine:
            del self._models_of[owner]

    def to(self, spec: JobSpec | About) -> list[tuple[str, Run]]:
        """The nearest runs with their owners, nearest first, at most `OWN_RUNS` of each; [] if none is near enough."""
        near = self._line(spec.model or "").near(_log(spec.batch_size))
        ranked = [
            (far, abs(kept.workers - spec.workers), -kept.run.seq, owner, kept.run)
            for far, owner, kept in near
        ]
        ranked.sort(key=RANK)
        found: list[tuple[str, Run]] = []
        count: dict[str, int] = {}
        for *_, owner, run in ranked:
            count[owner] = count.get(owner, 0) + 1
            if count[owner] <= OWN_RUNS:
                found.append((owner, run))
        return found[:NEAREST]

    def _line(self, model: str) -> "_Line":
        line = self._lines.get(model)
        if line is None:
            owners = self._models.get(model, OrderedDict())
            line = _Line([(owner, kept) for owner, runs in owners.items() for kept in runs])
            if owners:
                self._lines[model] = line
        return line


class _Line:
    """The runs of one network in the order of their batch sizes, so that the near ones are found without the others."""

    def __init__(self, runs: list[tuple[str, _Kept]]) -> None:
        self._whole = all(kept.log_batch is not None for _, kept in runs)
        """Whether each told its batch size."""
        self._runs = sorted(runs, key=lambda entry: entry[1].log_batch or 0.0) if self._whole else runs
        self._logs = [kept.log_batch or 0.0 for _, kept in self._runs]

    def near(self, mine: float | None) -> list[tuple[float, str, _Kept]]:
        """Distance, owner and run, in no order: all those among which the NEAREST are, at most OWN_RUNS of each owner."""
        if mine is None or not self._whole:
            return [
                (far, owner, kept)
                for owner, kept in self._runs
                if (far := _distance(kept.log_batch, mine)) <= LOG_FARTHEST
            ]
        right = bisect_left(self._logs, mine)
        left, last, sure = right - 1, 0.0, 0
        found: list[tuple[float, str, _Kept]] = []
        count: dict[str, int] = {}
        while True:
            below = _distance(self._logs[left], mine) if left >= 0 else math.inf
            above = _distance(self._logs[right], mine) if right < len(self._logs) else math.inf
            far = min(below, above)
            if far > LOG_FARTHEST or (sure >= NEAREST and far > last):
                return found
            at, left, right = (left, left - 1, right) if below <= above else (right, left, right + 1)
            owner, kept = self._runs[at]
            had = count[owner] = count.get(owner, 0) + 1
            sure += had <= OWN_RUNS
            last = far
            found.append((far, owner, kept))


def distance(one: int | None, other: int | None) -> float:
    """Logarithm of the ratio; jobs that both tell no batch size are equal, else it is as far as it may be."""
    if one is None or other is None:
        return 0.0 if one is other else math.log(FARTHEST)
    return abs(math.log(one / other))


def _log(batch_size: int | None) -> float | None:
    return None if batch_size is None else math.log(batch_size)


def _distance(one: float | None, other: float | None) -> float:
    """The same between logarithms, so rounded that twice and half as much are equally far."""
    if one is None or other is None:
        return 0.0 if one is other else LOG_FARTHEST
    return round(abs(one - other), DIGITS)


class NearestTier:
    """Medians of the nearest runs; of memory the largest + 10 %, as in the history. Says nothing about GPUs:
    how many another command was given is no need of this one."""

    def __init__(self, nearest: Nearest) -> None:
        self._nearest = nearest
        self._known: dict[tuple[float, ...], Guess] = {}
        """By the ledger's numbers of the runs that it rests on: near batch sizes have the same ones."""

    def guess(self, spec: JobSpec, key: bytes) -> Guess | None:
        found = self._nearest.to(spec)
        if not found:
            return None
        which = tuple(run.seq for _, run in found)
        if which not in self._known:
            if len(self._known) >= MAX_REMEMBERED:
                self._known.clear()
            self._known[which] = self._by(spec.model, found)
        return self._known[which]

    def _by(self, model: str | None, found: Sequence[tuple[str, Run]]) -> Guess:
        """What these runs of this network say."""
        most = [
            (name, cap) for name in ("run_ms", "busy_cores") if (cap := believed(found, name)) is not None
        ]
        runs = []
        for _, run in found:
            above = {name: cap for name, cap in most if getattr(run, name) > cap}
            runs.append(run._replace(**above) if above else run)
        guess = guess_from(Runs(runs))
        return guess._replace(
            tier="nearest",
            confidence=round(DISCOUNT * guess.confidence, 3),
            source=f"median of the {len(found)} nearest runs of {model} by other commands; "
            "memory: the largest of them + 10 %",
            gpus=None,
            host_memory_mib=held_memory_mib(believed(found, "host_memory_mib", DEFAULT_HOST_MEMORY_MIB)),
            gpu_memory_mib=held_memory_mib(believed(found, "gpu_memory_mib")),
        )


def believed(found: Sequence[tuple[str, Run]], name: str, always: float = 0.0) -> float | None:
    """The largest value of any owner, but no more than `MOST_ABOVE` times what the next one had.

    Of two owners alone it is believed up to `always` in any case: the smaller value may be the lie, and would take from
    a job what it had without anybody's runs.
    """
    largest: dict[str, float] = {}
    for owner, run in found:
        value = getattr(run, name)
        if value == value:
            largest[owner] = max(value, largest.get(owner, 0.0))
    highest = sorted(largest.values(), reverse=True)
    if not highest:
        return None
    if len(highest) == 1:
        return highest[0]
    return min(highest[0], max(always if len(highest) == 2 else 0.0, MOST_ABOVE * highest[1]))
