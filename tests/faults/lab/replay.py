"""Decides a whole ledger again from its inputs and compares byte for byte, as `penstock replay` does."""

from penstock.ledger.record import GENESIS, Head, RawRecord, read_valid, write
from penstock.ledger.state import CellState
from penstock.model.codec import decode
from penstock.model.ledger_events import TermStarted
from penstock.model.topics import Topic
from penstock_services.placer.core.answer import Input, Moment, answer_input, answer_term, answer_timer
from penstock_services.placer.core.step import PlacerCore
from tests.faults.lab.judge import Violation
from tests.faults.lab.log import Log


def replay(log: Log) -> None:
    """Raises `Violation` at the first record that is decided otherwise."""
    core, head = PlacerCore(CellState()), GENESIS
    for record in log.partition(Topic.LEDGER).records:
        found = read_valid(head, record.value)
        if found is None:
            continue
        head, raw = found
        if _again(log, core, raw) != record.value:
            raise Violation("replay", f"seq {raw.seq} is decided otherwise the second time")


def _again(log: Log, core: PlacerCore, raw: RawRecord) -> bytes:
    moment = Moment(raw.seq, raw.term, raw.now_ms)
    cause = raw.cause
    if cause.topic is not None:
        record = log.partition(Topic(cause.topic)).records[cause.offset]
        found = Input(cause.topic, 0, cause.offset, record.headers, record.value)
        draft = answer_input(core, moment, found).draft
    elif cause.timer_id is not None:
        draft = answer_timer(core, moment, cause.timer_id)
    else:
        fact = decode(raw.facts[0].type, bytes(raw.facts[0].data))
        assert isinstance(fact, TermStarted), "only a term begins without input or timer"
        draft = answer_term(core, moment, fact)
    return write(Head(raw.seq - 1, raw.parent, raw.term), draft)[1]
