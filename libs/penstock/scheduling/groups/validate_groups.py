"""Validation of groups: whether jobs may form a group as proposed, on exactly this state; and the places of
its waiting members.

A group is a set of whole gangs, equal in their numbers of tasks and of GPUs per task, on the same nodes rank
by rank. Members that run there already stay on their places; waiting members get the same GPUs. No job is
stopped for it, so a job that may not be stopped may be joined, too. A group may wait for jobs that are being
stopped anyway: for their GPUs, their memory, or their places in the group.

Members are of one tenant, or of tenants that both allow it, and of no kinds whose group was dissolved a short
time ago. Ideal: any jobs that may share are planned together. Departure: plans group the jobs of a *circle*:
those that allow any companion, or the others of one tenant.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

from msgspec.structs import replace

from penstock.cluster.assignment import place_on
from penstock.cluster.reasons import Refusal, frozen, short_of, unknown, unusable
from penstock.cluster.view import ClusterView, Placed, Undo
from penstock.ledger.derived.groups import others, own_part
from penstock.ledger.derived.stages import stage_times
from penstock.ledger.derived.succession import awaited, followers
from penstock.ledger.state.apart import MAX_APART, key_of, kind_of
from penstock.ledger.state.job.demand import Demand
from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.masks import full_mask, mask_of, take_lowest
from penstock.ledger.state.node.node_state import NodeState
from penstock.ledger.state.state import CellState
from penstock.model.decisions.groups import MAX_GROUP_MEMBERS
from penstock.model.nouns.transitions import JobStatus, TaskStatus
from penstock.model.nouns.types import WHOLE_GPU, ResourceVector, TaskPlacement
from penstock.scheduling.groups.gang_turns import why_no_turns
from penstock.scheduling.make_room.backfill import MAX_ENDS
from penstock.scheduling.stages.protocols import Profile
from penstock.scheduling.stages.regroup import regroups

Members = Sequence[tuple[str, Sequence[str]]]
"""Job id and the node of each task, in rank order."""
Pairs = Sequence[tuple[str, str]]

RUNS = frozenset({JobStatus.LAUNCHING, JobStatus.RUNNING})


class Formed(NamedTuple):
    """A group that may be formed."""

    group_id: str
    """Id of the running members' group; empty: it is new."""
    running: tuple[str, ...]
    """Ids of members that continue to run, oldest first."""
    placed: tuple[Placed, ...]
    """Places of waiting members, oldest first."""
    parts: tuple[TaskPlacement, ...]
    """What each of their tasks takes beyond the others."""


def formed(state: CellState, members: Members, view: ClusterView) -> Formed | Refusal:
    """Forms the group, booked on `view`, or refuses it without any booking. On a view in which jobs that are
    being stopped have ended: the group at that time."""
    if (still := frozen(state)) is not None:
        return still
    jobs = _jobs(state, members, view)
    if isinstance(jobs, Refusal):
        return jobs
    running = [job for job in jobs if runs_on(job, view)]
    waiting = [job for job in jobs if not runs_on(job, view)]
    nodes = tuple(members[0][1])
    demands = {job.job_id: job.demand for job in jobs}
    wrong = (
        _not_alike(demands, members)
        or _not_there(running, nodes)
        or _not_together(state, running, waiting, view)
    )
    if wrong is not None:
        return wrong
    placed = _places(state, view, running, [(job, demands[job.job_id]) for job in waiting], nodes)
    if isinstance(placed, Refusal):
        return placed
    group_id = running[0].sharing.group if running else ""
    return Formed(group_id, tuple(job.job_id for job in running), *placed)


def runs_on(job: JobState, view: ClusterView) -> bool:
    """Whether the job runs, and does not count as ended."""
    return job.status in RUNS and job.job_id not in view.ended


def shared_already(state: CellState, members: Members, stops: frozenset[str] = frozenset()) -> Formed | None:
    """The existing group, if its running members without the stops are exactly these."""
    first = state.jobs.get(members[0][0])
    if first is None or not first.sharing.group:
        return None
    present = state.groups[first.sharing.group].values()
    running = [job for job in present if job.status in RUNS and job.job_id not in stops]
    if {job.job_id for job in running} != {job_id for job_id, _ in members}:
        return None
    in_order = sorted(running, key=lambda job: job.order)
    return Formed(first.sharing.group, tuple(job.job_id for job in in_order), (), ())


def _jobs(state: CellState, members: Members, view: ClusterView) -> list[JobState] | Refusal:
    """The members, each as it runs or could start on these nodes."""
    ids = [job_id for job_id, _ in members]
    if len(set(ids)) < len(ids):
        return Refusal("invalid", "a job is named twice in one group")
    if not 2 <= len(ids) <= MAX_GROUP_MEMBERS:
        return Refusal("invalid", f"a group has 2 to {MAX_GROUP_MEMBERS} members, {len(ids)} are named")
    found = []
    for job_id, nodes in members:
        job = state.jobs.get(job_id)
        if job is None:
            return unknown(state, job_id)
        comes_back = bool(view.ended) and job.comes_back
        if job.status not in RUNS and job.status is not JobStatus.QUEUED and not comes_back:
            return Refusal("wrong_state", f"{job_id} is {job.status}: a member runs or is queued")
        if not view.ended and (before := awaited(state, job)):
            return Refusal("wrong_state", f"{job_id} starts after {', '.join(before)}")
        if next_jobs := followers(state, job):
            return Refusal(
                "wrong_state", f"{job_id} is about to end, and {', '.join(next_jobs)} starts after it"
            )
        if job.status is JobStatus.QUEUED and job.held is not None:
            return Refusal("wrong_state", f"{job_id} is held")
        spec = job.spec
        moldable = job.status is JobStatus.QUEUED and spec.min_workers is not None
        if moldable and spec.fewest_workers <= len(nodes) <= spec.workers:
            job = job.shaped(len(nodes))
        tasks = job.workers + spec.parameter_servers
        if len(nodes) != tasks:
            return Refusal("invalid", f"{job_id} has {tasks} tasks, {len(nodes)} nodes are named")
        found.append(job)
    return sorted(found, key=lambda job: job.order)


def _not_alike(demands: Mapping[str, Demand], members: Members) -> Refusal | None:
    first_id, first_nodes = members[0]
    for job_id, nodes in members:
        if nodes != first_nodes and tuple(nodes) != tuple(first_nodes):
            return Refusal("invalid", f"{job_id} and {first_id} are not on the same nodes, rank by rank")
    shapes = {}
    for job_id, demand in demands.items():
        if not demand.worker.gpus:
            return Refusal("unsupported", f"{job_id} has no GPUs: members of a group share GPUs")
        if demand.worker.gpu_share_milli < WHOLE_GPU:
            return Refusal(
                "unsupported", f"{job_id} has a part of a GPU: members of a group share whole ones"
            )
        shape = demand.workers, demand.worker.gpus, demand.parameter_servers, demand.parameter_server.gpus
        shapes[job_id] = shape
        if why := why_no_turns(demand.workers, demand.parameter_servers, [first_nodes[0]]):
            return Refusal("unsupported", f"{job_id}: {why}")
    if len(set(shapes.values())) > 1:
        texts = (
            f"{job_id} {workers} x {gpus} + {servers}"
            for job_id, (workers, gpus, servers, _) in shapes.items()
        )
        return Refusal("invalid", f"workers x GPUs + parameter servers differ: {', '.join(texts)}")
    return None


def _not_there(running: Sequence[JobState], nodes: tuple[str, ...]) -> Refusal | None:
    """Refuses running members that are not complete, or not on these nodes."""
    for job in running:
        there = tuple(task.place.node_id for task in job.tasks.values())
        if there != nodes:
            return Refusal(
                "invalid", f"{job.job_id} runs on {', '.join(there)}: a group does not move running members"
            )
        if any(task.status is TaskStatus.EXITED for task in job.tasks.values()):
            return Refusal("wrong_state", f"a task of {job.job_id} has ended")
    return None


def _not_together(
    state: CellState, running: Sequence[JobState], waiting: Sequence[JobState], view: ClusterView
) -> Refusal | None:
    """Refuses the group unless its running members hold the same GPUs already, all jobs there are named, and
    a job joins them."""
    if not waiting:
        return Refusal("invalid", "all of them run: a group forms when a job joins")
    if not running:
        return None
    first = running[0]
    for job in running[1:]:
        if not job.sharing.group or job.sharing.group != first.sharing.group:
            return Refusal("infeasible", f"{job.job_id} and {first.job_id} run on different GPUs")
    present = state.groups.get(first.sharing.group, {})
    if view.ended:
        present = {job_id: job for job_id, job in present.items() if runs_on(job, view)}
    named = {job.job_id for job in running}
    for job_id, job in present.items():
        if job_id not in named and runs_on(job, view):
            return Refusal(
                "invalid", f"{job_id} runs on the same GPUs and is not named; name it, or stop it before"
            )
    most = len(waiting) + max(1, len(present))
    if most > MAX_GROUP_MEMBERS:
        stopping = most - len(waiting) - len(running)
        return Refusal("infeasible", f"{stopping} more members are still being stopped; wait for their exits")
    return None


def _places(
    state: CellState,
    view: ClusterView,
    running: Sequence[JobState],
    waiting: Sequence[tuple[JobState, Demand]],
    nodes: Sequence[str],
) -> tuple[tuple[Placed, ...], tuple[TaskPlacement, ...]] | Refusal:
    """Places of the waiting members, each beside the members before it."""
    gone: Container[str] = view.ended if running else ()
    held = [_held(state, running, rank, gone) for rank in range(len(nodes))]
    parts: list[TaskPlacement] = []
    undos: list[Undo] = []
    placed = []
    for job, demand in waiting:
        places = []
        for rank, (node_id, need) in enumerate(zip(nodes, demand.needs(), strict=True)):
            node, beside = view.node(node_id), held[rank]
            if node is None:
                lacking, shared = "no such node", 0
            else:
                shared = _shared_cores(node, beside)
                lacking = _unusable(state, node, need, demand) or _lacking(node, need, beside, shared)
            if node is None or lacking:
                for undo in reversed(undos):
                    undo()
                return Refusal("infeasible", f"task {rank} of {job.job_id} on {node_id}: {lacking}")
            place = _beside(node, job, demand, rank, beside, shared)
            parts.append(own_part(place, beside))
            undos.append(view.claim_places(parts[-1:]))
            beside.append(place)
            places.append(place)
        placed.append(Placed(job, tuple(places)))
    return tuple(placed), tuple(parts)


def _held(
    state: CellState, running: Sequence[JobState], rank: int, gone: Container[str]
) -> list[TaskPlacement]:
    """Places of this rank's members, including members that are being stopped. `gone`: ids of members that do
    not count."""
    if not running:
        return []
    own = [task.place for task in running[0].tasks.values() if task.place.rank == rank]
    return own + others(state, running[0], rank, gone)


def _unusable(state: CellState, node: NodeState, need: ResourceVector, demand: Demand) -> str:
    """Why no new member may start on the node; empty: one may."""
    wrong = unusable(state, node, need, demand.where)
    if not wrong and not node.spec.shares_gpus:
        return "it cannot prove a task's end, so a GPU has one task there"
    return wrong


def _lacking(node: NodeState, need: ResourceVector, held: Sequence[TaskPlacement], shared: int) -> str:
    """What the node lacks for one more task beside those of `held`, which have the `shared` cores; empty: it
    fits."""
    if not held:
        free_gpus = node.healthy_gpu_mask.bit_count()
        if free_gpus < need.gpus:
            return f"{free_gpus} GPUs are free, {need.gpus} needed"
        promised_mib, most_mbps = need.gpu_memory_mib, 0
    else:
        gpus = held[0].gpus
        if mask_of(gpus) & (node.unusable_gpu_mask | ~node.present_gpu_mask):
            return f"of GPUs {gpus} some are faulted or gone"
        promised_mib = need.gpu_memory_mib + sum([place.gpu_memory_mib for place in held])
        most_mbps = max([place.bandwidth_mbps for place in held])
    if need.gpus and promised_mib > (has_mib := node.gpu_memory_mib):
        return f"all members need {promised_mib} MiB of each GPU, which has {has_mib}"
    more = replace(
        need,
        cores=max(0, need.cores - shared.bit_count()),
        bandwidth_mbps=max(0, need.bandwidth_mbps - most_mbps),
    )
    cores = node.free_core_mask.bit_count()
    return short_of(cores, node.free_host_memory_mib, node.free_bandwidth_mbps, more, " more")


def _shared_cores(node: NodeState, held: Sequence[TaskPlacement]) -> int:
    """Set of the members' cores, as far as the node still has them."""
    mask = 0
    for place in held:
        mask |= mask_of(place.cores)
    return mask & full_mask(node.spec.cores)


def _beside(
    node: NodeState, job: JobState, demand: Demand, rank: int, held: Sequence[TaskPlacement], own: int
) -> TaskPlacement:
    """The place on the members' GPUs, with the lowest of their cores (`own`), then the lowest free ones."""
    if not held:
        return place_on(node, job, demand, rank)
    need = demand.worker if rank < demand.workers else demand.parameter_server
    shared = take_lowest(own, min(need.cores, own.bit_count()))
    more = take_lowest(node.free_core_mask, need.cores - len(shared))
    return place_on(node, job, demand, rank, held[0].gpus, mask_of((*shared, *more)))


def circle_of(job: JobState) -> str:
    """Jobs with equal circles may share GPUs; empty: with all that allow any."""
    return "" if job.spec.companions == "any" else job.spec.owner


def bound(profile: Profile) -> bool:
    """Whether the rules hold under this profile:
    an algorithm of a source knows neither tenants nor measured speeds."""
    return profile.regroup is None or not profile.regroup.exact


def why_apart(state: CellState, jobs: Iterable[JobState]) -> str:
    """Why these jobs may not share GPUs; empty: they may."""
    for one, other in combinations(jobs, 2):
        if one.spec.owner != other.spec.owner and (circle_of(one) or circle_of(other)):
            named = " and ".join(job.job_id for job in (one, other) if circle_of(job))
            return (
                f"{one.job_id} and {other.job_id} are of two tenants, {one.spec.owner} and "
                f"{other.spec.owner}; they share GPUs only where both allow it (`companions: any`), and "
                f"{named} did not"
            )
        pair = state.apart.get(key_of(kind_of(one), kind_of(other))) if state.apart else None
        if pair is not None and pair.until_ms > state.now_ms:
            left_min = max(1, (pair.until_ms - state.now_ms) // 60_000)
            return (
                f"{one.job_id} and {other.job_id} are not grouped for {left_min} minutes, since a group of "
                f"such jobs was dissolved: {pair.reason}"
            )
    return ""


def pairs_apart(state: CellState) -> Pairs:
    """The pairs of kinds that are not grouped now, in order."""
    now_ms = state.now_ms
    return tuple(sorted((pair.one, pair.other) for pair in state.apart.values() if pair.until_ms > now_ms))


def marks_of(pairs: Pairs, job: JobState) -> int:
    """Bits of the pairs in which the job's kind is: two for each pair, one for each side."""
    if not pairs:
        return 0
    kind = kind_of(job)
    return sum(
        ((kind == one) | (kind == other) << 1) << 2 * number for number, (one, other) in enumerate(pairs)
    )


FIRST_SIDES = sum(1 << 2 * number for number in range(MAX_APART))
"""Bits of the first sides of all pairs."""


def clash(marks: Sequence[int]) -> bool:
    """Whether two jobs with these marks (`marks_of`) are of kinds that are not grouped."""
    return any(
        one & other >> 1 & FIRST_SIDES or other & one >> 1 & FIRST_SIDES
        for one, other in combinations(marks, 2)
    )


def apart_from_all(state: CellState, job: JobState, profile: Profile) -> str:
    """Why a waiting job shares the GPUs of no running one, where the rules above are the reason, and not its
    shape or its stages; empty: they are not. For `why`; O(`MAX_ENDS`)."""
    if (
        profile.regroup is None
        or not bound(profile)
        or not regroups(job.demand)
        or not stage_times(state, job)
    ):
        return ""
    first = ""
    demand = job.demand
    for order in sorted(state.holding)[:MAX_ENDS]:
        other = state.holding[order]
        if other.status not in RUNS or other.demand.worker.gpus != demand.worker.gpus:
            continue
        if other.demand.workers != demand.workers or not stage_times(state, other):
            continue
        members = [*state.groups.get(other.sharing.group, {}).values()] or [other]
        why = next(filter(None, (why_apart(state, (member, job)) for member in members)), "")
        if not why:
            return ""
        first = first or why
    return first
