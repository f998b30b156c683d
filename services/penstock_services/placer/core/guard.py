"""Admission guards of inputs: which may change the state at all. A refused input still gets its record
(`rejected`, LAW 2).

Messages may come twice, late, or for jobs and tasks that have ended: each guard compares with the job's
state, so that a duplicate cannot act twice.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, get_args

from penstock.ledger.fold.evolve_adjustments import adjustment
from penstock.ledger.fold.evolve_tasks import job_of_task
from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.node.node_state import NodeState
from penstock.ledger.state.state import CellState
from penstock.model.decisions import ledger_events
from penstock.model.decisions.adjustments import TaskAdjusted
from penstock.model.inputs import external_events
from penstock.model.inputs.command_runs import JobCommandRun
from penstock.model.inputs.estimates import EtaEstimated, JobEstimated
from penstock.model.inputs.followers import FollowerChanged
from penstock.model.inputs.saves import SaveRefused
from penstock.model.nouns.nodes import JoinRefusal, NodeSpec
from penstock.model.nouns.transitions import JobStatus, NodeStatus, TaskStatus
from penstock.model.nouns.types import MAX_JOB_ID_CHARS
from penstock.model.schema.event import Event

Command = external_events.JobHoldRequested | external_events.JobReleaseRequested
FINAL_STOPS = frozenset({"cancelled", "completed", "run_timeout", "queue_timeout"})


def refusal(state: CellState, event: Event) -> str | None:
    """Why this input must not be folded, or None. O(1)."""
    guard = GUARDS.get(type(event))
    return guard(state, event) if guard is not None else None


def _submitted(state: CellState, event: external_events.JobSubmitted) -> str | None:
    if len(event.job_id) > MAX_JOB_ID_CHARS:
        return "job_id_too_long"
    return "duplicate_job" if event.job_id in state.jobs or event.job_id in state.ended else None


def _estimated(state: CellState, event: JobEstimated) -> str | None:
    if event.job_id in state.ended:
        return "job_ended"
    job = state.jobs.get(event.job_id)
    if job is None:
        return "duplicate_estimate" if event.job_id in state.early_estimates else None
    if event.attempt == job.awaited_estimate:
        return None
    late = event.attempt > job.estimated_attempt and event.attempt <= job.attempt + 1
    return "late_estimate" if late else "duplicate_estimate"


def _no_job(state: CellState, job_id: str) -> str:
    """Why there is no such job."""
    return "job_ended" if job_id in state.ended else "unknown_job"


def _cancel(state: CellState, event: external_events.JobCancelRequested) -> str | None:
    job = state.jobs.get(event.job_id)
    if job is None:
        return _no_job(state, event.job_id)
    if event.tenant not in (None, job.spec.owner):
        return "other_tenant"
    return "already_stopping" if job.stop.reason in FINAL_STOPS else None


def _command(state: CellState, event: Command) -> str | None:
    """Checks that holds and releases share."""
    job = state.jobs.get(event.job_id)
    if job is None:
        return _no_job(state, event.job_id)
    if event.tenant not in (None, job.spec.owner):
        return "other_tenant"
    return "old_command" if 0 < event.after < job.commanded_seq else None


def _hold(state: CellState, event: external_events.JobHoldRequested) -> str | None:
    if (wrong := _command(state, event)) is not None:
        return wrong
    job = state.jobs[event.job_id]
    if job.held is not None:
        return "already_held"
    return "already_stopping" if job.stop.reason in FINAL_STOPS else None


def _save(state: CellState, event: external_events.JobCheckpointRequested) -> str | None:
    job = state.jobs.get(event.job_id)
    if job is None:
        return _no_job(state, event.job_id)
    if event.tenant not in (None, job.spec.owner):
        return "other_tenant"
    if job.spec.checkpoint == "none":
        return "saves_nothing"
    return None if job.status is JobStatus.RUNNING else "not_running"


def _command_run(state: CellState, event: JobCommandRun) -> str | None:
    """A command may end with its job."""
    job = state.jobs.get(event.job_id)
    if job is None:
        return None if event.job_id in state.ended else "unknown_job"
    return None if event.tenant in (None, job.spec.owner) else "other_tenant"


def _follower(state: CellState, event: FollowerChanged) -> str | None:
    job = state.jobs.get(event.job_id)
    if job is None:
        return _no_job(state, event.job_id)
    if job.spec.tied_to is None:
        return "not_tied"
    if event.after < job.following.seq:
        return "old_report"
    return None if event.connected == (job.following.gateway != event.gateway) else "already_reported"


def _release(state: CellState, event: external_events.JobReleaseRequested) -> str | None:
    if (wrong := _command(state, event)) is not None:
        return wrong
    held = state.jobs[event.job_id].held
    if held is None:
        return "not_held"
    return "held_by_operator" if held.by_operator and event.tenant is not None else None


def _of_living_task(state: CellState, event: external_events.TaskEvent) -> str | None:
    job = job_of_task(state, event.node_id, event.task_id)
    if job is None:
        return "unknown_task"
    return None if event.token == job.token else "stale_token"


def _counted(state: CellState, event: external_events.CountedTaskEvent) -> str | None:
    """It acts again each time that it comes: no copy counts."""
    return _of_living_task(state, event) or _replayed(state.nodes[event.node_id], event.said)


def _replayed(node: NodeState, said: int) -> str | None:
    """Whether the node has said this before. One that counts its reports counts all, from its joining on."""
    return "replayed" if said <= node.said and node.said else None


def _eta(state: CellState, event: EtaEstimated) -> str | None:
    """Remaining time is of one attempt: a report after its end does not apply to the next."""
    job = state.jobs.get(event.job_id)
    if job is None:
        return _no_job(state, event.job_id)
    return None if event.attempt == job.attempt else "stale_attempt"


def _started(state: CellState, event: external_events.TaskStarted) -> str | None:
    reason = _of_living_task(state, event)
    if reason is None:
        job = job_of_task(state, event.node_id, event.task_id)
        if job is not None and job.tasks[event.task_id].started_ms is not None:
            return "duplicate_start"
    return reason


def _adjusted(state: CellState, event: TaskAdjusted) -> str | None:
    """The answer to the latest order of its kind, once; an answer to an earlier order is outdated."""
    reason = _of_living_task(state, event)
    if reason is None:
        job = state.jobs[state.nodes[event.node_id].tasks[event.task_id]]
        known = adjustment(job.tasks[event.task_id], event.what)
        if known is None or event.order_token != known.token:
            return "stale_adjustment"
        return "duplicate_adjustment" if known.answered else None
    return reason


def _is_a_stop(job: JobState, token: int) -> bool:
    """Whether the token is of a stop of the current attempt; there may have been several."""
    return job.token < token <= job.stop.token


def _exited(state: CellState, event: external_events.TaskExited) -> str | None:
    """A task whose stop overtook its start exits under the token of a stop: the only one its node knows."""
    job = job_of_task(state, event.node_id, event.task_id)
    if job is not None and _is_a_stop(job, event.token):
        return None
    node = state.nodes.get(event.node_id)
    if job is None and state.frozen and node is not None and event.task_id in node.orphan_tasks:
        return None  # a frozen cell may wait for its end
    return _of_living_task(state, event)


def _refused(state: CellState, event: external_events.OrderRefused) -> str | None:
    job = job_of_task(state, event.node_id, event.task_id)
    if job is None:
        return "unknown_task"
    if event.token != job.token and not _is_a_stop(job, event.token):
        return "stale_token"
    task = job.tasks[event.task_id]
    return None if task.started_ms is None and task.status is not TaskStatus.EXITED else "already_started"


def _node(state: CellState, event: external_events.NodeSuspected) -> str | None:
    return None if event.node_id in state.nodes else "unknown_node"


def _commanded(
    state: CellState, event: external_events.NodeCordoned | external_events.NodeUncordoned
) -> NodeState | str:
    """The node; else why the command does not count."""
    node = state.nodes.get(event.node_id)
    if node is None:
        return "unknown_node"
    return "stale_command" if 0 < event.after < node.commanded_seq else node


def _cordoned(state: CellState, event: external_events.NodeCordoned) -> str | None:
    node = _commanded(state, event)
    if isinstance(node, str):
        return node
    return "already_cordoned" if node.cordon is not None and node.cordon.drain == event.drain else None


def _uncordoned(state: CellState, event: external_events.NodeUncordoned) -> str | None:
    node = _commanded(state, event)
    if isinstance(node, str):
        return node
    return "not_cordoned" if node.cordon is None and node.distrust is None else None


def _changed(state: CellState, event: external_events.NodeChanged) -> str | None:
    node = state.nodes.get(event.node.node_id)
    if node is None:
        return "unknown_node"
    if node.spec.boot_id != event.node.boot_id:
        return "older_boot"
    if node.status is NodeStatus.GONE:
        return "node_gone"
    if 0 < event.incarnation < node.incarnation:
        return "stale_change"
    return _ambiguous(state, event.node)


def _joined(state: CellState, event: external_events.NodeJoined) -> str | None:
    """A late duplicate would declare tasks dead that the node has started since."""
    node = state.nodes.get(event.node.node_id)
    if node is not None and _other_machine(node, event.node):
        return "other_machine"
    known = state.forgotten_nodes.get(event.node.node_id, 0) if node is None else node.incarnation
    if 0 < event.incarnation <= known:
        return "stale_join"
    return _ambiguous(state, event.node)


def _other_machine(node: NodeState, found: NodeSpec) -> bool:
    """Whether a machine joins under the id of another one that is not proven gone: its boot proves nothing
    (LAW 5)."""
    ids = (node.spec.machine_id, found.machine_id)
    return None not in ids and ids[0] != ids[1] and node.status is not NodeStatus.GONE and not node.leaving


def join_refusal(state: CellState, event: Event, reason: str) -> ledger_events.NodeJoinRefused | None:
    """The answer to a node whose joining was refused; None for a duplicate of the valid joining, and for
    other inputs."""
    if not isinstance(event, external_events.NodeJoined) or reason not in get_args(JoinRefusal):
        return None
    node, boot_id = state.nodes.get(event.node.node_id), event.node.boot_id
    if node is not None and (boot_id, event.incarnation) == (node.spec.boot_id, node.incarnation):
        return None
    return ledger_events.NodeJoinRefused(
        node_id=event.node.node_id,
        boot_id=boot_id,
        incarnation=event.incarnation,
        reason=reason,  # type: ignore[arg-type]
    )


def _ambiguous(state: CellState, node: NodeSpec) -> str | None:
    """A UUID is a GPU's only name, and a GPU is in one node."""
    uuids = {gpu.uuid for gpu in node.gpus}
    if len(uuids) < len(node.gpus):
        return "duplicate_gpu_uuid"
    owners = state.index.gpu_node
    elsewhere = any(owners.get(uuid, node.node_id) != node.node_id for uuid in uuids)
    return "gpu_of_another_node" if elsewhere else None


def _left(state: CellState, event: external_events.NodeLeft) -> str | None:
    node = state.nodes.get(event.node_id)
    if node is None:
        return "unknown_node"
    if node.spec.boot_id != event.boot_id:
        return "older_boot"
    if 0 < event.incarnation < node.incarnation:
        return "stale_leave"
    if event.probe and not _is_expired(node, event.probe):
        return "probe_not_expired"
    if event.proof == "fenced":
        return "already_gone" if node.status is NodeStatus.GONE else None
    return "already_left" if node.leaving else None


def _is_expired(node: NodeState, probe: int) -> bool:
    """Whether the node stayed silent for its lease, by the ledger, and still has not answered this probe."""
    doubt = node.suspicion
    return doubt is not None and doubt.expired and doubt.probe == probe


def _probe_sent(state: CellState, event: external_events.ProbeSent) -> str | None:
    """Counted once in each term, whose clock measures the time."""
    node = state.nodes.get(event.node_id)
    if node is None:
        return "unknown_node"
    doubt = node.suspicion
    if doubt is None or doubt.probe != event.probe:
        return "stale_probe"
    return "duplicate_probe" if doubt.sent_term == state.term else None


def _gpu(state: CellState, event: external_events.GpuFaulted) -> str | None:
    node = state.nodes.get(event.node_id)
    if node is None:
        return "unknown_node"
    if 0 < event.incarnation < node.incarnation:
        return "stale_fault"
    known = event.gpu < len(node.spec.gpus) if event.uuid is None else node.slot_of(event.uuid) is not None
    return _replayed(node, event.said) if known else "unknown_gpu"


def _timer(state: CellState, event: ledger_events.TimerFired) -> str | None:
    return None if event.timer_id in state.timers else "timer_gone"


GUARDS: Mapping[type[Event], Callable[[CellState, Any], str | None]] = MappingProxyType(
    {
        external_events.JobSubmitted: _submitted,
        JobEstimated: _estimated,
        external_events.JobCancelRequested: _cancel,
        FollowerChanged: _follower,
        external_events.JobHoldRequested: _hold,
        external_events.JobReleaseRequested: _release,
        external_events.JobCheckpointRequested: _save,
        JobCommandRun: _command_run,
        external_events.TaskStarted: _started,
        external_events.TaskExited: _exited,
        external_events.TaskPhaseChanged: _counted,
        external_events.TaskCheckpointed: _counted,
        SaveRefused: _counted,
        external_events.CheckpointFetched: _counted,
        external_events.StepsMeasured: _counted,
        external_events.StagesMeasured: _counted,
        TaskAdjusted: _adjusted,
        EtaEstimated: _eta,
        external_events.OrderRefused: _refused,
        external_events.NodeJoined: _joined,
        external_events.NodeChanged: _changed,
        external_events.NodeSuspected: _node,
        external_events.ProbeSent: _probe_sent,
        external_events.NodeCordoned: _cordoned,
        external_events.NodeUncordoned: _uncordoned,
        external_events.NodeLeft: _left,
        external_events.GpuFaulted: _gpu,
        ledger_events.TimerFired: _timer,
    }
)
