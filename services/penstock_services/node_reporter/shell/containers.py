"""Containers of tasks: command lines for podman and apptainer, which start a container below the process that asks for it.

So everything in a container is in the task's PID namespace, its cgroups and its mounts, and ends with its shim (decision 34). The
container has no PID namespace of its own: a /proc of its own could not be mounted below the task's, of which parts are read-only.
Docker's containers are children of its daemon, outside of all that: it is not used.
"""

import shutil
from collections.abc import Collection, Sequence
from typing import NamedTuple

from penstock_services.node_reporter.shell.ports import NotStartable

PODMAN, APPTAINER, DOCKER = "podman", "apptainer", "docker"
INSTALL = "install podman or apptainer on the node, or name a --venv or --conda environment"
SHARED_MEMORY = "/dev/shm"  # of data loaders; a container's own has 64 MiB


class Runtime(NamedTuple):
    """What starts containers here."""

    name: str
    path: str


class Container(NamedTuple):
    """What a container is to have. `folders` and files are mounted where they are; `variables`: names, whose values its starter has."""

    image: str
    command: Sequence[str]
    workdir: str
    folders: Sequence[str]
    variables: Collection[str]
    gpus: Sequence[str]
    """UUIDs of real GPUs."""


def find_runtime(path: str, *, root: bool) -> Runtime:
    """The first of podman and apptainer on this PATH. `root`: tasks are root. Raises `NotStartable`."""
    if root:
        raise NotStartable(
            "jobs run as root on this node, without the rights that containers need; give its reporter --task-user"
        )
    for name in (PODMAN, APPTAINER):
        if (found := shutil.which(name, path=path)) is not None:
            return Runtime(name, found)
    if shutil.which(DOCKER, path=path) is not None:
        raise NotStartable(
            f"docker alone is on this node: its daemon's containers would not end with their task; {INSTALL}"
        )
    raise NotStartable(f"neither podman nor apptainer is on this node; {INSTALL}")


def command_line(runtime: Runtime, asked: Container) -> list[str]:
    """Program and arguments. Raises `NotStartable` for a path that cannot be mounted."""
    for path in (asked.workdir, *asked.folders):
        if set(path) & set(',:"\n'):
            raise NotStartable(
                f"{path!r} cannot be mounted in a container; give a workdir without , : and quotation marks"
            )
    make = _podman if runtime.name == PODMAN else _apptainer
    return [runtime.path, *make(asked), *asked.command]


def _podman(asked: Container) -> list[str]:
    return [
        "run", "--rm", "--pid=host", "--network=host", "--log-driver=none", "--security-opt=label=disable",
        "--security-opt=no-new-privileges", "--entrypoint=", f"--workdir={asked.workdir}",
        *(f"--volume={path}:{path}" for path in (*asked.folders, SHARED_MEMORY)),
        *(f"--env={name}" for name in sorted(asked.variables)),
        *(f"--device=nvidia.com/gpu={uuid}" for uuid in asked.gpus),
        asked.image,
    ]  # fmt: skip


def _apptainer(asked: Container) -> list[str]:
    """It passes its own environment on; `--userns`: without rights of its own. An image without a scheme that is no file is of a registry."""
    local = "://" in asked.image or asked.image.startswith(("/", "./"))
    return [
        "exec", "--userns", "--no-home", *(["--nv"] if asked.gpus else []), f"--pwd={asked.workdir}",
        *(f"--bind={path}:{path}" for path in asked.folders),
        asked.image if local else f"docker://{asked.image}",
    ]  # fmt: skip
