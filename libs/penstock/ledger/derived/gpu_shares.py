"""GPU sharing by estimates: which jobs get a part of a GPU in a cell that shares GPUs, and how large a part.

Source: Liquid §6.2: jobs may share a GPU if their predicted mean utilisations and their largest predicted
memories fit it together. A share of utilisation / 100 % expresses this exactly, since the ledger allocates no
more than a whole GPU's time and memory (decision 10).

Departure: a job without a prediction, and one whose promised memory is based on no run of its network or GPU
model, has a GPU to itself.
"""

from math import ceil

from msgspec.structs import replace

from penstock.model.jobs.job_spec import JobSpec
from penstock.model.nouns.settings import PlacerSettings
from penstock.model.nouns.types import WHOLE_GPU, Estimate

MILLI_PER_PERCENT = WHOLE_GPU // 100  # thousandths of a GPU


def why_whole(estimate: Estimate, spec: JobSpec) -> str:
    """Why a job has a GPU to itself in a cell that shares them; empty: it gets a share, or asked for one."""
    asked, worker = spec.resources, estimate.worker
    if asked.gpu_share_milli is not None:
        return "" if asked.gpu_share_milli < WHOLE_GPU else "it asked for a whole GPU"
    if worker.gpus != 1 or spec.workers != 1 or spec.min_workers is not None or spec.parameter_servers:
        return "only jobs of one task with one GPU share"
    if not 0 < worker.gpu_utilisation_percent < 100:
        return (
            f"its predicted mean utilisation is {worker.gpu_utilisation_percent:g} %; only figures "
            "between 0 and 100 % are shared"
        )
    if not worker.gpu_memory_mib:
        return "its maximum GPU memory is unknown"
    if estimate.first_of_kind:
        return "it is the first of its kind"
    return ""


def shared(estimate: Estimate, spec: JobSpec, settings: PlacerSettings) -> Estimate:
    """The estimate with the share that the job gets; unchanged where the cell does not share, or the job has
    a GPU to itself."""
    if (
        settings.share_gpus == "never"
        or spec.resources.gpu_share_milli is not None
        or why_whole(estimate, spec)
    ):
        return estimate
    share_milli = min(WHOLE_GPU, max(1, ceil(estimate.worker.gpu_utilisation_percent * MILLI_PER_PERCENT)))
    return replace(estimate, worker=replace(estimate.worker, gpu_share_milli=share_milli))
