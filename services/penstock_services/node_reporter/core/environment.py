"""Environment variables of a task, on which a training script may rely. The names known to torch and TensorFlow are theirs."""

import json
from collections.abc import Collection, Mapping, Sequence

import msgspec

from penstock.model.nodes import NodeSpec
from penstock.model.orders import Peer, StartTask
from penstock.model.types import WHOLE_GPU

INHERITED = (
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR",
    "VIRTUAL_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_MPS_PIPE_DIRECTORY", "SSL_CERT_FILE", "SSL_CERT_DIR",
)  # fmt: skip
"""All variables that pass from the reporter to a task: no address, password or failpoint of Penstock."""
TMP, SHM = "/tmp", "/dev/shm"
DEFAULT_PATH = "/usr/local/bin:/usr/bin:/bin"


def base_environment(reporter: Mapping[str, str], own: Collection[str] = ()) -> dict[str, str]:
    """The minimum that programs expect. `own`: folders of the reporter's own Python environment, which is not the task's: neither on its PATH,
    nor named as its virtual environment."""
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
) -> dict[str, str]:
    """`peers`: the variable that holds the gang's peers, or names their file. Base, then the job's own variables, then Penstock's: a job cannot pretend to be another.

    RANK and WORLD_SIZE count workers; a parameter server's RANK is its rank in the whole gang. MASTER_ADDR
    is rank 0's node. `mps`: a control daemon of CUDA's Multi-Process Service runs here. Thread pools have as many threads as the task has cores unless the job sets another number.
    """
    place = order.place
    gang = gang_of(order, node)
    workers = sorted(rank for rank, peer in gang.items() if peer.role == "worker")
    neighbours = [
        rank for rank, peer in gang.items() if peer.node_id == node.node_id and peer.role == place.role
    ]
    indexes = {gpu.uuid: str(gpu.index) for gpu in node.gpus}
    visible = [indexes[gpu] if virtual else gpu for gpu in order.gpu_uuids]
    threads = str(max(1, len(place.cores)))
    return {
        **base,
        "OMP_NUM_THREADS": threads,
        "OPENBLAS_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "PYTHONUNBUFFERED": "1",
        **_memory_limits(order, node, mps=mps),
        **order.env,
        "CUDA_VISIBLE_DEVICES": ",".join(visible),
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
        "RANK": str(place.rank),
        "LOCAL_RANK": str(sorted(neighbours).index(place.rank)),
        "WORLD_SIZE": str(len(workers)),
        "MASTER_ADDR": gang[min(gang)].address,
        "MASTER_PORT": str(order.rendezvous_port),
        **_batch_sizes(order, workers),
    }


def _memory_limits(order: StartTask, node: NodeSpec, *, mps: bool) -> dict[str, str]:
    """Variables by which frameworks, and MPS, observe the memory limit of a task that shares its GPUs from its start on; none for other tasks.

    PyTorch has no variable for it: `penstock.sdk.gpu_memory`. Of MPS's limits only that of memory: a share is a mean over the run, and a
    limit of its threads would slow bursts of computation even while the GPU is free.
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

    Ideal: /tmp and /dev/shm, always. Departures: members of a gang on one node share /dev/shm, by which their libraries exchange
    data (NCCL compares its device number); a container has its image's /tmp, and podman's locks lie in /dev/shm.
    """
    if order.environment is not None and order.environment.container is not None:
        return {}
    size, place = order.place.cap_mib << 20, order.place
    together = any(peer.node_id == place.node_id and peer.rank != place.rank for peer in order.peers)
    return {TMP: size} if together else {TMP: size, SHM: size}


def _batch_sizes(order: StartTask, workers: Sequence[int]) -> dict[str, str]:
    """Batch sizes of all workers and of this one: the first ones have one sample more where the batch does not divide. None for a job without a global batch."""
    whole = order.global_batch_size
    if whole is None:
        return {}
    found = {"PENSTOCK_GLOBAL_BATCH_SIZE": str(whole)}
    if order.place.role == "worker":
        each, left = divmod(whole, len(workers))
        found["PENSTOCK_BATCH_SIZE"] = str(each + (workers.index(order.place.rank) < left))
    return found
