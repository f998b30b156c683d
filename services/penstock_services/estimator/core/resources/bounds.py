"""Bounds on estimated resources, before the user's request: raised after a task ran out of memory, cut to
the largest node."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from penstock.model.jobs.job_spec import JobSpec
from penstock.model.nouns.types import MAX_GPUS_PER_NODE, WHOLE_GPU
from penstock_services.estimator.core.node_capacity import NodeCapacity
from penstock_services.estimator.core.resources.estimate import (
    DEFAULT_GPUS,
    MEMORY_PERCENT,
    PARAMETER_SERVER,
    Guess,
    server_of,
    worker_of,
)
from penstock_services.estimator.core.resources.memory_kills import Exhausted, Floor


class Raise(NamedTuple):
    """A kind of memory that a failed allocation may raise."""

    field: str
    """Field of `Guess`."""
    memory: str
    """Name for users."""
    limit: int | None
    """MiB, of the largest node; None: no node is known."""


class Bounds:
    """The bounds on `estimate`."""

    def __init__(self, exhausted: Exhausted, nodes: NodeCapacity) -> None:
        """Both are kept up to date by the caller."""
        self._exhausted = exhausted
        self._nodes = nodes

    def __call__(self, spec: JobSpec, key: bytes, found: Guess) -> Guess:
        """The guess with memory of at least twice the amount that a run like it ran out of, and no field
        beyond the largest node that the job may use.

        A job's own history is cut by no more than its margin: a job that is known to need more than any node
        has shall end as unschedulable rather than be killed.
        """
        asked = spec.resources
        gpus = 1 if (asked.gpu_share_milli or WHOLE_GPU) < WHOLE_GPU else asked.gpus
        if gpus is None:
            gpus = DEFAULT_GPUS if found.gpus is None else found.gpus
        largest = self._nodes.max(spec, gpus)
        near = found.tier != "history"
        if largest is not None:
            margin = MEMORY_PERCENT if found.tier == "history" else None
            found = found._replace(
                cores=None if found.cores is None else min(found.cores, largest.cores),
                host_memory_mib=_cut(found.host_memory_mib, largest.host_memory_mib, margin),
                gpu_memory_mib=_cut(found.gpu_memory_mib, largest.gpu_memory_mib, margin) if gpus else 0,
            )
        if asked.host_memory_mib is None:
            floor = self._exhausted.host.floor(spec, key, near=near)
            limit = None if largest is None else largest.host_memory_mib
            found = self._raised(spec, found, Raise("host_memory_mib", "host memory", limit), floor)
        if gpus and asked.gpu_memory_mib is None:
            floor = self._exhausted.gpu.floor(spec, key, near=near)
            limit = None if largest is None else largest.gpu_memory_mib
            found = self._raised(spec, found, Raise("gpu_memory_mib", "GPU memory", limit), floor)
        if spec.parameter_servers:
            floor = self._exhausted.server.floor(spec, key, near=True)
            servers_on = self._nodes.max(spec, 0)
            limit = None if servers_on is None else servers_on.host_memory_mib
            what = Raise("server_memory_mib", "host memory of parameter servers", limit)
            found = self._raised(spec, found, what, floor)
        return found

    def _raised(self, spec: JobSpec, found: Guess, what: Raise, floor: Floor | None) -> Guess:
        """The guess with the field raised to the floor, with the reason; unchanged where the floor is not
        higher, or no node has more.

        Raised at most so far that the gang fits the empty cell: a job that fails is better than one that
        waits for ever.
        """
        if floor is None:
            return found
        had = getattr(found, what.field) or (
            PARAMETER_SERVER.host_memory_mib if what.field == "server_memory_mib" else 0
        )
        for value in _candidates(floor.memory_mib, what.limit):
            if value <= had:
                break
            change: dict[str, Any] = {what.field: value}
            raised = found._replace(**change)
            if what.limit is None or self._nodes.hold(spec, worker_of(spec, raised), server_of(spec, raised)):
                whose = "this command" if floor.same_command else f"the owner's {spec.model}"
                why = f"{what.memory}: more than the {floor.promised_mib} MiB that {whose} ran out of"
                if value <= floor.promised_mib:
                    why = (
                        f"{what.memory}: the most that fits, though {whose} ran out of "
                        f"{floor.promised_mib} MiB"
                    )
                return raised._replace(raised=f"{found.raised}; {why}" if found.raised else why)
        return found


def _candidates(target: int, limit: int | None) -> Iterator[int]:
    """The target, at most the limit, and smaller ones, falling: so that two, three, … of a gang's tasks fit
    on a node."""
    if limit is None:
        yield target
        return
    yield min(target, limit)
    yield from (limit // tasks for tasks in range(2, MAX_GPUS_PER_NODE + 1) if limit // tasks < target)


def _cut(value: int | None, limit: int, margin_percent: int | None) -> int | None:
    """`value`, at most `limit`;
    with a margin only if the value without the margin is not above `limit` itself."""
    if value is None or value <= limit:
        return value
    if margin_percent is not None and value > limit * margin_percent / 100 + 1:
        return value
    return limit
