"""Detection of truncated and recreated input topics, before a term begins.

The ledger holds how far each input was answered, and the id of the last answered event. A topic that does not
hold this position, or has another event before it, is not the topic that was answered: records acknowledged
there may be lost. An operator has to decide then, and goes on with `penstock-placer accept-input`.
"""

from collections.abc import Mapping

from penstock.errors import ConfigurationError
from penstock.ledger.state.state import CellState
from penstock.log.lookup import records_at
from penstock.log.port import Log, Partition, Record
from penstock.model.schema.topics import INPUT_TOPICS


def input_positions(state: CellState, cell_index: int) -> dict[Partition, int]:
    """Input → offset of the next record to answer."""
    return {
        Partition(topic, cell_index): state.positions.get((topic, cell_index), 0) for topic in INPUT_TOPICS
    }


async def check_inputs(log: Log, state: CellState, cell_index: int) -> None:
    """Raises `ConfigurationError` where an input is not the one
    that the ledger has answered so far, `LogError`."""
    await _check(log, state, input_positions(state, cell_index))


async def need_another(log: Log, state: CellState, place: Partition) -> None:
    """Raises `ConfigurationError` where this input is the one that the ledger has answered: there is nothing
    to accept; `LogError`."""
    position = state.positions.get(place, 0)
    try:
        await _check(log, state, {place: position})
    except ConfigurationError:
        return
    raise ConfigurationError(
        f"{place.topic} partition {place.index} is the one that this ledger has answered, up to its offset "
        f"{position}: there is nothing to accept, and nothing was changed; start the placer"
    )


async def _check(log: Log, state: CellState, positions: Mapping[Partition, int]) -> None:
    first, ends = await log.begin_offsets(positions), await log.end_offsets(positions)
    for place, position in positions.items():
        if not first[place] <= position <= ends[place]:
            raise _lost(place, position, first[place], ends[place], "which does not hold that position")
    before = await records_at(log, {place: position - 1 for place, position in positions.items()})
    for place, position in positions.items():
        answered, record = state.last_inputs.get((place.topic, place.index)), before[place]
        if answered and record is not None and _event_id(record) != answered:
            which = (
                f"and holds event {_event_id(record)!r} before that position, not {answered!r}, which "
                "was answered"
            )
            raise _lost(place, position, first[place], ends[place], which)


def _event_id(record: Record) -> str:
    """Empty without an id; the rest of the record need not be readable."""
    return dict(record.headers).get("ce_id", b"").decode(errors="replace")


def _lost(place: Partition, position: int, first: int, end: int, which: str) -> ConfigurationError:
    return ConfigurationError(
        f"{place.topic} partition {place.index} is not the one that this ledger has answered: the ledger "
        f"stands at its offset {position}, the partition begins at {first} and ends at {end}, {which}. It "
        "was truncated or created anew, and events in it may be lost. Give the placer the log that it had. "
        f"If that log is gone, go on with `penstock-placer accept-input {place.topic} --from {first}`, "
        "submit again the jobs that `penstock get jobs` does not know, and restart estimator and "
        "node-reporters, which then report anew"
    )
