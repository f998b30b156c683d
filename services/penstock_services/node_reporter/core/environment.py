"""Environment variables of a task, on which a training script and its launcher may rely. The names known
to torch and TensorFlow are theirs."""

import json
from collections.abc import Collection, Mapping, Sequence

import msgspec

from penstock.model.decisions.orders import Peer, StartTask
from penstock.model.nouns.nodes import NodeSpec
from penstock.model.nouns.types import WHOLE_GPU

INHERITED = (
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "SHELL",
    "LANG",
    "LC_ALL",
    "LC_CTYPE",
    "TZ",
    "TMPDIR",
    "VIRTUAL_ENV",
    "CONDA_PREFIX",
    "LD_LIBRARY_PATH",
    "CUDA_HOME",
    "CUDA_MPS_PIPE_DIRECTORY",
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
)
"""All variables that pass from the reporter to a task: no address, password or failpoint of Penstock."""
TMP, SHM = "/tmp", "/dev/shm"
DEFAULT_PATH = "/usr/local/bin:/usr/bin:/bin"


def base_environment(reporter: Mapping[str, str], own: Collection[str] = ()) -> dict[str, str]:
    """The minimum that programs expect. `own`: folders of the reporter's own Python environment, which is not
    the task's: neither on its PATH, nor named as its virtual environment."""
    found = {name: reporter[name] for name in INHERITED if name in reporter and reporter[name] not in own}
    folders = [folder for folder in found.get("PATH", "").split(":") if folder and folder not in own]
    found["PATH"] = ":".join(folders) or DEFAULT_PATH
    return found


def gang_of(order: StartTask, node: NodeSpec) -> dict[int, Peer]:
    """Every member of the task's gang by rank, itself included."""
    place = order.place
    own = Peer(rank=place.rank, role=place.role, node_id=node.node_id, address=node.address)
    return dict(sorted({peer.rank: peer for peer in (*order.peers, own)}.items()))


def peers_json(gang: Mapping[int, Peer]) -> str:
    """Rank, role, node and address of every member, in order of the ranks."""
    return json.dumps([msgspec.structs.asdict(peer) for peer in gang.values()])


def task_environment(
    order: StartTask,
    node: NodeSpec,
    base: Mapping[str, str],
    peers: Mapping[str, str],
    *,
    virtual: bool,
    mps: bool = False,
    apart: bool = False,
) -> dict[str, str]:
    """`peers`: the variable that holds the gang's peers, or names their file. Base, then the job's own
    variables, then Penstock's: a job cannot pretend to be another.

    `mps`: a control daemon of CUDA's Multi-Process Service runs here. `apart`: the task can open no GPU but
    its own. Thread pools have as many threads as the task has cores unless the job sets another number.
    """
    place = order.place
    gang = gang_of(order, node)
    workers = [rank for rank, peer in gang.items() if peer.role == "worker"]
    threads = str(max(1, len(place.cores)))
    return {
        **base,
        "OMP_NUM_THREADS": threads,
        "OPENBLAS_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "PYTHONUNBUFFERED": "1",
        **_memory_limits(order, node, mps=mps),
        **_torchrun(order, gang, workers),
        **order.env,
        **_devices(order, node, virtual=virtual, numbered=apart and not mps),
        "PENSTOCK_JOB_ID": order.job_id,
        "PENSTOCK_TASK_ID": order.task_id,
        "PENSTOCK_NODE_ID": node.node_id,
        "PENSTOCK_ATTEMPT": str(order.attempt),
        "PENSTOCK_TOKEN": str(order.token),
        "PENSTOCK_ROLE": place.role,
        "PENSTOCK_GPUS": ",".join(order.gpu_uuids),
        "PENSTOCK_GPU_SHARE": f"{place.gpu_share_milli / WHOLE_GPU:g}",
        "PENSTOCK_CORES": ",".join(map(str, place.cores)),
        "PENSTOCK_HOST_MEMORY_MIB": str(place.host_memory_mib),
        "PENSTOCK_GPU_MEMORY_MIB": str(place.gpu_memory_mib),
        "PENSTOCK_GPU_MEMORY_LIMIT_MIB": str(order.gpu_memory_limit_mib),
        **peers,
        "MASTER_ADDR": gang[min(gang)].address,
        "MASTER_PORT": str(order.rendezvous_port),
        **_ranks(order, gang, workers),
        **_batch_sizes(order, workers),
    }


def _devices(order: StartTask, node: NodeSpec, *, virtual: bool, numbered: bool) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES in order of `gpu_uuids`: indexes of virtual GPUs, numbers among the task's GPUs,
    or UUIDs.

    Ideal: numbers, since several frameworks parse nothing else. Departure: UUIDs where a task can also open
    other GPUs, since numbers would move to these when a GPU disappears; and with MPS, whose daemon numbers
    the GPUs.
    """
    indexes = {gpu.uuid: gpu.index for gpu in node.gpus}
    if virtual:
        return {"CUDA_VISIBLE_DEVICES": ",".join(str(indexes[gpu]) for gpu in order.gpu_uuids)}
    if not numbered:
        return {"CUDA_VISIBLE_DEVICES": ",".join(order.gpu_uuids)}
    shown = sorted(order.gpu_uuids, key=lambda gpu: indexes[gpu])  # NVML's indexes follow the PCI bus
    visible = ",".join(str(shown.index(gpu)) for gpu in order.gpu_uuids)
    return {"CUDA_VISIBLE_DEVICES": visible, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def _ranks(order: StartTask, gang: Mapping[int, Peer], workers: Sequence[int]) -> dict[str, str]:
    """Ranks of one process per worker; none for a job of one task, whose framework or launcher starts as many
    processes as the task has GPUs.

    RANK and WORLD_SIZE count workers; a parameter server's RANK is its rank in the whole gang. Each worker is
    a node of its own to frameworks, since it sees only its own GPUs: LOCAL_RANK is 0. A worker with several
    GPUs has none: frameworks would take it for one of several processes that somebody else starts (decision
    132). A job with a global batch has ranks with one worker, too: another attempt of it may have more.
    """
    place = order.place
    if len(gang) == 1 and order.global_batch_size is None:
        return {}
    found = {"RANK": str(place.rank), "WORLD_SIZE": str(len(workers))}
    if place.role == "worker":
        node_rank = str(workers.index(place.rank))
        found |= {"NODE_RANK": node_rank, "GROUP_RANK": node_rank}
        if len(place.gpus) <= 1:
            found |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    return found


def _torchrun(order: StartTask, gang: Mapping[int, Peer], workers: Sequence[int]) -> dict[str, str]:
    """Defaults of torchrun's options, which the options of a command replace: one agent per worker, one
    process per GPU."""
    if order.place.role != "worker":
        return {}
    address = gang[min(gang)].address
    return {
        "PET_NNODES": str(len(workers)),
        "PET_NODE_RANK": str(workers.index(order.place.rank)),
        "PET_NPROC_PER_NODE": str(max(1, len(order.place.gpus))),
        "PET_MASTER_ADDR": f"[{address}]" if ":" in address else address,
        "PET_MASTER_PORT": str(order.rendezvous_port),
    }


def _memory_limits(order: StartTask, node: NodeSpec, *, mps: bool) -> dict[str, str]:
    """Variables by which frameworks, and MPS, observe the memory limit of a task that shares its GPUs from
    its start on; none for other tasks.

    PyTorch has no variable for it: `penstock.sdk.gpu_memory`. Of MPS's limits only that of memory: a share is
    a mean over the run, and a limit of its threads would slow bursts of computation even while the GPU is
    free.
    """
    limit_mib = order.gpu_memory_limit_mib
    total_mib = {gpu.uuid: gpu.memory_mib for gpu in node.gpus}.get(next(iter(order.gpu_uuids), ""), 0)
    if not limit_mib or not total_mib:
        return {}
    found = {
        "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{min(1.0, limit_mib / total_mib):.4f}",
        "TF_FORCE_GPU_ALLOW_GROWTH": "true",
    }
    if mps:
        limits = [f"{number}={limit_mib}M" for number in range(len(order.gpu_uuids))]
        found["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = ",".join(limits)
    return found


def private_places(order: StartTask) -> dict[str, int]:
    """Folders of the machine of which the task has its own → size in bytes, 0: without a bound.

    Ideal: /tmp and /dev/shm, always. Departures: members of a gang on one node share /dev/shm, by which their
    libraries exchange data (NCCL compares its device number); a container has its image's /tmp, and podman's
    locks lie in /dev/shm.
    """
    if order.environment is not None and order.environment.container is not None:
        return {}
    size, place = order.place.cap_mib << 20, order.place
    together = any(peer.node_id == place.node_id and peer.rank != place.rank for peer in order.peers)
    return {TMP: size} if together else {TMP: size, SHM: size}


def _batch_sizes(order: StartTask, workers: Sequence[int]) -> dict[str, str]:
    """Batch sizes of all workers and of this one: the first ones have one sample more where the batch does
    not divide. None for a job without a global batch."""
    whole = order.global_batch_size
    if whole is None:
        return {}
    found = {"PENSTOCK_GLOBAL_BATCH_SIZE": str(whole)}
    if order.place.role == "worker":
        each, left = divmod(whole, len(workers))
        found["PENSTOCK_BATCH_SIZE"] = str(each + (workers.index(order.place.rank) < left))
    return found
