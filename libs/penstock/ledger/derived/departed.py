"""Garbage collection of nodes that are proven gone: the newest stay in the state, of the others only the
incarnation.

A dropped node leaves a hole in the ordinals, which the next new node takes; holes behind the last node are
cut off.
"""

from penstock.ledger.state.node.node_state import NodeState
from penstock.ledger.state.state import MAX_FORGOTTEN_NODES, CellState

MAX_GONE_NODES = 1_000  # nodes proven gone that stay, besides those cordoned or named by a living job
MAX_DROPPED_PER_RECORD = 64  # takes a millisecond in a cell of 20,000 nodes


def drop(state: CellState) -> None:
    """Drops droppable nodes beyond `MAX_GONE_NODES` as a record begins, those that left first, at most
    `MAX_DROPPED_PER_RECORD`.

    Ideal: every node stays, and a late copy of an old joining is distinguished from a new node. Departure: of
    the dropped nodes only the incarnation stays, of at most `MAX_FORGOTTEN_NODES`. Nodes that left within the
    freeze window stay: they count as missing (LAW 5).
    """
    gone = state.droppable
    beyond = len(gone) - MAX_GONE_NODES
    left_before_ms = state.now_ms - state.settings.freeze_window_ms
    for _ in range(min(beyond, MAX_DROPPED_PER_RECORD)):
        (left_ms, _), node_id = gone.peekitem(0)
        if left_ms >= left_before_ms:
            return
        gone.popitem(0)
        _drop(state, state.nodes.pop(node_id))


def _drop(state: CellState, node: NodeState) -> None:
    withdraw(state, node)
    node_id, at = node.spec.node_id, node.ordinal
    state.node_at[at], state.sound_gpus[at] = "", 0
    while state.node_at and not state.node_at[-1]:
        state.node_at.pop()
        state.sound_gpus.pop()
    state.forgotten_nodes[node_id] = node.incarnation
    if len(state.forgotten_nodes) > MAX_FORGOTTEN_NODES:
        state.forgotten_nodes.popitem(last=False)
    state.capacity_version += 1


def withdraw(state: CellState, node: NodeState) -> None:
    """Takes the node out of all indexes."""
    state.index.refit(node.bit, len(node.spec.gpus), node.entered, type(node.entered)())
    node.entered = type(node.entered)()
    state.index.remove(node.bit, node.spec)


def free_ordinal(state: CellState) -> int:
    """The ordinal for a new node: the lowest hole, else a new one."""
    known = state.index.known
    ordinal = (~known & (known + 1)).bit_length() - 1
    if ordinal == len(state.node_at):
        state.node_at.append("")
        state.sound_gpus.append(0)
    return ordinal
