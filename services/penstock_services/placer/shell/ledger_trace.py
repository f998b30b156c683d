"""Spans of the ledger's records: each record when it is read back, and the latest ones once more at a
takeover.

A predecessor may have been killed between a record and its read-back, or with spans that were not exported
yet. So a placer prepares the spans of the latest records while it folds them, and exports them when its term
begins. Ids derive from a span's subject: a span that both placers export is one span.
"""

from collections.abc import Iterable, Sequence

import msgspec

from penstock.ledger.record.record import RawRecord
from penstock.ledger.replica.replica import Replica
from penstock.log.port import Record
from penstock.model.decisions.ledger_events import PlacementExplanation
from penstock.model.schema.event import Event
from penstock.runtime.tracing.phases import JobSpans, decide_placements, trace_decisions
from penstock.runtime.tracing.tracer import HeldTracing, Tracing

REPEATED_RECORDS = (
    1_000  # before the end of the ledger; at 1,000 jobs/s the last 200 ms (a batch of spans is 200 ms)
)
REPEATED_SPANS = 4_000  # a record completes at most a few

_explanations = msgspec.json.Decoder(list[PlacementExplanation]).decode


class LedgerTrace:
    """One attempt at a term: `fold` until it begins, `begin`, then `read_back` each record."""

    def __init__(self, traces: Tracing) -> None:
        self.traces = traces
        self._held = HeldTracing(traces, REPEATED_SPANS)
        self._spans = JobSpans(self._held)
        self._following = False

    def fold(self, replica: Replica, record: Record, end: int) -> RawRecord | None:
        """`replica.take`; follows from `REPEATED_RECORDS` before offset `end` on."""
        if self.traces.enabled and not self._following and record.offset >= end - REPEATED_RECORDS:
            self._follow(replica)
        taken = replica.take(record.value, record.offset)
        if taken is not None and self._following:
            self._emit(taken)
        return taken

    def begin(self, replica: Replica) -> None:
        """The term has begun; `replica` stands at its first record."""
        if self.traces.enabled and not self._following:
            self._follow(replica)
        self._held.release()

    def read_back(
        self,
        seq: int,
        now_ms: int,
        facts: Sequence[Event],
        explanation: Iterable[PlacementExplanation],
    ) -> None:
        """One valid record of this placer, in ledger order."""
        if self.traces.enabled:
            decide_placements(self._held, seq, now_ms, explanation, facts)
            self._follow_facts(seq, now_ms, facts)

    def _follow(self, replica: Replica) -> None:
        self._following = True
        self._spans.remember(replica.state.jobs.values())

    def _emit(self, record: RawRecord) -> None:
        facts = [fact.event() for fact in record.facts]
        explanation = _explanations(record.explanation)
        decide_placements(self._held, record.seq, record.now_ms, explanation, facts)
        self._follow_facts(record.seq, record.now_ms, facts)

    def _follow_facts(self, seq: int, now_ms: int, facts: Sequence[Event]) -> None:
        trace_decisions(self._held, seq, now_ms, facts)
        self._spans.read_back(now_ms, facts)
