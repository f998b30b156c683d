"""How many cores a training begins with, from its category and the owner's past trainings.

Source: CODA §V-B1 (`cores.n_start`, with counts per GPU). It speaks where neither the job's own history nor runs of
its network say how many cores they kept busy.

Ideal: the owner's past jobs end with the cores that suited them. Departures: as long as nothing moves the cores of a
running job, a past job counts with what it kept busy + 25 %, as in its history, since an owner who once asked for 64
and used two would begin with 64 for ever; what was given counts only where the CPU time is unknown. Where neither
category nor a past training is known, the paper says nothing; we take no count from it either and leave the job to the
default of one core: it must fit on every node to be run at all, and its next run begins with what this one kept busy.
"""

import math
from collections import OrderedDict, deque

from penstock.model.types import JobSpec
from penstock_services.estimator.core.resources.cores import MAX_CORES, CoreJob, PastJob, n_start
from penstock_services.estimator.core.resources.estimate import CORES_HEADROOM, DEFAULT, DEFAULT_GPUS, Guess
from penstock_services.estimator.core.resources.history import Run
from penstock_services.estimator.core.resources.rooms import Most, Rooms
from penstock_services.estimator.core.runs import About, Given

MAX_OWNERS = 1_000  # least recently used ones go; about 10 MB when full
JOBS_PER_OWNER = 64  # the latest: older ones say little about today's data
MAX_REMEMBERED = 4_096  # answers


class PastCores:
    """Owner → the cores of his latest trainings; bounded."""

    def __init__(self) -> None:
        self._owners: OrderedDict[str, deque[PastJob]] = OrderedDict()
        self.version = 0
        """Rises with every run."""

    def add(self, about: About, given: Given, run: Run) -> None:
        """A sound run; one without GPUs is no training."""
        busy = run.busy_cores
        cores = math.ceil(busy * CORES_HEADROOM) if 0 < busy <= MAX_CORES else given.cores
        if given.gpus < 1 or cores < 1:
            return
        self._owners.setdefault(about.owner, deque(maxlen=JOBS_PER_OWNER)).append(
            PastJob(about.category, cores, given.gpus)
        )
        self._owners.move_to_end(about.owner)
        self.version += 1
        if len(self._owners) > MAX_OWNERS:
            self._owners.popitem(last=False)

    def of(self, owner: str) -> tuple[PastJob, ...]:
        """Oldest first."""
        return tuple(self._owners.get(owner, ()))


class CoresTier:
    """Cores alone, with where they come from."""

    def __init__(self, past: PastCores, rooms: Rooms) -> None:
        self._past = past
        self._rooms = rooms
        self._known: dict[tuple[object, ...], Guess | None] = {}
        self._version = 0

    def guess(self, spec: JobSpec, key: bytes) -> Guess | None:
        gpus = DEFAULT_GPUS if spec.resources.gpus is None else spec.resources.gpus
        if not gpus:
            return None
        most = self._rooms.most(spec, gpus)
        if self._version != self._past.version or len(self._known) >= MAX_REMEMBERED:
            self._known.clear()
            self._version = self._past.version
        asked = (spec.owner, spec.category, spec.traits, spec.workers, gpus, most)
        if asked not in self._known:
            self._known[asked] = self._start(spec, gpus, most)
        return self._known[asked]

    def _start(self, spec: JobSpec, gpus: int, most: Most | None) -> Guess | None:
        past = self._past.of(spec.owner)
        if spec.category is None and not past:
            return None
        job = CoreJob(
            spec.category,
            pipelined="pipelined" in spec.traits,
            many_weights="many_weights" in spec.traits,
            heavy_preprocessing="heavy_preprocessing" in spec.traits,
            gpus=gpus,
            nodes=1 if most is None else math.ceil(spec.workers * gpus / max(1, most.gpus)),
        )
        start = n_start(job, past, MAX_CORES if most is None else most.cores, scaled=True)
        return Guess(
            tier="default",
            confidence=DEFAULT.confidence,
            source=DEFAULT.source,
            cores=start.cores,
            partly=f"cores: {start.reason}",
        )
