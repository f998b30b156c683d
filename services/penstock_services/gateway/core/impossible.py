"""Warning about a submission that no node of the cell could ever run, even when empty. Pure.

Ideal: the placer's own answer. It comes after the estimate; this one counts only what the job states, by the
placer's own test.
"""

from collections.abc import Mapping
from types import MappingProxyType

from penstock.cluster.capacity import shortfall
from penstock.cluster.reasons import ADVICE, Reason
from penstock.ledger.state.job.demand import Demand
from penstock.ledger.state.state import CellState
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.nouns.types import WHOLE_GPU, ResourceVector
from penstock.sdk.job_file.job_warnings import Doubt

FIELDS: Mapping[Reason, str] = MappingProxyType(
    {
        Reason.NEVER_FITS_NODES: "nodes",
        Reason.NEVER_FITS_GPUS: "resources.gpus",
        Reason.NEVER_FITS_GPU_MODEL: "gpu_models",
        Reason.NEVER_FITS_GPU_MEMORY: "resources.gpu_memory_mib",
        Reason.NEVER_FITS_CORES: "resources.cores",
        Reason.NEVER_FITS_HOST_MEMORY: "resources.host_memory_mib",
        Reason.NEVER_FITS_BANDWIDTH: "resources.bandwidth_mbps",
        Reason.NEVER_FITS_GANG: "workers",
    }
)


def impossible(state: CellState, spec: JobSpec) -> Doubt | None:
    """None: it may fit, or the cell has no nodes yet."""
    asked = spec.resources
    gpus = asked.gpus
    if gpus is None:
        gpus = int(bool(spec.gpu_models or asked.gpu_memory_mib or asked.gpu_share_milli))
    worker = ResourceVector(
        gpus=gpus,
        cores=asked.cores or 0,
        host_memory_mib=asked.host_memory_mib or 0,
        gpu_memory_mib=asked.gpu_memory_mib or 0,
        bandwidth_mbps=asked.bandwidth_mbps or 0,
        gpu_share_milli=(asked.gpu_share_milli or WHOLE_GPU) if gpus == 1 else WHOLE_GPU,
    )
    demand = Demand(spec.fewest_workers, worker, where=spec.where)
    short = shortfall(state.index, demand)
    if short is None:
        return None
    step = ADVICE[short.reason].next_step.rstrip(".")
    text = f"can never be met here: {short.detail}"
    return Doubt(FIELDS[short.reason], text, f"it waits until such a node joins; {step[0].lower()}{step[1:]}")
