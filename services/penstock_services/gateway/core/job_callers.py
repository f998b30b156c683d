"""Jobs that submit jobs: who a task is by its token and the ledger, and the bounds of what it submits
(decision 143). Pure."""

from collections.abc import Iterable

from msgspec.structs import replace

from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.state import CellState
from penstock.model.jobs.job_spec import JobSpec
from penstock_services.gateway.core.access import Caller, Role
from penstock_services.gateway.core.problems import Problem

MAX_DEPTH = 4
"""Jobs above one another that a job submitted: a pipeline, its sweep, a trial and the trial's evaluation."""
MAX_LIVING = 1_000
"""Jobs that descend from one job and have not ended:
as many as a job array of Slurm has by default (MaxArraySize)."""
ROLES = frozenset({Role.SUBMIT, Role.READ})


def task_caller(state: CellState, node_id: str, job_id: str, task_id: str, token: int) -> Caller:
    """The task that this node has proven to run, by the order with this token, with the rights of its job.

    Raises `Problem` 401 where it does not run there, or no longer; 403 where its job may not submit.
    """
    job = state.jobs.get(job_id)
    task = None if job is None or job.token != token else job.tasks.get(task_id)
    if job is None or task is None or task.exit.at_ms is not None or task.place.node_id != node_id:
        detail = f"this token is of task {task_id} of job {job_id}, which does not run on {node_id}"
        raise Problem(401, "job_token_expired", f"{detail} any more; a job's token ends with its task")
    if not job.spec.may_submit:
        detail = f"job {job_id} may not submit jobs; submit it with `may_submit: true`, or --may-submit"
        raise Problem(403, "may_not_submit", detail)
    return Caller(ROLES, job.spec.owner, name=f"job:{job.job_id}", lineage=(*job.spec.parents, job.job_id))


def descended(spec: JobSpec, caller: Caller) -> JobSpec:
    """The job with its parents. Raises `Problem` 409 where it would be too deep."""
    if len(caller.lineage) > MAX_DEPTH:
        chain = " → ".join(caller.lineage)
        raise Problem(
            409,
            "too_deep",
            f"jobs are submitted {MAX_DEPTH} deep at most, and this one would be deeper: {chain}; "
            f"have {caller.lineage[0]} submit it, or look whether a job submits itself",
        )
    return replace(spec, parents=caller.lineage)


def refuse_too_many(caller: Caller, jobs: Iterable[JobState], pending: Iterable[JobSpec]) -> None:
    """Raises `Problem` 409 where the first of the caller's lineage has so many living descendants already.
    `jobs`: those that have not ended; `pending`: those that the placer has not answered yet."""
    root = caller.lineage[:1]
    specs = (job.spec for job in jobs)
    living = sum(spec.parents[:1] == root for found in (specs, pending) for spec in found)
    if living >= MAX_LIVING:
        raise Problem(
            409,
            "too_many_jobs",
            f"{living} jobs that job {root[0]} submitted, also through others, have not ended, "
            f"and {MAX_LIVING} may; wait until some have ended (`penstock wait`), or cancel some",
        )
