"""Node n1 of a cell, which signs with its key, and what others may say in its name."""

from collections.abc import Callable

from penstock.ledger.snapshot import dump
from penstock.ledger.state import CellState
from penstock.model.envelope import Envelope, Headers, signed_bytes
from penstock.model.event import Event
from penstock.model.external_events import (
    GpuFaulted,
    NodeChanged,
    NodeCordoned,
    NodeJoined,
    NodeLeft,
    NodeSuspected,
    NodeUncordoned,
    OrderRefused,
    ProbeSent,
    TaskCheckpointed,
    TaskExited,
    TaskPhaseChanged,
    TaskStarted,
)
from penstock.runtime.node_keys import NodeKeys, operators_code
from tests.support.driver import node_spec

KEY, OTHER = NodeKeys(b"a" * 32), NodeKeys(b"b" * 32)
CELL = "default"
GATEWAYS = b"g" * 32
WORKER = "j.1.w0"


def signature(key: NodeKeys, envelope: Envelope, value: bytes, cell: str = CELL) -> Headers:
    return key.proofs(signed_bytes(cell, envelope.id, envelope.type, value))


def proofs(key: NodeKeys | bytes, envelope: Envelope, value: bytes, **more: str) -> Headers:
    """A node's, or with bytes the gateway's."""
    if isinstance(key, NodeKeys):
        return signature(key, envelope, value, **more)
    return (operators_code(key, signed_bytes(CELL, envelope.id, envelope.type, value)),)


def joined(node: str, key: NodeKeys | None, incarnation: int = 1, **more: object) -> NodeJoined:
    public_key = None if key is None else key.public_key
    return NodeJoined(node=node_spec(node), incarnation=incarnation, public_key=public_key, **more)  # type: ignore[arg-type]


def exited(token: int) -> TaskExited:
    return TaskExited(
        node_id="n1", task_id=WORKER, token=token, cause="exited", exit_code=0, started_ms=1, exited_ms=2
    )


FORGERIES: dict[str, Callable[[int], Event]] = {
    "exit": exited,
    "start": lambda token: TaskStarted(node_id="n1", task_id=WORKER, token=token, pid=1, started_ms=1),
    "checkpoint": lambda token: TaskCheckpointed(node_id="n1", task_id=WORKER, token=token, at_ms=1),
    "phase": lambda token: TaskPhaseChanged(node_id="n1", task_id=WORKER, token=token, phase="save", at_ms=1),
    "refusal": lambda token: OrderRefused(
        node_id="n1", task_id=WORKER, token=token, reason="occupied", highest_token=token
    ),
    "fault": lambda _: GpuFaulted(node_id="n1", gpu=0, uuid="GPU-n1-0", fault="ecc"),
    "change": lambda _: NodeChanged(node=node_spec("n1", 1)),
    "joining": lambda _: joined("n1", KEY, 2),
    "reboot": lambda _: NodeJoined(node=node_spec("n1", boot="b2"), incarnation=9, public_key=KEY.public_key),
    "leaving": lambda _: NodeLeft(node_id="n1", boot_id="b1", proof="shutdown", incarnation=1),
}  # fmt: skip
"""What somebody else may say in n1's name, by the token of its task."""

ACTS = (
    NodeLeft(node_id="n1", boot_id="b1", proof="fenced", by="mallory", reason=""),
    NodeCordoned(node_id="n1", drain=True, by="mallory", reason=""),
    NodeSuspected(node_id="n1", reason="so they say"),
    NodeUncordoned(node_id="n1", by="mallory", reason=""),
    NodeLeft(node_id="n1", boot_id="b1", proof="deleted"),
    NodeLeft(node_id="n1", boot_id="b1", proof="lease_outlived"),
    ProbeSent(node_id="n1", probe=1),
)
"""What is the gateway's and the placer's to say of n1."""


def unmoved(state: CellState) -> bytes:
    """The state, but for the place up to which inputs were answered."""
    kept = state.seq, state.now_ms, state.positions, state.last_inputs
    state.seq, state.now_ms, state.positions, state.last_inputs = 0, 0, {}, {}
    try:
        return dump(state)
    finally:
        state.seq, state.now_ms, state.positions, state.last_inputs = kept
