"""Which running jobs make way for a proposed plan: those that a unit needs which can then start, tried on a copy on which they have ended.

A unit needs the stop of a job that runs where the unit goes, and of its own members that are to start elsewhere. Who is named, but stands in nobody's way, runs on.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from penstock.ledger.job_state import JobState
from penstock.ledger.state import CellState
from penstock.ledger.succession import awaited
from penstock.model.proposals import PlanProposed
from penstock.model.types import MAX_GANG_TASKS
from penstock.policies.base import Profile
from penstock.policies.refusal import Refusal
from penstock.policies.trial import living_places
from penstock.policies.validate_groups import RUNS
from penstock.policies.validate_plans import Judged, JudgedUnit, judge


class MakesWay(NamedTuple):
    """A job to be stopped."""

    job: JobState
    by: str
    """A job of the unit that needs it: another one, or itself where it starts elsewhere."""
    why: str
    """As the unit explains itself."""


def judge_with_stops(
    state: CellState, proposal: PlanProposed, profile: Profile
) -> tuple[Judged | Refusal, tuple[MakesWay, ...]]:
    """What becomes of each unit if these make way. Nobody does where no unit needs it. Never changes the state."""
    named = frozenset(job.job_id for job in _may_stop(state, proposal.stops))
    judged = judge(state, proposal, profile, named)
    if isinstance(judged, Refusal) or not named:
        return judged, ()
    return judged, tuple(_needed(state, judged.units, named))


def judge_after_stops(
    state: CellState, proposal: PlanProposed, profile: Profile, before: Judged
) -> Judged | Refusal:
    """As `before`, now that those who make way are being stopped: the places, on this very state."""
    refused = {unit.number: unit for unit in before.units if unit.refusal is not None}
    left = [unit.number for unit in before.units if unit.number not in refused]
    units = tuple(proposal.units[number] for number in left)
    found = judge(
        state,
        PlanProposed(
            proposal_id=proposal.proposal_id,
            proposer=proposal.proposer,
            units=units,
            valid_until_ms=proposal.valid_until_ms,
        ),
        profile,
    )
    if isinstance(found, Refusal):
        return found
    again = {number: unit._replace(number=number) for number, unit in zip(left, found.units, strict=True)}
    return Judged(
        tuple(refused.get(number) or again[number] for number in range(len(before.units))), found.full
    )


def _may_stop(state: CellState, names: Iterable[str]) -> Iterator[JobState]:
    """Of those named: who runs, may be stopped, does not move and is followed by nobody. As many as one record holds."""
    tasks = 0
    for name in dict.fromkeys(names):
        job = state.jobs.get(name)
        if (
            job is None
            or job.status not in RUNS
            or not job.spec.preemptible
            or job.target
            or awaited(state, job)
        ):
            continue
        tasks += len(job.tasks)
        if tasks > MAX_GANG_TASKS:
            return
        yield job


def _needed(state: CellState, units: Iterable[JudgedUnit], named: frozenset[str]) -> Iterator[MakesWay]:
    on_node: dict[str, list[str]] = {}
    for name in sorted(named, key=lambda name: state.jobs[name].order):
        for node_id in dict.fromkeys(place.node_id for place in living_places(state.jobs[name])):
            on_node.setdefault(node_id, []).append(name)
    left = set(named)
    for judged in units:
        if judged.refusal is not None:
            continue
        for name in _needed_by(judged, on_node):
            if name in left:
                left.discard(name)
                by = next((job.job_id for job in judged.unit.jobs if job.job_id != name), name)
                yield MakesWay(state.jobs[name], by, judged.unit.explanation)


def _needed_by(judged: JudgedUnit, on_node: dict[str, list[str]]) -> Iterator[str]:
    """Of those who are to stop: its own members, and, where it does not start beside them, everybody on its nodes."""
    unit = judged.unit
    starts_now = bool(judged.placed) or judged.group is not None
    nodes = dict.fromkeys(node_id for job in unit.jobs for node_id in job.nodes)
    members = {job.job_id for job in unit.jobs}
    stays = set() if judged.group is None else set(judged.group.running)
    for names in on_node.values():
        yield from (name for name in names if name in members and name not in stays)
    if not starts_now:
        for node_id in nodes:
            yield from on_node.get(node_id, ())
