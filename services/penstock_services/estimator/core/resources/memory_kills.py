"""What is known of jobs that were killed for their host memory: the next one is promised more.

A kill says that the promise was too small, not by how much. Doubling finds any need in as many kills as it has
doublings, and promises less than twice of it in the end; a promise below the default is raised to that at once. Each owner's kills are his own: what others are promised
never rests on them, and they have a room of their own in memory, so that nobody's kills push out another's.

Memory of a GPU is another matter: when it is exhausted, the script fails like any other and nothing tells why. Hence
that teaches nothing here.
"""

import math
from collections import OrderedDict
from typing import NamedTuple

from penstock.model.types import JobSpec
from penstock_services.estimator.core.resources.estimate import DEFAULT_HOST_MEMORY_MIB
from penstock_services.estimator.core.resources.nearest import FARTHEST, distance
from penstock_services.estimator.core.runs import About

RAISED = 2.0  # times what was promised when it was killed
MAX_OWNERS = 1_000  # least recently killed ones go; about 10 MB when full
KILLS_PER_OWNER = 32  # the latest
REASON = "out_of_memory"
"""Under which such a run is set aside."""


class Kill(NamedTuple):
    """The largest promise, MiB, under which runs of one key were killed."""

    held_mib: float
    model: str | None
    batch_size: int | None


class Least(NamedTuple):
    """So much host memory must be promised, since a job was killed with `held_mib`."""

    memory_mib: int
    held_mib: int
    same_command: bool
    """Else another command of the same owner, with the same network."""


class Killed:
    """Owner → key → its kill; bounded."""

    def __init__(self) -> None:
        self.kills = 0
        """That taught something since the start."""
        self._owners: OrderedDict[str, OrderedDict[bytes, Kill]] = OrderedDict()

    def add(self, about: About, held_mib: float) -> None:
        """A worker was killed while it was promised so much; without a promise (0) that says nothing."""
        if not held_mib > 0:
            return
        self.kills += 1
        kills = self._owners.setdefault(about.owner, OrderedDict())
        known = kills.get(about.key)
        kills[about.key] = Kill(
            max(held_mib, known.held_mib if known else 0.0), about.model, about.batch_size
        )
        kills.move_to_end(about.key)
        self._owners.move_to_end(about.owner)
        if len(kills) > KILLS_PER_OWNER:
            kills.popitem(last=False)
        if len(self._owners) > MAX_OWNERS:
            self._owners.popitem(last=False)

    def ran(self, about: About, held_mib: float) -> None:
        """A sound run of this key that was promised so much. With more than the killed one had it says what the job
        needs, and the kill is forgotten; with as little it was luck."""
        kills = self._owners.get(about.owner)
        known = kills.get(about.key) if kills else None
        if kills and known and held_mib > known.held_mib:
            del kills[about.key]
            if not kills:
                del self._owners[about.owner]

    def least(self, spec: JobSpec, key: bytes, *, near: bool) -> Least | None:
        """What the owner's kills of this key say; with `near` also those of the same network, as far as runs are near."""
        kills = self._owners.get(spec.owner)
        if not kills:
            return None
        own = kills.get(key)
        if own is not None:
            return _least(own.held_mib, same_command=True)
        if not near or spec.model is None:
            return None
        held = [
            kill.held_mib
            for kill in kills.values()
            if kill.model == spec.model and distance(kill.batch_size, spec.batch_size) <= math.log(FARTHEST)
        ]
        return _least(max(held), same_command=False) if held else None


def _least(held_mib: float, *, same_command: bool) -> Least:
    return Least(
        max(math.ceil(RAISED * held_mib), DEFAULT_HOST_MEMORY_MIB), math.ceil(held_mib), same_command
    )
