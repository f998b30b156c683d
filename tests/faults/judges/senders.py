"""Random senders: whoever can write a topic says anything about anything, and signs with whatever key they
have.

Rule `speaks`: an event counts only if it is from who may say so. The table is the judge's own.
"""

from typing import Any

import numpy as np
from msgspec import structs

from infra.codegen.examples import EXAMPLES
from penstock.ledger.replica.snapshot import dump, load
from penstock.model.inputs.external_events import (
    JobProgress,
    NodeChanged,
    NodeCordoned,
    NodeJoined,
    NodeLeft,
    NodeSuspected,
    NodeUncordoned,
    WorkProgressed,
)
from penstock.model.schema.event import Event, wire_type
from penstock.model.schema.topics import Topic
from penstock.model.wire.envelope import Envelope, Headers, signed_bytes, to_wire
from penstock.runtime.keys.node_keys import NodeKeys, PlacerKeys, operators_code
from penstock_services.placer.core.answer import Input, Moment, answer_input
from penstock_services.placer.core.step import PlacerCore
from penstock_services.placer.shell.identity import Identity
from tests.faults.judges.cell_rules import Broken
from tests.support.cluster.driver import CellDriver, node_spec

CELL = "default"
GATEWAYS = b"g" * 32
STEPS = 40
OPERATORS = (NodeCordoned, NodeUncordoned, NodeSuspected)
UNSAID = (WorkProgressed, NodeChanged)
OF_NODES = tuple(
    example
    for example in EXAMPLES.values()
    if example.TOPIC == Topic.NODES and not isinstance(example, NodeJoined | NodeChanged | WorkProgressed)
)


class Senders:
    """Three nodes with keys, one job on the first; a gateway, and somebody with a key of their own."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.cell = CellDriver()
        self.keys = {name: NodeKeys(self.rng.bytes(32)) for name in ("n1", "n2", "n3", "stranger")}
        self.placer = PlacerKeys(self.rng.bytes(32))
        for name in ("n1", "n2", "n3"):
            spec = structs.replace(node_spec(name, 1), machine_id=f"machine-{name}")
            self.cell.feed(NodeJoined(node=spec, incarnation=1, public_key=self.keys[name].public_key))
        for keys in self.keys.values():
            keys.meet((self.placer.header,))
        self.cell.submit("a")
        self.cell.start("a")
        self.job = self.cell.job("a")
        self.identity = Identity(CELL, self.placer, GATEWAYS)

    def play(self) -> None:
        """Raises `Broken`."""
        for _ in range(STEPS):
            event = self._event()
            signer = str(self.rng.choice([*self.keys, "gateway", ""]))
            copied = bool(self.rng.random() < 0.2)  # the proof of something else that the signer once said
            if self._counts(event, signer, copied=copied) and (copied or not self._may(event, signer)):
                raise Broken(f"speaks: {signer or 'nobody'} says {event}")

    def _event(self) -> Event:
        """About any node; of a task, about the one that lives."""
        node = str(self.rng.choice(["n1", "n2", "n3"]))
        kind = int(self.rng.integers(6))
        if kind == 0:
            proof: Any = str(self.rng.choice(["shutdown", "fenced", "deleted"]))
            return NodeLeft(node_id=node, boot_id="b1", proof=proof, incarnation=1)
        if kind == 1:
            return WorkProgressed(
                node_id=node, jobs=(JobProgress(job_id="a", attained_s=0.0, remaining_s=1e9),)
            )
        if kind == 2:
            spec = self.cell.state.nodes[node].spec
            return NodeChanged(node=structs.replace(spec, cores=1), incarnation=1)
        if kind == 3:
            spec = self.cell.state.nodes[node].spec
            machine = str(self.rng.choice([str(spec.machine_id), "another"]))
            key = self.keys[str(self.rng.choice([node, "stranger"]))].public_key
            spec = structs.replace(spec, machine_id=machine, boot_id="b2")
            return NodeJoined(node=spec, incarnation=2, public_key=key)
        event: Any = OF_NODES[int(self.rng.integers(len(OF_NODES)))]
        about: dict[str, Any] = {"node_id": node}
        if hasattr(event, "task_id"):
            about |= {"task_id": "a.1.w0", "token": self.job.token}
        found: Event = structs.replace(event, **about)
        return found

    def _may(self, event: Event, signer: str) -> bool:
        """The promise: operators speak through the gateway, a node of itself and of tasks that it runs."""
        if isinstance(event, UNSAID):
            return False
        if isinstance(event, OPERATORS) or event.TYPE == "penstock.node.probe_sent":
            return signer == "gateway"
        if isinstance(event, NodeLeft) and event.proof != "shutdown":
            return signer == "gateway"
        if isinstance(event, NodeJoined):
            node = event.node
            own = self.keys[node.node_id].public_key == event.public_key
            return signer == node.node_id and own and node.machine_id == f"machine-{node.node_id}"
        if hasattr(event, "task_id") and getattr(event, "node_id", "") != "n1":
            return False
        return signer == getattr(event, "node_id", "")

    def _counts(self, event: Event, signer: str, *, copied: bool) -> bool:
        """Whether a placer makes it a fact of a copy of this cell."""
        assert event.TOPIC is not None
        envelope = Envelope(f"e{int(self.rng.integers(1 << 40))}", f"/{signer}", 1, event)
        headers, value = to_wire(envelope)
        data = signed_bytes(CELL, envelope.id, wire_type(type(event)), value)
        proofs = self._proofs(signer, b"another" + data if copied else data)
        place = self.cell.state.positions.get((event.TOPIC, 0), 0)
        read = Input(event.TOPIC, 0, place, (*headers, *proofs), value)
        moment = Moment(self.cell.head.seq + 1, self.cell.head.term, self.cell.now_ms)
        core = PlacerCore(load(dump(self.cell.state)))
        answer = answer_input(core, moment, read, None, self.identity.forged)
        return any(type(fact) is type(event) for fact in answer.draft.facts)

    def _proofs(self, signer: str, data: bytes) -> Headers:
        if signer == "gateway":
            return (operators_code(GATEWAYS, data),)
        return self.keys[signer].proofs(data) if signer else ()


def play(seed: int) -> None:
    """Raises `Broken`."""
    Senders(seed).play()
