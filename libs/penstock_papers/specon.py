"""SpeCon: migration of converged training jobs. Source: SpeCon §V-B Alg. 2 (a host for a converged job), §V-C
Alg. 3 (rebalancing).

Both are pure functions of the number of jobs per category on each node; `SpeCon` reads them from a cell's
state.
"""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.node.node_state import NodeState
from penstock.ledger.state.state import CellState
from penstock.model.nouns.settings import Convergence
from penstock.model.nouns.transitions import JobStatus
from penstock.scheduling.acting.convergence import Category, Monitor
from penstock.scheduling.acting.migrate import Categories, Migration, Seen, category_of
from penstock.scheduling.acting.validate_moves import can_go, nodes_of

MAX_SHOWN = 4  # scores in a reason
WEIGHTS: Mapping[Category, float] = MappingProxyType(
    {Category.PROGRESSING: 2.0, Category.WATCHING: 1.5, Category.CONVERGED: 1.0}
)
"""w_pc, w_wc, w_cc. Source: SpeCon §VI-A2."""


class Host(NamedTuple):
    """A node, and the jobs that run there."""

    node_id: str
    jobs: Mapping[str, Category]
    """Job id → category."""
    consumption: float
    """R(w, t): share of its cores that is allocated, 0 – 1."""

    @property
    def score(self) -> float:
        """S_w, ≥ 0. Source: Alg. 2, line 3."""
        return sum(WEIGHTS[category] for category in self.jobs.values())


def host_for(current: str, hosts: Sequence[Host]) -> str:
    """Target of a converged job of node `current`; `current`: it stays. Source: SpeCon Alg. 2.

    `hosts`: all nodes that could take it, including `current`. Ties that the source does not resolve: the
    first host.
    """
    lowest = min(host.score for host in hosts)
    candidates = [host for host in hosts if host.score == lowest]
    if any(host.node_id == current for host in candidates):
        return current
    return min(candidates, key=lambda host: host.consumption).node_id


def rebalanced(hosts: Sequence[Host], converged_ms: Mapping[str, int]) -> list[tuple[str, str]]:
    """Moves (job id, node id) once every job has converged. Source: SpeCon Alg. 3.

    `converged_ms`: when each of the jobs that may be moved was marked as migrated; the duration d is smallest
    for the latest. Equal durations: the lower job id. Line 27 names the origin node, the paper's text the
    target: here the target's room counts.

    Departure: the caller leaves out a job that was rebalanced before, so that a job cannot move back and
    forth between two nodes.
    """
    if not hosts:
        return []
    loads = {host.node_id: len(host.jobs) for host in hosts}
    factor = sum(loads.values()) // len(loads)
    latest_first = sorted(converged_ms, key=lambda job_id: (-converged_ms[job_id], job_id))
    idle = [node_id for node_id, load in loads.items() if load == 0]
    if idle:
        takes = idle if factor > 0 else []
        return list(zip(latest_first, takes, strict=False))
    takes = [node_id for node_id, load in loads.items() if load < factor - 1]
    elsewhere = {job_id for host in hosts if host.node_id not in takes for job_id in host.jobs}
    leaves = next((job_id for job_id in latest_first if job_id in elsewhere), None)
    return [] if leaves is None or not takes else [(leaves, takes[0])]


class SpeCon:
    """A migrate stage, exactly as in its source.

    Departures: only nodes with room for the job are candidates, and only jobs of one task on one node move,
    where containers of the source have no limits; a job that may not be stopped, is in a group or has
    successors is not moved.
    """

    def __init__(self, settings: Convergence) -> None:
        self._settings = settings

    def monitor(self) -> Monitor:
        return Monitor(self._settings.alpha, self._settings.interval_ms)

    def migrations(self, state: CellState, seen: Seen) -> Sequence[Migration]:
        if state.frozen:
            return ()
        hosts: Sequence[Host] | None = None
        for job_id in seen.asking:
            job = state.jobs.get(job_id)
            if job is None or job.status is not JobStatus.RUNNING or job.moves.converged_ms is not None:
                continue
            hosts = hosts or hosts_of(state, seen.categories)
            if (found := self._migration(state, job, hosts)) is not None:
                return (found,)
        if state.moving or any(job.moves.converged_ms is None for job in state.holding.values()):
            return ()
        return self._rebalance(state, hosts or hosts_of(state, seen.categories))

    def _migration(self, state: CellState, job: JobState, hosts: Sequence[Host]) -> Migration | None:
        """Alg. 1, line 15, and Alg. 2. None: it is not evaluated now."""
        here = nodes_of(job)
        if len(here) != 1:
            return None
        (current,) = here
        own = next((host for host in hosts if host.node_id == current), None)
        if own is None:  # nothing may be placed there, so a move would make no room
            return None
        if sum(category is not Category.CONVERGED for category in own.jobs.values()) <= 1:
            return None
        able = [host for host in hosts if host is own or can_go(state, job, (host.node_id,))]
        chosen = host_for(current, able)
        scores = ", ".join(f"{host.node_id} {host.score:g}" for host in _few(able, own, chosen))
        return Migration(
            job.job_id,
            (chosen,),
            "converged",
            f"its loss converges, and {count_of(own)} on {current} still improve; scores: {scores}",
        )

    def _rebalance(self, state: CellState, hosts: Sequence[Host]) -> Sequence[Migration]:
        """Alg. 3, once all running jobs have converged."""
        running = {job_id for host in hosts for job_id in host.jobs}
        jobs = [state.jobs[job_id] for job_id in sorted(running)]
        converged_ms = {
            job.job_id: job.moves.converged_ms
            for job in jobs
            if job.moves.converged_ms is not None and not job.moves.rebalanced and len(job.tasks) == 1
        }
        loads = {host.node_id: len(host.jobs) for host in hosts}
        found = []
        for job_id, there in rebalanced(hosts, converged_ms):
            (here,) = nodes_of(state.jobs[job_id])
            if can_go(state, state.jobs[job_id], (there,)):
                why = f"all jobs have converged; {here} runs {loads[here]}, {there} {loads[there]}"
                found.append(Migration(job_id, (there,), "rebalance", why))
        return found


def _few(able: Sequence[Host], own: Host, chosen: str) -> Iterable[Host]:
    """The current and the chosen host, and the next best."""
    first = [host for host in able if host is own or host.node_id == chosen]
    rest = sorted((host for host in able if host not in first), key=lambda host: host.score)
    return [*first, *rest][:MAX_SHOWN]


def count_of(host: Host) -> str:
    """How many of its jobs have not converged, as text."""
    gain = sum(category is not Category.CONVERGED for category in host.jobs.values())
    return f"{gain} of {len(host.jobs)} jobs"


def hosts_of(state: CellState, categories: Categories) -> Sequence[Host]:
    """Placeable nodes by ordinal, with the jobs that run there or move there. O(nodes + tasks)."""
    jobs: dict[str, dict[str, Category]] = {}
    for job in state.holding.values():
        for node_id in [place.node_id for place in job.target] or nodes_of(job):
            jobs.setdefault(node_id, {})[job.job_id] = category_of(job, categories)
    return [
        Host(node.spec.node_id, jobs.get(node.spec.node_id, {}), consumption_of(node))
        for node in sorted(state.nodes.values(), key=lambda node: node.ordinal)
        if node.placeable
    ]


def consumption_of(node: NodeState) -> float:
    """Share of the node's cores that is allocated, 0 – 1."""
    return 1.0 - node.free_core_mask.bit_count() / max(1, node.spec.cores)
