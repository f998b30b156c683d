"""What `penstock doctor`, `get nodes` and `describe node` report about what nodes enforce on tasks, and what they measure."""

from typing import Any

from penstock.cli.doctor import _isolation
from penstock.cli.tables import isolation, measures

STRONG = {
    "exits": "pid_namespace",
    "files": True,
    "memory": "task",
    "cores": "cpuset",
    "devices": "cgroup",
    "user": "jobs",
}
WEAK = {"exits": "none", "files": False, "reason": "unshare: Operation not permitted"}


def node(name: str, found: dict[str, Any] | None, *, shares: bool = True) -> dict[str, Any]:
    return {"node_id": name, "isolation": found, "shares_gpus": shares}


def test_a_line_names_everything_that_is_enforced() -> None:
    assert isolation(node("a", STRONG)) == (
        "exits by PID namespace, files hidden, memory per task, cores by cpuset, devices by cgroup, jobs as jobs"
    )
    assert isolation(node("a", WEAK)) == (
        "exits not proven: whole GPUs only, files open, memory per process, cores by affinity, "
        "GPUs by CUDA_VISIBLE_DEVICES alone"
    )
    assert isolation(node("a", None)) == "not reported"


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
