"""Manifests of pods, as plain data: a task's pod, created with its node, and a pod that bars a name.

The pod is the journal: token, term and place are annotations in the very write that starts the task.
"""

import hashlib
import re
from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from penstock.model.decisions.orders import StartTask
from penstock.model.nouns.nodes import Gpu, NodeSpec
from penstock_services.node_reporter.core.environment import gang_of, peers_json, task_environment
from penstock_services.node_reporter.core.state import Context
from penstock_services.node_reporter.kubernetes.core.objects import Metadata
from penstock_services.node_reporter.kubernetes.core.state import Options, Task

PREFIX = "penstock.dev/"
FINALIZER = f"{PREFIX}exit"
"""The pod's object stays until its end is in the log (`proof`)."""
SCHEDULER = "penstock"
MANAGED = {"app.kubernetes.io/managed-by": "penstock"}
MAX_NAME = 63  # DNS-1123 label: the pod's name is its host name, too
MAX_STEM = MAX_NAME - len("-1000000-ps511")  # attempt and rank at their largest
BARRED = f"{PREFIX}barred"
NO_IMAGE = "none"  # never pulled: a gated pod has no node
_STEM = re.compile(r"(?!j-)[a-z0-9](-?[a-z0-9])*\Z")


def stem_of(job_id: str) -> str:
    """The job's id where it may begin a pod's name, else `j-` and 16 digits of its digest."""
    if len(job_id) <= MAX_STEM and _STEM.match(job_id):
        return job_id
    return f"j-{hashlib.sha256(job_id.encode()).hexdigest()[:16]}"


def pod_name(task_id: str) -> str:
    """`JOB-ATTEMPT-ROLE` of a task `JOB.ATTEMPT.ROLE`. Different tasks have different names: the last two
    parts have no hyphen."""
    job_id, attempt, role = task_id.rsplit(".", 2)
    return f"{stem_of(job_id)}-{attempt}-{role}"


def grace_s(grace_ms: int) -> int:
    """Whole seconds, rounded up, at least 1: a grace of 0 would be a forced deletion."""
    return max(1, -(-grace_ms // 1_000))


def _annotations(
    token: int, term: int, task_id: str, node_id: str, boot_id: str, machine_id: str, **more: str | None
) -> dict[str, str]:
    """What a later session reads back (`Annotations`)."""
    found = {
        "token": str(token),
        "term": str(term),
        "task": task_id,
        "node": node_id,
        "boot": boot_id,
        "machine": machine_id,
        **more,
    }
    return {PREFIX + name: text for name, text in found.items() if text is not None}


class Annotations:
    """A pod's task, read back. `token` −1: it is not Penstock's, or its annotations were edited."""

    def __init__(self, metadata: Metadata) -> None:
        found = {name.removeprefix(PREFIX): text for name, text in metadata.annotations.items()}
        token = found.get("token", "")
        self.token = int(token) if token.isdecimal() and found.get("task") and found.get("node") else -1
        self.task_id = found.get("task", "")
        self.node_id = found.get("node", "")
        self.boot_id = found.get("boot", "")
        self.machine_id = found.get("machine", "")
        self.gpus = tuple(filter(None, found.get("gpus", "").split(",")))
        self.barred = found.get("barred", "")
        self.context = Context(found.get("traceparent"), found.get("correlation"))


def pod_of(options: Options, order: StartTask, node: NodeSpec, term: int, context: Context) -> dict[str, Any]:
    """The pod of an order, on its node. `node`: as last reported."""
    place, name = order.place, pod_name(order.task_id)
    image = order.environment.container if order.environment is not None else None
    limits = {"memory": f"{place.cap_mib}Mi"} if place.cap_mib else {}
    requests = {"memory": f"{place.host_memory_mib}Mi"} if place.host_memory_mib else {}
    counted = {"cpu": str(len(place.cores))} if place.cores else {}
    counted |= {options.gpu_resource: str(len(place.gpus))} if place.gpus else {}
    container: dict[str, Any] = {
        "name": "task",
        "image": image,
        "command": list(order.command),
        "env": [{"name": key, "value": text} for key, text in _environment(options, order, node).items()],
        "resources": {"requests": {**requests, **counted}, "limits": {**limits, **counted}},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    if order.workdir is not None:
        container["workingDir"] = order.workdir
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": options.namespace,
            "labels": {
                **MANAGED,
                f"{PREFIX}job": stem_of(order.job_id),
                f"{PREFIX}attempt": str(order.attempt),
                f"{PREFIX}rank": str(place.rank),
            },
            "annotations": _annotations(
                order.token,
                term,
                order.task_id,
                order.node_id,
                order.boot_id,
                node.machine_id or "",
                job=order.job_id,
                attempt=str(order.attempt),
                rank=str(place.rank),
                gpus=",".join(order.gpu_uuids),
                traceparent=context.traceparent,
                correlation=context.correlation_id,
            ),
            "finalizers": [FINALIZER],
        },
        "spec": {
            "nodeName": node.node_id.removeprefix(f"{options.cluster}/"),
            "hostname": name,
            "subdomain": options.service,
            "terminationGracePeriodSeconds": grace_s(order.grace_ms),
            "tolerations": [{"key": key, "operator": "Exists"} for key in options.tolerated],
            "containers": [container],
            **_common(options),
        },
    }


def bar_of(options: Options, task: Task, term: int, why: str) -> dict[str, Any]:
    """A pod that has the name of the task's pod and never runs: it has a gate and no node. `why`: `stopped`,
    `refused`, or `vanished`, whose object stays until the task is proven ended."""
    about = task.token, term, task.task_id, options.node_id(task.node), task.boot_id, task.machine_id
    security = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": task.name,
            "namespace": task.namespace,
            "labels": dict(MANAGED),
            "annotations": _annotations(*about, gpus=",".join(task.gpus), barred=why),
            "finalizers": [FINALIZER] if why == "vanished" else [],
        },
        "spec": {
            "schedulingGates": [{"name": BARRED}],
            "containers": [{"name": "task", "image": NO_IMAGE, "securityContext": security}],
            **_common(options),
        },
    }


def _common(options: Options) -> dict[str, Any]:
    """Pod Security Standards, level restricted; no credential of the cluster in the pod."""
    return {
        "schedulerName": SCHEDULER,
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": options.run_as_user,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }


def _environment(options: Options, order: StartTask, node: NodeSpec) -> Mapping[str, str]:
    """The variables of a process, with the names of pods in place of machines' addresses. GPUs are numbered:
    the container can open no others."""

    workers = sum(peer.role == "worker" for peer in order.peers)

    def host(rank: int, role: str) -> str:
        part = f"w{rank}" if role == "worker" else f"ps{rank - workers}"
        return (
            f"{pod_name(f'{order.job_id}.{order.attempt}.{part}')}.{options.service}.{options.namespace}.svc"
        )

    peers = tuple(replace(peer, address=host(peer.rank, peer.role)) for peer in order.peers)
    alone = all(peer.rank == order.place.rank for peer in peers)
    order = replace(order, peers=() if alone else peers)
    own = (Gpu(index=at, uuid=uuid, model="gpu", memory_mib=1) for at, uuid in enumerate(order.gpu_uuids))
    node = replace(
        node, gpus=tuple(own), address="localhost" if alone else host(order.place.rank, order.place.role)
    )
    gang = {"PENSTOCK_PEERS": peers_json(gang_of(order, node))}
    return task_environment(order, node, {}, gang, virtual=False, apart=True)
