"""Job model `turns`: jobs that hold the same GPUs take turns at storage, cores, GPU and network, each with a
lock of its own.

Ideal: the scripts of a group's members. Each cycles through the stages of its iteration in one order,
storage, cores, GPU, network; it holds a stage's lock while the stage runs; locks are granted first come,
first served. There is no barrier: a member with short iterations makes several while another makes one. The
steady speeds come from a simulation of that cycle with the measured stage times.

Departures: a lock passes on in no time; stages take their measured times, one after the other, also where the
job alone overlaps them (its stages add up to more than its iteration: that overlap is lost in a group); the
rest of an iteration beside its stages holds no lock; a trace's storage and CPU are one figure, half of which
counts as each; a gang's tasks proceed together. A member computes from its start on at the steady speed of
its new group.
"""

import heapq
from collections import deque
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import count

from penstock.simulator.job_models.model import Around, JobModel, Neighbour, NotMeasured, Placement
from penstock.simulator.traces.jobs import Stages, TraceJob

LOCKS = 4
WARM_UP, MEASURED = 16, 128  # iterations of the slowest member: until the cycle is steady, and counted
KNOWN_GROUPS = 65_536
MAX_STAGES = (
    200_000  # of one part of a simulated cycle, where one member is thousands of times as fast as another
)


class Turns(Around):
    """`inner`: the job model of a job alone in its placement."""

    name = "turns"

    def __init__(self, inner: JobModel) -> None:
        super().__init__(inner)

    def work_s(self, job: TraceJob) -> float:
        """The job's size, see `JobModel`. Raises `NotMeasured` for a job without stage times."""
        _parts(job)
        return self.inner.work_s(job)

    def speed(self, job: TraceJob, placement: Placement, neighbours: Sequence[Neighbour]) -> float:
        held = {node_id: frozenset(allocation.gpus) for node_id, allocation in placement.items()}
        elsewhere: list[Neighbour] = []
        together: list[Stages] = []
        for other in neighbours:
            if _on_any(held, other.placement):
                together.append(_parts(other.job))
            else:
                elsewhere.append(other)
        alone = self.inner.speed(job, placement, elsewhere)
        if not together:
            return alone
        own = _parts(job)
        members = tuple(sorted([own, *together]))
        return alone * speeds(members)[members.index(own)]


@lru_cache(KNOWN_GROUPS)
def speeds(members: tuple[Stages, ...]) -> tuple[float, ...]:
    """Speed of each member beside the others, as a share of its speed alone, > 0 – 1; equal members are
    equally fast."""
    stages = [_stages(one) for one in members]
    made, passed_ms = _Cycle(stages).iterations()
    found: dict[Stages, list[float]] = {}
    for one, iterations in zip(members, made, strict=True):
        found.setdefault(one, []).append(iterations * one.iteration_ms / passed_ms)
    played = {one: sum(each) / len(each) for one, each in found.items()}
    return tuple(
        min(1.0, max(played[one], _least(one, own, stages))) for one, own in zip(members, stages, strict=True)
    )


def _least(
    one: Stages, own: Sequence[tuple[int, float]], members: Sequence[Sequence[tuple[int, float]]]
) -> float:
    """Lower bound of a member's share: each other member gets each lock before it. For members of very
    different lengths."""
    at_each = [sum(ms for stages in members for held, ms in stages if held == lock) for lock in range(LOCKS)]
    return one.iteration_ms / sum(at_each[lock] if lock < LOCKS else ms for lock, ms in own)


def _parts(job: TraceJob) -> Stages:
    if job.stages is None or job.stages.iteration_ms <= 0:
        raise NotMeasured(f"turns: job {job.job_id} has no stage times; take a trace of format muri")
    return job.stages


def _stages(stages: Stages) -> Sequence[tuple[int, float]]:
    """⟨lock, ms⟩ in order without empty stages; `LOCKS`: the rest of the iteration, which holds no lock."""
    times = (stages.storage_cpu_ms / 2, stages.storage_cpu_ms / 2, stages.gpu_ms, stages.network_ms)
    found = [(lock, ms) for lock, ms in enumerate(times) if ms > 0]
    rest = stages.iteration_ms - sum(times)
    return [*found, (LOCKS, rest)] if rest > 0 else found


class _Cycle:
    """Simulation of one group's locks in virtual time. `members`: their stages, at least one each."""

    def __init__(self, members: Sequence[Sequence[tuple[int, float]]]) -> None:
        self._members = members
        self._at = [0] * len(members)
        """Index of the stage that each member is in, or waits for."""
        self._made = [0] * len(members)
        """Completed iterations of each member."""
        self._held = [False] * LOCKS
        self._waiting: list[deque[int]] = [deque() for _ in range(LOCKS)]
        self._ends: list[tuple[float, int, int]] = []
        """(end in ms, order of beginning, member) of the running stages."""
        self._order = count()
        for member in range(len(members)):
            self._enter(member, 0.0)

    def iterations(self) -> tuple[Sequence[int], float]:
        """Iterations of each member once the cycle is steady, and their time in ms."""
        since_ms, before = self._until(WARM_UP)
        until_ms, after = self._until(WARM_UP + MEASURED)
        return [now - then for now, then in zip(after, before, strict=True)], until_ms - since_ms

    def _until(self, iterations: int) -> tuple[float, Sequence[int]]:
        """Runs until each member has made `iterations`, for at most `MAX_STAGES` stages; returns the time and
        their iterations."""
        now_ms = 0.0
        for _ in range(MAX_STAGES):
            now_ms = self._leave()
            if min(self._made) >= iterations:
                break
        return now_ms, tuple(self._made)

    def _enter(self, member: int, now_ms: float) -> None:
        lock, length_ms = self._members[member][self._at[member]]
        if lock < LOCKS:
            if self._held[lock]:
                self._waiting[lock].append(member)
                return
            self._held[lock] = True
        heapq.heappush(self._ends, (now_ms + length_ms, next(self._order), member))

    def _leave(self) -> float:
        """Ends the next stage; returns its time."""
        now_ms, _, member = heapq.heappop(self._ends)
        lock, _ = self._members[member][self._at[member]]
        self._at[member] = (self._at[member] + 1) % len(self._members[member])
        self._made[member] += not self._at[member]
        if lock < LOCKS:
            self._held[lock] = False
            if self._waiting[lock]:
                self._enter(self._waiting[lock].popleft(), now_ms)
        self._enter(member, now_ms)
        return now_ms


def _on_any(held: Mapping[str, frozenset[int]], placement: Placement) -> bool:
    """`held`: node → GPUs there. Whether the placement has any of them."""
    for node_id, gpus in held.items():
        there = placement.get(node_id)
        if there is not None and not gpus.isdisjoint(there.gpus):
            return True
    return False
