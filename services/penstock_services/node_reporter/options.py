"""What one node-reporter is told on its command line."""

import argparse
import re
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import ConfigurationError

DEFAULT_LOG_LIMIT_MIB = 64
DEFAULT_DRAIN_GRACE_MS = 10_000
MIB = {"": 1, "MIB": 1, "GIB": 1_024, "TIB": 1_048_576}


@dataclass(frozen=True, slots=True)
class Options:
    """One node. Numbers that are None are read from the machine."""

    node_id: str
    state_dir: Path
    log_dir: Path
    virtual_gpus: int | None = None
    """None: ask NVML."""
    virtual_gpu_model: str = "virtual"
    virtual_gpu_memory_mib: int = 16_384
    cores: int | None = None
    host_memory_mib: int | None = None
    rack: str = "rack-0"
    domain: str = "domain-0"
    address: str = "127.0.0.1"
    bandwidth_mbps: int = 10_000
    drain: bool = False
    """On SIGTERM stop the tasks and leave for good, instead of leaving them running."""
    drain_grace_ms: int = DEFAULT_DRAIN_GRACE_MS
    log_limit_mib: int = DEFAULT_LOG_LIMIT_MIB
    cgroup: Path | None = None
    """A cgroup v2 folder delegated to us, with its memory controller enabled for children."""


def mebibytes(text: str) -> int:
    """`16GiB`, `512MiB` or a bare number of MiB. Raises ValueError."""
    match = re.fullmatch(r"(\d+)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2].upper() not in MIB:
        raise ValueError(f"{text!r} is no amount of memory; write 16GiB or 512MiB")
    return int(match[1]) * MIB[match[2].upper()]


def parse(arguments: list[str], environment: dict[str, str]) -> Options:
    """Reads the command line. `PENSTOCK_STATE_DIR` and `PENSTOCK_LOG_DIR` are the folders' defaults."""
    parser = argparse.ArgumentParser(prog="penstock-node-reporter", description=__doc__)
    parser.add_argument("--node-id", required=True)
    parser.add_argument("--virtual-gpus", type=int, help="pretend to have so many GPUs, for machines without")
    parser.add_argument("--virtual-gpu-model", default="virtual")
    parser.add_argument("--virtual-gpu-memory", type=_memory, default=16_384, metavar="16GiB")
    parser.add_argument("--cores", type=int)
    parser.add_argument("--host-memory", type=_memory, metavar="8GiB")
    parser.add_argument("--rack", default="rack-0")
    parser.add_argument("--domain", default="domain-0")
    parser.add_argument("--address", default="127.0.0.1", help="where other nodes reach this one's tasks")
    parser.add_argument("--bandwidth-mbps", type=int, default=10_000)
    parser.add_argument("--state-dir", type=Path, help="journal and task folders; one per node")
    parser.add_argument("--log-dir", type=Path, help="tasks' output: JOB/TASK.log")
    parser.add_argument("--log-limit", type=_memory, default=DEFAULT_LOG_LIMIT_MIB, metavar="64MiB")
    parser.add_argument("--drain", action="store_true", help="on SIGTERM stop the tasks and leave for good")
    parser.add_argument("--drain-grace-ms", type=int, default=DEFAULT_DRAIN_GRACE_MS)
    parser.add_argument("--cgroup", type=Path, help="delegated cgroup v2 folder for memory caps")
    found = parser.parse_args(arguments)
    root = Path(environment.get("PENSTOCK_STATE_DIR") or Path.home() / ".local/state/penstock")
    state_dir = found.state_dir or root / "nodes" / found.node_id.replace("/", "%2F")
    log_dir = found.log_dir or Path(environment.get("PENSTOCK_LOG_DIR") or root / "logs")
    if found.virtual_gpus is not None and not 0 <= found.virtual_gpus <= 16:
        raise ConfigurationError(f"--virtual-gpus: {found.virtual_gpus} is out of range; give 0 to 16")
    return Options(
        node_id=found.node_id,
        state_dir=state_dir.absolute(),
        log_dir=log_dir.absolute(),
        virtual_gpus=found.virtual_gpus,
        virtual_gpu_model=found.virtual_gpu_model,
        virtual_gpu_memory_mib=found.virtual_gpu_memory,
        cores=found.cores,
        host_memory_mib=found.host_memory,
        rack=found.rack,
        domain=found.domain,
        address=found.address,
        bandwidth_mbps=found.bandwidth_mbps,
        drain=found.drain,
        drain_grace_ms=found.drain_grace_ms,
        log_limit_mib=found.log_limit,
        cgroup=found.cgroup,
    )


def _memory(text: str) -> int:
    try:
        return mebibytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
