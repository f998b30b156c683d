"""Stories of one session of the reporter: orders, pods, what the API server answers, and restarts."""

from typing import Any

import pytest
from msgspec.structs import replace

from penstock.model.decisions.adjustments import TaskAdjusted
from penstock.model.decisions.orders import (
    AnswerJoin,
    CheckpointTask,
    Companion,
    SetCores,
    StartTask,
    StopTask,
    pack_peers,
)
from penstock.model.inputs.external_events import (
    NodeJoined,
    NodeLeft,
    OrderRefused,
    TaskExited,
    TaskStarted,
)
from penstock.model.inputs.saves import SaveRefused
from penstock.model.jobs.job_parts import Environment
from penstock_services.node_reporter.kubernetes.core.manifests import FINALIZER
from penstock_services.node_reporter.kubernetes.core.messages import (
    ConnectionLost,
    ConnectionRestored,
    CreatePod,
    DeletePod,
    End,
    FenceLost,
    Listed,
    RaiseFence,
    ReadPod,
    ReleasePod,
    Reported,
    Watched,
)
from penstock_services.node_reporter.kubernetes.core.objects import (
    ContainerState,
    ContainerStatus,
    Metadata,
    Pod,
    State,
    Taint,
)
from penstock_services.node_reporter.kubernetes.core.pods import LATE_WRITE_MS
from penstock_services.node_reporter.kubernetes.core.state import TERM_SHIFT, Stage
from tests.unit.node_reporter.kubernetes.story import NOW_MS, Told, node, start, stop

BEGUN = {
    "phase": "Running",
    "container_statuses": [
        ContainerStatus(state=ContainerState(running=State(started_at="2026-01-01T00:00:10Z")))
    ],
}


def over(code: int = 0, reason: str = "") -> dict[str, Any]:
    """The status of a pod whose container has ended."""
    state = State(
        exit_code=code, reason=reason, started_at="2026-01-01T00:00:10Z", finished_at="2026-01-01T00:00:30Z"
    )
    phase = "Failed" if code else "Succeeded"
    return {"phase": phase, "container_statuses": [ContainerStatus(state=ContainerState(terminated=state))]}


def kinds(told: Told) -> list[str]:
    """Of the latest step's events and writes."""
    return [type(found).__name__ for found in (*told.events(), *told.writes())]


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


# ----------------------------------------------------------------------------------------------------- nodes


def test_a_silent_node_keeps_what_runs_there() -> None:
    """LAW 5: nothing is placed there, nothing is given up."""
    told = Told()
    told.see(told.created(start()), **BEGUN)
    told.feed(Watched("MODIFIED", node(ready="Unknown"), NOW_MS))
    (joined,) = told.events()
    assert isinstance(joined, NodeJoined)
    assert [task.task_id for task in joined.tasks] == ["j.1.w0"]
    told.order(start("o.1.w0", 8, gpus=(1,), incarnation=joined.incarnation))
    (refused,) = told.barred()
    assert isinstance(refused, OrderRefused)
    assert refused.detail == "nothing may be started on this node: not-ready"


def test_a_removed_node_leaves_with_its_last_task() -> None:
    told = Told()
    pod = told.see(told.created(start()), **BEGUN)
    told.feed(Watched("DELETED", node(), NOW_MS))
    assert kinds(told) == ["NodeJoined"], "with nothing to place on"
    told.see(pod, **over())
    exited, left = told.events()
    assert isinstance(exited, TaskExited)
    assert isinstance(left, NodeLeft)
    assert left.proof == "shutdown"


def test_an_order_to_a_node_that_is_not_there() -> None:
    told = Told()
    told.order(start(node_id="k/n9"))
    (left,) = told.events()
    assert isinstance(left, NodeLeft)
    assert left.node_id == "k/n9"


def test_a_new_boot_ends_pods_for_good() -> None:
    """A kubelet may start a pod of the former boot again: its terminal phase is awaited."""
    told = Told()
    pod = told.see(told.created(start()), **BEGUN)
    told.feed(Watched("MODIFIED", node(boot="b2"), NOW_MS))
    assert kinds(told) == ["NodeJoined", "DeletePod"]
    (joined,) = told.events()
    assert isinstance(joined, NodeJoined)
    assert [task.task_id for task in joined.tasks] == ["j.1.w0"]
    told.see(pod, **over(255, "Unknown"))
    (exited,) = told.events()
    assert isinstance(exited, TaskExited)
    assert (exited.cause, exited.exit_code) == ("lost", None)


def test_another_machine_under_the_same_name_proves_nothing() -> None:
    told = Told()
    pod = told.see(told.created(start()), **BEGUN)
    told.feed(Watched("MODIFIED", node(boot="b2", machine="m2"), NOW_MS))
    (joined,) = told.events()
    assert isinstance(joined, NodeJoined)
    assert (joined.node.machine_id, joined.node.gpus) == ("m1", ())
    told.see(pod, **over(137, "ContainerStatusUnknown"))
    assert told.events() == []
    given_up = stop(reason=StopTask.GIVEN_UP)
    told.order(given_up)  # after `penstock node fence k/n1`
    exited, left, again = told.events()
    assert isinstance(exited, TaskExited)
    assert isinstance(left, NodeLeft)
    assert isinstance(again, NodeJoined)
    assert again.node.machine_id == "m2"


def test_a_persons_word() -> None:
    """The pod is deleted first: a kubelet that boots meanwhile would start it again."""
    told = Told()
    pod = told.see(told.created(start()), **BEGUN)
    taint = Taint(key="node.kubernetes.io/out-of-service", effect="NoExecute")
    dead = node(ready="Unknown")
    told.feed(Watched("MODIFIED", replace(dead, spec=replace(dead.spec, taints=[taint])), NOW_MS))
    assert kinds(told) == ["NodeJoined", "DeletePod"]
    assert [write.grace_s for write in told.writes() if isinstance(write, DeletePod)] == [0]
    told.see(pod, deleting=True)
    (exited,) = told.events()
    assert isinstance(exited, TaskExited)
    assert (exited.cause, exited.detail) == ("lost", "its node was declared out of service")


def test_a_pod_removed_past_its_finalizer() -> None:
    """Its task may still run. The name is taken, so that a later session knows it, too."""
    told = Told()
    pod = told.see(told.created(start()), **BEGUN)
    told.feed(Watched("DELETED", pod, NOW_MS))
    (bar,) = told.writes()
    assert isinstance(bar, CreatePod)
    assert told.events() == []
    memorial = told.made(bar.manifest, "u2")
    told.wrote(bar, "done", memorial)
    assert memorial.metadata.finalizers == [FINALIZER]
    later = Told(pods=(memorial,), term=2)
    (joined,) = later.events()
    assert isinstance(joined, NodeJoined)
    assert [task.task_id for task in joined.tasks] == ["j.1.w0"]
    later.feed(Watched("MODIFIED", node(boot="b2"), NOW_MS))
    exited, _ = later.events()
    assert isinstance(exited, TaskExited)
    assert exited.cause == "lost"


# -------------------------------------------------------------------------------------------------- sessions


def test_a_later_session_reports_ends_before_it_joins() -> None:
    first = Told()
    pod = first.see(first.created(start()), **BEGUN)
    over_pod = first.see(pod, **over())
    told = Told(pods=(over_pod,), term=2)
    assert [type(event).__name__ for event in told.events()] == ["TaskStarted", "TaskExited", "NodeJoined"]
    joined = told.events()[-1]
    assert isinstance(joined, NodeJoined)
    assert (joined.tasks, joined.incarnation) == ((), 2 << TERM_SHIFT | 1)


def test_an_end_that_is_in_the_log_is_not_reported_again() -> None:
    first = Told()
    pod = first.see(first.created(start()), **over())
    released = replace(pod, metadata=replace(pod.metadata, finalizers=[]))
    assert [type(event).__name__ for event in Told(pods=(released,), term=2).events()] == ["NodeJoined"]


def test_orders_of_another_joining_are_not_obeyed() -> None:
    """A copy of an order that an earlier session has answered would start the task again."""
    told = Told(term=2)
    told.order(start())
    assert (told.events(), told.writes()) == ([], [])
    told.order(start(incarnation=2 << TERM_SHIFT | 1))
    assert kinds(told) == ["CreatePod"]


@pytest.mark.parametrize(
    "given",
    [
        start(incarnation=2 << TERM_SHIFT | 1),
        AnswerJoin(
            token=9,
            node_id="k/n1",
            boot_id="b1",
            incarnation=2 << TERM_SHIFT | 1,
            verdict="accepted",
            highest_incarnation=2 << TERM_SHIFT | 1,
        ),
    ],
)
def test_a_successor_ends_this_session(given: StartTask | AnswerJoin) -> None:
    told = Told()
    told.order(given)
    assert [type(action) for action in told.actions] == [End]
    told.order(start())
    assert told.actions == []


def test_the_fence_ends_this_session() -> None:
    told = Told()
    told.order(start())
    told.wrote(told.writes()[0], "fenced", text="penstock-term: term 1 is over")
    assert [type(action) for action in told.actions] == [End]
    told = Told()
    told.feed(FenceLost(2, NOW_MS))
    assert [type(action) for action in told.actions] == [End]


def test_a_joining_below_the_ledgers_raises_the_term() -> None:
    """The ConfigMap was deleted, or the node had another kind of reporter before."""
    told = Told()
    answer = AnswerJoin(
        token=9,
        node_id="k/n1",
        boot_id="b1",
        incarnation=1 << TERM_SHIFT | 1,
        verdict="stale_join",
        highest_incarnation=7 << TERM_SHIFT | 3,
    )
    told.order(answer)
    assert told.actions == [RaiseFence(above=7, own=1)]


def test_orders_while_the_api_server_is_away_come_again() -> None:
    """They are not kept: the node joins again, and the placer repeats them."""
    told = Told()
    told.feed(ConnectionLost("timeout", NOW_MS))
    told.order(start())
    assert told.actions == []
    told.feed(ConnectionRestored(NOW_MS))
    (joined,) = told.events()
    assert isinstance(joined, NodeJoined)
    told.order(start(incarnation=joined.incarnation))
    assert kinds(told) == ["CreatePod"]


def test_a_gap_in_the_watch() -> None:
    """After 410 both lists are compared with what is known."""
    told = Told()
    pod = told.see(told.created(start()), **BEGUN)
    told.feed(Listed((pod,), "pods", NOW_MS))
    assert told.actions == []
    told.feed(Listed((), "pods", NOW_MS))
    assert told.state.tasks["j.1.w0"].stage is Stage.VANISHED
    told.feed(Listed((pod,), "pods", NOW_MS))
    assert told.state.tasks["j.1.w0"].stage is Stage.RUNNING, "the list was older than its creation"
    told.feed(Listed((), "nodes", NOW_MS))
    assert kinds(told) == ["NodeJoined"]


def test_annotations_in_other_namespaces_are_anybodys() -> None:
    """A user who copies them into a pod elsewhere ends nobody's task."""
    told = Told()
    pod = told.see(told.created(start()), **BEGUN)
    forged = replace(pod, metadata=replace(pod.metadata, namespace="others", uid="x"))
    told.see(forged, **over())
    assert told.events() == []


def test_finished_pods_stay_for_their_output() -> None:
    """At most `finished_pods`; none goes while a late create may come."""
    told = Told()
    for number in range(4):
        pod = told.created(start(f"j{number}.1.w0", 5 + number), f"u{number}")
        pod = told.see(pod, **over())
        told.feed(Reported(f"j{number}.1.w0", 5 + number, NOW_MS))
        released = replace(pod, metadata=replace(pod.metadata, finalizers=[]))
        told.see(released)
    assert len(told.state.ended) == 4
    told.feed(Listed((node(),), "nodes", NOW_MS + LATE_WRITE_MS))
    assert [write.name for write in told.writes()] == ["j0-1-w0", "j1-1-w0"]
    assert sorted(told.state.ended) == ["j2.1.w0", "j3.1.w0"]
    told.order(start("j1.1.w0", 6))
    (refused,) = told.barred()
    assert isinstance(refused, OrderRefused)
    assert refused.reason == "stale_token", "it is forgotten, not new"
