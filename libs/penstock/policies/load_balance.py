"""Load balancing of running jobs by predicted completion times: a migrate stage that moves a job only where the sum of completion times falls.

Ideal: the schedule of moves with the least sum of completion times. Departure: one move at a time, the best; the stage is evaluated again after
a change. Jobs on a node slow each other down as `penstock.policies.crowding` has measured; no job moves while no slowdown was
measured. The cost of a move (save, launch, repeated work) counts as work of the moved job, and the gain has to exceed it:
twice for a progressing job, since its pause costs more (the source's own reason to move converged jobs).
Source: the categories and the rule that converged jobs make room are SpeCon's; the gain is our addition.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from penstock.ledger.job_state import JobState
from penstock.ledger.state import CellState
from penstock.model.moves import MAX_MIGRATIONS
from penstock.model.settings import Convergence
from penstock.model.transitions import JobStatus
from penstock.policies.convergence import Category, Monitor, NoiseMonitor
from penstock.policies.crowding import has_gpus
from penstock.policies.migrate import Migration, Seen
from penstock.policies.service import loses, stop_cost_s
from penstock.policies.specon import can_go, category_of
from penstock.policies.validate_moves import nodes_of

SAVE_S = 5.0  # assumed where a job's save was never measured. Source: SpeCon §III-C, less than 5 s
CAUTION: Mapping[Category, float] = {
    Category.PROGRESSING: 2.0,
    Category.WATCHING: 1.5,
    Category.CONVERGED: 1.0,
}
"""Required gain of a move, as a multiple of its cost."""
LEAST_GAIN = 0.05  # of the sum of completion times on both nodes: jobs that come later are not predicted
MAX_TRIED = 8  # jobs for which targets are tried, those with the largest gain of leaving


class Sharer(NamedTuple):
    """A job on a node."""

    job_id: str
    cores: float
    left_s: float
    """Remaining run time alone on the node."""
    exponent: float
    """Exponent of its slowdown by neighbours (`Crowding.exponent`)."""


def sum_of_completions_s(sharers: Sequence[Sharer]) -> float:
    """Sum of completion times of jobs that share a node until each has ended, without new ones. Job i runs at speed (cores_i / all cores)^exponent_i. O(n²)."""
    left = list(sharers)
    total_s = now_s = 0.0
    while left:
        cores = sum(one.cores for one in left)
        speeds = [(one.cores / cores) ** one.exponent for one in left]
        next_s = min(one.left_s / speed for one, speed in zip(left, speeds, strict=True))
        now_s += next_s
        after = [
            one._replace(left_s=one.left_s - next_s * speed) for one, speed in zip(left, speeds, strict=True)
        ]
        left = [one for one in after if one.left_s > 1e-9 * max(1.0, now_s)]
        total_s += (len(after) - len(left)) * now_s
    return total_s


class Leaving(NamedTuple):
    """A job that could leave its node."""

    gain_s: float
    """How much the sum of completion times on its node falls, its own included."""
    job: JobState
    node_id: str
    sharer: Sharer


class LoadBalance:
    """See the module's docstring. `settings`: of the categories."""

    def __init__(self, settings: Convergence) -> None:
        self._settings = settings

    def monitor(self) -> Monitor:
        return NoiseMonitor(self._settings.alpha, self._settings.interval_ms)

    def migrations(self, state: CellState, seen: Seen) -> Sequence[Migration]:
        if state.frozen or state.moving or not seen.crowding.matters():
            return ()
        hosts = _hosts(state, seen)
        sums_s = {node_id: sum_of_completions_s(sharers) for node_id, sharers in hosts.items()}
        leaving = sorted(_leaving(state, hosts, sums_s), key=lambda one: (-one.gain_s, one.job.order))
        found = [move for one in leaving[:MAX_TRIED] for move in _moves(state, seen, one, hosts, sums_s)]
        for _, migration in sorted(found, key=lambda one: -one[0]):
            if can_go(state, state.jobs[migration.job_id], migration.nodes):
                return (migration,)
        return ()


Hosts = Mapping[str, Sequence[Sharer]]


def _leaving(state: CellState, hosts: Hosts, sums_s: Mapping[str, float]) -> Iterator[Leaving]:
    for node_id, sharers in hosts.items():
        for sharer in sharers:
            job = state.jobs[sharer.job_id]
            if _movable(job):
                rest_s = sum_of_completions_s([other for other in sharers if other is not sharer])
                yield Leaving(sums_s[node_id] - rest_s, job, node_id, sharer)


def _moves(
    state: CellState, seen: Seen, leaving: Leaving, hosts: Hosts, sums_s: Mapping[str, float]
) -> Iterator[tuple[float, Migration]]:
    """(net gain in s, migration) for each target with a sufficient gain."""
    job, here = leaving.job, leaving.node_id
    cost_s = stop_cost_s(state, job) + (0.0 if job.checkpoint is not None else SAVE_S)
    category = category_of(job, seen.categories)
    moved = leaving.sharer._replace(left_s=leaving.sharer.left_s + cost_s)
    for there, sharers in hosts.items():
        if there == here:
            continue
        net_s = leaving.gain_s - (sum_of_completions_s([*sharers, moved]) - sums_s[there])
        enough_s = max((CAUTION[category] - 1.0) * cost_s, LEAST_GAIN * (sums_s[here] + sums_s[there]))
        if net_s > enough_s:
            yield net_s, _migration(job, here, there, net_s, cost_s, category)


def _migration(
    job: JobState, here: str, node_id: str, net_s: float, cost_s: float, category: Category
) -> Migration:
    return Migration(
        job.job_id,
        (node_id,),
        "faster",
        f"{category}; jobs on {here} and {node_id} end {net_s:,.0f} s earlier in sum, less the {cost_s:,.0f} s that the move costs",
    )


def _movable(job: JobState) -> bool:
    """Whether the job has one task, is in no group, saves checkpoints, and was not moved too often."""
    return (
        job.status is JobStatus.RUNNING
        and len(job.tasks) == 1
        and not job.group
        and job.migrations < MAX_MIGRATIONS
        and job.spec.checkpoint != "none"
        and not loses(job)
    )


def _hosts(state: CellState, seen: Seen) -> Hosts:
    """Open nodes with the jobs of one task that run there. O(nodes + tasks)."""
    found: dict[str, list[Sharer]] = {node_id: [] for node_id, node in state.nodes.items() if node.placeable}
    for job in sorted(state.holding.values(), key=lambda job: job.order):
        progress = seen.crowding.progress(state, job, seen.now_ms)
        if progress is None or len(job.tasks) != 1:
            continue
        (node_id,) = nodes_of(job)
        if node_id in found:
            (task,) = job.tasks.values()
            exponent = seen.crowding.exponent(gpus=has_gpus(job))
            found[node_id].append(
                Sharer(job.job_id, max(1, len(task.place.cores)), progress.left_s, exponent)
            )
    return found
