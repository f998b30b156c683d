"""Publisher of the estimator's events: envelopes for one partition, appended until the append succeeds."""

import logging
from collections.abc import Sequence

from penstock.backoff import retry
from penstock.clock import wall_ms
from penstock.errors import AppendFailed
from penstock.log.port import Log, Message, Partition
from penstock.model.schema.event import Event
from penstock.model.wire.envelope import Envelope, to_wire

LOG = logging.getLogger(__name__)

SOURCE = "/penstock/estimator"
FIRST_BACKOFF_S, LAST_BACKOFF_S = 0.05, 2.0  # between failed appends; a broker restarts in 3–5 s


class Publisher:
    """One cell's publisher. Ids derive from content or cause,
    so that a repeat is recognised as a duplicate."""

    def __init__(self, log: Log, partition: Partition, cell: str) -> None:
        self._log = log
        self._partition = partition
        self._key = cell.encode()

    def message(
        self,
        event_id: str,
        event: Event,
        cause: str | None = None,
        job_id: str | None = None,
        traceparent: str | None = None,
    ) -> Message:
        """`cause`: id of the event that is answered."""
        envelope = Envelope(
            id=event_id,
            source=SOURCE,
            time_ms=wall_ms(),
            data=event,
            traceparent=traceparent,
            causation_id=cause,
            correlation_id=job_id,
        )
        headers, value = to_wire(envelope)
        return Message(self._partition, value, headers, self._key)

    async def send(self, messages: Sequence[Message], what: str) -> None:
        """Retries until the append succeeds: repeating it is harmless, leaving it out is not. `what`:
        description of the messages for the log."""
        await retry(
            lambda: self._log.append(messages),
            (AppendFailed,),
            first_s=FIRST_BACKOFF_S,
            longest_s=LAST_BACKOFF_S,
            on_failure=lambda error, pause_s: LOG.warning(
                "%d %s not sent, trying again in %.2f s: %s", len(messages), what, pause_s, error
            ),
        )

    async def send_once(self, event_id: str, event: Event) -> None:
        """For events that need not arrive."""
        try:
            await self._log.append([self.message(event_id, event)])
        except AppendFailed as error:
            LOG.warning("%s could not be sent: %s", event_id, error)
