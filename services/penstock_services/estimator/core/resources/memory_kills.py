"""Jobs that were killed for their host memory (out of memory): the next one is promised more.

A kill shows that the promise was too small, not by how much. Doubling finds any need in as many kills as it has
doublings, and promises less than twice of it in the end; a promise below the default is raised to that at once. Each
owner's kills are his own: what others are promised never rests on them.

When a GPU's memory is exhausted, the script fails like any other and no cause is reported. Hence that teaches nothing here.
"""

import math
from typing import NamedTuple

from penstock.model.types import JobSpec
from penstock_services.estimator.core.limits import KILLS, KILLS_OF_ONE
from penstock_services.estimator.core.owner_table import OwnerTable
from penstock_services.estimator.core.resources.estimate import DEFAULT_HOST_MEMORY_MIB
from penstock_services.estimator.core.resources.nearest import MAX_DISTANCE, distance
from penstock_services.estimator.core.runs import JobInfo

RAISED = 2.0  # times what was promised when it was killed
REASON = "out_of_memory"
"""With which such a run is rejected."""


class Kill(NamedTuple):
    """The largest promise, MiB, under which runs of one key were killed."""

    promised_mib: float
    model: str | None
    batch_size: int | None


class Floor(NamedTuple):
    """So much host memory must be promised, since a job was killed with `promised_mib`."""

    memory_mib: int
    promised_mib: int
    same_command: bool
    """Else another command of the same owner, with the same network."""


class MemoryKills:
    """Job key → its kill; bounded."""

    def __init__(self) -> None:
        self._kills: OwnerTable[bytes, Kill] = OwnerTable(KILLS, KILLS_OF_ONE)

    def __len__(self) -> int:
        return len(self._kills)

    def add(self, info: JobInfo, promised_mib: float) -> None:
        """A worker was killed while it was promised so much; without a promise (0) it shows nothing."""
        if not promised_mib > 0:
            return
        known = self._kills.get(info.key, info.owner)
        promised_mib = max(promised_mib, known.promised_mib if known else 0.0)
        self._kills.put(info.key, info.owner, Kill(promised_mib, info.model, info.batch_size))

    def ran(self, info: JobInfo, promised_mib: float) -> None:
        """A sound run of this key that was promised so much. With more than the killed one had it shows what the job
        needs, and the kill is forgotten; with as little it was luck."""
        known = self._kills.get(info.key, info.owner)
        if known and promised_mib > known.promised_mib:
            self._kills.remove(info.key, info.owner)

    def floor(self, spec: JobSpec, key: bytes, *, near: bool) -> Floor | None:
        """By the owner's kills of this key; with `near` also by those of the same network, as far as runs are near."""
        own = self._kills.get(key, spec.owner)
        if own is not None:
            return _floor(own.promised_mib, same_command=True)
        if not near or spec.model is None:
            return None
        held = [
            kill.promised_mib
            for _, kill in self._kills.of_owner(spec.owner)
            if kill.model == spec.model and distance(kill.batch_size, spec.batch_size) <= MAX_DISTANCE
        ]
        return _floor(max(held), same_command=False) if held else None


def _floor(promised_mib: float, *, same_command: bool) -> Floor:
    return Floor(
        max(math.ceil(RAISED * promised_mib), DEFAULT_HOST_MEMORY_MIB), math.ceil(promised_mib), same_command
    )
