"""Interference-aware GPU sharing: a place stage around another one that decides by measured pairs which jobs
share a GPU.

In Liquid §6.2 jobs share a GPU if their predicted mean utilisations and largest memories fit. Departure: this
does not tell how much they slow each other down (pairs of Gavel's table run at 0.05 – 1.0 of their speed), so
a pair of kinds whose speeds together were measured (`Estimate.pairs`) is refused where it does not pay. A
pair that was not measured shares by Liquid's rule, and is measured. No more than two jobs share a GPU, since
only pairs are measured. A job whose user specified its share is placed by the inner stage.
"""

from collections.abc import Iterator, Sequence
from copy import copy
from itertools import islice

from msgspec.structs import replace

from penstock.cluster.assignment import Plan
from penstock.cluster.chance import LazyRng
from penstock.cluster.gang import Gang, place_greedily
from penstock.ledger.derived.gpu_shares import MILLI_PER_PERCENT, why_whole
from penstock.ledger.state.index import bits
from penstock.ledger.state.job.job_state import JobState, TaskState
from penstock.ledger.state.masks import take_lowest
from penstock.ledger.state.node.node_state import NodeState
from penstock.ledger.state.state import CellState
from penstock.model.decisions.ledger_events import MAX_CANDIDATES
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.nouns.types import WHOLE_GPU, PairSpeed
from penstock.scheduling.stages.protocols import Policy

LEAST_TOGETHER = 1.05
"""Minimum of the sum of both jobs' speeds, relative to alone; with 1 they would end no sooner than one after
the other."""
LEAST_EACH = 1 / 3
"""Minimum speed of each: no job is slowed down more, however much the other gains."""


class ByMeasuredPairs:
    """Places jobs with a share on the partly allocated GPU with the least free part whose holder they may
    join, else on a wholly free one by the inner stage.

    Score: free thousandths of that GPU. Ties: the lower ordinal, then GPU. O(open nodes × GPUs).
    """

    def __init__(self, inner: Policy) -> None:
        self.name = inner.name
        self._inner = inner

    def place(self, state: CellState, job: JobState, rng: LazyRng) -> Plan | None:
        demand = job.demand
        shares = demand.tasks == 1 and demand.worker.gpu_share_milli < WHOLE_GPU
        if not shares or job.spec.resources.gpu_share_milli is not None:
            return self._inner.place(state, job, rng)

        def rank(gang: Gang, is_worker: bool, limit: int) -> list[tuple[float, int]]:
            rooms = (
                (room[0], ordinal)
                for ordinal in bits(gang.open(is_worker))
                if (room := _room(state, state.node(ordinal), job)) is not None
            )
            return [(float(left), ordinal) for left, ordinal in islice(sorted(rooms), limit)]

        plan = place_greedily(self.name, state, job, rank)
        if plan is not None:
            room = _room(state, state.nodes[plan.nodes[0]], job)
            assert room is not None, "the node was ranked for its room"
            return replace(plan, gpus=((room[1],),))
        plan = self._inner.place(state, _alone(job), rng)
        if plan is None:
            return None
        return replace(plan, gpus=(take_lowest(state.nodes[plan.nodes[0]].healthy_gpu_mask, 1),))


def _alone(job: JobState) -> JobState:
    """A read-only copy of the job that needs a whole GPU."""
    assert job.estimate is not None, f"{job.job_id} has no estimate yet"
    found = copy(job)
    worker = replace(job.estimate.worker, gpu_share_milli=WHOLE_GPU)
    found.estimate = replace(job.estimate, worker=worker)
    return found


def _room(state: CellState, node: NodeState, job: JobState) -> tuple[int, int] | None:
    """(thousandths free without the job, GPU) of the fullest partly allocated GPU that the job may join;
    None: there is none."""
    need = job.demand.worker
    found = [
        (left.milli, gpu)
        for gpu, left in node.offered.items()
        if left.holds(need) and not node.unusable_gpu_mask >> gpu & 1 and not why_apart(state, node, gpu, job)
    ]
    return min(found, default=None)


def why_apart(state: CellState, node: NodeState, gpu: int, job: JobState) -> str:
    """Why the job may not join the jobs on this GPU, whatever is free there; empty: it may."""
    there = holders(state, node, gpu)
    if len(there) > 1:
        return f"{names(there)} share it, and only pairs are measured"
    for other in there:
        found = pair_of(job, other, node.gpu_model(gpu))
        if found is not None and refused(found):
            return f"beside {other.job_id} {speeds_text(found)}"
    return ""


def refused(pair: PairSpeed) -> bool:
    """Whether these kinds are faster one after the other."""
    return pair.own + pair.other < LEAST_TOGETHER or min(pair.own, pair.other) < LEAST_EACH


def speeds_text(pair: PairSpeed) -> str:
    """The measured speeds, as text for users."""
    runs = f"{pair.runs} run{'s' if pair.runs > 1 else ''}"
    return f"it had {pair.own:.2f} of its speed alone and the other {pair.other:.2f}, in {runs} of such pairs"


def pair_of(job: JobState, other: JobState, gpu_model: str) -> PairSpeed | None:
    """Measured speeds of the two together, from the job's side; None: not measured. The later job has the
    newer estimate, so that of `job` is tried first."""
    for one, its, mirrored in ((job, other, False), (other, job, True)):
        for pair in () if one.estimate is None else one.estimate.pairs:
            if pair.gpu_model == gpu_model and (pair.model, pair.batch_size) == kind_of(its.spec):
                return replace(pair, own=pair.other, other=pair.own) if mirrored else pair
    return None


def kind_of(spec: JobSpec) -> tuple[str, int | None]:
    """The key of measured pairs: model and batch size."""
    return spec.model or "", spec.batch_size


def holders(state: CellState, node: NodeState, gpu: int) -> list[JobState]:
    """Jobs with a living task on this GPU, by id."""
    found = {
        job_id
        for task_id, job_id in node.tasks.items()
        if gpu in state.jobs[job_id].tasks[task_id].place.gpus
    }
    return [state.jobs[job_id] for job_id in sorted(found)]


def names(jobs: Sequence[JobState]) -> str:
    return ", ".join(job.job_id for job in jobs[:MAX_CANDIDATES])


def sharing_text(state: CellState, job: JobState) -> str:
    """Which jobs share a GPU with a job that holds a part of it, their total reserved time and memory, and
    measured speeds of such pairs; empty: it has whole GPUs."""
    places = [task.place for task in job.tasks.values() if task.place.gpu_share_milli < WHOLE_GPU]
    if not places:
        return ""
    place = places[0]
    node, gpu = state.nodes[place.node_id], place.gpus[0]
    others = [other for other in holders(state, node, gpu) if other is not job]
    here = [place, *(task.place for other in others for task in _on(other, place.node_id, gpu))]
    percent = sum(found.gpu_share_milli for found in here) / MILLI_PER_PERCENT
    memory_mib = sum(found.gpu_memory_mib for found in here)
    whom = f"shares GPU {gpu} of {place.node_id} with {names(others)}" if others else "has a GPU to share"
    text = (
        f"It {whom}: {percent:.0f} % of its time and {memory_mib} of {node.gpu_memory_mib} MiB are promised."
    )
    return " ".join([text, *_measured(job, others, node.gpu_model(gpu))])


def _on(job: JobState, node_id: str, gpu: int) -> Iterator[TaskState]:
    return (task for task in job.tasks.values() if task.place.node_id == node_id and gpu in task.place.gpus)


def _measured(job: JobState, others: Sequence[JobState], gpu_model: str) -> Iterator[str]:
    for other in others[:MAX_CANDIDATES]:
        pair = pair_of(job, other, gpu_model)
        known = "the slowdown of this pair was not measured" if pair is None else speeds_text(pair)
        yield f"Beside {other.job_id}: {known}."


def apart_text(state: CellState, job: JobState) -> str:
    """Why a waiting job may not join the jobs on partly allocated GPUs with room for it, or gets no share;
    empty: sharing is not the reason for its wait."""
    if job.estimate is None or state.settings.share_gpus == "never":
        return ""
    if job.estimate.worker.gpu_share_milli == WHOLE_GPU:
        return f"it gets no share of a GPU: {why}" if (why := why_whole(job.estimate, job.spec)) else ""
    need = job.demand.worker
    found = [
        f"GPU {gpu} of {node_id}: {why}"
        for node_id, node in sorted(state.nodes.items())
        for gpu, left in sorted(node.offered.items())
        if left.holds(need) and (why := why_apart(state, node, gpu, job))
    ]
    return "; ".join(found[:MAX_CANDIDATES])
