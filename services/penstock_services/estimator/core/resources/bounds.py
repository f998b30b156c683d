"""What is done to learned needs before the user's word: raised after a kill, cut to the largest node."""

from penstock.model.types import WHOLE_GPU, JobSpec
from penstock_services.estimator.core.resources.estimate import DEFAULT_GPUS, MEMORY_PERCENT, Guess
from penstock_services.estimator.core.resources.memory_kills import Killed
from penstock_services.estimator.core.resources.rooms import Most, Rooms


class Bounds:
    """For `estimate`. What the cell knows is kept up to date by the caller."""

    def __init__(self, killed: Killed, rooms: Rooms) -> None:
        self._killed = killed
        self._rooms = rooms

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
        most = self._rooms.most(spec, gpus)
        least = self._killed.least(spec, key, near=found.tier != "history")
        if most is not None and _exceeds(found, most):
            margin = MEMORY_PERCENT if found.tier == "history" else None
            found = found._replace(
                cores=None if found.cores is None else min(found.cores, most.cores),
                host_memory_mib=_cut(found.host_memory_mib, most.host_memory_mib, margin),
                gpu_memory_mib=_cut(found.gpu_memory_mib, most.gpu_memory_mib, margin) if gpus else 0,
            )
        if least is None or asked.host_memory_mib is not None:
            return found
        raised = least.memory_mib if most is None else min(least.memory_mib, most.host_memory_mib)
        if raised <= (found.host_memory_mib or 0):
            return found
        whose = "this command" if least.same_command else f"the owner's {spec.model}"
        return found._replace(
            host_memory_mib=raised,
            source=f"{found.source}; host memory: more than the {least.held_mib} MiB that {whose} was killed with",
        )


def _exceeds(found: Guess, most: Most) -> bool:
    return (
        (found.cores or 0) > most.cores
        or (found.host_memory_mib or 0) > most.host_memory_mib
        or (found.gpu_memory_mib or 0) > most.gpu_memory_mib
    )


def _cut(value: int | None, most: int, margin_percent: int | None) -> int | None:
    """`value`, at most `most`; with a margin only if what it was put upon is not above `most` itself."""
    if value is None or value <= most:
        return value
    if margin_percent is not None and value > most * margin_percent / 100 + 1:
        return value
    return most
