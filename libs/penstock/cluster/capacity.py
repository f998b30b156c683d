"""Feasibility test: whether a gang would fit the empty cell, the test behind *never*.

It tests node shapes, of which a cell has few, so that the cost does not grow with the number of nodes. Gone
nodes do not count; silent nodes and faulted GPUs do, since both may come back. A false alarm would end a job
that could have run, and a missing one would let it wait for ever: the test is exact, with parameter servers,
too.
"""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from penstock.cluster.gang import EVERYWHERE
from penstock.cluster.reasons import Reason
from penstock.cluster.two_roles import Beside, Role, arranged, beside
from penstock.ledger.state.index import Free, NodeIndex, NodeShape, Share
from penstock.ledger.state.job.demand import Demand
from penstock.ledger.state.state import CellState
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.nouns.allowed import Where, models_of
from penstock.model.nouns.gpu_names import allows, listed
from penstock.model.nouns.types import WHOLE_GPU, ResourceVector

Shapes = list[tuple[NodeShape, int]]
"""Shapes with the number of nodes of each, ≥ 1."""


NEEDS = (
    (Reason.NEVER_FITS_GPUS, "gpus", "GPUs"),
    (Reason.NEVER_FITS_GPU_MEMORY, "gpu_memory_mib", "MiB of GPU memory"),
    (Reason.NEVER_FITS_CORES, "cores", "cores"),
    (Reason.NEVER_FITS_HOST_MEMORY, "host_memory_mib", "MiB of memory"),
    (Reason.NEVER_FITS_BANDWIDTH, "bandwidth_mbps", "Mbit/s"),
)
"""(reason, field of `ResourceVector` and `NodeShape`, unit), in the order of the tests."""


class Shortfall(NamedTuple):
    """Why a gang can never run in this cell."""

    reason: Reason
    detail: str


def never_fits(state: CellState, demand: Demand) -> str | None:
    """`reason: detail` when not even the empty cell can hold the gang, else None.
    None if there is no node."""
    short = shortfall(state.index, demand)
    return None if short is None else f"{short.reason}: {short.detail}"


def shortfall(index: NodeIndex, demand: Demand) -> Shortfall | None:
    """The first resource that the empty cell lacks;
    O(shapes), and less for a gang that fits the first ones."""
    roles = [("worker", demand.worker, demand.workers)]
    if demand.parameter_servers:
        roles.append(("parameter server", demand.parameter_server, demand.parameter_servers))
    where = demand.where
    within = index.within(where)
    for role, need, wanted in roles:
        fits = _capacity(index, need, wanted, where, within)
        if fits < wanted:
            shapes = _alive(index, within)
            if not shapes:
                return _no_node(index, where) if _alive(index, EVERYWHERE) else None
            return _one_task(shapes, role, need, where) or Shortfall(
                Reason.NEVER_FITS_GANG,
                f"{wanted} {role}s must run at once; the empty cell has room for {fits}",
            )
    return _together(_alive(index, within), demand) if demand.parameter_servers else None


def _no_node(index: NodeIndex, where: Where) -> Shortfall:
    """None of the cell's nodes is allowed."""
    if not where or (not where.image and _alive(index, index.within(where._replace(image=True)))):
        without = ", ".join((*JobSpec.NOT_AS_IMAGE, "checkpoint: sdk"))
        needs = f"it needs `environment: {{container: IMAGE}}`, and none of {without}"
        detail = f"the nodes that it allows run images alone: {needs}"
        return Shortfall(Reason.NEVER_FITS_NODES, detail)
    only, exclude = (where.only, where.exclude) if where else ((), ())
    allowed = f"allowed are {', '.join(only) or 'all'}"
    without = f" without {', '.join(exclude)}" if exclude else ""
    return Shortfall(Reason.NEVER_FITS_NODES, f"{allowed}{without}; no node of the cell is one of these")


def _alive(index: NodeIndex, within: int) -> Shapes:
    usable = within & ~index.gone
    counted = ((shape, (nodes & usable).bit_count()) for shape, nodes in index.shape.items())
    return [(shape, count) for shape, count in counted if count]


def _capacity(index: NodeIndex, need: ResourceVector, wanted: int, where: Where, within: int) -> int:
    """How many tasks of one role the empty cell holds, if the other role did not exist; counts up to
    `wanted`.

    Exact: equal tasks never block each other.
    """
    fits, usable = 0, within & ~index.gone
    for shape, nodes in index.shape.items():
        each = slots(shape, need, where, wanted)
        if each:
            fits += each * (nodes & usable).bit_count()
            if fits >= wanted:
                break
    return fits


def suits(shape: NodeShape, need: ResourceVector, where: Where) -> bool:
    """Whether an empty node of this shape can hold one task."""
    return slots(shape, need, where, 1) == 1


def slots(shape: NodeShape, need: ResourceVector, where: Where, limit: int) -> int:
    """How many such tasks an empty node of this shape holds at once, at most `limit`."""
    if need.gpus and (
        not allows(models_of(where), shape.gpu_model) or shape.gpu_memory_mib < need.gpu_memory_mib
    ):
        return 0
    fits = limit
    if need.gpus:
        fits = min(fits, shape.gpus // need.gpus)
        if need.gpu_share_milli < WHOLE_GPU:
            each = WHOLE_GPU // need.gpu_share_milli if shape.shares_gpus else 1
            if need.gpu_memory_mib:
                each = min(each, shape.gpu_memory_mib // need.gpu_memory_mib)
            fits = min(limit, shape.gpus * each)
    if need.cores:
        fits = min(fits, shape.cores // need.cores)
    if need.host_memory_mib:
        fits = min(fits, shape.host_memory_mib // need.host_memory_mib)
    if need.bandwidth_mbps:
        fits = min(fits, shape.bandwidth_mbps // need.bandwidth_mbps)
    return fits


def _one_task(shapes: Shapes, role: str, need: ResourceVector, where: Where) -> Shortfall | None:
    """Filters the shapes by one resource after the other; the resource that leaves none is the reason."""
    left: Iterable[NodeShape] = [shape for shape, _ in shapes]
    for reason, name, unit in NEEDS if need.gpus else NEEDS[2:]:
        asked = getattr(need, name)
        largest = max(getattr(shape, name) for shape in left)
        if largest < asked:
            suitable = "" if reason is Reason.NEVER_FITS_GPUS else "suitable "
            return Shortfall(
                reason, f"one {role} needs {asked} {unit}; the largest {suitable}node has {largest}"
            )
        left = [shape for shape in left if getattr(shape, name) >= asked]
        if reason is Reason.NEVER_FITS_GPUS and (allowed := models_of(where)):
            left = [shape for shape in left if allows(allowed, shape.gpu_model)]
            if not left:
                return Shortfall(Reason.NEVER_FITS_GPU_MODEL, _no_such_model(shapes, need.gpus, allowed))
    return None


def _no_such_model(shapes: Shapes, gpus: int, gpu_models: tuple[str, ...]) -> str:
    """Which models exist here, and how many GPUs of each: `no node has an A100; V100: 8`."""
    counts = Counter[str]()
    for shape, count in shapes:
        counts[shape.gpu_model or "mixed"] += shape.gpus * count
    here = ", ".join(f"{model}: {count}" for model, count in sorted(counts.items()) if count)
    most = max((shape.gpus for shape, _ in shapes if allows(gpu_models, shape.gpu_model)), default=0)
    if most:
        return f"no node has {gpus} GPUs of {' or '.join(gpu_models)}; the largest has {most}; {here}"
    return f"no node has {listed(gpu_models)}; {here}"


def _together(shapes: Shapes, demand: Demand) -> Shortfall | None:
    """Both roles: the total demand of all tasks must not exceed the total capacity of all usable nodes."""
    worker, server = demand.worker, demand.parameter_server
    usable = [
        (shape, count)
        for shape, count in shapes
        if suits(shape, worker, demand.where) or suits(shape, server, demand.where)
    ]
    whole = worker.gpu_share_milli == server.gpu_share_milli == WHOLE_GPU
    for reason, name, unit in NEEDS:
        if reason is Reason.NEVER_FITS_GPU_MEMORY:
            continue  # each GPU has its own memory
        total = demand.workers * getattr(worker, name) + demand.parameter_servers * getattr(server, name)
        has = sum(getattr(shape, name) * count for shape, count in usable)
        if reason is Reason.NEVER_FITS_GPUS and not whole:
            unit, has = "thousandths of GPUs", has * WHOLE_GPU
            total = sum(need.gpus * need.gpu_share_milli for need in demand.needs())
        if total > has:
            return Shortfall(
                Reason.NEVER_FITS_GANG, f"all tasks together need {total} {unit}; suitable nodes have {has}"
            )
    tables = [
        table for shape, count in usable for table in [_beside(shape, demand)] * min(count, demand.tasks)
    ]
    if arranged(tables, demand.workers, demand.parameter_servers) is None:
        return Shortfall(
            Reason.NEVER_FITS_GANG,
            "its workers and parameter servers fit the empty cell alone, but in no arrangement together; "
            "ask for less per task, or for fewer tasks",
        )
    return None


def _beside(shape: NodeShape, demand: Demand) -> Beside:
    """How many servers an empty node of this shape holds beside its workers."""
    free = Free(shape.gpus, shape.cores, shape.host_memory_mib, shape.bandwidth_mbps)
    worker, server = (
        Role(
            need,
            count if suits(shape, need, demand.where) else 0,
            Share(WHOLE_GPU, shape.gpu_memory_mib)
            if shape.shares_gpus
            else Share(need.gpu_share_milli, need.gpu_memory_mib),
        )
        for need, count in (
            (demand.worker, demand.workers),
            (demand.parameter_server, demand.parameter_servers),
        )
    )
    return beside(free, worker, server)
