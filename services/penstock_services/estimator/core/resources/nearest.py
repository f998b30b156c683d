"""Nearest neighbours: finished runs of the same network by other commands, nearest in batch size.

Each owner counts with few runs only and the median decides, so that one owner's runs, however many or
strange, do not move other owners' estimates beyond the range of their own runs. Where only one owner has run
a network, those runs count as they are: nothing contradicts them.
"""

import math
from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from operator import itemgetter
from statistics import median
from typing import Literal, NamedTuple

from penstock.model.jobs.job_spec import JobSpec
from penstock_services.estimator.core.learning.limits import (
    ABOVE_OTHERS,
    NEAREST_NETWORKS,
    NEAREST_NETWORKS_OF_ONE,
    NEAREST_OWNERS,
    NEAREST_RUNS_OF_ONE,
    NEAREST_STORED_OF_ONE,
)
from penstock_services.estimator.core.learning.owner_table import OwnerTable
from penstock_services.estimator.core.records.conditions import EXCLUDED, comparable
from penstock_services.estimator.core.records.history import UNKNOWN, Run, Runs, bounded
from penstock_services.estimator.core.records.runs import JobInfo
from penstock_services.estimator.core.resources.estimate import (
    DEFAULT_HOST_MEMORY_MIB,
    Guess,
    guess_from,
    promised_memory_mib,
)

NEAREST = 8  # runs of all owners together; odd counts are as good, further runs have other batch sizes
FARTHEST = 4.0  # times the batch size, or a quarter: beyond, memory and time differ
DOUBLE = 1 << 30  # of a distance: twice the batch size; whole numbers, so that twice and half are equally far
MAX_DISTANCE = round(math.log2(FARTHEST) * DOUBLE)  # the same as a distance
MAX_CACHED = 1_024  # answers; each holds up to `NEAREST` runs, about 4 KiB
RANK = itemgetter(0, 1, 2)
DISCOUNT = 0.5  # of the confidence: another command, perhaps of another owner


class _Entry(NamedTuple):
    log_batch: int | None
    workers: int
    run: Run
    """Bounded, as in the history."""


class Nearest:
    """Network → owner → the latest runs; bounded."""

    def __init__(self) -> None:
        self._networks: OwnerTable[str, deque[_Entry]] = OwnerTable(
            NEAREST_NETWORKS, NEAREST_NETWORKS_OF_ONE, NEAREST_OWNERS
        )

    def __len__(self) -> int:
        return len(self._networks)

    def add(self, info: JobInfo, run: Run) -> None:
        """A sound run; ignored without the name of its network."""
        if info.model is None:
            return
        runs = self._networks.get(info.model, info.owner)
        if runs is None:
            runs = deque(maxlen=NEAREST_STORED_OF_ONE)
        runs.append(_Entry(_log(info.batch_size), info.workers, Run(*map(bounded, run))))
        self._networks.put(info.model, info.owner, runs)

    def to(self, spec: JobSpec | JobInfo) -> list[tuple[str, Run]]:
        """The nearest runs with their owners, nearest first, few of each owner; [] if none is near enough."""
        mine, workers = _log(spec.batch_size), spec.workers
        ranked = [
            (far, abs(entry.workers - workers), -entry.run.seq, owner, entry.run)
            for owner, entries in self._networks.of_key(spec.model or "").items()
            for entry in entries
            if (far := _distance(entry.log_batch, mine)) <= MAX_DISTANCE
        ]
        ranked.sort(key=RANK)
        found: list[tuple[str, Run]] = []
        count: dict[str, int] = {}
        for *_, owner, run in ranked:
            count[owner] = count.get(owner, 0) + 1
            if count[owner] <= NEAREST_RUNS_OF_ONE:
                found.append((owner, run))
        return found[:NEAREST]


def distance(one: int | None, other: int | None) -> int:
    """Logarithm of the ratio of batch sizes, in parts of a doubling; equal if both are unknown, as far as may
    be if one is."""
    return _distance(_log(one), _log(other))


def _log(batch_size: int | None) -> int | None:
    return None if batch_size is None else round(math.log2(batch_size) * DOUBLE)


def _distance(one: int | None, other: int | None) -> int:
    if one is None or other is None:
        return 0 if one is other else MAX_DISTANCE
    return abs(one - other)


class NearestTier:
    """Medians of the nearest runs; of memory the largest + 10 %, as in the history. Leaves GPUs open:
    another command's GPUs do not determine this one's."""

    def __init__(self, nearest: Nearest) -> None:
        self._nearest = nearest

    def guess(self, spec: JobSpec, key: bytes) -> Guess | None:
        found = self._nearest.to(spec)
        return _guess(spec.model, tuple(found)) if found else None


@lru_cache(MAX_CACHED)
def _guess(model: str | None, found: tuple[tuple[str, Run], ...]) -> Guess:
    """Cached, since near batch sizes give the same runs."""
    found = comparable_of_each(found)
    caps = [
        (name, cap)
        for name in ("run_ms", "launch_ms", "busy_cores")
        if (cap := believed(found, name)) is not None
    ]
    runs = []
    for _, run in found:
        above = {name: cap for name, cap in caps if getattr(run, name) > cap}
        runs.append(run._replace(**above) if above else run)
    guess = guess_from(Runs(runs))
    return guess._replace(
        tier="nearest",
        confidence=round(DISCOUNT * guess.confidence, 3),
        source=f"median of the {len(found)} nearest runs of {model} by other commands; "
        "memory: the largest of them + 10 %",
        gpus=None,
        host_memory_mib=promised_memory_mib(believed(found, "host_memory_mib", DEFAULT_HOST_MEMORY_MIB)),
        gpu_memory_mib=promised_memory_mib(believed(found, "gpu_memory_mib")),
    )


def comparable_of_each(found: Sequence[tuple[str, Run]]) -> tuple[tuple[str, Run], ...]:
    """Of each owner only comparable measurements, where the owner has any such run of that field.

    Over all owners this rule does not apply: else the one owner with undisturbed runs would alone determine
    all others' estimates.
    """
    if not any(run.disturbed for _, run in found):
        return tuple(found)
    undisturbed = {
        (owner, name)
        for owner, run in found
        for name in EXCLUDED
        if (value := getattr(run, name)) == value and comparable(name, run.disturbed)
    }
    return tuple(
        (
            owner,
            run._replace(
                disturbed=0.0,
                **{
                    name: UNKNOWN
                    for name in EXCLUDED
                    if (owner, name) in undisturbed and not comparable(name, run.disturbed)
                },
            ),
        )
        for owner, run in found
    )


def believed(found: Sequence[tuple[str, Run]], name: str, always: float = 0.0) -> float | None:
    """The largest value of any owner, but no more than `ABOVE_OTHERS` times the next one.

    With two owners a value up to `always` counts in any case: the smaller value may be false, and would
    reduce a job's estimate below the one without any runs.
    """
    largest: dict[str, float] = {}
    for owner, run in found:
        value = getattr(run, name)
        if value == value:
            largest[owner] = max(value, largest.get(owner, 0.0))
    highest = sorted(largest.values(), reverse=True)
    if len(highest) < 2:
        return highest[0] if highest else None
    return min(highest[0], max(always if len(highest) == 2 else 0.0, ABOVE_OTHERS * highest[1]))


Around = Literal["launch_ms", "save_ms"]
AROUND: tuple[Around, ...] = ("launch_ms", "save_ms")
"""Phases around the training itself. Medians and not Liquid's forest (§6.1): launching depends on the
machine's images and the data's place, saving on the size of the network; the forest has no answer for an
unseen network."""


def phase_ms(name: Around, job: JobSpec | JobInfo, runs: Runs | None, nearest: Nearest) -> float:
    """The median of `runs`, which are the job's own, else of its nearest; 0 where no run reported it.

    Of the nearest, each owner counts with two runs at most and with no more than twice the next owner's
    value, so that one among three does not move it beyond the others'.
    """
    values: Sequence[float] = runs.column(name) if runs else ()
    if not values:
        near = nearest.to(job)
        limit = believed(near, name)
        if limit is not None:
            values = [min(value, limit) for _, run in near if (value := getattr(run, name)) == value]
    return median(values) if values else 0.0
