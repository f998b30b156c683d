"""Names and manifests of pods."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.model.decisions.orders import Peer
from penstock.model.nouns.nodes import NodeSpec
from penstock_services.node_reporter.core.state import Context
from penstock_services.node_reporter.kubernetes.core.manifests import (
    FINALIZER,
    Annotations,
    grace_s,
    pod_name,
    pod_of,
)
from penstock_services.node_reporter.kubernetes.core.state import Options
from tests.support.kubernetes import simulated_api
from tests.unit.node_reporter.kubernetes.story import OPTIONS, start

NODE = NodeSpec(node_id="k/n1", boot_id="b1", machine_id="m1", cores=16, host_memory_mib=65_536)
LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?\Z")
parts = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,112}", fullmatch=True)
ids = st.builds("{}.{}.{}".format, parts, st.integers(1, 1_000_000), st.sampled_from(["w0", "w511", "ps7"]))


@given(ids)
def test_a_name_is_a_dns_label(task_id: str) -> None:
    assert len(pod_name(task_id)) <= 63
    assert LABEL.match(pod_name(task_id))


@given(ids, ids)
def test_two_tasks_have_two_names(one: str, other: str) -> None:
    assert (pod_name(one) == pod_name(other)) == (one == other)


@pytest.mark.parametrize(
    ("task_id", "name"),
    [
        ("train.2.w0", "train-2-w0"),
        ("a-1.2.ps3", "a-1-2-ps3"),
        ("My_Job.1.w0", "j-[0-9a-f]{16}-1-w0"),
        ("j-12.1.w0", "j-[0-9a-f]{16}-1-w0"),
    ],
)
def test_names(task_id: str, name: str) -> None:
    """A job's id that is no DNS label, or that looks like a digest, is replaced by its digest."""
    assert re.fullmatch(name, pod_name(task_id))


@pytest.mark.parametrize(("grace_ms", "seconds"), [(0, 1), (1, 1), (1_000, 1), (1_001, 2), (30_000, 30)])
def test_a_grace_is_rounded_up(grace_ms: int, seconds: int) -> None:
    """A grace of 0 s would be a forced deletion."""
    assert grace_s(grace_ms) == seconds


def test_a_pod_is_placed_and_says_what_it_is() -> None:
    order = start(gpus=(1, 3), env={"LR": "0.1", "PENSTOCK_TOKEN": "999"}, workdir="/data")
    manifest = pod_of(OPTIONS, order, NODE, 7, Context("00-trace", "j"))
    spec, (container,) = manifest["spec"], manifest["spec"]["containers"]
    assert (spec["nodeName"], spec["schedulerName"], spec["restartPolicy"]) == ("n1", "penstock", "Never")
    assert spec["terminationGracePeriodSeconds"] == 3
    assert manifest["metadata"]["finalizers"] == [FINALIZER]
    assert container["resources"]["requests"] == container["resources"]["limits"]
    assert container["resources"]["limits"] == {"cpu": "2", "memory": "1024Mi", "nvidia.com/gpu": "2"}
    assert (container["image"], container["workingDir"]) == ("registry/train:1", "/data")
    env = {entry["name"]: entry["value"] for entry in container["env"]}
    assert (env["LR"], env["PENSTOCK_TOKEN"]) == ("0.1", "5"), "a job cannot pretend to be another"
    assert (env["CUDA_VISIBLE_DEVICES"], env["MASTER_ADDR"]) == ("0,1", "localhost")
    assert "PATH" not in env, "the image's own"
    found = Annotations(simulated_api.pod_of(manifest).metadata)
    assert (found.token, found.task_id, found.node_id, found.boot_id) == (5, "j.1.w0", "k/n1", "b1")
    assert (found.gpus, found.machine_id) == (("k/n1:1", "k/n1:3"), "m1")
    assert found.context == Context("00-trace", "j")
    assert manifest["metadata"]["annotations"]["penstock.dev/term"] == "7"


def test_restricted_by_default() -> None:
    """Pod Security Standards, level restricted; no credential of the cluster."""
    spec = pod_of(Options(cluster="k", run_as_user=7), start(), NODE, 1, Context())["spec"]
    assert spec["securityContext"] == {
        "runAsNonRoot": True,
        "runAsUser": 7,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert spec["containers"][0]["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
    assert spec["automountServiceAccountToken"] is False


def test_a_gang_meets_at_the_name_of_rank_0() -> None:
    """Pods have no address before they run; a headless Service names them."""
    peers = (
        Peer(rank=0, role="worker", node_id="k/n1", address="10.0.0.1"),
        Peer(rank=1, role="worker", node_id="k/n2", address="10.0.0.2"),
        Peer(rank=2, role="ps", node_id="k/n2", address="10.0.0.2"),
    )
    manifest = pod_of(OPTIONS, start(peers=peers), NODE, 1, Context())
    env = {entry["name"]: entry["value"] for entry in manifest["spec"]["containers"][0]["env"]}
    assert env["MASTER_ADDR"] == "j-1-w0.penstock.penstock.svc"
    assert (env["RANK"], env["WORLD_SIZE"]) == ("0", "2")
    assert "j-1-ps0.penstock.penstock.svc" in env["PENSTOCK_PEERS"]
    assert (manifest["spec"]["hostname"], manifest["spec"]["subdomain"]) == ("j-1-w0", "penstock")


def test_memory_beyond_the_promise_is_a_limit() -> None:
    order = start()
    place = type(order.place)(
        task_id="j.1.w0", role="worker", rank=0, node_id="k/n1", host_memory_mib=512, host_memory_cap_mib=900
    )
    order = start(gpus=(), place=place)
    resources = pod_of(OPTIONS, order, NODE, 1, Context())["spec"]["containers"][0]["resources"]
    assert resources == {"requests": {"memory": "512Mi"}, "limits": {"memory": "900Mi"}}
