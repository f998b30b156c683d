"""Joining of a node to the cell, and the cell's answer: it counts, it has to be repeated, or the node makes
way for another machine."""

from collections.abc import Iterator

import msgspec

from penstock import __version__
from penstock.model.decisions.orders import AnswerJoin
from penstock.model.inputs.external_events import NodeJoined, RunningTask
from penstock.model.nouns.nodes import NodeSpec
from penstock_services.node_reporter.core.state import Accept, NodeState


class JoinAgain(msgspec.Struct, frozen=True):
    """The joining did not count: the journal was lost, and the clock is behind its former value. Join above
    this incarnation."""

    above: int


class Fence(msgspec.Struct, frozen=True):
    """Another node has this node's id or one of its GPUs: stop every task and end."""

    why: str


def joining(state: NodeState, spec: NodeSpec, public_key: str | None) -> NodeJoined:
    """The node's resources, and the tasks that are (or are about to be) alive on it."""
    tasks = sorted(state.tasks.values(), key=lambda task: task.task_id)
    return NodeJoined(
        node=spec,
        tasks=tuple(RunningTask(task_id=task.task_id, token=task.token) for task in tasks),
        incarnation=state.incarnation,
        faults=tuple(fault for gpu in state.gpus if (fault := state.faults.get(gpu)) is not None),
        leases=True,
        public_key=public_key,
        version=__version__,
    )


def join_answered(state: NodeState, order: AnswerJoin) -> Iterator[Accept | JoinAgain | Fence]:
    """An answer to an older joining of this machine has no effect. A boot that joins above one whose joining
    counted, and that still runs, is of another machine, though it has the same machine id, as after an image
    was cloned."""
    own = (order.boot_id, order.incarnation) == (state.boot_id, state.incarnation)
    own &= order.public_key in (None, state.public_key)
    others = None not in (order.machine_id, state.machine_id) and order.machine_id != state.machine_id
    others |= order.boot_id != state.boot_id and state.accepted > 0
    if own and order.verdict == "accepted":
        yield Accept(order.incarnation)
    elif own and order.verdict == "stale_join":
        yield JoinAgain(order.highest_incarnation)
    elif own and order.public_key is not None:
        yield Fence(
            "its id is bound to another key: of another machine, or of this one before it lost its state "
            "folder"
        )
    elif own and order.verdict == "other_machine":
        yield Fence(f"its id is another machine's: {order.machine_id} has it, and is not proven gone")
    elif own and order.verdict == "gpu_of_another_node":
        yield Fence("one of its GPUs is in another node, which is not proven gone")
    elif others and order.verdict == "accepted" and order.incarnation > state.incarnation:
        yield Fence(
            f"its id is another machine's: {order.machine_id} has joined under it, booted as {order.boot_id}"
        )
