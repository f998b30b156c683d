"""Builders of cells for tests: facts folded by `evolve`, nothing written behind its back.

Every call is one record of the ledger: `seq` and time move on by one step.
"""

from collections.abc import Sequence

from penstock.cluster.assignment import Plan
from penstock.cluster.chance import LazyRng
from penstock.cluster.view import assign
from penstock.ledger.fold.evolve import begin, evolve
from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.state import CellState
from penstock.model.decisions import ledger_events
from penstock.model.inputs import external_events
from penstock.model.inputs.estimates import JobEstimated
from penstock.model.jobs.job_parts import RetryPolicy
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.nouns.nodes import Gpu, NodeSpec
from penstock.model.nouns.settings import PlacerSettings
from penstock.model.nouns.types import Estimate, ResourceVector
from penstock.model.schema.event import Event
from penstock.scheduling.profiles import profile_for
from penstock.scheduling.stages.protocols import Policy

STEP_MS = 10  # between two records


def node(
    node_id: str = "n0",
    *,
    gpus: int = 8,
    rack: str = "rack-0",
    domain: str = "domain-0",
    cores: int = 64,
    host_memory_mib: int = 262_144,
    bandwidth_mbps: int = 10_000,
    gpu_model: str = "V100",
    gpu_memory_mib: int = 16_384,
    boot_id: str = "boot-1",
) -> NodeSpec:
    """A node of identical GPUs."""
    return NodeSpec(
        node_id=node_id,
        boot_id=boot_id,
        rack=rack,
        domain=domain,
        cores=cores,
        host_memory_mib=host_memory_mib,
        bandwidth_mbps=bandwidth_mbps,
        gpus=tuple(
            Gpu(index=i, uuid=f"{node_id}-gpu{i}", model=gpu_model, memory_mib=gpu_memory_mib)
            for i in range(gpus)
        ),
    )


def apply(state: CellState, *events: Event) -> None:
    """Folds the events as the facts of one record."""
    begin(state, state.seq + 1, state.now_ms + STEP_MS, max(state.term, 1))
    for event in events:
        evolve(state, event)


def cell_of(specs: Sequence[NodeSpec], settings: PlacerSettings | None = None) -> CellState:
    """A cell with these nodes, in this order, under a started term."""
    state = CellState()
    apply(
        state,
        ledger_events.TermStarted(term=1, placer_id="placer-1", settings=settings or PlacerSettings()),
    )
    for spec in specs:
        apply(state, external_events.NodeJoined(node=spec))
    return state


def cell(
    nodes: int = 3,
    gpus: int = 8,
    racks: int = 1,
    domains: int = 1,
    settings: PlacerSettings | None = None,
    *,
    cores: int = 64,
    host_memory_mib: int = 262_144,
    gpu_memory_mib: int = 16_384,
) -> CellState:
    """Equal nodes n0, n1, …, dealt to racks in turn, and racks to domains in turn."""
    return cell_of(
        [
            node(
                f"n{i}",
                gpus=gpus,
                rack=f"rack-{i % racks}",
                domain=f"domain-{i % racks % domains}",
                cores=cores,
                host_memory_mib=host_memory_mib,
                gpu_memory_mib=gpu_memory_mib,
            )
            for i in range(nodes)
        ],
        settings,
    )


def need(
    gpus: int = 1,
    cores: int = 1,
    host_memory_mib: int = 1_024,
    gpu_memory_mib: int = 1_024,
    bandwidth_mbps: int = 0,
    gpu_share_milli: int = 1_000,
) -> ResourceVector:
    """What one task needs."""
    return ResourceVector(
        gpu_share_milli=gpu_share_milli,
        gpus=gpus,
        cores=cores,
        host_memory_mib=host_memory_mib,
        gpu_memory_mib=gpu_memory_mib,
        bandwidth_mbps=bandwidth_mbps,
    )


def estimate(
    worker: ResourceVector | None = None, parameter_server: ResourceVector | None = None
) -> Estimate:
    return Estimate(
        worker=worker or need(),
        parameter_server=parameter_server or need(gpus=0),
        confidence=1.0,
        tier="user",
        source="asked by the user",
    )


def submitted(
    state: CellState,
    job_id: str = "job-1",
    *,
    workers: int = 1,
    parameter_servers: int = 0,
    gpu_models: tuple[str, ...] = (),
    max_attempts: int = 1,
) -> JobState:
    """Submits a job; it waits for its estimate."""
    spec = JobSpec(
        command=("true",),
        workers=workers,
        parameter_servers=parameter_servers,
        gpu_models=gpu_models,
        retry=RetryPolicy(max_attempts=max_attempts),
    )
    apply(state, external_events.JobSubmitted(job_id=job_id, spec=spec))
    return state.jobs[job_id]


def queued(
    state: CellState,
    job_id: str = "job-1",
    *,
    workers: int = 1,
    parameter_servers: int = 0,
    gpu_models: tuple[str, ...] = (),
    max_attempts: int = 1,
    worker: ResourceVector | None = None,
    parameter_server: ResourceVector | None = None,
) -> JobState:
    """Submits a job and gives it its estimate; it waits in the queue."""
    job = submitted(
        state,
        job_id,
        workers=workers,
        parameter_servers=parameter_servers,
        gpu_models=gpu_models,
        max_attempts=max_attempts,
    )
    apply(state, JobEstimated(job_id=job_id, estimate=estimate(worker, parameter_server)))
    return job


def placed(state: CellState, job: JobState, policy: Policy | None = None) -> Plan:
    """Lets a policy (the settings' own, if none is given) place the job, and folds the decision."""
    chosen = policy or profile_for(state.settings).place
    plan = chosen.place(state, job, LazyRng(state.settings.seed, f"place-{job.job_id}"))
    assert plan is not None, f"{job.job_id} does not fit"
    apply(state, assign(state, job, plan))
    return plan


def placed_on(state: CellState, job: JobState, *nodes: str) -> None:
    """Puts the job on these nodes, in rank order."""
    explanation = ledger_events.PlacementExplanation(
        job_id=job.job_id, profile="test", candidates=(), margin=None, feasible=0, rejected={}
    )
    apply(state, assign(state, job, Plan(nodes, explanation)))


def exited(state: CellState, job: JobState, exit_code: int = 0) -> None:
    """Every task of the job exits and the job ends."""
    events: list[Event] = [
        external_events.TaskExited(
            node_id=task.place.node_id,
            task_id=task_id,
            token=job.token,
            cause="exited",
            exit_code=exit_code,
            started_ms=0,
            exited_ms=0,
        )
        for task_id, task in job.tasks.items()
    ]
    outcome = ledger_events.JobEnded(
        job_id=job.job_id, outcome="failed" if exit_code else "succeeded", exit_code=exit_code
    )
    apply(state, *events, outcome)
