"""Pods of others on the cluster's nodes, whoever bound them: capacity that Penstock does not have."""

from collections.abc import Iterator

from penstock_services.node_reporter.kubernetes.core.objects import Pod
from penstock_services.node_reporter.kubernetes.core.requests import Request, request_of
from penstock_services.node_reporter.kubernetes.core.state import DropForeign, Foreign, ReporterState


def counted(state: ReporterState, pod: Pod, *, gone: bool = False) -> Iterator[Foreign | DropForeign]:
    """The change by a pod that is not Penstock's; nothing where it holds what it held. A pod of which a
    quantity cannot be read holds nothing that is known."""
    node, uid = pod.spec.node_name, pod.metadata.uid
    known = state.foreign.get(node, {}).get(uid)
    if gone or pod.terminal or not node:
        if known is not None:
            yield DropForeign(node, uid)
        return
    try:
        held = Foreign(uid, pod.key, node, *request_of(pod, state.options.gpu_resource))
    except ValueError:
        held = Foreign(uid, pod.key, node, 0, 0, 0)
    if held != known:
        yield held


def load(state: ReporterState, node: str) -> Request:
    """What others hold of the node."""
    found = state.foreign.get(node, {}).values()
    return Request(
        sum(pod.cpu_milli for pod in found),
        sum(pod.memory_bytes for pod in found),
        sum(pod.gpus for pod in found),
    )


def largest(state: ReporterState, node: str) -> str:
    """The other's pod with most GPUs, then cores, for texts; empty: there is none."""
    found = state.foreign.get(node, {}).values()
    pod = max(found, key=lambda pod: (pod.gpus, pod.cpu_milli, pod.memory_bytes, pod.name), default=None)
    if pod is None:
        return ""
    return f"the largest other pod is {pod.name}: {pod.gpus} GPUs, {pod.cpu_milli / 1_000:g} cores"
