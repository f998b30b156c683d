"""Deciders that know nothing of before: they start from snapshots of a run, and have to decide the same."""

from collections.abc import Sequence
from typing import NamedTuple

from penstock.ledger.record.record import Head
from penstock.ledger.replica.replica import Replica
from penstock.ledger.replica.snapshot import load
from penstock_services.placer.shell.replay import Replayer
from tests.faults.laboratory.machines.log import Broker, Connection
from tests.faults.rules.findings import Violation

SNAPSHOTS, RECORDS = 3, 25  # from which a fresh decider decides again, and so many records after each


class Snapshot(NamedTuple):
    """A state as it was written down, and where in the ledger that was."""

    state: bytes
    head: Head
    offset: int


async def decide_afresh(broker: Broker, snapshots: Sequence[Snapshot]) -> None:
    """Raises `Violation` for a record that is decided otherwise."""
    for found in snapshots[:: max(1, len(snapshots) // SNAPSHOTS)]:
        start = Replica(load(found.state), found.head, found.offset)
        report = await Replayer(Connection(broker), 0, start).run(found.head.seq + RECORDS)
        if report.different:
            raise Violation("fresh", f"{report.different} records differ: {report.differences[:2]}")
