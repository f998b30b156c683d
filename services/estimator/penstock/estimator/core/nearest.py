"""The nearest finished runs of the same network: for jobs whose own command was never seen.

Nearness is the ratio of batch sizes. Each owner counts with few runs only and the median decides, so that one
owner's runs, however many or strange, do not move what others are told beyond what their own runs span. Where only
he has run a network, his word counts as it is: nothing contradicts it.
"""

import math
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import NamedTuple

from penstock.cluster.nouns import JobSpec
from penstock.estimator.core.estimate import DEFAULT_HOST_MEMORY_MIB, Guess, guess_from, held_memory_mib
from penstock.estimator.core.history import Run, Runs
from penstock.estimator.core.runs import About

MAX_MODELS = 1_000  # least recently used ones go; about 20 MB when full
MODELS_PER_OWNER = 250  # so that one owner's sweep pushes out no more than a quarter of what others ran
MAX_OWNERS = 32  # of one network; the latest
RUNS_PER_OWNER = 4
NEAREST = 8  # runs of all owners together; odd counts are as good, more say less about this batch size
OWN_RUNS = 2  # of one owner among them
FARTHEST = 4.0  # times the batch size, or a quarter: beyond, memory and time are others
MOST_ABOVE = 2.0  # so far may one owner's memory, cores and time exceed everybody else's and be believed
DISCOUNT = 0.5  # of the confidence: another command, perhaps another person's


class _Kept(NamedTuple):
    batch_size: int | None
    workers: int
    run: Run


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
            _Kept(about.batch_size, about.workers, run)
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
        for owner, runs in self._models.get(spec.model or "", {}).items():
            near = [
                (far, abs(kept.workers - spec.workers), -kept.run.seq, owner, kept.run)
                for kept in runs
                if (far := distance(kept.batch_size, spec.batch_size)) <= math.log(FARTHEST)
            ]
            near.sort(key=lambda entry: entry[:3])
            found += near[:OWN_RUNS]
        found.sort(key=lambda entry: entry[:3])
        return [(owner, run) for *_, owner, run in found[:NEAREST]]


def distance(one: int | None, other: int | None) -> float:
    """Logarithm of the ratio; jobs that both tell no batch size are equal, else it is as far as it may be."""
    if one is None or other is None:
        return 0.0 if one is other else math.log(FARTHEST)
    return abs(math.log(one / other))


class NearestTier:
    """Medians of the nearest runs; of memory the largest + 10 %, as in the history. Says nothing about GPUs:
    how many another command was given is no need of this one."""

    def __init__(self, nearest: Nearest) -> None:
        self._nearest = nearest

    def guess(self, spec: JobSpec, key: bytes) -> Guess | None:
        found = self._nearest.to(spec)
        if not found:
            return None
        runs = Runs()
        most = {name: believed(found, name) for name in ("run_ms", "busy_cores")}
        for _, run in found:
            bounded = {name: min(getattr(run, name), cap) for name, cap in most.items() if cap is not None}
            runs.add(run._replace(**bounded))
        guess = guess_from(runs)
        return guess._replace(
            tier="nearest",
            confidence=round(DISCOUNT * guess.confidence, 3),
            source=f"median of the {len(found)} nearest runs of {spec.model} by other commands; "
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
