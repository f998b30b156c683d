"""Node n1 of a cell, which signs with its key, and what others may say in its name, to the core and on a real
log."""

import asyncio
import itertools
from collections.abc import Callable, Mapping
from typing import Any

from msgspec.structs import replace

from penstock.ledger.replica.replica import Replica
from penstock.ledger.replica.snapshot import dump
from penstock.ledger.state.state import CellState
from penstock.log.port import Log, Message, Partition, Record
from penstock.model.inputs.dead_letters import DeadLettered
from penstock.model.inputs.estimates import JobEstimated
from penstock.model.inputs.external_events import (
    CheckpointFetched,
    GpuFaulted,
    JobSubmitted,
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
from penstock.model.inputs.saves import SaveRefused
from penstock.model.schema.event import Event
from penstock.model.schema.topics import Topic
from penstock.model.wire.envelope import SIGNATURE, Envelope, Headers, from_wire, signed_bytes, to_wire
from penstock.runtime.keys.node_keys import NodeKeys, operators_code
from penstock.runtime.settings import Settings
from penstock_services.placer.shell.service import run as run_placer
from tests.support.cluster.driver import estimate, job_spec, node_spec
from tests.support.installation.services import while_alive
from tests.support.waiting import await_until

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


def joined(node: str, key: NodeKeys | None, incarnation: int = 1, **more: Any) -> NodeJoined:
    public_key = None if key is None else key.public_key
    return NodeJoined(node=node_spec(node), incarnation=incarnation, public_key=public_key, **more)


def exited(token: int) -> TaskExited:
    return TaskExited(
        node_id="n1", task_id=WORKER, token=token, cause="exited", exit_code=0, started_ms=1, exited_ms=2
    )


FORGERIES: dict[str, Callable[[int], Event]] = {
    "exit": exited,
    "start": lambda token: TaskStarted(node_id="n1", task_id=WORKER, token=token, pid=1, started_ms=1),
    "fetched": lambda token: CheckpointFetched(
        node_id="n1", task_id=WORKER, token=token, at_ms=1, from_node="n2"
    ),
    "no saver": lambda token: SaveRefused(
        node_id="n1", task_id=WORKER, token=token, at_ms=1, reason="so they say"
    ),
    "checkpoint": lambda token: TaskCheckpointed(node_id="n1", task_id=WORKER, token=token, at_ms=1),
    "phase": lambda token: TaskPhaseChanged(node_id="n1", task_id=WORKER, token=token, phase="save", at_ms=1),
    "refusal": lambda token: OrderRefused(
        node_id="n1", task_id=WORKER, token=token, reason="occupied", highest_token=token
    ),
    "fault": lambda _: GpuFaulted(node_id="n1", gpu=0, uuid="GPU-n1-0", fault="ecc"),
    "joining": lambda _: joined("n1", KEY, 2),
    "reboot": lambda _: NodeJoined(node=node_spec("n1", boot="b2"), incarnation=9, public_key=KEY.public_key),
    "leaving": lambda _: NodeLeft(node_id="n1", boot_id="b1", proof="shutdown", incarnation=1),
}
"""What another writer may report in n1's name, by the token of its task."""

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
    """The state, but for the place up to which inputs were answered, and for the joinings whose nodes are to
    hear that they do not count."""
    passing: dict[str, Any] = {"seq": 0, "now_ms": 0, "positions": {}, "last_inputs": {}, "refused_joins": {}}
    saved = {name: getattr(state, name) for name in passing}
    try:
        for name, value in passing.items():
            setattr(state, name, value)
        return dump(state)
    finally:
        for name, value in saved.items():
            setattr(state, name, value)


def forged_records(started: Message, token: int) -> list[Message]:
    """What a thief of the right to write to the nodes' topic sends, n1 being the victim."""
    numbers = itertools.count()

    def forge(event: Event, key: NodeKeys | bytes | None, **more: str) -> Message:
        envelope = Envelope(id=f"forged-{next(numbers)}", source="/mallory", time_ms=1, data=event)
        headers, value = to_wire(envelope)
        return Message(
            started.partition, value, (*headers, *(proofs(key, envelope, value, **more) if key else ()))
        )

    def with_header(message: Message, name: str, raw: bytes) -> Message:
        return replace(message, headers=tuple((n, raw if n == name else old) for n, old in message.headers))

    whole = forge(exited(token), KEY)
    damages = (b"", b"!", b"\xff" * 64, dict(whole.headers)[SIGNATURE][:-4])
    return [
        *(forge(event(token), key) for event in FORGERIES.values() for key in (None, OTHER)),
        *(forge(act, key) for act in ACTS for key in (None, KEY, b"another key of thirty-two bytes!")),
        forge(exited(token), KEY, cell="another-cell"),
        *(with_header(whole, SIGNATURE, damage) for damage in damages),
        replace(whole, value=whole.value.replace(b'"exit_code":0', b'"exit_code":1')),
        with_header(started, "ce_id", b"again"),
    ]


WRITERS = {Topic.JOBS: "gateway", Topic.ESTIMATES: "estimator", Topic.NODES: "node-reporter"}
"""Topic → the identity that writes it here; the gateway reads."""


class Victims:
    """A real placer of one cell on a real log, node n1, its job j, and the thief of the right to write to the
    nodes' topic."""

    def __init__(self, settings: Settings, logs: Mapping[Topic, Log], placer: "asyncio.Task[None]") -> None:
        self.logs, self.reader, self.placer = logs, logs[Topic.JOBS], placer
        self.ledger, self.nodes = (
            Partition(topic, settings.cell_index) for topic in (Topic.LEDGER, Topic.NODES)
        )

    def signed(self, event: Event) -> Message:
        envelope = Envelope(id=f"honest-{event.TYPE}", source="/n1", time_ms=1, data=event)
        headers, value = to_wire(envelope)
        given = proofs(KEY, envelope, value) if event.TOPIC == Topic.NODES else ()
        return Message(Partition(event.TOPIC or "", self.nodes.index), value, (*headers, *given))

    async def send(self, *messages: Message) -> None:
        await self.logs[Topic(messages[0].partition.topic)].append(messages)

    async def state_when(self, holds: Callable[[CellState], bool]) -> CellState:
        """The cell's state once this is so. Raises what ended the placer, which is then waited for in
        vain."""
        reader, replica = self.reader.reader({self.ledger: 0}), Replica()
        while not holds(replica.state):
            for record in await while_alive(reader.read(), self.placer):
                replica.take(record.value, record.offset)
        await reader.close()
        return replica.state

    async def letters(self) -> list[DeadLettered]:
        """Of the nodes' topic of this cell."""
        found = [
            from_wire(record.headers, record.value).data
            for record in await everything(self.reader, Partition(Topic.DEAD_LETTERS, 0))
            if dict(record.headers).get("ce_type")
        ]
        places = [letter for letter in found if isinstance(letter, DeadLettered)]
        return [letter for letter in places if (letter.source_topic, letter.source_partition) == self.nodes]


async def forged_records_change_nothing(settings: Settings, logs: Mapping[Topic, Log]) -> None:
    """46 forgeries in n1's name and in operators' and one of its own records sent again: each refused with a
    reason, the state byte-equal.

    `logs`: one started log for each of `WRITERS`; the topics exist, and the cell's are empty.
    """
    stop = asyncio.Event()
    placer = asyncio.create_task(run_placer(settings, stop))
    cell = Victims(settings, logs, placer)
    try:
        await cell.send(cell.signed(joined("n1", KEY)))
        await cell.state_when(lambda state: "n1" in state.nodes)
        await cell.send(cell.signed(JobSubmitted(job_id="j", spec=job_spec())))
        await cell.send(cell.signed(JobEstimated(job_id="j", estimate=estimate(4))))
        placed = await cell.state_when(lambda state: "j" in state.jobs and bool(state.jobs["j"].tasks))
        token = placed.jobs["j"].token
        started = cell.signed(TaskStarted(node_id="n1", task_id=WORKER, token=token, pid=1, started_ms=1))
        await cell.send(started)
        running = await cell.state_when(
            lambda state: (
                "j" in state.jobs
                and WORKER in state.jobs["j"].tasks
                and state.jobs["j"].tasks[WORKER].status == "running"
            )
        )
        before = unmoved(running)
        forged = forged_records(started, token)
        await cell.send(*forged)
        letters: list[DeadLettered] = []

        async def of_all() -> bool:
            nonlocal letters
            letters = await while_alive(cell.letters(), placer)
            return len(letters) >= len(forged)

        all_refused: bool = await await_until(of_all, lambda: f"{len(forged)} dead letters of {letters}")
        assert all_refused
        others = [letter.detail for letter in letters if letter.reason != "forged"]
        assert others == ["undecodable: header 'signature' is not UTF-8"]
        reasons = [letter.detail for letter in letters if letter.reason == "forged"]
        assert len(reasons) == len(forged) - 1 == 49
        assert all("n1" in reason or "PENSTOCK_OPERATOR_KEY" in reason for reason in reasons)
        await cell.send(started)
        end = (await cell.reader.end_offsets([cell.nodes]))[cell.nodes]
        after = await cell.state_when(lambda state: state.inputs_read(Topic.NODES) >= end)
        assert unmoved(after) == before
        await cell.send(cell.signed(exited(token)))
        assert (await cell.state_when(lambda state: "j" in state.ended)).ended["j"] == "succeeded"
    finally:
        stop.set()
        await placer


async def everything(log: Log, place: Partition) -> list[Record]:
    """Of one partition."""
    end = (await log.end_offsets([place]))[place]
    records: list[Record] = []
    reader = log.reader({place: 0})
    while len(records) < end:
        records += await reader.read()
    await reader.close()
    return records
