"""What proves that a task has ended, and what does not."""

import pytest

from penstock_services.node_reporter.kubernetes.core.objects import (
    Condition,
    ContainerState,
    ContainerStatus,
    Metadata,
    Pod,
    PodStatus,
    State,
)
from penstock_services.node_reporter.kubernetes.core.proof import Ended, cannot_start, ended, time_ms

RUNNING = ContainerState(running=State(started_at="2026-01-01T00:00:00Z"))
DELETED = Metadata(deletion_timestamp="2026-01-01T00:00:00Z")


def pod(phase: str, *states: ContainerState, metadata: Metadata | None = None, reason: str = "") -> Pod:
    statuses = [ContainerStatus(state=state) for state in states]
    status = PodStatus(phase=phase, reason=reason, container_statuses=statuses)
    return Pod(metadata=metadata or Metadata(), status=status)


def over(code: int, reason: str = "", signal: int = 0) -> ContainerState:
    times = {"started_at": "2026-01-01T00:00:00Z", "finished_at": "2026-01-01T00:00:02Z"}
    return ContainerState(terminated=State(exit_code=code, reason=reason, signal=signal, **times))


@pytest.mark.parametrize(
    "found",
    [
        pod("Pending"),
        pod("Running", RUNNING),
        pod("Unknown", RUNNING),
        pod("Running", RUNNING, metadata=DELETED),
        pod("Failed", RUNNING, metadata=DELETED),
        pod("Failed"),
        pod("Failed", reason="NodeLost"),
    ],
)
def test_no_proof(found: Pod) -> None:
    """Silence, deletion, and a phase that somebody else has written while a container runs."""
    assert ended(found) is None


def test_the_garbage_collectors_word_is_no_proof() -> None:
    """It fails the pods of a node whose object is gone; the machine may go on."""
    collected = [Condition(type="DisruptionTarget", status="True", reason="DeletionByPodGC")]
    found = Pod(metadata=DELETED, status=PodStatus(phase="Failed", conditions=collected))
    assert ended(found) is None


@pytest.mark.parametrize(
    ("found", "kind", "code"),
    [
        (pod("Succeeded", over(0, "Completed")), "exited", 0),
        (pod("Failed", over(3, "Error")), "exited", 3),
        (pod("Failed", over(0), over(7)), "exited", 7),
        (pod("Failed", over(137, "OOMKilled")), "out_of_memory", 137),
        (pod("Failed", over(137, "ContainerStatusUnknown")), "lost", 137),
        (pod("Failed", reason="OutOfnvidia.com/gpu"), "refused", None),
        (pod("Failed", reason="UnexpectedAdmissionError"), "refused", None),
        (pod("Failed", metadata=DELETED), "never_started", None),
        (pod("Failed", ContainerState(), metadata=DELETED), "never_started", None),
        (pod("Failed", over(300)), "exited", 255),
    ],
)
def test_proof(found: Pod, kind: str, code: int | None) -> None:
    end = ended(found)
    assert end is not None
    assert (end.kind, end.exit_code) == (kind, code)


def test_the_whole_end() -> None:
    assert ended(pod("Failed", over(1, "Error", signal=9))) == Ended(
        "exited", "", 1, 9, 1_767_225_600_000, 1_767_225_602_000
    )


def test_an_image_that_cannot_be_pulled() -> None:
    """The first failure is tried again; then the kubelet backs off for ever."""
    first = ContainerState(waiting=State(reason="ErrImagePull", message="no such host"))
    later = ContainerState(waiting=State(reason="ImagePullBackOff", message="no such image x"))
    assert cannot_start(pod("Pending", first)) == ""
    assert cannot_start(pod("Pending", later)) == "ImagePullBackOff: no such image x"
    assert cannot_start(pod("Running", RUNNING)) == ""


@pytest.mark.parametrize("text", [None, "", "yesterday"])
def test_no_time(text: str | None) -> None:
    assert time_ms(text) is None
