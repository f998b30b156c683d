"""Proof that a task has ended (LAW 5): what a kubelet or a person says of it, never silence.

| seen | proof |
|---|---|
| phase Succeeded or Failed, and each container terminated or never started | the kubelet's word |
| phase Failed with a reason of the kubelet's admission, no container | the kubelet's word: never started |
| taint `node.kubernetes.io/out-of-service` | a person's word, once the pod is deleted in the API |
| a new boot id of the same machine | for a pod that is gone from the API; another is deleted, since a
kubelet may start it again, and its terminal phase is awaited |
| phase Failed written by the pod garbage collector | none: containers still say `running` |
| NotReady, Unknown, a deleted node object, a deleted or force-deleted pod | none |

Each pod has the finalizer `penstock.dev/exit`: its object stays, whoever deletes it, until its end is in the
log. So a forced deletion hides nothing, also while no reporter runs.
"""

from datetime import UTC, datetime
from typing import Literal

import msgspec

from penstock_services.node_reporter.kubernetes.core.objects import (
    Condition,
    ContainerStatus,
    Node,
    Pod,
    State,
)

OUT_OF_SERVICE = "node.kubernetes.io/out-of-service"
UNKNOWN = frozenset({"ContainerStatusUnknown", "Unknown"})
"""Reasons of containers whose end the kubelet has not seen: source: pkg/kubelet/kubelet_pods.go, and
containerd's status after a reboot."""
KUBELET_REASONS = frozenset(
    {
        "UnexpectedAdmissionError",
        "NodeAffinity",
        "NodeShutdown",
        "Terminated",
        "Evicted",
        "Preempting",
        "TopologyAffinityError",
        "PodOSNotSupported",
        "InPlacePodVerticalScaling",
    }
)
"""Of pods that a kubelet has failed; also all that begin with `OutOf`. Source: pkg/kubelet/lifecycle."""
CANNOT_START = frozenset(
    {
        "ImagePullBackOff",
        "InvalidImageName",
        "ErrImageNeverPull",
        "CreateContainerConfigError",
        "CreateContainerError",
        "RunContainerError",
    }
)
"""Reasons of a waiting container that would be retried for ever; `ErrImagePull` alone is a first try."""


class Ended(msgspec.Struct, frozen=True):
    """How a pod has ended. Times are those of the node's clock, in ms; None: not reported."""

    kind: Literal["exited", "out_of_memory", "refused", "never_started", "lost"]
    detail: str = ""
    exit_code: int | None = None
    signal: int | None = None
    started_ms: int | None = None
    exited_ms: int | None = None


def time_ms(text: str | None) -> int | None:
    """An RFC 3339 time in ms since 1970; None for none, and for another text."""
    if not text:
        return None
    try:
        found = datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        return None
    return round((found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp() * 1_000)


def started_ms(pod: Pod) -> int | None:
    """When its first container began to run; None: not yet, as far as its kubelet reports."""
    found = (_begun(status) for status in pod.status.container_statuses)
    return min((ms for ms in found if ms is not None), default=None)


def _begun(status: ContainerStatus) -> int | None:
    state = status.state
    if state.running is not None:
        return time_ms(state.running.started_at)
    return None if state.terminated is None else time_ms(state.terminated.started_at)


def ended(pod: Pod) -> Ended | None:
    """The proven end; None: there is no proof."""
    status = pod.status
    statuses = (*status.container_statuses, *status.init_container_statuses)
    if not pod.terminal or any(found.state.running is not None for found in statuses):
        return None
    if _collected(status.conditions) and not any(found.state.terminated is not None for found in statuses):
        return None
    terminated = [found.state.terminated for found in statuses if found.state.terminated is not None]
    text = ": ".join(filter(None, (status.reason, status.message)))
    if not terminated:
        if status.reason.startswith("OutOf") or status.reason in KUBELET_REASONS:
            return Ended("refused", text)
        return Ended("never_started", text) if statuses or pod.metadata.deletion_timestamp else None
    main = next((found for found in terminated if found.exit_code), terminated[0])
    return _ended(main, text)


def _ended(found: State, text: str) -> Ended:
    kind: Literal["exited", "out_of_memory", "lost"] = "exited"
    if found.reason == "OOMKilled":
        kind = "out_of_memory"
    elif found.reason in UNKNOWN:
        kind = "lost"
    usual = found.reason in ("", "Completed", "Error")
    detail = "; ".join(filter(None, (text, "" if usual else found.reason, found.message)))
    times = time_ms(found.started_at), time_ms(found.finished_at)
    code = found.exit_code if 0 <= found.exit_code <= 255 else 255  # another number cannot be reported
    return Ended(kind, detail, code, found.signal or None, *times)


def _collected(conditions: list[Condition]) -> bool:
    """Whether the pod garbage collector has failed it, for a node that is gone: not a kubelet's word."""
    return any(found.type == "DisruptionTarget" and found.reason == "DeletionByPodGC" for found in conditions)


def cannot_start(pod: Pod) -> str:
    """Why its container will not start, in the kubelet's words; empty: it may, or it has."""
    for status in (*pod.status.init_container_statuses, *pod.status.container_statuses):
        waiting = status.state.waiting
        if waiting is not None and waiting.reason in CANNOT_START:
            return ": ".join(filter(None, (waiting.reason, waiting.message)))
    return ""


def fenced_by_person(node: Node) -> bool:
    """Whether a person has stated that nothing runs on the node any more."""
    return any(taint.key == OUT_OF_SERVICE for taint in node.spec.taints)
