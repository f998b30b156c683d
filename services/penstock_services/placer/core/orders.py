"""Orders, derived from valid ledger records and the state folded from them (LAW 4); never decided here."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from penstock import __version__
from penstock.ledger.derived.resuming import resumed, source
from penstock.ledger.state.job.job_state import JobState, TaskState
from penstock.ledger.state.node.node_state import NodeState
from penstock.ledger.state.state import CellState
from penstock.model.decisions.adjustments import (
    AdjustmentDecided,
    BandwidthDecided,
    CheckpointDecided,
    CoresDecided,
)
from penstock.model.decisions.ledger_events import (
    NodeJoinRefused,
    NodeProbed,
    PlacementDecided,
    ProbeExpired,
    StopDecided,
    TaskLost,
)
from penstock.model.decisions.orders import (
    AnswerJoin,
    CheckpointSource,
    CheckpointTask,
    Companion,
    HandOverCheckpoint,
    Order,
    Peer,
    ProbeNode,
    SetBandwidth,
    SetCores,
    StartTask,
    StopTask,
    pack_peers,
)
from penstock.model.inputs.external_events import (
    NodeJoined,
    NodeLeft,
    OrderRefused,
    ProbeSent,
    TaskExited,
    TaskStarted,
)
from penstock.model.inputs.saves import SaveRefused
from penstock.model.nouns.nodes import JoinRefusal
from penstock.model.nouns.token import token_of
from penstock.model.nouns.transitions import TaskStatus
from penstock.model.nouns.types import WHOLE_GPU
from penstock.model.schema.event import Event

ORPHAN_GRACE_MS = 10_000  # a job's default; the task's job may be forgotten
MAX_PEERS_EACH = 64  # members of a gang whose orders each have the peers unpacked; 5 KiB
Verdict = Literal["accepted", JoinRefusal]
OfTask = TaskExited | TaskLost | OrderRefused | SaveRefused
Notice = ProbeSent | NodeLeft
"""Records that the placer writes to the nodes' topic for a probe."""


class Gang(NamedTuple):
    """A job's members: unpacked, or packed once for all orders that have them."""

    peers: tuple[Peer, ...]
    packed: str | None


def orders_of(state: CellState, fact: Event, seq: int) -> Sequence[Order]:
    """Orders that follow from one fact of record `seq`, which was read back as valid; none from most."""
    make = ORDERS.get(type(fact))
    return () if make is None else list(make(state, fact, token_of(state.epoch, seq)))


def notices_of(state: CellState, fact: Event, orders: Sequence[Order]) -> Sequence[Notice]:
    """Notices of one fact for the nodes' topic: that a probe is in the log, once it is; that it stayed
    unanswered.

    `orders`: those that follow from it.
    """
    if isinstance(fact, ProbeExpired):
        return [*_sent_probes(orders), *_proof(state.nodes[fact.node_id])]
    return list(_sent_probes(orders)) if orders else ()


def outstanding_notices(state: CellState, orders: Iterable[Order]) -> Iterator[Notice]:
    """At the start of a term, after the repeated orders:
    the placer before may have ended too early to send them."""
    yield from _sent_probes(orders)
    for node in state.nodes.values():
        yield from _proof(node)


def _sent_probes(orders: Iterable[Order]) -> Iterator[ProbeSent]:
    for order in orders:
        if isinstance(order, ProbeNode):
            yield ProbeSent(node_id=order.node_id, probe=order.token)


def _proof(node: NodeState) -> Iterator[NodeLeft]:
    """For a node whose probe has expired. Any answer in time precedes this in the nodes' topic."""
    if node.suspicion is not None and node.suspicion.expired:
        yield NodeLeft(
            node_id=node.spec.node_id,
            boot_id=node.spec.boot_id,
            proof="lease_outlived",
            incarnation=node.incarnation,
            probe=node.suspicion.probe,
        )


def start_orders(state: CellState, job_id: str, token: int) -> list[Order]:
    """For a placement read back as valid; before them the order to hand over its checkpoint. Empty when a
    later record has ended that attempt.

    The state may have run ahead of that record: a task lost to a reboot meanwhile must not start under the
    new boot id, and one that is to stop again need not start (its stop order makes sure that it never will).
    """
    job = state.jobs.get(job_id)
    if job is None or job.token != token:
        return []
    assigned = [task for task in job.tasks.values() if task.status is TaskStatus.ASSIGNED]
    first = _hand_over(state, job) if assigned else ()
    return [*first, *_starts(state, job, assigned, _gang(state, job))]


def stop_orders(state: CellState, job_id: str, token: int) -> list[Order]:
    """For a stop read back as valid. Empty after a later stop or the exits."""
    job = state.jobs.get(job_id)
    if job is None or job.stop.token != token:
        return []
    ended = _chief_ended(job)
    return [_stop(job, task, ended) for task in job.tasks.values() if task.status is TaskStatus.STOPPING]


def _chief_ended(job: JobState) -> bool:
    """Whether the other ranks of a gang that is being stopped need not wait for rank 0 to save."""
    if job.spec.checkpoint != "sdk" or len(job.tasks) < 2:
        return False
    chief = next(task for task in job.tasks.values() if task.place.rank == 0)
    return chief.status is TaskStatus.EXITED or not job.saves


def _reported(state: CellState, fact: OfTask, token: int) -> Sequence[Order]:
    """The stop again, if this report means that rank 0 has ended, or saves nothing. `token`: of its record;
    of a later stop the orders follow when that is read back."""
    job = state.jobs.get(fact.task_id.rsplit(".", 2)[0])
    task = None if job is None else job.tasks.get(fact.task_id)
    if job is None or task is None or task.place.rank > 0 or job.stop.token >= token or not _chief_ended(job):
        return ()
    return stop_orders(state, job.job_id, job.stop.token)


def adjusting_orders(state: CellState, task: TaskState, up_to: int) -> Iterator[Order]:
    """Adjustments of a running task that its node has not answered, oldest first. Tokens and `up_to` as in
    `outstanding`.

    Cores also of a task that is being stopped: others may have the cores that it was to give up, and its save
    may take long.
    """
    if task.status not in (TaskStatus.RUNNING, TaskStatus.STOPPING):
        return
    about = {"node_id": task.place.node_id, "task_id": task.place.task_id}
    found: list[Order] = []
    if (asked := task.cores.adjusted) is not None and not asked.answered and asked.token <= up_to:
        found.append(SetCores(**about, token=asked.token, cores=task.used_cores))
    if task.status is TaskStatus.STOPPING:
        yield from found
        return
    if (asked := task.bandwidth_adjusted) is not None and not asked.answered and asked.token <= up_to:
        percent = task.memory_bandwidth_percent
        found.append(SetBandwidth(**about, token=asked.token, memory_bandwidth_percent=percent))
    if (asked := task.checkpoint_asked) is not None and asked.token <= up_to:
        found.append(CheckpointTask(**about, token=asked.token))
    yield from sorted(found, key=lambda order: order.token)


def _asked_to_save(state: CellState, fact: CheckpointDecided, token: int) -> Iterator[Order]:
    """For a request read back as valid. Empty when the attempt has ended or is being stopped."""
    job = state.jobs.get(fact.job_id)
    task = None if job is None else job.tasks.get(fact.task_id)
    if task is not None and task.status is TaskStatus.RUNNING:
        yield CheckpointTask(token=token, node_id=fact.node_id, task_id=fact.task_id)


def _adjusted(state: CellState, fact: AdjustmentDecided, token: int) -> Iterator[Order]:
    """For an adjustment read back as valid.
    Empty after a later one, an exit or, unless it is of cores, a stop."""
    job = state.jobs.get(fact.job_id)
    task = None if job is None else job.tasks.get(fact.task_id)
    if task is not None:
        yield from (order for order in adjusting_orders(state, task, token) if order.token == token)


def _task_started(state: CellState, fact: TaskStarted, token: int) -> Iterator[Order]:
    """Adjustments decided before a restored ledger recorded that the task runs."""
    job = (
        state.jobs.get(state.nodes[fact.node_id].tasks.get(fact.task_id, ""))
        if fact.node_id in state.nodes
        else None
    )
    if job is not None:
        yield from adjusting_orders(state, job.tasks[fact.task_id], token)


def outstanding(state: CellState, node_ids: Iterable[str], up_to: int) -> Iterator[Order]:
    """Orders to these nodes that are not answered; repeats are harmless, tokens make them idempotent.

    Only tokens ≤ `up_to`, that of the last record read back as valid: the state may have run ahead of it.
    """
    gangs: dict[str, Gang] = {}
    for node_id in node_ids:
        running = (
            state.jobs[job_id].tasks[task_id] for task_id, job_id in state.nodes[node_id].tasks.items()
        )
        adjusting = [order for task in running for order in adjusting_orders(state, task, up_to)]
        yield from sorted(adjusting, key=lambda order: (order.token, order.subject()))
        yield from orphan_orders(state, node_id, up_to)
        yield from probe_orders(state, node_id, up_to)
        assigned: dict[str, list[TaskState]] = {}
        for task_id, job_id in state.nodes[node_id].tasks.items():
            job = state.jobs[job_id]
            task = job.tasks[task_id]
            if task.status is TaskStatus.ASSIGNED and job.token <= up_to:
                assigned.setdefault(job_id, []).append(task)
            elif task.status is TaskStatus.STOPPING and job.stop.token <= up_to:
                yield _stop(job, task, _chief_ended(job))
        for job_id, tasks in assigned.items():
            job = state.jobs[job_id]
            gang = gangs[job_id] = gangs.get(job_id) or _gang(state, job)
            yield from _hand_over(state, job)
            yield from _starts(state, job, tasks, gang)


def refusals(state: CellState, up_to: int) -> Iterator[AnswerJoin]:
    """At the start of a term: joinings that did not count; the placer before may have ended before it
    answered their nodes."""
    for node_id, found in state.refused_joins.items():
        if found.token <= up_to:
            about = found.boot_id, found.incarnation, found.reason, found.token, found.public_key
            yield _answer(state, node_id, *about)


def orphan_orders(state: CellState, node_id: str, up_to: int) -> Iterator[Order]:
    """Stops tasks that a joining node runs and the cell has dropped there: their job may be running elsewhere
    by now.

    Ideal: there is no such task, since only proof makes a node Gone. Departure: proof comes from people and
    other systems too, and two machines may have one name. Tokens and `up_to` as in `outstanding`.
    """
    for task_id, token in state.nodes[node_id].orphan_tasks.items():
        if token <= up_to:
            yield StopTask(
                token=token,
                node_id=node_id,
                task_id=task_id,
                grace_ms=ORPHAN_GRACE_MS,
                reason=StopTask.GIVEN_UP,
            )


def _joined(state: CellState, fact: NodeJoined, token: int) -> Iterator[Order]:
    """Another machine under this id that reads the answer stops its tasks."""
    if fact.node.machine_id is not None:
        yield _answer(state, fact.node.node_id, fact.node.boot_id, fact.incarnation, "accepted", token)
    yield from outstanding(state, [fact.node.node_id], token)


def _answer(
    state: CellState,
    node_id: str,
    boot_id: str,
    incarnation: int,
    verdict: Verdict,
    token: int,
    public_key: str | None = None,
) -> AnswerJoin:
    node = state.nodes.get(node_id)
    return AnswerJoin(
        token=token,
        node_id=node_id,
        boot_id=boot_id,
        incarnation=incarnation,
        verdict=verdict,
        machine_id=None if node is None else node.spec.machine_id,
        highest_incarnation=state.forgotten_nodes.get(node_id, 0) if node is None else node.incarnation,
        public_key=public_key,
        version=__version__,
    )


def probe_orders(state: CellState, node_id: str, up_to: int) -> Iterator[Order]:
    """The probe of a suspect node, until it has answered."""
    node = state.nodes[node_id]
    if node.suspicion is not None and 0 < node.suspicion.probe <= up_to:
        yield ProbeNode(token=node.suspicion.probe, node_id=node_id, incarnation=node.incarnation)


def _peers(state: CellState, job: JobState) -> tuple[Peer, ...]:
    nodes = state.nodes
    return tuple(
        Peer(
            rank=place.rank,
            role=place.role,
            node_id=place.node_id,
            address=nodes[place.node_id].spec.address,
        )
        for place in [task.place for task in job.tasks.values()]
    )


def _gang(state: CellState, job: JobState) -> Gang:
    peers = _peers(state, job)
    return Gang(peers, None) if len(peers) <= MAX_PEERS_EACH else Gang((), pack_peers(peers))


def _starts(state: CellState, job: JobState, tasks: Iterable[TaskState], gang: Gang) -> Iterator[StartTask]:
    """These tasks' orders. In a large gang the first on each node has the peers for the others there.

    Ideal: the peers are in the log once for a gang. Departure: once for each of its nodes, packed (decision
    33).
    """
    first: dict[str, str] = {}
    held = _held(job)
    for task in tasks:
        task_id, slots = task.place.task_id, held.get(task.place.node_id, ())
        slots = slots if task.place.gpus and len(slots) > len(task.place.gpus) else ()
        if gang.packed is None:
            yield _start(state, job, task, gang.peers, slots)
            continue
        bearer = first.setdefault(task.place.node_id, task_id)
        yield _start(state, job, task, (), slots, bearer, gang.packed if bearer == task_id else None)


def _held(job: JobState) -> dict[str, Sequence[int]]:
    """Node → slots of all whole GPUs of the attempt there, ascending; not those of tasks that have ended,
    whose slots may belong to other GPUs by now, or to none. Empty for a job of one task."""
    found: dict[str, list[int]] = {}
    if len(job.tasks) > 1:
        for task in job.tasks.values():
            if task.place.gpu_share_milli == WHOLE_GPU and task.status is not TaskStatus.EXITED:
                found.setdefault(task.place.node_id, []).extend(task.place.gpus)
    return {node_id: sorted(slots) for node_id, slots in found.items()}


def _start(
    state: CellState,
    job: JobState,
    task: TaskState,
    peers: tuple[Peer, ...],
    slots: Sequence[int] = (),
    peers_of: str | None = None,
    packed_peers: str | None = None,
) -> StartTask:
    place = task.place
    node = state.nodes[place.node_id]
    uuids = node.gpu_uuids if place.gpus else ()
    return StartTask(
        token=job.token,
        node_id=place.node_id,
        task_id=place.task_id,
        job_id=job.job_id,
        attempt=job.attempt,
        boot_id=node.spec.boot_id,
        incarnation=node.incarnation,
        command=job.spec.argv,
        env=job.spec.env,
        secrets=job.spec.secrets,
        owner=job.spec.owner if job.spec.secrets or job.spec.code else None,
        workdir=job.spec.workdir,
        environment=job.spec.environment,
        code=job.spec.code,
        place=place,
        gpu_uuids=tuple(uuids[slot] for slot in place.gpus),
        job_gpu_uuids=tuple(uuids[slot] for slot in slots),
        lease_ms=task.lease_ms,
        peers=peers,
        peers_of=peers_of,
        packed_peers=packed_peers,
        rendezvous_port=job.port,
        grace_ms=job.spec.grace_ms,
        checkpoint=_checkpoint(state, job),
        checkpoint_from=_source(state, job),
        companions=_companions(state, job, place.rank),
        global_batch_size=job.spec.global_batch_size,
        prelaunch=job.succession.prelaunch,
        spare_cores=job.spec.resources.cores is None,
        interactive=job.spec.interactive,
        may_submit=job.spec.may_submit,
    )


def _companions(state: CellState, job: JobState, rank: int) -> tuple[Companion, ...]:
    """The other members' tasks of this rank that are not proven ended;
    also of members that joined after it."""
    if not job.sharing.group:
        return ()
    return tuple(
        Companion(task_id=task.place.task_id, token=other.token)
        for other in state.groups[job.sharing.group].values()
        if other is not job
        for task in other.tasks.values()
        if task.place.rank == rank and task.status is not TaskStatus.EXITED
    )


def _checkpoint(state: CellState, job: JobState) -> str | None:
    """As `StartTask.checkpoint`."""
    if job.spec.checkpoint != "sdk":
        return None
    found = resumed(state, job)
    return "" if found is None else found.path.rpartition("/")[2]


def _source(state: CellState, job: JobState) -> CheckpointSource | None:
    """As `StartTask.checkpoint_from`."""
    node = source(state, job) if job.spec.checkpoint == "sdk" else None
    if node is None:
        return None
    assert node.spec.logs is not None
    assert node.public_key is not None
    assert job.saving.checkpoint is not None
    return CheckpointSource(
        node_id=node.spec.node_id,
        address=node.spec.address,
        port=node.spec.logs.port,
        tls=node.spec.logs.tls,
        public_key=node.public_key,
        size_bytes=job.saving.checkpoint.size_bytes,
    )


def _hand_over(state: CellState, job: JobState) -> Iterator[HandOverCheckpoint]:
    """To the node that has the checkpoint of an attempt that is to start elsewhere."""
    node = source(state, job) if job.spec.checkpoint == "sdk" else None
    if node is None:
        return
    (task,) = job.tasks.values()
    to_node = state.nodes[task.place.node_id]
    assert to_node.public_key is not None
    yield HandOverCheckpoint(
        token=job.token,
        node_id=node.spec.node_id,
        job_id=job.job_id,
        attempt=job.attempt,
        to_node=to_node.spec.node_id,
        public_key=to_node.public_key,
    )


def _stop(job: JobState, task: TaskState, chief_ended: bool) -> StopTask:
    return StopTask(
        token=job.stop.token,
        node_id=task.place.node_id,
        task_id=task.place.task_id,
        grace_ms=job.spec.grace_ms,
        reason=job.stop.reason or "stopped",
        chief_ended=chief_ended and task.place.rank > 0,
    )


ORDERS: Mapping[type[Event], Callable[[CellState, Any, int], Iterable[Order]]] = MappingProxyType(
    {
        PlacementDecided: lambda state, fact, token: start_orders(state, fact.job_id, token),
        StopDecided: lambda state, fact, token: stop_orders(state, fact.job_id, token),
        TaskStarted: _task_started,
        TaskExited: _reported,
        TaskLost: _reported,
        OrderRefused: _reported,
        SaveRefused: _reported,
        CoresDecided: _adjusted,
        BandwidthDecided: _adjusted,
        CheckpointDecided: _asked_to_save,
        NodeProbed: lambda state, fact, token: probe_orders(state, fact.node_id, token),
        NodeJoined: _joined,
        NodeJoinRefused: lambda state, fact, token: [
            _answer(state, fact.node_id, fact.boot_id, fact.incarnation, fact.reason, token, fact.public_key)
        ],
    }
)
