"""How many cores a training begins with, from its category and the owner's past trainings (CODA's N_start).

Source: CODA §V-B1. It answers where neither the job's own history nor runs of its network say how many cores they kept busy.

Ideal: the owner's past jobs end with the cores that suited them. Departures: as long as nothing moves the cores of a
running job, a past job counts with what it kept busy + 25 %, as in its history, since an owner who once asked for 64
and used two would begin with 64 for ever; what was given counts only where the CPU time is unknown. Where neither
category nor a past training is known, the paper is silent; we take no count from it either and leave the job to the
default of one core: it must fit on every node to be run at all, and its next run begins with what this one kept busy.
"""

import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from penstock.model.types import Category, JobSpec
from penstock_services.estimator.core.limits import CORE_OWNERS, CORE_RUNS_OF_ONE
from penstock_services.estimator.core.node_capacity import Capacity, NodeCapacity
from penstock_services.estimator.core.owner_table import OwnerTable
from penstock_services.estimator.core.resources.estimate import CORES_HEADROOM, DEFAULT, DEFAULT_GPUS, Guess
from penstock_services.estimator.core.resources.history import Run
from penstock_services.estimator.core.runs import Allocation, JobInfo

FIRST: dict[Category, int] = {"cv": 3, "nlp": 5, "speech": 5}
"""For an owner's first job. Source: CODA §V-B1."""
FIRST_UNKNOWN = 3  # neither history nor category; the paper leaves it open, the most frequent category has 3
ACROSS_NODES = 2  # a job on several nodes needs no more, the network holds it back. Source: CODA §IV-B2
MAX_CORES = 1_024
MAX_CACHED = 4_096  # answers


class CoreJob(NamedTuple):
    """What the owner says of the job; everything may be left out."""

    category: Category | None = None
    pipelined: bool = False
    """Loading overlaps with training."""
    many_weights: bool = False
    heavy_preprocessing: bool = False
    """Between iterations."""
    gpus: int = 1
    nodes: int = 1


class PastJob(NamedTuple):
    """A finished job of the same owner and the cores that it had at the end (over its GPUs, on one node)."""

    category: Category | None
    cores: int
    gpus: int = 1


class Start(NamedTuple):
    """Cores to begin with, and why."""

    cores: int
    reason: str


def n_start(job: CoreJob, past: Sequence[PastJob], at_most: int, *, scaled: bool = False) -> Start:
    """N_start, 1 to `at_most`. Raises `ValueError` for another range than 1 to MAX_CORES.

    The largest core count of the owner's past jobs in the category (of all of them where no category is given),
    else 3, 5 or 5 by category; less 1 if pipelined, less 1 with many weights, more 1 with heavy preprocessing.
    Source: CODA §V-B1. Past jobs with less than one core or more than MAX_CORES are left out.

    `scaled` departs: counts are per GPU, times the job's GPUs (§IV-B2: demand is linear in the GPUs of a node);
    on several nodes never above ACROSS_NODES.
    """
    if not 1 <= at_most <= MAX_CORES:
        raise ValueError(f"at most {at_most} cores: must be 1 to {MAX_CORES}")
    alike = [
        one
        for one in past
        if (job.category is None or one.category == job.category)
        and 1 <= one.cores <= MAX_CORES
        and 1 <= one.gpus <= MAX_CORES
    ]
    if alike:
        begin = max(one.cores / (one.gpus if scaled else 1) for one in alike)
        reason = f"the most of {len(alike)} past job{'s' if len(alike) > 1 else ''} of the owner"
    elif job.category is not None:
        begin, reason = FIRST[job.category], f"the owner's first job of category {job.category}"
    else:
        begin, reason = FIRST_UNKNOWN, "neither history nor category is known"
    for applies, move, why in (
        (job.pipelined, -1, "pipelined"),
        (job.many_weights, -1, "many weights"),
        (job.heavy_preprocessing, +1, "heavy preprocessing"),
    ):
        if applies:
            begin += move
            reason += f"; {why}: {move:+d}"
    if scaled and job.gpus > 1:
        begin *= job.gpus
        reason += f"; {job.gpus} GPUs"
    if scaled and job.nodes > 1 and begin > ACROSS_NODES:
        begin = ACROSS_NODES
        reason += f"; on {job.nodes} nodes at most {ACROSS_NODES}"
    return Start(min(max(math.ceil(begin), 1), at_most), reason)


class PastCores:
    """Owner → the cores of his latest trainings; bounded."""

    def __init__(self) -> None:
        self._owners: OwnerTable[str, deque[PastJob]] = OwnerTable(CORE_OWNERS, keys_of_one=1)
        self.version = 0
        """Rises with every run."""

    def __len__(self) -> int:
        return len(self._owners)

    def add(self, info: JobInfo, allocation: Allocation, run: Run) -> None:
        """A sound run; one without GPUs is no training."""
        busy = run.busy_cores
        cores = math.ceil(busy * CORES_HEADROOM) if 0 < busy <= MAX_CORES else allocation.cores
        if allocation.gpus < 1 or cores < 1:
            return
        past = self._owners.get(info.owner, info.owner)
        if past is None:
            past = deque(maxlen=CORE_RUNS_OF_ONE)
        past.append(PastJob(info.category, cores, allocation.gpus))
        self._owners.put(info.owner, info.owner, past)
        self.version += 1

    def of(self, owner: str) -> tuple[PastJob, ...]:
        """Oldest first."""
        return tuple(self._owners.get(owner, owner) or ())


class CoresTier:
    """Cores alone, with where they come from."""

    def __init__(self, past: PastCores, nodes: NodeCapacity) -> None:
        self._past = past
        self._nodes = nodes
        self._answers: dict[tuple[object, ...], Guess | None] = {}
        self._version = 0

    def guess(self, spec: JobSpec, key: bytes) -> Guess | None:
        gpus = DEFAULT_GPUS if spec.resources.gpus is None else spec.resources.gpus
        if not gpus:
            return None
        largest = self._nodes.max(spec, gpus)
        if self._version != self._past.version or len(self._answers) >= MAX_CACHED:
            self._answers.clear()
            self._version = self._past.version
        asked = (spec.owner, spec.category, spec.traits, spec.workers, gpus, largest)
        if asked not in self._answers:
            self._answers[asked] = self._start(spec, gpus, largest)
        return self._answers[asked]

    def _start(self, spec: JobSpec, gpus: int, largest: Capacity | None) -> Guess | None:
        past = self._past.of(spec.owner)
        if spec.category is None and not past:
            return None
        job = CoreJob(
            spec.category,
            pipelined="pipelined" in spec.traits,
            many_weights="many_weights" in spec.traits,
            heavy_preprocessing="heavy_preprocessing" in spec.traits,
            gpus=gpus,
            nodes=1 if largest is None else math.ceil(spec.workers * gpus / max(1, largest.gpus)),
        )
        start = n_start(job, past, MAX_CORES if largest is None else largest.cores, scaled=True)
        return Guess(
            tier="default",
            confidence=DEFAULT.confidence,
            source=DEFAULT.source,
            cores=start.cores,
            partly=f"cores: {start.reason}",
        )
