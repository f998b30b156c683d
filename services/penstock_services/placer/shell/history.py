"""Detection of a ledger that has lost records (truncated, restored from an older copy, an unclean leader),
before a term begins.

A reader of a valid record knows its id and its offset. The read models store both, and a placer carries them
from term to term: where that record is no longer at its offset, tokens would be given out twice. An operator
has to decide then, and goes on with `penstock-placer accept-ledger`: it raises the epoch, which is part of
every token.
"""

from collections.abc import Iterable

from penstock.errors import ConfigurationError
from penstock.ledger.record.record import GENESIS
from penstock.log.port import Log, Partition
from penstock.runtime.following.snapshots import Written, head_id_at


async def check_ledger(log: Log, ledger: Partition, epoch: int, seen: Iterable[Written | None]) -> None:
    """Raises `ConfigurationError` where the ledger, in this epoch,
    lacks a record that was read from it, `LogError`."""
    for one in seen:
        if one is None or one.head == GENESIS or one.epoch < epoch:
            continue  # lost before the ledger was accepted as it is
        found = await head_id_at(log, ledger, one.head_offset)
        if found != one.head.id:
            end = (await log.end_offsets([ledger]))[ledger]
            raise ConfigurationError(
                f"{ledger.topic} partition {ledger.index} has lost records: record {one.head.seq} "
                f"({one.head.id}) was read at its offset {one.head_offset}, where there is "
                f"{found or 'no record'} now; it ends at {end}. It was truncated or restored from an older "
                "copy, or PENSTOCK_DSN is the database of another log. Give the placer the ledger that it "
                "had, or each log its own database; or, if the records are gone, go on with "
                f"`penstock-placer accept-ledger --epoch {one.epoch + 1}`, then `penstock projections "
                "rebuild`, and restart estimator and node-reporters"
            )
