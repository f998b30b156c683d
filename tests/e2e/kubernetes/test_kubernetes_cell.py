"""Jobs on a real cluster: Penstock's services, the cluster's reporter, a real API server, and kubelets that
admit as real ones do. Containers are hollow: they run until they are deleted."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from infra.devservers.kubernetes import KubernetesCluster, kubernetes_cluster
from infra.devservers.kubernetes_parts import Machine
from tests.support.installation.kubernetes_cell import (
    IMAGE,
    NAMESPACE,
    ONE_GPU,
    REPORTER,
    KubernetesCell,
    install,
    kubernetes_cell,
    requests_of,
)
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.kubernetes, pytest.mark.postgres]


@pytest.fixture(scope="module")
def cluster() -> Iterator[KubernetesCluster]:
    """Two nodes of four GPUs."""
    with kubernetes_cluster(users=[REPORTER]) as started:
        started.add_nodes(["n1", "n2"], Machine(gpus=4))
        install(started, "rbac", "fence", "door")
        yield started


@pytest.fixture
def cell(cluster: KubernetesCluster, dsn: str, tmp_path: Path) -> Iterator[KubernetesCell]:
    with kubernetes_cell(cluster, dsn, tmp_path) as started:
        started.gateway.until_nodes(2)
        yield started
    cluster.kubectl("delete", "pods", "--all", "--namespace", NAMESPACE, "--wait=false", "--force")
    for pod in started.pods():
        name, patch = pod["metadata"]["name"], '{"metadata": {"finalizers": null}}'
        cluster.kubectl("patch", "pod", name, "--namespace", NAMESPACE, "--type", "merge", "--patch", patch)
    until(lambda: not started.pods(), "an empty namespace")


def phases(cell: KubernetesCell) -> list[str]:
    return sorted(pod["status"].get("phase", "") for pod in cell.pods())


def until(what: Callable[[], Any], text: str) -> Any:
    return wait_until(what, lambda: text)


def test_a_job_with_an_image_runs_as_a_pod_and_ends_with_it(cell: KubernetesCell) -> None:
    """Submit, run, cancel: the pod was created with its node, its end is the kubelet's word."""
    job_id = cell.gateway.submit(["python", "train.py"], name="first", **ONE_GPU)
    row = cell.gateway.until(job_id, "running")
    [pod] = cell.pods()
    assert pod["spec"]["nodeName"] in {"n1", "n2"}
    assert row["nodes"] == [f"k8s/{pod['spec']['nodeName']}"]
    assert requests_of(pod) == {"cpu": "1", "memory": "256Mi", "nvidia.com/gpu": "1"}
    assert pod["metadata"]["annotations"]["penstock.dev/job"] == job_id

    cell.gateway.post(f"/v1/jobs/{job_id}/cancel")

    ended = cell.gateway.until_ended(job_id)
    assert ended["outcome"] == "cancelled"
    assert len(cell.gateway.events(job_id, "task.exited")) == 1
    assert phases(cell) == ["Failed"], "its name is taken while a late request may come"


def test_a_queue_is_nothing_in_the_cluster(cell: KubernetesCell) -> None:
    """Twelve jobs for eight GPUs: eight pods, which every kubelet admits; the others wait in Penstock and
    start as GPUs become free."""
    jobs = [cell.gateway.submit(["train"], name=f"j{n}", **ONE_GPU) for n in range(12)]
    until(lambda: phases(cell) == ["Running"] * 8, "eight running pods")
    waiting = [job for job in jobs if cell.gateway.job(job)["status"] == "queued"]
    assert len(waiting) == 4

    for job in [job for job in jobs if job not in waiting][:4]:
        cell.gateway.post(f"/v1/jobs/{job}/cancel")

    for job in waiting:
        cell.gateway.until(job, "running")
    until(lambda: phases(cell).count("Running") == 8, "eight running pods again")


def test_a_gang_starts_whole_and_its_members_know_each_other(cell: KubernetesCell) -> None:
    """Four workers of two GPUs each, over both nodes."""
    resources = {"gpus": 2, "cores": 1, "host_memory_mib": 256}
    job_id = cell.gateway.submit(["train"], workers=4, **IMAGE, resources=resources)
    cell.gateway.until(job_id, "running")
    pods = sorted(cell.pods(), key=lambda pod: int(pod["metadata"]["annotations"]["penstock.dev/rank"]))
    assert [pod["status"]["phase"] for pod in pods] == ["Running"] * 4
    assert {pod["spec"]["nodeName"] for pod in pods} == {"n1", "n2"}
    variables = [
        {each["name"]: each.get("value") for each in pod["spec"]["containers"][0]["env"]} for pod in pods
    ]
    assert [found["RANK"] for found in variables] == ["0", "1", "2", "3"]
    shared = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE")
    assert len({tuple(found[name] for name in shared) for found in variables}) == 1


def test_pods_of_others_are_no_capacity(cell: KubernetesCell) -> None:
    """Somebody's pods hold cores of both nodes; a job for all of them waits, with the reason."""
    for name, node in (("a", "n1"), ("b", "n2")):
        container = {"name": "main", "image": "other", "resources": {"requests": {"cpu": "3"}}}
        spec = {"nodeName": node, "containers": [container]}
        pod = {"metadata": {"name": name}, "spec": spec}
        created = cell.cluster.request("POST", "/api/v1/namespaces/default/pods", pod)
        assert created.status == 201, created.body

    def cores() -> list[int]:
        return [node["cores"] for node in cell.gateway.get("/v1/nodes")["nodes"]]

    whole = int(cell.cluster.request("GET", "/api/v1/nodes/n1").body["status"]["allocatable"]["cpu"])
    wait_until(lambda: cores() == [whole - 3] * 2, lambda: f"3 of {whole} cores less: {cores()}")
    for name in ("a", "b"):
        cell.cluster.request("DELETE", f"/api/v1/namespaces/default/pods/{name}")
    until(lambda: cores() == [whole] * 2, "all capacity again")


def test_a_program_without_an_image_is_told_to_name_one(cell: KubernetesCell) -> None:
    job_id = cell.gateway.submit(["train"], resources={"gpus": 1})
    told = until(lambda: cell.gateway.get(f"/v1/jobs/{job_id}/why").get("detail"), "an explanation")
    assert "container: IMAGE" in told


def test_a_reporter_that_is_killed_loses_nothing_and_starts_nothing_twice(cell: KubernetesCell) -> None:
    """Killed while pods are created; the next one knows all of them from the pods alone."""
    jobs = [cell.gateway.submit(["train"], name=f"k{n}", **ONE_GPU) for n in range(8)]
    until(lambda: len(cell.pods()) >= 2, "the first pods")
    cell.reporter.kill9()

    cell.reporter = cell.start_reporter(name="second")

    for job in jobs:
        cell.gateway.until(job, "running")
    assert len(cell.pods()) == 8
    assert {row["attempt"] for row in map(cell.gateway.job, jobs)} == {1}


def test_of_two_reporters_the_older_one_ends(cell: KubernetesCell) -> None:
    """Somebody scales the deployment to two."""
    second = cell.start_reporter(name="second")
    until(lambda: not cell.reporter.running, "the end of the first")
    assert "run one reporter for cluster k8s" in (cell.logs())
    job_id = cell.gateway.submit(["train"], **ONE_GPU)
    cell.gateway.until(job_id, "running")
    cell.reporter = second


def test_a_node_that_boots_anew_proves_that_its_pods_have_ended(cell: KubernetesCell) -> None:
    """The machine under a job is reset: the job starts again elsewhere or there, once."""
    job_id = cell.gateway.submit(["train"], **ONE_GPU)
    row = cell.gateway.until(job_id, "running")
    [node] = row["nodes"]
    name = node.removeprefix("k8s/")
    cell.cluster.kill_node(name)
    cell.cluster.restart_node(name, rebooted=True)

    until(lambda: cell.gateway.job(job_id)["attempt"] == 2, "a second attempt")
    cell.gateway.until(job_id, "running")
