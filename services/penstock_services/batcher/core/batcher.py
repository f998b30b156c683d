"""State machine of the batcher beside the fold of the ledger: when it plans, which problem is solved, and
what it proposes.

Its driver (the service's shell, or a simulation) folds the ledger and passes each fact after it was folded:

    batcher.see(fact)                                   # each, in order
    while (work := batcher.next(state, now_ms)) is not None:
        proposal = batcher.answered(state, work, solve(work))   # `solve` runs elsewhere; meanwhile facts are
        folded
    batcher.due_ms(state)                               # call `next` again at that time, even without a new
    fact

One plan is under way at a time: from the question until the placer has answered the proposal. Facts that
arrive meanwhile lead to one more plan.

- Under a profile with a *batch* stage it plans while the placer's window is open: towards the window's end,
  so that the whole burst is in the plan, and at once where more jobs wait than one plan holds. A plan that is
  ready after the window's end is not sent.
- Under a profile with a *regroup* stage it plans at once after each fact that may change which jobs run
  (`triggers`).
- Under a profile with both, the batch stage plans a window in which the regroup stage found no job to stop
  and none to share.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import msgspec

from penstock.ledger.state.state import CellState
from penstock.model.decisions.ledger_events import ProposalAnswered
from penstock.model.decisions.plans import MAX_PROPOSED_UNITS
from penstock.model.nouns.settings import PlacerSettings
from penstock.model.proposals import ANSWER_WITHIN_MS, PlanProposed
from penstock.model.schema.event import Event
from penstock.scheduling.profiles import KNOWN_PROFILES, known_profile
from penstock.scheduling.stages.regroup import PROPOSER, Answer
from penstock_services.batcher.core.proposal import Planned, proposal_of
from penstock_services.batcher.core.triggers import asks_for_plan

MAX_LEAD_MS = 2_000  # before a window's end: a cold worker starts in 1 s, 200 jobs on 128 nodes take 0.5 s
LEAD_SHARE = 0.5  # share of a short window
VALID_MS = 60_000  # validity of a plan outside a window: a batcher that hung sends no outdated plan
RETRY_MS, LONGEST_RETRY_MS = ANSWER_WITHIN_MS, 3_600_000
"""After a plan that was lost (a worker that died, or was too slow on a busy machine), twice as long after
each further one in a row: a stage with a bug
that no fact moves is asked once an hour, and no tick comes of it."""
OUT_OF_DATE = frozenset({"stale", "expired"})
"""Refusals of a whole plan after which another one is made at once: what it was made on has changed, maybe by
a fact that asks for no plan."""
LEAST_BURST = 2  # jobs; the place stage places a single job as well

Kind = Literal["batch", "regroup"]


class Work(msgspec.Struct, frozen=True):
    """A planning problem to be solved; passes between processes."""

    kind: Kind
    seq: int
    """Record number of the state that it was read from."""
    now_ms: int
    """The ledger's time when the question was made."""
    window_until_ms: int
    """End of the window in which the question was made; 0: no window was open."""
    settings: PlacerSettings
    question: Any


class _Sent(NamedTuple):
    """A proposal that the placer has not answered yet. `cut`: the plan has more units than were sent."""

    proposal_id: str
    until_ms: int
    cut: bool
    wake_ms: int | None
    """`Answer.started_wake_ms`."""


class _Stage(NamedTuple):
    """A planning stage of a profile."""

    question: Callable[[CellState], Any | None]
    solve: Callable[[Any], Any]
    plan: Callable[[CellState, Any], Planned]


@lru_cache(KNOWN_PROFILES)
def _stages(settings: PlacerSettings) -> Mapping[Kind, _Stage]:
    """In the order in which they are asked. Empty: these settings plan nothing, or they come from a newer
    placer, whose profile this version does not know."""
    found: dict[Kind, _Stage] = {}
    profile = known_profile(settings)
    if profile is None:
        return MappingProxyType(found)
    if (regroup := profile.regroup) is not None:
        found["regroup"] = _Stage(
            regroup.question,
            regroup.solve,
            lambda state, answer: Planned(*regroup.plan(state, answer)),
        )
    if (batch := profile.batch) is not None and settings.batch_window_ms:
        found["batch"] = _Stage(
            batch.question, batch.solve, lambda state, answer: Planned(batch.units(state, answer))
        )
    return MappingProxyType(found)


def plans(settings: PlacerSettings) -> bool:
    """Whether there is anything for a batcher to do under these settings."""
    return bool(_stages(settings))


def solve(work: Work) -> Any:
    """The long part: pure, in any process. The same work gives the same answer."""
    return _known(work).solve(work.question)


def _known(work: Work) -> _Stage:
    return _stages(work.settings)[work.kind]


@contextmanager
def _at(state: CellState, now_ms: int) -> Iterator[None]:
    """The state at a time after its last record: running jobs have advanced,
    and timers due by then count as due."""
    was_ms, state.now_ms = state.now_ms, max(state.now_ms, now_ms)
    try:
        yield
    finally:
        state.now_ms = was_ms


def _window_ms(state: CellState) -> int:
    """End of the open window; 0: no window is open."""
    return state.window_until_ms if state.in_window else 0


class Batcher:
    """Starts as if a fact had just been folded: a restart plans once."""

    def __init__(self) -> None:
        self._due = True
        """Whether a fact since the latest question asks for a plan."""
        self._working = False
        self._sent: _Sent | None = None
        self._wake_ms: int | None = None
        """Ledger time at which the latest answer may change without a fact; None: it does not."""
        self._lost = 0
        """Plans in a row that had no answer."""
        self._planned_window_ms = 0
        """End of the latest window in which it planned."""

    def see(self, fact: Event) -> None:
        """Takes a fact that has just been folded."""
        if isinstance(fact, ProposalAnswered):
            self._answered(fact)
        elif asks_for_plan(fact):
            self._due = True

    def _answered(self, fact: ProposalAnswered) -> None:
        sent = self._sent
        if sent is None or (fact.proposer, fact.proposal_id) != (PROPOSER, sent.proposal_id):
            return
        self._sent = None
        if fact.verdict == "refused":
            self._due = self._due or fact.reason in OUT_OF_DATE
            return
        if sent.cut:
            self._due = True
        self._wake_ms = min(
            (at_ms for at_ms in (self._wake_ms, sent.wake_ms) if at_ms is not None), default=None
        )

    def due_ms(self, state: CellState) -> int | None:
        """Ledger time from which `next` has work; None: it has none before another fact."""
        if self._working or state.frozen:
            return None
        first_ms = min((at_ms for _, at_ms in self._due_stages(state)), default=None)
        return first_ms if first_ms is None or self._sent is None else max(first_ms, self._sent.until_ms)

    def _due_stages(self, state: CellState) -> Iterator[tuple[Kind, int]]:
        """Stages that have something to plan, and the time from which on."""
        for kind in _stages(state.settings):
            at_ms = self._regroup_ms(state) if kind == "regroup" else self._batch_ms(state)
            if at_ms is not None:
                yield kind, at_ms

    def _regroup_ms(self, state: CellState) -> int | None:
        if self._due:
            return state.now_ms
        lost_ms = None if self._sent is None else self._sent.until_ms
        first_ms = min((at_ms for at_ms in (self._wake_ms, lost_ms) if at_ms is not None), default=None)
        return None if first_ms is None else max(state.now_ms, first_ms)

    def _batch_ms(self, state: CellState) -> int | None:
        window_ms = _window_ms(state)
        if not window_ms or window_ms == self._planned_window_ms:
            return None
        if len(state.queue) >= MAX_PROPOSED_UNITS:
            return state.now_ms
        lead_ms = min(MAX_LEAD_MS, int(state.settings.batch_window_ms * LEAD_SHARE))
        return max(state.now_ms, window_ms - lead_ms)

    def next(self, state: CellState, now_ms: int) -> Work | None:
        """The next question, if it is due; `answered` or `failed` follows. `now_ms`: the ledger's time, which
        goes on without records."""
        due_ms = self.due_ms(state)
        if due_ms is None or due_ms > now_ms:
            return None
        kinds = [kind for kind, at_ms in self._due_stages(state) if at_ms <= now_ms]
        self._sent, window_ms = None, _window_ms(state)
        for kind in kinds:
            if kind == "regroup":
                self._due, self._wake_ms = False, None
            else:
                self._planned_window_ms = window_ms
            with _at(state, now_ms):
                question = _stages(state.settings)[kind].question(state)
            if question is not None:
                self._working = True
                return Work(kind, state.seq, now_ms, window_ms, state.settings, question)
        return None

    def _batch_follows(self, state: CellState) -> bool:
        """Whether the batch stage has yet to plan this window:
        it plans the starts where no job shares or stops."""
        return (
            "batch" in _stages(state.settings)
            and len(state.queue) >= LEAST_BURST
            and self._batch_ms(state) is not None
        )

    def failed(self, work: Work) -> None:
        """The work has no answer: its plan is lost. Which jobs run is asked again after the next change, and
        after `RETRY_MS` and longer without one; a window is not planned again."""
        self._working = False
        if work.kind == "regroup":
            self._wake_ms = work.now_ms + min(RETRY_MS << self._lost, LONGEST_RETRY_MS)
            self._lost = min(self._lost + 1, LONGEST_RETRY_MS.bit_length())

    def answered(self, state: CellState, work: Work, answer: Any) -> PlanProposed | None:
        """The proposal on this state; None: the plan changes nothing, or it has come too late."""
        self._working, self._lost = False, 0
        if state.frozen or work.settings != state.settings:
            self._due = True
            return None
        now_ms = max(state.now_ms, work.now_ms)
        valid_ms = now_ms + VALID_MS
        if work.kind == "batch":
            if not state.in_window or state.window_until_ms != work.window_until_ms:
                return None
            valid_ms = work.window_until_ms
        regroup = answer if isinstance(answer, Answer) else None
        self._wake_ms = None if regroup is None else regroup.wake_ms
        planned = _known(work).plan(state, answer)
        if work.kind == "regroup" and not planned.units and not planned.stops and self._batch_follows(state):
            return None
        proposal, cut = proposal_of(state, planned, f"{work.kind}-{work.seq}", valid_ms)
        if (
            proposal is None and work.kind == "regroup" and state.in_window
        ):  # sent although it changes nothing: it answers the window
            proposal = PlanProposed(proposal_id=f"{work.kind}-{work.seq}", proposer=PROPOSER, units=())
        if proposal is not None:
            until_ms = now_ms + ANSWER_WITHIN_MS
            self._sent = _Sent(
                proposal.proposal_id, until_ms, cut, None if regroup is None else regroup.started_wake_ms
            )
        return proposal
