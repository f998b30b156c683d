"""Authenticity of inputs: a node's reports are signed with the key that it registered when it first joined.

Ideal: every input is signed. Departure: a node that has never named a key is trusted as before, and so is the
first joining under a name that no node has (trust on first use). Reports of operators and watches on nodes
come through the gateway, which shares a key with the placer (`PENSTOCK_OPERATOR_KEY`); jobs, estimates and
proposals are separated by topic. Who may say what about what is one table (`penstock.model.wire.speakers`).
Signatures are verified here, before the pure core, and a replay takes the verdict from the record.
"""

import logging

from penstock.ledger.state.state import CellState
from penstock.model.decisions.ledger_events import NodeJoinRefused
from penstock.model.inputs.external_events import NodeJoined
from penstock.model.schema.topics import Topic
from penstock.model.wire.envelope import Envelope, signed_bytes
from penstock.model.wire.speakers import Speaker, speaker_of
from penstock.runtime.keys.node_keys import OPERATOR_KEY, PlacerKeys, by_gateway
from penstock_services.placer.core.answer import Forgery, Input

logger = logging.getLogger(__name__)


class Identity:
    """Verifies the inputs of one cell."""

    def __init__(self, cell: str, keys: PlacerKeys, gateways: bytes | None) -> None:
        """`gateways`: the key that signs the gateway's records about nodes; None: the log is trusted to hold
        no others."""
        self._cell = cell
        self._keys = keys
        self._gateways = gateways

    def forged(self, state: CellState, read: Input, found: Envelope) -> Forgery | None:
        """The verdict on an input from another sender than it names; None for all others."""
        event = found.data
        speaker = speaker_of(event)
        if speaker is Speaker.NOBODY:
            return Forgery(f"no service sends {found.type}")
        if read.topic != Topic.NODES:
            return None
        if speaker is Speaker.OPERATOR:
            data = signed_bytes(self._cell, found.id, found.type, read.value)
            if self._gateways is None or by_gateway(self._gateways, read.headers, data):
                return None
            return Forgery(
                f"{found.type} is for operators and watches, and the gateway did not sign it; send the "
                f"command to the gateway, and give it the placer's {OPERATOR_KEY}"
            )
        node_id = _about(event)
        node = state.nodes.get(node_id)
        key = known = node.public_key if node is not None else None
        if known is None and not isinstance(event, NodeJoined):
            return None
        data = signed_bytes(self._cell, found.id, found.type, read.value)
        if isinstance(event, NodeJoined) and (known is None or (node is not None and node.replaceable)):
            key = event.public_key
        elif isinstance(event, NodeJoined) and event.public_key not in (None, known):
            logger.warning(
                "node %s joined with another key; if it is a new machine, fence the former", node_id
            )
            why = (
                f"node {node_id} has another key; if its machine was replaced or lost its key, make sure "
                f"that the former is dead and `penstock node fence {node_id}`"
            )
            proven = event.public_key and self._keys.proven(event.public_key, read.headers, data)
            return Forgery(why, (_refused(event),) if proven else ())
        if key is None:
            return None
        if not self._keys.proven(key, read.headers, data):
            return Forgery(f"not signed by node {node_id}, which signs what it sends")
        return None


def _refused(event: NodeJoined) -> NodeJoinRefused:
    """Answers the machine with this key that the node id is not its own."""
    return NodeJoinRefused(
        node_id=event.node.node_id,
        boot_id=event.node.boot_id,
        incarnation=event.incarnation,
        reason="other_machine",
        public_key=event.public_key,
    )


def _about(event: object) -> str:
    """The node of an event on the nodes' topic."""
    node = getattr(event, "node", None)
    return str(getattr(event, "node_id", "") if node is None else node.node_id)
