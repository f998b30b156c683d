"""A cell on a real cluster whose servers fail: nothing runs twice, nothing is lost, and all goes on."""

import json
import os
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from infra.devservers.build_cache import REPOSITORY
from infra.devservers.kubernetes import KubernetesCluster, kubernetes_cluster
from infra.devservers.kubernetes_parts import Machine, obtain_kubernetes
from tests.support.installation.kubernetes_cell import (
    NAMESPACE,
    ONE_GPU,
    REPORTER,
    KubernetesCell,
    install,
    kubernetes_cell,
)
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.kubernetes, pytest.mark.postgres]

PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"


@pytest.fixture
def cell(dsn: str, tmp_path: Path) -> Iterator[KubernetesCell]:
    """A cluster of its own: two nodes of four GPUs."""
    with kubernetes_cluster(users=[REPORTER]) as cluster:
        cluster.add_nodes(["n1", "n2"], Machine(gpus=4))
        install(cluster, "rbac", "fence", "door")
        with kubernetes_cell(cluster, dsn, tmp_path) as started:
            started.gateway.until_nodes(2)
            yield started


def submit(cell: KubernetesCell, count: int) -> list[str]:
    return [cell.gateway.submit(["train"], name=f"job-{number}", **ONE_GPU) for number in range(count)]


def all_run_once(cell: KubernetesCell, jobs: list[str]) -> None:
    """Each job has one living pod, in its first attempt; no node has more pods than GPUs."""
    for job in jobs:
        cell.gateway.until(job, "running")
    assert {cell.gateway.job(job)["attempt"] for job in jobs} == {1}
    living = [pod for pod in cell.pods() if pod["status"].get("phase") in ("Pending", "Running")]
    assert Counter(pod["metadata"]["annotations"]["penstock.dev/job"] for pod in living) == Counter(jobs)
    assert max(Counter(pod["spec"]["nodeName"] for pod in living).values()) <= 4


def server_killed(cluster: KubernetesCluster) -> None:
    cluster.kill_server()
    cluster.restart_server()


def etcd_killed(cluster: KubernetesCluster) -> None:
    cluster.kill_etcd()
    cluster.restart_etcd()


def history_forgotten(cluster: KubernetesCluster) -> None:
    """etcd is compacted while the server is away: watches get 410."""
    cluster.kill_server()
    cluster.compact_etcd()
    cluster.restart_server()


def token_rotated(cluster: KubernetesCluster) -> None:
    cluster.rotate_token(REPORTER)


SLOW = [
    pytest.param(fails, marks=pytest.mark.slow) for fails in (etcd_killed, history_forgotten, token_rotated)
]


@pytest.mark.parametrize("fails", [server_killed, *SLOW])
def test_jobs_start_across_a_failure_of_the_servers(
    cell: KubernetesCell, fails: Callable[[KubernetesCluster], None]
) -> None:
    """Four jobs run, four are submitted while the server is away."""
    before = submit(cell, 4)
    all_run_once(cell, before)
    fails(cell.cluster)

    after = submit(cell, 4)

    all_run_once(cell, before + after)


@pytest.mark.slow
def test_a_server_that_hangs_holds_up_starts_and_nothing_else(cell: KubernetesCell) -> None:
    """It neither answers nor closes: the jobs wait, and start once it goes on."""
    cell.cluster.pause_server()
    jobs = submit(cell, 2)
    for job in jobs:
        cell.gateway.until(job, "launching")
    cell.cluster.resume_server()

    all_run_once(cell, jobs)


@pytest.mark.slow
def test_rights_that_are_taken_away_are_named_and_given_back(cell: KubernetesCell) -> None:
    """Somebody edits the role: the log says which verb is missing; with it back, all goes on."""
    role = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{NAMESPACE}/roles/penstock-node-reporter"
    given = cell.cluster.request("GET", role).body
    rules = [
        rule | {"verbs": [verb for verb in rule["verbs"] if verb != "create"]} for rule in given["rules"]
    ]
    patch = {"rules": [rule for rule in rules if rule["verbs"]]}
    merge = "application/merge-patch+json"
    assert cell.cluster.request("PATCH", role, patch, content_type=merge).status == 200
    [job] = submit(cell, 1)
    wait_until(
        lambda: "cannot create resource" in json.dumps(cell.gateway.job(job)) + cell.logs(), "the verb"
    )

    assert cell.cluster.request("PATCH", role, {"rules": given["rules"]}, content_type=merge).status == 200

    [again] = submit(cell, 1)
    cell.gateway.until(again, "running")


@pytest.mark.slow
def test_a_pod_that_is_deleted_by_force_is_no_proof(cell: KubernetesCell) -> None:
    """An object without a word of the kubelet: its GPU stays held until the node has booted anew."""
    [job] = submit(cell, 1)
    all_run_once(cell, [job])
    [pod] = cell.pods()
    name, node = pod["metadata"]["name"], pod["spec"]["nodeName"]
    cell.cluster.kill_node(node)
    merge = "application/merge-patch+json"
    cell.cluster.request("PATCH", f"{PODS}/{name}", {"metadata": {"finalizers": None}}, content_type=merge)
    cell.cluster.request("DELETE", f"{PODS}/{name}", {"gracePeriodSeconds": 0})
    others = submit(cell, 8)
    wait_until(
        lambda: sum(cell.gateway.job(other)["status"] == "running" for other in others) == 4,
        "four jobs on the other node",
    )
    assert cell.gateway.job(job)["outcome"] is None

    cell.cluster.restart_node(node, rebooted=True)

    wait_until(
        lambda: cell.gateway.job(job)["attempt"] >= 2, lambda: f"a next attempt: {cell.gateway.job(job)}"
    )


def test_three_hundred_writes_of_an_older_term_place_nothing(cell: KubernetesCell) -> None:
    """A reporter that was replaced, and does not know, goes on for minutes."""
    [job] = submit(cell, 1)
    all_run_once(cell, [job])
    [pod] = cell.pods()
    term = int(pod["metadata"]["annotations"]["penstock.dev/term"])
    cell.reporter.kill9()
    cell.reporter = cell.start_reporter(name="second")
    meta = {name: pod["metadata"][name] for name in ("annotations", "labels")}
    assert int(meta["annotations"]["penstock.dev/term"]) == term
    refused = []
    for number in range(300):
        manifest = {"metadata": {**meta, "name": f"late-{number}"}, "spec": bare(pod["spec"])}
        refused.append(cell.cluster.request("POST", PODS, manifest, user=REPORTER))
    assert {answer.status for answer in refused} == {403}
    assert "penstock-term: this reporter was replaced" in refused[0].body["message"]
    assert len(cell.pods()) == 1


def bare(spec: dict[str, Any]) -> dict[str, Any]:
    """What a reporter writes of it."""
    return {name: spec[name] for name in ("nodeName", "containers", "restartPolicy", "schedulerName")}


def test_the_commands_of_the_page_give_a_reporter_its_rights(dsn: str, tmp_path: Path) -> None:
    """An administrator follows the page word for word, on a cluster that has never seen Penstock."""
    page = (REPOSITORY / "services/penstock_services/node_reporter/kubernetes/README.md").read_text()
    block = page.partition("```sh\n")[2].partition("penstock-node-reporter --backend")[0]
    kubeconfig = tmp_path / "kubeconfig"
    with kubernetes_cluster() as cluster:
        cluster.add_nodes(["n1"], Machine(gpus=4))
        path = f"{obtain_kubernetes()}:{os.environ['PATH']}"
        env = os.environ | {"PATH": path, "KUBECONFIG": str(cluster.kubeconfig())}
        commands = block.replace("FILE", str(kubeconfig))
        subprocess.run(["bash", "-euc", commands], cwd=REPOSITORY, env=env, check=True, capture_output=True)
        with kubernetes_cell(cluster, dsn, tmp_path, kubeconfig) as cell:
            cell.gateway.until_nodes(1)
            all_run_once(cell, submit(cell, 4))
