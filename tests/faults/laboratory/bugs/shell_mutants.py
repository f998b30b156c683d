"""Mutants of the shells of placer and estimator: orders, commits, clocks, repetition, changed topics."""

from contextlib import suppress
from typing import Any

from msgspec import structs

from penstock.clock import LedgerClock, wall_ms
from penstock.errors import LogError, OffsetTaken
from penstock.ledger.fold import evolve
from penstock.ledger.state.state import CellState
from penstock.model.decisions.ledger_events import LedgerAccepted
from penstock.model.decisions.orders import StartTask, StopTask
from penstock.model.inputs.external_events import NodeCordoned
from penstock.model.nouns.token import token_of
from penstock.model.schema.topics import Topic
from penstock.runtime.following.ledger_follower import LedgerFollower
from penstock_services.estimator.core.fold.state import State
from penstock_services.estimator.shell import publisher
from penstock_services.placer.core import orders
from penstock_services.placer.shell import identity, ledger_time, service
from penstock_services.placer.shell.history import check_ledger
from penstock_services.placer.shell.inputs import check_inputs
from tests.faults.laboratory.machines.log import Connection
from tests.faults.laboratory.patching import filtered, mutant, posing, replace

# -------------------------------------------------------------------------------------------------------
# readers


@mutant("readers forget that a node is taken out of use", faults="cordon")
def _() -> None:
    real = LedgerFollower._fact

    def fact(self: Any, record: Any, n: int, event: Any) -> None:
        if not isinstance(event, NodeCordoned):
            real(self, record, n, event)

    replace(real, fact)


# --------------------------------------------------------------------------------------------------------
# orders


@mutant("orders are not repeated by a new term", faults="crash,rival", first=2)
def _() -> None:
    filtered(orders.outstanding, lambda order: order.TYPE != StartTask.TYPE)


@mutant("stops are not repeated by a new term", faults="cancel,rival,zombie,append", log="kafka", first=7)
def _() -> None:
    filtered(orders.outstanding, lambda order: order.TYPE != StopTask.TYPE)


@mutant("orders run ahead of the records read back", faults="reboot,late,crash,rival", log="kafka", first=38)
def _() -> None:
    real = orders.outstanding
    replace(real, lambda state, node_ids, up_to: real(state, node_ids, 1 << 53))


@mutant("starts are ordered of tasks that have ended", faults="zombie,reboot", first=2)
def _() -> None:
    def start_orders(state: CellState, job_id: str, token: int) -> list[Any]:
        job = state.jobs.get(job_id)
        if job is None or job.token != token:
            return []
        peers = orders._peers(state, job)
        return [orders._start(state, job, task, peers) for task in job.tasks.values()]

    replace(orders.start_orders, start_orders)


@mutant("orders are sent before their record is read back")
def _() -> None:
    real = service.Term._record

    def write_and_order(self: Any, place: str, draft: Any, envelope: Any) -> Any:
        found = real(self, place, draft, envelope)
        pending = self._pending[-1]
        self._dispatcher.take(pending.head.seq, pending.now_ms, pending.facts, pending.explanation)
        if self._dispatcher._batch:
            self._dispatcher._batches.put_nowait(self._dispatcher._batch)
            self._dispatcher._batch = []
        return found

    replace(real, write_and_order)


@mutant("an input that cannot be read gets no dead letter", first=1)
def _() -> None:
    real = service.Term._answer
    replace(real, lambda self, found: real(self, found)[:1])


# -------------------------------------------------------------------------- record and orders in one commit
# (decision 19)


@mutant("a placer appends at the log's end", faults="duel,late,rival", log="embedded", first=477)
def _() -> None:
    """Not behind the last record that it has folded: another placer's term may lie between."""
    real = service.Term.serve

    async def serve(self: Any, reader: Any, ready: Any) -> None:
        end = (await self._log.end_offsets([self._ledger]))[self._ledger]
        with posing(reader, "position", lambda partition: end):
            await real(self, reader, ready)

    replace(real, serve)


@mutant("a placer appends wherever the log ends", log="embedded")
def _() -> None:
    real = Connection.append
    replace(real, lambda self, given: real(self, [structs.replace(message, at=None) for message in given]))


@mutant("orders are committed before their record", log="embedded")
def _() -> None:
    real = Connection.append

    async def append(self: Any, given: Any) -> Any:
        for sends_orders in (True, False):
            part = [m for m in given if (m.partition.topic == Topic.ORDERS) == sends_orders]
            found = await real(self, part)
        return found

    replace(real, append)


@mutant("orders are left out of their record's commit", log="embedded")
def _() -> None:
    real = service.Term._record
    replace(real, lambda self, *given: real(self, *given)[:1])


@mutant("a record that was refused counts as written", faults="duel,rival", log="embedded")
def _() -> None:
    real = service.Term._append

    async def append(self: Any) -> None:
        while True:
            with suppress(OffsetTaken):
                await real(self)

    replace(real, append)


# ------------------------------------------------------------------------------------------------------
# changed topics


@mutant(
    "a placer does not check that an input is the one that was answered", faults="inputs", jobs=8, nodes=3
)
def _() -> None:
    async def trusted(*given: object) -> None:
        """As if it always were."""

    replace(check_inputs, trusted)


@mutant("a placer does not check whether the ledger has lost records", faults="ledger", jobs=8, nodes=3)
def _() -> None:
    async def trusted(*given: object) -> None:
        """As if it never had."""

    replace(check_ledger, trusted)


@mutant("an accepted ledger gives out the same tokens again", faults="ledger", jobs=8, nodes=3)
def _() -> None:
    replace(token_of, lambda epoch, seq: seq)


@mutant("an accepted ledger is used before its nodes have joined", faults="ledger", jobs=8, nodes=3, first=2)
def _() -> None:
    replace(CellState.awaits_nodes, lambda self: False)


@mutant("joinings from before an acceptance count", faults="ledger", jobs=8, nodes=3, first=1)
def _() -> None:
    def accepted(state: CellState, fact: LedgerAccepted) -> None:
        state.epoch = fact.epoch

    replace(evolve._ledger_accepted, accepted)


@mutant("what a node ran of the lost records need not end", faults="ledger,late", jobs=8, nodes=3, first=5)
def _() -> None:
    real = CellState.awaits_nodes

    def awaits(self: CellState) -> bool:
        orphans = {node_id: node.orphan_tasks for node_id, node in self.nodes.items()}
        for node in self.nodes.values():
            node.orphan_tasks = {}
        try:
            return real(self)
        finally:
            for node_id, tasks in orphans.items():
                self.nodes[node_id].orphan_tasks = tasks

    replace(real, awaits)


# --------------------------------------------------------------------------------------- clocks, the
# estimator's shell


@mutant("the ledger's clock may go back")
def _() -> None:
    replace(LedgerClock.now_ms, lambda self, last_ms=0: wall_ms())


@mutant("a term begins by its machine's clock", faults="years,crash", jobs=8, nodes=3)
def _() -> None:
    def begin_time(state: CellState, before_ms: int | None, log_ms: int, ago_ms: int) -> LedgerClock:
        return LedgerClock(max(state.now_ms, wall_ms()))

    replace(ledger_time.begin_time, begin_time)


@mutant("the estimator forgets what it had not estimated", faults="steps", first=1)
def _() -> None:
    replace(State.unestimated, lambda self: [])


@mutant("the estimator gives up after one failure", faults="append", first=23)
def _() -> None:
    async def send(self: publisher.Publisher, messages: Any, what: str) -> None:
        with suppress(LogError):
            await self._log.append(messages)

    replace(publisher.Publisher.send, send)


@mutant("every writer of the nodes' topic speaks for a node", faults="garbage")
def _() -> None:
    replace(identity.Identity.forged, lambda *_: None)
