"""Mutants of the node-reporter."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import msgspec

from penstock.clock import wall_ms
from penstock.errors import LogError
from penstock_services.node_reporter.core import gpu_shares, machine, stops
from penstock_services.node_reporter.core.actions import Signal
from penstock_services.node_reporter.core.inputs import Gone
from penstock_services.node_reporter.core.state import Put
from penstock_services.node_reporter.shell import recovery
from penstock_services.node_reporter.shell.journal import Journal
from penstock_services.node_reporter.shell.link.outbox import Outbox
from penstock_services.node_reporter.shell.node import Node
from penstock_services.node_reporter.shell.process.exits import lost_outcome
from tests.faults.laboratory.patching import cut_before, filtered, mutant, nothing, posing, replace

# ------------------------------------------------------------------------------------------------- the node's
# core


@mutant("a node compares no tokens", faults="overtake", log="kafka")
def _() -> None:
    replace(machine._highest, lambda state, order, known: 0)


@mutant("a node takes an index for a GPU's name", faults="cards")
def _() -> None:
    real = machine._start

    def start(state: Any, order: Any, context: Any) -> Iterator[Any]:
        wrong = tuple(state.gpus[slot % len(state.gpus)] for slot in order.place.gpus)
        yield from real(state, msgspec.structs.replace(order, gpu_uuids=wrong), context)

    replace(real, start)


@mutant("a node obeys orders of before it joined", first=69)
def _() -> None:
    real = machine._start

    def start(state: Any, order: Any, context: Any) -> Iterator[Any]:
        with posing(state, "incarnation", 0):
            yield from real(state, order, context)

    replace(real, start)


@mutant("the second task of a gang on a node does not get its peers", first=1)
def _() -> None:
    real = machine._peers
    replace(real, lambda state, order: real(state, order) if order.packed_peers is not None else ())


@mutant("a node waits for no predecessor", faults="false_report,late", first=1)
def _() -> None:
    replace(gpu_shares.fits, lambda others, task: True)


@mutant("a task that waits for its predecessor is never started", faults="false_report")
def _() -> None:
    cut_before(machine._gone, lambda decision: isinstance(decision, Put) and decision.task.order is not None)


@mutant("a stop that overtook its start is forgotten", faults="overtake", log="kafka")
def _() -> None:
    filtered(stops._never_start, lambda decision: not isinstance(decision, Put))


@mutant("a stop of a starting task is forgotten", faults="slow_start")
def _() -> None:
    cut_before(machine._spawned, lambda decision: isinstance(decision, Signal))


@mutant("nobody is killed when the grace is over", faults="cancel", first=5)
def _() -> None:
    nothing(stops.grace_over)


# ------------------------------------------------------------------------------------------------ the node's
# shell


@mutant("the outbox gives up after one failure", faults="append", first=11)
def _() -> None:
    async def append(self: Any, pending: Any) -> None:
        with suppress(LogError):
            await self._log.append([event.message for event in pending])

    replace(Outbox._append, append)


@mutant("a restarted reporter does not watch what lives")
def _() -> None:
    replace(recovery._recover_task, lambda node, task: {100 + 2 * n for n in range(10_000)})


@mutant("a task is begun whose GPU is gone", faults="cards,slow_start,steps", first=5)
def _() -> None:
    replace(recovery._give_up_if_impossible, lambda node, task: False)


@mutant("a restarted reporter does not go on stopping", faults="cancel,steps,upgrade", first=2)
def _() -> None:
    replace(recovery._resume, lambda node, task: None)


@mutant("a killed guardian's task is not ended", first=29)
def _() -> None:
    async def sweep(self: Node, key: Any) -> None:
        self._later(Gone(key[0], key[1], lost_outcome(0, wall_ms())))

    replace(Node._sweep, sweep)


@mutant("what the journal writes does not survive a power loss")
def _() -> None:
    real = Journal.write

    def write(self: Journal, changes: Any, events: Any, numbers: Any, *, durable: bool) -> None:
        del durable
        real(self, changes, events, numbers, durable=False)

    replace(real, write)


@mutant("the end of the grace is forgotten", faults="cancel", first=5)
def _() -> None:
    replace(Node._kill_at, lambda self, key, at_ms: None)
