"""Explicit acceptance of a changed log by an operator: a term of its own, whose first record names the
accepted changes."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from penstock.errors import ConfigurationError
from penstock.ledger.state.state import CellState
from penstock.log.port import Log, Partition
from penstock.model.decisions.ledger_events import CellFrozen, InputAccepted, LedgerAccepted
from penstock.model.nouns.token import MAX_EPOCH
from penstock.model.schema.event import Event
from penstock.model.schema.topics import INPUT_TOPICS, Topic
from penstock.runtime.following.snapshots import Written, head_id_at
from penstock.runtime.settings import Settings
from penstock.runtime.tracing.tracer import tracing
from penstock_services.placer.shell.inputs import need_another
from penstock_services.placer.shell.ledger_trace import LedgerTrace
from penstock_services.placer.shell.service import Start, start_of_process
from penstock_services.placer.shell.term import acquire

FROZEN = (
    "the ledger has lost records: each node must join anew (restart its node-reporter), and what it ran of "
    "them end"
)


async def accept_input(
    settings: Settings, topic: Topic, offset: int, reason: str, log: Log, start: Start | None = None
) -> dict[str, Any]:
    """Goes on reading this input at `offset`.

    Raises `ConfigurationError` where it holds no such offset, the topic is the one that was answered, or the
    ledger has lost records; `LogError`, `Fenced`.
    """
    if topic not in INPUT_TOPICS:
        raise ConfigurationError(f"TOPIC: {topic} is not an input; give one of {', '.join(INPUT_TOPICS)}")
    place = Partition(topic, settings.cell_index)
    first, end = (await log.begin_offsets([place]))[place], (await log.end_offsets([place]))[place]
    if not first <= offset <= end:
        raise ConfigurationError(
            f"--from: {topic} partition {place.index} holds offsets {first} to {end}, not {offset}"
        )

    async def accepted(state: CellState, _: Written | None) -> Sequence[Event]:
        await need_another(log, state, place)
        position = state.positions.get(place, 0)
        return [
            InputAccepted(
                topic=topic, partition=place.index, position=position, offset=offset, end=end, reason=reason
            )
        ]

    return await _begin_term(settings, log, start or _start(), accepted, whole=True)


async def accept_ledger(
    settings: Settings, epoch: int | None, reason: str, log: Log, start: Start | None = None
) -> dict[str, Any]:
    """Goes on with a ledger that has lost records, in a new epoch (default: one above the highest that is
    known here).

    The cell stays frozen until no node can run lost tasks. Raises `ConfigurationError` where the epoch is not
    above the highest known or too high, or without one where the ledger has all records that the read models
    have of it; `LogError`, `Fenced`.
    """
    ledger = Partition(Topic.LEDGER, settings.cell_index)
    nodes = Partition(Topic.NODES, settings.cell_index)
    nodes_offset = (await log.end_offsets([nodes]))[nodes]

    async def accepted(state: CellState, written: Written | None) -> Sequence[Event]:
        known = max(state.epoch, written.epoch if written is not None else 0)
        if epoch is None and written is not None and written.epoch == state.epoch:
            await _need_loss(log, ledger, written)
        chosen = known + 1 if epoch is None else epoch
        if not known < chosen <= MAX_EPOCH:
            raise ConfigurationError(f"--epoch: give one above {known}, up to {MAX_EPOCH}, not {chosen}")
        return [
            LedgerAccepted(epoch=chosen, nodes_offset=nodes_offset, reason=reason),
            CellFrozen(reason=FROZEN),
        ]

    return await _begin_term(settings, log, start or _start(), accepted, whole=False)


async def _need_loss(log: Log, ledger: Partition, written: Written) -> None:
    """Raises `ConfigurationError` where the ledger has the last record that the read models hold."""
    if await head_id_at(log, ledger, written.head_offset) == written.head.id:
        raise ConfigurationError(
            f"{ledger.topic} partition {ledger.index} has record {written.head.seq} ({written.head.id}), "
            "the last one that the read models hold: it is not known to have lost any, and nothing was "
            f"changed. Where ledger and Postgres were both restored give --epoch, {written.epoch + 1} or "
            "more: above all that were used"
        )


async def _begin_term(
    settings: Settings,
    log: Log,
    start: Start,
    accepted: Callable[[CellState, Written | None], Awaitable[Sequence[Event]]],
    *,
    whole: bool,
) -> dict[str, Any]:
    """`whole`: only if the ledger has all its known records."""
    ledger = Partition(Topic.LEDGER, settings.cell_index)
    replica, written = await start.load(settings, log), await start.projected(settings)
    reader = log.reader({ledger: replica.offset})
    async with tracing("placer", settings) as traces:
        try:
            await acquire(
                log,
                reader,
                replica,
                ledger,
                settings.cell,
                start.placer_id,
                LedgerTrace(traces),
                (written,) if whole else (),
                accepted=lambda state: accepted(state, written),
            )
        finally:
            await reader.close()
    state = replica.state
    return {"ok": True, "seq": state.seq, "term": state.term, "epoch": state.epoch}


def _start() -> Start:
    """Without the key of gateway and placers: it begins a term and reads no input."""
    return start_of_process("operator", None, standing_by=False)
