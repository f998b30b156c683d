"""Options of `penstock up` and `penstock demo`."""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Self

import typer

from penstock.errors import ConfigurationError
from penstock.text.counting import count

DEFAULT_FOLDER = Path(".penstock")
DEFAULT_PORT = 8742
MAX_NODES = 64  # each is a process of its own on this one machine
MAX_SHARED_CORES = (
    256  # of a node that counts more than the machine has: each is a process of one of the demo's jobs
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """One local installation."""

    folder: Annotated[
        Path, typer.Option(help="Everything is stored here: database, logs, the nodes' own state.")
    ] = DEFAULT_FOLDER
    nodes: Annotated[int, typer.Option(min=1, max=MAX_NODES, help="Number of virtual nodes.")] = 3
    virtual_gpus: Annotated[
        int, typer.Option(min=0, max=16, help="GPUs per virtual node; ignored with --real.")
    ] = 4
    gpu_model: Annotated[str, typer.Option(help="Model of the virtual GPUs.")] = "V100"
    gpu_memory_mib: Annotated[int, typer.Option(min=1, max=1 << 30, help="Of each virtual GPU.")] = 16_384
    cores: Annotated[
        int,
        typer.Option(
            min=1, max=1_024, help="That each virtual node gives out; they share the machine's real ones."
        ),
    ] = 8
    real: Annotated[bool, typer.Option("--real", help="One node with this machine's real GPUs instead.")] = (
        False
    )
    log: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            envvar="PENSTOCK_LOG",
            help="kafka://host:port instead of the embedded log. With a password in PENSTOCK_LOG, not here: "
            "`ps` shows it.",
        ),
    ] = None
    port: Annotated[
        int, typer.Option(min=0, max=65_535, help="Of the gateway on loopback; 0: any free one.")
    ] = DEFAULT_PORT
    otlp: Annotated[
        str | None,
        typer.Option(
            metavar="URL", envvar="PENSTOCK_OTLP", help="Send traces there, such as http://127.0.0.1:4318."
        ),
    ] = None

    def absolute(self) -> Self:
        """With the folder as an absolute path."""
        return replace(self, folder=Path(os.path.abspath(self.folder)))

    def node_ids(self) -> list[str]:
        """node-0, node-1, …"""
        return [f"node-{number}" for number in range(1 if self.real else self.nodes)]


@dataclass(frozen=True, kw_only=True)
class DemoOptions(Options):
    """One installation for a demonstration: a folder and a port of its own."""

    folder: Annotated[
        Path, typer.Option(help="Everything is stored here; an earlier demo there is removed.")
    ] = DEFAULT_FOLDER / "demo"
    port: Annotated[
        int, typer.Option(min=0, max=65_535, help="Of the gateway on loopback; 0: any free one.")
    ] = 0
    jobs: Annotated[
        Path | None, typer.Option(metavar="CHECKOUT", help="The checkout that holds tilt/jobs.")
    ] = None
    turns: Annotated[
        bool,
        typer.Option(
            "--turns", help="Instead: four jobs, each bound by another resource, take turns on one GPU."
        ),
    ] = False
    moves: Annotated[
        bool,
        typer.Option(
            "--moves",
            help="Instead: the migrator moves one of five trainings, which resumes from its checkpoint.",
        ),
    ] = False
    keep: Annotated[bool, typer.Option("--keep", help="Stay up after the summary, until Ctrl-C.")] = False
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE.svg", help="Write the screen there as a picture.")
    ] = None

    def __post_init__(self) -> None:
        """Raises `ConfigurationError` for two demonstrations at once."""
        if self.turns and self.moves:
            raise ConfigurationError("--turns and --moves are two demonstrations: leave one of them out")

    @property
    def where(self) -> str:
        """Where the jobs run: `3 virtual nodes`."""
        return "this machine's GPUs" if self.real else count(self.nodes, "virtual node")

    def of_jobs_that_meet(self, machine_cores: int) -> Self:
        """With so many cores per virtual node that a job with nearly all of them has several processes on
        every core of this machine."""
        return replace(self, cores=max(self.cores, min(4 * machine_cores, MAX_SHARED_CORES)))

    def of_turns(self) -> Self:
        """With one GPU in all, that four jobs have to share."""
        return replace(self, nodes=1, virtual_gpus=1, real=False)

    def of_moves(self) -> Self:
        """With two nodes, one of which has room for another one of five jobs."""
        return replace(self, nodes=2, virtual_gpus=3, real=False)
