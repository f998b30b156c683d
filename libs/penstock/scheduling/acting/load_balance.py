"""Load balancing of running jobs by predicted completion times: a migrate stage that moves a job only where
the sum of completion times falls.

Ideal: the schedule of moves with the least sum of completion times. Departure: one move at a time, the best;
the stage is evaluated again after a change. Jobs on a node slow each other down as
`penstock.scheduling.acting.crowding` has measured; no job moves while no slowdown was measured. The cost of a
move (save, launch, repeated work) counts as work of the moved job, and the gain has to exceed it: twice for a
progressing job, since its pause costs more (the source's own reason to move converged jobs). Source: the
categories and the rule that converged jobs make room are SpeCon's; the gain is our addition.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from heapq import nsmallest
from math import inf, log, log1p
from typing import NamedTuple

from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.state import CellState
from penstock.model.decisions.moves import MAX_MIGRATIONS
from penstock.model.nouns.settings import Convergence
from penstock.model.nouns.transitions import JobStatus
from penstock.scheduling.acting.convergence import Category, Monitor, NoiseMonitor
from penstock.scheduling.acting.crowding import Crowding, has_gpus
from penstock.scheduling.acting.migrate import Migration, Seen, category_of
from penstock.scheduling.acting.validate_moves import can_go
from penstock.scheduling.remaining_time import ROUNDING
from penstock.scheduling.stop_cost import loses, stop_cost_s

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


def sum_of_completions_s(sharers: Iterable[Sharer]) -> float:
    """Sum of completion times of jobs that share a node until each has ended, without new ones. Job i runs at
    speed (cores_i / all cores)^exponent_i.

    O(n²), but jobs of one kind, with the same cores and exponent, are equally fast, so that a power is taken
    and an end looked for once per kind.
    """
    kinds: dict[tuple[float, float], list[float]] = {}
    for one in sharers:
        kinds.setdefault((one.cores, one.exponent), []).append(one.left_s)
    for left in kinds.values():
        left.sort()
    if len(kinds) == 1:
        return _sum_of_one_kind_s(*kinds.popitem())
    total_s = now_s = 0.0
    while kinds:
        all_cores = sum([cores * len(left) for (cores, _), left in kinds.items()])
        speeds = {kind: (kind[0] / all_cores) ** kind[1] for kind in kinds}
        next_s = min([kinds[kind][0] / speed for kind, speed in speeds.items()])
        now_s += next_s
        ended = 0
        for kind, speed in speeds.items():
            left, done = _after(kinds[kind], next_s * speed, now_s)
            ended += done
            if left:
                kinds[kind] = left
            else:
                del kinds[kind]
        total_s += ended * now_s
    return total_s


def _after(left: Sequence[float], done_s: float, now_s: float) -> tuple[list[float], int]:
    """Of equally fast jobs, shortest first, what is left after so much of each,
    and how many have ended with it."""
    now_left = [left_s - done_s for left_s in left]
    ended = bisect_right(now_left, ROUNDING * max(1.0, now_s))
    return now_left[ended:], ended


def _sum_of_one_kind_s(kind: tuple[float, float], left: list[float]) -> float:
    """`sum_of_completions_s` of jobs that are all equally fast, shortest first: the same operations, without
    those for several kinds."""
    cores, exponent = kind
    total_s = now_s = 0.0
    while left:
        speed = (cores / (cores * len(left))) ** exponent
        next_s = left[0] / speed
        now_s += next_s
        left, ended = _after(left, next_s * speed, now_s)
        total_s += ended * now_s
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
        sharing = _sharing(state, seen)
        if not _slowed(sharing, seen.crowding):
            return ()
        hosts = _hosts(state, seen, sharing)
        sums_s = {node_id: sum_of_completions_s(sharers) for node_id, sharers in hosts.items()}
        leaving = _leaving(state, hosts, sums_s)
        found = [move for one in leaving for move in _moves(state, seen, one, hosts, sums_s)]
        found.sort(key=lambda one: -one[0])
        best = next((move for _, move in found if can_go(state, state.jobs[move.job_id], move.nodes)), None)
        return () if best is None else (best,)


Sharing = Mapping[str, Sequence[tuple[JobState, int]]]
"""Open node → the jobs of one task that run there, with their cores."""
Hosts = Mapping[str, Sequence[Sharer]]


def _slowed(sharing: Sharing, crowding: Crowding) -> bool:
    """Whether on any node a move could gain enough. O(tasks).

    By a job's leaving its neighbours gain no more than they are slowed by, and a job with a share s of the
    cores takes at most s^-e times as long as alone. Where that is less than `LEAST_GAIN` more, no move gains
    that.
    """
    exponent = max(crowding.exponent(gpus=gpus) for gpus in (False, True))
    for found in sharing.values():
        if len(found) > 1:
            cores = [own for _, own in found]
            if exponent * log(sum(cores) / min(cores)) > log1p(LEAST_GAIN):
                return True
    return False


def _leaving(state: CellState, hosts: Hosts, sums_s: Mapping[str, float]) -> Sequence[Leaving]:
    """The movable jobs with the largest gains of leaving, `MAX_TRIED` at most, of nodes whose jobs are slowed
    by more than the least gain of a move.

    A gain is bounded by that of neighbours that then are as fast as alone; jobs are looked at in the order of
    that bound, until it is below the gains found.
    """
    bounds: list[tuple[float, str, Sharer]] = []
    least_s, second_s = nsmallest(2, [*sums_s.values(), inf, inf])
    for node_id, sharers in hosts.items():
        sum_s = sums_s[node_id]
        slowed_s = sum_s * (1.0 + ROUNDING) - sum(sharer.left_s for sharer in sharers)
        if slowed_s > LEAST_GAIN * (sum_s + (second_s if sum_s == least_s else least_s)):
            bounds += [(slowed_s + sharer.left_s, node_id, sharer) for sharer in sharers]
    bounds.sort(key=lambda one: -one[0])
    found: list[Leaving] = []
    for bound_s, node_id, sharer in bounds:
        if len(found) == MAX_TRIED and bound_s < found[-1].gain_s:
            break
        job = state.jobs[sharer.job_id]
        if _movable(job):
            rest_s = sum_of_completions_s(other for other in hosts[node_id] if other is not sharer)
            found.append(Leaving(sums_s[node_id] - rest_s, job, node_id, sharer))
            found.sort(key=lambda one: (-one.gain_s, one.job.order))
            del found[MAX_TRIED:]
    return found


def _moves(
    state: CellState, seen: Seen, leaving: Leaving, hosts: Hosts, sums_s: Mapping[str, float]
) -> Iterator[tuple[float, Migration]]:
    """(net gain in s, migration) for each target with a sufficient gain, whether it has room or not."""
    job, here = leaving.job, leaving.node_id
    cost_s = stop_cost_s(state, job) + (0.0 if job.saving.checkpoint is not None else SAVE_S)
    category = category_of(job, seen.categories)
    moved = leaving.sharer._replace(left_s=leaving.sharer.left_s + cost_s)
    most_s = leaving.gain_s - moved.left_s  # on a node where no job slows another
    for there, sharers in hosts.items():
        enough_s = max((CAUTION[category] - 1.0) * cost_s, LEAST_GAIN * (sums_s[here] + sums_s[there]))
        if there == here or most_s <= enough_s:
            continue
        net_s = leaving.gain_s - (sum_of_completions_s([*sharers, moved]) - sums_s[there])
        if net_s > enough_s:
            yield net_s, _migration(job, here, there, net_s, cost_s, category)


def _migration(
    job: JobState, here: str, node_id: str, net_s: float, cost_s: float, category: Category
) -> Migration:
    return Migration(
        job.job_id,
        (node_id,),
        "faster",
        f"{category}; jobs on {here} and {node_id} end {net_s:,.0f} s earlier in total, after "
        f"{cost_s:,.0f} s for the move",
    )


def _movable(job: JobState) -> bool:
    """Whether the job has one task, is in no group, saves checkpoints, and was not moved too often."""
    return (
        job.status is JobStatus.RUNNING
        and len(job.tasks) == 1
        and not job.sharing.group
        and job.moves.migrations < MAX_MIGRATIONS
        and job.saves
        and not loses(job)
    )


def _sharing(state: CellState, seen: Seen) -> Sharing:
    """Also starts tracking jobs that `seen` does not track yet. O(nodes + tasks)."""
    found: dict[str, list[tuple[JobState, int]]] = {
        node_id: [] for node_id, node in state.nodes.items() if node.placeable
    }
    for job in state.holding.values():
        if job.status is JobStatus.RUNNING:
            seen.crowding.follow(state, job, seen.now_ms)
            if len(job.tasks) == 1:
                (task,) = job.tasks.values()
                if (here := found.get(task.place.node_id)) is not None:
                    here.append((job, max(1, len(task.place.cores))))
    return found


def _hosts(state: CellState, seen: Seen, sharing: Sharing) -> Hosts:
    """The jobs on each node, with their remaining work. O(tasks)."""
    return {
        node_id: [
            Sharer(job.job_id, cores, progress.left_s, seen.crowding.exponent(gpus=has_gpus(job)))
            for job, cores in found
            if (progress := seen.crowding.progress(state, job, seen.now_ms)) is not None
        ]
        for node_id, found in sharing.items()
    }
