"""Names and constants of the scenario that the examples of events share: see `infra.codegen.examples`."""

import msgspec

from penstock.model.jobs.job_parts import ResourceRequest, RetryPolicy
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.nouns.nodes import Gpu, NodeSpec
from penstock.model.nouns.types import TaskPlacement

START_MS = 1_767_604_500_000  # 2026-01-05T09:15:00Z
MINUTE_MS = 60_000
JOB, OTHER_JOB = "job-resnet50-7f3a91", "job-vgg16-b20c44"
NODE, NEXT_NODE = "node-a1", "node-a2"
BOOT, NEXT_BOOT = "5d0f2b1e-boot", "9c41e77a-boot"
WORKER, NEXT_WORKER, SERVER = f"{JOB}.1.w0", f"{JOB}.1.w1", f"{JOB}.1.ps0"
TOKEN = 4_711

SPEC = JobSpec(
    name="resnet50",
    owner="alice",
    command=("python", "train.py", "--epochs", "3"),
    env={"OMP_NUM_THREADS": "4"},
    workdir="/home/alice/resnet",
    workers=2,
    parameter_servers=1,
    resources=ResourceRequest(gpus=1, cores=4, host_memory_mib=8_192, gpu_memory_mib=10_240),
    model="resnet50",
    batch_size=64,
    gpu_models=("NVIDIA-A100-40GB",),
    retry=RetryPolicy(max_attempts=3, backoff_ms=5_000, backoff_max_ms=60_000),
    queue_timeout_ms=10 * MINUTE_MS,
    run_timeout_ms=120 * MINUTE_MS,
    labels={"team": "vision"},
)
NODE_SPEC = NodeSpec(
    node_id=NODE,
    boot_id=BOOT,
    rack="rack-a",
    domain="hall-1",
    address="10.0.1.11",
    cores=64,
    host_memory_mib=262_144,
    bandwidth_mbps=25_000,
    gpus=tuple(
        Gpu(index=index, uuid=f"GPU-0a1b2c3d-{index}", model="NVIDIA-A100-40GB", memory_mib=40_960)
        for index in range(4)
    ),
)
WORKER_PLACE = TaskPlacement(
    task_id=WORKER,
    role="worker",
    rank=0,
    node_id=NODE,
    gpus=(0,),
    cores=(0, 1, 2, 3),
    host_memory_mib=8_192,
    gpu_memory_mib=10_240,
    bandwidth_mbps=3_200,
)
NEXT_WORKER_PLACE = msgspec.structs.replace(
    WORKER_PLACE, task_id=NEXT_WORKER, rank=1, node_id=NEXT_NODE, gpus=(2,), cores=(8, 9, 10, 11)
)
SERVER_PLACE = TaskPlacement(
    task_id=SERVER,
    role="ps",
    rank=2,
    node_id=NODE,
    cores=(4, 5),
    host_memory_mib=2_048,
    bandwidth_mbps=6_400,
)
PLACES = (WORKER_PLACE, NEXT_WORKER_PLACE, SERVER_PLACE)
