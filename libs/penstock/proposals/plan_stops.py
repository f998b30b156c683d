"""Preemption for proposed plans: stops only running jobs that a unit needs to start, tried on a copy of the
nodes on which they have ended.

A unit needs the stop of its own members that shall start elsewhere, of jobs that share GPUs with the members
it joins and are not in it, and of enough of the jobs on its nodes to make room: of the jobs that the plan
names, as many as possible continue to run, the last named first.
"""

from collections.abc import Container, Iterator, Sequence
from typing import NamedTuple

from penstock.cluster.reasons import Refusal, unknown
from penstock.cluster.view import ClusterView, Undo, living_places
from penstock.ledger.derived.groups import booked
from penstock.ledger.derived.succession import awaited
from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.masks import mask_of
from penstock.ledger.state.state import CellState
from penstock.model.nouns.transitions import JobStatus
from penstock.model.nouns.types import MAX_GANG_TASKS, WHOLE_GPU, ResourceVector
from penstock.model.proposals import PlanProposed
from penstock.proposals.validate_plans import ValidatedPlan, ValidatedUnit, validate_plan
from penstock.scheduling.groups.validate_groups import RUNS
from penstock.scheduling.stages.protocols import Profile

MAX_STOPS = 256  # in one record, which also contains the plan and its placements
NOT_NEEDED = Refusal("infeasible", "no unit that can start needs its place")


class MakesWay(NamedTuple):
    """A job to be stopped."""

    job: JobState
    by: str
    """A job of the unit that needs the stop: another one, or the job itself where it starts elsewhere."""
    why: str
    """The unit's explanation."""


class _RunsOn(NamedTuple):
    """A job among the plan's stops that is not stopped."""

    job_id: str
    refusal: Refusal


class Stops(NamedTuple):
    """Result for a plan's stops, both parts in its order."""

    made: Sequence[MakesWay] = ()
    refused: Sequence[_RunsOn] = ()


def validate_with_stops(
    state: CellState, proposal: PlanProposed, profile: Profile
) -> tuple[ValidatedPlan | Refusal, Stops]:
    """Result of each unit if the plan's stops are made. A job that no unit needs to stop is not stopped.
    Never changes the state."""
    named, refused = _may_stop(state, proposal.stops)
    validated = validate_plan(state, proposal, profile, frozenset(named))
    if isinstance(validated, Refusal):
        return validated, Stops()
    made = _needed(state, validated, named)
    refused |= {job_id: NOT_NEEDED for job_id in named if job_id not in made}
    names = dict.fromkeys(proposal.stops)
    return validated, Stops(
        tuple(made[name] for name in names if name in made),
        tuple(_RunsOn(name, refused[name]) for name in names if name in refused),
    )


def validate_after_stops(
    state: CellState, proposal: PlanProposed, profile: Profile, before: ValidatedPlan
) -> ValidatedPlan | Refusal:
    """As `before`, after the stops have begun: the places on exactly this state."""
    refused = {unit.number: unit for unit in before.units if unit.refusal is not None}
    all_stop = all(
        (job := state.jobs.get(name)) is None or job.status is JobStatus.STOPPING for name in proposal.stops
    )
    left = [unit.number for unit in before.units if unit.number not in refused]
    units = tuple(proposal.units[number] for number in left)
    found = validate_plan(
        state,
        PlanProposed(
            proposal_id=proposal.proposal_id,
            proposer=proposal.proposer,
            units=units,
            valid_until_ms=proposal.valid_until_ms,
        ),
        profile,
        fit_then=all_stop,
    )
    if isinstance(found, Refusal):
        return found
    again = {number: unit._replace(number=number) for number, unit in zip(left, found.units, strict=True)}
    validated = tuple(refused.get(number) or again[number] for number in range(len(before.units)))
    return found._replace(units=validated)


def _may_stop(state: CellState, names: Sequence[str]) -> tuple[dict[str, JobState], dict[str, Refusal]]:
    """The named jobs that may be stopped, as many as fit in one record; and why the others may not."""
    found: dict[str, JobState] = {}
    refused: dict[str, Refusal] = {}
    tasks = 0
    for name in dict.fromkeys(names):
        job = state.jobs.get(name)
        why = unknown(state, name) if job is None else stays(state, job)
        if job is not None and why is None:
            tasks += len(job.tasks)
            if len(found) < MAX_STOPS and (not found or tasks <= MAX_GANG_TASKS):
                found[name] = job
                continue
            bound = f"{MAX_STOPS} jobs and {MAX_GANG_TASKS} tasks are stopped in one record; propose it again"
            why = Refusal("infeasible", bound)
        if why is not None:
            refused[name] = why
    return found, refused


def stays(state: CellState, job: JobState) -> Refusal | None:
    """Why no plan may stop the job; None: one may. A member of a group may be stopped, since its place in the
    group becomes free."""
    if job.target:
        return Refusal("wrong_state", f"{job.job_id} moves")
    if job.status is JobStatus.STOPPING:
        return Refusal("wrong_state", f"{job.job_id} is being stopped already: {job.stop.reason}")
    if job.status not in RUNS:
        return Refusal("wrong_state", f"{job.job_id} is {job.status}, and does not run")
    if not job.spec.preemptible:
        return Refusal("wrong_state", f"{job.job_id} may not be stopped: preemptible is false")
    if before := awaited(state, job):
        return Refusal("wrong_state", f"{job.job_id} starts after {before[0]}, which has not ended")
    return None


def _needed(state: CellState, validated: ValidatedPlan, named: dict[str, JobState]) -> dict[str, MakesWay]:
    accepted = [unit for unit in validated.units if unit.refusal is None] if named else []
    waiting = [unit for unit in accepted if not unit.placed and unit.group is None]
    found: dict[str, MakesWay] = {}
    for unit in accepted:
        for name in _own(state, unit, named):
            found.setdefault(name, _makes_way(named[name], unit))
    on_node: dict[str, ValidatedUnit] = {}
    for unit in waiting:
        for planned in unit.unit.jobs:
            for node_id in planned.nodes:
                on_node.setdefault(node_id, unit)
    gone = {*named, *(job.job_id for job in state.stopping.values())}
    for name, job in reversed(named.items()):
        if name not in found and not _runs_on(validated.then, job, on_node, gone):
            there = next(place.node_id for place in living_places(job) if place.node_id in on_node)
            found[name] = _makes_way(job, on_node[there])
    return found


def _own(state: CellState, validated: ValidatedUnit, named: dict[str, JobState]) -> Iterator[str]:
    """Members that shall start elsewhere, and members of the joined group that shall not stay in it."""
    stays = set() if validated.group is None else set(validated.group.running)
    members = [job.job_id for job in validated.unit.jobs if job.job_id not in stays]
    yield from (name for name in members if name in named)
    if validated.unit.kind != "group" or validated.group is not None:
        return
    for name in members:
        job = state.jobs[name]
        if job.sharing.group and name not in named:
            yield from (other for other in state.groups[job.sharing.group] if other in named)


def _makes_way(job: JobState, validated: ValidatedUnit) -> MakesWay:
    by = next((other.job_id for other in validated.unit.jobs if other.job_id != job.job_id), job.job_id)
    return MakesWay(job, by, validated.unit.explanation)


def _runs_on(view: ClusterView, job: JobState, nodes: Container[str], gone: set[str]) -> bool:
    """Whether the job fits beside the units on these nodes; then its resources are claimed. Counted, since
    units have not chosen their GPUs yet.

    `view`: as `ValidatedPlan.then`. `gone`: ids of jobs that count as ended.
    """
    state, undos = view.state, list[Undo]()
    for place in living_places(job):
        if place.node_id not in nodes:
            continue
        node, own = state.nodes[place.node_id], booked(state, job, place, gone)
        sound = mask_of(own.gpus) & node.present_gpu_mask & ~node.unusable_gpu_mask
        part = ResourceVector(
            gpus=sound.bit_count(),
            cores=len(own.cores),
            host_memory_mib=own.host_memory_mib,
            bandwidth_mbps=own.bandwidth_mbps,
        )
        if place.gpu_share_milli < WHOLE_GPU or not view.free(node.ordinal).fits(part):
            for undo in reversed(undos):
                undo()
            return False  # free parts of GPUs are not counted here
        undos.append(view.claim_task(part, node.ordinal))
    gone.discard(job.job_id)
    return True
