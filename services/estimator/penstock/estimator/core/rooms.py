"""The largest node that a job may use: what is learned is cut to it, since a job that fits nowhere never runs."""

from collections import Counter
from typing import NamedTuple

from penstock.cluster.nouns import JobSpec, NodeSpec


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
    """The nodes of the cell, those that have left excepted. Questions cost as many steps as there are kinds of nodes."""

    def __init__(self) -> None:
        self._nodes: dict[str, Room] = {}
        self._kinds: Counter[Room] = Counter()

    def put(self, spec: NodeSpec) -> None:
        """The node joined or changed."""
        self.remove(spec.node_id)
        room = self._nodes[spec.node_id] = room_of(spec)
        self._kinds[room] += 1

    def remove(self, node_id: str) -> None:
        """The node is gone; unknown ones are ignored."""
        room = self._nodes.pop(node_id, None)
        if room is not None:
            self._kinds[room] -= 1
            if not self._kinds[room]:
                del self._kinds[room]

    def most(self, spec: JobSpec, gpus: int) -> Most | None:
        """For a worker with so many GPUs of the models that the job allows; None: there is no such node now."""
        allowed = spec.gpu_models
        fitting = [
            room
            for room in self._kinds
            if room.gpus >= gpus and (not gpus or not allowed or room.gpu_models.intersection(allowed))
        ]
        if not fitting:
            return None
        return Most(
            max(room.gpus for room in fitting),
            max(room.cores for room in fitting),
            max(room.host_memory_mib for room in fitting),
            max(room.gpu_memory_mib for room in fitting),
        )
