"""Fold of node events: inventory, GPU slots, cordons, departures."""

import heapq
from collections.abc import Callable
from typing import Any

from penstock.ledger.derived.departed import free_ordinal, withdraw
from penstock.ledger.derived.groups import own_parts
from penstock.ledger.fold import evidence, evolve_arrays
from penstock.ledger.fold.evolve_moves import taken
from penstock.ledger.state import lease
from penstock.ledger.state.holds import Cordon
from penstock.ledger.state.masks import full_mask
from penstock.ledger.state.node.node_state import NodeState
from penstock.ledger.state.node.suspicion import Suspicion
from penstock.ledger.state.state import MAX_REFUSED_JOINS, CellState, RefusedJoin, Timer
from penstock.model.decisions import ledger_events
from penstock.model.decisions.ledger_events import TimerSubject
from penstock.model.inputs import external_events
from penstock.model.nouns.nodes import NodeSpec
from penstock.model.nouns.transitions import NODE_TRANSITIONS, NodeStatus, transition
from penstock.model.nouns.types import MAX_GPUS_PER_NODE
from penstock.model.schema.topics import Topic


def _enter_spec(state: CellState, node: NodeState, spec: NodeSpec) -> None:
    """Stores a (new) inventory; what living tasks hold, and what is reserved, stays booked."""
    held = ((state.jobs[job_id], task_id) for task_id, job_id in node.tasks.items())
    places = list(own_parts((job, job.tasks[task_id].place) for job, task_id in held))
    for job_id in sorted(node.reserved):
        places += taken(state.jobs[job_id], spec.node_id)
    given = {gpu for place in places for gpu in place.gpus}
    node.slots = bound_slots(node.gpu_uuids, given, [gpu.uuid for gpu in spec.gpus])
    node.spec = spec
    node.read_gpus()
    node.free_gpu_mask = node.present_gpu_mask
    node.free_core_mask = full_mask(spec.cores)
    node.free_host_memory_mib = spec.host_memory_mib
    node.free_bandwidth_mbps = spec.bandwidth_mbps
    node.shared = {}
    for place in places:
        node.give(place)
    evolve_arrays.reserve(state, node)
    node.overdrawn_memory_mib = max(0, -node.free_host_memory_mib)
    node.overdrawn_bandwidth_mbps = max(0, -node.free_bandwidth_mbps)
    state.index.describe(node.bit, spec)
    state.capacity_version += 1


def bound_slots(before: tuple[str, ...], held: set[int], found: list[str]) -> tuple[str, ...]:
    """UUID by slot for the GPUs found now; empty: the slots are the inventory's indexes.

    While any GPU is held, GPUs that are still present keep their slots, and so do held ones that are gone. A
    new GPU takes the lowest free slot; if there is none, it waits for the next joining.
    """
    if not held or before == tuple(found):
        return ()
    present = set(found)
    slots = [uuid if slot in held or uuid in present else "" for slot, uuid in enumerate(before)]
    slots += [""] * (MAX_GPUS_PER_NODE - len(slots))
    free = [slot for slot, uuid in enumerate(slots) if not uuid]
    for uuid, slot in zip([uuid for uuid in found if uuid not in before], free, strict=False):
        slots[slot] = uuid
    while not slots[-1]:
        slots.pop()
    return () if slots == found else tuple(slots)


def node_joined(state: CellState, fact: external_events.NodeJoined) -> None:
    spec = fact.node
    state.refused_joins.pop(spec.node_id, None)
    node = state.nodes.get(spec.node_id)
    if node is None:
        node = NodeState(spec, free_ordinal(state), NodeStatus.READY, 0, 0, 0, 0)
        state.node_at[node.ordinal] = spec.node_id
        state.nodes[spec.node_id] = node
        node.incarnation = state.forgotten_nodes.pop(spec.node_id, 0)
        node.commanded_seq = state.seq
    else:
        withdraw(state, node)
        node.rebooted = node.spec.boot_id != spec.boot_id
        if node.rebooted or node.spec.gpus != spec.gpus:
            evidence.forgotten(state, node)
        if node.status is not NodeStatus.READY:
            node.status = transition(NODE_TRANSITIONS, node.status, NodeStatus.READY, spec.node_id)
        node.leaving = False
        node.faulted_gpu_mask = 0
        lease.cleared(state, node)
    node.leases = fact.leases
    node.incarnation = max(node.incarnation, fact.incarnation)
    node.said = fact.said
    node.public_key = fact.public_key or (None if node.replaceable else node.public_key)
    node.replaceable = False
    if state.epoch and state.inputs_read(Topic.NODES) > state.rejoin_offset:
        node.epoch = state.epoch
    known = {task_id: state.jobs[job_id].token for task_id, job_id in node.tasks.items()}
    node.orphan_tasks = {
        task.task_id: state.token for task in fact.tasks if known.get(task.task_id) != task.token
    }
    _enter_spec(state, node, spec)
    for fault in fact.faults:
        mark_faulted(node, node.slot_of(fault.uuid))
    state.reindex(node)


Fold = Callable[[CellState, Any], None]


def counted(fold: Fold) -> Fold:
    """The fold of a report that has a number, which its node has reached then."""

    def folded(state: CellState, fact: Any) -> None:
        node = state.nodes[fact.node_id]
        node.said = max(node.said, fact.said)
        fold(state, fact)

    return folded


def node_join_refused(state: CellState, fact: ledger_events.NodeJoinRefused) -> None:
    """The joining has no effect. The refusal is stored, so that the node is informed even if this placer ends
    before it has done so."""
    refused = state.refused_joins
    refused.pop(fact.node_id, None)
    refused[fact.node_id] = RefusedJoin(
        fact.boot_id, fact.incarnation, fact.reason, fact.public_key, state.token
    )
    if len(refused) > MAX_REFUSED_JOINS:
        refused.popitem(last=False)


def node_changed(state: CellState, fact: external_events.NodeChanged) -> None:
    node = state.nodes[fact.node.node_id]
    withdraw(state, node)
    node.faulted_gpu_mask = 0
    if node.spec.gpus != fact.node.gpus:
        evidence.forgotten(state, node)
    _enter_spec(state, node, fact.node)
    state.reindex(node)


def node_suspected(state: CellState, fact: external_events.NodeSuspected) -> None:
    node = state.nodes[fact.node_id]
    if node.status is NodeStatus.READY:
        node.status = transition(NODE_TRANSITIONS, node.status, NodeStatus.SUSPECT, fact.node_id)
        lease.suspected(state, node, fact.reason)
    state.reindex(node)


def answers_lost(state: CellState) -> None:
    """The nodes' topic, or the ledger, has lost records, perhaps answers: suspect nodes are probed again, at
    once where a timer can be named after the node."""
    for node_id, node in state.nodes.items():
        if node.status is NodeStatus.SUSPECT and node.suspicion is not None and node.leases:
            node.suspicion = Suspicion(node.suspicion.reason, node.suspicion.at_ms)
            if lease.has_timer(node):
                timer_id = lease.timer_id(node)
                state.timers[timer_id] = Timer(state.now_ms, TimerSubject(kind=lease.LEASE_TIMER, id=node_id))
                heapq.heappush(state.timer_heap, (state.now_ms, timer_id))


def node_left(state: CellState, fact: external_events.NodeLeft) -> None:
    node = state.nodes[fact.node_id]
    if node.status is NodeStatus.READY:
        node.status = transition(NODE_TRANSITIONS, node.status, NodeStatus.SUSPECT, fact.node_id)
    node.leaving = True
    node.left_ms = state.now_ms
    node.replaceable = node.replaceable or fact.proof in ("fenced", "deleted")
    state.reindex(node)


def node_cordoned(state: CellState, fact: external_events.NodeCordoned) -> None:
    node = state.nodes[fact.node_id]
    node.cordon = Cordon(fact.drain, fact.by, fact.reason, state.now_ms)
    node.commanded_seq = state.seq
    state.index.cordoned |= node.bit
    state.reindex(node)


def node_uncordoned(state: CellState, fact: external_events.NodeUncordoned) -> None:
    node = state.nodes[fact.node_id]
    node.cordon = None
    evidence.forgotten(state, node)
    node.commanded_seq = state.seq
    state.index.cordoned &= ~node.bit
    state.reindex(node)


def node_lost(state: CellState, fact: ledger_events.NodeLost) -> None:
    node = state.nodes[fact.node_id]
    node.status = transition(NODE_TRANSITIONS, node.status, NodeStatus.GONE, fact.node_id)
    lease.cleared(state, node)
    evidence.cleared(state, node)
    state.index.lose(node.bit, node.spec)
    state.capacity_version += 1
    state.reindex(node)


def node_restored(state: CellState, fact: ledger_events.NodeRestored) -> None:
    node = state.nodes[fact.node_id]
    node.status = transition(NODE_TRANSITIONS, node.status, NodeStatus.READY, fact.node_id)
    node.leaving = False
    lease.cleared(state, node)
    state.reindex(node)


def gpu_faulted(state: CellState, fact: external_events.GpuFaulted) -> None:
    node = state.nodes[fact.node_id]
    mark_faulted(node, fact.gpu if fact.uuid is None else node.slot_of(fact.uuid))
    state.reindex(node)


def mark_faulted(node: NodeState, slot: int | None) -> None:
    """Marks a GPU as faulted: no task is placed on it until its node joins or changes again."""
    if slot is not None:
        node.faulted_gpu_mask |= 1 << slot
