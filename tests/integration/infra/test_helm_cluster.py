"""The chart on a real API server: each object accepted, the reporter's rights minimal, policies at work."""

import json
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from functools import partial
from typing import Any

import pytest

from infra.devservers.helm import CHART
from infra.devservers.kubernetes import KubernetesCluster, kubernetes_cluster
from infra.devservers.kubernetes_parts import GPU
from penstock.private_files import read_private
from penstock_services.node_reporter.kubernetes.core.messages import (
    CreatePod,
    DeletePod,
    ReadPod,
    ReleasePod,
)
from penstock_services.node_reporter.kubernetes.core.objects import Node, Pod
from penstock_services.node_reporter.kubernetes.shell.api import ApiServer
from penstock_services.node_reporter.kubernetes.shell.fence import FenceNotRaised, raise_term
from penstock_services.node_reporter.kubernetes.shell.reflector import Broken, Reflector
from penstock_services.node_reporter.kubernetes.shell.writer import Writer
from tests.support.helm import NAMESPACE, NEEDED, REPORTER, SETS, Object, helm, merged, named, pods, rendered
from tests.support.waiting import await_until, wait_until

pytestmark = [pytest.mark.helm, pytest.mark.kubernetes]

ACCOUNT = f"system:serviceaccount:{NAMESPACE}:{REPORTER}"
SOMEBODY = "somebody"
ENFORCED = {f"pod-security.kubernetes.io/{mode}": "restricted" for mode in ("enforce", "warn")}
RBAC = "/apis/rbac.authorization.k8s.io/v1"
REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
DRY_RUN = "dryRun=All"
CREATED, FORBIDDEN, UNPROCESSABLE = 201, 403, 422
Right = tuple[str, str, str, str]
"""Namespace ("": all), resource, name of the object ("": any), verb."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[KubernetesCluster]:
    """With the namespaces of all value sets, which enforce `restricted`; in one the chart with its door."""
    with kubernetes_cluster(users=[ACCOUNT, SOMEBODY]) as cluster:
        for namespace in sorted({found.namespace for found in SETS.values()}):
            body = {"metadata": {"name": namespace, "labels": ENFORCED}}
            assert cluster.request("POST", "/api/v1/namespaces", body).status == CREATED
        let_create_pods(cluster, SOMEBODY)
        on_cluster(cluster, "install", {"door": {"enabled": True}})
        yield cluster


def let_create_pods(cluster: KubernetesCluster, user: str) -> None:
    rule = {"apiGroups": [""], "resources": ["pods"], "verbs": ["create"]}
    role = {"metadata": {"name": user}, "rules": [rule]}
    binding = {
        "metadata": {"name": user},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": user},
        "subjects": [{"kind": "User", "name": user, "apiGroup": "rbac.authorization.k8s.io"}],
    }
    for kind, body in (("roles", role), ("rolebindings", binding)):
        path = f"{RBAC}/namespaces/{NAMESPACE}/{kind}"
        assert cluster.request("POST", path, body).status == CREATED


def on_cluster(cluster: KubernetesCluster, verb: str, values: dict[str, Any]) -> str:
    """`helm install` or `upgrade` of the chart; returns what it prints."""
    where = ("-n", NAMESPACE, "--kubeconfig", str(cluster.kubeconfig()))
    done = helm(verb, "penstock", str(CHART), *where, values=merged(NEEDED, values))
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_server_accepts_every_object(cluster: KubernetesCluster) -> None:
    """Helm renders a misspelt field as well as a right one; only the server knows all fields of all kinds."""
    unique = {json.dumps(each, sort_keys=True) for name in SETS for each in rendered(name)}
    text = "\n---\n".join(sorted(unique))
    mode = ("--dry-run=server", "--server-side", "--force-conflicts", "--validate=strict")
    said = cluster.kubectl("apply", *mode, "-f", "-", stdin=text)
    assert len(said.splitlines()) == len(unique)


def test_the_server_admits_every_pod(cluster: KubernetesCluster) -> None:
    """A Deployment is accepted whatever its pods may do; the refusal comes when its controller makes them."""
    bare = {"metadata": {"name": "bare"}, "spec": {"containers": [{"name": "main", "image": "none"}]}}
    refusal = cluster.request("POST", f"{PODS}?{DRY_RUN}", bare)
    assert refusal.status == FORBIDDEN
    assert "restricted" in refusal.body["message"]
    unique = {json.dumps(pod, sort_keys=True) for name in SETS for _, pod in pods(rendered(name))}
    for pod in (json.loads(text) for text in unique):
        path = f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods?{DRY_RUN}&fieldValidation=Strict"
        answer = cluster.request("POST", path, pod)
        assert answer.status == CREATED, answer.body


def rights() -> list[tuple[str, int, Right]]:
    """(path of the role, number of the rule, right) of each verb that the chart gives the reporter."""
    folders = {"ClusterRole": ("clusterroles", ""), "Role": (f"namespaces/{NAMESPACE}/roles", NAMESPACE)}
    return [
        (f"{RBAC}/{folder}/{REPORTER}", number, (namespace, resource, name, verb))
        for kind, (folder, namespace) in folders.items()
        for number, rule in enumerate(named(rendered("defaults"), kind, REPORTER)["rules"])
        for resource in rule["resources"]
        for name in rule.get("resourceNames", [""])
        for verb in rule["verbs"]
    ]


def allowed(cluster: KubernetesCluster, right: Right) -> bool:
    """Whether the reporter has this right, as the server tells the reporter itself."""
    namespace, resource, name, verb = right
    attributes = {"namespace": namespace, "resource": resource, "name": name, "verb": verb}
    body = {"spec": {"resourceAttributes": attributes}}
    answer = cluster.request("POST", REVIEWS, body, user=ACCOUNT)
    assert answer.status == CREATED, answer.body
    return bool(answer.body["status"]["allowed"])


@contextmanager
def without(cluster: KubernetesCluster, role_path: str, number: int, verb: str) -> Iterator[None]:
    """The role without one verb of one rule."""
    role: Object = cluster.request("GET", role_path).body
    rules = json.loads(json.dumps(role["rules"]))
    rules[number]["verbs"].remove(verb)
    remaining = [rule for rule in rules if rule["verbs"]]
    patch = partial(cluster.request, "PATCH", role_path, content_type="application/merge-patch+json")
    assert patch({"rules": remaining}).status == 200
    yield
    assert patch({"rules": role["rules"]}).status == 200


def test_each_right_comes_from_one_verb(cluster: KubernetesCluster) -> None:
    """A right that two rules gave would stay when one of them is taken away, and nobody could tell which."""
    found = rights()
    assert len(found) == 11
    every = [right for _, _, right in found]
    wait_until(lambda: all(allowed(cluster, right) for right in every), "the chart's rights")
    for role_path, number, right in found:
        with without(cluster, role_path, number, right[-1]):
            wait_until(lambda right=right: not allowed(cluster, right), f"no {right}")
            assert [each for each in every if not allowed(cluster, each)] == [right]
        wait_until(lambda right=right: allowed(cluster, right), f"{right} again")


async def attempt(api: ApiServer, resource: str, verb: str) -> str:
    """What the server answers where the reporter's own code uses this right."""
    said = list[str]()
    writer = Writer(api, lambda wrote: said.append(wrote.text))
    about = {"namespace": NAMESPACE, "name": "none", "task_id": "", "token": 0}
    match resource, verb:
        case ("nodes" | "pods") as path, "list" | "watch":
            reflector = Reflector[Any](api, f"/api/v1/{path}", {"nodes": Node, "pods": Pod}[path], str)
            reflector._in_pages = verb == "list"  # as with a server that cannot list as a watch
            async with aclosing(reflector.follow()) as news:  # type: ignore[type-var]
                found = await anext(news)
            return found.why if isinstance(found, Broken) else ""
        case "pods", "get":
            writer.write(ReadPod(**about))
        case "pods", "create":
            writer.write(CreatePod(**about, manifest={}))
        case "pods", "delete":
            writer.write(DeletePod(**about, uid="", grace_s=0))
        case "pods", "patch":
            writer.write(ReleasePod(**about, uid="", resource_version="1"))
        case _:
            try:
                return str((await raise_term(api, NAMESPACE, 0)).term)
            except FenceNotRaised as error:
                return str(error)
    await await_until(lambda: said, f"the answer to {verb} {resource}")
    return said[0]


async def test_the_reporter_uses_each_of_its_rights(cluster: KubernetesCluster) -> None:
    """A right that no code needs is one that a reporter which was taken over has for nothing."""
    api = await ApiServer.open(cluster.kubeconfig(ACCOUNT))
    try:
        for role_path, number, right in rights():
            _, resource, _, verb = right
            denial = f'cannot {verb} resource "{resource}"'
            if (resource, verb) == ("configmaps", "create"):
                cluster.request("DELETE", f"/api/v1/namespaces/{NAMESPACE}/configmaps/penstock-term")
            with without(cluster, role_path, number, verb):
                wait_until(lambda right=right: not allowed(cluster, right), f"no {right}")
                assert denial in await attempt(api, resource, verb), right
            wait_until(lambda right=right: allowed(cluster, right), f"{right} again")
            assert "cannot" not in await attempt(api, resource, verb), right
    finally:
        await api.close()


@pytest.mark.parametrize(
    "right",
    [
        (NAMESPACE, "secrets", "", "get"),
        (NAMESPACE, "configmaps", "another", "update"),
        (NAMESPACE, "pods/exec", "", "create"),
        (NAMESPACE, "serviceaccounts/token", "", "create"),
        ("default", "pods", "", "create"),
        ("default", "pods", "", "delete"),
        ("", "nodes", "", "patch"),
        ("", "secrets", "", "list"),
    ],
)
def test_the_reporter_may_do_nothing_else(cluster: KubernetesCluster, right: Right) -> None:
    """A reporter that was taken over would be a way into other namespaces."""
    assert not allowed(cluster, right)


def pod_of(term: int | None, *, gpus: int = 0, node: str = "gpu-1", by: str = "penstock") -> Object:
    container = named(rendered("defaults"), "Deployment", "penstock-batcher")["spec"]["template"]["spec"]
    security = container["containers"][0]["securityContext"]
    resources = {"limits": {GPU: str(gpus)}} if gpus else {}
    main = {"name": "main", "image": "none", "securityContext": security, "resources": resources}
    annotations = {} if term is None else {"penstock.dev/term": str(term)}
    return {
        "metadata": {
            "name": f"pod-{secrets.token_hex(4)}",
            "annotations": annotations,
            "labels": {"app.kubernetes.io/managed-by": by},
        },
        "spec": {"containers": [main], "securityContext": container["securityContext"]}
        | ({"nodeName": node} if node else {}),
    }


def create(cluster: KubernetesCluster, pod: Object, user: str) -> tuple[int, str]:
    """(status, message) of an attempt that leaves nothing behind."""
    answer = cluster.request("POST", f"{PODS}?{DRY_RUN}", pod, user=user)
    return answer.status, answer.body.get("message", "")


async def raised(cluster: KubernetesCluster, above: int) -> int:
    """The term after the reporter's own code has raised it, with the chart's rights and no others."""
    api = await ApiServer.open(cluster.kubeconfig(ACCOUNT))
    try:
        return (await raise_term(api, NAMESPACE, above)).term
    finally:
        await api.close()


def test_a_fence_without_its_term_stops_no_other_pod(cluster: KubernetesCluster) -> None:
    """Without the ConfigMap the server refused every pod of the cluster, that of the reporter among them, who
    makes the ConfigMap."""
    cluster.request("DELETE", f"/api/v1/namespaces/{NAMESPACE}/configmaps/penstock-term")
    wait_until(lambda: "no params found" in create(cluster, pod_of(1), ACCOUNT)[1], "the fence")
    for _, pod in pods(rendered("defaults")):
        assert create(cluster, pod, SOMEBODY) == (CREATED, "")


async def test_the_fence_refuses_a_reporter_that_was_replaced(cluster: KubernetesCluster) -> None:
    """The former reporter woke up after its successor had begun, and placed what it had read before."""
    first = await raised(cluster, 3)
    second = await raised(cluster, first)
    assert second == first + 1 > 4

    def refused(pod: Object, user: str) -> str:
        status, message = create(cluster, pod, user)
        return message if status in (FORBIDDEN, UNPROCESSABLE) else ""

    said = wait_until(lambda: refused(pod_of(first), ACCOUNT), "the fence")
    assert f"penstock-term: this reporter was replaced; its term is {first}, the present one {second}" in said
    assert create(cluster, pod_of(second), ACCOUNT) == (CREATED, "")
    assert "this reporter was replaced" in refused(pod_of(None), ACCOUNT)
    assert "only the service account of the node-reporter" in refused(pod_of(second), SOMEBODY)


async def test_an_upgrade_leaves_the_fence_where_it_is(cluster: KubernetesCluster) -> None:
    """An upgrade that began terms anew would let the former reporter place again. A placer that somebody had
    scaled to two is one again."""
    before = await raised(cluster, 0)
    cluster.kubectl("-n", NAMESPACE, "scale", "deployment/penstock-placer", "--replicas=2")
    said = on_cluster(cluster, "upgrade", {"door": {"enabled": True}, "gateway": {"replicas": 2}})
    assert "STATUS: deployed" in said
    assert await raised(cluster, 0) == before + 1
    replicas = "jsonpath={.items[*].spec.replicas}"
    found = cluster.kubectl("-n", NAMESPACE, "get", "deployments", "--sort-by=.metadata.name", "-o", replicas)
    assert found.split() == ["1", "1", "1", "2", "1", "1", "1", "1"]


def test_the_door_refuses_pods_that_take_gpus_by_themselves(cluster: KubernetesCluster) -> None:
    """A Deployment of another team took two GPUs on which a gang was to start."""
    foreign = partial(pod_of, None, node="", by="somebody")

    def refusal() -> str:
        status, message = create(cluster, foreign(gpus=2), SOMEBODY)
        return message if status == FORBIDDEN else ""

    said = wait_until(refusal, "the door")
    assert "submit the job with `penstock submit` and an image" in said
    assert create(cluster, foreign(), SOMEBODY) == (CREATED, "")
    assert create(cluster, foreign(gpus=2), ACCOUNT) == (CREATED, "")


def test_the_notes_name_what_is_external(cluster: KubernetesCluster) -> None:
    said = on_cluster(cluster, "upgrade", {})
    for word in ("Strimzi", "CloudNativePG", "helm -n gpu-team test penstock", "door.enabled=true"):
        assert word in said
    on_cluster(cluster, "upgrade", {"door": {"enabled": True}})


def store(cluster: KubernetesCluster, secret: str, *keys: str) -> None:
    """A Secret with these keys, made or replaced."""
    folder = f"/api/v1/namespaces/{NAMESPACE}/secrets"
    body = {"metadata": {"name": secret}, "stringData": dict.fromkeys(keys, "x")}
    cluster.request("DELETE", f"{folder}/{secret}")
    assert cluster.request("POST", folder, body).status == CREATED


def test_a_pod_without_its_secret_says_so_and_waits(
    cluster: KubernetesCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody installed first, made the Secrets afterwards, and one of them without its key."""
    cluster.add_node("node-1")
    pod = dict(pods(rendered("defaults")))["penstock-placer"]
    assert (
        cluster.request("POST", PODS, {**pod, "spec": {**pod["spec"], "nodeName": "node-1"}}).status
        == CREATED
    )

    def said(complaint: str) -> None:
        log = cluster.folder / "node-1.log"  # hollow kubelets write no events
        wait_until(lambda: complaint in log.read_text(), complaint)

    for secret in ("penstock-kafka", "penstock-postgres", "penstock-keys"):
        said('MountVolume.SetUp failed for volume "secrets"')
        said(f'secret "{secret}" not found')
    store(cluster, "penstock-kafka", "placer.url")
    store(cluster, "penstock-postgres", "placer.url")
    store(cluster, "penstock-keys", "tokens")
    said("references non-existent secret key: operator.key")
    status = cluster.request("GET", f"{PODS}/penstock-placer").body["status"]
    assert [each["restartCount"] for each in status["containerStatuses"]] == [0]
    assert "waiting" in status["containerStatuses"][0]["state"]
    store(cluster, "penstock-keys", "tokens", "operator.key")
    wait_until(
        lambda: cluster.request("GET", f"{PODS}/penstock-placer").body["status"]["phase"] == "Running",
        "the pod with its Secrets",
    )
    (folder,) = cluster.folder.glob("n*/*/pods/*/volumes/kubernetes.io~projected/secrets/..data/")
    files = list(folder.iterdir())
    assert {file.name for file in files} == {"log-url", "dsn", "operator.key"}
    if os.geteuid() == 0:  # as kubelets do: the files are root's
        monkeypatch.setattr(os, "geteuid", lambda: 65532)
        for file in files:
            assert read_private(file.name, file)[0] == b"x"
            assert file.stat().st_gid == 65532
            assert file.stat().st_mode & stat.S_IRGRP
