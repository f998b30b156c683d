"""One realistic example of every event, as the golden files of `schemas/examples` hold them.

They are one scenario. On 2026-01-05 alice submits a ResNet-50 run with two workers and one parameter server;
it is estimated, placed on two nodes, runs, checkpoints and exits, while a rack loses power, a batcher, a
migrator and a contention-guard propose, and a record is written that no reader can decode.
Every value is a constant: generating twice gives the same bytes.
The placer's decisions are in `infra.codegen.decision_examples`.
"""

from collections.abc import Mapping

import msgspec

from infra.codegen.decision_examples import DECISIONS, EXPLANATION
from infra.codegen.scenario import (
    BOOT,
    JOB,
    MINUTE_MS,
    NEXT_BOOT,
    NEXT_NODE,
    NODE,
    NODE_SPEC,
    PLACES,
    SERVER,
    SPEC,
    START_MS,
    TOKEN,
    WORKER,
    WORKER_PLACE,
)
from penstock.model.decisions import ledger_events
from penstock.model.decisions.adjustments import TaskAdjusted
from penstock.model.decisions.orders import (
    AnswerJoin,
    CheckpointTask,
    HandOverCheckpoint,
    Peer,
    ProbeNode,
    SetBandwidth,
    SetCores,
    StartTask,
    StopTask,
)
from penstock.model.inputs import dead_letters, external_events
from penstock.model.inputs.amendments import AmendedFact, LedgerAmended
from penstock.model.inputs.command_runs import JobCommandRun
from penstock.model.inputs.estimates import (
    Bounds,
    EtaEstimated,
    JobEstimated,
    ModelTrained,
    Probe,
    ProfilePlanned,
    StagesProfiled,
)
from penstock.model.inputs.followers import FollowerChanged
from penstock.model.inputs.saves import SaveRefused
from penstock.model.nouns.types import Estimate, ResourceVector, Usage
from penstock.model.proposals import (
    CoresProposed,
    MigrationProposed,
    PlanProposed,
    ProposedJob,
    ProposedUnit,
    ReadVersion,
    ThrottleProposed,
)
from penstock.model.schema.event import Event, wire_type
from penstock.model.wire.codec import as_written, encode

_JOBS_AND_ESTIMATES: tuple[Event, ...] = (
    external_events.JobSubmitted(job_id=JOB, spec=SPEC),
    external_events.JobCancelRequested(job_id=JOB, reason="wrong learning rate"),
    JobEstimated(
        job_id=JOB,
        estimate=Estimate(
            worker=ResourceVector(
                gpus=1,
                cores=4,
                host_memory_mib=8_192,
                gpu_memory_mib=9_830,
                gpu_utilisation_percent=87.5,
                bandwidth_mbps=3_200,
            ),
            parameter_server=ResourceVector(cores=2, host_memory_mib=2_048, bandwidth_mbps=6_400),
            run_ms=42 * MINUTE_MS,
            confidence=0.8,
            tier="history",
            source="median of 12 finished runs of alice with the same command, model and batch size",
        ),
    ),
    ModelTrained(
        model_version="memory-forest-2026-01-05",
        sha256="9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
        runs=1_204,
        first_run_ms=START_MS - 30 * 24 * 60 * MINUTE_MS,
        last_run_ms=START_MS - MINUTE_MS,
        metrics={"gpu_memory_mape": 0.061, "run_ms_mape": 0.18},
    ),
    EtaEstimated(
        job_id=JOB,
        attempt=1,
        at_ms=START_MS + 12 * MINUTE_MS,
        done=9_000,
        left_ms=Bounds(middle=1_920_000.0, low=1_800_000.0, high=2_160_000.0),
        steps=Bounds(middle=32_000.0, low=32_000.0, high=32_000.0),
        step_ms=Bounds(middle=60.0, low=56.25, high=67.5),
        level=0.9,
        source="iterations asked for",
        model_version="steps-9f86d081884c",
    ),
    ProfilePlanned(
        model="resnet50",
        gpu_model="A100-40GB",
        owner="alice",
        model_version="steps-9f86d081884c",
        probes=(
            Probe(gpus_per_node=(1,), local_batch=32.0, spread_before=0.5, spread_after=0.25),
            Probe(gpus_per_node=(4, 4), local_batch=64.0, spread_before=0.25, spread_after=0.125),
        ),
    ),
    StagesProfiled(
        model="resnet50",
        batch_size=64,
        gpus=2,
        storage_ms=6.5,
        cpu_ms=12.0,
        gpu_ms=38.25,
        network_ms=4.25,
        idle_ms=0.0,
        iteration_ms=61.0,
        iterations=20,
    ),
    FollowerChanged(job_id=JOB, gateway="gateway-5b1e", connected=False, after=812, silent_ms=10_000),
    external_events.JobHoldRequested(job_id=JOB, reason="its data are being copied", by="ops/on-call"),
    external_events.JobReleaseRequested(job_id=JOB, by="ops/on-call"),
    external_events.JobCheckpointRequested(job_id=JOB, reason="before the upgrade", by="ops/on-call"),
    JobCommandRun(job_id=JOB, task_id=WORKER, command="nvidia-smi -L", exit_code=0, by="ops/on-call"),
)

_NODES: tuple[Event, ...] = (
    external_events.NodeJoined(
        node=NODE_SPEC, tasks=(external_events.RunningTask(task_id=WORKER, token=TOKEN),)
    ),
    external_events.NodeChanged(node=msgspec.structs.replace(NODE_SPEC, gpus=NODE_SPEC.gpus[:3])),
    external_events.NodeLeft(node_id=NEXT_NODE, boot_id=NEXT_BOOT, proof="deleted"),
    external_events.NodeCordoned(
        node_id=NEXT_NODE, drain=True, by="ada@workstation-7", reason="fans are to be replaced"
    ),
    external_events.NodeUncordoned(node_id=NEXT_NODE, by="ada@workstation-7", reason="fans are new"),
    external_events.NodeSuspected(node_id=NEXT_NODE, reason="its watch broke and did not come back"),
    external_events.ProbeSent(node_id=NEXT_NODE, probe=TOKEN),
    external_events.GpuFaulted(
        node_id=NODE, gpu=3, fault="xid", code=79, detail="GPU has fallen off the bus"
    ),
    external_events.TaskStarted(
        node_id=NODE, task_id=WORKER, token=TOKEN, pid=28_114, started_ms=START_MS + 2 * MINUTE_MS
    ),
    external_events.TaskPhaseChanged(
        node_id=NODE, task_id=WORKER, token=TOKEN, phase="train", at_ms=START_MS + 3 * MINUTE_MS
    ),
    external_events.TaskCheckpointed(
        node_id=NODE,
        task_id=WORKER,
        token=TOKEN,
        at_ms=START_MS + 20 * MINUTE_MS,
        path="checkpoints/epoch-1.npz",
    ),
    SaveRefused(
        node_id=NODE,
        task_id=WORKER,
        token=TOKEN,
        at_ms=START_MS + 20 * MINUTE_MS,
        reason="no process of it has called penstock.sdk.checkpoint yet",
    ),
    external_events.CheckpointFetched(
        node_id=NODE,
        task_id=WORKER,
        token=TOKEN,
        at_ms=START_MS + 2 * MINUTE_MS,
        from_node=NEXT_NODE,
        path="/var/lib/penstock/checkpoints/resnet/attempt-1-iteration-9000",
        iteration=9_000,
        size_bytes=204_000_000,
        fetch_ms=1_350,
    ),
    external_events.WorkProgressed(
        node_id=NODE, jobs=(external_events.JobProgress(job_id=JOB, attained_s=1_080.5, remaining_s=1_440.0),)
    ),
    external_events.TaskExited(
        node_id=NODE,
        task_id=WORKER,
        token=TOKEN,
        cause="exited",
        exit_code=0,
        started_ms=START_MS + 2 * MINUTE_MS,
        exited_ms=START_MS + 44 * MINUTE_MS,
        usage=Usage(
            cpu_ms=9_870_000,
            host_memory_mib=6_911,
            gpu_memory_mib=9_774,
            gpu_utilisation_percent=86.25,
            gpu_utilisation_std=6.5,
        ),
    ),
    external_events.StepsMeasured(
        node_id=NODE,
        task_id=WORKER,
        token=TOKEN,
        at_ms=START_MS + 12 * MINUTE_MS,
        done=9_000,
        total=41_000,
        steps=500,
        step_ms=60.5,
        loss=1.8125,
    ),
    TaskAdjusted(
        node_id=NODE,
        task_id=WORKER,
        token=TOKEN,
        order_token=TOKEN + 40,
        what="cores",
        enforced="cpuset",
    ),
    external_events.StagesMeasured(
        node_id=NODE,
        task_id=WORKER,
        token=TOKEN,
        at_ms=START_MS + 5 * MINUTE_MS,
        iterations=1,
        samples=(
            external_events.StageSample(lasted_ms=6.5, storage=1.0),
            external_events.StageSample(lasted_ms=54.5, cpu=0.25, gpu=1.0),
        ),
    ),
    external_events.OrderRefused(
        node_id=NODE,
        task_id=WORKER,
        token=TOKEN,
        reason="stale_token",
        highest_token=TOKEN + 5,
        detail=f"GPU 0 already obeyed token {TOKEN + 5}",
    ),
    external_events.TelemetrySampled(
        node_id=NODE,
        task_id=WORKER,
        at_ms=START_MS + 12 * MINUTE_MS,
        gpu=0,
        gpu_utilisation_percent=34.5,
        gpu_memory_mib=9_774,
        host_memory_mib=6_911,
        cpu_percent=388.0,
        loss=1.8125,
    ),
)

_READ = (
    ReadVersion(kind="job", id=JOB, version=3),
    ReadVersion(kind="node", id=NODE, version=17),
)
_PROPOSALS: tuple[Event, ...] = (
    PlanProposed(
        proposal_id="plan-000412",
        proposer="batcher-1",
        read=_READ,
        units=(
            ProposedUnit(
                jobs=(ProposedJob(job_id=JOB, nodes=(NODE,) * len(PLACES)),),
                explanation="second of three in a batch that ends 40 s sooner than one by one",
            ),
        ),
        valid_until_ms=START_MS + 5 * MINUTE_MS,
    ),
    MigrationProposed(
        proposal_id="migration-000031",
        proposer="migrator-1",
        read=_READ,
        job_id=JOB,
        nodes=(NEXT_NODE,) * len(PLACES),
        reason="converges; a newer job gains more on node-a1",
    ),
    CoresProposed(
        proposal_id="cores-000207",
        proposer="guard-1",
        read=_READ,
        task_id=WORKER,
        cores=6,
        reason="its GPU waits for data: utilisation 34.5 % at 4 cores",
        cause="probe",
    ),
    ThrottleProposed(
        proposal_id="throttle-000018",
        proposer="guard-1",
        read=_READ,
        task_id=SERVER,
        memory_bandwidth_percent=60,
        reason="its memory traffic slows the worker beside it",
    ),
)

_DEAD_LETTERS: tuple[Event, ...] = (
    LedgerAmended(
        offset=90_312,
        seq=90_300,
        sha256="9f" * 32,
        facts=(
            AmendedFact(
                n=1,
                data='{"timer_id":"cell:ending","at_ms":9007199254740992,'
                '"about":{"kind":"ending","id":"cell","attempt":0}}',
            ),
        ),
        by="ops/on-call",
        reason="a training of 2^53 ms: its timer lies beyond all times",
        at_ms=START_MS + 40 * MINUTE_MS,
    ),
    dead_letters.DeadLettered(
        source_topic="penstock.nodes.v1",
        source_partition=0,
        source_offset=90_210,
        service="placer",
        reason="invalid",
        detail="token: Field required",
        headers={"ce_specversion": "1.0", "ce_id": "e-1", "ce_type": "penstock.task.started.v1"},
        size_bytes=52,
        sha256="19be0fdfe9e7d6308dbf1e3b19849fac5563fb5caa2ca1ae02224293553a2a4d",
        outline='{"node_id": "node-a1", "task_id": "job-1.1.w0", "pid": "<number>"}',
    ),
)


def _entry(fact: Event) -> ledger_events.FactEntry:
    """The fact as a record carries it."""
    return ledger_events.FactEntry(type=wire_type(type(fact)), data=as_written(fact))


_LEDGER: tuple[Event, ...] = (
    ledger_events.LedgerRecord(
        seq=TOKEN,
        parent="4b227777d4dd1fc61c6f884f48641d02",
        term=3,
        now_ms=START_MS + MINUTE_MS,
        cause=ledger_events.InputCause(
            topic="penstock.estimates.v1", partition=0, offset=88_123, event_id=f"estimate-{JOB}"
        ),
        outcome="committed",
        facts=tuple(_entry(fact) for fact in (_JOBS_AND_ESTIMATES[2], DECISIONS[1])),
        explanation=(EXPLANATION,),
    ),
)

_ORDERS: tuple[Event, ...] = (
    StartTask(
        token=TOKEN,
        node_id=NODE,
        task_id=WORKER,
        job_id=JOB,
        attempt=1,
        boot_id=BOOT,
        command=SPEC.command,
        env=SPEC.env,
        workdir=SPEC.workdir,
        place=WORKER_PLACE,
        peers=(
            Peer(rank=0, role="worker", node_id=NODE, address="10.0.1.11"),
            Peer(rank=1, role="worker", node_id=NEXT_NODE, address="10.0.1.12"),
            Peer(rank=2, role="ps", node_id=NODE, address="10.0.1.11"),
        ),
        rendezvous_port=29_411,
        grace_ms=SPEC.grace_ms,
    ),
    AnswerJoin(
        token=TOKEN + 9,
        node_id=NODE,
        boot_id="77b0aa12-boot",
        incarnation=START_MS,
        verdict="other_machine",
        machine_id="4c4c4544004b3510",
        highest_incarnation=START_MS - MINUTE_MS,
    ),
    ProbeNode(token=TOKEN + 4, node_id=NEXT_NODE, incarnation=START_MS),
    StopTask(token=TOKEN + 5, node_id=NODE, task_id=WORKER, grace_ms=10_000, reason="cancelled by alice"),
    HandOverCheckpoint(
        token=TOKEN, node_id=NEXT_NODE, job_id=JOB, attempt=2, to_node=NODE, public_key="A" * 86
    ),
    CheckpointTask(token=TOKEN + 6, node_id=NODE, task_id=WORKER),
    SetCores(token=TOKEN + 7, node_id=NODE, task_id=WORKER, cores=(0, 1, 2, 3, 12, 13)),
    SetBandwidth(token=TOKEN + 8, node_id=NODE, task_id=SERVER, memory_bandwidth_percent=60),
)

EXAMPLES: Mapping[str, Event] = {
    wire_type(type(example)): example
    for example in (
        *_JOBS_AND_ESTIMATES,
        *_NODES,
        *_PROPOSALS,
        *_DEAD_LETTERS,
        *DECISIONS,
        *_LEDGER,
        *_ORDERS,
    )
}
"""Wire type → example, one of every current event."""


def example_bytes(example: Event) -> bytes:
    """The content of the golden file: exactly the bytes on the wire, and a newline for editors."""
    return encode(example) + b"\n"
