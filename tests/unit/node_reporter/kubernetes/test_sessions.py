"""Stories of nodes that go, and of sessions that follow one another."""

import pytest
from msgspec.structs import replace

from penstock.model.decisions.orders import (
    AnswerJoin,
    StartTask,
    StopTask,
)
from penstock.model.inputs.external_events import (
    NodeJoined,
    NodeLeft,
    OrderRefused,
    TaskExited,
)
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
    Reported,
    Watched,
)
from penstock_services.node_reporter.kubernetes.core.objects import (
    Taint,
)
from penstock_services.node_reporter.kubernetes.core.pods import LATE_WRITE_MS
from penstock_services.node_reporter.kubernetes.core.state import TERM_SHIFT, Stage
from tests.unit.node_reporter.kubernetes.story import BEGUN, NOW_MS, Told, kinds, node, over, start, stop

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
