"""Fold of resource arrays: GPUs that living jobs ask for, usage of ended attempts, the sizes decided from
both, and reclaimed cores."""

from msgspec.structs import replace

from penstock.ledger.state.arrays import LARGE_GPUS, Arrays, Window
from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.masks import mask_of
from penstock.ledger.state.node.node_state import NodeState
from penstock.ledger.state.state import CellState
from penstock.model.decisions.arrays import ArraysSized, CoresReclaimed
from penstock.model.nouns.types import WHOLE_GPU


def gpus_of(job: JobState) -> int:
    """GPUs of the whole gang, a part of a GPU counting as one; 0 without an estimate, and for a job that no
    node could hold."""
    return 0 if job.estimate is None or job.unschedulable else job.workers * job.estimate.worker.gpus


def without_gpus(job: JobState) -> bool:
    """Whether the job's cores belong to the CPU array."""
    return job.estimate is not None and not job.estimate.worker.gpus


def asked(state: CellState, job: JobState) -> None:
    """Updates the counts after the job's demand became known, changed or ended."""
    before, after = job.array.counted_gpus, gpus_of(job) if job.job_id in state.jobs else 0
    if before == after:
        return
    job.array = replace(job.array, counted_gpus=after)
    arrays = _rolled(state)
    large = arrays.large_gpus + _large(after) - _large(before)
    small = arrays.small_gpus + after - _large(after) - before + _large(before)
    seen = replace(
        arrays.now,
        large_peak=max(arrays.now.large_peak, large),
        small_peak=max(arrays.now.small_peak, small),
    )
    state.arrays = replace(arrays, large_gpus=large, small_gpus=small, now=seen)


def _large(gpus: int) -> int:
    return gpus if gpus >= LARGE_GPUS else 0


def _rolled(state: CellState) -> Arrays:
    """The arrays with the windows as of now."""
    arrays, length_ms = state.arrays, state.settings.coda.history_ms
    passed_ms = state.now_ms - arrays.since_ms
    if passed_ms < length_ms:
        return arrays
    begins = Window(large_peak=arrays.large_gpus, small_peak=arrays.small_gpus)
    before = arrays.now if passed_ms < 2 * length_ms else begins
    since_ms = state.now_ms - passed_ms % length_ms
    return replace(arrays, since_ms=since_ms, now=begins, before=before)


def attempt_over(state: CellState, job: JobState) -> None:
    """Counts the usage of an ended attempt, while its places are still known.
    Attempts that never ran do not count."""
    if job.running_ms is None or not gpus_of(job):
        return
    ran_ms = state.now_ms - job.running_ms
    places = [task.place for task in job.tasks.values()]
    gpus_milli = sum(len(place.gpus) * place.gpu_share_milli for place in places)
    cores = sum(len(place.cores) for place in places)
    arrays = _rolled(state)
    seen = replace(
        arrays.now,
        gpu_ms=arrays.now.gpu_ms + gpus_milli * ran_ms // WHOLE_GPU,
        core_ms=arrays.now.core_ms + cores * ran_ms,
    )
    state.arrays = replace(arrays, now=seen)


def arrays_sized(state: CellState, fact: ArraysSized) -> None:
    state.arrays = replace(
        state.arrays, cores_per_gpu_milli=fact.cores_per_gpu_milli, large_nodes=fact.large_nodes
    )
    for node in state.nodes.values():
        reserve(state, node)
        state.rebook(node)


def reserve(state: CellState, node: NodeState) -> None:
    """Sets how many of the node's cores belong to the GPU array,
    after a change of the sizes or of the inventory."""
    per_gpu_milli = state.arrays.cores_per_gpu_milli
    if per_gpu_milli >= 0:
        node.reserved_cores = min(node.spec.cores, -(-per_gpu_milli * len(node.spec.gpus) // 1_000))


def hold_cores(node: NodeState, job: JobState, cores: tuple[int, ...]) -> None:
    """A task of the job holds these cores now."""
    if without_gpus(job):
        node.cpu_core_mask |= mask_of(cores)


def cores_reclaimed(state: CellState, fact: CoresReclaimed) -> None:
    job = state.jobs[fact.job_id]
    job.array = replace(job.array, reclaims=job.array.reclaims + 1)
    job.version += 1
