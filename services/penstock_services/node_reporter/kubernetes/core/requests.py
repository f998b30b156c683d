"""Resource quantities, and the kubelet's arithmetic of what a pod holds of its node.

Source: `PodRequests` in k8s.io/component-helpers/resource, by which kubelet and kube-scheduler count. Not
counted: a resize in progress (`status.containerStatuses.allocatedResources`), since this reporter resizes no
pod.
"""

import re
from collections.abc import Iterable
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from penstock_services.node_reporter.kubernetes.core.objects import Container, Pod, Quantities

SUFFIXES = {
    "n": Fraction(1, 10**9),
    "u": Fraction(1, 10**6),
    "m": Fraction(1, 1_000),
    "": Fraction(1),
    **{letter: Fraction(10**power) for letter, power in zip("kMGTPE", range(3, 19, 3), strict=True)},
    **{f"{letter}i": Fraction(1 << power) for letter, power in zip("KMGTPE", range(10, 61, 10), strict=True)},
}  # source: k8s.io/apimachinery/pkg/api/resource/suffix.go
MAX_QUANTITY = (1 << 63) - 1  # what an API server holds; larger values saturate there, too
_QUANTITY = re.compile(
    r"([+-]?)([0-9]{0,64})(?:\.([0-9]{0,64}))?(?:[eE]([+-]?[0-9]{1,2})|([numkMGTPE]|[KMGTPE]i)?)\Z"
)


@lru_cache(maxsize=4_096)  # a cluster's pods request few different amounts; 41 µs an event without, 12 with
def quantity(text: str | int | float, scale: int = 1) -> int:
    """The exact value times `scale`, rounded away from zero as the API server's `ScaledValue` does, and at
    most `MAX_QUANTITY`. `quantity("2500m", 1_000)` is 2,500. Raises `ValueError` for other texts."""
    match = _QUANTITY.match(str(text))
    if match is None or not (match[2] or match[3]):
        raise ValueError(f"{text!r} is not a quantity, such as 500m, 2 or 1Gi")
    sign, whole, part, exponent, suffix = match.groups()
    value = Fraction(int((whole or "0") + (part or "")), 10 ** len(part or ""))
    value *= Fraction(10) ** int(exponent) if exponent else SUFFIXES[suffix or ""]
    scaled = value * scale
    found = min(MAX_QUANTITY, -(-scaled.numerator // scaled.denominator))
    return -found if sign == "-" else found


class Request(NamedTuple):
    """What a pod holds, or a node has."""

    cpu_milli: int = 0
    memory_bytes: int = 0
    gpus: int = 0

    def plus(self, other: "Request") -> "Request":
        return Request(*(one + two for one, two in zip(self, other, strict=True)))

    def less(self, other: "Request") -> "Request":
        """The difference; negative where `other` has more."""
        return Request(*(one - two for one, two in zip(self, other, strict=True)))

    def most(self, other: "Request") -> "Request":
        return Request(*(max(one, two) for one, two in zip(self, other, strict=True)))

    def lacks(self, need: "Request") -> list[str]:
        """Names of the resources of which it has less than `need`."""
        return [name for name, one, two in zip(self._fields, self, need, strict=True) if one < two]


def amounts(found: Quantities, gpu_resource: str) -> Request:
    """Three amounts of a list of resources; a missing one is 0. Raises `ValueError`."""
    return Request(
        quantity(found.get("cpu", 0), 1_000),
        quantity(found.get("memory", 0)),
        quantity(found.get(gpu_resource, 0)),
    )


def request_of(pod: Pod, gpu_resource: str) -> Request:
    """What the pod holds of its node until it is terminal. Raises `ValueError` for a quantity that no API
    server would have accepted."""
    spec = pod.spec
    together = _sum(spec.containers, gpu_resource)
    beside, first = Request(), Request()
    for container in spec.init_containers:
        need = _of(container, gpu_resource)
        if container.restart_policy == "Always":
            together, beside = together.plus(need), beside.plus(need)
            first = first.most(beside)
        else:
            first = first.most(need.plus(beside))
    found = together.most(first)
    whole = {**spec.resources.limits, **spec.resources.requests}
    if "cpu" in whole:
        found = found._replace(cpu_milli=quantity(whole["cpu"], 1_000))
    if "memory" in whole:
        found = found._replace(memory_bytes=quantity(whole["memory"]))
    return found.plus(amounts(spec.overhead, gpu_resource))


def _sum(containers: Iterable[Container], gpu_resource: str) -> Request:
    found = Request()
    for container in containers:
        found = found.plus(_of(container, gpu_resource))
    return found


def _of(container: Container, gpu_resource: str) -> Request:
    """A limit is the request where none is stated, as the API server's defaults have it."""
    resources = container.resources
    return amounts({**resources.limits, **resources.requests}, gpu_resource)
