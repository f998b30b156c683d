"""A batcher on a live log: it sends proposals under its own identity, and reads in the ledger what becomes of
them."""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Self

from penstock.clock import wall_ms
from penstock.ledger.record.record import RawRecord, Unreadable, read
from penstock.log.open import open_log
from penstock.log.port import Message, Partition
from penstock.model.decisions.ledger_events import ProposalAnswered
from penstock.model.proposals import PlanProposed, ProposedJob, ProposedUnit
from penstock.model.schema.event import Event
from penstock.model.schema.topics import Topic
from penstock.model.wire.envelope import Envelope, to_wire
from tests.support.story import told

LEDGER, PROPOSALS = Partition(Topic.LEDGER, 0), Partition(Topic.PROPOSALS, 0)
STORY_RECORDS = 25
NAME = "batcher"


class Batcher:
    """A context manager. `url`: of the log, with its identity."""

    def __init__(self, url: str) -> None:
        self._log = open_log(url, NAME)
        self._sent = 0
        self.records: list[RawRecord] = []
        """Of the ledger, since it began."""
        self._told = ExitStack()

    async def __aenter__(self) -> Self:
        await self._log.start()
        self._reader = self._log.reader(await self._log.end_offsets([LEDGER]))
        self._told.enter_context(told("the ledger, as the batcher has read it", self._story))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._told.close()
        await self._reader.close()
        await self._log.close()

    def _story(self) -> str:
        return "\n".join(map(str, self.records[-STORY_RECORDS:]))

    async def send(
        self, name: str, *units: Sequence[tuple[str, ...]], why: str = "shares no link", **more: Any
    ) -> RawRecord:
        """Proposes these units, each of jobs with their nodes; returns the record of the answer, whatever
        that is."""
        proposed = tuple(
            ProposedUnit(
                jobs=tuple(ProposedJob(job_id=job, nodes=tuple(nodes)) for job, *nodes in unit),
                explanation=why,
            )
            for unit in units
        )
        plan = PlanProposed(proposal_id=name, proposer=NAME, units=proposed, **more)
        self._sent += 1
        envelope = Envelope(id=f"sent-{self._sent}", source="batcher", time_ms=wall_ms(), data=plan)
        headers, value = to_wire(envelope)
        [offset] = await self._log.append([Message(PROPOSALS, value, headers)])
        cause = (PROPOSALS.topic, offset)
        return await self.until(lambda record: (record.cause.topic, record.cause.offset) == cause)

    async def until(self, matches: Any) -> RawRecord:
        """The first record that matches, of those that were read and those that come."""
        found = [record for record in self.records if matches(record)]
        while not found:
            for record in await self._reader.read():
                try:
                    self.records.append(read(record.value))
                except Unreadable:
                    continue
            found = [record for record in self.records if matches(record)]
        return found[0]


def facts(record: RawRecord, kind: type[Event]) -> list[Any]:
    """Of this kind."""
    return [fact for raw in record.facts if isinstance(fact := raw.event(), kind)]


def answered(record: RawRecord) -> ProposalAnswered:
    """The answer that it holds."""
    [found] = facts(record, ProposalAnswered)
    assert isinstance(found, ProposalAnswered)
    return found
