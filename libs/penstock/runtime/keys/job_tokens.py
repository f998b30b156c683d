"""Bearer tokens of running tasks for the gateway: the task's node signs one, the gateway checks it against
the ledger, nobody stores it (decision 143).

A token names a task and the order that started it, and the node that runs it. Its signature is the node's
own, of which the ledger has the public key since the node's joining. So it needs no secret that gateways
share, no order and no event carries it, and it is worth something only while the ledger has that task on
that node.
"""

import base64
from typing import NamedTuple

import msgspec

from penstock.model.nouns.types import Identifier
from penstock.runtime.keys.node_keys import NodeKeys, signed_by

PREFIX = "penstock-job."
"""Begins each token, so that the gateway tells it from a token of its file,
and a scanner of logs finds it."""
CONTEXT = b"penstock job token\0"
"""Before the signed bytes: no other signature of a node is one of a token."""


class Claim(NamedTuple):
    """What a token says."""

    node_id: Identifier
    job_id: Identifier
    task_id: Identifier
    token: int
    """Of the order that started the task (`penstock.model.nouns.token`)."""


class JobToken(NamedTuple):
    """A token that was read; its claim counts once `proven`."""

    claim: Claim
    data: bytes
    signature: bytes

    def proven(self, public_key: str) -> bool:
        """Whether the node with these public keys has signed it."""
        return signed_by(public_key, self.signature, CONTEXT + self.data)


def made(keys: NodeKeys, claim: Claim) -> str:
    """The token, signed by this node."""
    data = msgspec.json.encode(claim)
    return f"{PREFIX}{_text(data)}.{_text(base64.b64decode(keys.sign(CONTEXT + data)))}"


def parsed(text: str) -> JobToken | None:
    """The token in this text, whoever has signed it. None: it has another form."""
    data, _, signature = text.removeprefix(PREFIX).partition(".")
    try:
        raw = base64.urlsafe_b64decode(data + "==")
        proof = base64.b64encode(base64.urlsafe_b64decode(signature + "=="))
        return JobToken(msgspec.json.decode(raw, type=Claim), raw, proof)
    except (ValueError, msgspec.MsgspecError):
        return None


def _text(raw: bytes) -> str:
    """URL-safe base64 without padding."""
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()
