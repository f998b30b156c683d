"""Load balancing of running jobs by predicted completion times: a migrate stage that moves a job only where all in all jobs end earlier.

Ideal: the schedule of moves with the least sum of completion times. Departure: one move at a time, the best; it is asked again when
something has changed. Jobs on a node share its speed as `penstock.policies.crowding` has measured it; nobody moves where neighbours were never
seen to matter. What a move costs (save, launch, what it does twice) counts as work of the moved job, and its gain has to be more than that:
twice as much for a job that still gains much, since what stands still then is worth more (the source's own reason to move converged jobs).
Source: the categories and the rule that converged jobs make room are SpeCon's; the gain is ours.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from penstock.ledger.job_state import JobState
from penstock.ledger.state import CellState
from penstock.model.moves import MAX_MIGRATIONS
from penstock.model.settings import Convergence
from penstock.model.transitions import JobStatus
from penstock.policies.convergence import Category, Monitor, NoiseMonitor
from penstock.policies.crowding import Crowding, has_gpus
from penstock.policies.migrate import Categories, Migration
from penstock.policies.service import loses, stop_cost_s
from penstock.policies.specon import can_go, category_of
from penstock.policies.validate_moves import nodes_of

SAVE_S = 5.0  # of a job whose save was never measured. Source: SpeCon §III-C, less than 5 s
CAUTION: Mapping[Category, float] = {
    Category.PROGRESSING: 2.0,
    Category.WATCHING: 1.5,
    Category.CONVERGED: 1.0,
}
"""How many times its cost a move has to gain."""
LEAST_GAIN = 0.05  # of the sum of completion times on both nodes: whoever comes later is not predicted
MAX_TRIED = 8  # jobs, those whose leaving gains most


class Sharer(NamedTuple):
    """A job on a node."""

    job_id: str
    cores: float
    left_s: float
    """Alone on the node."""


def sum_of_completions_s(sharers: Sequence[Sharer], exponent: float) -> float:
    """Of jobs that share a node from now on until each has ended; nobody else comes. Job i goes at (cores_i / all cores)^exponent. O(n²)."""
    left = [[one.left_s, max(one.cores, 1e-9)] for one in sharers]
    total_s = now_s = 0.0
    while left:
        cores = sum(each[1] for each in left)
        speeds = [(each[1] / cores) ** exponent for each in left]
        next_s = min(each[0] / speed for each, speed in zip(left, speeds, strict=True))
        now_s += next_s
        kept = []
        for each, speed in zip(left, speeds, strict=True):
            each[0] -= next_s * speed
            if each[0] <= 1e-9 * max(1.0, now_s):
                total_s += now_s
            else:
                kept.append(each)
        left = kept
    return total_s


class LoadBalance:
    """See the module's docstring. `settings`: of the categories."""

    def __init__(self, settings: Convergence) -> None:
        self._settings = settings

    def monitor(self) -> Monitor:
        return NoiseMonitor(self._settings.alpha, self._settings.interval_ms)

    def migrations(
        self,
        state: CellState,
        now_ms: int,
        categories: Categories,
        crowding: Crowding,
        asking: Sequence[str],
    ) -> Sequence[Migration]:
        if state.frozen or state.moving or not crowding.matters():
            return ()
        hosts = _hosts(state, crowding, now_ms)
        found = self._best(state, categories, crowding, hosts)
        return () if found is None else (found,)

    def _best(
        self, state: CellState, categories: Categories, crowding: Crowding, hosts: Mapping[str, list[Sharer]]
    ) -> Migration | None:
        sums = {
            (node_id, gpus): sum_of_completions_s(sharers, crowding.exponent(gpus=gpus))
            for node_id, sharers in hosts.items()
            for gpus in (False, True)
        }
        leaving: list[tuple[float, JobState, str, Sharer]] = []
        for node_id, sharers in hosts.items():
            for sharer in sharers:
                job = state.jobs[sharer.job_id]
                if not _movable(job):
                    continue
                rest = [other for other in sharers if other is not sharer]
                gpus = has_gpus(job)
                gain_s = sums[node_id, gpus] - sum_of_completions_s(rest, crowding.exponent(gpus=gpus))
                leaving.append((gain_s, job, node_id, sharer))
        leaving.sort(key=lambda one: (-one[0], one[1].order))
        best: tuple[float, Migration] | None = None
        for gain_s, job, here, sharer in leaving[:MAX_TRIED]:
            cost_s = stop_cost_s(state, job) + (0.0 if job.checkpoint is not None else SAVE_S)
            category = category_of(job, categories)
            gpus = has_gpus(job)
            moved = sharer._replace(left_s=sharer.left_s + cost_s)
            for node_id, sharers in hosts.items():
                if node_id == here:
                    continue
                after_s = sum_of_completions_s([*sharers, moved], crowding.exponent(gpus=gpus))
                both_s = sums[here, gpus] + sums[node_id, gpus]
                net_s = gain_s - (after_s - sums[node_id, gpus])
                enough_s = max((CAUTION[category] - 1.0) * cost_s, LEAST_GAIN * both_s)
                if net_s <= enough_s or (best is not None and net_s <= best[0]):
                    continue
                if can_go(state, job, (node_id,)):
                    best = net_s, _migration(job, here, node_id, net_s, cost_s, category)
        return None if best is None else best[1]


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
    """Of one task, not in a group, saves what it does, and was not moved too often."""
    return (
        job.status is JobStatus.RUNNING
        and len(job.tasks) == 1
        and not job.group
        and job.migrations < MAX_MIGRATIONS
        and job.spec.checkpoint != "none"
        and not loses(job)
    )


def _hosts(state: CellState, crowding: Crowding, now_ms: int) -> dict[str, list[Sharer]]:
    """Open nodes with the jobs of one task that run there. O(nodes + tasks)."""
    found: dict[str, list[Sharer]] = {node_id: [] for node_id, node in state.nodes.items() if node.placeable}
    for job in sorted(state.holding.values(), key=lambda job: job.order):
        progress = crowding.progress(state, job, now_ms)
        if progress is None or len(job.tasks) != 1:
            continue
        (node_id,) = nodes_of(job)
        if node_id in found:
            (task,) = job.tasks.values()
            found[node_id].append(Sharer(job.job_id, max(1, len(task.place.cores)), progress.left_s))
    return found
