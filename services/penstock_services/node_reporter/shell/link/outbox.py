"""Transactional outbox: sends the journal's events in order, each until the log has acknowledged it."""

import asyncio
import hashlib
import logging
from collections.abc import Callable

from msgspec.structs import replace

from penstock.backoff import retry
from penstock.clock import wall_ms
from penstock.errors import LogError
from penstock.log.port import Log
from penstock.model.decisions.adjustments import TaskAdjusted
from penstock.model.inputs.external_events import GpuFaulted
from penstock.model.schema.event import Event
from penstock.model.wire.envelope import MAX_ID_BYTES
from penstock_services.node_reporter.shell.journal import Journal, Outgoing

BATCH_EVENTS = 500
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 5.0

logger = logging.getLogger(__name__)


class Counter:
    """Numbers of the node's reports, in the order in which they are journaled. `latest`: by the journal.

    A new journal continues above the former one's numbers as long as the clock did not go back.
    """

    def __init__(self, latest: int) -> None:
        self.latest = max(latest, wall_ms())

    def count(self, event: Event) -> Event:
        """The event with its number, where its type has one."""
        if "said" not in event.__struct_fields__:
            return event
        self.latest += 1
        return replace(event, said=self.latest)


class Outbox:
    """One sender. A failed append may have succeeded in the log: the same events are sent again under the
    same ids."""

    def __init__(self, journal: Journal, log: Log, sent: Callable[[list[Outgoing]], None]) -> None:
        self._journal = journal
        self._log = log
        self._sent = sent
        self._wake = asyncio.Event()
        self._empty = asyncio.Event()

    def notify(self) -> None:
        """There is a new event in the journal."""
        self._empty.clear()
        self._wake.set()

    async def drained(self) -> None:
        """Returns once everything is acknowledged."""
        await self._empty.wait()

    async def run(self) -> None:
        """Works until cancelled. Raises `JournalFailed`."""
        while True:
            self._wake.clear()
            pending = self._journal.pending(BATCH_EVENTS)
            if not pending:
                self._empty.set()
                await self._wake.wait()
                continue
            await self._append(pending)
            self._sent(pending)
            self._journal.acknowledge(pending[-1].seq)

    async def _append(self, pending: list[Outgoing]) -> None:
        await retry(
            lambda: self._log.append([event.message for event in pending]),
            (LogError,),
            first_s=FIRST_PAUSE_S,
            longest_s=LONGEST_PAUSE_S,
            on_failure=lambda error, _: logger.warning(
                "%d events from %s on wait for the log: %s", len(pending), pending[0].id, error
            ),
        )


def event_id(node_id: str, *parts: object) -> str:
    """Derived from the cause, so that a repeat is recognisable; hashed when too long for an envelope."""
    text = "/".join(str(part) for part in (node_id, *parts))
    return text if len(text.encode()) <= MAX_ID_BYTES else hashlib.sha256(text.encode()).hexdigest()


def id_of_report(event: Event, name: str, node_id: str, boot_id: str = "") -> str:
    """Id of a report, the same whenever it is made anew; `name`: in place of its type's last word. `boot_id`:
    present boot of the node, for faults."""
    if isinstance(event, GpuFaulted):
        return event_id(node_id, "fault", boot_id, event.uuid, event.fault, wall_ms())
    about: tuple[object, ...] = getattr(event, "task_id", ""), getattr(event, "token", "")
    if isinstance(event, TaskAdjusted):  # one token may have changed both
        about = event.task_id, event.order_token, event.what
    return event_id(node_id, *about, name or event.TYPE.rpartition(".")[2])
