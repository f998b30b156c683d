"""Hardware inventory of this machine: GPUs through NVML or virtual ones,
cores and memory from the operating system."""

import logging
import os
import re
from collections.abc import Sequence, Set
from pathlib import Path

import psutil
import pynvml
from pydantic import ValidationError

from penstock.errors import ConfigurationError
from penstock.model.nouns.nodes import Gpu, NodeSpec
from penstock.model.nouns.types import MAX_GPUS_PER_NODE
from penstock.model.schema.validation import checked, describe
from penstock.runtime.this_machine import boot_id, machine_id
from penstock_services.node_reporter.options import Options
from penstock_services.node_reporter.shell.link.address import LOOPBACK

BYTES_PER_MIB = 1 << 20

logger = logging.getLogger(__name__)
MPS_PIPES = "CUDA_MPS_PIPE_DIRECTORY"


def find_node(options: Options) -> NodeSpec:
    """The node's inventory. Raises `ConfigurationError` naming the option that does not fit."""
    gpus = nvml_gpus() if options.virtual_gpus is None else virtual_gpus(options)
    try:
        fields = {
            "node_id": options.node_id,
            "machine_id": options.machine_id or machine_id(),
            "boot_id": boot_id(),
            "rack": options.rack,
            "domain": options.domain,
            "labels": labels_of(options.label or ()),
            "address": options.address or LOOPBACK,
            "cores": options.cores or len(os.sched_getaffinity(0)),
            "host_memory_mib": options.host_memory_mib or psutil.virtual_memory().total // BYTES_PER_MIB,
            "bandwidth_mbps": options.bandwidth_mbps,
            "gpus": gpus,
        }
        return checked(NodeSpec, fields)
    except ValidationError as error:
        raise ConfigurationError(f"node-reporter options: {describe(error)}") from error


def labels_of(given: Sequence[str]) -> dict[str, str]:
    """`NAME=VALUE` each, none twice. Raises `ConfigurationError`."""
    found: dict[str, str] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or name in found:
            wrong = "is given twice; remove one" if equals else "has no value; write NAME=VALUE"
            raise ConfigurationError(f"node-reporter options: --label {name} {wrong}")
        if name in ("rack", "domain"):
            raise ConfigurationError(f"node-reporter options: --label {name} is taken; use --{name}")
        found[name] = value
    return found


def virtual_gpus(options: Options) -> tuple[Gpu, ...]:
    """Virtual GPUs, for machines without."""
    return tuple(
        Gpu(
            index=index,
            uuid=f"VIRTUAL-{options.node_id}-{index}",
            model=identifier(options.virtual_gpu_model),
            memory_mib=options.virtual_gpu_memory_mib,
        )
        for index in range(options.virtual_gpus or 0)
    )


def mps_runs() -> bool:
    """Whether a control daemon of CUDA's Multi-Process Service has its pipe here."""
    return Path(os.environ.get(MPS_PIPES, "/tmp/nvidia-mps"), "control").exists()


def memory_of(pids: Set[int], uuid: str) -> int | None:
    """MiB of a GPU that these processes hold; None where the driver does not report it for each process."""
    try:
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        held = [
            found.usedGpuMemory
            for found in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
            if found.pid in pids
        ]
    except pynvml.NVMLError:
        return None
    return None if None in held else sum(held) // BYTES_PER_MIB


def nvml_gpus() -> tuple[Gpu, ...]:
    """The machine's GPUs that answer, in NVML's order; none, logged once, where there is no NVML."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        logger.warning("no GPUs here: NVML reports %s; --virtual-gpus N pretends some", error)
        return ()
    count = pynvml.nvmlDeviceGetCount()
    if count > MAX_GPUS_PER_NODE:
        logger.warning("%d GPUs found; the first %d are used", count, MAX_GPUS_PER_NODE)
    found: list[Gpu] = []
    for index in range(count):
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            memory_mib = max(1, pynvml.nvmlDeviceGetMemoryInfo(handle).total // BYTES_PER_MIB)
            uuid, name = pynvml.nvmlDeviceGetUUID(handle), pynvml.nvmlDeviceGetName(handle)
        except pynvml.NVMLError as error:
            logger.error("GPU %d is left out: NVML reports %s; repair it and restart", index, error)
            continue
        found.append(Gpu(index=len(found), uuid=uuid, model=identifier(name), memory_mib=memory_mib))
    return tuple(found[:MAX_GPUS_PER_NODE])


def gpu_minors(gpus: Sequence[Gpu]) -> dict[str, int] | None:
    """Minor device number (/dev/nvidiaN) by UUID; None where NVML does not know one, as of a MIG slice."""
    try:
        return {
            gpu.uuid: pynvml.nvmlDeviceGetMinorNumber(pynvml.nvmlDeviceGetHandleByUUID(gpu.uuid))
            for gpu in gpus
        }
    except pynvml.NVMLError as error:
        logger.warning("GPUs cannot be closed to tasks by a device cgroup: NVML: %s", error)
        return None


def identifier(name: str) -> str:
    """A product's name as an identifier: `NVIDIA H200` → `NVIDIA-H200`."""
    return re.sub(r"[^A-Za-z0-9._:/-]+", "-", name).strip("-._:/")[:128] or "unknown"
