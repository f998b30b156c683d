"""What `penstock doctor`, `get nodes` and `describe node` report about what nodes enforce on tasks, and what
they measure."""

from typing import Any, get_args

import pytest

from penstock.cli.following.event_text import adjustment
from penstock.cli.operations.doctor import _isolation
from penstock.cli.queries.tables import isolation, measures
from penstock.model.nouns.nodes import BandwidthCap

STRONG = {
    "exits": "pid_namespace",
    "files": True,
    "memory": "task",
    "cores": "cpuset",
    "devices": "cgroup",
    "user": "jobs",
    "tmp": "task",
    "processes": "limited",
}
WEAK = {"exits": "none", "files": False, "reason": "unshare: Operation not permitted"}


def node(name: str, found: dict[str, Any] | None, *, shares: bool = True) -> dict[str, Any]:
    return {"node_id": name, "isolation": found, "shares_gpus": shares}


def test_a_line_names_everything_that_is_enforced() -> None:
    assert isolation(node("a", STRONG)) == (
        "exits by PID namespace, files hidden, memory per task, cores by cpuset, devices by cgroup, "
        "own /tmp, jobs as jobs"
    )
    assert isolation(node("a", WEAK)) == (
        "exits not proven: whole GPUs only, files open, memory per process, cores by affinity, "
        "GPUs by CUDA_VISIBLE_DEVICES alone, /tmp shared, processes unlimited"
    )
    assert isolation(node("a", None)) == "not reported"
    capped = {cap: isolation(node("a", STRONG | {"bandwidth": cap})) for cap in get_args(BandwidthCap)}
    assert "memory bandwidth by resctrl" in capped["resctrl"]
    assert "memory bandwidth by quotas of processor time" in capped["cpu_quota"]
    assert capped["none"] == isolation(node("a", STRONG))


@pytest.mark.parametrize(
    ("percent", "enforced", "has"),
    [
        (25, "resctrl", "at most 25 % of the memory bandwidth, by resctrl"),
        (25, "cpu_quota", "at most 25 % of its cores' time, by cpu_quota"),
        (25, "", "at most 25 % of the memory bandwidth, or of its cores' time; its node has not answered"),
        (None, "cpu_quota", "no cap, by cpu_quota"),
    ],
)
def test_a_cap_is_shown_as_a_part_of_what_it_limits(percent: int | None, enforced: str, has: str) -> None:
    """The same number is a part of the memory bandwidth on one node and of a core's time on another."""
    row = {"task_id": "j.1.w0", "what": "memory_bandwidth", "value": percent, "enforced": enforced}
    assert adjustment(row | {"by": "", "reason": "", "problem": ""}) == f"w0 has {has}"


def test_a_line_names_what_is_measured_of_contention() -> None:
    """The guard acts only where it sees something: an operator finds out here what his nodes can see."""
    found = {"contention": "pressure", "memory_bandwidth": "resctrl", "memory_mb_s": 204_800}
    assert measures({"measures": found}) == (
        "waiting for cores by the kernel's triggers, memory traffic by resctrl, of 204.8 GB/s"
    )
    del found["memory_mb_s"]
    assert measures({"measures": found}).endswith("memory traffic by resctrl, in percent of the largest seen")
    little = {"contention": "schedstat", "memory_bandwidth": "none"}
    assert measures({"measures": little}) == (
        "waiting for cores by reading what threads have waited, memory traffic not at all"
    )
    nothing = {"contention": "none", "memory_bandwidth": "none"}
    assert measures({"measures": nothing}) == "waiting for cores not at all, memory traffic not at all"
    assert measures({"measures": None}) == measures({}) == "not reported"


def test_doctor_joins_nodes_that_are_alike_and_names_a_remedy() -> None:
    nodes = [node(f"n{i}", STRONG) for i in range(6)] + [node("old", None), node("box", WEAK, shares=False)]
    findings = {finding.found.partition(":")[0]: finding for finding in _isolation(nodes)}
    assert findings.keys() == {"n0, n1, n2, n3 and 2 more", "old", "box"}
    assert [name for name, finding in findings.items() if finding.remedy] == ["box"]
    assert "Operation not permitted" in findings["box"].remedy
