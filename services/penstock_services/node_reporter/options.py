"""Command-line options of one node-reporter."""

import os
import re
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

DEFAULT_LOG_LIMIT_MIB = 64
DEFAULT_DRAIN_GRACE_MS = 10_000
DEFAULT_FETCH_LIMIT_MIB = 65_536  # a minute at 10 Gbit/s
MIB = {"": 1, "MIB": 1, "GIB": 1_024, "TIB": 1_048_576}
BY_NODE = Path("nodes/ID")  # placeholder for a folder named after the node


def mebibytes(text: str | int) -> int:
    """`16GiB`, `512MiB` or a bare number of MiB, as defaults are. Raises `BadParameter`."""
    match = re.fullmatch(r"(\d+)\s*([A-Za-z]*)", str(text).strip())
    if match is None or match[2].upper() not in MIB:
        raise typer.BadParameter(f"{text!r} is not an amount of memory; write 16GiB or 512MiB")
    return int(match[1]) * MIB[match[2].upper()]


def _memory(flag: str, metavar: str, help_text: str | None = None) -> Any:
    return typer.Option(flag, parser=mebibytes, metavar=metavar, help=help_text)


class IsolationChoice(StrEnum):
    """Values of `--isolation`."""

    AUTO = "auto"
    PID_NAMESPACE = "pid_namespace"
    CGROUP = "cgroup"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Options:
    """One node. Numbers that are None are read from the machine."""

    node_id: Annotated[str, typer.Option(help="Id of the node, unique in the cell.")]
    state_dir: Annotated[
        Path,
        typer.Option(
            help="Folder of the journal and of tasks, one per node; by default in PENSTOCK_STATE_DIR."
        ),
    ] = BY_NODE
    log_dir: Annotated[
        Path,
        typer.Option(
            envvar="PENSTOCK_LOG_DIR",
            help="Folder of tasks' output, JOB/TASK.log; by default beside the state.",
        ),
    ] = BY_NODE
    backend: Annotated[
        Literal["machine"],
        typer.Option(
            help="`machine`: this one; `kubernetes`: the nodes of a cluster, with other options "
            "(`--backend kubernetes --help`)."
        ),
    ] = "machine"
    virtual_gpus: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=16,
            help="Number of GPUs to simulate, for machines without; default: the GPUs that NVML lists.",
        ),
    ] = None
    virtual_gpu_model: Annotated[str, typer.Option(help="Model of the virtual GPUs.")] = "virtual"
    virtual_gpu_memory_mib: Annotated[
        int, _memory("--virtual-gpu-memory", "16GiB", "Memory of each virtual GPU; MiB without a unit.")
    ] = 16_384
    machine_id: Annotated[
        str | None,
        typer.Option(
            envvar="PENSTOCK_MACHINE_ID",
            help="Permanent id of this machine; default: /etc/machine-id, if any.",
        ),
    ] = None
    cores: Annotated[
        int | None, typer.Option(help="Cores for tasks; default: those that this process may use.")
    ] = None
    host_memory_mib: Annotated[
        int | None, _memory("--host-memory", "8GiB", "Memory for tasks; default: all of the machine.")
    ] = None
    rack: Annotated[str, typer.Option(help="Rack of this node.")] = "rack-0"
    domain: Annotated[str, typer.Option(help="Network domain of this node; it contains racks.")] = "domain-0"
    label: Annotated[
        list[str] | None,
        typer.Option(
            envvar="PENSTOCK_NODE_LABELS",
            metavar="NAME=VALUE",
            help="Label by which jobs choose nodes (`nodes` in a job file); repeatable.",
        ),
    ] = None
    address: Annotated[
        str | None,
        typer.Option(
            envvar="PENSTOCK_NODE_ADDRESS",
            help="Address at which other nodes reach this node's tasks; default: this machine's address on "
            "the way to the log.",
        ),
    ] = None
    bandwidth_mbps: Annotated[int, typer.Option(help="Network bandwidth for tasks, Mbit/s.")] = 10_000
    memory_bandwidth_mb_s: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Bandwidth of the memory, all sockets together, MB/s, as STREAM measures it; default: "
            "traffic is in percent of the largest measured, and a processor that takes no percentages "
            "(AMD) caps nothing.",
        ),
    ] = None
    gateway: Annotated[
        str | None,
        typer.Option(
            envvar="PENSTOCK_NODE_GATEWAY",
            help="URL of the gateway: a permanent connection to it shows when this machine is gone.",
        ),
    ] = None
    gateway_token_file: Annotated[
        Path | None,
        typer.Option(envvar="PENSTOCK_NODE_TOKEN_FILE", help="File with this node's token for the gateway."),
    ] = None
    gateway_ca: Annotated[
        Path | None,
        typer.Option(
            envvar="PENSTOCK_NODE_CA",
            help="PEM file of the certificate authority of an https gateway; by default those of this "
            "machine.",
        ),
    ] = None
    task_gateway: Annotated[
        str | None,
        typer.Option(
            envvar="PENSTOCK_NODE_TASK_GATEWAY",
            help="URL at which jobs that may submit jobs reach the gateway; by default that of --gateway.",
        ),
    ] = None
    code_dir: Annotated[
        Path | None,
        typer.Option(
            envvar="PENSTOCK_CODE_DIR",
            help="The gateway's folder of code, where this machine shares it; else code is fetched from "
            "--gateway.",
        ),
    ] = None
    drain: Annotated[
        bool,
        typer.Option(
            "--drain", help="On SIGTERM stop the tasks and leave the cell, instead of leaving them running."
        ),
    ] = False
    drain_grace_ms: Annotated[int, typer.Option(help="With --drain: time from SIGTERM to SIGKILL.")] = (
        DEFAULT_DRAIN_GRACE_MS
    )
    log_limit_mib: Annotated[
        int,
        _memory(
            "--log-limit",
            "64MiB",
            "Maximum output of a task that is stored: the first quarter, then the newest.",
        ),
    ] = DEFAULT_LOG_LIMIT_MIB
    log_bind: Annotated[
        str | None,
        typer.Option(
            envvar="PENSTOCK_NODE_LOG_BIND",
            metavar="HOST:PORT",
            help="Address from which the gateway fetches tasks' output; by default any free port of "
            "--address.",
        ),
    ] = None
    log_key: Annotated[
        Path | None,
        typer.Option(
            envvar="PENSTOCK_NODE_LOG_KEY",
            help="File with a secret that gateway and nodes share; without it the node's token is that "
            "secret.",
        ),
    ] = None
    log_cert: Annotated[
        Path | None,
        typer.Option(
            envvar="PENSTOCK_NODE_LOG_TLS_CERT",
            help="PEM file of the certificate of the server of tasks' output.",
        ),
    ] = None
    log_cert_key: Annotated[
        Path | None,
        typer.Option(envvar="PENSTOCK_NODE_LOG_TLS_KEY", help="PEM file of its key, mode 0600."),
    ] = None
    log_archive: Annotated[
        str | None,
        typer.Option(
            envvar="PENSTOCK_NODE_LOG_ARCHIVE",
            metavar="URL",
            help="Folder (file:///…) or store (s3://…) that gets each task's output when it has exited.",
        ),
    ] = None
    checkpoint_dir: Annotated[
        Path | None,
        typer.Option(
            envvar="PENSTOCK_NODE_CHECKPOINT_DIR",
            help="Folder in which jobs with `checkpoint: sdk` save, each in its own; by default in "
            "--state-dir.",
        ),
    ] = None
    checkpoint_shared: Annotated[
        bool,
        typer.Option(
            "--checkpoint-shared",
            help="All nodes have the folder of --checkpoint-dir: jobs resume from their checkpoints on any "
            "node.",
        ),
    ] = False
    checkpoint_fetch_limit_mib: Annotated[
        int,
        _memory(
            "--checkpoint-fetch-limit",
            "64GiB",
            "Maximum size of a checkpoint that is fetched from the node that saved it; jobs with a larger "
            "one start anew here.",
        ),
    ] = DEFAULT_FETCH_LIMIT_MIB
    log_ca: Annotated[
        Path | None,
        typer.Option(
            envvar="PENSTOCK_NODE_LOG_CA",
            help="PEM file of the certificate authority of other nodes' --log-cert; by default those of this "
            "machine.",
        ),
    ] = None
    clear_gpu_faults: Annotated[
        bool,
        typer.Option(
            "--clear-gpu-faults",
            help="To give once, after a repair without a boot: discard the GPU faults of earlier starts.",
        ),
    ] = False
    secrets_dir: Annotated[
        Path | None,
        typer.Option(
            envvar="PENSTOCK_SECRETS_DIR",
            help="Folder of secrets that jobs may request: files TENANT/NAME, or shared/NAME for all "
            "tenants, mode 0600.",
        ),
    ] = None
    task_user: Annotated[
        str | None,
        typer.Option(
            envvar="PENSTOCK_TASK_USER",
            help="Run jobs as this user (name or number); needs root. Default: as this process.",
        ),
    ] = None
    allow_root: Annotated[
        bool,
        typer.Option(
            "--allow-root", envvar="PENSTOCK_ALLOW_ROOT", help="Jobs may run as root; refused otherwise."
        ),
    ] = False
    hide: Annotated[
        list[Path] | None,
        typer.Option(
            help="Further folders that appear empty to jobs, such as other nodes' state; repeatable."
        ),
    ] = None
    isolation: Annotated[
        IsolationChoice,
        typer.Option(help="How tasks are confined and their end is proven; auto: the best that works here."),
    ] = IsolationChoice.AUTO
    cgroup: Annotated[
        Path | None,
        typer.Option(
            help="Delegated cgroup v2 folder for the groups of tasks, its controllers memory, and for cores "
            "and their time cpuset and cpu, enabled for children."
        ),
    ] = None

    def with_folders(self) -> "Options":
        """With absolute folders; those not given lie under PENSTOCK_STATE_DIR,
        else in the user's state folder."""
        root = Path(os.environ.get("PENSTOCK_STATE_DIR") or Path.home() / ".local/state/penstock")
        own_state = root / "nodes" / self.node_id.replace("/", "%2F")
        state_dir = own_state if self.state_dir == BY_NODE else self.state_dir
        log_dir = root / "logs" if self.log_dir == BY_NODE else self.log_dir
        if self.checkpoint_shared and self.checkpoint_dir is None:
            raise typer.BadParameter(
                "--checkpoint-shared: --checkpoint-dir names the folder that nodes share; give it, too"
            )
        checkpoint_dir = None if self.checkpoint_dir is None else self.checkpoint_dir.absolute()
        return replace(
            self,
            state_dir=state_dir.absolute(),
            log_dir=log_dir.absolute(),
            checkpoint_dir=checkpoint_dir,
        )
