"""Evidence against nodes and GPUs, as folded state: attempts that failed there soon after their start
(decision 135).

A failure counts against the node only while no job of its kind failed on another node: a job that fails
everywhere is its own fault. Once its kind has run elsewhere, the failure counts in any case.
"""

from collections.abc import Sequence
from typing import NamedTuple

from msgspec.structs import replace

from penstock.ledger.state.index import bits
from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.job.retries import MAX_FAILED_ON
from penstock.ledger.state.masks import mask_of
from penstock.ledger.state.node.distrust import TRUST_TIMER, Distrust, Failure, Kind
from penstock.ledger.state.node.node_state import NodeState
from penstock.ledger.state.state import CellState
from penstock.ledger.state.timers import timer_id
from penstock.model.decisions.distrust import NodeDistrusted, NodePutOnProbation, NodeTrusted
from penstock.model.inputs.external_events import TaskExited
from penstock.model.nouns.types import TaskPlacement

EARLY_MS = 300_000
"""A task that ran for so long has used its GPUs: launches of trainings take seconds to a few minutes
(workloads of `penstock.simulator`), and a broken GPU, mount or disk ends a training before its first
iteration."""
WINDOW_MS = 600_000
"""Failures count for so long: twice the time in which one of them happens, so that slow ones still meet."""
MIN_KINDS = 3
"""Kinds of jobs that must have failed: two people with a bug each are common,
a third within minutes is not."""
MAX_FAILURES = 256  # those of the latest minutes; further ones drop the oldest
MAX_PROGRAM = 128  # characters of a command that tell programs apart


class Against(NamedTuple):
    """The evidence against one node."""

    gpu_mask: int
    """The GPUs in doubt; 0: the whole node."""
    failures: tuple[Failure, ...]

    @property
    def kinds(self) -> tuple[Kind, ...]:
        return tuple(dict.fromkeys(found.kind for found in self.failures))


def kind_of(job: JobState) -> Kind:
    """(owner, program): jobs of one kind that fail share a cause of their own."""
    return job.spec.owner, " ".join(job.spec.command[:2])[:MAX_PROGRAM]


def worked(fact: TaskExited) -> bool:
    """Whether this end proves that node and GPUs can be used."""
    if fact.cause == "exited" and fact.exit_code == 0:
        return True
    return fact.exited_ms - fact.started_ms >= EARLY_MS


def noted(state: CellState, job: JobState, place: TaskPlacement, fact: TaskExited, *, first: bool) -> None:
    """A task has ended. `first`: it is the first failure of its gang, and nobody stopped it."""
    node, gpu_mask = state.nodes[fact.node_id], mask_of(place.gpus)
    if worked(fact):
        if state.failures:
            _works(state, node, job, gpu_mask)
    elif first and not fact.exhausted and fact.cause in ("exited", "start_failed"):
        _failed(state, node, job, gpu_mask)
        failed_on = dict(job.retries.failed_on)
        failed_on[fact.node_id] = gpu_mask | failed_on.pop(fact.node_id, 0)
        if len(failed_on) > MAX_FAILED_ON:
            del failed_on[next(iter(failed_on))]
        job.retries = replace(job.retries, failed_on=failed_on)


def _failed(state: CellState, node: NodeState, job: JobState, gpu_mask: int) -> None:
    kind, node_id, now_ms = kind_of(job), node.spec.node_id, state.now_ms
    kept = [found for found in state.failures if now_ms - found.at_ms < WINDOW_MS]
    sure = {found.node_id for found in kept if found.kind == kind and found.elsewhere}
    state.failures = [*kept[1 - MAX_FAILURES :], Failure(kind, node_id, gpu_mask, now_ms)]
    for ordinal in bits(state.index.distrusted & ~node.bit):
        other = state.node(ordinal)
        if other.distrust is not None and other.spec.node_id not in sure:
            left = tuple(known for known in other.distrust.kinds if known != kind)
            other.distrust = replace(other.distrust, kinds=left)


def _works(state: CellState, node: NodeState, job: JobState, gpu_mask: int) -> None:
    kind, node_id = kind_of(job), node.spec.node_id
    kept: list[Failure] = []
    for found in state.failures:
        if found.node_id != node_id:
            kept.append(replace(found, elsewhere=True) if found.kind == kind else found)
        elif found.gpu_mask and not found.gpu_mask & gpu_mask:
            kept.append(replace(found, node_works=True) if gpu_mask else found)
    state.failures = kept


def against(state: CellState, node: NodeState) -> Against | None:
    """The evidence, if it suffices for distrust: of the whole node, else of those of its GPUs that all
    failures share."""
    here = counted(state, node)
    whole = Against(0, tuple(found for found in here if not found.node_works))
    if len(whole.kinds) >= MIN_KINDS:
        return whole
    for gpu in bits(_union(here)):
        one = Against(1 << gpu, tuple(found for found in here if found.gpu_mask >> gpu & 1))
        if len(one.kinds) >= MIN_KINDS:
            return one
    return None


def counted(state: CellState, node: NodeState) -> list[Failure]:
    """The latest failures that count against the node, oldest first."""
    node_id, since_ms = node.spec.node_id, state.now_ms - WINDOW_MS
    elsewhere = {found.kind for found in state.failures if found.node_id != node_id}
    return [
        found
        for found in state.failures
        if found.node_id == node_id
        and found.at_ms > since_ms
        and (found.elsewhere or found.kind not in elsewhere)
    ]


def _union(failures: Sequence[Failure]) -> int:
    mask = 0
    for found in failures:
        mask |= found.gpu_mask
    return mask


def node_distrusted(state: CellState, fact: NodeDistrusted) -> None:
    node = state.nodes[fact.node_id]
    found = counted(state, node)
    before = () if node.distrust is None else node.distrust.kinds
    node.distrust = Distrust(
        fact.reason,
        state.now_ms,
        mask_of(fact.gpus),
        tuple(dict.fromkeys([*before, *(one.kind for one in found)])),
        _union(found),
        fact.pause_ms,
        state.now_ms + fact.pause_ms,
    )
    state.index.distrusted |= node.bit
    state.reindex(node)


def node_put_on_probation(state: CellState, fact: NodePutOnProbation) -> None:
    reopened(state, state.nodes[fact.node_id])


def node_trusted(state: CellState, fact: NodeTrusted) -> None:
    node = state.nodes[fact.node_id]
    cleared(state, node)
    state.reindex(node)


def cleared(state: CellState, node: NodeState) -> None:
    """The node is used as before, or is proven gone. Its free resources are indexed by the caller."""
    if node.distrust is not None:
        node.distrust = None
        state.index.distrusted &= ~node.bit
        state.timers.pop(timer_id(node.spec.node_id, TRUST_TIMER), None)


def forgotten(state: CellState, node: NodeState) -> None:
    """As `cleared`; failures there before count no longer: an operator says so, or the machine is not as
    it was."""
    cleared(state, node)
    if state.failures:
        state.failures = [found for found in state.failures if found.node_id != node.spec.node_id]


def placed(state: CellState, node: NodeState, job_id: str, gpus: tuple[int, ...]) -> None:
    """A task was placed on a node on probation: its job is the probe, and no other one starts there."""
    doubt = node.distrust
    if doubt is not None and doubt.open and (not doubt.gpu_mask or doubt.gpu_mask & mask_of(gpus)):
        node.distrust = replace(doubt, open=False, probe=job_id)
        state.reindex(node)


def ended(state: CellState, node: NodeState, job_id: str) -> None:
    """A task has ended there: if it was the probe's last one, the node waits for the next probe."""
    if node.distrust is not None and node.distrust.probe == job_id and job_id not in node.tasks.values():
        reopened(state, node)


def reopened(state: CellState, node: NodeState) -> None:
    if node.distrust is not None:
        node.distrust = replace(node.distrust, open=True, probe="")
        state.reindex(node)
