"""A job's phases in hindsight: ledger records become spans, whatever way the job takes."""

from collections.abc import Iterator

import msgspec
import pytest
from msgspec.structs import replace
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from infra.codegen.examples import EXAMPLES
from penstock.ledger.fold.evolve import begin, evolve
from penstock.ledger.state.state import CellState
from penstock.model.decisions.decisions import is_decision
from penstock.model.decisions.ledger_events import (
    Candidate,
    JobEnded,
    JobQueued,
    JobRequeued,
    PlacementDecided,
    PlacementExplanation,
)
from penstock.model.decisions.moves import Moved
from penstock.model.decisions.plans import PlanAdopted, UnitRef
from penstock.model.inputs.estimates import JobEstimated
from penstock.model.inputs.external_events import JobSubmitted, NodeJoined, TaskExited, TaskStarted
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.nouns.nodes import NodeSpec
from penstock.model.nouns.types import Estimate, ResourceVector, TaskPlacement
from penstock.model.schema.event import Event, wire_type
from penstock.runtime.settings import Settings
from penstock.runtime.tracing.phases import (
    SHOWN_OTHERWISE,
    JobSpans,
    decide_placement,
    decide_placements,
    trace_decisions,
)
from penstock.runtime.tracing.tracer import Tracing, tracing

SUBMITTED = JobSubmitted(job_id="job-1", spec=JobSpec(command=("train",), workers=2))
ESTIMATED = JobEstimated(
    job_id="job-1", estimate=Estimate(worker=ResourceVector(), confidence=0.1, tier="default", source="test")
)
PLACES = tuple(
    TaskPlacement(task_id=f"job-1/1/{rank}", role="worker", rank=rank, node_id=f"node-{rank}")
    for rank in (0, 1)
)


class Observer:
    """Feeds records and shows the spans as (name, start, end, failed), in the order of their end."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.tracing: Tracing = tracing(
            "placer", Settings(log_url="x", otlp="http://c"), exporter=self.exporter
        )
        self.spans = JobSpans(self.tracing)

    def see(self, *records: tuple[int, list[Event]]) -> None:
        for now_ms, facts in records:
            self.spans.read_back(now_ms, facts)

    def written(self) -> list[tuple[str, int, int, bool]]:
        self.tracing.close()
        return [
            (
                span.name,
                (span.start_time or 0) // 1_000_000,
                (span.end_time or 0) // 1_000_000,
                not span.status.is_ok,
            )
            for span in self.exporter.get_finished_spans()
        ]


@pytest.fixture
def observer() -> Iterator[Observer]:
    made = Observer()
    yield made
    made.tracing.close()


def started(rank: int, now_ms: int) -> tuple[int, list[Event]]:
    task = TaskStarted(node_id=f"node-{rank}", task_id=f"job-1/1/{rank}", token=3, pid=9, started_ms=now_ms)
    return now_ms, [task]


def exited(rank: int, now_ms: int) -> TaskExited:
    return TaskExited(
        node_id=f"node-{rank}",
        task_id=f"job-1/1/{rank}",
        token=3,
        cause="exited",
        exit_code=0,
        started_ms=5,
        exited_ms=now_ms,
    )


def placed(attempt: int = 1) -> PlacementDecided:
    return PlacementDecided(job_id="job-1", attempt=attempt, tasks=PLACES)


def test_a_gang_that_succeeds(observer: Observer) -> None:
    """Two workers start 5 ms apart: the launch lasts until the second one, the run until the end."""
    observer.see((10, [SUBMITTED]), (12, [ESTIMATED, placed()]), started(0, 20), started(1, 25))
    observer.see((90, [exited(0, 90)]), (95, [exited(1, 95), JobEnded(job_id="job-1", outcome="succeeded")]))
    assert observer.written() == [
        ("queue", 12, 12, False),
        ("launch", 12, 25, False),
        ("run", 25, 95, False),
        ("job", 10, 95, False),
    ]


def test_an_attempt_that_fails_while_launching_and_another_that_is_cut_by_its_node(
    observer: Observer,
) -> None:
    """One worker's program is missing; after the back-off the job runs until its node dies, then it gives
    up."""
    observer.see((10, [SUBMITTED]), (12, [ESTIMATED]), (15, [placed()]), started(0, 20))
    observer.see((30, [JobRequeued(job_id="job-1", attempt=1, reason="failed", not_before_ms=1_030)]))
    observer.see(
        (1_031, [JobQueued(job_id="job-1")]), (1_040, [placed(2)]), started(0, 1_050), started(1, 1_051)
    )
    observer.see((1_100, [JobRequeued(job_id="job-1", attempt=2, reason="node_lost")]))
    observer.see((1_200, [JobEnded(job_id="job-1", outcome="timed_out_queued")]))
    assert observer.written() == [
        ("queue", 12, 15, False),
        ("launch", 15, 30, True),
        ("queue", 1_031, 1_040, False),
        ("launch", 1_040, 1_051, False),
        ("run", 1_051, 1_100, True),
        ("queue", 1_100, 1_200, True),
        ("job", 10, 1_200, True),
    ]


def test_a_job_cancelled_before_its_estimate_has_only_a_root(observer: Observer) -> None:
    """The user regrets at once; the estimate comes too late and is rejected by the placer."""
    observer.see((10, [SUBMITTED]), (11, [JobEnded(job_id="job-1", outcome="cancelled")]))
    assert observer.written() == [("job", 10, 11, False)]


def test_a_successor_goes_on_with_the_times_of_the_folded_state(observer: Observer) -> None:
    """The placer is killed while the job launches; its successor folds the ledger and writes the rest."""
    nodes: list[Event] = [
        NodeJoined(node=NodeSpec(node_id=f"node-{n}", boot_id="boot-1", cores=4, host_memory_mib=1_024))
        for n in (0, 1)
    ]
    history: list[tuple[int, list[Event]]] = [
        (1, nodes),
        (10, [SUBMITTED]),
        (12, [ESTIMATED]),
        (15, [placed()]),
        started(0, 20),
    ]
    state = CellState()
    for seq, (now_ms, facts) in enumerate(history, 1):
        begin(state, seq, now_ms, 1)
        for fact in facts:
            evolve(state, fact)
    observer.spans.remember(state.jobs.values())
    observer.see(
        started(1, 50), (95, [exited(0, 95), exited(1, 95), JobEnded(job_id="job-1", outcome="succeeded")])
    )
    assert observer.written() == [("launch", 15, 50, False), ("run", 50, 95, False), ("job", 10, 95, False)]


def test_facts_about_unknown_jobs_write_nothing(observer: Observer) -> None:
    """A successor that remembers nothing reads the end of a job that began before its time."""
    observer.see((12, [ESTIMATED, placed()]), started(0, 20), (30, [JobQueued(job_id="job-1")]))
    observer.see((95, [JobEnded(job_id="job-1", outcome="succeeded")]))
    assert observer.written() == []


def test_nothing_is_stored_of_jobs_that_are_over_nor_without_a_listener(observer: Observer) -> None:
    """Months of jobs pass through one placer."""
    for number in range(50):
        renamed: list[Event] = [
            msgspec.structs.replace(fact, job_id=f"job-{number}") for fact in (SUBMITTED, ESTIMATED, placed())
        ]
        ended = JobEnded(job_id=f"job-{number}", outcome="failed")
        observer.see((number, renamed), (number + 1, [ended]))
    assert not observer.spans._jobs
    assert not observer.spans._job_of_task
    silent = JobSpans(Tracing())
    silent.read_back(1, [SUBMITTED])
    assert not silent._jobs


def test_every_decision_has_a_span(observer: Observer) -> None:
    """Whoever traces a cell finds each decision there: with its explanation, as the end of a job's phase, or
    by itself. Those about a job lie in its trace, the others in one of their own; written twice after a crash
    they are the same."""
    facts = [fact for _, fact in sorted(EXAMPLES.items()) if is_decision(fact)]
    for _ in range(2):
        trace_decisions(observer.tracing, 7, 1, facts)
    observer.tracing.close()
    spans = observer.exporter.get_finished_spans()
    others = [fact for fact in facts if type(fact) not in SHOWN_OTHERWISE]
    assert [span.name for span in spans] == 2 * [fact.TYPE.removeprefix("penstock.") for fact in others]
    assert len({span.context.span_id for span in spans if span.context}) == len(others)
    found = {span.name: dict(span.attributes or {}) for span in spans}
    adopted = EXAMPLES[wire_type(PlanAdopted)]
    assert isinstance(adopted, PlanAdopted)
    assert found["plan.adopted"]["penstock.units"] == len(adopted.units)
    assert [span.parent is None for span in spans] == 2 * [not hasattr(fact, "job_id") for fact in others]
    assert {"move.given_up", "group.decided", "batch_window.opened"} <= found.keys()


def test_a_decision_to_move_says_from_where(observer: Observer) -> None:
    """It is no placement yet: that comes with the end of what is stopped, and what this cost."""
    moved = Moved(seq=7, attempt=1, nodes=("node-0",))
    fields = {
        "job_id": "job-1",
        "profile": "fifo",
        "candidates": (Candidate(nodes=("node-1",), score=0.0),),
        "margin": None,
    }
    why = PlacementExplanation(
        **fields, feasible=1, rejected={}, proposer="ops/ana", reason="fans", moved=moved
    )  # type: ignore[arg-type]
    decide_placement(observer.tracing, 7, 1, why)
    there = replace(why, moved=replace(moved, stop_ms=900, lost_ms=0))
    decide_placement(observer.tracing, 9, 2, there)
    observer.tracing.close()
    found = [dict(span.attributes or {}) for span in observer.exporter.get_finished_spans()]
    names = ("penstock.outcome", "penstock.proposer", "penstock.moved_from", "penstock.stop_ms")
    assert [tuple(span.get(name) for name in names) for span in found] == [
        ("moving", "ops/ana", "node-0", None),
        ("placed", "ops/ana", "node-0", 900),
    ]


def test_what_a_plan_has_placed_links_to_its_span(observer: Observer) -> None:
    """The batcher has planned two members of a group, and a third job was placed one by one. In Jaeger both
    members lead to one plan."""
    unit = UnitRef(proposer="batcher", proposal_id="regroup-5", unit=0)
    facts = [
        PlacementDecided(job_id=name, attempt=1, tasks=PLACES[:1], unit=of)
        for name, of in (("job-1", unit), ("job-2", unit), ("job-3", None))
    ]
    best = Candidate(nodes=("node-0",), score=0.0)
    whys = [
        PlacementExplanation(
            job_id=fact.job_id, profile="fifo", candidates=(best,), margin=None, feasible=1, rejected={}
        )
        for fact in facts
    ]
    decide_placements(observer.tracing, 7, 1, whys, facts)
    observer.tracing.plan("batcher", "regroup-5", 1, 2, {"penstock.units": 1})
    observer.tracing.close()
    *decided, plan = observer.exporter.get_finished_spans()
    links = [[(link.context.trace_id, link.context.span_id) for link in span.links] for span in decided]
    assert plan.parent is None
    assert links == [[(plan.context.trace_id, plan.context.span_id)]] * 2 + [[]]


def test_the_decide_span_repeats_the_explanation(observer: Observer) -> None:
    """An engineer finds the answer of `penstock why` in Jaeger."""
    why = PlacementExplanation(
        job_id="job-1",
        profile="liquid",
        candidates=(
            Candidate(nodes=("node-0", "node-0", "node-1"), score=0.25),
            Candidate(nodes=("node-1",), score=0.5),
        ),
        margin=0.25,
        feasible=2,
        rejected={"gpus_busy": 5},
    )
    decide_placement(observer.tracing, 7, 1, why)
    observer.tracing.close()
    (span,) = observer.exporter.get_finished_spans()
    found = dict(span.attributes or {})
    assert found["penstock.winner"] == "node-0,node-1"
    assert (found["penstock.score"], found["penstock.margin"], found["penstock.ledger_seq"]) == (
        0.25,
        0.25,
        7,
    )
    assert (found["penstock.candidates"], found["penstock.feasible"]) == (7, 2)
