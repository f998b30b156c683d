"""The cluster on which Kubernetes tests stand: it refuses, ends, falls silent and forgets as real ones do."""

import itertools
import json
import os
import shutil
import signal
import ssl
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from kubernetes_asyncio import client, config

from infra.devservers.kubernetes import KubernetesCluster, kubernetes_cluster
from infra.devservers.kubernetes_parts import GPU, Machine, Users
from infra.devservers.processes import HIGHEST_PORT, LOWEST_PORT
from tests.support.processes import processes_with
from tests.support.waiting import wait_until

pytestmark = pytest.mark.kubernetes

READER = "reader"
REPORTER = "system:serviceaccount:penstock:reporter"
GRACE_S = 30
PODS = "/api/v1/namespaces/default/pods"
_numbers = itertools.count()


@pytest.fixture(scope="module")
def cluster() -> Iterator[KubernetesCluster]:
    with kubernetes_cluster(users=[READER, REPORTER]) as cluster:
        cluster.add_nodes(["gpu-1", "gpu-2"], Machine(cpus=8, memory_mib=16_384, labels={"rack": "r7"}))
        yield cluster


def create_pod(
    cluster: KubernetesCluster,
    node: str,
    *,
    cpu: str = "1",
    sidecars: list[dict[str, Any]] | None = None,
    **annotations: str,
) -> str:
    """A pod with one GPU, forced on a node; returns its name."""
    name = f"pod-{next(_numbers)}"
    container = {"name": "main", "image": "none", "resources": {"limits": {GPU: "1", "cpu": cpu}}}
    spec = {
        "nodeName": node,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE_S,
        "initContainers": sidecars or [],
        "containers": [container],
    }
    metadata = {
        "name": name,
        "annotations": {
            f"penstock.test/{key.replace('_', '-')}": value for key, value in annotations.items()
        },
    }
    answer = cluster.request("POST", PODS, {"metadata": metadata, "spec": spec})
    assert answer.status == 201, answer.body
    return name


def status_of(cluster: KubernetesCluster, pod: str) -> dict[str, Any]:
    status: dict[str, Any] = cluster.request("GET", f"{PODS}/{pod}").body["status"]
    return status


def wait_phase(cluster: KubernetesCluster, pod: str, *phases: str) -> dict[str, Any]:
    """The pod's status in the first of these phases."""

    def found() -> dict[str, Any] | None:
        status = status_of(cluster, pod)
        return status if status.get("phase") in phases else None

    return wait_until(found, f"{pod} in {phases}") or {}


def remove(cluster: KubernetesCluster, pods: list[str]) -> None:
    for pod in pods:
        cluster.request("DELETE", f"{PODS}/{pod}")
    wait_until(lambda: not set(pods) & names(cluster), f"the end of {pods}")


def names(cluster: KubernetesCluster) -> set[str]:
    return {pod["metadata"]["name"] for pod in cluster.request("GET", PODS).body["items"]}


def watch(cluster: KubernetesCluster, path: str, version: str) -> Iterator[dict[str, Any]]:
    """Events since a resource version."""
    trust = ssl.create_default_context(cafile=cluster.ca)
    headers = {"Authorization": f"Bearer {cluster.token()}"}
    query = {"watch": "1", "resourceVersion": version}
    with (
        httpx.Client(verify=trust, headers=headers, timeout=None) as calls,  # clock: it waits for events
        calls.stream("GET", cluster.url + path, params=query) as answer,
    ):
        for line in answer.iter_lines():
            yield json.loads(line)


def version_of(cluster: KubernetesCluster, path: str) -> str:
    return str(cluster.request("GET", path).body["metadata"]["resourceVersion"])


def test_a_node_reports_its_machine(cluster: KubernetesCluster) -> None:
    """What the facts of a node are made of."""
    node = cluster.request("GET", "/api/v1/nodes/gpu-1").body
    allocatable = node["status"]["allocatable"]
    assert (allocatable["cpu"], allocatable["memory"], allocatable[GPU]) == ("8", "16Gi", "4")
    assert node["metadata"]["labels"]["rack"] == "r7"
    assert node["metadata"]["labels"]["kubernetes.io/hostname"] == "gpu-1"


def test_a_kubelet_leaves_its_machine_alone(cluster: KubernetesCluster) -> None:
    """A usual kubelet listens on every address and adds rules to the firewall, which stay."""
    assert "iptables" not in (cluster.folder / "gpu-1.log").read_text()
    addresses = {
        connection.laddr.ip
        for pid in cluster.pids.values()
        for connection in psutil.Process(pid).net_connections("inet")
    }
    assert addresses <= {"127.0.0.1", "::ffff:127.0.0.1"}


def test_a_pod_ends_by_itself_with_its_exit_code(cluster: KubernetesCluster) -> None:
    """A training ends, well or with an error."""
    well, badly = (
        create_pod(cluster, "gpu-1", run_for="50ms"),
        create_pod(cluster, "gpu-1", run_for="50ms", exit_code="3"),
    )
    assert wait_phase(cluster, well, "Succeeded", "Failed")["phase"] == "Succeeded"
    (container,) = wait_phase(cluster, badly, "Succeeded", "Failed")["containerStatuses"]
    assert container["state"]["terminated"]["exitCode"] == 3
    remove(cluster, [well, badly])


def test_a_deleted_pod_ends_before_it_is_gone(cluster: KubernetesCluster) -> None:
    """The proof that its GPU is free: a terminal phase, written by the kubelet, before the object goes."""
    pod = create_pod(cluster, "gpu-1")
    wait_phase(cluster, pod, "Running")
    version = version_of(cluster, PODS)
    cluster.request("DELETE", f"{PODS}/{pod}")
    phases = []
    for event in watch(cluster, PODS, version):
        if event["object"]["metadata"]["name"] == pod:
            phases.append((event["type"], event["object"]["status"]["phase"]))
            if event["type"] == "DELETED":
                break
    assert phases[0] == ("MODIFIED", "Running")
    assert ("MODIFIED", "Failed") in phases
    assert phases[-1] == ("DELETED", "Failed")


def test_a_kubelet_refuses_pods_beyond_its_gpus(cluster: KubernetesCluster) -> None:
    """Two schedulers give one node six GPUs of four: its kubelet judges last.

    In the first two seconds of its life a kubelet would tell the refusal 10 s later.
    """
    pods = [create_pod(cluster, "gpu-1") for _ in range(6)]
    ends = [wait_phase(cluster, pod, "Running", "Failed") for pod in pods]
    assert sorted(end["phase"] for end in ends) == ["Failed"] * 2 + ["Running"] * 4
    assert {end.get("reason") for end in ends if end["phase"] == "Failed"} == {f"OutOf{GPU}"}
    remove(cluster, pods)


def test_a_running_pod_gets_other_cores(cluster: KubernetesCluster) -> None:
    """CODA's decision for a pod: its limit of cores moves while it runs."""
    pod = create_pod(cluster, "gpu-1", cpu="2")
    wait_phase(cluster, pod, "Running")
    container = {"name": "main", "resources": {"requests": {"cpu": "4"}, "limits": {"cpu": "4"}}}
    patch = "application/strategic-merge-patch+json"
    body = {"spec": {"containers": [container]}}
    assert cluster.request("PATCH", f"{PODS}/{pod}/resize", body, content_type=patch).status == 200

    def cores() -> str:
        (container,) = status_of(cluster, pod)["containerStatuses"]
        return str(container["resources"]["limits"]["cpu"])

    wait_until(lambda: cores() == "4", "four cores")
    container["resources"] = {"limits": {GPU: "2"}}
    assert cluster.request("PATCH", f"{PODS}/{pod}/resize", body, content_type=patch).status == 422
    remove(cluster, [pod])


def test_sidecars_do_not_keep_a_pod(cluster: KubernetesCluster) -> None:
    """The training ends; the container that reports its progress would run for ever."""
    sidecar = {"name": "reports", "image": "none", "restartPolicy": "Always"}
    pod = create_pod(cluster, "gpu-1", sidecars=[sidecar], run_for="50ms")
    assert wait_phase(cluster, pod, "Succeeded", "Failed")["phase"] == "Succeeded"
    remove(cluster, [pod])


def test_a_dead_kubelet_holds_its_pods_until_it_is_back(cluster: KubernetesCluster) -> None:
    """A machine loses power and boots again."""
    pod = create_pod(cluster, "gpu-2")
    wait_phase(cluster, pod, "Running")
    boot_id = cluster.request("GET", "/api/v1/nodes/gpu-2").body["status"]["nodeInfo"]["bootID"]
    cluster.kill_node("gpu-2")
    cluster.request("DELETE", f"{PODS}/{pod}")
    other = create_pod(cluster, "gpu-1")
    wait_phase(cluster, other, "Running")
    assert status_of(cluster, pod)["phase"] == "Running"
    cluster.restart_node("gpu-2", rebooted=True)
    assert cluster.request("GET", "/api/v1/nodes/gpu-2").body["status"]["nodeInfo"]["bootID"] != boot_id
    remove(cluster, [pod, other])


def test_an_open_watch_survives_a_pause_of_the_server(cluster: KubernetesCluster) -> None:
    """The control plane's machine swaps for a minute."""
    events = watch(cluster, PODS, version_of(cluster, PODS))
    first = create_pod(cluster, "gpu-1")
    assert next(events)["object"]["metadata"]["name"] == first
    cluster.pause_server()
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(create_pod, cluster, "gpu-1")
        state = Path(f"/proc/{cluster.pids['kube-apiserver']}/stat").read_text().rpartition(")")[2].split()[0]
        assert (state, answer.done()) == ("T", False)
        cluster.resume_server()
        second = answer.result()
    assert second in (event["object"]["metadata"]["name"] for event in events)
    events.close()  # type: ignore[attr-defined]
    remove(cluster, [first, second])


def test_history_that_is_compacted_is_gone_and_records_stay(cluster: KubernetesCluster) -> None:
    """A reporter comes back after a night, with the version at which it had stopped watching."""
    path = "/api/v1/namespaces/default/configmaps"
    cluster.request("POST", path, {"metadata": {"name": "kept"}, "data": {"term": "1"}})
    version = version_of(cluster, path)
    cluster.request("PUT", f"{path}/kept", {"metadata": {"name": "kept"}, "data": {"term": "2"}})
    assert cluster.compact_etcd() > int(version)
    cluster.kill_server()
    with pytest.raises(OSError, match="refused"):
        cluster.request("GET", path)
    cluster.restart_etcd()
    cluster.restart_server()
    event = next(watch(cluster, path, version))
    assert event.get("code") == 410 or event["object"]["code"] == 410, event
    assert cluster.request("GET", f"{path}/kept").body["data"] == {"term": "2"}


def test_rights_and_tokens(cluster: KubernetesCluster) -> None:
    """A service account's token is replaced, as every hour on real clusters; the former is refused."""
    nodes = "/api/v1/nodes"
    assert cluster.request("GET", nodes, user=READER).status == 403
    cluster.kubectl("create", "clusterrole", "reads", "--verb=get,list,watch", "--resource=pods")
    words = ("create", "clusterrolebinding", "reads", "--clusterrole=reads", f"--user={READER}")
    cluster.kubectl(*words, "--group=system:serviceaccounts:penstock")
    for user in (READER, REPORTER):
        wait_until(
            lambda user=user: cluster.request("GET", PODS, user=user).status == 200, f"rights of {user}"
        )
        assert cluster.request("DELETE", f"{PODS}/none", user=user).status == 403
    former = cluster.token(REPORTER)
    cluster.rotate_token(REPORTER)
    headers = {"Authorization": f"Bearer {former}"}
    trust = ssl.create_default_context(cafile=cluster.ca)
    assert httpx.get(cluster.url + PODS, headers=headers, verify=trust).status_code == 401
    assert cluster.users.token_file(REPORTER).read_text() == cluster.token(REPORTER) != former
    assert LOWEST_PORT <= cluster.port <= HIGHEST_PORT


async def test_the_library_of_the_node_reporter_connects(cluster: KubernetesCluster) -> None:
    """By the kubeconfig, as the administrator."""
    settings = client.Configuration()
    await config.load_kube_config(str(cluster.kubeconfig()), client_configuration=settings)
    async with client.ApiClient(settings) as calls:
        assert (await client.CoreV1Api(calls).list_namespaced_pod("default")).items == []


def test_controllers_scheduler_and_silence() -> None:
    """A Job runs through Kubernetes' own hands; then its node falls silent."""
    with kubernetes_cluster(controllers=True, scheduler=True, lease_s=4) as cluster:
        cluster.add_node("gpu-1")
        container = {"name": "main", "image": "none", "resources": {"limits": {GPU: "1"}}}
        template = {
            "metadata": {"annotations": {"penstock.test/run-for": "50ms"}},
            "spec": {"restartPolicy": "Never", "containers": [container]},
        }
        jobs = "/apis/batch/v1/namespaces/default/jobs"
        cluster.request("POST", jobs, {"metadata": {"name": "one"}, "spec": {"template": template}})
        cluster.pause_node("gpu-1")
        wait_until(lambda: readiness(cluster, "gpu-1") == "Unknown", "the node's silence")
        cluster.resume_node("gpu-1")
        wait_until(lambda: readiness(cluster, "gpu-1") == "True", "the node's return")
        wait_until(
            lambda: cluster.request("GET", f"{jobs}/one").body["status"].get("succeeded") == 1,
            "the end of the job",
        )


def readiness(cluster: KubernetesCluster, node: str) -> str | None:
    conditions = cluster.request("GET", f"/api/v1/nodes/{node}").body["status"]["conditions"]
    return next((each["status"] for each in conditions if each["type"] == "Ready"), None)


@pytest.mark.kwok
@pytest.mark.slow
def test_kwok_plays_a_hundred_nodes_and_checks_nothing() -> None:
    """Figures of large clusters come from it; refusals never do."""
    with kubernetes_cluster() as cluster:
        cluster.start_kwok()
        cluster.add_simulated_nodes([f"far-{number}" for number in range(100)], Machine(gpus=1))
        for number in range(100):
            wait_until(lambda number=number: readiness(cluster, f"far-{number}") == "True", "all nodes")
        for pod in [create_pod(cluster, "far-7") for _ in range(2)]:
            wait_phase(cluster, pod, "Running")


@pytest.mark.parametrize(
    "number",
    [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGKILL],
    ids=lambda number: number.name,
)
def test_make_kube_takes_its_cluster_along_however_it_ends(number: signal.Signals) -> None:
    """Ctrl-C, or a kill -9 of the launcher: no server and no kubelet is left on the machine."""
    argv = [sys.executable, "-m", "infra.devservers.kubernetes", "--nodes=1"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=dict(os.environ)) as launcher:
        assert launcher.stdout is not None
        line = ""
        while "KUBECONFIG=" not in line:
            line = launcher.stdout.readline()
            assert line, "the launcher ended before it announced a cluster"
        folder = Path(line.rpartition("=")[2].strip()).parents[1]
        assert len(processes_with(str(folder).encode())) == 3, "etcd, kube-apiserver and a kubelet"
        launcher.send_signal(number)
        launcher.wait()
    wait_until(lambda: not processes_with(str(folder).encode()), "the end of all processes")
    if number is signal.SIGKILL:  # nobody can tidy up after that one
        shutil.rmtree(folder)
    assert not folder.exists()


def test_files_of_users_are_private(tmp_path: Path) -> None:
    """Whoever can read a token is its user."""
    users = Users(tmp_path / "users", [READER])
    users.write("https://127.0.0.1:1", tmp_path / "ca")
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "users").iterdir()} == {0o600}
    assert json.loads(users.kubeconfig(READER).read_text())["current-context"] == "penstock"
    with pytest.raises(KeyError):
        users.rotate("nobody")
