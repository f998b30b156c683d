"""Examples of the ledger events that record the placer's decisions, part of the scenario of
`infra.codegen.examples`."""

import msgspec

from infra.codegen.scenario import (
    JOB,
    MINUTE_MS,
    NEXT_NODE,
    NEXT_WORKER,
    NODE,
    OTHER_JOB,
    PLACES,
    SERVER,
    START_MS,
    TOKEN,
    WORKER,
)
from penstock.model.decisions import ledger_events
from penstock.model.decisions.adjustments import BandwidthDecided, CheckpointDecided, CoresDecided
from penstock.model.decisions.arrays import ArraysSized, CoresReclaimed
from penstock.model.decisions.distrust import NodeDistrusted, NodePutOnProbation, NodeTrusted
from penstock.model.decisions.groups import GroupDecided, GroupDissolved, KindsApart, Shortfall
from penstock.model.decisions.moves import JobConverged, MoveDecided, MoveGivenUp
from penstock.model.decisions.plans import BatchWindowClosed, BatchWindowOpened, PlanAdopted, PlanUnit
from penstock.model.nouns.settings import PlacerSettings
from penstock.model.schema.event import Event
from penstock.model.schema.topics import Topic

EXPLANATION = ledger_events.PlacementExplanation(
    job_id=JOB,
    profile="liquid",
    candidates=(
        ledger_events.Candidate(nodes=(NODE, NEXT_NODE, NODE), score=0.21875),
        ledger_events.Candidate(nodes=(NODE, "node-b4", NODE), score=0.34375),
    ),
    margin=0.125,
    feasible=2,
    rejected={"gpu_memory": 1, "gpus_busy": 5},
)
DECISIONS: tuple[Event, ...] = (
    ledger_events.TermStarted(term=3, placer_id="placer-7d9c", settings=PlacerSettings(seed=42)),
    ledger_events.PlacementDecided(job_id=JOB, attempt=1, tasks=PLACES),
    ledger_events.StopDecided(job_id=JOB, attempt=1, reason="cancelled", grace_ms=10_000),
    CoresDecided(
        job_id=JOB,
        attempt=1,
        task_id=WORKER,
        node_id=NODE,
        by="guard-1",
        reason="its GPU waits for data: utilisation 34.5 % at 4 cores",
        cores=(0, 1, 2, 3, 8, 9),
        cause="probe",
    ),
    MoveDecided(
        job_id=JOB,
        attempt=1,
        tasks=tuple(
            msgspec.structs.replace(
                place,
                task_id=place.task_id.replace(".1.", ".2."),
                node_id=NEXT_NODE,
                gpus=(4 + rank,) if place.gpus else (),
                cores=tuple(range(4 * rank, 4 * rank + len(place.cores))),
            )
            for rank, place in enumerate(PLACES)
        ),
        by="migrator-1",
        reason="converges; a newer job gains more on node-a1",
    ),
    GroupDecided(
        group_id="group-4711-0",
        job_ids=(JOB, OTHER_JOB),
        by="batcher-1",
        reason="one computes while the other reads its data: 1.6 times the work of both in turn",
    ),
    GroupDissolved(
        group_id="group-4711-0",
        job_ids=(JOB, OTHER_JOB),
        short=(Shortfall(job_id=JOB, promised=0.6, measured=0.02),),
        leaves=(OTHER_JOB,),
        apart=(KindsApart(one="vision bert 16 2", other="vision resnet50 64 2"),),
        until_ms=1_770_086_400_000,
        reason=f"{JOB} has had 2 % of its speed for a minute, promised were 60 %",
    ),
    MoveGivenUp(job_id=JOB, attempt=1, reason=f"{NEXT_NODE} is cordoned"),
    JobConverged(
        job_id=JOB,
        attempt=1,
        moves=False,
        by="migrator",
        reason=f"converged; {NODE} has the lowest score, 3.5",
    ),
    ArraysSized(
        cores_per_gpu_milli=2_600,
        large_nodes=12,
        reason="2.6 cores per GPU; up to 48 GPUs at once for jobs of 4 and more",
    ),
    CoresReclaimed(
        job_id=JOB,
        attempt=1,
        by_job_id=OTHER_JOB,
        reason=f"{OTHER_JOB} needs 4 of the cores that it had borrowed on {NODE}",
    ),
    CheckpointDecided(
        job_id=JOB,
        attempt=1,
        task_id=WORKER,
        node_id=NODE,
        by="ops/on-call",
        reason="before the upgrade",
    ),
    BandwidthDecided(
        job_id=JOB,
        attempt=1,
        task_id=SERVER,
        node_id=NEXT_NODE,
        by="guard-1",
        reason="its memory traffic slows the worker beside it",
        memory_bandwidth_percent=60,
    ),
    ledger_events.JobPreempted(
        job_id=JOB, attempt=1, by_job_id=OTHER_JOB, reason=f"{OTHER_JOB} has waited beyond its allowance"
    ),
    ledger_events.JobRequeued(job_id=JOB, attempt=1, reason="failed", not_before_ms=START_MS + 5_000),
    ledger_events.JobQueued(job_id=JOB),
    ledger_events.JobFoundUnschedulable(
        job_id=OTHER_JOB, reason="needs 8 GPUs on one node; the largest node of the cell has 4"
    ),
    ledger_events.JobFoundSchedulable(job_id=OTHER_JOB),
    PlanAdopted(
        units=(
            PlanUnit(job_id=JOB, nodes=(NODE, NEXT_NODE)),
            PlanUnit(job_id=OTHER_JOB, nodes=(NODE,)),
        )
    ),
    ledger_events.JobsRanked(
        ranks=(ledger_events.JobRank(job_id=JOB, level=1, chosen=True, position=4_711 << 12),)
    ),
    ledger_events.JobEnded(job_id=JOB, outcome="failed", exit_code=3, reason="worker 0 exited with code 3"),
    ledger_events.TaskLost(
        task_id=NEXT_WORKER, node_id=NEXT_NODE, reason="node-a2 came back with another boot id"
    ),
    ledger_events.NodeLost(node_id=NEXT_NODE),
    ledger_events.NodeRestored(node_id=NEXT_NODE),
    NodeDistrusted(
        node_id=NEXT_NODE,
        reason="3 jobs of 3 owners failed there within 12 s, each soon after its start, and none succeeded "
        "in between",
        pause_ms=MINUTE_MS,
        gpus=(0,),
    ),
    NodePutOnProbation(node_id=NEXT_NODE),
    NodeTrusted(node_id=NEXT_NODE, reason=f"{JOB} ran there"),
    ledger_events.NodeProbed(node_id=NEXT_NODE),
    ledger_events.ProbeExpired(node_id=NEXT_NODE, probe=TOKEN),
    ledger_events.NodeJoinRefused(
        node_id=NODE, boot_id="77b0aa12-boot", incarnation=START_MS, reason="other_machine"
    ),
    ledger_events.CellFrozen(reason="33 of 48 nodes vanished within 60 s"),
    ledger_events.CellThawed(reason="31 of 33 nodes are back"),
    ledger_events.ChoiceFailed(
        profile="liquid", job_id=JOB, error="KeyError: 'rack-7' (penstock.policies.liquid, line 188)"
    ),
    ledger_events.TimerSet(
        timer_id=f"{JOB}:queue_timeout",
        at_ms=START_MS + 10 * MINUTE_MS,
        about=ledger_events.TimerSubject(kind="queue_timeout", id=JOB, attempt=0),
    ),
    ledger_events.TimerFired(timer_id=f"{JOB}:queue_timeout"),
    ledger_events.ProposalAnswered(
        proposal_id="plan-000412",
        proposer="batcher-1",
        verdict="refused",
        reason="stale",
        detail=f"{JOB} is at version 4, the plan was made at 3",
    ),
    BatchWindowOpened(until_ms=START_MS + 2_000),
    BatchWindowClosed(reason="answered"),
    ledger_events.InputAccepted(
        topic=Topic.JOBS, partition=0, position=4_711, offset=0, end=12, reason="the topic was created anew"
    ),
    ledger_events.LedgerAccepted(epoch=1, nodes_offset=815, reason="restored from Monday's backup"),
)
