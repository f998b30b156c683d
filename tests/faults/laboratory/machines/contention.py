"""Contention on a machine: jobs without GPUs take cores or, where its processor can cap that, memory
bandwidth, that trainings beside them need."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.model.nouns.nodes import NodeSpec

if TYPE_CHECKING:
    from tests.faults.laboratory.machines.machine import Machine, TaskProcess

SLOWED = 1.5  # a training's step time beside a job that has more than this leaves:
LEAVES_CORES = 1.0
LEAVES_OF_ONE = 0.5  # where the time of cores can be capped
LEAVES_PERCENT = 50
WAITS = 0.4  # of the time a slowed training's threads wait for a core
OTHERS_MB_S, TRAINING_MB_S = 18_000, 500  # a node-reporter takes 20,000 for all that there is


@dataclass(slots=True)
class Used:
    """Counters of one task, until `at_s`."""

    at_s: float = 0.0
    waited_s: float = 0.0
    """For which its threads have waited for cores."""
    moved_mb: float = 0.0
    """Memory traffic."""


def caps_bandwidth(spec: NodeSpec) -> bool:
    """Whether its processor can cap memory bandwidth; then it counts the traffic, too."""
    return spec.bandwidth_cap == "resctrl"


def slowdown(machine: "Machine", process: "TaskProcess") -> float:
    """By how much its steps are longer than alone."""
    return SLOWED if _trains(process) and _contended(machine) else 1.0


def meter(machine: "Machine") -> None:
    """Adds up since the last call, as if all had been as it is now."""
    now_s, contended = machine.world.now_s, _contended(machine)
    for process in machine.processes.values():
        used = process.used
        passed_s = now_s - max(used.at_s, process.started_s)
        used.at_s = now_s
        if _trains(process):
            used.moved_mb += TRAINING_MB_S * passed_s
            if contended and not caps_bandwidth(machine.spec):
                used.waited_s += WAITS * passed_s
        else:
            used.moved_mb += OTHERS_MB_S * _share(process) * passed_s


def _contended(machine: "Machine") -> bool:
    others = list(_others(machine))
    if caps_bandwidth(machine.spec):
        return any(100 * _share(process) > LEAVES_PERCENT for process in others)
    leaves = LEAVES_CORES if machine.spec.bandwidth_cap == "none" else LEAVES_OF_ONE
    return any(len(process.cores) * _share(process) > leaves for process in others)


def _others(machine: "Machine") -> "Iterator[TaskProcess]":
    return (process for process in machine.processes.values() if not _trains(process))


def _trains(process: "TaskProcess") -> bool:
    """A training's parameter servers belong to it."""
    return bool(process.order.place.gpus) or process.order.place.role == "ps"


def _share(process: "TaskProcess") -> float:
    """Of the memory bandwidth, or of its cores' time, that it would use without a cap."""
    return (100 if process.percent is None else process.percent) / 100
