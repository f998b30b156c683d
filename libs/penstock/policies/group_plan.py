"""From an answer of who shall run together to a proposal: nodes for those who start, and who has to stop.

Who holds the same GPUs now and goes on together stays where it is; of a group's members on different GPUs the most numerous stay and the others
are stopped and start there. Groups that nobody of is running get nodes by first fit among GPUs that nobody keeps.
"""

from typing import NamedTuple

from penstock.ledger.job_state import JobState
from penstock.ledger.state import CellState
from penstock.model.proposals import ProposedJob, ProposedUnit
from penstock.policies.job_rows import CONTENDING
from penstock.policies.regroup import Answer, GroupPlan, PlannedGroup


class _Kept(NamedTuple):
    """A planned group with those of its members who stay where they are; none: it starts anew."""

    group: PlannedGroup
    members: list[JobState]
    stay: list[JobState]


def group_plan(state: CellState, answer: Answer) -> GroupPlan:
    """As `penstock.policies.regroup.Regroup.plan`. Who has ended is left out; who cannot be stopped stays. O(jobs that run + tasks planned)."""
    kept = _kept(state, answer)
    stays = {job.job_id for one in kept for job in one.stay}
    stops = [
        job
        for job in state.holding.values()
        if job.status in CONTENDING and job.job_id not in stays and job.spec.preemptible and not job.target
    ]
    stopped = {job.job_id for job in stops}
    free = _free(state, stopped)
    units: list[ProposedUnit] = []
    for group, members, stay in kept:
        if len(stay) == len(members):
            continue
        nodes = _nodes_of(stay[0]) if stay else _first_fit(state, free, members[0])
        if nodes is None:
            continue
        turns = group.turns if len(members) == len(group.job_ids) else None
        units.append(
            ProposedUnit(
                jobs=tuple(ProposedJob(job_id=job.job_id, nodes=tuple(nodes)) for job in members),
                explanation=_why(group),
                kind="group" if len(members) > 1 else "solo",
                turns=turns if len(members) > 1 else None,
            )
        )
    return GroupPlan(units, [job.job_id for job in sorted(stops, key=lambda job: job.order)], answer.ranks)


def _kept(state: CellState, answer: Answer) -> list[_Kept]:
    """Nobody stays in two groups' places: of two that would, the first in the answer does."""
    found: list[_Kept] = []
    taken: set[str] = set()
    for group in answer.groups:
        members = [
            job
            for job_id in group.job_ids
            if (job := state.jobs.get(job_id)) is not None and not job.held and not job.target
        ]
        places: dict[str, list[JobState]] = {}
        for job in members:
            if job.status in CONTENDING:
                places.setdefault(job.group or f"{job.job_id}/alone", []).append(job)
        stay = max(
            ((len(those), place) for place, those in places.items() if place not in taken), default=(0, "")
        )[1]
        taken.add(stay)
        if members:
            found.append(_Kept(group, members, places.get(stay, [])))
    return found


def _free(state: CellState, stopped: set[str]) -> list[int]:
    """GPUs by ordinal of the node that nobody keeps."""
    free = list(state.sound_gpus)
    held: set[tuple[str, int]] = set()
    for job in state.holding.values():
        if job.job_id in stopped or job.order in state.stopping:
            continue
        for task in job.tasks.values():
            held.update((task.place.node_id, gpu) for gpu in task.place.gpus)
    for node_id, _ in held:
        ordinal = state.nodes[node_id].ordinal
        free[ordinal] = max(0, free[ordinal] - 1)
    return free


def _first_fit(state: CellState, free: list[int], job: JobState) -> list[str] | None:
    """The nodes of all tasks, whose GPUs are taken; None: they do not fit."""
    given: list[tuple[int, int]] = []
    for need in job.demand.needs():
        node = next((node for node, gpus in enumerate(free) if gpus >= need.gpus and gpus), None)
        if node is None:
            for back, gpus in given:
                free[back] += gpus
            return None
        free[node] -= need.gpus
        given.append((node, need.gpus))
    return [state.node_at[node] for node, _ in given]


def _nodes_of(job: JobState) -> list[str]:
    return [
        task.place.node_id
        for task in sorted(
            job.tasks.values(), key=lambda task: (task.place.role != "worker", task.place.rank)
        )
    ]


def _why(group: PlannedGroup) -> str:
    if group.turns is None:
        return "alone on its GPUs"
    turns = group.turns
    return f"{len(turns.job_ids)} jobs take turns: {turns.period_ms:,.0f} ms for an iteration of each, resources in use {turns.efficiency:.0%}"
