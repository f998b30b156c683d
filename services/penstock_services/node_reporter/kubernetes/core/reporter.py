"""State machine of the reporter of a cluster: one input leads to changes and actions. No IO, file or clock.

| input | answer |
|---|---|
| `FenceRaised`, `Listed` | when the term is raised and both kinds are listed: the ends of tasks, then the
joining of each node |
| `Watched` node | a new joining where it has another boot or capacity, also none since it is closed or
silent; `NodeLeft` where it is gone with all its tasks |
| `Watched` pod | Penstock's: its start and its proven end (`proof`); another's: less capacity (`foreign`) |
| `OrderRead` | `orders` |
| `Wrote` | `pods` |
| `Reported` | the pod may go |

**Crash safety.** Nothing is stored but the pods and the term; a session may end between any two actions.

1. *No position of orders is stored.* A session reads orders from the end of the partitions as of its start,
   then joins all nodes. The placer answers a joining with every order that is unanswered by then. So the
   queue of orders is the ledger, and an order that was read but not obeyed is read again.
2. *Orders have an incarnation, and a session obeys only its own.* An incarnation is `term << 20 | number`,
   and the term is raised by compare-and-set before a session joins: it increases across sessions, and no two
   sessions have one in common. A start order with another incarnation is not obeyed. So a copy of an order
   that an earlier session has answered starts nothing; one with a newer term ends this session.
3. *Within a session* the ends of tasks are in memory, and beyond the bound a floor of tokens per node.
4. *An exit is reported before its pod goes.* The finalizer stays until the log has acknowledged the report; a
   later session finds the pod and reports the same again. It reports ends before it joins, so that the orders
   that answer its joining do not contain the task. A finished pod without finalizer was reported.
5. *A start cannot happen twice*: a task has one pod name, in which its attempt is; a second create is a
   conflict, and the present pod is adopted by its token.
6. *"It never started" is said only when it cannot start any more*: the name is taken by a pod without node.
   So a create of an earlier session that arrives later is a conflict, even where the fence lags.
7. *A write without an answer* is resolved by reading the pod, and repeated until there is an answer.
"""

from collections.abc import Iterator
from itertools import chain

from msgspec.structs import replace

from penstock import __version__
from penstock.model.inputs.external_events import NodeJoined, NodeLeft, RunningTask
from penstock.model.nouns.nodes import NodeSpec
from penstock_services.node_reporter.core.actions import Emit
from penstock_services.node_reporter.core.state import NO_CONTEXT
from penstock_services.node_reporter.kubernetes.core import facts
from penstock_services.node_reporter.kubernetes.core.foreign import counted, load
from penstock_services.node_reporter.kubernetes.core.manifests import Annotations
from penstock_services.node_reporter.kubernetes.core.messages import (
    Action,
    ConnectionLost,
    ConnectionRestored,
    FenceLost,
    FenceRaised,
    Input,
    Listed,
    OrderRead,
    RaiseFence,
    Reported,
    Watched,
    Wrote,
)
from penstock_services.node_reporter.kubernetes.core.objects import Node, Pod
from penstock_services.node_reporter.kubernetes.core.orders import ordered
from penstock_services.node_reporter.kubernetes.core.pods import (
    delete,
    gone,
    lose,
    on_other_machine,
    reported,
    seen,
    superseded,
    tidied,
    wrote,
)
from penstock_services.node_reporter.kubernetes.core.proof import fenced_by_person
from penstock_services.node_reporter.kubernetes.core.state import (
    TERM_SHIFT,
    Change,
    DropForeign,
    DropNode,
    Foreign,
    NodeView,
    Options,
    ReporterState,
    Session,
    Stage,
    Task,
    evolve,
)

REBOOTED = "its node booted anew while it ran"
OUT_OF_SERVICE = "its node was declared out of service"
Decision = Change | Action


def begin(options: Options) -> tuple[ReporterState, list[Action]]:
    """An empty state, and the first actions of a session."""
    return ReporterState(options), [RaiseFence()]


def step(state: ReporterState, *given: Input) -> list[Action]:
    """Decides, folds each own change at once, and returns the actions in order. Nothing after `End`.

    `given`: one input, or several watch events in a row. Nodes are settled after the last one: a node joins
    once for a burst of pods.
    """
    actions: list[Action] = []
    touched: dict[str, None] = {}
    for one in given:
        if state.over:
            return actions
        for decision in chain(decide(state, one), tidied(state, one.now_ms)):
            _fold(state, decision, actions, touched)
    while touched and state.complete and not state.over:
        name = min(touched)
        del touched[name]
        for decision in settled(state, name, given[-1].now_ms):
            _fold(state, decision, actions, touched)
    return actions


def _fold(state: ReporterState, decision: Decision, actions: list[Action], touched: dict[str, None]) -> None:
    """`touched`: nodes about which there may be news now."""
    if not isinstance(decision, Change):
        actions.append(decision)
        return
    if isinstance(decision, NodeView):
        touched[decision.name] = None
    elif isinstance(decision, Foreign | DropForeign):
        touched[decision.node] = None
    elif isinstance(decision, Task):
        known = state.find(decision.task_id)
        if known is None or known.stage is not decision.stage or decision.lost:
            touched[decision.node] = None
    evolve(state, decision)


def decide(state: ReporterState, given: Input) -> Iterator[Decision]:
    """The decisions from one input. A generator: `step` folds each change before the next decision."""
    match given:
        case FenceRaised():
            yield Session(term=given.term)
            yield from [replace(view, owes_join=True) for view in state.nodes.values()]
        case FenceLost():
            yield from superseded(f"the fence has term {given.term}")
        case Listed(what="nodes"):
            yield from _nodes_listed(state, given)
        case Listed():
            yield from _pods_listed(state, given)
        case Watched(object=Node() as node):
            yield from _node(state, node.metadata.name, None if given.change == "DELETED" else node)
        case Watched(object=Pod() as pod):
            yield from _pod(state, pod, given.now_ms, deleted=given.change == "DELETED")
        case OrderRead():
            yield from ordered(state, given)
        case Wrote():
            yield from wrote(state, given)
        case ConnectionLost():
            yield Session(connected=False)
        case ConnectionRestored():
            yield Session(connected=True)
            yield from [view for view in state.nodes.values() if view.owes_join]
        case Reported():
            if (task := state.ended.get(given.task_id)) is not None and task.token == given.token:
                yield from reported(state, task)


def _nodes_listed(state: ReporterState, given: Listed) -> Iterator[Decision]:
    found = {node.metadata.name: node for node in given.objects if isinstance(node, Node)}
    for name in sorted(found.keys() | state.nodes.keys()):
        yield from _node(state, name, found.get(name))
    yield from _listed(state, given)


def _node(state: ReporterState, name: str, node: Node | None) -> Iterator[Decision]:
    known = state.nodes.get(name)
    if known is None and node is not None:
        yield NodeView(name=name, node=node)
    elif known is not None and known.node != node:
        yield replace(known, node=node)


def _pods_listed(state: ReporterState, given: Listed) -> Iterator[Decision]:
    """What is missing in a later list was removed meanwhile: proof of nothing."""
    pods = [pod for pod in given.objects if isinstance(pod, Pod)]
    there = {pod.metadata.uid for pod in pods}
    for pod in sorted(pods, key=lambda pod: pod.key):
        yield from _pod(state, pod, given.now_ms, deleted=False)
    for task in [*state.tasks.values(), *state.ended.values()]:
        if task.pod is not None and task.pod.metadata.uid not in there:
            yield from gone(state, task.pod, given.now_ms)
    for node in sorted(state.foreign):
        yield from [DropForeign(node, uid) for uid in sorted(state.foreign[node].keys() - there)]
    yield from _listed(state, given)


def _listed(state: ReporterState, given: Listed) -> Iterator[Decision]:
    yield Session(listed=given.what)
    if state.complete:
        yield from [view for view in state.nodes.values() if view.spec is None]


def _pod(state: ReporterState, pod: Pod, now_ms: int, *, deleted: bool) -> Iterator[Decision]:
    """Penstock's are those of its namespace alone: annotations elsewhere are anybody's."""
    if pod.metadata.namespace == state.options.namespace and Annotations(pod.metadata).token >= 0:
        yield from gone(state, pod, now_ms) if deleted else seen(state, pod, now_ms)
    else:
        yield from counted(state, pod, gone=deleted)


# --------------------------------------------------------------------------------------------------- nodes


def settled(state: ReporterState, name: str, now_ms: int) -> Iterator[Decision]:
    """What is to be reported of a node, and done to its tasks, as things are now; nothing the second time."""
    view = state.nodes.get(name)
    if view is None:
        return
    if view.node is None:
        yield from _departed(state, view)
        return
    yield from _proven(state, view.node, name, now_ms)
    tasks, options = state.on(name), state.options
    if any(on_other_machine(state, task) for task in tasks):
        yield from _emptied(state, view, "another-machine")
        return
    held = [gpu for task in tasks for gpu in task.gpus]
    pods = len(state.foreign.get(name, {})) + len(tasks)
    try:
        closed = facts.closed(options, view.node, pods)
        spec = facts.spec_of(options, view.node, load(state, name), held, view.spec, closed)
    except ValueError:
        yield from _emptied(state, view, "resources-unreadable")
        return
    before = view.spec
    if before is not None and _other(before, spec):
        yield _left(before, view.incarnation)
    if spec != before or (view.owes_join and state.connected):
        yield from _joined(state, view, spec, closed)


def _proven(state: ReporterState, node: Node, name: str, now_ms: int) -> Iterator[Decision]:
    """Ends that the node proves, and pods of an earlier boot, which its kubelet is to end for good."""
    boot_id, by_person = node.status.node_info.boot_id, fenced_by_person(node)
    for task in state.on(name):
        deleted = task.pod is not None and task.pod.metadata.deletion_timestamp is not None
        if by_person and (task.stage is Stage.VANISHED or deleted):  # no kubelet starts it again
            yield from lose(state, task, OUT_OF_SERVICE, now_ms)
        elif by_person and task.stage in (Stage.PLACED, Stage.RUNNING):
            if not task.lost:
                yield replace(task, lost=OUT_OF_SERVICE)
                yield from [replace(write, grace_s=0) for write in delete(task, 1)]
        elif not (task.boot_id and boot_id) or task.boot_id == boot_id or on_other_machine(state, task):
            continue
        elif task.stage is Stage.VANISHED:
            yield from lose(state, task, REBOOTED, now_ms)
        elif task.stage in (Stage.PLACED, Stage.RUNNING) and not task.lost:
            yield replace(task, lost=REBOOTED)
            yield from delete(task, 1)


def _departed(state: ReporterState, view: NodeView) -> Iterator[Decision]:
    """Its object was deleted: it leaves when all its tasks are proven ended."""
    if state.on(view.name):
        yield from _emptied(state, view, "node-deleted")
        return
    yield DropNode(view.name)
    if view.spec is not None:
        yield _left(view.spec, view.incarnation)


def _emptied(state: ReporterState, view: NodeView, why: str) -> Iterator[Decision]:
    """Nothing may be placed there; its tasks are not proven ended. A node that has not joined in this session
    is not reported."""
    if view.spec is None:
        return
    spec = facts.emptied(view.spec, why)
    if spec != view.spec or (view.owes_join and state.connected):
        yield from _joined(state, view, spec, why)


def _other(before: NodeSpec, now: NodeSpec) -> bool:
    """Whether another machine has the node's name; all tasks of the former have ended."""
    ids = before.machine_id, now.machine_id
    return None not in ids and ids[0] != ids[1]


def _left(spec: NodeSpec, incarnation: int) -> Emit:
    left = NodeLeft(node_id=spec.node_id, boot_id=spec.boot_id, proof="shutdown", incarnation=incarnation)
    return Emit(left, NO_CONTEXT, f"left/{incarnation}")


def _joined(state: ReporterState, view: NodeView, spec: NodeSpec, closed: str) -> Iterator[Decision]:
    """The node, and all its tasks that are not proven ended. Pods have no leases.

    Ideal: `NodeSuspected` where its kubelet is silent. Departure: a closed node, whose label says why: a node
    does not speak of its own suspicion, and a suspect node is restored by the next report of its tasks.
    """
    incarnation = state.term << TERM_SHIFT | state.joinings + 1
    yield NodeView(name=view.name, node=view.node, spec=spec, incarnation=incarnation, closed=closed)
    joined = NodeJoined(
        node=spec,
        tasks=tuple(RunningTask(task_id=task.task_id, token=task.token) for task in state.on(view.name)),
        incarnation=incarnation,
        leases=False,
        public_key=state.options.public_key,
        version=__version__,
    )
    yield Emit(joined, NO_CONTEXT, f"joined/{incarnation}")
