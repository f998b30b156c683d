"""How long the placer is busy with one proposed plan: 200 jobs of three tasks on 128 nodes of 8 GPUs. `python
-m tests.bench.scheduling.plans`.

From the record's bytes as they are read to those of the ledger records that answer it, in ms of the
processor: decode, judge, fold, explain, encode and hash. More than 512 tasks take a second record.
"""

import time
from statistics import median
from typing import NamedTuple

from penstock.model.decisions.ledger_events import PlacementDecided, ProposalAnswered, TermStarted, TimerFired
from penstock.model.inputs.estimates import JobEstimated
from penstock.model.inputs.external_events import JobSubmitted, NodeJoined
from penstock.model.nouns.settings import PlacerSettings
from penstock.model.nouns.types import MAX_GPUS_PER_NODE
from penstock.model.proposals import PlanProposed, ProposedJob, ProposedUnit, ReadVersion
from penstock.model.schema.event import wire_type
from penstock.model.wire.codec import decode, encode
from penstock_services.placer.core.common import RESCHEDULE
from penstock_services.placer.core.recorder import Recorder
from tests.support.cluster.driver import estimate, job_spec, node_spec

JOBS, WORKERS, NODES, GPUS = 200, 3, 128, 8
WINDOW_MS = 60_000
REPEATS = 7


class Measured(NamedTuple):
    """One plan."""

    busy_ms: float
    plan_bytes: int
    record_bytes: int
    """Of its largest record."""
    placed: int
    """Jobs."""
    refused: int
    """Units."""


def plan_of(jobs: int, nodes: int) -> PlanProposed:
    """Each job on three nodes of its own choice, with what was read of it and a sentence."""
    names = [f"node-{number:04}" for number in range(nodes)]
    units = tuple(
        ProposedUnit(
            jobs=(
                ProposedJob(
                    job_id=f"job-{number:06}",
                    nodes=tuple(names[(WORKERS * number + rank) % nodes] for rank in range(WORKERS)),
                ),
            ),
            explanation="second of a batch that ends 40 s sooner than its jobs would one by one, with the "
            "least network cost",
        )
        for number in range(jobs)
    )
    read = tuple(ReadVersion(kind="job", id=unit.jobs[0].job_id, version=1) for unit in units)
    return PlanProposed(proposal_id="plan-1", proposer="batcher", units=units, read=read)


def measure(jobs: int = JOBS, nodes: int = NODES) -> Measured:
    """One cell, in which all jobs wait for the plan."""
    values: list[bytes] = []
    cell = Recorder(values.append)
    settings = PlacerSettings(profile="liquid", batch_window_ms=WINDOW_MS, batch_arrivals=2)
    cell.record(TermStarted(term=1, placer_id="p", settings=settings), 1)
    for number in range(nodes):
        cell.record(
            NodeJoined(node=node_spec(f"node-{number:04}", min(GPUS, MAX_GPUS_PER_NODE), cores=64)), 1
        )
    for job_id in ("first", "second", *(f"job-{number:06}" for number in range(jobs))):
        cell.record(JobSubmitted(job_id=job_id, spec=job_spec(workers=WORKERS)), 2)
        cell.record(JobEstimated(job_id=job_id, estimate=estimate(1)), 2)
    plan = plan_of(jobs, nodes)
    wire, before = encode(plan), len(values)
    began_s = time.process_time()
    steps = [cell.record(decode(wire_type(PlanProposed), wire), 3)]
    while (due := cell.state.next_timer()) is not None and due == (3, RESCHEDULE):
        steps.append(cell.record(TimerFired(timer_id=RESCHEDULE), 3))
    busy_ms = (time.process_time() - began_s) * 1_000
    facts = [fact for step in steps for fact in step.facts]
    [answer] = [fact for fact in facts if isinstance(fact, ProposalAnswered)]
    placed = sum(isinstance(fact, PlacementDecided) and fact.unit is not None for fact in facts)
    return Measured(busy_ms, len(wire), max(map(len, values[before:])), placed, len(answer.refused))


def main() -> None:
    found = [measure() for _ in range(REPEATS)]
    best = found[0]
    print(f"{best.placed} of {JOBS} jobs placed, {best.refused} units refused")
    print(f"plan {best.plan_bytes:,} bytes, largest ledger record {best.record_bytes:,} bytes")
    print(
        f"placer busy {min(one.busy_ms for one in found):.1f} ms at best, "
        f"{median(one.busy_ms for one in found):.1f} ms in the median"
    )


if __name__ == "__main__":
    main()
