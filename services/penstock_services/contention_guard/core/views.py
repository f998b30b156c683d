"""What the eliminator sees of a node (`penstock.scheduling.acting.eliminator`): what is short on it, its
trainings and the jobs beside them. Pure."""

from collections.abc import Mapping

from penstock.ledger.state.job.job_state import JobState, TaskState
from penstock.ledger.state.node.node_state import NodeState
from penstock.ledger.state.state import CellState
from penstock.model.decisions.adjustments import MAX_THROTTLES
from penstock.model.nouns.transitions import TaskStatus
from penstock.proposals.validate_adjustments import Running, running, usable_cores
from penstock.scheduling.acting.eliminator import NodeView, Other, Training
from penstock.scheduling.acting.guard import set_by_operator
from penstock_services.contention_guard.core.paces import Node, Pace
from penstock_services.contention_guard.core.searches import alone

RESERVE = 13
"""Steps down that are reserved for a job after its release: from 1,024 cores to one takes ten, and its cap
has three."""
Paces = Mapping[str, Pace]
"""By task id, of running tasks with telemetry."""


def pressure(state: CellState, spec: NodeState, node: Node, paces: Paces) -> NodeView:
    """Which resources are short on a node, without its tasks yet: windows come often,
    and most change nothing."""
    stalled = [
        pace.stalled
        for task_id, job_id in spec.tasks.items()
        if (pace := paces.get(task_id)) is not None
        and pace.stalled is not None
        and (task := _running_task(state, job_id, task_id)) is not None
        and task.place.gpus
    ]
    return NodeView(
        spec.spec.node_id,
        spec.spec.bandwidth_cap,
        node.bandwidth,
        max(stalled) if stalled else node.stalled,
        (),
        (),
    )


def with_tasks(
    view: NodeView, state: CellState, spec: NodeState, node: Node, paces: Paces, now_ms: int
) -> NodeView:
    """The view with the node's running tasks."""
    trainings, others = [], []
    for task_id in sorted(spec.tasks):
        task = _running_task(state, spec.tasks[task_id], task_id)
        if task is None:
            continue
        job, pace = state.jobs[spec.tasks[task_id]], paces.get(task_id)
        if task.place.gpus:
            lost = pace.lost(node, now_ms) if pace is not None and alone(job) else None
            trainings.append(Training(task_id, lost))
        elif job.demand.worker.gpus == 0:
            others.append(_other(state, job, task_id, None if pace is None else pace.traffic))
    return view._replace(trainings=trainings, others=others)


def _other(state: CellState, job: JobState, task_id: str, traffic: float | None) -> Other:
    task = job.tasks[task_id]
    cores = most = len(task.place.cores)
    if task.cores.throttled_from > cores and isinstance(found := running(state, task_id), Running):
        most = usable_cores(state, found)
    left = MAX_THROTTLES * job.spec.workers - job.adjustments.throttles
    fixed = set_by_operator(task.bandwidth_adjusted)
    return Other(
        task_id,
        cores,
        None if fixed else task.memory_bandwidth_percent,
        task.cores.throttled_from,
        traffic,
        most,
        may_throttle=left > 0 and not fixed and not set_by_operator(task.cores.adjusted),
        may_return=left >= RESERVE,
    )


def runs(task: TaskState) -> bool:
    """Whether it runs now."""
    return task.status is TaskStatus.RUNNING


def _running_task(state: CellState, job_id: str, task_id: str) -> TaskState | None:
    """None: it does not run."""
    job = state.jobs.get(job_id)
    task = None if job is None else job.tasks.get(task_id)
    return task if task is not None and runs(task) else None


def slowed(state: CellState, spec: NodeState) -> bool:
    """Whether a job there may have to be released."""
    for task_id, job_id in spec.tasks.items():
        task = _running_task(state, job_id, task_id)
        if task is not None and (task.memory_bandwidth_percent is not None or task.cores.throttled_from > 0):
            return True
    return False
