"""What `penstock doctor` and `penstock get nodes` report about what nodes enforce on tasks."""

from typing import Any

from penstock.cli.doctor import _isolation
from penstock.cli.tables import isolation

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


def test_doctor_joins_nodes_that_are_alike_and_names_a_remedy() -> None:
    nodes = [node(f"n{i}", STRONG) for i in range(6)] + [node("old", None), node("box", WEAK, shares=False)]
    findings = {finding.found.partition(":")[0]: finding for finding in _isolation(nodes)}
    assert findings.keys() == {"n0, n1, n2, n3 and 2 more", "old", "box"}
    assert [name for name, finding in findings.items() if finding.remedy] == ["box"]
    assert "Operation not permitted" in findings["box"].remedy
