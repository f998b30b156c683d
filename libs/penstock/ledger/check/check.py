"""The invariants of a cell, checked after every step in tests and available to operators.

Each violation is one sentence with ids; an empty list means that the state is sound. Source: architecture §3,
Invariants.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from penstock.ledger.check.check_groups import Lease, group_problems, lease_of, leases_on
from penstock.ledger.derived.ports import ports_of
from penstock.ledger.fold.evolve_arrays import gpus_of, without_gpus
from penstock.ledger.fold.evolve_moves import taken
from penstock.ledger.fold.evolve_sharing import present
from penstock.ledger.state.arrays import LARGE_GPUS
from penstock.ledger.state.index import NOT_PLACEABLE, NodeIndex, Share, Thermometer
from penstock.ledger.state.job.job_state import HOLDING, JobState
from penstock.ledger.state.masks import full_mask, mask_of
from penstock.ledger.state.node.distrust import TRUST_TIMER
from penstock.ledger.state.node.node_state import NodeState
from penstock.ledger.state.state import CellState
from penstock.ledger.state.timers import timer_id
from penstock.model.decisions.adjustments import MAX_CORE_CHANGES, MAX_CORE_PROBES, MAX_THROTTLES
from penstock.model.nouns.settings import MAX_BATCH_ARRIVALS
from penstock.model.nouns.transitions import TERMINAL, JobStatus, NodeStatus, TaskStatus
from penstock.model.nouns.types import WHOLE_GPU

LIVE = frozenset({TaskStatus.ASSIGNED, TaskStatus.RUNNING, TaskStatus.STOPPING})


def check(state: CellState) -> list[str]:
    """All violations. O(jobs + nodes): for tests and diagnosis, not for the decision path."""
    found = [problem for node in state.nodes.values() for problem in _node(state, node)]
    found += [problem for job in state.jobs.values() for problem in _job(state, job)]
    found += _queue(state)
    found += _arrays(state)
    found += _moves(state)
    found += _sharing(state)
    found += _plans(state)
    found += group_problems(state)
    found += _index(state)
    return found


def _node(state: CellState, node: NodeState) -> Iterator[str]:
    name = node.spec.node_id
    for task_id, job_id in node.tasks.items():
        job = state.jobs.get(job_id)
        if job is None or task_id not in job.tasks:
            yield f"node {name} holds {task_id}, which no live job knows"
        elif job.tasks[task_id].place.node_id != name:
            yield f"node {name} holds {task_id}, which was placed on {job.tasks[task_id].place.node_id}"
    leases = leases_on(state, node)
    for job_id in node.reserved:
        reserved = taken(state.jobs[job_id], name) if job_id in state.jobs else ()
        leases += (lease_of([place])._replace(holder=f"{place.task_id} (reserved)") for place in reserved)
    yield from _given(node, leases)
    yield from _booked(node, leases)
    ports = Counter(
        port
        for job_id in set(node.tasks.values()) & state.jobs.keys()
        for port in ports_of(state.jobs[job_id])
    )
    if twice := [port for port, jobs in ports.items() if jobs > 1]:
        yield f"node {name} has several jobs with the port {twice[0]}"
    cpu = mask_of(
        tuple(
            core
            for task_id, job_id in node.tasks.items()
            if job_id in state.jobs
            and task_id in state.jobs[job_id].tasks
            and without_gpus(state.jobs[job_id])
            for core in state.jobs[job_id].tasks[task_id].place.cores
        )
    )
    if cpu != node.cpu_core_mask:
        yield f"node {name} counts cores {node.cpu_core_mask:b} of jobs without GPUs, they hold {cpu:b}"
    if (doubt := node.distrust) is not None and doubt.probe and doubt.probe not in node.tasks.values():
        yield f"node {name} waits for its probe {doubt.probe}, which is not there"
    if doubt is not None and not (doubt.open or doubt.probe or timer_id(name, TRUST_TIMER) in state.timers):
        yield f"node {name} is distrusted for ever: no timer ends its pause"
    if node.status is NodeStatus.GONE and node.tasks:
        yield f"node {name} is gone but holds {', '.join(node.tasks)}"


def _given(node: NodeState, leases: list[Lease]) -> Iterator[str]:
    """No resource is allocated twice, or beyond the node's capacity."""
    name, uuids = node.spec.node_id, node.gpu_uuids
    core_owner: dict[int, str] = {}
    for lease in leases:
        for core in sorted(lease.cores):
            if core in core_owner:
                yield f"node {name} core {core} is given to both {core_owner[core]} and {lease.holder}"
            core_owner[core] = lease.holder
    named = [uuid for uuid in uuids if uuid]
    if len(set(named)) < len(named):
        yield f"node {name} has two slots for one GPU: {', '.join(named)}"
    for gpu, holders in _by_gpu(leases).items():
        if gpu >= len(uuids) or not uuids[gpu]:
            yield (
                f"node {name}: {', '.join(lease.holder for lease in holders)} hold slot {gpu}, which is no "
                "GPU's"
            )
        if sum(lease.gpu_share_milli for lease in holders) > WHOLE_GPU:
            tasks = " and ".join(f"{lease.holder} ({lease.gpu_share_milli}/1000)" for lease in holders)
            yield f"node {name} gpu {gpu} is given to both {tasks}"
    memory_mib = sum(lease.host_memory_mib for lease in leases) - node.spec.host_memory_mib
    bandwidth_mbps = sum(lease.bandwidth_mbps for lease in leases) - node.spec.bandwidth_mbps
    if memory_mib > node.overdrawn_memory_mib:
        yield f"node {name} promises {memory_mib} MiB more memory than it has"
    if bandwidth_mbps > node.overdrawn_bandwidth_mbps:
        yield f"node {name} promises {bandwidth_mbps} Mbit/s more than it has"


def _booked(node: NodeState, leases: list[Lease]) -> Iterator[str]:
    """The free resources are the capacity less what the tasks hold."""
    spec, holders = node.spec, _by_gpu(leases)
    free = (
        node.free_gpu_mask,
        node.free_core_mask,
        node.free_host_memory_mib,
        node.free_bandwidth_mbps,
        node.shared,
    )
    right = (
        node.present_gpu_mask & ~mask_of(tuple(holders)),
        full_mask(spec.cores) & ~mask_of(tuple(core for lease in leases for core in lease.cores)),
        spec.host_memory_mib - sum(lease.host_memory_mib for lease in leases),
        spec.bandwidth_mbps - sum(lease.bandwidth_mbps for lease in leases),
        {
            gpu: Share(
                WHOLE_GPU - sum(lease.gpu_share_milli for lease in held),
                node.gpu_memory_mib - sum(lease.gpu_memory_mib for lease in held),
            )
            for gpu, held in holders.items()
            if node.present_gpu_mask >> gpu & 1 and held[0].gpu_share_milli < WHOLE_GPU
        },
    )
    if free != right:
        yield f"node {spec.node_id} books {free} as free, its tasks leave {right}"


def _by_gpu(leases: list[Lease]) -> dict[int, list[Lease]]:
    holders: dict[int, list[Lease]] = {}
    for lease in leases:
        for gpu in lease.gpus:
            holders.setdefault(gpu, []).append(lease)
    return holders


def _adjusted(job: JobState) -> Iterator[str]:
    """The changes of its tasks by services are bounded, and a probe of fewer cores takes none away."""
    for task_id, task in job.tasks.items():
        if task.cores.probes > MAX_CORE_PROBES:
            yield f"{task_id} was tried with {task.cores.probes} numbers of cores"
        if not set(task.cores.trial) <= set(task.place.cores):
            yield f"{task_id} may use cores {task.cores.trial}, and holds {task.place.cores}"
    for counted, most, what in (
        (job.adjustments.core_changes, MAX_CORE_CHANGES, "changed the cores"),
        (job.adjustments.throttles, MAX_THROTTLES, "slowed tasks"),
    ):
        if counted > most * job.spec.workers:
            yield f"services have {what} of job {job.job_id} {counted} times"


def _job(state: CellState, job: JobState) -> Iterator[str]:
    live = {task_id for task_id, task in job.tasks.items() if task.status in LIVE}
    if job.status in TERMINAL:
        yield f"job {job.job_id} is {job.status} but still listed as live"
    if live and job.status not in HOLDING:
        yield f"job {job.job_id} is {job.status} but {', '.join(sorted(live))} live"
    if job.job_id in state.ended:
        yield f"job {job.job_id} is both live and ended"
    if job.status in (JobStatus.LAUNCHING, JobStatus.RUNNING) and len(job.tasks) != job.demand.tasks:
        yield f"job {job.job_id} has {len(job.tasks)} of {job.demand.tasks} tasks: a gang is all or nothing"
    yield from _adjusted(job)
    if not job.spec.fewest_workers <= job.workers <= job.spec.workers:
        yield (
            f"job {job.job_id} has {job.workers} workers, not {job.spec.fewest_workers} to {job.spec.workers}"
        )
    for task_id in live:
        node = state.nodes.get(job.tasks[task_id].place.node_id)
        if node is None or node.tasks.get(task_id) != job.job_id:
            yield f"task {task_id} lives, but its node does not hold it"
    if job.attempt - job.retries.infrastructure > job.spec.retry.max_attempts:
        yield f"job {job.job_id} is at attempt {job.attempt}, more than it may have"


def _queue(state: CellState) -> Iterator[str]:
    queued = {job.job_id for job in state.jobs.values() if job.in_line}
    listed = Counter(state.queue.values())
    if set(listed) != queued or any(count > 1 for count in listed.values()):
        yield f"the queue lists {sorted(listed)}, queued are {sorted(queued)}"
    holding = {job.order: job for job in state.jobs.values() if job.status in HOLDING}
    if state.holding != holding:
        yield f"orders {sorted(state.holding)} are listed as holding, {sorted(holding)} hold"
    stopping = {order: job for order, job in holding.items() if job.status is JobStatus.STOPPING}
    if state.stopping != stopping:
        yield f"orders {sorted(state.stopping)} are listed as stopping, {sorted(stopping)} stop"


def _moves(state: CellState) -> Iterator[str]:
    """A target is reserved as long as its job is being stopped for the move, and no longer."""
    moving = {job.order: job for job in state.jobs.values() if job.target}
    if state.moving != moving:
        yield f"orders {sorted(state.moving)} are listed as moving, {sorted(moving)} move"
    for job in moving.values():
        if job.status is not JobStatus.STOPPING or job.stop.reason != "migrated":
            yield f"job {job.job_id} is {job.status} ({job.stop.reason}), and a target is reserved for it"
    named = {(place.node_id, job.job_id) for job in moving.values() for place in job.target}
    reserved = {(node_id, job_id) for node_id, node in state.nodes.items() for job_id in node.reserved}
    if reserved != named:
        yield f"nodes reserve targets for {sorted(reserved)}, moves name {sorted(named)}"


def _sharing(state: CellState) -> Iterator[str]:
    """Each job's `sharing` matches what the nodes hold,
    and no job whose GPU was shared counts as having run alone."""
    for job in state.jobs.values():
        if job.sharing.jobs != (right := present(state, job, {})):
            yield f"job {job.job_id} shares GPUs with {right}, and is known to share with {job.sharing.jobs}"
        if right and not job.sharing.ever:
            yield f"job {job.job_id} shares GPUs with {right}, and counts as one that ran alone"


def _plans(state: CellState) -> Iterator[str]:
    """Nodes are reserved only for waiting jobs, and a window for batch plans has a timer."""
    for job_id in state.planned:
        status = state.jobs[job_id].status if job_id in state.jobs else None
        if status not in (JobStatus.QUEUED, JobStatus.STOPPING):
            yield f"nodes are reserved for {job_id}, which is {status or 'unknown'}"
    if state.window_until_ms and timer_id("cell", "batch_window") not in state.timers:
        yield f"a batch window is open until {state.window_until_ms}, without a timer"
    if len(state.arrivals) > MAX_BATCH_ARRIVALS or sorted(state.arrivals) != state.arrivals:
        yield f"the arrivals {state.arrivals} are too many or not in order"


def _arrays(state: CellState) -> Iterator[str]:
    """The GPUs that jobs ask for are counted, and nodes reserve cores where the arrays have sizes."""
    asked = [gpus_of(job) for job in state.jobs.values()]
    large = sum(gpus for gpus in asked if gpus >= LARGE_GPUS)
    counted = state.arrays.large_gpus, state.arrays.small_gpus
    small = sum(asked) - large
    if [job.array.counted_gpus for job in state.jobs.values()] == asked and counted != (large, small):
        yield f"the arrays count {counted} GPUs, jobs ask for {large} and {small}"
    for node in state.nodes.values():
        if (node.reserved_cores < 0) != (state.arrays.cores_per_gpu_milli < 0):
            yield f"node {node.spec.node_id} reserves {node.reserved_cores} cores"


def _gpus(node: NodeState) -> tuple[tuple[str, ...], int]:
    """What `NodeState.read_gpus` computes: UUIDs by slot, and the memory of the smallest GPU."""
    gpus = node.spec.gpus
    return node.slots or tuple(gpu.uuid for gpu in gpus), min((gpu.memory_mib for gpu in gpus), default=0)


def _index(state: CellState) -> Iterator[str]:
    """The index must equal one built from scratch."""
    fresh = NodeIndex()
    if state.total_sound_gpus != sum(state.sound_gpus):
        yield f"the cell counts {state.total_sound_gpus} sound GPUs, its nodes {sum(state.sound_gpus)}"
    for node in state.nodes.values():
        fresh.describe(node.bit, node.spec)
        fresh.refit(node.bit, len(node.spec.gpus), NOT_PLACEABLE, node.free())
        if state.sound_gpus[node.ordinal] != node.sound_gpus():
            yield f"node {node.spec.node_id} counts {state.sound_gpus[node.ordinal]} sound GPUs"
        if node.status is NodeStatus.GONE:
            fresh.lose(node.bit, node.spec)
        if node.cordon is not None:
            fresh.cordoned |= node.bit
        if node.distrust is not None:
            fresh.distrusted |= node.bit
        if (node.gpu_uuids, node.gpu_memory_mib) != _gpus(node):
            yield (
                f"node {node.spec.node_id} reads {node.gpu_uuids}, {node.gpu_memory_mib} MiB; its GPUs are "
                f"{_gpus(node)}"
            )
        if node.entered != node.free():
            yield f"node {node.spec.node_id} is indexed as {node.entered}, but is {node.free()}"
    named = Counter(task.place.node_id for job in state.jobs.values() for task in job.tasks.values())
    if (counted := {node_id: node.named for node_id, node in state.nodes.items() if node.named}) != named:
        yield f"nodes count {counted} tasks of living attempts, attempts name {dict(named)}"
    droppable = {
        (node.left_ms, node.ordinal): node_id
        for node_id, node in state.nodes.items()
        if node.status is NodeStatus.GONE and node.cordon is None and not named[node_id]
    }
    if state.droppable != droppable:
        yield f"droppable are {sorted(droppable.values())}, listed {list(state.droppable.values())}"
    if {node.ordinal: node_id for node_id, node in state.nodes.items()} != {
        ordinal: node_id for ordinal, node_id in enumerate(state.node_at) if node_id
    } or state.node_at[-1:] == [""]:
        yield f"ordinals name {state.node_at}"
    for name in NodeIndex.__slots__:
        held, right = _plain(getattr(state.index, name)), _plain(getattr(fresh, name))
        if held != right:
            yield f"index {name} differs from one built anew"


def _plain(part: Any) -> Any:
    """A comparable form: a thermometer retains levels that no node reaches any more."""
    return [nodes for nodes in part.at_least if nodes] if isinstance(part, Thermometer) else part
