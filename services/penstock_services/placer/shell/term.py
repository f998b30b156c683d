"""Start of a term (leader election through the ledger): fold to the end, append `TermStarted`, read it back
as valid, only then decide (LAW 3)."""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import MappingProxyType

import orjson
from pydantic import ValidationError

from penstock import __version__
from penstock.clock import LedgerClock, wall_ms
from penstock.errors import ConfigurationError, LogError, PenstockError
from penstock.ledger.fold.evolve import FOLD_VERSION
from penstock.ledger.record.record import GENESIS, Draft, Head, read_valid, write
from penstock.ledger.replica.replica import Replica
from penstock.ledger.state.state import CellState
from penstock.log.lookup import records_at
from penstock.log.port import Headers, Log, Message, Partition, Reader, Record
from penstock.model.decisions.ledger_events import LedgerRecord, TermStarted
from penstock.model.nouns.settings import OWN_PROFILE, PlacerSettings
from penstock.model.schema.event import Event
from penstock.model.schema.validation import describe
from penstock.model.wire.envelope import headers
from penstock.runtime.failpoints import hit
from penstock.runtime.following.snapshots import Written, head_id_at
from penstock.scheduling.profiles import UnknownProfile, UnusedSetting, own_names, settings_of
from penstock_services.placer.shell.history import check_ledger
from penstock_services.placer.shell.inputs import check_inputs
from penstock_services.placer.shell.ledger_time import begin_time
from penstock_services.placer.shell.ledger_trace import LedgerTrace

logger = logging.getLogger(__name__)


class Fenced(PenstockError):
    """Another placer's valid record: this term is over."""


KNOWN_WITHIN_MS = 10_000  # existing records come within milliseconds, or after an outage
LEDGER_TYPE = f"{LedgerRecord.TYPE}.v{LedgerRecord.VERSION}"

ENVIRONMENT: Mapping[str, str] = MappingProxyType(
    {f"PENSTOCK_{name.upper()}": name for name in PlacerSettings.__struct_fields__}
)
"""Environment variable → field of `PlacerSettings`. Lists and objects are written as JSON."""


def placer_settings(env: Mapping[str, str] = os.environ) -> PlacerSettings:
    """The decision settings of this process. Raises `ConfigurationError` naming the variable."""
    variables = dict(ENVIRONMENT)
    try:
        own = own_names(env.get("PENSTOCK_PROFILE") or OWN_PROFILE)
        variables |= {f"PENSTOCK_{name.upper()}": name for name in (*PlacerSettings.FORMER, *own)}
        given = {"profile": OWN_PROFILE} | {
            field: _value(variable, env[variable])
            for variable, field in variables.items()
            if env.get(variable)
        }
        return settings_of(given)
    except ValidationError as error:
        names = {field: variable for variable, field in variables.items()}
        bad = ", ".join(
            names.get(str(problem["loc"][0]), str(problem["loc"][0])) for problem in error.errors()
        )
        raise ConfigurationError(f"{bad}: {describe(error)}") from error
    except UnknownProfile as error:
        raise ConfigurationError(f"PENSTOCK_PROFILE: {error.args[0]}") from error
    except UnusedSetting as error:
        raise ConfigurationError(f"PENSTOCK_{error.field.upper()}: {error}") from error


def _value(variable: str, text: str) -> object:
    """Raises `ConfigurationError`."""
    if not text.lstrip().startswith(("[", "{")):
        return text
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise ConfigurationError(
            f"{variable}: {text[:80]!r} is not a JSON list or object: {error}"
        ) from error


def ledger_headers(
    cell: str,
    seq: int,
    causation: str | None = None,
    correlation: str | None = None,
    trace: str | None = None,
) -> Headers:
    """Headers of a ledger record; only its value is folded."""
    return headers(
        f"ledger-{cell}-{seq}",
        "/penstock/placer",
        LEDGER_TYPE,
        str(seq),
        wall_ms(),
        trace,
        causation,
        correlation,
    )


async def read_known(log: Log, reader: Reader, ledger: Partition, end: int) -> list[Record]:
    """The next records of a ledger that has just ended at `end`. Raises `LogError` when it does not any
    more."""
    records = await reader.read(timeout_ms=KNOWN_WITHIN_MS)
    if not records and (found := (await log.end_offsets([ledger]))[ledger]) < end:
        raise LogError(f"the ledger ended at {end}, and ends at {found} now")
    return records


async def overlooked(log: Log, ledger: Partition, head: Head, head_offset: int, end: int) -> bool:
    """Whether a record that follows the head lies before `end`, where its reader found void ones only: the
    ledger was restored to an offset behind the head meanwhile, and others went on from there. Raises
    `LogError`."""
    reader = log.reader({ledger: head_offset + 1})
    try:
        while reader.position(ledger) < end:
            for record in await read_known(log, reader, ledger, end):
                if record.offset < end and read_valid(head, record.value) is not None:
                    return True
    finally:
        await reader.close()
    return False


async def check_followed(log: Log, ledger: Partition, replica: Replica) -> None:
    """Checks that the ledger's history is still the same: records of another one look void, and so
    unanswered.

    Raises `LogError` where the ledger is not the one that was followed.
    """
    if replica.head != GENESIS:
        found = await head_id_at(log, ledger, replica.head_offset)
        if found != replica.head.id:
            raise LogError(f"record {replica.head.seq} is gone from the ledger that was followed")
    if await overlooked(log, ledger, replica.head, replica.head_offset, replica.offset):
        raise LogError(f"the ledger went on behind record {replica.head.seq} where void records were")


async def acquire(
    log: Log,
    reader: Reader,
    replica: Replica,
    ledger: Partition,
    cell: str,
    placer_id: str,
    ledger_trace: LedgerTrace,
    seen: Sequence[Written | None] = (),
    accepted: Callable[[CellState], Awaitable[Sequence[Event]]] | None = None,
) -> LedgerClock:
    """Leads `replica` to the end of the ledger with this placer's `TermStarted` as its last valid record;
    returns the term's clock.

    Nothing is written unless the ledger has all records `seen` in it, and the inputs are those that it has
    answered; otherwise raises `ConfigurationError`. `accepted`: facts that an operator accepts with it, for
    any inputs.

    Tries again when a record of the term before came first; each try is one append. Raises `Fenced` when
    another placer's term came first: two that tried again would supersede each other for ever, so the loser
    stands by.
    """
    settings = placer_settings()
    end = (await log.end_offsets([ledger]))[ledger]
    head = (await records_at(log, {ledger: replica.head_offset}))[ledger]
    stamp_ms = before_ms = None if head is None else head.timestamp_ms
    while True:
        while reader.position(ledger) < end:
            for record in await read_known(log, reader, ledger, end):
                if ledger_trace.fold(replica, record, end) is not None:
                    stamp_ms = record.timestamp_ms
        await check_ledger(log, ledger, replica.state.epoch, seen)
        await check_followed(log, ledger, replica)
        if accepted is None:
            await check_inputs(log, replica.state, ledger.index)
        term = replica.head.term + 1
        now_ms = replica.state.now_ms or wall_ms()
        fact = TermStarted(
            term=term,
            placer_id=placer_id,
            settings=settings,
            code_version=__version__,
            fold_version=FOLD_VERSION,
        )
        facts = [fact, *(await accepted(replica.state) if accepted is not None else ())]
        draft = Draft(term, now_ms, {"placer_id": placer_id}, "committed", None, facts)
        _, value = write(replica.head, draft)
        seq = replica.head.seq + 1
        sent_s = asyncio.get_running_loop().time()
        [offset] = await log.append([Message(ledger, value, ledger_headers(cell, seq))])
        hit("placer.term_appended")
        ours = None
        while ours is None:
            for record in await read_known(log, reader, ledger, offset + 1):
                taken = ledger_trace.fold(replica, record, end)
                if record.value == value:
                    ours = taken is not None
                if taken is not None:
                    before_ms, stamp_ms = stamp_ms, record.timestamp_ms
        if ours and (
            accepted is not None or replica.head.term == term
        ):  # the acceptance counts, even if another placer came next
            ledger_trace.begin(replica)
            logger.info("term %d begins at seq %d with %s", term, seq, settings.profile)
            ago_ms = round((asyncio.get_running_loop().time() - sent_s) * 1_000)
            return begin_time(replica.state, before_ms, stamp_ms or 0, ago_ms)
        if replica.head.term >= term:
            raise Fenced(f"another placer began term {replica.head.term} first")
        end = reader.position(ledger)
