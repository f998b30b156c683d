"""One step of the placer: one input in, one record's content out (LAW 2): guard, fold, decide, fold each
decision at once.

Ideal: deciding never fails. Departure: a policy has bugs. An exception costs the choice that raised it, not
the fact: the input stays folded, with every decision taken before, and `ChoiceFailed` stands for the missing
choice. What a later attempt or a replay must repeat, even with other random numbers or a fixed policy, is in
`Failure`.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from penstock.errors import one_line
from penstock.ledger.fold.evolve import evolve
from penstock.ledger.state.state import CellState
from penstock.model.decisions.ledger_events import ChoiceFailed, PlacementExplanation, TermStarted
from penstock.model.schema.event import Event
from penstock.model.wire.codec import prove_readable
from penstock_services.placer.core.common import RESCHEDULE, wake_up
from penstock_services.placer.core.decide import Decider
from penstock_services.placer.core.guard import join_refusal, refusal

FIRST_RETRY_MS = 1_000  # before the first further try
MAX_RETRY_MS = 600_000  # between two tries while deciding fails and nothing else happens
MAX_REASON = 1_024  # characters: MAX_TEXT, as many as a record's reason holds
UNDECIDED = "undecided: "
"""Begins the reason of a record in which a choice is missing."""


class Step(msgspec.Struct, frozen=True, gc=False):
    """The content of the record that answers one input."""

    outcome: str
    reason: str | None
    facts: Sequence[Event]
    explanation: Sequence[PlacementExplanation]
    errors: Sequence[Exception] = ()
    """Exceptions of deciding; `reason` and the facts have their text."""


class Failure(NamedTuple):
    """Known failures of a step: from an earlier attempt at it, or from its record."""

    error: str = ""
    """Empty: only the placements of `jobs` fail."""
    decisions: int | None = None
    """So many decisions count, then deciding fails with `error`; None: folding the input itself does."""
    jobs: Mapping[str, str] = MappingProxyType({})
    """Job → error of each on which the policy fails."""

    @property
    def unfoldable(self) -> bool:
        return bool(self.error) and self.decisions is None


class DecisionNotFolded(Exception):
    """The fold refuses a decision and has left the state half changed: it must be dropped. `decisions` were
    folded before."""

    def __init__(self, decisions: int, error: str) -> None:
        super().__init__(error)
        self.decisions = decisions


class PlacerCore:
    """The pure placer: a state and the decider of the current term's settings."""

    def __init__(self, state: CellState) -> None:
        self.state = state
        self.decider = Decider(state.settings)

    def step(self, event: Event, event_id: str, failure: Failure | None = None) -> Step:
        """Answers one input. The caller has set the state's seq, time and term (`begin`).

        Own decisions are folded here: waiting to read them back would place twice. Raises the exceptions of
        folding the input, and `DecisionNotFolded`.
        """
        state = self.state
        reason = refusal(state, event)
        if reason is not None:
            refused = join_refusal(state, event, reason)
            if refused is None:
                return Step("rejected", reason, (), ())
            evolve(state, refused)
            return Step("committed", reason, (refused,), ())
        evolve(state, event)
        if isinstance(event, TermStarted):
            self.decider = Decider(state.settings)
        decider = self.decider
        folded, half_folded = [event], False
        try:
            decisions = decider.decide(state, event, event_id, failure.jobs if failure is not None else {})
            if failure is not None and failure.decisions is not None:
                decisions = _until(decisions, failure)
            for decision in decisions:
                prove_readable(decision)
                half_folded = True
                evolve(state, decision)
                half_folded = False
                folded.append(decision)
        except Exception as error:
            if half_folded:
                raise DecisionNotFolded(len(folded) - 1, one_line(error)) from error
            text = str(error) if isinstance(error, _Recorded) else decider.failed(error)
            failed = ChoiceFailed(profile=decider.settings.profile, error=text)
            evolve(state, failed)
            folded.append(failed)
        if state.failed_choices.seq == state.seq:
            return self._undecided(folded)
        return Step("committed", None, folded, decider.explanations)

    def _undecided(self, folded: list[Event]) -> Step:
        """The content of the record. While choices fail, placing is tried again even without an event."""
        state, decider = self.state, self.decider
        again_ms = state.now_ms + retry_ms(state.failed_choices.in_a_row)
        requested = state.timers.get(RESCHEDULE)
        if requested is None or requested.at_ms > again_ms:
            retry = wake_up(state, again_ms)
            evolve(state, retry)
            folded.append(retry)
        failed = state.failed_choices
        reason = f"{UNDECIDED}policy {failed.profile}: {failed.error}"[:MAX_REASON]
        return Step("dead_lettered", reason, folded, decider.explanations, decider.errors)


class _Recorded(Exception):
    """Stands for the exception of an earlier attempt."""


def _until(decisions: Iterator[Event], failure: Failure | None) -> Iterator[Event]:
    """The decisions up to where deciding is known to fail. Raises `_Recorded` there."""
    if failure is None or failure.decisions is None:
        yield from decisions
        return
    yield from islice(decisions, failure.decisions)
    raise _Recorded(failure.error)


def retry_ms(failures: int) -> int:
    """Time after which placing is tried again without an event."""
    return min(FIRST_RETRY_MS << min(max(0, failures - 1), MAX_RETRY_MS.bit_length()), MAX_RETRY_MS)
