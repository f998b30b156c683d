"""Execution of a plan of the profile's preempt stage: stops and placements.

All stops are decided at once, and jobs that fit beside the running ones start at once. Nodes are reserved for
a job that waits for a stop, as a fact (`PlanAdopted`). Where the job lacks only GPUs that are being freed,
its order is sent as well, and its node starts it when they are free
(`penstock.scheduling.make_room.succession`); else it is placed when the stop is proven.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

from penstock.cluster.assignment import Plan
from penstock.cluster.chance import LazyRng
from penstock.cluster.view import ClusterView
from penstock.ledger.state.index import set_of
from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.state import CellState
from penstock.model.decisions import ledger_events
from penstock.model.decisions.plans import PlanAdopted, PlanUnit
from penstock.model.nouns.types import MAX_TEXT
from penstock.model.schema.event import Event
from penstock.scheduling.make_room.preemption import (
    Start,
    Stop,
    arrange,
    keeps_room,
    node_ids,
    place_as_tried,
)
from penstock.scheduling.make_room.succession import Succession
from penstock.scheduling.stages.protocols import Choose, Profile
from penstock_services.placer.core.common import (
    MAX_TASKS_PER_RECORD,
    Explain,
    RecordSpace,
    continuation,
    explained,
    launches_early,
    start_deadline,
    stop,
    wake_up,
)

MAX_STOPPED = 32  # in one record

Place = Callable[[CellState, JobState, Choose], Iterator[Event]]
"""The facts of one placement, if the job fits."""


def carry_out_plan(
    state: CellState, profile: Profile, place: Place, explain: Explain, failed_jobs: Mapping[str, str]
) -> Iterator[Event]:
    """Stops running jobs that the plan excludes, and places jobs of the plan that fit beside the others.

    `failed_jobs`: jobs on which the policy has failed in this record; they are not tried again in it.
    """
    if state.frozen or not state.jobs or profile.preempt is None:
        return
    plan = arrange(state, profile.preempt)
    if plan.selection.wake_ms is not None:
        yield wake_up(state, plan.selection.wake_ms)
    if plan.selection.ranks:
        yield ledger_events.JobsRanked(ranks=plan.selection.ranks)
    units = tuple(_units(state, plan.awaiting))
    begins = {job.job_id for job, _ in plan.starts}
    if tuple(unit for unit in state.planned.values() if unit.job_id not in begins) != units:
        yield PlanAdopted(units=units)
    yield from _stop_all(state, profile.name, plan.stops)
    if len(plan.stops) > MAX_STOPPED:
        yield continuation(state)
        return
    if not profile.beside_stops and (plan.stops or plan.awaiting):
        return
    claimed = set_of(ordinal for start in plan.awaiting for ordinal in start.fit)
    space = RecordSpace()
    for number, start in enumerate(plan.starts, 1):
        job, tasks = start.job, start.job.spec.workers + start.job.spec.parameter_servers
        if not space.holds(tasks):
            yield continuation(state)
            return
        space.add(tasks)
        if job.job_id not in failed_jobs:
            yield from place(state, job, _chooser(profile, start, plan.starts[number:], claimed))
    yield from _nexts(state, units, space, explain)


def _nexts(
    state: CellState, units: Sequence[PlanUnit], space: RecordSpace, explain: Explain
) -> Iterator[Event]:
    """Jobs that start as soon as others have ended on their nodes."""
    for unit in units:
        job = state.jobs[unit.job_id]
        if not job.in_line:
            continue
        [found] = Succession(ClusterView(state)).place([(job, unit.nodes)]) or [None]
        if found is None:
            continue
        if not space.holds(len(found.tasks)):
            yield continuation(state)
            return
        space.add(len(found.tasks))
        why = f"starts when it has ended there: {', '.join(found.after)}"
        explain(explained(state, job, found.tasks, "", why[:MAX_TEXT]))
        yield ledger_events.PlacementDecided(
            job_id=job.job_id,
            attempt=job.attempt + 1,
            tasks=found.tasks,
            after=found.after,
            prelaunch=launches_early(state, job, found.after),
        )
        yield start_deadline(state, job)


def _units(state: CellState, awaiting: Sequence[Start]) -> Iterator[PlanUnit]:
    """Jobs that wait for stops, and their nodes, as many as one record holds."""
    tasks = 0
    for number, (job, fit) in enumerate(awaiting):
        tasks += len(fit)
        if number and tasks > MAX_TASKS_PER_RECORD:
            return
        yield PlanUnit(job_id=job.job_id, nodes=node_ids(state, job.demand, fit))


def _chooser(profile: Profile, start: Start, rest: Sequence[Start], claimed: int) -> Choose:
    """The place stage's choice; else the nodes of the trial, if the stage finds none, or takes capacity of
    jobs that start next or wait for a stop."""

    def choose(state: CellState, job: JobState, rng: LazyRng) -> Plan | None:
        if job.workers != start.job.workers and (len(state.queue) > 1 or state.stopping):
            # a moldable job has more than its fewest workers only where no other job waits: the selection
            # relies on this
            return None
        found = profile.place.place(state, job, rng)
        if (
            found is None
            or any(state.nodes[node_id].bit & claimed for node_id in found.nodes)
            or not keeps_room(state, found, start, rest)
        ):
            found = place_as_tried(profile.name, state, start)
        return found

    return choose


def _stop_all(state: CellState, profile: str, stops: Sequence[Stop]) -> Iterator[Event]:
    for victim, by in stops[:MAX_STOPPED]:
        yield ledger_events.JobPreempted(
            job_id=victim.job_id,
            attempt=victim.attempt,
            by_job_id=by,
            reason=f"profile {profile}",
        )
        yield from stop(state, victim, "preempted")
