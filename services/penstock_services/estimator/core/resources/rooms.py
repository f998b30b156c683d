"""The largest node that a job may use: what is learned is cut to it, since a job that fits nowhere never runs."""

from collections import Counter
from typing import NamedTuple

from penstock.model.types import JobSpec, NodeSpec

MAX_REMEMBERED = 1_024  # answers; there are few kinds of questions


class Room(NamedTuple):
    """What a node has. `gpu_memory_mib`: of its smallest GPU, so much of each is given out."""

    gpus: int
    gpu_models: frozenset[str]
    cores: int
    host_memory_mib: int
    gpu_memory_mib: int


class Most(NamedTuple):
    """Of each resource the most that any node has which the job may use; not all of it need be on one."""

    gpus: int
    cores: int
    host_memory_mib: int
    gpu_memory_mib: int


def room_of(spec: NodeSpec) -> Room:
    return Room(
        len(spec.gpus),
        frozenset(gpu.model for gpu in spec.gpus),
        spec.cores,
        spec.host_memory_mib,
        min((gpu.memory_mib for gpu in spec.gpus), default=0),
    )


class Rooms:
    """The nodes of the cell, those that have left excepted. Answers are remembered until another kind of node is there."""

    def __init__(self) -> None:
        self._nodes: dict[str, Room] = {}
        self._kinds: Counter[Room] = Counter()
        self._known: dict[tuple[tuple[str, ...], int], Most | None] = {}

    def put(self, spec: NodeSpec) -> None:
        """The node joined or changed."""
        room = room_of(spec)
        if self._nodes.get(spec.node_id) == room:
            return
        self.remove(spec.node_id)
        self._nodes[spec.node_id] = room
        self._kinds[room] += 1
        if self._kinds[room] == 1:
            self._known.clear()

    def remove(self, node_id: str) -> None:
        """The node is gone; unknown ones are ignored."""
        room = self._nodes.pop(node_id, None)
        if room is None:
            return
        self._kinds[room] -= 1
        if not self._kinds[room]:
            del self._kinds[room]
            self._known.clear()

    def most(self, spec: JobSpec, gpus: int) -> Most | None:
        """For a worker with so many GPUs of the models that the job allows; None: there is no such node now."""
        asked = (spec.gpu_models if gpus else (), gpus)
        if asked not in self._known:
            if len(self._known) >= MAX_REMEMBERED:
                self._known.clear()
            self._known[asked] = self._most(*asked)
        return self._known[asked]

    def _most(self, allowed: tuple[str, ...], gpus: int) -> Most | None:
        fitting = [
            room
            for room in self._kinds
            if room.gpus >= gpus and (not allowed or room.gpu_models.intersection(allowed))
        ]
        if not fitting:
            return None
        return Most(
            max(room.gpus for room in fitting),
            max(room.cores for room in fitting),
            max(room.host_memory_mib for room in fitting),
            max(room.gpu_memory_mib for room in fitting),
        )
