"""A node as the cell sees it: capacity less what others hold, or none while it is closed.

Only what a `NodeSpec` contains is compared: a kubelet's status every 10 s becomes no event.
"""

from collections.abc import Sequence

from msgspec.structs import replace

from penstock.model.nouns.nodes import MAX_NODE_LABELS, Gpu, Isolation, NodeSpec
from penstock.model.nouns.types import MAX_CORES_PER_NODE, MAX_GPUS_PER_NODE
from penstock_services.node_reporter.kubernetes.core.objects import Node
from penstock_services.node_reporter.kubernetes.core.proof import fenced_by_person
from penstock_services.node_reporter.kubernetes.core.requests import Request, amounts, quantity
from penstock_services.node_reporter.kubernetes.core.state import Options

MIB = 1 << 20
MAX_MEMORY_MIB = 1 << 30  # as `NodeSpec.host_memory_mib`
OWN_LABELS = "penstock.dev/"
CLOSED_LABEL = "penstock.dev/closed"
COUNTED = Isolation(
    exits="none",
    files=True,
    reason="the kubelet chooses the GPUs, so they are counted and not shared",
    memory="task",
    cores="cpuset",
    devices="cgroup",
    tmp="task",
)
"""`exits`: `none` is what keeps a GPU from being shared (`NodeSpec.shares_gpus`)."""


def silent(node: Node | None) -> bool:
    """Whether the node's kubelet is not heard, as far as the API server knows."""
    conditions = () if node is None else node.status.conditions
    return not any(found.type == "Ready" and found.status == "True" for found in conditions)


def closed(options: Options, node: Node, pods: int) -> str:
    """Why nothing may be placed on the node, as a label's value; empty: it is open. `pods`: number of pods on
    it, whosever."""
    if silent(node):
        return "not-ready"
    if fenced_by_person(node):
        return "out-of-service"
    if node.spec.unschedulable:
        return "cordoned"
    for taint in node.spec.taints:
        if taint.effect != "PreferNoSchedule" and taint.key not in options.tolerated:
            return f"taint/{taint.key}"[:128]
    have = node.status.allocatable
    if "pods" in have and pods >= quantity(have["pods"]):
        return "pods-full"
    if quantity(have.get(options.gpu_resource, 0)) and not gpu_memory_mib(options, node):
        return f"no-label/{options.memory_label}"[:128]
    return ""


def emptied(spec: NodeSpec, why: str) -> NodeSpec:
    """The node with nothing to place on."""
    labels = {CLOSED_LABEL: why, **{name: text for name, text in spec.labels.items() if name != CLOSED_LABEL}}
    labels = dict(list(labels.items())[:MAX_NODE_LABELS])
    return replace(spec, cores=1, host_memory_mib=1, gpus=(), labels=labels)


def gpu_memory_mib(options: Options, node: Node) -> int:
    """Memory of each of the node's GPUs; 0: not known."""
    text = node.metadata.labels.get(options.memory_label, "")
    return int(text) if text.isdecimal() and 0 < int(text) <= MAX_MEMORY_MIB else options.gpu_memory_mib


def spec_of(
    options: Options,
    node: Node,
    others: Request,
    held: Sequence[str],
    known: NodeSpec | None,
    why_closed: str,
) -> NodeSpec:
    """The node with what is left of its allocatable resources. `held`: UUIDs of the GPUs of living tasks;
    `known`: as last reported. Raises `ValueError` for quantities that cannot be read.

    Ideal: a closed node has nothing. Departure: one core and 1 MiB, the least that a `NodeSpec` may have, and
    which no job fits.
    """
    name, labels, info = node.metadata.name, node.metadata.labels, node.status.node_info
    left = Request() if why_closed else amounts(node.status.allocatable, options.gpu_resource).less(others)
    before = () if known is None else known.gpus
    return NodeSpec(
        node_id=options.node_id(name),
        machine_id=_identifier(info.machine_id),
        boot_id=_identifier(info.boot_id) or "unknown",
        rack=_identifier(labels.get(options.rack_label)) or "rack-0",
        domain=_identifier(labels.get(options.domain_label)) or "domain-0",
        address=_address(node),
        cores=min(MAX_CORES_PER_NODE, max(1, left.cpu_milli // 1_000)),
        host_memory_mib=min(MAX_MEMORY_MIB, max(1, left.memory_bytes // MIB)),
        gpus=_gpus(options, node, min(MAX_GPUS_PER_NODE, max(0, left.gpus)), held, before),
        isolation=COUNTED,
        runs="images",
        labels=_labels(options, labels, why_closed),
    )


def _gpus(
    options: Options, node: Node, count: int, held: Sequence[str], before: Sequence[Gpu]
) -> tuple[Gpu, ...]:
    """Counted GPUs, `CLUSTER/NODE:0` and so on. Where others take some, names of GPUs that tasks hold stay:
    else the cell would count a held one as gone and a taken one as free."""
    model = _identifier(node.metadata.labels.get(options.model_label)) or "gpu"
    memory_mib = gpu_memory_mib(options, node) or 1
    names = [f"{options.node_id(node.metadata.name)}:{number}" for number in range(MAX_GPUS_PER_NODE)]
    kept = [gpu.uuid for gpu in before] if len(before) == count else []
    wanted = dict.fromkeys((*kept, *(uuid for uuid in names if uuid in held), *names))
    chosen = sorted(list(wanted)[:count], key=names.index)
    return tuple(
        Gpu(index=index, uuid=uuid, model=model, memory_mib=memory_mib) for index, uuid in enumerate(chosen)
    )


def _labels(options: Options, found: dict[str, str], why_closed: str) -> dict[str, str]:
    """The operator's own labels first, then the configured ones, as far as they fit."""
    wanted = {CLOSED_LABEL: why_closed} if why_closed else {}
    own = sorted(name for name in found if name.startswith(OWN_LABELS) and name != CLOSED_LABEL)
    for name in (*own, *options.labels):
        if len(wanted) < MAX_NODE_LABELS and _identifier(found.get(name)):
            wanted[name] = found[name]
    return wanted


def _identifier(text: str | None) -> str | None:
    """The text where it is an `Identifier` of the wire; label values and ids of machines are, unless they are
    empty or begin with another character."""
    if not text or len(text) > 128 or not text[0].isalnum():
        return None
    return text if all(char.isascii() and (char.isalnum() or char in "._:/-") for char in text) else None


def _address(node: Node) -> str:
    found = {address.type: address.address for address in node.status.addresses}
    return (found.get("InternalIP") or found.get("Hostname") or node.metadata.name)[:255]
