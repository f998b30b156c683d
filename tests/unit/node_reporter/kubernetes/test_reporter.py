"""Stories of one session of the reporter: orders, pods, and what the API server answers."""

import pytest

from penstock.model.decisions.adjustments import TaskAdjusted
from penstock.model.decisions.orders import (
    CheckpointTask,
    Companion,
    SetCores,
    StartTask,
    pack_peers,
)
from penstock.model.inputs.external_events import (
    OrderRefused,
    TaskExited,
    TaskStarted,
)
from penstock.model.inputs.saves import SaveRefused
from penstock.model.jobs.job_parts import Environment
from penstock_services.node_reporter.kubernetes.core.messages import (
    CreatePod,
    DeletePod,
    ReadPod,
    ReleasePod,
    Reported,
)
from penstock_services.node_reporter.kubernetes.core.objects import (
    ContainerState,
    ContainerStatus,
    Metadata,
    Pod,
    State,
)
from penstock_services.node_reporter.kubernetes.core.pods import LATE_WRITE_MS
from penstock_services.node_reporter.kubernetes.core.state import Stage
from tests.unit.node_reporter.kubernetes.story import BEGUN, NOW_MS, Told, kinds, over, start, stop

# --------------------------------------------------------------------------------------------- life of a task


def test_from_its_order_to_its_end() -> None:
    """The exit is reported, acknowledged, and the object may go later."""
    told = Told()
    pod = told.created(start())
    assert kinds(told) == []
    pod = told.see(pod, **BEGUN)
    (begun,) = told.events()
    assert begun == TaskStarted(
        node_id="k/n1", task_id="j.1.w0", token=5, pid=0, started_ms=1_767_225_610_000
    )
    told.see(pod, **over())
    (exited,) = told.events()
    assert isinstance(exited, TaskExited)
    assert (exited.cause, exited.exit_code, exited.exited_ms - exited.started_ms) == ("exited", 0, 20_000)
    assert kinds(told) == ["TaskExited"]
    told.feed(Reported("j.1.w0", 5, NOW_MS))
    (release,) = told.writes()
    assert isinstance(release, ReleasePod)
    assert (release.finalizers, release.not_before_ms) == ((), NOW_MS + LATE_WRITE_MS)


def test_a_repeated_order_repeats_the_answer() -> None:
    told = Told()
    told.order(start())
    told.order(start())
    assert told.actions == [], "it is being created"
    told = Told()
    pod = told.created(start())
    pod = told.see(pod, **BEGUN)
    first = told.events()
    told.order(start())
    assert (told.events(), told.writes()) == (first, [])
    told.see(pod, **over(3))
    first = told.events()
    told.order(start())
    assert (told.events(), told.writes()) == (first, [])


def test_out_of_memory() -> None:
    told = Told()
    told.see(told.created(start()), **over(137, "OOMKilled"))
    begun, exited = told.events()
    assert isinstance(begun, TaskStarted), "it ran before anybody saw it"
    assert isinstance(exited, TaskExited)
    assert (exited.cause, exited.exhausted) == ("out_of_memory", "host_memory")


def test_a_stop_deletes_with_grace_and_awaits_the_proof() -> None:
    told = Told()
    pod = told.see(told.created(start()), **BEGUN)
    told.order(stop())
    (write,) = told.writes()
    assert isinstance(write, DeletePod)
    assert (write.uid, write.grace_s) == ("u1", 3)
    told.order(stop())
    assert told.writes() == [], "a repeat does not lengthen the grace"
    told.order(stop(grace_ms=500))
    assert [write.grace_s for write in told.writes() if isinstance(write, DeletePod)] == [1]
    pod = told.see(pod, deleting=True)
    assert told.events() == [], "deletion proves nothing"
    told.see(pod, **over(143))
    (exited,) = told.events()
    assert isinstance(exited, TaskExited)
    assert exited.cause == "stopped"
    told.order(stop())
    assert told.events() == [exited]


def test_an_image_that_is_not_there_fails_the_start() -> None:
    told = Told()
    pod = told.created(start())
    waiting = ContainerState(waiting=State(reason="ImagePullBackOff", message="not found"))
    pod = told.see(pod, container_statuses=[ContainerStatus(state=waiting)])
    assert kinds(told) == ["DeletePod"]
    told.see(pod, deleting=True, phase="Failed")
    (exited,) = told.events()
    assert isinstance(exited, TaskExited)
    assert (exited.cause, exited.detail) == ("start_failed", "ImagePullBackOff: not found")


def test_the_kubelet_has_the_last_word() -> None:
    """A pod of somebody else came first: the order is refused, and the job is placed again."""
    told = Told()
    told.see(told.created(start()), phase="Failed", reason="OutOfnvidia.com/gpu", message="no GPU left")
    (refused,) = told.events()
    assert isinstance(refused, OrderRefused)
    assert (refused.reason, refused.detail) == ("occupied", "OutOfnvidia.com/gpu: no GPU left")


# --------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("order", "reason", "detail"),
    [
        (start(environment=None), "wrong_node", "`container: IMAGE`"),
        (start(environment=Environment(venv="/srv/venv")), "wrong_node", "not venv or conda"),
        (start(gpu_share_milli=500), "wrong_node", "request whole GPUs"),
        (start(companions=(Companion(task_id="o.1.w0", token=1),)), "wrong_node", "request whole GPUs"),
        (start(prelaunch=True), "wrong_node", "prelaunch"),
        (start(interactive=True), "wrong_node", "interactive"),
        (start(secrets={"A": "a"}), "wrong_node", "secrets"),
        (start(code="0" * 64), "wrong_node", "code"),
        (start(may_submit=True), "wrong_node", "may_submit"),
        (start(checkpoint=""), "wrong_node", "checkpoint: signal"),
        (start(gpus=(7,)), "unknown_gpu", "k/n1:7"),
        (start(host_memory_mib=70_000), "occupied", "too little memory_bytes"),
        (start(job_id="other"), "unknown_task", "no task of other"),
    ],
)
def test_what_a_pod_cannot_do_is_refused_with_a_remedy(order: StartTask, reason: str, detail: str) -> None:
    told = Told()
    told.order(order)
    (refused,) = told.events() if reason == "wrong_node" else told.barred()
    assert isinstance(refused, OrderRefused)
    assert refused.reason == reason
    assert detail in refused.detail
    assert told.writes() == []
    if reason == "unknown_gpu":
        assert refused.missing_gpus == ("k/n1:7",)


def test_a_gpu_is_not_given_before_its_last_task_is_proven_dead() -> None:
    told = Told()
    told.created(start())
    told.order(start("o.1.w0", 8))
    (refused,) = told.barred()
    assert isinstance(refused, OrderRefused)
    assert refused.detail == "j.1.w0 is not proven ended, and holds its GPUs"


def test_an_older_decision_about_a_gpu_is_stale() -> None:
    """LAW 4."""
    told = Told()
    told.see(told.created(start(token=8)), **over())
    told.order(start("o.1.w0", 7))
    (refused,) = told.barred()
    assert isinstance(refused, OrderRefused)
    assert (refused.reason, refused.highest_token) == ("stale_token", 8)


def test_a_large_gang() -> None:
    """The first order on a node has the peers for the others there."""
    told = Told()
    told.order(start(peers_of="j.1.w0", packed_peers=pack_peers(())))
    told.order(start("j.1.w1", gpus=(1,), peers_of="j.1.w0"))
    assert kinds(told) == ["CreatePod"]
    told.order(start("l.1.w1", 6, gpus=(2,), peers_of="l.1.w0"))
    assert [type(event) for event in told.barred()] == [OrderRefused]


def test_orders_that_no_pod_obeys_are_answered() -> None:
    told = Told()
    told.see(told.created(start()), **BEGUN)
    told.order(SetCores(token=9, node_id="k/n1", task_id="j.1.w0", cores=(0,)))
    (adjusted,) = told.events()
    assert isinstance(adjusted, TaskAdjusted)
    assert (adjusted.enforced, adjusted.order_token) == ("", 9)
    told.order(CheckpointTask(token=10, node_id="k/n1", task_id="j.1.w0"))
    assert isinstance(told.events()[0], SaveRefused)
    told.order(CheckpointTask(token=10, node_id="k/n1", task_id="x.1.w0"))
    assert (told.events(), len(told.notes())) == ([], 1)


# ------------------------------------------------------------------------------------------ results of writes


def test_a_create_without_an_answer_is_read_back() -> None:
    told = Told()
    told.order(start())
    (create,) = told.writes()
    assert isinstance(create, CreatePod)
    told.wrote(create, "unknown")
    (read,) = told.writes()
    assert isinstance(read, ReadPod)
    told.wrote(read, "absent")
    (again,) = told.writes()
    assert isinstance(again, CreatePod)
    assert again.manifest == create.manifest
    told.wrote(again, "conflict", told.made(create.manifest, "u1"), "already exists")
    assert told.state.tasks["j.1.w0"].stage is Stage.PLACED, "the first one had arrived"


def test_too_many_requests() -> None:
    told = Told()
    told.order(start())
    told.wrote(told.writes()[0], "busy")
    assert [(kinds(told), write.not_before_ms > NOW_MS) for write in told.writes()] == [(["CreatePod"], True)]


def test_a_refused_create_is_a_refusal_once_its_name_is_taken() -> None:
    """An earlier copy of the request may still arrive: it finds the name taken."""
    told = Told()
    told.order(start())
    told.wrote(told.writes()[0], "refused", text="exceeded quota: pods")
    (bar,) = told.writes()
    assert isinstance(bar, CreatePod)
    assert "nodeName" not in bar.manifest["spec"]
    assert told.events() == []
    told.wrote(bar, "done", told.made(bar.manifest, "u2"))
    (refused,) = told.events()
    assert isinstance(refused, OrderRefused)
    assert (refused.reason, refused.detail) == ("occupied", "exceeded quota: pods")
    told.feed(Reported("j.1.w0", 5, NOW_MS))
    assert [(kinds(told), write.not_before_ms) for write in told.writes()] == [
        (["DeletePod"], NOW_MS + LATE_WRITE_MS)
    ]


def test_a_name_that_an_earlier_session_took() -> None:
    """It may have ended before it reported: the order is answered, whichever it is."""
    first = Told()
    first.order(stop())
    (bar,) = first.writes()
    assert isinstance(bar, CreatePod)
    told = Told(pods=(first.made(bar.manifest, "u2"),), term=2)
    assert kinds(told) == ["NodeJoined", "DeletePod"]
    told.order(stop())
    (exited,) = told.events()
    assert isinstance(exited, TaskExited)
    assert exited.cause == "stopped"


def test_where_not_even_the_name_can_be_taken() -> None:
    """A full quota refuses both. Only where a create had no answer does the refusal wait."""
    told = Told()
    told.order(start())
    told.wrote(told.writes()[0], "refused", text="exceeded quota")
    told.wrote(told.writes()[0], "refused", text="exceeded quota")
    assert kinds(told) == ["OrderRefused"]
    told = Told()
    told.order(start())
    told.wrote(told.writes()[0], "unknown")
    told.wrote(told.writes()[0], "absent")
    told.wrote(told.writes()[0], "refused", text="exceeded quota")
    told.wrote(told.writes()[0], "refused", text="exceeded quota")
    assert kinds(told) == ["CreatePod"]
    told.now_ms += LATE_WRITE_MS
    told.wrote(told.writes()[0], "refused", text="exceeded quota")
    assert kinds(told) == ["OrderRefused"]


def test_a_name_that_somebody_else_has() -> None:
    told = Told()
    told.order(start())
    stranger = Pod(metadata=Metadata(name="j-1-w0", namespace="penstock", uid="x"))
    told.wrote(told.writes()[0], "conflict", stranger)
    (refused,) = told.events()
    assert isinstance(refused, OrderRefused)
    assert "penstock/j-1-w0 exists already" in refused.detail


def test_a_stop_before_the_pod_exists() -> None:
    """The create is on its way: the pod is deleted as soon as it is known."""
    told = Told()
    told.order(start())
    (create,) = told.writes()
    assert isinstance(create, CreatePod)
    told.order(stop())
    assert told.actions == []
    told.wrote(create, "done", told.made(create.manifest, "u1"))
    assert kinds(told) == ["DeletePod"]


def test_a_stop_whose_start_never_came() -> None:
    """It never started is said only when it cannot start any more."""
    told = Told()
    told.order(stop())
    (bar,) = told.writes()
    assert isinstance(bar, CreatePod)
    assert told.events() == []
    told.wrote(bar, "done", told.made(bar.manifest, "u2"))
    (exited,) = told.events()
    assert isinstance(exited, TaskExited)
    assert (exited.cause, exited.token, exited.detail) == ("stopped", 9, "never started: cancelled")


def test_a_stop_whose_pod_was_unknown() -> None:
    """A watch is behind: the name is taken by the task's own pod, which is deleted."""
    first = Told()
    pod = first.created(start())
    told = Told(term=2)
    told.order(stop())
    told.wrote(told.writes()[0], "conflict", pod)
    assert kinds(told) == ["DeletePod"]
    told.see(pod, deleting=True, **over(143))
    assert [(event.TYPE, event.token) for event in told.events() if isinstance(event, TaskExited)] == [
        ("penstock.task.exited", 5)
    ]


def test_releases_and_deletes_are_repeated() -> None:
    told = Told()
    pod = told.see(told.created(start()), **over())
    told.feed(Reported("j.1.w0", 5, NOW_MS))
    (release,) = told.writes()
    told.wrote(release, "unknown")
    assert kinds(told) == ["ReleasePod"]
    pod = told.see(pod)
    told.wrote(release, "conflict")
    (again,) = [write for write in told.writes() if isinstance(write, ReleasePod)]
    assert again.resource_version == pod.metadata.resource_version
    told.wrote(again, "refused", text="pods is forbidden: cannot patch")
    assert len(told.notes()) == 1
