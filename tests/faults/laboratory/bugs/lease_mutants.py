"""Mutants of suspicion, probes and leases, in placer and node-reporter."""

# clocks: all of it runs in virtual time

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from penstock.ledger.state import lease as ledger_lease
from penstock.ledger.state.lease import lease_of, wait_ms
from penstock.ledger.state.node.node_state import NodeState
from penstock.ledger.state.state import CellState
from penstock.model.decisions.orders import ProbeNode
from penstock_services.node_reporter.shell.watchdogs import lease
from penstock_services.node_reporter.shell.watchdogs.lease import Lease
from penstock_services.placer.core import orders
from penstock_services.placer.core.decide import Decider
from tests.faults.laboratory.machines.machine import Machine
from tests.faults.laboratory.patching import filtered, mutant, nothing, replace

LONG_S = 1_000.0


def _lapsing(then: Callable[[], Awaitable[object]]) -> None:
    """Where a lease is over the reporter does this first, and the watchdog in the shim does nothing."""
    real = Lease.keep

    async def keep(self: Lease) -> None:
        try:
            await real(self)
        except lease.LeaseLapsed:
            await then()
            raise

    replace(real, keep)
    replace(Machine._watch_lease, lambda self, process, until_s: None)


@mutant("a node never ends a task whose lease is over", faults="silence")
def _() -> None:
    _lapsing(lambda: asyncio.Event().wait())


@mutant("a node ends a task long after its lease", faults="silence,crash", first=9)
def _() -> None:
    _lapsing(lambda: asyncio.sleep(LONG_S))


@mutant("a task's watchdog does not end it", faults="hang")
def _() -> None:
    replace(Machine._watch_lease, lambda self, process, until_s: None)


@mutant("a probe's time has no margin", faults="gone")
def _() -> None:
    replace(wait_ms, lambda lease_ms: lease_ms)


@mutant("a probe's time goes on over terms", faults="gone,crash")
def _() -> None:
    def proven_ms(node: NodeState, state: CellState) -> int | None:
        lease_ms, doubt = lease_of(node, state), node.suspicion
        if doubt is None or lease_ms is None or not doubt.sent_ms:
            return None
        return doubt.sent_ms + wait_ms(lease_ms)

    replace(ledger_lease.proven_ms, proven_ms)


@mutant("a probe is not repeated by a new term", faults="gone,rival,crash")
def _() -> None:
    filtered(orders.outstanding, lambda order: order.TYPE != ProbeNode.TYPE)


@mutant("a probe counts as answered by an earlier joining", faults="silence,crash", first=6)
def _() -> None:
    replace(lease.concerns, lambda state, order: False)


@mutant("what is suspect is not probed", faults="gone")
def _() -> None:
    nothing(Decider._suspected)


@mutant("a start needs no lease", faults="silence,late,overtake,sleeper")
def _() -> None:
    def admits(self: Lease, order: Any) -> bool:
        return True

    def until_s(self: Lease, order: Any) -> float:
        return (self._contact_s or 0.0) + 1e6

    replace(Lease.admits, admits)
    replace(Lease.until_s, until_s)
