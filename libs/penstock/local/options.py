"""What `penstock up` and `penstock demo` can be told."""

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

DEFAULT_FOLDER = ".penstock"
DEFAULT_PORT = 8742
MAX_NODES = 64  # each is a process of its own on this one machine


@dataclass(frozen=True, slots=True)
class Options:
    """One local installation."""

    folder: Path
    """Absolute; holds everything that is kept: database, logs, the nodes' own state."""
    nodes: int = 3
    virtual_gpus: int = 4
    """GPUs per virtual node; ignored with `real`."""
    gpu_model: str = "V100"
    gpu_memory_mib: int = 16_384
    cores: int = 8
    """CPU cores that a virtual node gives out; they share the machine's real ones."""
    real: bool = False
    """One node with the GPUs that NVML finds."""
    log_url: str | None = None
    """Kafka instead of the embedded log."""
    port: int = DEFAULT_PORT
    """Of the gateway on loopback; 0 takes a free one."""
    otlp: str | None = None

    def node_ids(self) -> list[str]:
        """node-0, node-1, …"""
        return [f"node-{number}" for number in range(1 if self.real else self.nodes)]


def whole_number(low: int, high: int) -> "type[int]":
    """An argparse type: an integer within a range."""

    class Number(int):
        def __new__(cls, text: str) -> "Number":
            number = super().__new__(cls, text)
            if not low <= number <= high:
                raise argparse.ArgumentTypeError(f"{text} is out of range; give {low} to {high}")
            return number

    Number.__name__ = "whole number"
    return Number


def add_arguments(parser: argparse.ArgumentParser, folder: str = DEFAULT_FOLDER) -> None:
    """Adds the options that `up` and `demo` share."""
    add = parser.add_argument
    add("--folder", default=folder, help=f"everything is kept here (default: {folder})")
    add("--nodes", type=whole_number(1, MAX_NODES), default=3, help="number of virtual nodes (default: 3)")
    add("--virtual-gpus", type=whole_number(0, 16), default=4, help="GPUs per virtual node (default: 4)")
    add("--gpu-model", default="V100", help="model of the virtual GPUs (default: V100)")
    add("--gpu-memory-mib", type=whole_number(1, 1 << 30), default=16_384, help="of each (default: 16384)")
    add(
        "--cores",
        type=whole_number(1, 1_024),
        default=8,
        help="that each virtual node gives out (default: 8)",
    )
    add("--real", action="store_true", help="one node with this machine's real GPUs instead")
    add("--log", metavar="URL", help="kafka://host:port instead of the embedded log")
    add("--port", type=whole_number(0, 65_535), help=f"of the gateway (default: {DEFAULT_PORT}; 0: any)")
    add("--otlp", metavar="URL", help="send traces there, such as http://127.0.0.1:4318")


def options_from(arguments: argparse.Namespace, default_port: int = DEFAULT_PORT) -> Options:
    """The options of parsed arguments."""
    return Options(
        folder=Path(os.path.abspath(arguments.folder)),
        nodes=arguments.nodes,
        virtual_gpus=arguments.virtual_gpus,
        gpu_model=arguments.gpu_model,
        gpu_memory_mib=arguments.gpu_memory_mib,
        cores=arguments.cores,
        real=arguments.real,
        log_url=arguments.log or os.environ.get("PENSTOCK_LOG") or None,
        port=default_port if arguments.port is None else arguments.port,
        otlp=arguments.otlp or os.environ.get("PENSTOCK_OTLP") or None,
    )
