"""Orders of the placer: starts, stops, answers to joinings, and what a pod cannot do.

A gang needs nothing of its own here: the placer stops an attempt when one of its members ends
(`Attempts.after_exit`), and a refusal is not the job's fault (`LOST`).
"""

from collections.abc import Iterator

from msgspec.structs import replace

from penstock.model.decisions.adjustments import TaskAdjusted
from penstock.model.decisions.orders import (
    AnswerJoin,
    CheckpointTask,
    Order,
    Peer,
    ProbeNode,
    SetBandwidth,
    SetCores,
    StartTask,
    StopTask,
    TaskOrder,
    unpack_peers,
)
from penstock.model.inputs.external_events import NodeLeft
from penstock.model.inputs.saves import SaveRefused
from penstock.model.nouns.types import WHOLE_GPU
from penstock_services.node_reporter.core.actions import Emit, Note
from penstock_services.node_reporter.core.state import NO_CONTEXT
from penstock_services.node_reporter.kubernetes.core.facts import MIB, silent
from penstock_services.node_reporter.kubernetes.core.foreign import largest, load
from penstock_services.node_reporter.kubernetes.core.manifests import grace_s, pod_name
from penstock_services.node_reporter.kubernetes.core.messages import Action, OrderRead, RaiseFence
from penstock_services.node_reporter.kubernetes.core.pods import (
    Reason,
    bar,
    barred,
    create,
    delete,
    lose,
    on_other_machine,
    refusal_of,
    refuse,
    started,
    stop,
    superseded,
)
from penstock_services.node_reporter.kubernetes.core.requests import Request, amounts
from penstock_services.node_reporter.kubernetes.core.state import (
    TERM_SHIFT,
    Change,
    Gang,
    NodeView,
    ReporterState,
    Stage,
    Stop,
    Task,
)

Decision = Change | Action


def ordered(state: ReporterState, given: OrderRead) -> Iterator[Decision]:
    """The answer to an order. An order that cannot be obeyed now is dropped, and its node joins again later:
    then the placer repeats what is not answered."""
    order = given.order
    name = order.node_id.removeprefix(f"{state.options.cluster}/")
    if name == order.node_id:
        return
    view = state.nodes.get(name)
    if isinstance(order, AnswerJoin):
        yield from _join_answered(state, view, order)
    elif not state.live or isinstance(order, ProbeNode):
        if view is not None:
            yield replace(view, owes_join=True)
    elif isinstance(order, StartTask):
        yield from _start(state, name, view, order, given)
    elif isinstance(order, StopTask):
        yield from _stop(state, name, order, given)
    else:
        yield from _not_here(state, order, given.now_ms)


def _join_answered(state: ReporterState, view: NodeView | None, order: AnswerJoin) -> Iterator[Decision]:
    if order.verdict == "accepted":
        if order.incarnation >> TERM_SHIFT > state.term > 0:
            yield from superseded(f"a reporter of term {order.incarnation >> TERM_SHIFT} has joined")
    elif view is None or order.incarnation != view.incarnation:
        return
    elif order.verdict == "stale_join":
        yield RaiseFence(above=order.highest_incarnation >> TERM_SHIFT, own=state.term)
    else:
        yield Note(
            f"node {order.node_id}: joining refused, {order.verdict}: make sure that the former machine is "
            f"dead and `penstock node fence {order.node_id}`"
        )


# ------------------------------------------------------------------------------------------------- start


def _start(
    state: ReporterState, name: str, view: NodeView | None, order: StartTask, given: OrderRead
) -> Iterator[Decision]:
    if order.incarnation >> TERM_SHIFT > state.term:
        yield from superseded(f"an order names term {order.incarnation >> TERM_SHIFT}")
        return
    if view is None or view.spec is None:
        if view is None and not state.on(name):
            yield Emit(_left(order), NO_CONTEXT, f"left/{order.incarnation}")
        return
    if order.incarnation != view.incarnation or order.boot_id != view.spec.boot_id:
        yield Note(f"{order.task_id}: start order {order.token} is not of this joining; it will be repeated")
        return
    known = state.find(order.task_id)
    if known is not None and known.token == order.token:
        if known.answer is not None:
            yield Emit(known.answer, known.context)
        elif known.stage is Stage.ENDED and known.refusal:
            yield from barred(state, known, given.now_ms)
        elif known.started_ms is not None:
            yield started(state, known)
        return
    task = Task(
        task_id=order.task_id,
        token=order.token,
        node=name,
        boot_id=order.boot_id,
        machine_id=view.spec.machine_id or "",
        namespace=state.options.namespace,
        name=pod_name(order.task_id),
        stage=Stage.CREATING,
        gpus=order.gpu_uuids,
        need=need_of(order),
        order=order,
        context=given.context,
    )
    highest = _highest(state, task, known)
    refusal: tuple[Reason, str] | None = None
    if order.token < highest:
        refusal = "stale_token", "a newer decision was obeyed already"
    elif order.peers_of is not None:
        try:
            if order.packed_peers is not None:
                yield Gang(order.peers_of, order.token, unpack_peers(order.packed_peers))
            peers = _peers(state, order)
            task = replace(task, order=replace(order, peers=peers, peers_of=None, packed_peers=None))
        except ValueError as error:
            refusal = "unknown_task", str(error)
    refusal = refusal or _unacceptable(state, view, order, known)
    if refusal is None:
        yield from create(state, task)
        return
    missing = tuple(gpu for gpu in order.gpu_uuids if refusal[0] == "unknown_gpu" and not _has(view, gpu))
    refused = refusal_of(state, task, *refusal, highest, missing)
    if known is None and refusal[0] != "wrong_node":  # an earlier session may have tried to create it
        yield from bar(state, replace(task, gpus=(), need=Request(), refusal=refused))
    else:
        yield from refuse(state, task, refused, given.now_ms)


def _left(order: StartTask) -> NodeLeft:
    """A node that the cluster has no longer: no pod of Penstock is on it."""
    return NodeLeft(
        node_id=order.node_id, boot_id=order.boot_id, proof="shutdown", incarnation=order.incarnation
    )


def _highest(state: ReporterState, task: Task, known: Task | None) -> int:
    """The highest token that a start must reach: of its GPUs, of the same task, of forgotten tasks there."""
    found = [state.forgotten.get(task.node, -1) + 1 if known is None else known.token]
    found += [state.gpu_tokens.get(gpu, 0) for gpu in task.gpus]
    return max(found)


def _peers(state: ReporterState, order: StartTask) -> tuple[Peer, ...]:
    """Raises `ValueError`."""
    found = state.gangs.get((order.peers_of or "", order.token))
    if found is None:
        raise ValueError(f"the order of {order.peers_of} has its peers, and is unknown here")
    return found


def _has(view: NodeView, gpu: str) -> bool:
    return view.spec is not None and any(found.uuid == gpu for found in view.spec.gpus)


def _unacceptable(
    state: ReporterState, view: NodeView, order: StartTask, known: Task | None
) -> tuple[Reason, str] | None:
    """Why a fresh order cannot be carried out here, with the remedy; None if it can."""
    place = order.place
    if order.task_id.count(".") < 2 or not order.task_id.startswith(f"{order.job_id}.{order.attempt}."):
        return "unknown_task", f"{order.task_id} is no task of {order.job_id}, attempt {order.attempt}"
    if place.node_id != order.node_id or place.task_id != order.task_id:
        return "wrong_node", f"the place names task {place.task_id} on node {place.node_id}"
    if (cannot := cannot_run(order)) is not None:
        return "wrong_node", cannot
    if view.closed:
        return "occupied", f"nothing may be started on this node: {view.closed}"
    missing = [gpu for gpu in order.gpu_uuids if not _has(view, gpu)]
    if missing or len(order.gpu_uuids) != len(place.gpus):
        return "unknown_gpu", f"not on this node: {', '.join(missing)}; it has {_count(view)} GPUs"
    if known is not None and known.stage is not Stage.ENDED:
        return "occupied", f"the same task is {known.stage} under {known.token}"
    for task in state.on(view.name):
        if set(task.gpus) & set(order.gpu_uuids):
            return "occupied", f"{task.task_id} is not proven ended, and holds its GPUs"
    if (lacking := _lacking(state, view, order)) is not None:
        return "occupied", lacking
    return None


def _count(view: NodeView) -> int:
    return 0 if view.spec is None else len(view.spec.gpus)


def _lacking(state: ReporterState, view: NodeView, order: StartTask) -> str | None:
    """What the kubelet's admission would lack, counted before each write: all pods, whoever bound them."""
    options = state.options
    if view.node is None:
        return "its node object was deleted"
    left = amounts(view.node.status.allocatable, options.gpu_resource).less(load(state, view.name))
    for task in state.on(view.name):
        left = left.less(task.need)
    lacks = left.lacks(need_of(order))
    if not lacks:
        return None
    return (
        f"too little {', '.join(lacks)} is free on this node; {largest(state, view.name) or 'no other pod'}"
    )


def need_of(order: StartTask) -> Request:
    """What the task's pod requests."""
    place = order.place
    return Request(len(place.cores) * 1_000, place.host_memory_mib * MIB, len(place.gpus))


def cannot_run(order: StartTask) -> str | None:
    """What of the order no pod can do, with the remedy; None: nothing."""
    found = order.environment
    if found is None or found.container is None:
        if found is not None:
            return "this node runs containers, not venv or conda; give the job an image: `container: IMAGE`"
        return "this node runs containers; give the job an image: `container: IMAGE`"
    if order.place.gpu_share_milli < WHOLE_GPU or order.companions:
        return "GPUs of this node are counted and not shared; request whole GPUs"
    refused = {
        "launch before its GPUs are free (`prelaunch`)": order.prelaunch,
        "a terminal (`interactive`)": order.interactive,
        "secrets of a node; mount a Secret by the image, or use variables": bool(order.secrets),
        "uploaded code; put the code into the image": order.code is not None,
        "jobs that submit jobs (`may_submit`)": order.may_submit,
        "`checkpoint: sdk`; save on SIGTERM to a place of your own with `checkpoint: signal`": (
            order.checkpoint is not None
        ),
    }
    return next((f"pods do not have {what}" for what, asked in refused.items() if asked), None)


# -------------------------------------------------------------------------------------------------- stop


def _stop(state: ReporterState, name: str, order: StopTask, given: OrderRead) -> Iterator[Decision]:
    """Also of a task that is not known: that it never starts is said only when its name is taken."""
    known = state.find(order.task_id)
    ordered = Stop(order.token, grace_s(order.grace_ms), order.reason)
    if known is not None and order.token < known.token:
        yield Note(f"{order.task_id}: stop order {order.token} is older than {known.token}; ignored")
    elif known is not None and known.answer is not None:
        yield Emit(known.answer, known.context)
    elif known is not None and known.stage is Stage.ENDED:
        if known.refusal:
            yield from barred(state, replace(known, stop=ordered), given.now_ms)
    elif known is not None and order.reason == StopTask.GIVEN_UP and _unheard(state, known):
        yield from [replace(write, grace_s=0) for write in delete(known, 1)]
        yield from lose(state, known, StopTask.GIVEN_UP, given.now_ms)
    elif known is not None:
        yield from stop(state, known, ordered)
    elif order.task_id.count(".") < 2:
        yield Note(f"{order.task_id}: stop order {order.token} names no task of a job; ignored")
    else:
        task = Task(
            task_id=order.task_id,
            token=order.token,
            node=name,
            boot_id="",
            namespace=state.options.namespace,
            name=pod_name(order.task_id),
            stage=Stage.BARRING,
            stop=ordered,
            context=given.context,
        )
        yield from bar(state, task)


def _unheard(state: ReporterState, task: Task) -> bool:
    """Whether no kubelet can say that it has ended."""
    view = state.nodes.get(task.node)
    unheard = task.stage is Stage.VANISHED or view is None or silent(view.node)
    return unheard or on_other_machine(state, task)


def _not_here(state: ReporterState, order: Order, now_ms: int) -> Iterator[Decision]:
    """Orders to a running task that no pod can obey: answered, so that nobody waits."""
    known = state.tasks.get(order.task_id) if isinstance(order, TaskOrder) else None
    if known is None:
        yield Note(f"{order.TYPE} {order.token} to {order.node_id}: nothing here can obey; ignored")
    elif isinstance(order, SetCores | SetBandwidth):
        adjusted = TaskAdjusted(
            node_id=order.node_id,
            task_id=known.task_id,
            token=known.token,
            order_token=order.token,
            what="cores" if isinstance(order, SetCores) else "memory_bandwidth",
            enforced="",
            detail="a pod has its cores and its memory bandwidth from its start to its end",
        )
        yield Emit(adjusted, known.context, f"adjusted/{order.token}")
    elif isinstance(order, CheckpointTask):
        unsaved = SaveRefused(
            node_id=order.node_id,
            task_id=known.task_id,
            token=known.token,
            at_ms=now_ms,
            reason="a pod is told to save by SIGTERM alone, when it is stopped",
        )
        yield Emit(unsaved, known.context, f"save_refused/{order.token}")
