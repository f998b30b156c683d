"""Expected start time of a waiting job, by list scheduling: running jobs end as estimated, and waiting jobs
start in the profile's order.

The order is the profile's own at each time of the forecast (`penstock.why.queue_position`); for profiles that
stop jobs it is the current order, and running jobs that come later in it are preempted. Nodes that are
reserved now are used by other jobs if these end in time, until the job with the reservation starts.

Pure, and read only. A waiting moldable job has its fewest workers, or more where the profile's shape stage
lets it wait for them; the job that is asked about has the workers that the caller gives it. A node counts
with its GPUs (as shares), cores, host memory and bandwidth. Not modelled: network scores (every gang is
placed by first fit), later reservations, and the cost of stops. So it is an estimate, with its assumptions in
`Start.assumes`.
"""

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import inf
from typing import NamedTuple

from penstock.cluster.view import ClusterView, Undo, held_places
from penstock.ledger.state.index import bits
from penstock.ledger.state.job.demand import Demand, DemandKey, vector_key
from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.state import CellState
from penstock.model.nouns.allowed import Where
from penstock.model.nouns.settings import MAX_OVERTAKES
from penstock.model.nouns.types import MAX_GANG_TASKS, ResourceVector
from penstock.scheduling.place.moldable import as_it_waits
from penstock.scheduling.profiles import in_force
from penstock.scheduling.remaining_time import remaining_s
from penstock.scheduling.scheduling_pass import Starts, Trying, Waits, scheduling_pass
from penstock.scheduling.stages.protocols import Turns
from penstock.why.queue_position import Line, by_arrival, line_of

MAX_AHEAD = 256  # positions of the queue that are examined; a later job has no expected start
MAX_VISITS = 20_000  # nodes examined: about 5 µs each
VISITS_PER_TURN = 1 / 8  # cost of finding the next job in order
MAX_NAMED = 5  # holders
MAX_ALONE = 32  # forecasts under a profile that stops jobs, where each job needs a separate one
ENDS = "running jobs end as estimated (overdue jobs now), no new job arrives, and "
BY_ARRIVAL = (
    f"{ENDS}waiting jobs start in order of arrival, where jobs that fit may pass as far as the profile allows"
)
OWN_ORDER = f"{ENDS}waiting jobs start in the profile's order at that time; reservations are the present ones"
PREEMPTING = (
    f"{ENDS}the profile's order stays as it is now; running jobs that come later in this order "
    "give way at once"
)


class Holder(NamedTuple):
    """A job that holds resources for which another one waits. `ends_ms`: expected; None: not known."""

    job_id: str
    owner: str
    gpus: int
    ends_ms: int | None


class Start(NamedTuple):
    """`starts_ms`: expected, in the ledger's ms; None: not known, and `unknown` names the cause. `holders`:
    on nodes that suit the job, earliest end first."""

    starts_ms: int | None
    unknown: str
    holders: tuple[Holder, ...]
    assumes: str = ""


Taken = list[tuple[int, Undo]]
"""(ordinal of its node, undo of its claim) per task."""
Alike = tuple[DemandKey, frozenset[str]]
"""(demand, nodes that are reserved for others)."""


class TooFar(Exception):
    """More than MAX_VISITS nodes were examined."""


def expected_start(
    state: CellState, job: JobState, ends_ms: Mapping[str, int], now_ms: int, line: Line | None = None
) -> Start | None:
    """Expected start of a job of the queue. `ends_ms`: expected end per job that holds resources, where it is
    known; `line`: of this state, for a caller that has it.

    None: it is not in the queue. Examines at most MAX_VISITS nodes, about 0.1 s, once the queue is in order.
    """
    if job.order not in state.queue:
        return None
    holders = _holders(state, job, ends_ms)
    line = line or line_of(state, now_ms)
    assumes = BY_ARRIVAL if line.profile.order is None else OWN_ORDER
    if line.profile.preempt is not None:
        assumes = PREEMPTING
    try:
        starts_ms = _Forecast(state, [job], line, ends_ms, now_ms).starts().get(job.job_id)
    except TooFar:
        return Start(None, "too many jobs and nodes for a forecast", holders, assumes)
    return Start(starts_ms, "" if starts_ms is not None else _unknown(state, ends_ms), holders, assumes)


def expected_starts(
    state: CellState, jobs: Sequence[JobState], ends_ms: Mapping[str, int], now_ms: int
) -> Mapping[str, int]:
    """Job → expected start, for the jobs in the queue where it is known. As `expected_start`; for all jobs
    together it costs about as much as for the last one.

    Under a profile that stops jobs each job has a separate forecast, and only the first MAX_ALONE are
    computed.
    """
    asked = [job for job in jobs if job.order in state.queue]
    line = line_of(state, now_ms)
    together = [asked] if line.profile.preempt is None else [[job] for job in asked[:MAX_ALONE]]
    found: dict[str, int] = {}
    for some in together:
        try:
            found |= _Forecast(state, some, line, ends_ms, now_ms).starts()
        except TooFar:
            continue
    return found


@dataclass(slots=True)
class _Fits:
    """`tasks`: sum over the nodes; `read`: how many of the changes are included."""

    nodes: dict[int, int]
    tasks: int
    read: int


class _Forecast(Trying[Alike, Taken]):
    """Simulation of the cell from now on, by estimates. Raises `TooFar`."""

    makes_room = True  # it makes none, and asks whether all further jobs wait

    def __init__(
        self,
        state: CellState,
        asked: Sequence[JobState],
        line: Line,
        ends_ms: Mapping[str, int],
        now_ms: int,
    ) -> None:
        """`asked`: at least one job; under a profile that stops jobs exactly one, since jobs later in the
        order are preempted."""
        self._state = state
        self._asked = {job.job_id for job in asked}
        self._found: dict[str, int] = {}
        self._profile = line.profile
        self._settings = in_force(state.settings)
        self._now_ms = now_ms
        self._waiting = _looked_at(state, asked, line)
        self._wanted = Counter(job.demand for job in self._waiting.values())
        self._settled: tuple[int, bool] = (-1, False)
        """(number of changes, whether no waiting job fits since then)."""
        self._holding = {job.job_id: job for job in state.holding.values()}
        self._view = ClusterView(state)
        self._changed: list[int] = []
        """Ordinals of nodes whose free resources have changed since the forecast began, in the order of the
        changes."""
        self._fits: dict[tuple[object, ...], _Fits] = {}
        self._begun: dict[str, Taken] = {}
        self._overtaken: dict[str, int] = {}
        self._visits = 0.0
        order, preempt = self._profile.order, self._profile.preempt
        self._ranking = None if order is None else order.ranking(state, self._waiting.values())
        for other in preempt.later(state, asked[0]) if preempt is not None else ():
            self._release(other.job_id)
        self._ends = [
            (max(now_ms, ends_ms[job_id]), held.order, job_id)
            for job_id, held in self._holding.items()
            if job_id in ends_ms
        ]
        heapq.heapify(self._ends)

    def starts(self) -> Mapping[str, int]:
        """Asked job → start in ms; jobs without a known start are left out."""
        while not self._all_start() and self._ends:
            self._now_ms, _, ended = heapq.heappop(self._ends)
            self._release(ended)
        return self._found

    def _all_start(self) -> bool:
        """Starts each waiting job that fits, in order; returns whether all asked jobs have started."""
        self._visits += len(self._waiting) * VISITS_PER_TURN
        if self.settled():
            return False
        window = self._settings.backfill_window if self._profile.preempt is None else inf
        for result in scheduling_pass(self._turns(), self, window):
            if isinstance(result, Starts):
                self._begin(result.job, result.place)
                if len(self._found) == len(self._asked):
                    return True
        return False

    def alike(self, job: JobState) -> Alike:
        """As `Trying`."""
        return job.demand_key, self._barred(job) if self._state.planned else frozenset()

    def place(self, job: JobState, key: Alike) -> Starts[Taken] | Waits:
        """As `Trying`. Raises `TooFar`."""
        taken = self._take(job.demand, key[1])
        return Waits(job) if taken is None else Starts(job, taken)

    def settled(self) -> bool:
        """As `Trying`: no job's workers fit. Orders of arrival count who is overtaken, and go on."""
        if self._ranking is None:
            return False
        if self._settled[0] != len(self._changed):
            wanted = (self._fitting(one.worker, one.where).tasks >= one.workers for one in self._wanted)
            self._settled = len(self._changed), not any(wanted)
        return self._settled[1]

    def _turns(self) -> Turns:
        if self._ranking is not None:
            return self._ranking.turns(self._now_ms)
        waiting = list(self._waiting.values())
        if self._profile.preempt is not None:
            return by_arrival(waiting, {}, MAX_OVERTAKES)
        return by_arrival(waiting, self._overtaken, self._settings.max_overtakes)

    def _barred(self, job: JobState) -> frozenset[str]:
        """Nodes reserved for other jobs that still wait, unless this job ends in time."""
        units = [unit for job_id, unit in self._state.planned.items() if job_id in self._waiting]
        ends_ms = self._now_ms + remaining_s(self._state, job) * 1_000 if units else 0
        return frozenset(
            node_id
            for unit in units
            if unit.job_id != job.job_id
            if unit.expected_ms is None or ends_ms > unit.expected_ms
            for node_id in unit.nodes
        )

    def _begin(self, job: JobState, taken: Taken) -> None:
        del self._waiting[job.job_id]
        self._wanted[job.demand] -= 1
        if not self._wanted[job.demand]:
            del self._wanted[job.demand]
        if job.job_id in self._asked:
            self._found[job.job_id] = self._now_ms
        self._holding[job.job_id] = job
        self._begun[job.job_id] = taken
        run_s = remaining_s(self._state, job)
        if run_s < inf:
            heapq.heappush(self._ends, (self._now_ms + round(run_s * 1_000), job.order, job.job_id))

    def _take(self, demand: Demand, barred: frozenset[str]) -> Taken | None:
        """Places the whole gang by first fit on nodes that are not barred; takes nothing where it does not
        fit."""
        if self._visits > MAX_VISITS:
            raise TooFar
        roles = [(demand.worker, demand.workers)]
        if demand.parameter_servers:
            roles.append((demand.parameter_server, demand.parameter_servers))
        free = []
        for need, tasks in roles:
            fits = self._fitting(need, demand.where)
            if fits.tasks < tasks:
                return None
            free.append([one for one in sorted(fits.nodes) if self._state.node_at[one] not in barred])
        taken: Taken = []
        for (need, tasks), ordinals in zip(roles, free, strict=True):
            left = tasks
            for ordinal in ordinals:
                while left and self._view.free(ordinal).fits(need):
                    taken.append((ordinal, self._view.claim_task(need, ordinal)))
                    left -= 1
            if left:
                self._give_back(taken)
                return None
        self._changed += dict.fromkeys(ordinal for ordinal, _ in taken)
        return taken

    def _give_back(self, taken: Taken) -> None:
        for _, undo in reversed(taken):
            undo()

    def _fitting(self, need: ResourceVector, where: Where) -> _Fits:
        """Ordinal of a node → how many such tasks fit, if at least one. Only nodes that have changed are
        examined again."""
        key = (*vector_key(need), *where)
        known, index = self._fits.get(key), self._state.index
        if known is None:
            known = self._fits[key] = _Fits({}, 0, 0)
            changed = {*bits(index.candidates(need, where)), *self._changed}
        else:
            changed = set(self._changed[known.read :])
        known.read = len(self._changed)
        self._visits += len(changed)
        eligible = index.eligible(need, where)
        for ordinal in changed:
            count = self._view.count(need, ordinal, MAX_GANG_TASKS) if eligible >> ordinal & 1 else 0
            known.tasks += count - known.nodes.pop(ordinal, 0)
            if count:
                known.nodes[ordinal] = count
        return known

    def _release(self, job_id: str) -> None:
        held = self._holding.pop(job_id)
        if self._ranking is not None:
            self._ranking.ends(held)
        if job_id in self._begun:
            taken = self._begun.pop(job_id)
            self._give_back(taken)
            self._changed += dict.fromkeys(ordinal for ordinal, _ in taken)
            return
        self._view.release(held)
        self._view.release_places(held.target)
        self._changed += dict.fromkeys(
            self._state.nodes[place.node_id].ordinal for place in held_places(held)
        )


def _looked_at(state: CellState, asked: Sequence[JobState], line: Line) -> dict[str, JobState]:
    """The first MAX_AHEAD waiting jobs, in order; under a profile that stops jobs only up to the asked job,
    since later ones cannot delay it.

    Raises `TooFar` where none of the asked jobs is among them.
    """
    ids = state.queue.values() if line.places is None else line.places
    wanted = {job.job_id: job for job in asked}
    found: dict[str, JobState] = {}
    for job_id in islice(ids, MAX_AHEAD):
        found[job_id] = wanted.get(job_id) or as_it_waits(state, state.jobs[job_id], line.profile.shape)
        if job_id in wanted and line.profile.preempt is not None:
            break
    if not wanted.keys() & found.keys():
        raise TooFar
    return found


def _holders(state: CellState, job: JobState, ends_ms: Mapping[str, int]) -> tuple[Holder, ...]:
    """Jobs that hold resources on nodes that suit a worker of this job, earliest end first."""
    need, index = job.demand.worker, state.index
    suited = index.eligible(need, job.demand.where) & index.placeable
    known = sorted(sorted(ends_ms), key=ends_ms.__getitem__)
    unknown = sorted({held.job_id for held in state.holding.values()} - ends_ms.keys())
    found: list[Holder] = []
    for job_id in (*known, *unknown):
        held = state.jobs[job_id]
        places = [place for place in held_places(held) if state.nodes[place.node_id].bit & suited]
        gpus = sum(len(place.gpus) for place in places)
        if places and (gpus or not need.gpus):
            found.append(Holder(job_id, held.spec.owner, gpus, ends_ms.get(job_id)))
            if len(found) == MAX_NAMED:
                break
    return tuple(found)


def _unknown(state: CellState, ends_ms: Mapping[str, int]) -> str:
    unknown = sum(held.job_id not in ends_ms for held in state.holding.values())
    if unknown:
        return f"the remaining time of {unknown} of {len(state.holding)} running jobs is not known"
    return "the jobs with a known end do not free enough resources"
