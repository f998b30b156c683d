"""Readers of the ledger compare the digest of their state with the one that the placer states
(`penstock.ledger.replica.digest`).

A reader that has another one says so in a dead letter about that record: each service may write these, and
the gateway raises an alarm. The reader goes on: whose state is the wrong one, an operator decides.
"""

import logging

from penstock.ledger.record.record import RawRecord
from penstock.ledger.replica.digest import difference
from penstock.ledger.state.state import CellState
from penstock.log.dead_letters import dead_letter
from penstock.log.port import Log, Record
from penstock.model.inputs.differences import StateDiffers

logger = logging.getLogger(__name__)


async def compare(log: Log, service: str, state: CellState, taken: RawRecord, record: Record) -> None:
    """After the record was folded: `state` is that behind it. Nothing, where the record states no digest of
    this format. Raises `LogError`."""
    own = difference(state, taken)
    if own:
        detail = f"record {taken.seq} states {taken.digest}, and the state of the {service} is {own}"
        logger.error(detail)
        await log.append(
            [dead_letter(record, service, "failed", detail, StateDiffers(seq=taken.seq, own=own))]
        )
