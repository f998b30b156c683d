"""The nearest finished runs of the same network: for jobs whose own command was never seen.

Nearness is the ratio of batch sizes. Each owner counts with few runs only and the median decides, so that one
owner's runs, however many or strange, do not move what others are told beyond what their own runs span. Where only
he has run a network, his word counts as it is: nothing contradicts it.
"""

import math
from collections import OrderedDict, deque
from collections.abc import Sequence
from operator import itemgetter
from typing import NamedTuple

from penstock.cluster.nouns import JobSpec
from penstock.estimator.core.estimate import DEFAULT_HOST_MEMORY_MIB, Guess, guess_from, held_memory_mib
from penstock.estimator.core.history import Run, Runs, bounded
from penstock.estimator.core.runs import About

MAX_MODELS = 1_000  # least recently used ones go; about 20 MB when full
MODELS_PER_OWNER = 250  # so that one owner's sweep pushes out no more than a quarter of what others ran
MAX_OWNERS = 32  # of one network; the latest
RUNS_PER_OWNER = 4
NEAREST = 8  # runs of all owners together; odd counts are as good, more say less about this batch size
OWN_RUNS = 2  # of one owner among them
FARTHEST = 4.0  # times the batch size, or a quarter: beyond, memory and time are others
MOST_ABOVE = 2.0  # so far may one owner's memory, cores and time exceed everybody else's and be believed
MAX_REMEMBERED = 4_096  # answers
LOG_FARTHEST = math.log(FARTHEST)
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

    def add(self, about: About, run: Run) -> None:
        """A sound run; one without the name of its network is near to nothing."""
        if about.model is None:
            return
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
        owners, mine = self._models[model], self._models_of[owner]
        del owners[owner], mine[model]
        if not owners:
            del self._models[model]
        if not mine:
            del self._models_of[owner]

    def to(self, spec: JobSpec | About) -> list[tuple[str, Run]]:
        """The nearest runs with their owners, nearest first, at most `OWN_RUNS` of each; [] if none is near enough."""
        found: list[tuple[float, int, float, str, Run]] = []
        log_batch, workers = _log(spec.batch_size), spec.workers
        for owner, runs in self._models.get(spec.model or "", {}).items():
            near = [
                (far, abs(kept.workers - workers), -kept.run.seq, owner, kept.run)
                for kept in runs
                if (far := _distance(kept.log_batch, log_batch)) <= LOG_FARTHEST
            ]
            if len(near) > OWN_RUNS:
                near.sort(key=RANK)
                del near[OWN_RUNS:]
            found += near
        found.sort(key=RANK)
        return [(owner, run) for *_, owner, run in found[:NEAREST]]


def distance(one: int | None, other: int | None) -> float:
    """Logarithm of the ratio; jobs that both tell no batch size are equal, else it is as far as it may be."""
    return _distance(_log(one), _log(other))


def _log(batch_size: int | None) -> float | None:
    return None if batch_size is None else math.log(batch_size)


def _distance(one: float | None, other: float | None) -> float:
    """The same between logarithms."""
    if one is None or other is None:
        return 0.0 if one is other else LOG_FARTHEST
    return abs(one - other)


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
