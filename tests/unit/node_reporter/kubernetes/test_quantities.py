"""Quantities are exact, and a pod's request is what its kubelet counts."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_services.node_reporter.kubernetes.core.objects import Container, Pod, PodSpec, Resources
from penstock_services.node_reporter.kubernetes.core.requests import (
    MAX_QUANTITY,
    SUFFIXES,
    Request,
    quantity,
    request_of,
)

GPU = "nvidia.com/gpu"
amounts = st.integers(0, 10**6)
needs = st.builds(Request, amounts, amounts, st.integers(0, 16))


@pytest.mark.parametrize(
    ("text", "scale", "value"),
    [
        ("2500m", 1_000, 2_500),
        ("2", 1_000, 2_000),
        (0.5, 1_000, 500),
        ("1Gi", 1, 1 << 30),
        ("1e3", 1, 1_000),
        ("1E", 1, 10**18),
        ("1E3", 1, 1_000),
        ("1.5Ki", 1, 1_536),
        (".5", 1_000, 500),
        ("100m", 1, 1),
        ("-1500m", 1, -2),
        ("9E99", 1, MAX_QUANTITY),
    ],
)
def test_as_an_api_server_reads_them(text: str | float, scale: int, value: int) -> None:
    assert quantity(text, scale) == value


@pytest.mark.parametrize(
    "text", ["", "m", "1 Gi", "1gi", "one", "1e999999999", "1.2.3", "٣", "1" * 65, "--1"]
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a quantity"):
        quantity(text)


@given(st.integers(0, 10**6), st.integers(0, 999), st.sampled_from(sorted(SUFFIXES)))
def test_exact_and_rounded_up(whole: int, part: int, suffix: str) -> None:
    exact = (whole + Fraction(part, 1_000)) * SUFFIXES[suffix] * 1_000
    found = quantity(f"{whole}.{part:03d}{suffix}", 1_000)
    assert found == min(MAX_QUANTITY, -(-exact.numerator // exact.denominator))


def container(need: Request, *, sidecar: bool = False) -> Container:
    found: dict[str, str | int | float] = {
        "cpu": f"{need.cpu_milli}m",
        "memory": need.memory_bytes,
        GPU: need.gpus,
    }
    return Container(resources=Resources(requests=found), restart_policy="Always" if sidecar else None)


def pod(main: list[Request], first: list[tuple[Request, bool]]) -> Pod:
    init = [container(need, sidecar=sidecar) for need, sidecar in first]
    return Pod(spec=PodSpec(containers=[container(need) for need in main], init_containers=init))


@given(st.lists(needs, max_size=3), st.lists(st.tuples(needs, st.booleans()), max_size=4))
def test_a_request_is_the_largest_sum_at_any_moment(
    main: list[Request], first: list[tuple[Request, bool]]
) -> None:
    """Init containers run one after another beside the sidecars that were started; then all others run."""
    found = beside = Request()
    for need, sidecar in first:
        found = found.most(beside.plus(need))
        beside = beside.plus(need) if sidecar else beside
    for need in main:
        beside = beside.plus(need)
    assert request_of(pod(main, first), GPU) == found.most(beside)


def test_a_gpu_in_an_init_container_and_an_overhead_count() -> None:
    found = pod([Request(100, 0, 0)], [(Request(0, 0, 1), False)])
    found = Pod(
        spec=PodSpec(found.spec.node_name, found.spec.containers, found.spec.init_containers, {"cpu": "50m"})
    )
    assert request_of(found, GPU) == Request(150, 0, 1)


def test_a_limit_without_a_request_is_the_request() -> None:
    found = Pod(spec=PodSpec(containers=[Container(resources=Resources(limits={GPU: "2"}))]))
    assert request_of(found, GPU).gpus == 2


def test_requests_of_the_pod_as_a_whole_take_precedence() -> None:
    whole = Resources(requests={"cpu": "4", "memory": "1Gi"})
    found = Pod(spec=PodSpec(containers=[container(Request(100, 5, 1))], resources=whole))
    assert request_of(found, GPU) == Request(4_000, 1 << 30, 1)
