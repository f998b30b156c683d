"""Command lines of containers, and the refusals of nodes that have no runtime. Podman 4.3 with runc has run
them; CI has none."""

import os
from pathlib import Path

import pytest

from penstock_services.node_reporter.shell.isolation.containers import (
    Container,
    Runtime,
    check_devices,
    command_line,
    find_runtime,
)
from penstock_services.node_reporter.shell.ports import NotStartable

ASKED = Container(
    "pytorch:2.5",
    ("python", "train.py", "--lr", "0.1"),
    "/data/run",
    ("/tasks/7/phases", "/data/run"),
    {"RANK", "LR"},
    ("GPU-1",),
    (1000, 100),
)


def test_podman_keeps_the_container_in_the_tasks_namespaces() -> None:
    """A value on a command line is in `ps` for all to read: variables are named, and podman takes them from
    its own environment."""
    line = command_line(Runtime("podman", "/usr/bin/podman", "/usr/bin/unshare"), ASKED)
    at = line.index("/usr/bin/podman")
    found = line[at:]
    assert line[:at] == [
        "/usr/bin/unshare",
        "--user",
        "--map-root-user",
        "--mount",
        "--",
        "env",
        "_CONTAINERS_USERNS_CONFIGURED=done",
        "_CONTAINERS_ROOTLESS_UID=1000",
        "_CONTAINERS_ROOTLESS_GID=100",
    ]
    assert found[:2] == ["/usr/bin/podman", "run"]
    assert found[-5:] == ["pytorch:2.5", "python", "train.py", "--lr", "0.1"]
    options = found[2:-5]
    assert {
        "--rm",
        "--pid=host",
        "--entrypoint=",
        "--security-opt=no-new-privileges",
        "--workdir=/data/run",
    } <= set(options)
    assert [option for option in options if option.startswith("--volume")] == [
        "--volume=/tasks/7/phases:/tasks/7/phases",
        "--volume=/data/run:/data/run",
        "--volume=/dev/shm:/dev/shm",
    ]
    assert [option for option in options if option.startswith("--env")] == [
        "--env=LR",
        "--env=RANK",
        "--env=NVIDIA_VISIBLE_DEVICES=void",
    ]
    assert "--device=nvidia.com/gpu=GPU-1" in options
    assert not any(
        "detach" in option or "privileged" in option.replace("no-new-privileges", "") for option in options
    )


def test_apptainer_takes_an_image_of_a_registry_or_a_file() -> None:
    runtime = Runtime("apptainer", "/usr/bin/apptainer")
    found = command_line(runtime, ASKED)
    assert found[:2] == ["/usr/bin/apptainer", "exec"]
    assert {"--userns", "--nv", "--pwd=/data/run", "--bind=/data/run:/data/run"} <= set(found)
    assert found[-5:] == ["docker://pytorch:2.5", *ASKED.command]
    for image in ("/images/torch.sif", "oras://registry/torch"):
        assert image in command_line(runtime, ASKED._replace(image=image, gpus=()))
    assert "--nv" not in command_line(runtime, ASKED._replace(gpus=()))


@pytest.mark.parametrize("path", ["/data/a:b", "/data/a,b", '/data/"x"'])
def test_a_path_that_would_change_the_mounts_is_refused(path: str) -> None:
    with pytest.raises(NotStartable, match="cannot be mounted"):
        command_line(Runtime("podman", "podman"), ASKED._replace(workdir=path))


def test_a_node_uses_what_it_has_and_names_what_it_lacks(tmp_path: Path) -> None:
    """Which runtime a node has is found when a task asks for it: it may have been installed since the
    reporter began."""

    def install(name: str) -> None:
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)

    path = f"{tmp_path}{os.pathsep}/nowhere"
    for installed, complaint in (
        (None, "neither podman nor apptainer is on this node"),
        ("docker", "docker alone is on this node"),
    ):
        if installed is not None:
            install(installed)
        with pytest.raises(NotStartable, match=complaint):
            find_runtime(path, "pytorch:2.5", root=False)
    install("podman")
    with pytest.raises(NotStartable, match="install util-linux"):
        find_runtime(path, "pytorch:2.5", root=False)
    install("unshare")
    podman = ("podman", str(tmp_path / "podman"), str(tmp_path / "unshare"))
    assert find_runtime(path, "pytorch:2.5", root=False) == podman
    for image in ("/images/torch.sif", "oras://registry/torch"):
        with pytest.raises(NotStartable, match="only apptainer runs"):
            find_runtime(path, image, root=False)
    install("apptainer")
    assert find_runtime(path, "/images/torch.sif", root=False) == (
        "apptainer",
        str(tmp_path / "apptainer"),
        "",
    )
    assert find_runtime(path, "docker://pytorch:2.5", root=False).name == "podman"
    with pytest.raises(NotStartable, match="give its reporter --task-user"):
        find_runtime(path, "pytorch:2.5", root=True)


def test_a_gpu_that_podman_could_not_name_is_refused_before_it_starts(tmp_path: Path) -> None:
    """`nvidia-ctk cdi generate` names GPUs by index unless it is asked for UUIDs; an index may be another GPU
    after the next boot."""
    podman, apptainer = Runtime("podman", "podman"), Runtime("apptainer", "apptainer")
    folders = (tmp_path / "etc", tmp_path / "run")
    folders[0].mkdir()
    (folders[0] / "nvidia.yaml").write_text(
        'cdiVersion: 0.5.0\ndevices:\n- name: "0"\n- name: all\nkind: nvidia.com/gpu\n'
    )
    with pytest.raises(NotStartable, match=r"no CDI description .* GPU-1.*--device-name-strategy=uuid"):
        check_devices(podman, ["GPU-1"], folders)
    check_devices(podman, [], folders)
    check_devices(apptainer, ["GPU-1"], folders)
    folders[1].mkdir()
    (folders[1] / "nvidia.json").write_text(
        '{"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": [{"name": "GPU-1"}]}'
    )
    check_devices(podman, ["GPU-1"], folders)
    with pytest.raises(NotStartable, match="GPU-2"):
        check_devices(podman, ["GPU-1", "GPU-2"], folders)
