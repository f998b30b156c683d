"""The invariants of a cell, checked after every step in tests and available to operators.

Each violation is one sentence with ids; an empty list means: sound. Source: architecture §3, Invariants.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from penstock.ledger.index import NOT_PLACEABLE, NodeIndex, Share, Thermometer
from penstock.ledger.masks import full_mask, mask_of
from penstock.ledger.state import HOLDING, CellState, JobState, NodeState
from penstock.model.transitions import TERMINAL, JobStatus, NodeStatus, TaskStatus
from penstock.model.types import WHOLE_GPU, TaskPlacement

LIVE = frozenset({TaskStatus.ASSIGNED, TaskStatus.RUNNING, TaskStatus.STOPPING})


def check(state: CellState) -> list[str]:
    """All violations. O(jobs + nodes): for tests, doctors and judges, not for the decision path."""
    found = [problem for node in state.nodes.values() for problem in _node(state, node)]
    found += [problem for job in state.jobs.values() for problem in _job(state, job)]
    found += _queue(state)
    found += _index(state)
    return found


def _node(state: CellState, node: NodeState) -> Iterator[str]:
    name, spec = node.spec.node_id, node.spec
    holders: dict[int, list[TaskPlacement]] = {}
    core_owner: dict[int, str] = {}
    memory_mib, bandwidth_mbps = spec.host_memory_mib, spec.bandwidth_mbps
    for task_id, job_id in node.tasks.items():
        job = state.jobs.get(job_id)
        if job is None or task_id not in job.tasks:
            yield f"node {name} holds {task_id}, which no live job knows"
            continue
        place = job.tasks[task_id].place
        if place.node_id != name:
            yield f"node {name} holds {task_id}, which was placed on {place.node_id}"
        for gpu in place.gpus:
            holders.setdefault(gpu, []).append(place)
        for core in place.cores:
            if core in core_owner:
                yield f"node {name} core {core} is given to both {core_owner[core]} and {task_id}"
            core_owner[core] = task_id
        memory_mib -= place.host_memory_mib
        bandwidth_mbps -= place.bandwidth_mbps
    uuids = node.gpu_uuids
    named = [uuid for uuid in uuids if uuid]
    if len(set(named)) < len(named):
        yield f"node {name} has two slots for one GPU: {', '.join(named)}"
    for gpu, places in holders.items():
        if gpu >= len(uuids) or not uuids[gpu]:
            yield f"node {name}: {', '.join(place.task_id for place in places)} hold slot {gpu}, which is no GPU's"
        if sum(place.gpu_share_milli for place in places) > WHOLE_GPU:
            tasks = " and ".join(f"{place.task_id} ({place.gpu_share_milli}/1000)" for place in places)
            yield f"node {name} gpu {gpu} is given to both {tasks}"
    if memory_mib < -node.overdrawn_memory_mib:
        yield f"node {name} promises {-memory_mib} MiB more memory than it has"
    if bandwidth_mbps < -node.overdrawn_bandwidth_mbps:
        yield f"node {name} promises {-bandwidth_mbps} Mbit/s more than it has"
    free = (
        node.free_gpu_mask,
        node.free_core_mask,
        node.free_host_memory_mib,
        node.free_bandwidth_mbps,
        node.shared,
    )
    right = (
        node.present_gpu_mask & ~mask_of(tuple(holders)),
        full_mask(spec.cores) & ~mask_of(tuple(core_owner)),
        memory_mib,
        bandwidth_mbps,
        {
            gpu: Share(
                WHOLE_GPU - sum(place.gpu_share_milli for place in places),
                node.gpu_memory_mib - sum(place.gpu_memory_mib for place in places),
            )
            for gpu, places in holders.items()
            if node.present_gpu_mask >> gpu & 1 and places[0].gpu_share_milli < WHOLE_GPU
        },
    )
    if free != right:
        yield f"node {name} books {free} as free, its tasks leave {right}"
    if node.status is NodeStatus.GONE and node.tasks:
        yield f"node {name} is gone but holds {', '.join(node.tasks)}"


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
    for task_id in live:
        node = state.nodes.get(job.tasks[task_id].place.node_id)
        if node is None or node.tasks.get(task_id) != job.job_id:
            yield f"task {task_id} lives, but its node does not hold it"
    if job.attempt - job.infrastructure_retries > job.spec.retry.max_attempts:
        yield f"job {job.job_id} is at attempt {job.attempt}, more than it may have"


def _queue(state: CellState) -> Iterator[str]:
    queued = {job.job_id for job in state.jobs.values() if job.in_line}
    listed = Counter(state.queue.values())
    if set(listed) != queued or any(count > 1 for count in listed.values()):
        yield f"the queue lists {sorted(listed)}, queued are {sorted(queued)}"
    holding = {job.order: job for job in state.jobs.values() if job.status in HOLDING}
    if state.holding != holding:
        yield f"orders {sorted(state.holding)} are listed as holding, {sorted(holding)} hold"


def _index(state: CellState) -> Iterator[str]:
    """The index must equal one built from nothing."""
    fresh = NodeIndex()
    for node in state.nodes.values():
        fresh.describe(node.bit, node.spec)
        fresh.refit(node.bit, len(node.spec.gpus), NOT_PLACEABLE, node.free())
        if state.sound_gpus[node.ordinal] != node.sound_gpus():
            yield f"node {node.spec.node_id} counts {state.sound_gpus[node.ordinal]} sound GPUs"
        if node.status is NodeStatus.GONE:
            fresh.lose(node.bit, node.spec)
        if node.cordon is not None:
            fresh.cordoned |= node.bit
        if node.entered != node.free():
            yield f"node {node.spec.node_id} is indexed as {node.entered}, but is {node.free()}"
    named = Counter(task.place.node_id for job in state.jobs.values() for task in job.tasks.values())
    if (counted := {node_id: node.named for node_id, node in state.nodes.items() if node.named}) != named:
        yield f"nodes count {counted} tasks of living attempts, attempts name {dict(named)}"
    forgettable = {
        (node.left_ms, node.ordinal): node_id
        for node_id, node in state.nodes.items()
        if node.status is NodeStatus.GONE and node.cordon is None and not named[node_id]
    }
    if state.forgettable != forgettable:
        yield f"forgettable are {sorted(forgettable.values())}, listed {list(state.forgettable.values())}"
    if {node.ordinal: node_id for node_id, node in state.nodes.items()} != {
        ordinal: node_id for ordinal, node_id in enumerate(state.node_at) if node_id
    } or state.node_at[-1:] == [""]:
        yield f"ordinals name {state.node_at}"
    for name in NodeIndex.__slots__:
        held, right = _plain(getattr(state.index, name)), _plain(getattr(fresh, name))
        if held != right:
            yield f"index {name} differs from one built anew"


def _plain(part: Any) -> Any:
    """To be compared: a thermometer keeps levels that no node reaches any more."""
    return [nodes for nodes in part.at_least if nodes] if isinstance(part, Thermometer) else part
