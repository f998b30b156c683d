"""Standby without heartbeats: a placer takes over only when an input or a timer stays unanswered.

The active placer answers every input with a record, and every due timer. So silence without a pending input
proves nothing, and an input without its record for `TAKEOVER_MS` counts as its failure, once the ledger has
been read to its end: a standby that was itself too slow to read gets the answers late. A wrong takeover is
safe: the chain rule voids the loser's records (LAW 3).
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import NamedTuple

from pydantic import Field

from penstock.clock import LedgerClock
from penstock.ledger.replica.replica import Replica
from penstock.log.port import Log, Partition
from penstock.model.schema.topics import Topic
from penstock.runtime.following.snapshots import Written
from penstock.runtime.following.state_digests import compare
from penstock.runtime.settings import EnvironmentSettings
from penstock_services.placer.shell.history import check_ledger
from penstock_services.placer.shell.inputs import check_inputs, input_positions
from penstock_services.placer.shell.ledger_trace import LedgerTrace
from penstock_services.placer.shell.term import check_followed, read_known

logger = logging.getLogger(__name__)


class StandbySettings(EnvironmentSettings):
    """`PENSTOCK_STANDBY`: whether a placer begins standing by. `PENSTOCK_TAKEOVER_MS`: its patience."""

    standby: bool = Field(False, title="give 1 or 0")
    takeover_ms: int = Field(2_000, ge=0, title="give milliseconds, such as 2000")


TAKEOVER_MS = StandbySettings.from_env().takeover_ms


class Unanswered(NamedTuple):
    """Inputs of one partition without a ledger record."""

    oldest: int
    newest: int
    since_s: float
    """When the oldest was read, or the one before it was answered; the event loop's clock."""


async def stand_by(
    log: Log,
    replica: Replica,
    cell_index: int,
    ledger_trace: LedgerTrace,
    seen: Sequence[Written | None] = (),
) -> None:
    """Follows the ledger until an input or a timer has waited for `TAKEOVER_MS`; `replica` is then up to
    date.

    Raises `ConfigurationError` where the ledger lacks records that were `seen` in it, or an input is not the
    one that it has answered.
    """
    ledger = Partition(Topic.LEDGER, cell_index)
    reader = log.reader({ledger: replica.offset})
    try:
        end = (await log.end_offsets([ledger]))[ledger]
        while reader.position(ledger) < end:
            for record in await read_known(log, reader, ledger, end):
                ledger_trace.fold(replica, record, end)
    finally:
        await reader.close()
    logger.info("standing by at seq %d", replica.head.seq)
    await check_ledger(log, ledger, replica.state.epoch, seen)
    await check_inputs(log, replica.state, cell_index)
    positions = replica.state.positions
    reader = log.reader({**input_positions(replica.state, cell_index), ledger: replica.offset})
    loop = asyncio.get_running_loop()
    clock = LedgerClock(replica.state.now_ms)
    waiting: dict[Partition, Unanswered] = {}
    last_record_s = loop.time()
    known = replica.offset  # the ledger's end when it was last read
    try:
        while True:
            if reader.position(ledger) < known:
                records = await read_known(log, reader, ledger, known)
            else:
                patience_ms = _patience_ms(replica, clock, waiting, loop.time(), last_record_s)
                records = await reader.read(timeout_ms=patience_ms)
            for record in records:
                if record.partition == ledger:
                    if (taken := ledger_trace.fold(replica, record, end)) is not None:
                        last_record_s = loop.time()
                        await compare(log, "placer", replica.state, taken, record)
                else:
                    oldest = waiting.get(
                        record.partition, Unanswered(record.offset, record.offset, loop.time())
                    )
                    waiting[record.partition] = oldest._replace(newest=record.offset)
            for place, unanswered in list(waiting.items()):
                answered = positions.get((place.topic, place.index), 0)
                if answered > unanswered.newest:
                    del waiting[place]
                elif answered > unanswered.oldest:
                    waiting[place] = Unanswered(answered, unanswered.newest, loop.time())
            if reader.position(ledger) >= known and 0 == _patience_ms(
                replica, clock, waiting, loop.time(), last_record_s
            ):
                known = (await log.end_offsets([ledger]))[ledger]
                if reader.position(ledger) >= known:  # else it was this process that was slow
                    await check_followed(log, ledger, replica)
                    logger.info("taking over: no placer answered for %d ms", TAKEOVER_MS)
                    return
    finally:
        await reader.close()


def _patience_ms(
    replica: Replica,
    clock: LedgerClock,
    waiting: dict[Partition, Unanswered],
    now_s: float,
    last_record_s: float,
) -> int | None:
    """How long the active placer may still be silent; None: nothing is waiting.

    `last_record_s`: when the last valid record came. Its writer was alive then: a timer that was due long
    before that record gets its time anew, else two placers could replace each other for ever.
    """
    left = [TAKEOVER_MS - (now_s - unanswered.since_s) * 1_000 for unanswered in waiting.values()]
    timer = replica.state.next_timer()
    if timer is not None:
        due_ms = timer[0] - clock.now_ms(replica.state.now_ms)
        left.append(max(due_ms, (last_record_s - now_s) * 1_000) + TAKEOVER_MS)
    return max(0, int(min(left))) if left else None
