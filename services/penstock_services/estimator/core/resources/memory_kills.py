"""Out-of-memory tasks (killed, or an allocation failed) as lower bounds: the next attempt is promised more
memory.

Such a run shows that its limit was too small, not by how much: a lower bound. Doubling reaches any need in as
many attempts as it has doublings, and promises less than twice the need in the end; the first steps are
longer, since an attempt costs more than memory that is promised for one run. Runs affect only their own
owner: other owners' promises never depend on them.
"""

import math
from typing import NamedTuple

from penstock.model.jobs.job_spec import JobSpec
from penstock.model.nouns.types import Role
from penstock_services.estimator.core.learning.limits import KILLS, KILLS_OF_ONE
from penstock_services.estimator.core.learning.owner_table import OwnerTable
from penstock_services.estimator.core.records.runs import JobInfo
from penstock_services.estimator.core.resources.nearest import MAX_DISTANCE, distance

RAISED = 2.0  # times the limit under which it ran out of memory
FIRST_WORKER_MIB = (
    8_192  # a training that outgrew a guess: what most frameworks need with their loaders' buffers
)
FIRST_SERVER_MIB = 2_048  # twice the guess for parameter servers, of which a gang may have many
FIRST_GPU_MIB = 0  # doubled: a card's memory is no guess
REASON = "out_of_memory"
"""Reason with which such a run is rejected."""


class Kill(NamedTuple):
    """The largest limit, MiB, under which runs of one key ran out of memory."""

    promised_mib: float
    model: str | None
    batch_size: int | None


class Floor(NamedTuple):
    """So much memory must be promised, since a job ran out of `promised_mib`."""

    memory_mib: int
    promised_mib: int
    same_command: bool
    """False: it was another command of the same owner, with the same network."""


class MemoryKills:
    """Job key → its kill, of one kind of memory; bounded. No promise is raised to less than `first_mib`."""

    def __init__(self, first_mib: int) -> None:
        self._first_mib = first_mib
        self._kills: OwnerTable[bytes, Kill] = OwnerTable(KILLS, KILLS_OF_ONE)

    def __len__(self) -> int:
        return len(self._kills)

    def add(self, info: JobInfo, promised_mib: float) -> None:
        """A task ran out of memory under this limit; without a limit (0) nothing is learned."""
        if not promised_mib > 0:
            return
        known = self._kills.get(info.key, info.owner)
        promised_mib = max(promised_mib, known.promised_mib if known else 0.0)
        self._kills.put(info.key, info.owner, Kill(promised_mib, info.model, info.batch_size))

    def ran(self, info: JobInfo, promised_mib: float) -> None:
        """A sound run of this key that was promised so much. With a larger promise than the killed one's it
        shows the job's need, and the kill is deleted; with no more it was luck."""
        known = self._kills.get(info.key, info.owner)
        if known and promised_mib > known.promised_mib:
            self._kills.remove(info.key, info.owner)

    def floor(self, spec: JobSpec, key: bytes, *, near: bool) -> Floor | None:
        """From the owner's kills of this key; with `near` also from those of the same network, as far as runs
        count as near."""
        own = self._kills.get(key, spec.owner)
        if own is not None:
            return self._floor(own.promised_mib, same_command=True)
        if not near or spec.model is None:
            return None
        held = [
            kill.promised_mib
            for _, kill in self._kills.of_owner(spec.owner)
            if kill.model == spec.model and distance(kill.batch_size, spec.batch_size) <= MAX_DISTANCE
        ]
        return self._floor(max(held), same_command=False) if held else None

    def _floor(self, promised_mib: float, *, same_command: bool) -> Floor:
        raised_mib = max(math.ceil(RAISED * promised_mib), self._first_mib)
        return Floor(raised_mib, math.ceil(promised_mib), same_command)


class Exhausted:
    """All kills so far, by kind of memory. `server`: a parameter server's host memory."""

    def __init__(self) -> None:
        self.host = MemoryKills(FIRST_WORKER_MIB)
        self.gpu = MemoryKills(FIRST_GPU_MIB)
        self.server = MemoryKills(FIRST_SERVER_MIB)

    def add(self, info: JobInfo, memory: str, role: Role, limit_mib: float) -> None:
        """A task of this role ran out of this memory (as in `TaskExited.exhausted`) under this limit."""
        kills = self.gpu if memory == "gpu_memory" else self.server if role == "ps" else self.host
        kills.add(info, limit_mib)

    def ran(self, info: JobInfo, host_mib: float, gpu_mib: float) -> None:
        """A sound run, with these limits of its workers. For parameter servers no measurement could replace
        the raise."""
        self.host.ran(info, host_mib)
        self.gpu.ran(info, gpu_mib)
