"""Interleaving of jobs that share GPUs in turns: predicted period of a group's iteration, and its resource
efficiency.

While one member of a group reads from storage the next one uses the CPU, the next one the GPU, the next one
the network; then all members switch to the next resource. With t_i^j the time for which member i uses
resource j, k = 4 resources and p members, p ≤ k,

    T = Σ_j max_i t_i^((i + j) mod k)                  Source: Muri §4.1 eq. 3
    γ = 1 − 1/k · Σ_j (T − Σ_i t_i^j) / T              eq. 4; that is Σ_i Σ_j t_i^j / (k · T)

for the best order of the members. Times are ms, ≥ 0.

Departures: no member's iteration is shorter than alone, since parts of it may use none of the resources; and
a group whose members use no known resource takes the sum of their iterations, γ 0. The authors' program
computes another period (`authors_period`) and multiplies it by factors that they measured on their cluster;
profiles that reproduce their figures use these, too (`bounded` False, `factors`).
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import permutations
from math import inf
from typing import NamedTuple

from penstock.model.decisions.groups import MAX_GROUP_MEMBERS
from penstock.model.nouns.types import StageTimes

RESOURCES = 4  # storage, CPU, GPU, network. Source: Muri §4.1
MAX_KNOWN = 131_072  # groups by their members' kinds, in each cache: 40 MB; as many as pairs of 512 jobs
SAME_PERIOD = 1e-3  # relative difference at which two periods count as equal, from the authors' program
AUTHORS_STEPS = 8  # two rotations: the program compares the last with the one before
LEAST_PROFILED = 0.8  # see `credible_times`
NO_JOB = (-inf, -inf, -inf, -inf, -inf)  # replaces an absent member
MAX_SPEED = 4.0  # bound of `Turns.speeds`

Times = tuple[float, float, float, float, float]
"""(storage, CPU, GPU, network, whole iteration) of a job alone, ms. Jobs with equal times are of one kind."""
Period = Callable[[Sequence[Times]], float]
"""ms, ≥ 0, of members in this order of rotation; at most `MAX_GROUP_MEMBERS`."""


def times_of(stages: StageTimes) -> Times:
    return (stages.storage_ms, stages.cpu_ms, stages.gpu_ms, stages.network_ms, stages.iteration_ms)


def credible_times(stages: StageTimes) -> Times:
    """Stage times, scaled to add up to the iteration where they add up to less than `LEAST_PROFILED` of it:
    such a profile is incomplete.

    The iteration is measured at each step, its stages are an estimate. Source: own; of the profiles that
    Muri's authors measured one of 48 is so short.
    """
    times = times_of(stages)
    profiled_ms, iteration_ms = sum(times[:RESOURCES]), times[RESOURCES]
    if not 0 < profiled_ms < iteration_ms * LEAST_PROFILED:
        return times
    storage, cpu, gpu, network = (time / profiled_ms * iteration_ms for time in times[:RESOURCES])
    return storage, cpu, gpu, network, iteration_ms


def slots(members: Sequence[Times]) -> list[float]:
    """ms of each of the `RESOURCES` slots of a period: in slot s member n, in this order, uses resource (n +
    s) mod 4. Source: Muri §4.1 eq. 3."""
    return [
        max(times[(number + shift) % RESOURCES] for number, times in enumerate(members))
        for shift in range(RESOURCES)
    ]


def period(members: Sequence[Times]) -> float:
    """T of eq. 3 for members in this order."""
    return sum(slots(members))


def authors_period(members: Sequence[Times]) -> float:
    """The period by the program published with Muri: storage and CPU are one stage over two slots, and a
    stage begins as soon as it can, without barriers.

    f(0) = 0; f(i + 1) = the latest of f(i) + network of p(i + 1), f(i) + GPU of p(i + 2) and, for i ≥ 1, f(i
    − 1) + storage and CPU of p(i + 3), indexes mod 4, absent members left out. The period is f(i + 1) − f(i −
    3) once that has converged (`SAME_PERIOD`).
    """
    at = (*members, *(NO_JOB,) * (RESOURCES - len(members)))
    ends = [0.0]
    for step in range(AUTHORS_STEPS):
        end = ends[step]
        latest = end + at[(step + 1) % RESOURCES][3]
        gpu_end = end + at[(step + 2) % RESOURCES][2]
        if gpu_end > latest:
            latest = gpu_end
        if step:
            loader = at[(step + 3) % RESOURCES]
            loaded = ends[step - 1] + loader[0] + loader[1]
            if loaded > latest:
                latest = loaded
        ends.append(latest if latest > -inf else end)
        if step >= RESOURCES:
            now, before = ends[step + 1] - ends[step - 3], end - ends[step - 4]
            if abs(now - before) <= SAME_PERIOD * before:
                return now
    return ends[AUTHORS_STEPS] - ends[AUTHORS_STEPS - RESOURCES]


def pair_period(members: Sequence[Times]) -> float:
    """The period of two members in their program: one loads while the other computes and synchronises, then
    vice versa."""
    (storage0, cpu0, gpu0, network0, _), (storage1, cpu1, gpu1, network1, _) = members
    return max(storage0 + cpu0, gpu1 + network1) + max(storage1 + cpu1, gpu0 + network0)


def authors_period_or_pair(members: Sequence[Times]) -> float:
    """`authors_period`, for two members the minimum of it and `pair_period`."""
    found = authors_period(members)
    return min(found, pair_period(members)) if len(members) == 2 else found


class Prediction(NamedTuple):
    """Prediction for a group whose members are given by kind, ascending."""

    order: tuple[int, ...]
    """Indexes of the members in the order of the rotation."""
    period_ms: float
    """Time of one iteration of each member, > 0, overhead included."""
    efficiency: float
    """γ with this period, 0 – 1."""
    speeds: tuple[float, ...]
    """Speed of each member relative to alone, in the given order; > 0, at most `MAX_SPEED`."""
    alone_ms: float
    """Sum of the members' iterations if each ran alone."""


class Interleaving:
    """Predicts groups by one period function. `factors`: multipliers of period and iteration, by number of
    members.

    `worst`: the worst order instead of the best, to show the effect of the order. `bounded`: no member's
    iteration is shorter than alone.
    """

    def __init__(
        self, period: Period, factors: Sequence[float], *, worst: bool = False, bounded: bool = True
    ) -> None:
        assert len(factors) == MAX_GROUP_MEMBERS, factors
        self.period, self.factors = period, tuple(factors)
        self.worst, self.bounded = worst, bounded
        self.predict = lru_cache(maxsize=MAX_KNOWN)(self._predict)
        """For kinds in ascending order, 1 – 4 of them. Cached."""

    def _predict(self, kinds: tuple[Times, ...]) -> Prediction:
        assert 1 <= len(kinds) <= MAX_GROUP_MEMBERS, kinds
        alone = [times[4] * self.factors[0] for times in kinds]
        order: tuple[int, ...] = tuple(range(len(kinds)))
        period_ms = alone[0]
        if len(kinds) > 1:
            period_ms, order = self._rotation(kinds)
            period_ms *= self.factors[len(kinds) - 1]
            if period_ms <= 0:
                period_ms = sum(alone)
            if self.bounded:
                period_ms = max(period_ms, *alone)
        used_ms = sum(sum(times[:RESOURCES]) for times in kinds)
        return Prediction(
            order,
            period_ms,
            min(1.0, used_ms / (RESOURCES * period_ms)),
            tuple(min(MAX_SPEED, one / period_ms) for one in alone),
            sum(alone),
        )

    def _rotation(self, kinds: tuple[Times, ...]) -> tuple[float, tuple[int, ...]]:
        """(period, order) of the best order, of equal ones the first."""
        found = [
            (self.period([kinds[index] for index in order]), order)
            for order in _orders(tuple([kinds.index(one) for one in kinds]))
        ]
        if self.worst:
            return max(found, key=lambda one: (one[0], [-index for index in one[1]]))
        return min(found)


@lru_cache(maxsize=64)
def _orders(alike: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Orders of members, of orders that only exchange equal members the first. `alike`: of each member the
    index of the first that equals it."""
    found: dict[tuple[int, ...], tuple[int, ...]] = {}
    for order in permutations(range(len(alike))):
        found.setdefault(tuple([alike[index] for index in order]), order)
    return tuple(found.values())
