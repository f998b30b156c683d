"""Writer of a service's proposals to its cell's partition of the proposals topic, each in the context of its
own `plan` span."""

from penstock.clock import wall_ms
from penstock.log.port import Log, Message, Partition
from penstock.model.proposals import Proposal
from penstock.model.schema.topics import Topic
from penstock.model.wire.envelope import Envelope, to_wire
from penstock.runtime.settings import Settings
from penstock.runtime.tracing.tracer import Tracing


class ProposalWriter:
    """Writer of one service, which is the `source` of the events."""

    def __init__(self, settings: Settings, log: Log, traces: Tracing, source: str) -> None:
        self._log, self._traces, self._source = log, traces, source
        self._partition = Partition(Topic.PROPOSALS, settings.cell_index)
        self._key = settings.cell.encode()

    async def write(self, proposal: Proposal) -> None:
        """Writes a proposal; its id is the event's id,
        so a copy gets the first one's answer. Raises `LogError`."""
        envelope = Envelope(
            id=proposal.proposal_id,
            source=self._source,
            time_ms=wall_ms(),
            data=proposal,
            traceparent=self._traces.plan_context(proposal.proposer, proposal.proposal_id),
        )
        headers, value = to_wire(envelope)
        await self._log.append([Message(self._partition, value, headers, self._key)])
