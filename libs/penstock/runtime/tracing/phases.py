"""Spans of a job's phases and its root span, written afterwards from ledger records that were read back as
valid.

Only the placer's shell calls this: records that it reads back are valid, and replay does not run it. The
placer's own state is already ahead when a record is read back; so the few times of a live job that are needed
are stored here, and after a restart `remember` takes them from the folded state.

| phase | from | to |
|---|---|---|
| `queue` | estimated, or queued again | placed, or ended while waiting |
| `launch` | placed | every task of the gang started, or the attempt ended before |
| `run` | every task started | attempt over |
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from penstock.model.decisions import ledger_events
from penstock.model.decisions.adjustments import AdjustmentDecided, CoresDecided
from penstock.model.decisions.decisions import is_decision
from penstock.model.decisions.moves import MoveDecided
from penstock.model.decisions.plans import PlanAdopted
from penstock.model.inputs import external_events
from penstock.model.inputs.estimates import JobEstimated
from penstock.model.proposals import CoresProposed, MigrationProposed, ThrottleProposed
from penstock.model.schema.event import Event
from penstock.runtime.tracing.tracer import Attribute, Tracing

if TYPE_CHECKING:
    from penstock.ledger.state.job.job_state import JobState

MAX_NAMED = 16  # jobs of a plan in its span


@dataclass(slots=True)
class _Times:
    """Times of a live job, in ledger ms."""

    submitted_ms: int
    queued_ms: int | None = None
    placed_ms: int | None = None
    running_ms: int | None = None
    attempt: int = 0
    waiting: set[str] = field(default_factory=set)
    """Tasks of the attempt that have not started."""
    tasks: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()


class JobSpans:
    """Follows the ledger and writes the spans `queue`, `launch`, `run` and `job`. Stores live jobs only.

    A job of which it has no times (submitted before a restart, and not in `remember`) is left out.
    """

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing
        self._jobs: dict[str, _Times] = {}
        self._job_of_task: dict[str, str] = {}

    def remember(self, jobs: "Iterable[JobState]") -> None:
        """Takes over the live jobs of a state that was folded up
        to the record before the next `read_back`."""
        if not self._tracing.enabled:
            return
        for job in jobs:
            times = _Times(job.submitted_ms, job.queued_ms, job.placed_ms, job.running_ms, job.attempt)
            places = [task.place for task in job.tasks.values()]
            times.waiting = {t.place.task_id for t in job.tasks.values() if t.started_ms is None}
            self._jobs[job.job_id] = times
            self._assign(job.job_id, times, tuple((place.task_id, place.node_id) for place in places))

    def read_back(self, now_ms: int, record_facts: Iterable[Event]) -> None:
        """Takes one valid record: its time and its events, in order. Writes the spans that it completes."""
        if not self._tracing.enabled:
            return
        for fact in record_facts:
            handler = _HANDLERS.get(type(fact))
            if handler is not None:
                handler(self, now_ms, fact)

    def _submitted(self, now_ms: int, fact: external_events.JobSubmitted) -> None:
        self._jobs[fact.job_id] = _Times(now_ms)

    def _queued(self, now_ms: int, fact: JobEstimated | ledger_events.JobQueued) -> None:
        times = self._jobs.get(fact.job_id)
        if times is not None:
            times.queued_ms = now_ms

    def _placed(self, now_ms: int, fact: ledger_events.PlacementDecided) -> None:
        times = self._jobs.get(fact.job_id)
        if times is None:
            return
        times.attempt, times.placed_ms, times.running_ms = fact.attempt, now_ms, None
        times.waiting = {place.task_id for place in fact.tasks}
        self._assign(fact.job_id, times, tuple((place.task_id, place.node_id) for place in fact.tasks))
        start_ms = times.submitted_ms if times.queued_ms is None else times.queued_ms
        self._tracing.phase("queue", fact.job_id, times.attempt, start_ms, now_ms)

    def _started(self, now_ms: int, fact: external_events.TaskStarted) -> None:
        job_id = self._job_of_task.get(fact.task_id)
        times = self._jobs.get(job_id) if job_id is not None else None
        if job_id is None or times is None or times.placed_ms is None or times.running_ms is not None:
            return
        times.waiting.discard(fact.task_id)
        if not times.waiting:
            times.running_ms = now_ms
            self._tracing.phase(
                "launch", job_id, times.attempt, times.placed_ms, now_ms, {"penstock.nodes": times.nodes}
            )

    def _requeued(self, now_ms: int, fact: ledger_events.JobRequeued) -> None:
        times = self._jobs.get(fact.job_id)
        if times is None:
            return
        self._end_attempt(fact.job_id, times, now_ms, fact.reason)
        times.queued_ms = now_ms if fact.not_before_ms is None else None

    def _ended(self, now_ms: int, fact: ledger_events.JobEnded) -> None:
        times = self._jobs.pop(fact.job_id, None)
        if times is None:
            return
        error = None if fact.outcome in ("succeeded", "cancelled") else fact.reason or fact.outcome
        if times.placed_ms is not None:
            self._end_attempt(fact.job_id, times, now_ms, error)
        elif times.queued_ms is not None:
            self._tracing.phase("queue", fact.job_id, times.attempt + 1, times.queued_ms, now_ms, error=error)
        attributes = {"penstock.attempts": times.attempt, "penstock.exit_code": fact.exit_code}
        self._tracing.end_job(
            fact.job_id, times.submitted_ms, now_ms, fact.outcome, attributes, reason=fact.reason
        )

    def _end_attempt(self, job_id: str, times: _Times, now_ms: int, error: str | None) -> None:
        """Ends the current phase."""
        for task_id in times.tasks:
            self._job_of_task.pop(task_id, None)
        if times.placed_ms is not None:
            name = "launch" if times.running_ms is None else "run"
            start_ms = times.placed_ms if times.running_ms is None else times.running_ms
            found = {"penstock.nodes": times.nodes}
            self._tracing.phase(name, job_id, times.attempt, start_ms, now_ms, found, error=error)
        times.placed_ms = times.running_ms = None
        times.tasks = times.nodes = ()

    def _assign(self, job_id: str, times: _Times, places: tuple[tuple[str, str], ...]) -> None:
        times.tasks = tuple(task_id for task_id, _ in places)
        times.nodes = tuple(dict.fromkeys(node_id for _, node_id in places))
        for task_id in times.tasks:
            self._job_of_task[task_id] = job_id


def decide_placements(
    tracing: Tracing,
    seq: int,
    now_ms: int,
    explanations: Iterable[ledger_events.PlacementExplanation],
    record_facts: Iterable[Event],
) -> None:
    """`decide_placement` for each placement of a record; units of a proposed plan, and moves that a service
    proposed, link to its span."""
    plans: dict[str, tuple[str, str]] = {}
    for fact in record_facts:
        if isinstance(fact, ledger_events.PlacementDecided) and fact.unit is not None:
            plans[fact.job_id] = (fact.unit.proposer, fact.unit.proposal_id)
        elif isinstance(fact, MigrationProposed) and not fact.by:
            plans[fact.job_id] = (fact.proposer, fact.proposal_id)
    for why in explanations:
        decide_placement(tracing, seq, now_ms, why, plans.get(why.job_id))


def decide_placement(
    tracing: Tracing,
    seq: int,
    now_ms: int,
    why: ledger_events.PlacementExplanation,
    plan: tuple[str, str] | None = None,
) -> None:
    """Writes the `decide` span of a placement, or of a decision to move a job, from its record: the
    explanation, and the ledger's time. `plan`: proposer and id of the proposal that it follows.

    Call it once the record is read back as valid. The span has no length: the duration of the step (below 1
    ms) is not in the record, and a span that is written again after a crash must be equal in every field.
    """
    best = why.candidates[0] if why.candidates else None
    moved = why.moved
    leaves = moved is not None and moved.stop_ms is None
    found: dict[str, Attribute] = {
        "penstock.outcome": "moving" if leaves else "placed",
        "penstock.candidates": why.feasible + sum(why.rejected.values()),
        "penstock.feasible": why.feasible,
        "penstock.winner": None if best is None else ",".join(dict.fromkeys(best.nodes)),
        "penstock.score": None if best is None else best.score,
        "penstock.margin": why.margin,
        "penstock.profile": why.profile,
        "penstock.proposer": why.proposer or None,
        "penstock.reason": why.reason or None,
    }
    if moved is not None:
        found |= {
            "penstock.moved_from": ",".join(dict.fromkeys(moved.nodes)),
            "penstock.moved_by_seq": moved.seq,
            "penstock.stop_ms": moved.stop_ms,
            "penstock.lost_ms": moved.lost_ms,
        }
    tracing.decide(why.job_id, seq, now_ms, found, plan)


SHOWN_OTHERWISE: frozenset[type[Event]] = frozenset(
    {
        ledger_events.PlacementDecided,
        MoveDecided,
        ledger_events.JobRequeued,
        ledger_events.JobQueued,
        ledger_events.JobEnded,
    }
)
"""Decisions that have a `decide` span with their explanation, or end a phase of the job."""


def trace_decisions(tracing: Tracing, seq: int, now_ms: int, record_facts: Iterable[Event]) -> None:
    """Writes a span for each decision of a record that no other span shows, named as its event without
    `penstock.`; adjustments that a service proposed link to its span."""
    plan: tuple[str, str] | None = None
    for n, fact in enumerate(record_facts):
        if isinstance(fact, CoresProposed | ThrottleProposed) and not fact.by:
            plan = fact.proposer, fact.proposal_id
        if not is_decision(fact) or type(fact) in SHOWN_OTHERWISE:
            continue
        found: dict[str, Attribute] = {}
        for name in (
            "attempt",
            "task_id",
            "node_id",
            "by",
            "reason",
            "verdict",
            "proposal_id",
            "group_id",
            "error",
            "cause",
            "memory_bandwidth_percent",
        ):
            value = getattr(fact, name, None)
            if isinstance(value, str | int):
                found[f"penstock.{name}"] = value
        if isinstance(fact, CoresDecided):
            found["penstock.cores"] = len(fact.cores)
        if isinstance(fact, PlanAdopted):
            found["penstock.jobs"] = tuple(unit.job_id for unit in fact.units[:MAX_NAMED])
            found["penstock.units"] = len(fact.units)
        job_id = getattr(fact, "job_id", None)
        link = plan if isinstance(fact, AdjustmentDecided) else None
        tracing.decision(job_id, seq, n, now_ms, fact.TYPE.removeprefix("penstock."), found, link)


_HANDLERS: Mapping[type[Event], Callable[[JobSpans, int, Any], None]] = MappingProxyType(
    {
        external_events.JobSubmitted: JobSpans._submitted,
        JobEstimated: JobSpans._queued,
        ledger_events.JobQueued: JobSpans._queued,
        ledger_events.PlacementDecided: JobSpans._placed,
        external_events.TaskStarted: JobSpans._started,
        ledger_events.JobRequeued: JobSpans._requeued,
        ledger_events.JobEnded: JobSpans._ended,
    }
)
