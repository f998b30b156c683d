"""The environment of a task: what a training script may rely on. The names torch and TensorFlow know are theirs."""

import json
from collections.abc import Collection, Mapping, Sequence

import msgspec

from penstock.model.orders import Peer, StartTask
from penstock.model.types import WHOLE_GPU, NodeSpec

INHERITED = (
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR",
    "VIRTUAL_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH", "CUDA_HOME", "SSL_CERT_FILE", "SSL_CERT_DIR",
)  # fmt: skip
"""All that passes from the reporter to a task: no address, password or failpoint of ours."""
DEFAULT_PATH = "/usr/local/bin:/usr/bin:/bin"


def base_environment(reporter: Mapping[str, str], own: Collection[str] = ()) -> dict[str, str]:
    """The sane minimum. `own`: folders of the Python environment that we run in, which is not the task's: neither on its PATH,
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
    order: StartTask, node: NodeSpec, base: Mapping[str, str], peers: Mapping[str, str], *, virtual: bool
) -> dict[str, str]:
    """`peers`: the variable that holds the gang's peers, or names their file. Base, then the job's own variables, then ours: a job cannot pretend to be another.

    RANK and WORLD_SIZE count workers; a parameter server's RANK is its rank in the whole gang. MASTER_ADDR
    is rank 0's node. Thread pools follow the cores given unless the job says otherwise.
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
        **peers,
        "RANK": str(place.rank),
        "LOCAL_RANK": str(sorted(neighbours).index(place.rank)),
        "WORLD_SIZE": str(len(workers)),
        "MASTER_ADDR": gang[min(gang)].address,
        "MASTER_PORT": str(order.rendezvous_port),
        **_batch_sizes(order, workers),
    }


def _batch_sizes(order: StartTask, workers: Sequence[int]) -> dict[str, str]:
    """Of all workers and of this one: the first ones have one sample more where the batch does not divide. Nothing for a job without a global batch."""
    whole = order.global_batch_size
    if whole is None:
        return {}
    found = {"PENSTOCK_GLOBAL_BATCH_SIZE": str(whole)}
    if order.place.role == "worker":
        each, left = divmod(whole, len(workers))
        found["PENSTOCK_BATCH_SIZE"] = str(each + (workers.index(order.place.rank) < left))
    return found
