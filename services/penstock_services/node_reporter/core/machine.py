"""State machine of a node: one input leads to changes and actions. No process, file or clock is used here.

The shell first makes the changes durable (fsync when an order was decided on, LAW 4) and only then acts.

| input | answer |
|---|---|
| `OrderRead` StartTask | refuse, wait for a predecessor, spawn, spawn up to its gate (`gate`), or repeat the
earlier answer |
| `OrderRead` StopTask | SIGTERM now or when rank 0 has ended, and SIGKILL after the grace, or make sure that
the task never starts (`stops`) |
| `OrderRead` SetCores, SetBandwidth | record it, apply it to a running task, report the result
(`adjustments`) |
| `OrderRead` CheckpointTask | ask the running task's processes that save, else a line in the service's log |
| `Unsaved` | report that nothing is saved, and why |
| `OrderRead` HandOverCheckpoint | record it: from now on that node may fetch it |
| `Spawned` | report the start, unless its gate is closed; if it was to be stopped or adjusted meanwhile, do
that |
| `Resumed`, `Done` | adjust unconfirmed tasks; report the result |
| `Gone` | the whole process tree is proven dead: report the exit, tell ranks that wait for it to end, open
gates, start waiting tasks |
| `Stepped` | the task keeps to its own cores (`lending`) |
| `GraceOver` | SIGKILL |
| `OrderRead` AnswerJoin | join again, or make way for the machine that has this node id |
| `Drain` | stop everything |
| `Faulted` | record and report the fault |

`OrderRefused` frees the task's place, so it is sent only for a StartTask that is not obeyed, now or later.
"""

from collections.abc import Iterator
from itertools import chain
from typing import Literal

from msgspec.structs import replace

from penstock import __version__
from penstock.model.decisions.orders import (
    AnswerJoin,
    CheckpointTask,
    HandOverCheckpoint,
    Peer,
    SetBandwidth,
    SetCores,
    StartTask,
    StopTask,
    unpack_peers,
)
from penstock.model.inputs.external_events import GpuFaulted, OrderRefused, TaskExited, TaskStarted
from penstock.model.nouns.nodes import GpuFault
from penstock_services.node_reporter.core.actions import (
    Decision,
    Discard,
    Emit,
    Note,
    OpenGate,
    Spawn,
)
from penstock_services.node_reporter.core.adjustments import adjust, done, unconfirmed
from penstock_services.node_reporter.core.gate import launches, open_again, opened
from penstock_services.node_reporter.core.gpu_shares import exclude, fits
from penstock_services.node_reporter.core.inputs import (
    Done,
    Drain,
    Faulted,
    Gone,
    GraceOver,
    Input,
    OrderRead,
    Outcome,
    Resumed,
    Spawned,
    Stepped,
    Unsaved,
)
from penstock_services.node_reporter.core.joining import join_answered
from penstock_services.node_reporter.core.lending import lent, stepped, widened
from penstock_services.node_reporter.core.state import (
    MAX_ENDED_REMEMBERED,
    NO_CONTEXT,
    Break,
    Change,
    Context,
    Forget,
    Gang,
    HandOver,
    NodeState,
    Put,
    Status,
    Task,
    evolve,
)
from penstock_services.node_reporter.core.stops import (
    MAX_DETAIL_CHARS,
    ask_to_save,
    chief_gone,
    drain,
    grace_over,
    stop_ordered,
    terminate,
    unsaved,
)

MAX_WAITING = 64  # orders that may wait for predecessors; four for each GPU of the largest board
MAX_TASKS = 1_000  # waiting and alive; NodeJoined holds 1,024

Reason = Literal["stale_token", "unknown_gpu", "occupied", "unknown_task", "wrong_node"]


def step(state: NodeState, given: Input) -> list[Decision]:
    """Decides and folds each own change at once; returns all changes and actions in order."""
    decisions: list[Decision] = []
    for decided in chain(decide(state, given), lent(state)):
        for decision in widened(state, decided.order) if isinstance(decided, Spawn) else (decided,):
            if isinstance(decision, Change):
                evolve(state, decision)
            decisions.append(decision)
    while len(state.ended) > MAX_ENDED_REMEMBERED:
        oldest = next(iter(state.ended.values()))
        forget = Forget(oldest.task_id, oldest.token)
        evolve(state, forget)
        decisions.append(forget)
    return decisions


def decide(state: NodeState, given: Input) -> Iterator[Decision]:
    """The decisions from one input. A generator: `step` folds each change before the next decision."""
    match given:
        case OrderRead():
            return _ordered(state, given)
        case Spawned():
            return _spawned(state, given)
        case Resumed():
            return chain(open_again(state), unconfirmed(state.live()))
        case Done():
            return done(state, given)
        case Unsaved():
            return unsaved(state, given)
        case Gone():
            return _gone(state, given)
        case Stepped():
            return stepped(state, given)
        case GraceOver():
            return grace_over(state, given)
        case Drain():
            return drain(state, given)
        case Faulted():
            return _faulted(state, given.event)


def _ordered(state: NodeState, given: OrderRead) -> Iterator[Decision]:
    match given.order:
        case StartTask() as order:
            return _start(state, order, given.context)
        case StopTask() as order:
            return stop_ordered(state, order, given.now_ms, given.context)
        case AnswerJoin() as order:
            return chain(join_answered(state, order), _of_another_version(state, order))
        case SetCores() | SetBandwidth() as order:
            return adjust(state, order)
        case CheckpointTask() as order:
            return ask_to_save(state, order)
        case HandOverCheckpoint() as order:
            return _hand_over(state, order)
    raise TypeError(f"{given.order.TYPE} is none of the core's orders")


def _of_another_version(state: NodeState, order: AnswerJoin) -> Iterator[Decision]:
    """Said at each joining that the cell has accepted."""
    if order.version in ("", __version__) or order.incarnation != state.accepted:
        return
    yield Note(
        f"the placer runs Penstock {order.version}, this node-reporter {__version__}: the older of the two "
        "ignores fields that it does not know"
    )


def _faulted(state: NodeState, event: GpuFaulted) -> Iterator[Decision]:
    if event.uuid is not None:
        fault = GpuFault(uuid=event.uuid, fault=event.fault, code=event.code)
        yield Break(fault, state.boot_id)
    yield Emit(replace(event, incarnation=state.incarnation), NO_CONTEXT)


# ------------------------------------------------------------------------------------------------- start


def _start(state: NodeState, order: StartTask, context: Context) -> Iterator[Decision]:
    if order.boot_id != state.boot_id:
        yield Note(f"{order.task_id}: start order {order.token} is for boot {order.boot_id}, which is over")
        return
    if 0 < order.incarnation < state.incarnation:  # the cell may have dropped it when this node left
        yield Note(f"{order.task_id}: start order {order.token} is of before this node joined; ignored")
        return
    if len(order.gpu_uuids) != len(order.place.gpus):  # it is sent again once the placer names them
        yield Note(f"{order.task_id}: start order {order.token} does not name its GPUs; upgrade the placer")
        return
    known = state.find(order.task_id)
    if known is not None and known.token == order.token:
        yield from _repeat(known)
        return
    highest = _highest(state, order, known)
    if order.token < highest:
        yield Emit(_refusal(order, "stale_token", highest, "a newer decision was obeyed already"), context)
        return
    refusal = _unacceptable(state, order, known, highest)
    if refusal is None and order.peers_of is not None:
        try:
            if order.packed_peers is not None:
                yield Gang(order.peers_of, order.token, unpack_peers(order.packed_peers))
            order = replace(order, peers=_peers(state, order), peers_of=None, packed_peers=None)
        except ValueError as error:
            refusal = _refusal(order, "unknown_task", highest, str(error))
    if refusal is not None:
        if known is not None and known.status is not Status.ENDED:
            yield Put(replace(known, refused_token=order.token))
        else:
            yield Put(Task(order.task_id, order.token, order.boot_id, Status.ENDED, refusal=refusal))
        yield Emit(refusal, context)
        return
    task = Task(
        order.task_id, order.token, order.boot_id, Status.WAITING, order.gpu_uuids, order, context=context
    )
    for other in state.waiting():
        if other.token < order.token and exclude(other, task):
            yield from _supersede(other, order.token)
    if not fits(state.tasks.values(), task):
        if not launches(state, task):
            yield Put(task)
            return
        yield Put(replace(task, status=Status.STARTING, gated=True))
        yield Spawn(order)
    else:
        yield Put(replace(task, status=Status.STARTING))
        yield Spawn(order)


def _peers(state: NodeState, order: StartTask) -> tuple[Peer, ...]:
    """Peers of a large gang: those of the order named by `peers_of`, whose task may have ended since. Raises
    `ValueError`."""
    bearer_id = order.peers_of or ""
    if (bearer_id, order.token) in state.gangs:
        return state.gangs[bearer_id, order.token]
    bearer = state.tasks.get(bearer_id)
    if bearer is None or bearer.token != order.token or bearer.order is None:
        raise ValueError(f"the order of {order.peers_of} has its peers, and is unknown here")
    return bearer.order.peers


def _highest(state: NodeState, order: StartTask, known: Task | None) -> int:
    """The highest token that this order must exceed: of its GPUs, of the same task, of forgotten tasks."""
    tokens = [state.gpu_tokens.get(gpu, 0) for gpu in order.gpu_uuids]
    tokens.append(state.forgotten_token + 1 if known is None else max(known.token, known.refused_token + 1))
    return max(tokens)


def _unacceptable(
    state: NodeState, order: StartTask, known: Task | None, highest: int
) -> OrderRefused | None:
    """The refusal of an order that is fresh but cannot be carried out here; None if it can."""
    place = order.place
    if place.node_id != state.node_id or place.task_id != order.task_id:
        detail = f"the place names task {place.task_id} on node {place.node_id}"
        return _refusal(order, "wrong_node", highest, detail)
    missing = tuple(gpu for gpu in order.gpu_uuids if gpu not in state.gpus)
    if missing:
        detail = f"not on this node: {', '.join(missing)}; it has {', '.join(state.gpus) or 'no GPU'}"
        return replace(_refusal(order, "unknown_gpu", highest, detail), missing_gpus=missing)
    if known is not None and known.status is not Status.ENDED:
        return _refusal(order, "occupied", highest, f"the same task is {known.status} under {known.token}")
    if len(state.tasks) >= MAX_TASKS:
        return _refusal(order, "occupied", highest, f"{MAX_TASKS} tasks are here already")
    if len(state.tasks) >= MAX_WAITING and len(state.waiting()) >= MAX_WAITING:
        return _refusal(order, "occupied", highest, f"{MAX_WAITING} orders wait for predecessors already")
    return None


def _refusal(order: StartTask, reason: Reason, highest: int, detail: str) -> OrderRefused:
    return OrderRefused(
        node_id=order.node_id,
        task_id=order.task_id,
        token=order.token,
        reason=reason,
        highest_token=max(highest, 0),
        detail=detail[:MAX_DETAIL_CHARS],
    )


def _supersede(task: Task, token: int) -> Iterator[Decision]:
    """A waiting order whose GPU was given to a newer one will never be obeyed."""
    assert task.order is not None
    refusal = _refusal(task.order, "stale_token", token, "superseded while it waited for its predecessor")
    yield Put(replace(task, status=Status.ENDED, order=None, refusal=refusal))
    yield Emit(refusal, task.context)


def _repeat(task: Task) -> Iterator[Decision]:
    """The same order again: repeats the earlier answer; a task that has yet to start has none."""
    if task.answer is not None:
        yield Emit(task.answer, task.context)
    elif task.started_ms is not None and not task.gated:
        yield _started(task)


def _started(task: Task) -> Emit:
    assert task.order is not None
    assert task.pid is not None
    assert task.started_ms is not None
    return Emit(
        TaskStarted(
            node_id=task.order.node_id,
            task_id=task.task_id,
            token=task.token,
            pid=task.pid,
            started_ms=task.started_ms,
            opened_ms=task.opened_ms,
        ),
        task.context,
    )


def _spawned(state: NodeState, given: Spawned) -> Iterator[Decision]:
    task = state.tasks.get(given.task_id)
    if task is None or task.token != given.token or task.status is not Status.STARTING:
        return
    task = replace(task, status=Status.RUNNING, pid=given.pid, started_ms=given.started_ms)
    yield Put(task)
    if task.opened_ms is not None:
        yield OpenGate(task.task_id, task.token)
    if not task.gated:
        yield _started(task)
    if task.stop_grace_ms is not None:
        yield from terminate(task, task.stop_grace_ms, given.now_ms, waits=False)
    else:
        yield from unconfirmed([task])


# ------------------------------------------------------------------------------------------------- exits


def _gone(state: NodeState, given: Gone) -> Iterator[Decision]:
    task = state.tasks.get(given.task_id)
    if task is None or task.token != given.token:
        return
    exited = _exited(state.node_id, task, given.outcome)
    yield Put(replace(task, status=Status.ENDED, order=None, exited=exited))
    yield Emit(exited, task.context)
    if task.order is not None:
        yield from chief_gone(state, task.order)
    if task.order is not None and _succeeds(state, task.order, exited):
        yield Discard(task.order)
    for opening in opened(state, given.outcome.exited_ms):
        yield opening
        if opening.task.started_ms is not None:
            yield OpenGate(opening.task.task_id, opening.task.token)
            yield _started(opening.task)
    for successor in state.waiting():
        older = [task for task in state.waiting() if task.token < successor.token]
        if fits((*state.live(), *older), successor):
            assert successor.order is not None
            yield Put(replace(successor, status=Status.STARTING))
            yield Spawn(successor.order)


def _succeeds(state: NodeState, order: StartTask, exited: TaskExited) -> bool:
    """Whether a job that saves has certainly succeeded with this exit: it has one task, and no later attempt
    of it is here."""
    done = exited.cause == "exited" and exited.exit_code == 0
    if not done or order.checkpoint is None or len(order.peers) != 1:
        return False
    others = (task.order for task in state.tasks.values() if task.task_id != order.task_id)
    return all(other is None or other.job_id != order.job_id for other in others)


def _exited(node_id: str, task: Task, outcome: Outcome) -> TaskExited:
    cause: Literal["exited", "stopped", "start_failed", "out_of_memory", "lost"]
    if outcome.failure:
        cause = "start_failed"
    elif outcome.lost:
        cause = "lost"
    elif task.stop_grace_ms is not None:
        cause = "stopped"
    elif outcome.out_of_memory:
        cause = "out_of_memory"
    else:
        cause = "exited"
    started_ms = task.started_ms if task.started_ms is not None else outcome.started_ms
    why = (outcome.failure or outcome.lost or outcome.evidence,)
    return TaskExited(
        node_id=node_id,
        task_id=task.task_id,
        token=task.token,
        cause=cause,
        exit_code=outcome.exit_code,
        signal=outcome.signal,
        started_ms=started_ms if started_ms is not None else outcome.exited_ms,
        exited_ms=outcome.exited_ms,
        usage=outcome.usage,
        detail="; ".join(filter(None, (*why, _left(cause, outcome.left))))[:MAX_DETAIL_CHARS],
        exhausted=outcome.exhausted or ("host_memory" if cause == "out_of_memory" else ""),
        gpu_memory_limit_mib=outcome.gpu_memory_limit_mib,
    )


def _left(cause: str, number: int) -> str:
    """What became of processes that the program left running, or that did not end when they were stopped."""
    if not number:
        return ""
    one = number == 1
    if cause == "stopped":
        return (
            f"{number} {'process' if one else 'processes'} did not end within the grace and "
            f"{'was' if one else 'were'} killed"
        )
    return f"{number} {'process' if one else 'processes'} left running {'was' if one else 'were'} ended"


def _hand_over(state: NodeState, order: HandOverCheckpoint) -> Iterator[Decision]:
    known = state.handovers.get(order.job_id)
    if known is None or known.token <= order.token:
        yield HandOver(order)
