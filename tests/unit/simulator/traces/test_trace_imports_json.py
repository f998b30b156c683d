"""Data that people bring as JSON: Kubernetes' jobs and pods, lists, lines, one object."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.runtime.files.csv_import import BadFile
from penstock.simulator.traces.files.importing import read_trace
from penstock.simulator.traces.jobs import TraceJob
from tests.support.cli.command_line import penstock
from tests.unit.simulator.traces.bad_traces import problems, simulated

HEADER = "job_id,submit_s,duration_s,gpus\n"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return tmp_path / "trace.csv"


def kubernetes_job(
    name: str, created: str, status: Mapping[str, object], gpus: str = "2", **spec: object
) -> dict[str, object]:
    """A Job as the API server shows it."""
    resources = {"requests": {"cpu": "1500m", "memory": "4Gi"}, "limits": {"nvidia.com/gpu": gpus}}
    pod = {
        "containers": [{"name": "train", "resources": resources}, {"name": "proxy", "resources": {}}],
        "nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB"},
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "namespace": "team-a", "creationTimestamp": created},
        "spec": {"parallelism": 1, "completions": 1, **spec, "template": {"spec": pod}},
        "status": status,
    }


def test_a_kubernetes_job_list(trace: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """`kubectl get jobs -o json`: a gang, one that failed, one that still runs, one that is suspended."""
    begun, ended = "2026-03-01T08:00:10Z", "2026-03-01T08:10:10Z"
    failed = {"type": "Failed", "status": "True", "lastTransitionTime": ended}
    items = [
        kubernetes_job(
            "gang", begun, {"startTime": begun, "completionTime": ended}, parallelism=4, completions=4
        ),
        kubernetes_job(
            "dead", "2026-03-01T08:00:40Z", {"startTime": "2026-03-01T08:09:10Z", "conditions": [failed]}
        ),
        kubernetes_job("going", begun, {"startTime": begun, "active": 1}),
        kubernetes_job(
            "held", begun, {"startTime": None, "conditions": [{"type": "Suspended", "status": "True"}]}
        ),
    ]
    trace.write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": items}))
    read = read_trace(trace)
    model = ("NVIDIA-A100-SXM4-80GB",)
    assert read.format == "kubernetes"
    assert read.jobs == [
        TraceJob(
            "team-a/gang",
            0,
            600,
            8,
            owner="team-a",
            cores=6,
            host_memory_mib=16_384,
            gpu_models=model,
            workers=4,
        ),
        TraceJob(
            "team-a/dead",
            30,
            60,
            2,
            owner="team-a",
            cores=1.5,
            host_memory_mib=4_096,
            gpu_models=model,
            workers=1,
        ),
    ]
    assert dict(read.passed) == {"jobs that have not ended": 1, "jobs that never ran": 1}
    assert simulated(capfd, trace, "--cluster", "2x8@NVIDIA-A100-SXM4-80GB")["finished_jobs"] == 2
    assert penstock("simulate", str(trace), "--cluster", "2x8") == 2
    assert (
        "item 1, column nodeSelector: no node has NVIDIA-A100-SXM4-80GB; there are GPU: name the model, as "
        "in 8x8@NVIDIA-A100"
    ) in capfd.readouterr().err


def pod(name: str, phase: str, ended: str | None, **owner: str) -> dict[str, object]:
    """A pod of one GPU as the API server shows it; it started at 08:00:10."""
    state = {"running": {}} if ended is None else {"terminated": {"exitCode": 0, "finishedAt": ended}}
    resources = {"requests": {"cpu": "500m", "memory": "1Gi"}, "limits": {"nvidia.com/gpu": "1"}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": "team-b",
            "creationTimestamp": "2026-03-01T08:00:00Z",
            "ownerReferences": [{"kind": kind, "name": own} for kind, own in owner.items()],
        },
        "spec": {"nodeName": "n1", "containers": [{"name": "train", "resources": resources}]},
        "status": {
            "phase": phase,
            "startTime": "2026-03-01T08:00:10Z",
            "containerStatuses": [{"name": "train", "state": state}, {"name": "late", "state": {}}],
        },
    }


def test_pods_that_no_job_made(trace: Path) -> None:
    """`kubectl get jobs,pods -o json`: a notebook, one of another controller, one evicted, a Job's own; `get
    pods` alone."""
    begun, ended = "2026-03-01T08:00:10Z", "2026-03-01T08:10:10Z"
    job = kubernetes_job("j", begun, {"startTime": begun, "completionTime": ended})
    job["metadata"]["namespace"] = "team-b"  # type: ignore[index]
    evicted = pod("evicted", "Failed", None)
    evicted["status"]["containerStatuses"] = []  # type: ignore[index]
    items = [
        job,
        pod("j-x7f", "Succeeded", ended, Job="j"),
        pod("note", "Succeeded", "2026-03-01T08:01:10Z"),
        pod("rank-0", "Failed", ended, PyTorchJob="p"),
        pod("web", "Running", None, ReplicaSet="web"),
        evicted,
    ]
    trace.write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": items}))
    read = read_trace(trace)
    assert [(one.job_id, one.submit_s, one.duration_s, one.gpus) for one in read.jobs] == [
        ("team-b/note", 0, 60, 1),
        ("team-b/rank-0", 0, 600, 1),
        ("team-b/j", 10, 600, 2),
    ]
    passed = {"pods of jobs in the list": 1, "jobs that have not ended": 1, "jobs that never ran": 1}
    assert dict(read.passed) == passed
    bare = {name: value for name, value in pod("bare", "Succeeded", ended).items() if name != "kind"}
    for whole in ({"kind": "PodList", "items": [bare]}, pod("bare", "Succeeded", ended)):
        trace.write_text(json.dumps(whole))
        assert read_trace(trace).jobs == [
            TraceJob("team-b/bare", 0, 600, 1, owner="team-b", cores=0.5, host_memory_mib=1_024, workers=1)
        ]


def test_kubernetes_objects_that_cannot_be_read(trace: Path) -> None:
    """Services in the list, a slice of a GPU, an amount that is none, a job that ended before it began."""
    begun, ended = "2026-03-01T08:00:10Z", "2026-03-01T08:10:10Z"
    slices = kubernetes_job("mig", begun, {"startTime": begun, "completionTime": ended})
    slices["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"] = {
        "nvidia.com/mig-1g.5gb": "1"
    }  # type: ignore[index]
    items = [
        {"kind": "Service", "metadata": {"name": "p"}},
        slices,
        kubernetes_job("odd", begun, {"startTime": begun, "completionTime": ended}, gpus="two"),
        kubernetes_job("back", begun, {"startTime": ended, "completionTime": begun}),
        "nothing",
    ]
    assert problems(trace, json.dumps({"kind": "List", "items": items})) == [
        "item 1: kind Service is not read; `kubectl get jobs -o json` lists jobs, `get pods` pods",
        "item 2, column limits: nvidia.com/mig-1g.5gb: slices of a GPU are not read",
        "item 3, column nvidia.com/gpu: 'two' is not a whole number ≥ 0",
        "item 4, column completionTime: it lies before startTime",
        "item 5: not an object",
    ]


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 1 << 70)
    | st.floats(allow_nan=False)
    | st.text(max_size=6)
    | st.sampled_from(["1500m", "2", "-1", "2026-03-01T08:00:10Z", "1e9", "Job", "a/b", "0.5"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=4,
)


def places(value: object, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """The way to each value inside a JSON value."""
    found = [path] if path else []
    inner: list[tuple[str | int, object]] = []
    if isinstance(value, dict | list):
        inner = list(value.items() if isinstance(value, dict) else enumerate(value))
    for key, part in inner:
        found += places(part, (*path, key))
    return found


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_every_json_value_is_a_job_a_problem_or_counted(trace: Path, data: st.DataObject) -> None:
    """A field of the cluster's answer is missing, of another type, or absurd: no traceback, and nothing is
    lost."""
    begun, ended = "2026-03-01T08:00:10Z", "2026-03-01T08:10:10Z"
    items: list[object] = [
        kubernetes_job(f"j{number}", begun, {"startTime": begun, "completionTime": ended})
        for number in range(3)
    ]
    shape = data.draw(st.sampled_from(["jobs", "pods", "own"]))
    if shape == "pods":
        items = [pod(f"p{number}", "Succeeded", ended, Job="j0") for number in range(3)]
    elif shape == "own":
        items = [
            {"job_id": f"j{n}", "submit_s": n, "duration_s": 60, "gpus": 1, "labels": {"a": "b"}}
            for n in range(3)
        ]
    path = data.draw(st.sampled_from(places(items)))
    inner: Any = items
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = data.draw(JSON)
    whole = {"kind": "List", "items": items} if isinstance(items[-1], dict) and "kind" in items[-1] else items
    trace.write_text(json.dumps(whole))
    try:
        read = read_trace(trace, skip_bad=True)
    except BadFile:
        return
    bad = {problem.line for problem in read.skipped}
    assert len(read.jobs) + len(bad) + sum(read.passed.values()) == len(items)


@pytest.mark.parametrize("shape", ["list", "jobs", "lines"])
def test_plain_json(trace: Path, shape: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Our columns as keys, in a list, under `jobs` or an object a line; numbers, lists and labels as JSON has
    them."""
    jobs = [
        {
            "job_id": 7,
            "submit_time": 1772352000123,
            "duration_s": 60,
            "gpus": 1.0,
            "gpu_models": ["T4", "P100"],
        },
        {
            "job_id": "b",
            "submit_time": 1772352001123,
            "duration_s": "00:01:00",
            "gpus": 2,
            "inference": True,
            "labels": {"qos": "a|b"},
            "gpu_models": None,
        },
    ]
    text = {"list": jobs, "jobs": {"jobs": jobs}}
    trace.write_text(json.dumps(text[shape]) if shape in text else "\n".join(map(json.dumps, jobs)))
    with pytest.raises(BadFile, match="our own CSV is one rename away: --columns submit_s=submit_time"):
        read_trace(trace)
    read = read_trace(trace, columns={"submit_s": "submit_time"})
    assert read.jobs == [
        TraceJob("7", 0, 60, 1, gpu_models=("T4", "P100")),
        TraceJob("b", 1, 60, 2, inference=True, labels=(("qos", "a|b"),)),
    ]
    trace.write_text(trace.read_text().replace('"gpus": 2', '"gpus": "two"'))
    assert penstock("traces", "describe", str(trace), "--columns", "submit_s=submit_time") == 2
    where = "line 2" if shape == "lines" else "item 2"
    assert f"{where}, column gpus: 'two' is not a whole number ≥ 1" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[", "file: not JSON: unexpected end of data: line 1 column 2 (char 1)"),
        ("{}", 'file: JSON without a list of jobs: a list, {"jobs": […]} or an object a line'),
        ("[]", "file: no job in it"),
        (
            '{"job_id": {"0": "a"}, "gpus": {"0": 1}}',
            'file: JSON column by column: write it by line, in pandas as to_json(orient="records")',
        ),
        (
            '[{"job_id": "a", "time": {}, "tres": {}}]',
            "file: sacct --json is not read: "
            "sacct -P -X --format=JobID,User,State,Submit,Start,End,Elapsed,ReqTRES,AllocTRES",
        ),
    ],
)
def test_json_that_holds_no_jobs(trace: Path, text: str, message: str) -> None:
    assert problems(trace, text) == [message]
