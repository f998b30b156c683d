"""Initial number of cores of a training, from its category and the owner's past trainings (CODA's N_start).

Source: CODA §V-B1. It answers where neither the job's own history nor runs of its network have measured busy
cores.

Ideal: the owner's past jobs end with the cores that suited them. Departures: as long as the cores of a
running job are not changed, a past job counts with its busy cores + 25 %, as in its history, since an owner
who once asked for 64 and used two would begin with 64 for ever; the cores of its allocation count only where
the CPU time is unknown. Counts are per GPU, times the job's GPUs (§IV-B2: demand is linear in the GPUs of a
node). Where neither category nor a past training is known, the paper names no count and this tier does not
answer: one core, the default, fits on every node, and the next run begins with this one's busy cores.
"""

import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from penstock.model.jobs.job_spec import JobSpec
from penstock.model.nouns.types import MAX_CORES_PER_NODE, Category
from penstock.scheduling.acting.core_search import ACROSS_NODES
from penstock_services.estimator.core.learning.limits import CORE_OWNERS, CORE_RUNS_OF_ONE
from penstock_services.estimator.core.learning.owner_table import OwnerTable
from penstock_services.estimator.core.node_capacity import NodeCapacity
from penstock_services.estimator.core.records.conditions import comparable
from penstock_services.estimator.core.records.history import Run
from penstock_services.estimator.core.records.runs import Allocation, JobInfo
from penstock_services.estimator.core.resources.estimate import CORES_HEADROOM, DEFAULT, DEFAULT_GPUS, Guess

FIRST: Mapping[Category, int] = MappingProxyType({"cv": 3, "nlp": 5, "speech": 5})
"""For an owner's first job. Source: CODA §V-B1."""
MOVES = (
    ("pipelined", -1),  # loading overlaps with training
    ("many_weights", -1),
    ("heavy_preprocessing", +1),  # between iterations
)
"""Trait of the job → cores more or less. Source: CODA §V-B1."""


class PastJob(NamedTuple):
    """A finished job of the same owner and its cores (over its GPUs, on one node)."""

    category: Category | None
    cores: int
    gpus: int = 1


class Start(NamedTuple):
    """The initial number of cores, and the reason."""

    cores: int
    reason: str


def n_start(
    category: Category | None,
    traits: Collection[str],
    past: Sequence[PastJob],
    at_most: int,
    *,
    gpus: int = 1,
    nodes: int = 1,
) -> Start | None:
    """N_start, 1 to `at_most`: the largest core count per GPU of the owner's past jobs in the category (of
    all of them where no category is given), else the category's, moved by the traits, times the GPUs. None:
    neither is known.
    """
    alike = [one.cores / one.gpus for one in past if category in (None, one.category)]
    if alike:
        begin = max(alike)
        reason = f"the most of {len(alike)} past job{'s' if len(alike) > 1 else ''} of the owner"
    elif category is not None:
        begin, reason = FIRST[category], f"the owner's first job of category {category}"
    else:
        return None
    for trait, move in MOVES:
        if trait in traits:
            begin += move
            reason += f"; {trait.replace('_', ' ')}: {move:+d}"
    if gpus > 1:
        begin *= gpus
        reason += f"; {gpus} GPUs"
    if nodes > 1 and begin > ACROSS_NODES:
        begin = ACROSS_NODES
        reason += f"; on {nodes} nodes at most {ACROSS_NODES}"
    return Start(min(max(math.ceil(begin), 1), at_most), reason)


class PastCores:
    """Owner → the cores of the owner's latest trainings; bounded."""

    def __init__(self) -> None:
        self._owners: OwnerTable[str, deque[PastJob]] = OwnerTable(CORE_OWNERS, keys_of_one=1)

    def __len__(self) -> int:
        return len(self._owners)

    def add(self, info: JobInfo, allocation: Allocation, run: Run) -> None:
        """A sound run. Ignored: runs without GPUs, which are no trainings, and runs whose cores were changed
        or that were slowed."""
        if not comparable("busy_cores", run.disturbed):
            return
        busy = run.busy_cores
        cores = math.ceil(busy * CORES_HEADROOM) if 0 < busy <= MAX_CORES_PER_NODE else allocation.cores
        if allocation.gpus < 1 or not 1 <= cores <= MAX_CORES_PER_NODE:
            return
        past = self._owners.get(info.owner, info.owner)
        if past is None:
            past = deque(maxlen=CORE_RUNS_OF_ONE)
        past.append(PastJob(info.category, cores, allocation.gpus))
        self._owners.put(info.owner, info.owner, past)

    def of(self, owner: str) -> tuple[PastJob, ...]:
        """Oldest first."""
        return tuple(self._owners.get(owner, owner) or ())


class CoresTier:
    """Answers cores alone, with their source."""

    def __init__(self, past: PastCores, nodes: NodeCapacity) -> None:
        self._past = past
        self._nodes = nodes

    def guess(self, spec: JobSpec, key: bytes) -> Guess | None:
        gpus = DEFAULT_GPUS if spec.resources.gpus is None else spec.resources.gpus
        if not gpus:
            return None
        largest = self._nodes.max(spec, gpus)
        at_most = MAX_CORES_PER_NODE if largest is None else largest.cores
        nodes = 1 if largest is None else math.ceil(spec.workers * gpus / max(1, largest.gpus))
        start = n_start(
            spec.category, spec.traits, self._past.of(spec.owner), at_most, gpus=gpus, nodes=nodes
        )
        if start is None:
            return None
        return Guess(
            tier="default",
            confidence=DEFAULT.confidence,
            source=DEFAULT.source,
            cores=start.cores,
            partly=f"cores: {start.reason}",
        )
