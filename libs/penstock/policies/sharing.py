"""Place stage around another, for cells that share GPUs by measured pairs: which jobs meet on a GPU.

Liquid §6.2 lets jobs meet whose predicted mean utilisations and largest memories fit. Departure: that says nothing about how much they slow
each other (pairs of Gavel's table leave each other 0.05 – 1.0 of their speed), so a pair of kinds whose speeds together were
measured (`Estimate.pairs`) is refused where it is not worth it. A pair that was not measured meets by Liquid's rule, and teaches. No more
than two jobs meet, since only pairs are measured. A job that asked for its share itself is placed as ever.
"""

from collections.abc import Iterator, Sequence
from copy import copy
from itertools import islice

from msgspec.structs import replace

from penstock.ledger.gpu_shares import MILLI_PER_PERCENT, why_whole
from penstock.ledger.index import bits
from penstock.ledger.job_state import JobState, TaskState
from penstock.ledger.masks import take_lowest
from penstock.ledger.node_state import NodeState
from penstock.ledger.state import CellState
from penstock.model.types import WHOLE_GPU, JobSpec, PairSpeed
from penstock.policies.base import LazyRng, Plan, Policy
from penstock.policies.gang import Gang, place_greedily

LEAST_TOGETHER = 1.05
"""Sum of both jobs' speeds, as shares of those alone; with 1 they would end no sooner than one after the other."""
LEAST_EACH = 1 / 3
"""Speed of either: nobody is slowed more, however much the other gains."""
MAX_NAMED = 5  # jobs in a sentence


class ByMeasuredPairs:
    """Jobs with a share go to the partly given GPU with the least left whose holder they may meet, else to a wholly free one as the inner stage says.

    Score: thousandths left of that GPU. Ties: the lower ordinal, then GPU. O(open nodes × GPUs).
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
    """A copy, to be read only, that wants a whole GPU."""
    assert job.estimate is not None, f"{job.job_id} has no estimate yet"
    found = copy(job)
    worker = replace(job.estimate.worker, gpu_share_milli=WHOLE_GPU)
    found.estimate = replace(job.estimate, worker=worker)
    return found


def _room(state: CellState, node: NodeState, job: JobState) -> tuple[int, int] | None:
    """(thousandths left without the job, GPU) of the fullest partly given GPU that the job may join; None: there is none."""
    need = job.demand.worker
    found = [
        (left.milli, gpu)
        for gpu, left in node.offered.items()
        if left.holds(need) and not node.faulted_gpu_mask >> gpu & 1 and not why_apart(state, node, gpu, job)
    ]
    return min(found, default=None)


def why_apart(state: CellState, node: NodeState, gpu: int, job: JobState) -> str:
    """Why the job does not join the jobs on this GPU, whatever room is left; empty: it may."""
    there = holders(state, node, gpu)
    if len(there) > 1:
        return f"{names(there)} share it, and only pairs are measured"
    for other in there:
        found = pair_of(job, other, node.spec.gpus[gpu].model)
        if found is not None and refused(found):
            return f"beside {other.job_id} {speeds_text(found)}"
    return ""


def refused(pair: PairSpeed) -> bool:
    """Whether these kinds are better off one after the other."""
    return pair.own + pair.other < LEAST_TOGETHER or min(pair.own, pair.other) < LEAST_EACH


def speeds_text(pair: PairSpeed) -> str:
    """The measured speeds, for people."""
    runs = f"{pair.runs} run{'s' if pair.runs > 1 else ''}"
    return f"it had {pair.own:.2f} of its speed alone and the other {pair.other:.2f}, in {runs} of such pairs"


def pair_of(job: JobState, other: JobState, gpu_model: str) -> PairSpeed | None:
    """What is known of the two together, from the job's side; None: nothing. The newer estimate is the later job's, so that of `job` comes first."""
    for one, its, mirrored in ((job, other, False), (other, job, True)):
        for pair in () if one.estimate is None else one.estimate.pairs:
            if pair.gpu_model == gpu_model and (pair.model, pair.batch_size) == kind_of(its.spec):
                return replace(pair, own=pair.other, other=pair.own) if mirrored else pair
    return None


def kind_of(spec: JobSpec) -> tuple[str, int | None]:
    """What pairs are learned for: model and batch size."""
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
    return ", ".join(job.job_id for job in jobs[:MAX_NAMED])


def sharing_text(state: CellState, job: JobState) -> str:
    """With whom a job that holds a part of a GPU shares it, what is predicted of both, and what was measured of such pairs; empty: it has whole GPUs."""
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
    return " ".join([text, *_measured(job, others, node.spec.gpus[gpu].model)])


def _on(job: JobState, node_id: str, gpu: int) -> Iterator[TaskState]:
    return (task for task in job.tasks.values() if task.place.node_id == node_id and gpu in task.place.gpus)


def _measured(job: JobState, others: Sequence[JobState], gpu_model: str) -> Iterator[str]:
    for other in others[:MAX_NAMED]:
        pair = pair_of(job, other, gpu_model)
        known = "how such a pair slows each other was not measured" if pair is None else speeds_text(pair)
        yield f"Beside {other.job_id} {known}."


def apart_text(state: CellState, job: JobState) -> str:
    """Why a job that waits does not join the jobs on partly given GPUs with room for it, or gets whole ones; empty: nothing of that holds it up."""
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
    return "; ".join(found[:MAX_NAMED])
