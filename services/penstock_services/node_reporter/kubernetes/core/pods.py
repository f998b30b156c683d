"""Pods of tasks: their writes and results, and what their kubelet says of them, up to the reported end."""

from collections.abc import Iterator
from typing import Any, Literal

from msgspec.structs import replace

from penstock.model.inputs.external_events import OrderRefused, TaskExited, TaskStarted
from penstock_services.node_reporter.core.actions import Emit, Note
from penstock_services.node_reporter.core.stops import MAX_DETAIL_CHARS
from penstock_services.node_reporter.kubernetes.core.manifests import (
    FINALIZER,
    Annotations,
    bar_of,
    pod_of,
)
from penstock_services.node_reporter.kubernetes.core.messages import (
    Action,
    CreatePod,
    DeletePod,
    End,
    ReadPod,
    ReleasePod,
    Wrote,
)
from penstock_services.node_reporter.kubernetes.core.objects import Pod, newer
from penstock_services.node_reporter.kubernetes.core.proof import Ended, cannot_start, ended, started_ms
from penstock_services.node_reporter.kubernetes.core.requests import Request, request_of
from penstock_services.node_reporter.kubernetes.core.state import (
    Change,
    Forget,
    ReporterState,
    Session,
    Stage,
    Stop,
    Task,
)

RETRY_MS = 1_000  # as long as an API server's shortest Retry-After
REFUSED_RETRY_MS = 30_000  # of a delete or patch that RBAC refuses, until a person has added the verb
LATE_WRITE_MS = 600_000  # no request of an earlier session arrives later: ten times a request's deadline
MAX_ENDED = 10_000  # ended tasks in memory; half a day of them at one every 4 s
BARRED_BEFORE = "stopped or refused before it could start"
Reason = Literal["stale_token", "unknown_gpu", "occupied", "unknown_task", "wrong_node"]
Cause = Literal["exited", "stopped", "start_failed", "out_of_memory", "lost"]
Decision = Change | Action


# ------------------------------------------------------------------------------------------------ writes


def superseded(why: str) -> Iterator[Decision]:
    """This session has ended: everything that it would still do belongs to its successor."""
    yield Session(over=why)
    yield End(why)


def create(state: ReporterState, task: Task, not_before_ms: int = 0) -> Iterator[Decision]:
    """Creates the task's pod on its node."""
    assert task.order is not None
    spec = state.nodes[task.node].spec
    assert spec is not None
    manifest = pod_of(state.options, task.order, spec, state.term, task.context)
    yield replace(task, stage=Stage.CREATING)
    yield CreatePod(**_about(task), manifest=manifest, not_before_ms=not_before_ms)


def bar(state: ReporterState, task: Task, not_before_ms: int = 0) -> Iterator[Decision]:
    """Takes the name of the task's pod, so that it never starts, whoever was asked to create it before, and
    whenever that request arrives. A vanished task's name is taken so that it is not forgotten."""
    why = "vanished" if task.stage is Stage.VANISHED else "refused" if task.refusal else "stopped"
    manifest = bar_of(state.options, task, state.term, why)
    yield task if task.stage is Stage.VANISHED else replace(task, stage=Stage.BARRING)
    yield CreatePod(**_about(task), manifest=manifest, not_before_ms=not_before_ms)


def delete(task: Task, grace_s: int, not_before_ms: int = 0) -> Iterator[DeletePod]:
    """Deletes the pod that is known; its terminal phase is the proof."""
    if task.pod is not None:
        uid = task.pod.metadata.uid
        yield DeletePod(**_about(task), uid=uid, grace_s=grace_s, not_before_ms=not_before_ms)


def _release(task: Task, not_before_ms: int = 0) -> Iterator[ReleasePod]:
    """Lets the object go once the end is in the log; other finalizers stay. Not while an earlier create of
    the same pod may still arrive: the name is taken until then, whoever deletes the pod."""
    if task.pod is None or FINALIZER not in task.pod.metadata.finalizers:
        return
    found = task.pod.metadata
    yield ReleasePod(
        **_about(task),
        uid=found.uid,
        resource_version=found.resource_version,
        finalizers=tuple(name for name in found.finalizers if name != FINALIZER),
        not_before_ms=max(not_before_ms, task.ended_ms + LATE_WRITE_MS),
    )


def _about(task: Task) -> dict[str, Any]:
    return {name: getattr(task, name) for name in ("namespace", "name", "task_id", "token")}


def wrote(state: ReporterState, given: Wrote) -> Iterator[Decision]:
    """The result of a write. A write without a result is never taken for one: the pod is read."""
    if given.outcome == "fenced":
        yield from superseded(f"the fence refused a write: {given.text}")
        return
    write = given.write
    if given.pod is not None and given.pod.metadata.uid:
        yield from seen(state, given.pod, given.now_ms)
    task = state.find(write.task_id)
    if isinstance(write, DeletePod | ReleasePod):
        later_ms = given.now_ms + max(RETRY_MS, given.retry_ms)
        if given.outcome in ("busy", "unknown"):  # both are idempotent, by uid
            yield replace(write, not_before_ms=later_ms)
        elif given.outcome == "refused":
            yield Note(f"{write.namespace}/{write.name}: {type(write).__name__} refused: {given.text}")
            yield replace(write, not_before_ms=given.now_ms + REFUSED_RETRY_MS)
        elif given.outcome == "conflict" and isinstance(write, ReleasePod):
            pod = None if task is None else task.pod
            if task is not None and pod is not None and pod.metadata.uid == write.uid:
                yield from _release(task, later_ms)
    elif task is not None and task.token == write.token:
        yield from _placed(state, task, given)


def _placed(state: ReporterState, task: Task, given: Wrote) -> Iterator[Decision]:
    """The result of a create, or of reading the pod after one without an answer, while the task waits for
    it."""
    later_ms = given.now_ms + max(RETRY_MS, given.retry_ms)
    if task.stage not in (Stage.CREATING, Stage.BARRING, Stage.VANISHED) or (
        task.stage is Stage.VANISHED and task.pod is not None
    ):
        return
    reads = isinstance(given.write, ReadPod)
    if given.outcome == "unknown" and not reads:
        yield replace(task, unsure_ms=given.now_ms)
    if given.outcome == "unknown" or (given.outcome in ("busy", "refused") and reads):
        yield ReadPod(**_about(task), not_before_ms=later_ms)
    elif given.outcome in ("done", "conflict") and given.pod is not None:
        yield from _taken(state, task, given.pod, given.now_ms)
    elif given.outcome in ("busy", "conflict", "done") or reads:
        if task.stage is Stage.CREATING and task.stop is None:
            yield from create(state, task, later_ms)
        else:
            yield from bar(state, task, later_ms)
    elif task.stage is Stage.CREATING:
        text = given.text or "the API server refused its pod"
        yield from bar(state, replace(task, refusal=refusal_of(state, task, "occupied", text)))
    elif task.stage is Stage.BARRING and given.now_ms - task.unsure_ms >= LATE_WRITE_MS:
        yield from barred(state, task, given.now_ms)  # refused as its start was, which cannot arrive any more
    else:
        yield from bar(state, task, given.now_ms + REFUSED_RETRY_MS)


def _taken(state: ReporterState, task: Task, pod: Pod, now_ms: int) -> Iterator[Decision]:
    """The name belongs to a pod that is not this task's."""
    found = Annotations(pod.metadata)
    if found.token == task.token and found.task_id == task.task_id:
        return
    text = (
        f"pod {pod.key} exists already and is not this task's"
        f"{'; it is of an older job of that name' if found.token >= 0 else ''}; delete it"
    )
    if task.stage is Stage.VANISHED:
        yield Note(f"{task.task_id}: {text}")
    elif task.refusal or task.stop is None:
        yield from refuse(state, task, refusal_of(state, task, "occupied", text), now_ms)
    else:
        yield from _never_started(state, task, now_ms)


def barred(state: ReporterState, task: Task, now_ms: int) -> Iterator[Decision]:
    """It has not started and never will."""
    if task.refusal and task.stop is None:
        yield from refuse(state, task, task.refusal, now_ms)
    else:
        yield from _never_started(state, task, now_ms)


def _never_started(state: ReporterState, task: Task, now_ms: int) -> Iterator[Decision]:
    why = f"never started: {task.stop.reason}" if task.stop is not None else "never started"
    yield from _exit(state, task, "stopped", Ended("never_started", why), now_ms)


# --------------------------------------------------------------------------------------------- observation


def seen(state: ReporterState, pod: Pod, now_ms: int) -> Iterator[Decision]:
    """A pod of Penstock as it is now: of a list, a watch, or a write."""
    found = Annotations(pod.metadata)
    known = state.find(found.task_id)
    if known is None:
        yield from _adopted(state, pod, found, now_ms)
        return
    if found.barred and known.stage in (Stage.CREATING, Stage.BARRING):
        yield from barred(state, replace(known, pod=pod), now_ms)
        return
    if found.token != known.token:
        if known.stage is Stage.BARRING and found.token < known.token:  # its stop came without its start
            yield from _adopted(state, pod, found, now_ms, known.stop)
        else:
            yield from _stray(known, pod, found)
        return
    before = known.pod
    if before is not None and not newer(before.metadata, pod.metadata):
        return
    if found.barred or (
        known.stage is Stage.ENDED and before is not None and before.metadata.uid == pod.metadata.uid
    ):
        yield (known := replace(known, pod=pod))
        if known.reported:
            yield from _release(known)
    elif known.stage is Stage.ENDED:
        yield from _stray(known, pod, found)
    else:
        yield from _progressed(state, replace(known, pod=pod), now_ms)


def _adopted(
    state: ReporterState, pod: Pod, found: Annotations, now_ms: int, stop: Stop | None = None
) -> Iterator[Decision]:
    """A pod of an earlier session. A terminal one without the finalizer was reported."""
    node = found.node_id.removeprefix(f"{state.options.cluster}/")
    over = FINALIZER not in pod.metadata.finalizers and (pod.terminal or bool(found.barred))
    task = Task(
        task_id=found.task_id,
        token=found.token,
        node=node,
        boot_id=found.boot_id,
        machine_id=found.machine_id,
        namespace=pod.metadata.namespace,
        name=pod.metadata.name,
        stage=Stage.ENDED if over else Stage.VANISHED if found.barred else Stage.PLACED,
        gpus=found.gpus,
        need=need_of_pod(state, pod),
        pod=pod,
        stop=stop,
        reported=over,
        ended_ms=now_ms if over else 0,
        context=found.context,
    )
    if over and found.barred:
        task = replace(task, refusal=refusal_of(state, task, "occupied", BARRED_BEFORE))
    if over or found.barred:
        yield task
        yield from delete(task, 1, now_ms + LATE_WRITE_MS) if over and found.barred else ()
    else:
        yield from _progressed(state, task, now_ms)
        if stop is not None and (known := state.tasks.get(task.task_id)) is not None:
            yield from delete(known, stop.grace_s)


def need_of_pod(state: ReporterState, pod: Pod) -> Request:
    """What it requests; nothing where its quantities cannot be read."""
    try:
        return request_of(pod, state.options.gpu_resource) if pod.spec.node_name else Request()
    except ValueError:
        return Request()


def _stray(known: Task, pod: Pod, found: Annotations) -> Iterator[Decision]:
    """A pod of a task whose end was reported, or of an older token: a request of an earlier session that came
    late, beside the fence. It goes at once."""
    if pod.terminal and FINALIZER not in pod.metadata.finalizers:
        return
    yield Note(f"{found.task_id}: pod {pod.key} of token {found.token} came after its end; deleted")
    stray = replace(known, token=found.token, name=pod.metadata.name, pod=pod)
    yield from delete(stray, 1)
    if pod.terminal:
        yield from _release(stray)


def _progressed(state: ReporterState, task: Task, now_ms: int) -> Iterator[Decision]:
    """What a pod's new version means for its living task."""
    pod = task.pod
    assert pod is not None
    begun_ms = started_ms(pod)
    first = task.stage in (Stage.CREATING, Stage.BARRING, Stage.VANISHED)
    task = replace(task, stage=Stage.PLACED if begun_ms is None else Stage.RUNNING, refusal=None)
    begins = begun_ms is not None and task.started_ms is None
    if begins:
        task = replace(task, started_ms=begun_ms)
    yield task
    if begins:
        yield started(state, task)
    if (end := ended(pod)) is not None and not on_other_machine(state, task):
        yield from _end(state, task, end, now_ms)
        return
    if pod.terminal:
        return
    if first and task.stop is not None:
        yield from delete(task, task.stop.grace_s)
    why = cannot_start(pod)
    if why and not task.failure:
        yield replace(task, failure=why)
        yield from delete(task, 1)


def on_other_machine(state: ReporterState, task: Task) -> bool:
    """Whether another machine has taken the name of the task's node: its kubelet proves nothing for the
    former."""
    view = state.nodes.get(task.node)
    machine_id = "" if view is None or view.node is None else view.node.status.node_info.machine_id
    return bool(machine_id and task.machine_id) and machine_id != task.machine_id


def gone(state: ReporterState, pod: Pod, now_ms: int) -> Iterator[Decision]:
    """The object of a pod of Penstock is gone. Its last version may prove the end; else it proves nothing."""
    task = state.find(Annotations(pod.metadata).task_id)
    if task is None or task.pod is None or task.pod.metadata.uid != pod.metadata.uid:
        return
    yield from seen(state, pod, now_ms)
    task = state.find(task.task_id)
    assert task is not None
    if task.stage is Stage.ENDED:
        yield replace(task, pod=None)
        return
    if task.stage is not Stage.VANISHED:
        yield Note(
            f"{task.task_id}: pod {pod.key} was removed past its finalizer and may still run; its GPUs are "
            f"kept until node {task.node} boots anew or is declared out of service"
        )
    yield from bar(state, replace(task, stage=Stage.VANISHED, pod=None))


# ---------------------------------------------------------------------------------------------------- ends


def started(state: ReporterState, task: Task) -> Emit:
    """The report of a start; repeated, it is the same."""
    assert task.started_ms is not None
    event = TaskStarted(
        node_id=state.options.node_id(task.node),
        task_id=task.task_id,
        token=task.token,
        pid=0,
        started_ms=task.started_ms,
    )
    return Emit(event, task.context)


def _end(state: ReporterState, task: Task, end: Ended, now_ms: int) -> Iterator[Decision]:
    """The reported end of a task by its pod's proven end."""
    pod = task.pod
    stopped = task.stop is not None or (pod is not None and pod.metadata.deletion_timestamp is not None)
    if end.kind == "refused" and not stopped:
        yield from refuse(state, task, refusal_of(state, task, "occupied", end.detail), now_ms)
        return
    cause: Cause
    failure = task.failure or (cannot_start(pod) if pod is not None and end.kind == "never_started" else "")
    if failure:
        cause, end = "start_failed", replace(end, detail=failure)
    elif task.lost or end.kind == "lost":
        cause, end = "lost", replace(end, detail=task.lost or end.detail, exit_code=None, signal=None)
    elif stopped:
        cause = "stopped"
    elif end.kind == "out_of_memory":
        cause = "out_of_memory"
    else:
        cause = "exited" if end.kind == "exited" else "start_failed"
    yield from _exit(state, task, cause, end, now_ms)


def lose(state: ReporterState, task: Task, why: str, now_ms: int) -> Iterator[Decision]:
    """The task is proven dead by something else than its pod."""
    yield from _exit(state, task, "lost", Ended("lost", why), now_ms)


def _exit(state: ReporterState, task: Task, cause: Cause, end: Ended, now_ms: int) -> Iterator[Decision]:
    exited_ms = now_ms if end.exited_ms is None else end.exited_ms
    begun_ms = task.started_ms if task.started_ms is not None else end.started_ms
    exited = TaskExited(
        node_id=state.options.node_id(task.node),
        task_id=task.task_id,
        token=task.token,
        cause=cause,
        exit_code=end.exit_code,
        signal=end.signal,
        started_ms=exited_ms if begun_ms is None else begun_ms,
        exited_ms=exited_ms,
        detail=end.detail[:MAX_DETAIL_CHARS],
        exhausted="host_memory" if end.kind == "out_of_memory" else "",
    )
    yield replace(task, stage=Stage.ENDED, order=None, exited=exited, ended_ms=now_ms)
    yield Emit(exited, task.context)


def refusal_of(
    state: ReporterState,
    task: Task,
    reason: Reason,
    detail: str,
    highest: int = 0,
    missing: tuple[str, ...] = (),
) -> OrderRefused:
    """The report that the order is not obeyed, now or later."""
    return OrderRefused(
        node_id=state.options.node_id(task.node),
        task_id=task.task_id,
        token=task.token,
        reason=reason,
        highest_token=max(task.token, highest),
        missing_gpus=missing,
        detail=detail[:MAX_DETAIL_CHARS],
    )


def refuse(state: ReporterState, task: Task, refused: OrderRefused, now_ms: int) -> Iterator[Decision]:
    """Reports it. A living task of the same id with another token goes on."""
    if (known := state.tasks.get(task.task_id)) is None or known.token == task.token:
        yield replace(task, stage=Stage.ENDED, order=None, refused=refused, ended_ms=now_ms)
    yield Emit(refused, task.context)


def stop(state: ReporterState, task: Task, ordered: Stop) -> Iterator[Decision]:
    """Stops a living task; a repeat may shorten the grace, never lengthen it."""
    repeated = task.stop is not None and ordered.grace_s >= task.stop.grace_s
    yield (task := task if repeated else replace(task, stop=ordered))
    if task.stage in (Stage.PLACED, Stage.RUNNING) and not repeated:
        yield from delete(task, ordered.grace_s)


def reported(state: ReporterState, task: Task) -> Iterator[Decision]:
    """The end is in the log: the object may go. A pod that only takes a name counts in quotas, and goes."""
    if task.stage is Stage.ENDED and not task.reported:
        yield (task := replace(task, reported=True))
        yield from _release(task)
        if task.pod is not None and Annotations(task.pod.metadata).barred:
            yield from delete(task, 1, task.ended_ms + LATE_WRITE_MS)


def tidied(state: ReporterState, now_ms: int) -> Iterator[Decision]:
    """Forgets the oldest ended tasks beyond those that stay, and deletes their pods. A pod stays for
    `LATE_WRITE_MS`: while its name is taken, a late create of the same task is refused."""
    while len(state.ended) > state.options.finished_pods:
        task = next(iter(state.ended.values()))
        young = task.ended_ms + LATE_WRITE_MS > now_ms and len(state.ended) <= MAX_ENDED
        held = task.pod is not None and FINALIZER in task.pod.metadata.finalizers
        if young or held or not task.reported:
            return
        yield from delete(task, 1)
        yield Forget(task.task_id, task.token, task.node)
