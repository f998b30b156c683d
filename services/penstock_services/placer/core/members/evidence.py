"""Distrust of nodes on which jobs of different kinds fail one after another, probes of such nodes, and its
end.

    three kinds of jobs fail ─▶ NodeDistrusted ─▶ timer ─▶ NodePutOnProbation ─▶ a probe ─▶ NodeTrusted
                                     ▲                                            │ fails: twice the pause
                                     └────────────────────────────────────────────┘
Nothing is excluded for ever, and the last node or GPU of a cell is never distrusted: where jobs fail
everywhere, no node is worse than another.
"""

from collections.abc import Iterator

from penstock.ledger.fold.evidence import EARLY_MS, MIN_KINDS, Against, against, counted, kind_of, worked
from penstock.ledger.state.index import bits
from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.lease import has_timer
from penstock.ledger.state.masks import mask_of
from penstock.ledger.state.node.distrust import TRUST_TIMER
from penstock.ledger.state.node.node_state import NodeState
from penstock.ledger.state.state import CellState
from penstock.model.decisions.distrust import NodeDistrusted, NodePutOnProbation, NodeTrusted
from penstock.model.inputs.external_events import TaskExited
from penstock.model.schema.event import Event
from penstock.text.counting import count
from penstock_services.placer.core.common import timer

FIRST_PAUSE_MS = 60_000  # a remount, a cleaned disk or a reset of a driver takes about so long
MAX_PAUSE_MS = 3_600_000  # a node that is mended by nobody costs one job per hour


def judged(state: CellState, job: JobState, event: TaskExited) -> Iterator[Event]:
    """What an end of a task, already folded, says about nodes: they are distrusted, or trusted again."""
    if not (state.failures or state.index.distrusted):
        return
    for ordinal in list(bits(state.index.distrusted)):
        other = state.node(ordinal)
        if other.distrust is not None and len(other.distrust.kinds) < MIN_KINDS:
            yield NodeTrusted(node_id=other.spec.node_id, reason="jobs that failed there fail elsewhere, too")
    node = state.nodes[event.node_id]
    doubt, gpu_mask = node.distrust, mask_of(job.tasks[event.task_id].place.gpus)
    if worked(event):
        if doubt is not None and doubt.cleared_by(gpu_mask):
            yield NodeTrusted(node_id=event.node_id, reason=f"{job.job_id} ran there")
            yield from _distrusted(state, node, against(state, node))
    elif doubt is None:
        yield from _distrusted(state, node, against(state, node))
    elif doubt.open and (fresh := [found for found in counted(state, node) if found.kind == kind_of(job)]):
        yield from _distrusted(
            state, node, Against(doubt.gpu_mask, tuple(fresh)), 2 * doubt.pause_ms, job.job_id
        )


def _distrusted(
    state: CellState,
    node: NodeState,
    found: Against | None,
    pause_ms: int = FIRST_PAUSE_MS,
    probe: str = "",
) -> Iterator[Event]:
    """Distrust of the node or of its GPUs, unless nothing else is left.
    `probe`: the job that failed as one."""
    if found is None or not has_timer(node) or not _others_left(state, node, found):
        return
    pause_ms = min(pause_ms, MAX_PAUSE_MS)
    reason = f"{probe}, its probe, failed there, too" if probe else _sentence(found)
    gpus = tuple(bits(found.gpu_mask))
    yield NodeDistrusted(node_id=node.spec.node_id, reason=reason, pause_ms=pause_ms, gpus=gpus)
    yield timer(state, node.spec.node_id, TRUST_TIMER, pause_ms)


def _others_left(state: CellState, node: NodeState, found: Against) -> bool:
    """Whether the jobs that would have started there can start anywhere else."""
    elsewhere = state.index.placeable & ~node.bit
    if not any(one.gpu_mask for one in found.failures):
        return bool(elsewhere)
    gpus = state.total_sound_gpus - state.sound_gpus[node.ordinal]
    if found.gpu_mask:
        gpus += (node.present_gpu_mask & ~node.unusable_gpu_mask & ~found.gpu_mask).bit_count()
    return gpus > 0


def _sentence(found: Against) -> str:
    first, last = found.failures[0], found.failures[-1]
    owners = count(len({owner for owner, _ in found.kinds}), "owner")
    span = f"{max(1, (last.at_ms - first.at_ms) // 1_000)} s"
    return (
        f"{count(len(found.failures), 'job')} of {owners} failed there within {span}, each soon after its "
        "start, and none succeeded in between"
    )


def started(state: CellState, job: JobState | None, node_id: str) -> Iterator[Event]:
    """A probe runs: if it still does after `EARLY_MS`, its node can be used."""
    doubt = state.nodes[node_id].distrust
    if doubt is not None and job is not None and doubt.probe == job.job_id:
        yield timer(state, node_id, TRUST_TIMER, EARLY_MS)


def due(state: CellState, node_id: str) -> Iterator[Event]:
    """The timer fired: the pause is over, or the probe has run for long enough."""
    node = state.nodes.get(node_id)
    doubt = None if node is None else node.distrust
    if node is None or doubt is None or doubt.open:
        return
    if not doubt.probe:
        yield NodePutOnProbation(node_id=node_id)
        return
    job = state.jobs[doubt.probe]
    tasks = [task for task in job.tasks.values() if task.place.node_id == node_id]
    ran_ms = min(0 if task.started_ms is None else state.now_ms - task.started_ms for task in tasks)
    gpu_mask = mask_of(tuple(gpu for task in tasks for gpu in task.place.gpus))
    if ran_ms >= EARLY_MS and doubt.cleared_by(gpu_mask):
        yield NodeTrusted(node_id=node_id, reason=f"{job.job_id} runs there")
    elif ran_ms >= EARLY_MS:
        yield NodePutOnProbation(node_id=node_id)  # a job without GPUs proves nothing about them
