"""Bounds on learned needs, before the user's request: raised after a kill for memory, cut to the largest node."""

from penstock.model.types import WHOLE_GPU, JobSpec
from penstock_services.estimator.core.node_capacity import NodeCapacity
from penstock_services.estimator.core.resources.estimate import DEFAULT_GPUS, MEMORY_PERCENT, Guess
from penstock_services.estimator.core.resources.memory_kills import MemoryKills


class Bounds:
    """For `estimate`."""

    def __init__(self, kills: MemoryKills, nodes: NodeCapacity) -> None:
        """Both are kept up to date by the caller."""
        self._kills = kills
        self._nodes = nodes

    def __call__(self, spec: JobSpec, key: bytes, found: Guess) -> Guess:
        """The guess with host memory of at least twice what a run like it was killed with, and nothing in it beyond the
        largest node that the job may use.

        A job's own history is cut by no more than its margin: where the job is known to need more than any node has,
        it shall end as unschedulable rather than be killed.
        """
        asked = spec.resources
        gpus = 1 if (asked.gpu_share_milli or WHOLE_GPU) < WHOLE_GPU else asked.gpus
        if gpus is None:
            gpus = DEFAULT_GPUS if found.gpus is None else found.gpus
        largest = self._nodes.max(spec, gpus)
        floor = self._kills.floor(spec, key, near=found.tier != "history")
        if largest is not None:
            margin = MEMORY_PERCENT if found.tier == "history" else None
            found = found._replace(
                cores=None if found.cores is None else min(found.cores, largest.cores),
                host_memory_mib=_cut(found.host_memory_mib, largest.host_memory_mib, margin),
                gpu_memory_mib=_cut(found.gpu_memory_mib, largest.gpu_memory_mib, margin) if gpus else 0,
            )
        if floor is None or asked.host_memory_mib is not None:
            return found
        raised = floor.memory_mib if largest is None else min(floor.memory_mib, largest.host_memory_mib)
        if raised <= (found.host_memory_mib or 0):
            return found
        whose = "this command" if floor.same_command else f"the owner's {spec.model}"
        return found._replace(
            host_memory_mib=raised,
            source=f"{found.source}; host memory: more than the {floor.promised_mib} MiB that {whose} was killed with",
        )


def _cut(value: int | None, limit: int, margin_percent: int | None) -> int | None:
    """`value`, at most `limit`; with a margin only if what it was put upon is not above `limit` itself."""
    if value is None or value <= limit:
        return value
    if margin_percent is not None and value > limit * margin_percent / 100 + 1:
        return value
    return limit
