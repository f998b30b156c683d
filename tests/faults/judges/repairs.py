"""A ledger with a record that no reader can decode, and random amendments of it: helpful, useless, of another
record, unsigned.

Rule `repair`: what readers take is the first signed amendment that helps, whenever they are opened; until
then each stands before the record as it was; each amendment is tried once.
"""

import asyncio
from collections.abc import Sequence

import numpy as np

from penstock.ledger.record.amendment import propose
from penstock.ledger.record.record import Amended, Draft, Head, UndecodableRecord, write
from penstock.ledger.replica.replica import Replica
from penstock.ledger.replica.snapshot import dump
from penstock.log.port import Message, Partition
from penstock.model.decisions.ledger_events import CellFrozen, TermStarted, TimerSet, TimerSubject
from penstock.model.decisions.plans import PlanAdopted, PlanUnit
from penstock.model.inputs.amendments import AmendedFact, LedgerAmended
from penstock.model.inputs.external_events import GpuFaulted, JobSubmitted, NodeJoined
from penstock.model.nouns.settings import PlacerSettings
from penstock.model.nouns.types import MAX_MS
from penstock.model.schema.event import Event
from penstock.model.schema.topics import Topic
from penstock.model.wire.envelope import Envelope, signed_bytes, to_wire
from penstock.runtime.following.amended_log import AmendedLog, Repairs, Signer
from penstock.runtime.keys.node_keys import operators_code
from tests.faults.judges.cell_rules import Broken
from tests.support.cluster.driver import job_spec, node_spec
from tests.support.log.memory_log import MemoryBroker, MemoryLog
from tests.support.virtual_time import run_virtually

LEDGER, AMENDMENTS = Partition(Topic.LEDGER, 0), Partition(Topic.AMENDMENTS, 0)
GATEWAYS = b"g" * 32
MAX_TURNS = 5_000  # of the event loop; a sound run takes some hundred
ABOUT = TimerSubject(kind="ending", id="cell", attempt=0)
BROKEN_FACTS: Sequence[Event] = (
    TimerSet(timer_id="cell:ending", at_ms=MAX_MS + 1, about=ABOUT),
    TimerSet(timer_id="cell:ending", at_ms=-5, about=ABOUT),
    PlanAdopted(units=(PlanUnit(job_id="a", nodes=("n1",), expected_ms=MAX_MS + 7),)),
    CellFrozen(reason="x" * 5_000),
    GpuFaulted(node_id="n1", gpu=40, fault="xid"),
)


class Ledger:
    """Some sound records, one that cannot be decoded, and a sound one."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.broker = MemoryBroker()
        self.broker.create({str(Topic.LEDGER): 1, str(Topic.AMENDMENTS): 1})
        self.log = MemoryLog(self.broker)
        good = JobSubmitted(job_id="j1", spec=job_spec()), NodeJoined(node=node_spec("n1", 1))
        broken = BROKEN_FACTS[int(self.rng.integers(len(BROKEN_FACTS)))]
        first = TermStarted(term=1, placer_id="p1", settings=PlacerSettings())
        last = TimerSet(timer_id="cell:next", at_ms=5, about=ABOUT)
        records: list[Sequence[Event]] = [(first,), (*good, broken), (last,)]
        head, self.values = Head(0, "0" * 32, 0), list[bytes]()
        for number, facts in enumerate(records, 1):
            head, value = write(head, Draft(1, number, {"timer_id": "t"}, "committed", None, facts))
            self.values.append(value)
        self.broker.append("placer", [Message(LEDGER, value) for value in self.values])
        if any(fact.data is None for fact in propose(self.values[1], 1).facts):
            raise Broken("repair: a fact is left out that has a nearest legal form")
        self.helps: str | None = None
        """Reason of the first signed amendment that helps."""
        self.amended = 0

    def amend(self) -> None:
        """One more amendment, of any kind."""
        kind = str(self.rng.choice(["good", "good", "useless", "other record", "unsigned"]))
        found, self.amended = propose(self.values[1], 1), self.amended + 1
        reason = f"{kind} {self.amended}"
        facts = found.facts if kind != "useless" else (AmendedFact(n=0, data="{}"),)
        sha = found.sha256 if kind != "other record" else "0" * 64
        event = LedgerAmended(offset=1, seq=2, sha256=sha, facts=facts, by="ops", reason=reason, at_ms=1)
        envelope = Envelope(id=f"amend-{self.amended}", source="/penstock/gateway", time_ms=1, data=event)
        headers, value = to_wire(envelope)
        if kind != "unsigned":
            data = signed_bytes("default", envelope.id, envelope.type, value)
            headers = (*headers, operators_code(GATEWAYS, data))
        self.broker.append("gateway", [Message(AMENDMENTS, value, headers)])
        if kind == "good" and self.helps is None:
            self.helps = reason


async def _play(seed: int) -> None:
    ledger = Ledger(seed)
    signer = Signer("default", GATEWAYS)
    log = AmendedLog(ledger.log, signer)
    repairs = Repairs("reader", log, 0)
    tries = 0
    done = asyncio.Event()
    replica = Replica()

    async def work() -> None:
        nonlocal tries
        tries += 1
        reader, before = log.reader({LEDGER: replica.offset}), dump(replica.state)
        for record in await reader.read():
            try:
                replica.take(record.value, record.offset)
            except UndecodableRecord:
                if dump(replica.state) != before:
                    raise Broken("repair: a record that cannot be decoded was folded in part") from None
                raise
            before = dump(replica.state)
        done.set()

    async def service() -> None:
        while not done.is_set():
            await repairs.attempt(work)

    serving = asyncio.create_task(service())
    for _ in range(6):
        await asyncio.sleep(60)  # clock: virtual time passes
        if tries > ledger.amended + 1:
            raise Broken(f"repair: {tries} tries after {ledger.amended} amendments")
        if done.is_set() is not (ledger.helps is not None):
            raise Broken(f"repair: amended is {done.is_set()}, and helpful {ledger.helps}")
        await _read(ledger, log)
        ledger.amend()
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)


async def _read(ledger: Ledger, log: AmendedLog) -> None:
    """A reader that is opened now."""
    reader = log.reader({LEDGER: 0})
    records = await reader.read()
    await reader.close()
    value = records[1].value
    if isinstance(value, Amended) is not (ledger.helps is not None):
        raise Broken(f"repair: {value!r} is read, and helpful is {ledger.helps}")
    if isinstance(value, Amended) and f'"{ledger.helps}"'.encode() not in value.text:
        raise Broken(f"repair: not {ledger.helps} is read, but {value.text!r}")


def play(seed: int) -> None:
    """Raises `Broken`."""
    run_virtually(_play(seed), max_turns=MAX_TURNS)
