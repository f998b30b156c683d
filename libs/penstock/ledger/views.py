"""Rows of jobs, tasks, nodes and GPUs for the read model's tables and for answers: one shape for both.

The projector writes these rows to Postgres, and the gateway answers with them from its replica: both agree,
since both call these functions on the same fold. Keys are column names; nested values are JSON fragments.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
import orjson

from penstock.ledger.derived.resuming import resumed
from penstock.ledger.fold.evolve_moves import taken
from penstock.ledger.state.index import bits
from penstock.ledger.state.job.adjusted import Adjustment
from penstock.ledger.state.job.job_state import JobState, TaskState
from penstock.ledger.state.lease import proven_ms
from penstock.ledger.state.node.node_state import NodeState
from penstock.ledger.state.state import CellState
from penstock.model.nouns.transitions import NodeStatus, TaskStatus
from penstock.model.nouns.types import WHOLE_GPU, Value

Row = dict[str, Any]

MAX_PID = 1 << 31  # no kernel assigns larger ones; a larger value would not fit the column


def fragment(value: Value | None) -> orjson.Fragment | None:
    """The value as a piece of JSON inside a row, with all of its fields; None stays None."""
    return None if value is None else orjson.Fragment(msgspec.json.encode(value))


class Ending(NamedTuple):
    """How and when a job ended."""

    outcome: str
    exit_code: int | None
    reason: str
    ended_ms: int


def job_row(job: JobState, seq: int, ending: Ending | None = None) -> Row:
    """Row of a job. `seq`: of the last record that changed it. Times in ms since the epoch, None where not
    (yet) reached."""
    spec = job.spec
    return {
        **job_changes(job, seq, ending),
        "name": spec.name,
        "owner": spec.owner,
        "model": spec.model,
        "workers": job.workers,
        "parameter_servers": spec.parameter_servers,
        "submitted_seq": job.order,
        "submitted_ms": job.submitted_ms,
        "labels": spec.labels,
        "estimate": fragment(job.estimate),
        "spec": fragment(spec),
    }


def job_changes(job: JobState, seq: int, ending: Ending | None = None) -> Row:
    """The part of `job_row` that changes after the job's submission and its estimates; the rest is most of
    the row's bytes."""
    placed = job.tasks if job.placed_ms is not None else {}
    return {
        "job_id": job.job_id,
        "seq": seq,
        "status": str(job.status),
        "attempt": job.attempt,
        "infrastructure_retries": job.retries.infrastructure,
        "token": job.token or None,
        "queued_ms": job.queued_ms,
        "placed_ms": job.placed_ms,
        "running_ms": job.running_ms,
        "ended_ms": None if ending is None else ending.ended_ms,
        "outcome": None if ending is None else ending.outcome,
        "exit_code": job.exit.code if ending is None else ending.exit_code,
        "reason": job.exit.failure if ending is None else ending.reason,
        "stop_reason": job.stop.reason,
        "unschedulable": job.unschedulable or None,
        "held": fragment(job.held),
        "nodes": list(dict.fromkeys(task.place.node_id for task in placed.values())),
        "gpus": sum(len(task.place.gpus) for task in placed.values()),
        "cores": sum(len(task.used_cores) for task in placed.values()),
    }


def adjustments(job: JobState) -> list[Row]:
    """Changes of cores and memory bandwidth of its running tasks: the desired value, the service or user that
    asked for it, and what enforces it.

    `enforced` and `problem` are empty until the task's node has answered. Sorted by task.
    """
    found = []
    for task_id, task in sorted(job.tasks.items()):
        about: tuple[tuple[str, Adjustment | None, Any], ...] = (
            ("cores", task.cores.adjusted, list(task.used_cores)),
            ("memory_bandwidth", task.bandwidth_adjusted, task.memory_bandwidth_percent),
        )
        for what, known, value in about:
            if known is not None:
                adjusted = {"by": known.by, "reason": known.reason, "at_ms": known.at_ms}
                answered = {"enforced": known.enforced, "problem": known.problem}
                found.append({"task_id": task_id, "what": what, "value": value, **adjusted, **answered})
    return found


def checkpoint(state: CellState, job: JobState) -> Row | None:
    """Its latest checkpoint, of any attempt: location, progress, how long saving took, and why a later
    attempt began without it. None: it has none."""
    found = job.saving.checkpoint
    if found is None:
        return None
    row = msgspec.structs.asdict(found)
    if job.attempt > found.attempt and not found.problem and job.tasks and resumed(state, job) is None:
        nodes = ", ".join(sorted({task.place.node_id for task in job.tasks.values()}))
        row["problem"] = (
            f"its tasks are on {nodes}, and not all of these have it; give the nodes a shared folder "
            "(--checkpoint-shared)"
        )
    return row


def move(job: JobState) -> Row | None:
    """Its latest move: the proposer, the target and the outcome. None: it was never moved."""
    found = job.moves.latest
    if found is None:
        return None
    row = msgspec.structs.asdict(found)
    return {name: row[name] for name in ("attempt", "nodes", "by", "reason", "at_ms", "outcome", "problem")}


def unproven(nodes: Mapping[str, NodeState], job: JobState) -> list[dict[str, str]]:
    """The job's tasks on silent nodes: whether they run,
    and whether a stop order has arrived, is not known."""
    return [
        {
            "task_id": task_id,
            "node_id": task.place.node_id,
            "node": str(nodes[task.place.node_id].status),
            "task": str(task.status),
        }
        for task_id, task in job.tasks.items()
        if task.status is not TaskStatus.EXITED and nodes[task.place.node_id].status is not NodeStatus.READY
    ]


def doubt(state: CellState, node: NodeState) -> Row | None:
    """Why a node is suspect, since when, when its probe was in the log, and when its tasks will be proven
    dead unless it answers.

    Times in ms of the ledger; None where not (yet) known. None: it is not suspect.
    """
    found = node.suspicion
    if found is None:
        return None
    return {
        "reason": found.reason,
        "at_ms": found.at_ms,
        "probed_ms": found.sent_ms or None,
        "proven_ms": proven_ms(node, state),
    }


def distrust(node: NodeState) -> Row | None:
    """Why nothing new is placed on a node or on some of its GPUs, since when, and which probe it takes.

    `gpus`: their slots; empty: the whole node. `until_ms`: the ledger's time from which a probe may start
    there; `probe`: the job that is it; null: none is. None: the node is trusted.
    """
    found = node.distrust
    if found is None:
        return None
    return {
        "reason": found.reason,
        "at_ms": found.at_ms,
        "gpus": list(bits(found.gpu_mask)),
        "until_ms": found.until_ms,
        "probe": found.probe or None,
    }


class TaskOf(NamedTuple):
    """A task with the fields of its job that its row needs."""

    task: TaskState
    job_id: str
    attempt: int
    token: int
    assigned_ms: int | None
    gpu_uuids: list[str]


def task_of(nodes: Mapping[str, NodeState], job: JobState, task: TaskState) -> TaskOf:
    """The row's input for a task that still holds its place: later its slots may belong to other GPUs."""
    slots = task.place.gpus
    uuids = nodes[task.place.node_id].gpu_uuids if slots else ()
    return TaskOf(task, job.job_id, job.attempt, job.token, job.placed_ms, [uuids[slot] for slot in slots])


def task_row(found: TaskOf, exited: Any = None) -> Row:
    """Row of a task. `exited`: the `TaskExited` fact, for what only it contains (usage, signal, detail)."""
    task, place = found.task, found.task.place
    return {
        "task_id": place.task_id,
        "job_id": found.job_id,
        "attempt": found.attempt,
        "token": found.token,
        "role": place.role,
        "rank": place.rank,
        "node_id": place.node_id,
        "gpus": place.gpus,
        "cores": place.cores,
        "host_memory_mib": place.host_memory_mib,
        "gpu_memory_mib": place.gpu_memory_mib,
        "bandwidth_mbps": place.bandwidth_mbps,
        "status": str(task.status),
        "pid": task.pid if task.pid is not None and task.pid <= MAX_PID else None,
        "assigned_ms": found.assigned_ms,
        "started_ms": task.started_ms,
        "exited_ms": task.exit.at_ms,
        "exit_code": task.exit.code,
        "cause": task.exit.cause or None,
        "signal": None if exited is None else exited.signal,
        "detail": None if exited is None else exited.detail,
        "usage": None if exited is None else fragment(exited.usage),
        "gpu_uuids": found.gpu_uuids,
    }


def node_row(node: NodeState, seq: int) -> Row:
    """Row of a node: its capacity, and the part that no task holds (whatever the node's status)."""
    spec = node.spec
    return {
        "node_id": spec.node_id,
        "seq": seq,
        "status": str(node.status),
        "rack": spec.rack,
        "domain": spec.domain,
        "address": spec.address,
        "boot_id": spec.boot_id,
        "gpu_model": spec.gpus[0].model if spec.gpus else None,
        "gpus": len(spec.gpus),
        "gpus_free": node.healthy_gpu_mask.bit_count(),
        "gpus_faulted": node.faulted_gpu_mask.bit_count(),
        "cores": spec.cores,
        "cores_free": node.free_core_mask.bit_count(),
        "host_memory_mib": spec.host_memory_mib,
        "host_memory_free_mib": node.free_host_memory_mib,
        "bandwidth_mbps": spec.bandwidth_mbps,
        "bandwidth_free_mbps": node.free_bandwidth_mbps,
        "isolation": fragment(spec.isolation),
        "measures": fragment(spec.measures),
        "shares_gpus": spec.shares_gpus,
        "leaving": node.leaving,
        "cordon": fragment(node.cordon),
        "tasks": len(node.tasks),
    }


Owners = dict[tuple[str, int], dict[str, str]]
"""(node id, slot) → task id → job id of the tasks that hold it; several only if they share it."""


def gpu_row(node: NodeState, slot: int, owners: Owners) -> Row:
    """Row of the GPU of one slot. Ids of tasks that share it are separated by commas.

    A GPU that is gone but still held has no memory; a free slot has an empty UUID.
    """
    uuid = node.gpu_uuids[slot]
    gpu = next((gpu for gpu in node.spec.gpus if gpu.uuid == uuid), None)
    holders = owners.get((node.spec.node_id, slot), {})
    return {
        "node_id": node.spec.node_id,
        "gpu": slot,
        "uuid": uuid,
        "model": "gone" if gpu is None else gpu.model,
        "memory_mib": 0 if gpu is None else gpu.memory_mib,
        "faulted": gpu is None or bool(node.faulted_gpu_mask >> slot & 1),
        "task_id": ",".join(holders) or None,
        "job_id": ",".join(holders.values()) or None,
    }


def gpu_use(state: CellState, node: NodeState, slot: int) -> Row:
    """The tasks on the GPU of one slot, in the order of placement, then those for which it is reserved, each
    with its share of time and memory.

    Shares in thousandths of the GPU; `free_milli` is 0 on a faulted one, and on one that is `suspect`: jobs
    fail there. O(tasks on the node).
    """
    holders: list[tuple[int, Row]] = []
    for task_id, job_id in node.tasks.items():
        job = state.jobs[job_id]
        place = job.tasks[task_id].place
        if slot in place.gpus:
            share = {"share_milli": place.gpu_share_milli, "gpu_memory_mib": place.gpu_memory_mib}
            holders.append((job.token, {"job_id": job_id, "task_id": task_id, **share}))
    for job_id in sorted(node.reserved):
        for place in taken(state.jobs[job_id], node.spec.node_id):
            if slot in place.gpus:
                share = {"share_milli": place.gpu_share_milli, "gpu_memory_mib": place.gpu_memory_mib}
                holders.append((state.token, {"job_id": job_id, "task_id": place.task_id, **share}))
    holders.sort(key=lambda holder: holder[0])
    given = sum(found["share_milli"] for _, found in holders)
    usable = node.present_gpu_mask & ~node.unusable_gpu_mask
    free_milli = max(0, WHOLE_GPU - given) if usable >> slot & 1 else 0
    suspect = bool(node.unusable_gpu_mask & ~node.faulted_gpu_mask & 1 << slot)
    return {"holders": [found for _, found in holders], "free_milli": free_milli, "suspect": suspect}


def gpu_owners(jobs: Mapping[str, JobState]) -> Owners:
    """Owners of each GPU, from the live tasks, earlier placements first. O(jobs)."""
    owners: Owners = {}
    for job in sorted(jobs.values(), key=lambda job: job.token):
        for task_id, task in job.tasks.items():
            if task.status is not TaskStatus.EXITED:
                for gpu in task.place.gpus:
                    owners.setdefault((task.place.node_id, gpu), {})[task_id] = job.job_id
    return owners
