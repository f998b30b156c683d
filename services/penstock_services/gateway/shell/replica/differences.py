"""Readers of the ledger whose state is not the placer's: the gateway reads of them in the dead letters
(`penstock.runtime.following.state_digests`)."""

import logging
from dataclasses import dataclass

from penstock.backoff import retry
from penstock.errors import LogError
from penstock.ledger.replica.digest import round_of
from penstock.log.port import Log, Partition, Record
from penstock.model.inputs.dead_letters import DeadLettered
from penstock.model.schema.errors import EventError
from penstock.model.schema.topics import Topic
from penstock.model.wire.envelope import from_wire
from penstock_services.gateway.shell.replica.follower import Follower

logger = logging.getLogger(__name__)

LETTERS = Partition(Topic.DEAD_LETTERS, 0)
LOOKED_BACK = 1_000  # letters that are read again at the start
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0  # while the log is away; nobody waits for these letters


@dataclass(slots=True)
class Differs:
    """A service's state differs from the placer's: at these records first and last, as far as is known."""

    first: int
    last: int


class Differences:
    """`services`: name of each whose state differs, until digests have covered the whole state without a
    letter."""

    def __init__(self, log: Log, cell_index: int, follower: Follower) -> None:
        self._log = log
        self._ledger = str(Topic.LEDGER), cell_index
        self._follower = follower
        self._services: dict[str, Differs] = {}

    async def follow(self) -> None:
        """Reads dead letters until cancelled."""
        await retry(
            self._read,
            (LogError,),
            first_s=FIRST_PAUSE_S,
            longest_s=LONGEST_PAUSE_S,
            on_failure=lambda error, _: logger.warning("dead letters cannot be read: %s", error),
        )

    async def _read(self) -> None:
        begin = (await self._log.begin_offsets([LETTERS]))[LETTERS]
        end = (await self._log.end_offsets([LETTERS]))[LETTERS]
        reader = self._log.reader({LETTERS: max(begin, end - LOOKED_BACK)})
        try:
            while True:
                for record in await reader.read():
                    self._take(record)
        finally:
            await reader.close()

    def _take(self, record: Record) -> None:
        try:
            letter = from_wire(record.headers, record.value, LETTERS.topic).data
        except EventError as error:
            logger.warning("dead letter %d cannot be read: %s", record.offset, error)
            return
        assert isinstance(letter, DeadLettered), "the topic has no other events"
        if letter.differs is not None and (letter.source_topic, letter.source_partition) == self._ledger:
            seq = letter.differs.seq
            known = self._services.get(letter.service)
            first = known.first if known is not None and self._stands(known) else seq
            self._services[letter.service] = Differs(first, seq)
            self._follower.wake()

    def _stands(self, found: Differs) -> bool:
        state = self._follower.state
        return state.seq <= found.last + round_of(state)

    def standing(self) -> dict[str, int]:
        """Service → the first record at which its state is known to differ; by name."""
        return {name: found.first for name, found in sorted(self._services.items()) if self._stands(found)}
