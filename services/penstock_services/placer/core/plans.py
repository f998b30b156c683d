"""Carrying out what a replanning policy wants: `RunSet` in, stops and placements out.

A plan that stops a job places none: it is made anew, and is the same, when the first of its stops is
proven. So `place` finds the cell as the plan meant it.

Ideal: who fits beside is placed at once. Departure: plans count GPUs, nodes are found later, and a job placed now may
take the very node on which a larger one would have fitted; that one would then need others to be migrated. Knowing that it
does not means placing the whole plan on a copy of the nodes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

from penstock.ledger.demand import Demand
from penstock.ledger.state import CellState, JobState
from penstock.model import ledger_events
from penstock.model.event import Event
from penstock.model.transitions import JobStatus
from penstock.model.types import MAX_GANG_TASKS
from penstock.policies.base import Replanning
from penstock.policies.replan import make_room
from penstock_services.placer.core.common import continuation, stop, wake_up

MAX_PLACED = 32  # in one record, which must stay under 64 KiB
MAX_TASKS = MAX_GANG_TASKS  # placed in one record
MAX_STOPPED = 32  # in one record; more wait for the next plan

Place = Callable[[CellState, JobState], Iterator[Event]]
"""The facts of one placement, if the job fits."""


def carry_out_plan(
    state: CellState, policy: Replanning, place: Place, failed_jobs: Mapping[str, str]
) -> Iterator[Event]:
    """Stops who runs and shall not; if there is none to stop, places who shall run and waits.

    `failed_jobs`: those on which the policy has failed by now; no job is stopped for them.
    """
    if state.frozen or not state.jobs:
        return
    plan = policy.plan(state)
    if plan.wake_ms is not None:
        yield wake_up(state, plan.wake_ms)
    if plan.ranks:
        yield ledger_events.JobsRanked(ranks=plan.ranks)
    chosen = set(plan.chosen)
    surplus = {order: job for order, job in state.holding.items() if job.job_id not in chosen}
    if state.index.known & ~state.index.gone & ~state.index.placeable:
        surplus = {order: job for order, job in surplus.items() if _frees(state, job)}
    victims = [
        job.job_id for _, job in sorted(surplus.items(), reverse=True) if job.status is not JobStatus.STOPPING
    ]
    if victims:
        yield from _stop_all(state, policy, victims, None)
        return
    chosen_jobs = (state.jobs[job_id] for job_id in plan.chosen)
    waiting = [(job, job.demand) for job in chosen_jobs if job.status is JobStatus.QUEUED]
    waiting.sort(key=lambda found: -found[1].worker.gpus)
    yield from _place_all(state, policy, waiting, place, failed_jobs)


def _frees(state: CellState, job: JobState) -> bool:
    """Whether its end would leave room for anybody: not on nodes that are silent or cordoned, which the plan leaves out."""
    return any(state.nodes[task.place.node_id].placeable for task in job.tasks.values())


def _place_all(
    state: CellState,
    policy: Replanning,
    waiting: Sequence[tuple[JobState, Demand]],
    place: Place,
    failed_jobs: Mapping[str, str],
) -> Iterator[Event]:
    """Largest workers first, so that small jobs do not take the GPUs that the plan gives to a large one."""
    tasks = 0
    for placed, (job, demand) in enumerate(waiting):
        tasks += demand.tasks
        if placed == MAX_PLACED or (placed and tasks > MAX_TASKS):
            yield continuation(state)
            return
        yield from place(state, job)
        if job.status is JobStatus.LAUNCHING or job.job_id in failed_jobs:
            continue
        if any(other.status is JobStatus.STOPPING for other in state.holding.values()):
            return
        moved = make_room(state, job)
        if moved:
            yield from _stop_all(state, policy, moved, job.job_id)
            return


def _stop_all(
    state: CellState, policy: Replanning, job_ids: Sequence[str], by_job_id: str | None
) -> Iterator[Event]:
    for job_id in job_ids[:MAX_STOPPED]:
        job = state.jobs[job_id]
        yield ledger_events.JobPreempted(
            job_id=job_id,
            attempt=job.attempt,
            by_job_id=by_job_id,
            reason=f"profile {policy.name}",
        )
        yield from stop(state, job, "preempted")
