"""Run conditions of an attempt beside its placement (jobs that share its GPUs, its workers' cores, caps on
memory bandwidth), and which measurements of a disturbed run are not comparable.

A step time holds for the conditions in which it was measured, as for its placement. Source: Pollux (OSDI '21)
§4.1, whose agents measure the iterations of each allocation separately. Departure: an allocation there is
GPUs and nodes.
"""

from collections.abc import Mapping, Sequence
from enum import IntFlag
from types import MappingProxyType
from typing import NamedTuple

from penstock.model.nouns.types import TaskPlacement

FULL = 100  # percent of memory bandwidth: not capped


class Disturbance(IntFlag):
    """How a run differs from one that has its GPUs and the cores of its placement for itself
    from start to end."""

    SHARED = 1
    """Another job held a part of one of its GPUs for some time."""
    CORES = 2
    """Its cores were changed while it ran."""
    CAPPED = 4
    """Its memory bandwidth was capped for some time."""
    SHAPES = 8
    """Earlier work that it resumed was done with another number of workers."""
    UNKNOWN_WORK = 16
    """An earlier attempt ran, and whether this one resumed its work is not known."""
    BRIEFLY = 32
    """In place of `CORES` and `CAPPED`, where either held for a small part of its time (`progress.SMALL`):
    its cores were searched for, or it was slowed briefly."""


NONE = Disturbance(0)
NAMES: Mapping[Disturbance, str] = MappingProxyType(
    {
        Disturbance.SHARED: "shared a GPU",
        Disturbance.CORES: "cores changed",
        Disturbance.CAPPED: "memory bandwidth capped",
        Disturbance.SHAPES: "several shapes",
        Disturbance.UNKNOWN_WORK: "work of earlier attempts unknown",
        Disturbance.BRIEFLY: "cores changed or bandwidth capped for a small part of its time",
    }
)
SLOWED = Disturbance.SHARED | Disturbance.CORES | Disturbance.CAPPED

EXCLUDED: Mapping[str, Disturbance] = MappingProxyType(
    {
        "run_ms": SLOWED | Disturbance.SHAPES | Disturbance.UNKNOWN_WORK,
        "busy_cores": SLOWED
        | Disturbance.BRIEFLY,  # else cores that a search gave would count as the job's need
        "gpu_memory_mib": Disturbance.SHARED,  # measured on the device: it includes the neighbour's
        "gpu_utilisation_percent": SLOWED,
        "gpu_utilisation_std": SLOWED,
    }
)
"""Field of `Run` → the disturbances under which its measurement is not comparable.
Other fields are always comparable."""


def comparable(name: str, disturbed: float) -> bool:
    """Whether a run with these disturbances (`Run.disturbed`) teaches this field as well
    as an undisturbed one."""
    return not disturbed or not int(disturbed) & EXCLUDED.get(name, 0)


def reasons(disturbed: float) -> list[str]:
    """Texts for users."""
    return [name for flag, name in NAMES.items() if int(disturbed) & flag]


class Conditions(NamedTuple):
    """Conditions beside the placement. Workers in the order of their placement."""

    neighbours: tuple[str, ...] = ()
    """Jobs that hold a part of one of its GPUs, sorted."""
    cores: tuple[int, ...] = ()
    """Cores of each worker."""
    caps: tuple[int, ...] = ()
    """Percent of each worker's memory bandwidth; empty: no worker is capped."""

    def with_cores(self, worker: int, cores: int) -> "Conditions":
        return self._replace(cores=(*self.cores[:worker], cores, *self.cores[worker + 1 :]))

    def with_cap(self, worker: int, percent: int | None) -> "Conditions":
        caps = list(self.caps or (FULL,) * len(self.cores))
        caps[worker] = FULL if percent is None else percent
        return self._replace(caps=() if all(cap == FULL for cap in caps) else tuple(caps))

    def apart(self, placed: "Conditions") -> Disturbance:
        """The differences from the conditions of its placement."""
        found = NONE
        if self.neighbours:
            found |= Disturbance.SHARED
        if self.cores != placed.cores:
            found |= Disturbance.CORES
        if self.caps:
            found |= Disturbance.CAPPED
        return found


UNKNOWN_CONDITIONS = Conditions()


def placed(workers: Sequence[TaskPlacement]) -> Conditions:
    """The conditions at the start of an attempt, alone on its GPUs."""
    return Conditions(cores=tuple(len(place.cores) for place in workers))
