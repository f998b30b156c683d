"""Fold of nodes' reports about tasks: starts, exits, losses, refused orders."""

from msgspec.structs import replace

from penstock.ledger.derived.groups import booked
from penstock.ledger.derived.memory import HOST, failure_text, outgrown_mib
from penstock.ledger.derived.promises import compare
from penstock.ledger.fold import evidence, evolve_nodes, evolve_sharing
from penstock.ledger.fold.evolve_jobs import begin_at_0, set_job
from penstock.ledger.fold.evolve_moves import keep, let_go
from penstock.ledger.state.job.checkpoints import Checkpoint, Unsaved, smoothed
from penstock.ledger.state.job.ending import Exit, TaskExit
from penstock.ledger.state.job.job_state import JobState, TaskState
from penstock.ledger.state.node.node_state import NodeState
from penstock.ledger.state.state import CellState
from penstock.ledger.state.timers import drop_timers
from penstock.model.decisions import ledger_events
from penstock.model.inputs import external_events
from penstock.model.inputs.saves import SaveRefused
from penstock.model.nouns.transitions import TASK_TRANSITIONS, JobStatus, TaskStatus, transition


def job_of_task(state: CellState, node_id: str, task_id: str) -> JobState | None:
    """The job whose living task this is, if that task is on this node."""
    node = state.nodes.get(node_id)
    job_id = node.tasks.get(task_id) if node is not None else None
    return state.jobs.get(job_id) if job_id is not None else None


def task_started(state: CellState, fact: external_events.TaskStarted) -> None:
    job = job_of_task(state, fact.node_id, fact.task_id)
    assert job is not None, fact.task_id
    task = job.tasks[fact.task_id]
    task.pid = fact.pid
    task.started_ms = state.now_ms
    task.began_ms = fact.started_ms
    if task.ready_ms is not None:
        task.launch_ms = max(0, task.ready_ms - fact.started_ms)
    if task.status is TaskStatus.ASSIGNED:
        task.status = transition(TASK_TRANSITIONS, task.status, TaskStatus.RUNNING, fact.task_id)
    if job.status is JobStatus.LAUNCHING and all(
        other.started_ms is not None for other in job.tasks.values()
    ):
        set_job(state, job, JobStatus.RUNNING)
        job.running_ms = state.now_ms
        drop_timers(state, job.job_id, "launch_timeout", "predecessor_timeout")
    job.version += 1


def phase_changed(state: CellState, fact: external_events.TaskPhaseChanged) -> None:
    """Stores the phase. `save` is the last phase of a run;
    a task that trains on afterwards had only saved a checkpoint."""
    job = job_of_task(state, fact.node_id, fact.task_id)
    assert job is not None, fact.task_id
    task = job.tasks[fact.task_id]
    if task.saving and fact.phase != "save":
        job.succession = replace(job.succession, false_ends=job.succession.false_ends + 1)
    task.saving = fact.phase == "save"
    if task.launch_ms is None and fact.phase != "launch":
        if task.began_ms is not None:
            task.launch_ms = max(0, fact.at_ms - task.began_ms)
        elif fact.phase == "ready":
            task.ready_ms = fact.at_ms


def task_checkpointed(state: CellState, fact: external_events.TaskCheckpointed) -> None:
    job = job_of_task(state, fact.node_id, fact.task_id)
    assert job is not None, fact.task_id
    checkpoint = Checkpoint(
        fact.path,
        fact.iteration,
        fact.node_id,
        job.attempt,
        state.now_ms,
        fact.save_ms,
        fact.size_bytes,
        fact.shared,
        smoothed(job.saving.checkpoint, fact.save_ms),
    )
    job.saving = replace(job.saving, checkpoint=checkpoint, unsaved=None)
    state.change_log.add(job.job_id)
    job.tasks[fact.task_id].checkpoint_asked = None
    job.version += 1


def save_refused(state: CellState, fact: SaveRefused) -> None:
    """The request is answered. Until it saves, the attempt of a job that saves by the SDK counts as one
    without checkpoints; a program that saves in a place of its own may do so on SIGTERM alone."""
    job = job_of_task(state, fact.node_id, fact.task_id)
    assert job is not None, fact.task_id
    if job.spec.checkpoint == "sdk":
        job.saving = replace(job.saving, unsaved=Unsaved(fact.reason, state.now_ms))
        state.change_log.add(job.job_id)
    job.tasks[fact.task_id].checkpoint_asked = None
    job.version += 1


def steps_measured(state: CellState, fact: external_events.StepsMeasured) -> None:
    """A member's speed in its group. Its version stays: plans that were made before are as good as after."""
    job = job_of_task(state, fact.node_id, fact.task_id)
    if job is None or not job.sharing.group or not fact.steps or not fact.step_ms:
        return
    job.sharing = replace(job.sharing, measured=max(0.0, 1.0 - fact.waited_ms / fact.step_ms))
    compare(state, job)


def checkpoint_fetched(state: CellState, fact: external_events.CheckpointFetched) -> None:
    """The checkpoint is on this node now,
    and the next attempt that is placed elsewhere fetches it from here."""
    job = job_of_task(state, fact.node_id, fact.task_id)
    assert job is not None, fact.task_id
    found = job.saving.checkpoint
    if fact.problem:
        begin_at_0(job)
        found = None if found is None else replace(found, problem=fact.problem)
    elif found is not None:
        found = replace(
            found,
            path=fact.path,
            iteration=fact.iteration,
            node_id=fact.node_id,
            fetched_from=fact.from_node,
            problem="",
        )
    job.saving = replace(job.saving, checkpoint=found)
    state.change_log.add(job.job_id)
    job.version += 1


def _end_task(state: CellState, node_id: str, task_id: str, cause: str) -> tuple[JobState, TaskState]:
    """The task is proven dead: its resources are free."""
    node = state.nodes[node_id]
    job = state.jobs[node.tasks.pop(task_id)]
    task = job.tasks[task_id]
    passes = job.job_id in node.reserved  # the part of its place in the job's own target stays booked
    if passes:
        let_go(node, job)
    task.status = transition(TASK_TRANSITIONS, task.status, TaskStatus.EXITED, task_id)
    task.exit = TaskExit(state.now_ms, cause)
    node.take_back(booked(state, job, task.place))
    if passes:
        keep(node, job)
    state.rebook(node)
    if node.distrust is not None:
        evidence.ended(state, node, job.job_id)
    evolve_sharing.changed(state, job, task.place)
    job.version += 1
    state.change_log.add(job.job_id)
    return job, task


def task_exited(state: CellState, fact: external_events.TaskExited) -> None:
    node = state.nodes[fact.node_id]
    if fact.task_id not in node.tasks:
        node.orphan_tasks.pop(fact.task_id, None)
        return
    job, task = _end_task(state, fact.node_id, fact.task_id, fact.cause)
    place, succeeded = task.place, fact.cause == "exited" and fact.exit_code == 0
    outgrew = fact.exhausted == HOST
    task.exit = replace(
        task.exit,
        succeeded=succeeded,
        code=128 + fact.signal if fact.exit_code is None and fact.signal else fact.exit_code,
        exhausted=fact.exhausted,
        outgrown_mib=outgrown_mib(place.cap_mib, place.host_memory_mib, fact) if outgrew else 0,
        gpu_limit_mib=fact.gpu_memory_limit_mib,
    )
    first = not job.exit.failure and job.stop.reason is None
    evidence.noted(state, job, task.place, fact, first=first)
    if fact.exhausted and (first or job.stop.reason in (None, "gang_member_failed")):
        _note_exhausted(node, job, task, fact)
        return
    if succeeded:
        task.exit = replace(task.exit, note=fact.detail)
    if succeeded or not first:
        return
    how = fact.cause.replace("_", " ")
    if fact.cause == "exited":
        how = f"exit code {fact.exit_code}" if fact.signal is None else f"killed by signal {fact.signal}"
    elif fact.cause == "stopped":
        how = "stopped by its node, which was drained"
    _note_failure(job, fact.node_id, task, f"{how}: {fact.detail}" if fact.detail else how)


def _note_exhausted(
    node: NodeState, job: JobState, task: TaskState, fact: external_events.TaskExited
) -> None:
    """The exit of the member that ran out of memory is the gang's failure, though exits of other members may
    come first."""
    if any(other.exit.exhausted for other in job.tasks.values() if other is not task):
        return
    job.exit = Exit(task.exit.code, failure_text(node, job, task, fact), task.exit.cause)


def _note_failure(job: JobState, node_id: str, task: TaskState, how: str) -> None:
    """Stores the gang's first failure; failures of other members that follow from it are ignored."""
    if not job.exit.failure and job.stop.reason is None:
        job.exit = Exit(task.exit.code, f"{task.place.task_id} on {node_id}: {how}", task.exit.cause)


def task_lost(state: CellState, fact: ledger_events.TaskLost) -> None:
    job, task = _end_task(state, fact.node_id, fact.task_id, "node_lost")
    _note_failure(job, fact.node_id, task, fact.reason)


def order_refused(state: CellState, fact: external_events.OrderRefused) -> None:
    job, task = _end_task(state, fact.node_id, fact.task_id, "refused")
    detail = f": {fact.detail}" if fact.detail else ""
    _note_failure(job, fact.node_id, task, f"refused, {fact.reason}{detail}")
    node = state.nodes[fact.node_id]
    for uuid in fact.missing_gpus:
        evolve_nodes.mark_faulted(node, node.slot_of(uuid))
    if fact.missing_gpus:
        state.reindex(node)
