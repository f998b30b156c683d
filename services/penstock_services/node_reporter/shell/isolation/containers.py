"""Containers of tasks: command lines for podman and apptainer, which start a container as a child of the
calling process.

So everything in a container is in the task's PID namespace, its cgroups and its mounts, and ends with its
shim (decision 34). The container has no PID namespace of its own: a /proc of its own could not be mounted
below the task's, of which parts are read-only. GPUs: podman gives a container the devices that the NVIDIA
Container Toolkit has described (CDI), by UUID; apptainer (`--nv`) binds all that the task may open, of which
`CUDA_VISIBLE_DEVICES` names the task's. Docker's containers are children of its daemon, outside of all these:
it is not used.
"""

import shutil
from collections.abc import Collection, Iterator, Sequence, Set
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from penstock.model.decisions.orders import StartTask
from penstock_services.node_reporter.shell.ports import NotStartable

PODMAN, APPTAINER, DOCKER = "podman", "apptainer", "docker"
APPTAINER_SCHEMES = ("library://", "oras://", "shub://", "http://", "https://")
CDI_FOLDERS = (Path("/etc/cdi"), Path("/var/run/cdi"))  # podman's search path
INSTALL = "install podman or apptainer on the node, or name a --venv or --conda environment"
SHARED_MEMORY = "/dev/shm"  # of data loaders; a container's own has 64 MiB


class Runtime(NamedTuple):
    """The container runtime of this machine."""

    name: str
    path: str
    unshare: str = ""
    """Path of util-linux's `unshare`; podman needs it."""


class Container(NamedTuple):
    """Contents of a container. `folders` and files are mounted at the same paths; `variables`: names, whose
    values the calling process has."""

    image: str
    command: Sequence[str]
    workdir: str
    folders: Sequence[str]
    variables: Collection[str]
    gpus: Sequence[str]
    """UUIDs of real GPUs."""
    user: tuple[int, int]
    """Uid and gid of the task."""


def find_runtime(path: str, image: str, *, root: bool) -> Runtime:
    """The first of podman and apptainer on this PATH that supports such an image. `root`: tasks are root.
    Raises `NotStartable`."""
    if root:
        raise NotStartable(
            "jobs run as root on this node, without the rights that containers need; give its reporter "
            "--task-user"
        )
    for name in (APPTAINER,) if _is_of_apptainer(image) else (PODMAN, APPTAINER):
        if (found := shutil.which(name, path=path)) is not None:
            return Runtime(name, found, _unshare(path) if name == PODMAN else "")
    if _is_of_apptainer(image):
        raise NotStartable(
            f"only apptainer runs {image!r}, and it is not on this node; install it, or name an image of a "
            "registry"
        )
    if shutil.which(DOCKER, path=path) is not None:
        raise NotStartable(
            f"docker alone is on this node: its daemon's containers would not end with their task; {INSTALL}"
        )
    raise NotStartable(f"neither podman nor apptainer is on this node; {INSTALL}")


def _unshare(path: str) -> str:
    """Raises `NotStartable`."""
    found = shutil.which("unshare", path=path)
    if found is None:
        raise NotStartable(
            "podman is on this node, and unshare, which it is started with, is not; install util-linux"
        )
    return found


def _is_of_apptainer(image: str) -> bool:
    """A file or an unpacked folder, or an image with a scheme that podman does not know."""
    return image.startswith("/") or image.startswith(APPTAINER_SCHEMES)


def check_devices(runtime: Runtime, gpus: Sequence[str], folders: Sequence[Path] = CDI_FOLDERS) -> None:
    """Raises `NotStartable` where podman could not give a container one of these GPUs, since no description
    has its UUID."""
    if runtime.name != PODMAN or not gpus:
        return
    texts = list(_descriptions(folders))
    if missing := [uuid for uuid in gpus if not any(uuid in text for text in texts)]:
        raise NotStartable(
            f"no CDI description in {' or '.join(map(str, folders))} names the GPU {missing[0]}, so podman "
            "cannot give it to a container; "
            "on the node: nvidia-ctk cdi generate --device-name-strategy=uuid --output=/etc/cdi/nvidia.yaml"
        )


def _descriptions(folders: Sequence[Path]) -> Iterator[str]:
    for file in (
        file for folder in folders for file in folder.glob("*") if file.suffix in (".yaml", ".json")
    ):
        with suppress(OSError):
            yield file.read_text(errors="replace")


def runtime_of(order: StartTask, path: str, *, root: bool) -> Runtime | None:
    """As `find_runtime`; None: the job asks for no container."""
    if order.environment is None or order.environment.container is None:
        return None
    return find_runtime(path, order.environment.container, root=root)


def argv(
    order: StartTask,
    runtime: Runtime | None,
    cwd: str,
    shown: Sequence[str],
    variables: Set[str],
    gpus: Sequence[str],
    user: tuple[int, int],
) -> list[str]:
    """The job's command, in a container where it asks for one. `shown`: the task's view of its folder.
    Raises `NotStartable`."""
    if runtime is None or order.environment is None or order.environment.container is None:
        return list(order.command)
    check_devices(runtime, gpus)
    folders = [*shown, *([cwd] if order.workdir and order.code is None else [])]
    names = variables | order.env.keys()
    image = order.environment.container
    return command_line(runtime, Container(image, order.command, cwd, folders, names, gpus, user))


def command_line(runtime: Runtime, asked: Container) -> list[str]:
    """Program and arguments. Raises `NotStartable` for a path that cannot be mounted."""
    for path in (asked.workdir, *asked.folders):
        if set(path) & set(',:"\n'):
            raise NotStartable(
                f"{path!r} cannot be mounted in a container; give a workdir without , : and quotation marks"
            )
    if runtime.name == PODMAN:
        return [*_as_container_root(runtime, asked.user), runtime.path, *_podman(asked), *asked.command]
    return [runtime.path, *_apptainer(asked), *asked.command]


def _as_container_root(runtime: Runtime, user: tuple[int, int]) -> list[str]:
    """Ideal: podman creates its own user namespace. Departure: that takes the setuid `newuidmap` for a user
    with subordinate ids, which no task can run, and a process that holds the namespace for the user's next
    containers, whose pid is not valid in another task's PID namespace. So it is created here, and podman runs
    inside it, as below `podman unshare`."""
    uid, gid = user
    variables = {"USERNS_CONFIGURED": "done", "ROOTLESS_UID": uid, "ROOTLESS_GID": gid}
    made = [f"_CONTAINERS_{name}={text}" for name, text in variables.items()]
    return [runtime.unshare, "--user", "--map-root-user", "--mount", "--", "env", *made]


def _podman(asked: Container) -> list[str]:
    """`void`: a hook of an earlier toolkit must not add devices that an image requests itself, as images of
    CUDA do with `all`."""
    return [
        "run",
        "--rm",
        "--pid=host",
        "--network=host",
        "--log-driver=none",
        "--security-opt=label=disable",
        "--security-opt=no-new-privileges",
        "--entrypoint=",
        f"--workdir={asked.workdir}",
        *(f"--volume={path}:{path}" for path in (*asked.folders, SHARED_MEMORY)),
        *(f"--env={name}" for name in sorted(asked.variables)),
        "--env=NVIDIA_VISIBLE_DEVICES=void",
        *(f"--device=nvidia.com/gpu={uuid}" for uuid in asked.gpus),
        asked.image,
    ]


def _apptainer(asked: Container) -> list[str]:
    """It passes its own environment on; `--userns`: without setuid. An image without a scheme that is not a
    file is from a registry."""
    local = "://" in asked.image or asked.image.startswith("/")
    return [
        "exec",
        "--userns",
        "--no-home",
        *(["--nv"] if asked.gpus else []),
        f"--pwd={asked.workdir}",
        *(f"--bind={path}:{path}" for path in asked.folders),
        asked.image if local else f"docker://{asked.image}",
    ]
