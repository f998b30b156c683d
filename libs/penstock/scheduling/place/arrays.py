"""Resource arrays of profile `coda`: the array of a job and of a node, and the sizes of the arrays. Source:
CODA §V-C.

A cell's cores are divided between the CPU array, for jobs without GPUs, and the GPU array; its GPUs between
the 4-GPU sub-array, for jobs with four GPUs or more, and the 1-GPU sub-array, for jobs with fewer. Sizes are
computed from the history of the cell's jobs (`penstock.ledger.state.arrays`):

- *Reserved cores*: each node reserves for each of its GPUs the mean number of cores per GPU of attempts that
  ended, weighted by GPU time: the source takes them from historical statistics, without naming which.
- *4-GPU sub-array*: nodes for the most GPUs that jobs of four and more asked for at once. Source: "the
  maximum GPU number required by 4-GPU jobs". Departure: where both sub-arrays asked for more GPUs than exist,
  the nodes are divided in proportion, since a sub-array of all nodes would leave none to the other.
- The nodes of the 4-GPU sub-array are those that joined last of the nodes with at least four GPUs, so that a
  change of the size moves only the border.

Departure: the source sizes the arrays once; here they are resized when the history has changed enough
(`MATTERS`, `ArraysSized`).
"""

from typing import Literal

from penstock.ledger.fold.evolve_arrays import gpus_of
from penstock.ledger.state.arrays import LARGE_GPUS
from penstock.ledger.state.index import nth
from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.state import CellState
from penstock.model.decisions.arrays import MAX_CORES_PER_GPU_MILLI, MAX_NODES, ArraysSized
from penstock.model.nouns.settings import Coda

Array = Literal["4-GPU sub-array", "1-GPU sub-array", "CPU array"]
LARGE: Array = "4-GPU sub-array"
SMALL: Array = "1-GPU sub-array"
CPU: Array = "CPU array"
MATTERS = 8
"""Reserved cores are decided anew when they have changed by more than 1 / `MATTERS`."""
MIN_GPU_MS = 600_000
"""GPU time of attempts from which their history replaces the setting."""


def array_of(job: JobState) -> Array:
    """The job's array, by the GPUs of the whole gang; a part of a GPU counts as one.
    Only for jobs with an estimate."""
    gpus = gpus_of(job)
    if not gpus:
        return CPU
    return LARGE if gpus >= LARGE_GPUS else SMALL


def nodes_with_gpus(state: CellState, gpus: int) -> int:
    """Set of nodes that have at least so many GPUs and are not gone. O(shapes)."""
    nodes = 0
    for shape, having in state.index.shape.items():
        if shape.gpus >= gpus:
            nodes |= having
    return nodes & ~state.index.gone


def large_nodes(state: CellState) -> int:
    """Set of the nodes of the 4-GPU sub-array."""
    suited = nodes_with_gpus(state, LARGE_GPUS)
    count = suited.bit_count()
    wanted = min(state.arrays.large_nodes, count)
    if not wanted:
        return 0
    first = nth(suited, count - wanted)
    return suited >> first << first


def sized(state: CellState, settings: Coda) -> ArraysSized | None:
    """The sizes by the history; None where the sizes decided last are close enough. O(shapes)."""
    arrays = state.arrays
    gpu_ms, core_ms = arrays.now.gpu_ms + arrays.before.gpu_ms, arrays.now.core_ms + arrays.before.core_ms
    cores_milli = round(1_000 * settings.cores_per_gpu)
    if gpu_ms >= MIN_GPU_MS:
        cores_milli = 1_000 * core_ms // gpu_ms
    cores_milli = min(cores_milli, MAX_CORES_PER_GPU_MILLI)
    large = max(arrays.now.large_peak, arrays.before.large_peak)
    small = max(arrays.now.small_peak, arrays.before.small_peak)
    nodes = _nodes_for(state, large, small)
    decided = arrays.cores_per_gpu_milli
    if decided >= 0 and abs(cores_milli - decided) * MATTERS <= decided:
        if nodes == arrays.large_nodes:
            return None
        cores_milli = decided
    why = (
        f"{cores_milli / 1_000:.3g} cores per GPU; at most {large} GPUs at once for jobs of {LARGE_GPUS} "
        f"and more, {small} for others"
    )
    return ArraysSized(cores_per_gpu_milli=cores_milli, large_nodes=min(nodes, MAX_NODES), reason=why)


def _nodes_for(state: CellState, large: int, small: int) -> int:
    """Number of nodes for so many GPUs of jobs of four and more, counting multiples of four per node; reduced
    in proportion where both demands exceed the cell."""
    suited = total = holds = 0
    for shape, having in state.index.shape.items():
        count = (having & ~state.index.gone).bit_count()
        total += shape.gpus * count
        if shape.gpus >= LARGE_GPUS:
            suited += count
            holds += (shape.gpus - shape.gpus % LARGE_GPUS) * count
    if not suited or not large:
        return 0
    wanted = min(suited, -(-large * suited // holds))
    if large + small > total:
        wanted = min(wanted, max(1, suited * large // (large + small)))
    return wanted
