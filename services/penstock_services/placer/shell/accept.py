"""Explicit acceptance of a changed log by an operator: a term of its own, whose first record says what was accepted."""

import os
import secrets
from collections.abc import Callable, Sequence
from typing import Any

from penstock.errors import ConfigurationError
from penstock.ledger.state import CellState
from penstock.log.port import Log, Partition
from penstock.model.event import Event
from penstock.model.ledger_events import InputAccepted
from penstock.model.topics import INPUT_TOPICS, Topic
from penstock.runtime.settings import Settings
from penstock.runtime.tracing.tracer import tracing
from penstock_services.placer.shell.ledger_trace import LedgerTrace
from penstock_services.placer.shell.service import Start, load_replica
from penstock_services.placer.shell.term import acquire


async def accept_input(
    settings: Settings, topic: Topic, offset: int, reason: str, log: Log, start: Start | None = None
) -> dict[str, Any]:
    """Goes on reading this input at `offset`. Raises `ConfigurationError` where it holds no such offset, `LogError`, `Fenced`."""
    if topic not in INPUT_TOPICS:
        raise ConfigurationError(f"TOPIC: {topic} is not an input; give one of {', '.join(INPUT_TOPICS)}")
    place = Partition(topic, settings.cell_index)
    first, end = (await log.begin_offsets([place]))[place], (await log.end_offsets([place]))[place]
    if not first <= offset <= end:
        raise ConfigurationError(
            f"--from: {topic} partition {place.index} holds offsets {first} to {end}, not {offset}"
        )

    def accepted(state: CellState) -> Sequence[Event]:
        position = state.positions.get(place, 0)
        return [
            InputAccepted(
                topic=topic, partition=place.index, position=position, offset=offset, end=end, reason=reason
            )
        ]

    return await _begin_term(settings, log, start or _start(), accepted)


def _start() -> Start:
    return Start(f"operator-{os.getpid()}-{secrets.token_hex(4)}", False, load_replica)


async def _begin_term(
    settings: Settings, log: Log, start: Start, accepted: Callable[[CellState], Sequence[Event]]
) -> dict[str, Any]:
    ledger = Partition(Topic.LEDGER, settings.cell_index)
    replica = await start.load(settings, log)
    reader = log.reader({ledger: replica.offset})
    async with tracing("placer", settings) as traces:
        try:
            await acquire(
                log, reader, replica, ledger, settings.cell, start.placer_id, LedgerTrace(traces), accepted
            )
        finally:
            await reader.close()
    return {"ok": True, "seq": replica.head.seq, "term": replica.head.term}
