"""Publishes how long running jobs still take, beside the loop that estimates submissions: one job after the other, and
whoever waits for the event loop gets it in between."""

import asyncio

from penstock.clock import wall_ms
from penstock.log.port import Log, Message, Partition
from penstock.model.envelope import Envelope, to_wire
from penstock.model.external_events import EtaEstimated
from penstock_services.estimator.core.eta.updates import EtaUpdates
from penstock_services.estimator.core.state import State
from penstock_services.estimator.shell.sending import send

MAX_AT_ONCE = 64  # in one append


class EtaPublisher:
    """One cell's."""

    def __init__(self, state: State, log: Log, estimates: Partition, cell: bytes, source: str) -> None:
        self.updates = EtaUpdates(state)
        self._state = state
        self._log = log
        self._estimates = estimates
        self._cell = cell
        self._source = source
        self._wake = asyncio.Event()
        self.published = 0
        """Remaining times that were appended."""

    def caught_up(self) -> None:
        """The ledger that exists was folded: what of it was answered is not answered again."""
        still_open = set(self.updates.open())
        for job_id in list(self._state.stepped):
            if job_id not in still_open:
                del self._state.stepped[job_id]
        self.folded()

    def folded(self) -> None:
        """Records were folded; perhaps jobs reported their steps."""
        if self._state.stepped:
            self._wake.set()

    async def work(self) -> None:
        """For ever."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            messages: list[Message] = []
            while self._state.stepped:
                job_id = next(iter(self._state.stepped))
                cause = self._state.stepped.pop(job_id)
                if (found := self.updates.next(job_id)) is not None:
                    messages.append(self._message(found, cause))
                if len(messages) == MAX_AT_ONCE:
                    await self._send(messages)
                    messages = []
                await asyncio.sleep(0)
            if messages:
                await self._send(messages)

    def _message(self, found: EtaEstimated, cause: str) -> Message:
        """The id is of what it answers, so that a repeat is known as one."""
        envelope = Envelope(
            id=f"eta-{cause}",
            source=self._source,
            time_ms=wall_ms(),
            data=found,
            causation_id=cause,
            correlation_id=found.job_id,
        )
        headers, value = to_wire(envelope)
        return Message(self._estimates, value, headers, self._cell)

    async def _send(self, messages: list[Message]) -> None:
        await send(self._log, messages, "remaining times")
        self.published += len(messages)
