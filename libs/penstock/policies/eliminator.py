"""Contention eliminator: which jobs without GPUs are slowed on a node where a training falls behind, and when they are let go again.

Source: CODA §V-D. If a node's memory bandwidth is at 75 % of what it can do and the utilisation of its trainings drops, the jobs without GPUs are
throttled (MBA), or have half their cores where the processor cannot cap bandwidth. Trainings are never throttled.

Departures:
- A training is slow when its speed (steps, or where it reports none utilisation) has fallen by 10 % from its best with the same cores.
- Without counters of bandwidth the signal is the kernel's: the time in which threads of the training waited for a core (pressure stall information).
- Caps go down in steps, each of which is measured before the next: 50, 25, 10 %. The source names no step.
- Where threads of the training wait for cores, as many cores are taken at once as its loss asks for (`left`), half at least. The source halves them
  (`halves`): 8 programs on the cores of a training then slow it for as long as three steps are measured.
- Hysteresis: a throttled job is let go when the pressure has stayed under a lower bound for a while, which doubles each time, or when no training is left on the node.
"""

from collections.abc import Sequence
from typing import NamedTuple

from penstock.model.adjustments import AdjustmentCause

BANDWIDTH_HIGH = 75.0
"""Percent of the node's memory bandwidth. Source: CODA §V-D."""
BANDWIDTH_LOW = 60.0
STALLED_HIGH = 10.0
"""Percent of the time in which some thread of a training waits for a core. A training alone on its cores has next to none."""
STALLED_LOW = 10.0
"""Nodes publish of waiting that it begins, and once that it is over, which is below that: what separates the two bounds is time alone."""
FALLS = 0.10
"""A training that has lost this part of its best speed is slow."""
CAPS = (50, 25, 10)
"""Percent of memory bandwidth, step by step."""
LITTLE_TRAFFIC = 5.0
"""Percent of the node's bandwidth: slowing a job that takes less brings nothing."""
HEAVY = 0.5
"""Of the greatest traffic of a job without GPUs on the node: who takes less is not slowed with it. Source: §V-D watches each such job's bandwidth, and names no bound."""
RELEASE_MS = 6_000
"""So long the pressure stays low before jobs are let go: three windows of telemetry, twice as long after each time."""
MAX_DOUBLINGS = 6


class Training(NamedTuple):
    """A running task with GPUs."""

    task_id: str
    lost: float | None
    """Part of its best speed that it has lost, 0 – 1, measured after the latest change on the node. None: not known (yet)."""


class Other(NamedTuple):
    """A running task of a job without GPUs."""

    task_id: str
    cores: int
    cap: int | None
    """Percent of memory bandwidth; None: it has no cap."""
    throttled_from: int
    """Cores that it had before it was slowed; 0: it was not, by cores."""
    traffic: float | None
    """Percent of the node's memory bandwidth that it takes; None: not known."""
    most: int
    """Cores that it could have now."""
    may_throttle: bool
    """Whether it was slowed less often than is allowed."""
    may_return: bool
    """Whether it could be slowed again after it was let go while a training runs beside it."""

    @property
    def lower_cap(self) -> int | None:
        """The next step down; None: there is none."""
        return next((cap for cap in CAPS if self.cap is None or cap < self.cap), None)

    def can_be_slowed(self, *, caps: bool) -> bool:
        """Whether there is a step down, by caps or by cores."""
        return self.lower_cap is not None if caps else self.cores > 1

    @property
    def throttled(self) -> bool:
        return self.cap is not None or self.throttled_from > self.cores


class NodeView(NamedTuple):
    """What is known of a node. Tasks by id."""

    node_id: str
    caps: bool
    """Whether bandwidth can be capped."""
    bandwidth: float | None
    """Percent of what the node can do; None: it has no counters."""
    stalled: float | None
    """Percent of the time, the most of its trainings, else of the node. None: not known."""
    trainings: Sequence[Training]
    others: Sequence[Other]

    @property
    def high(self) -> bool:
        """Whether something is short on the node."""
        if self.bandwidth is not None:
            return self.bandwidth >= BANDWIDTH_HIGH
        return self.stalled is not None and self.stalled >= STALLED_HIGH

    @property
    def low(self) -> bool:
        """Whether nothing is, for sure."""
        if self.bandwidth is not None:
            return self.bandwidth < BANDWIDTH_LOW
        return self.stalled is not None and self.stalled < STALLED_LOW

    @property
    def slowest(self) -> Training | None:
        """The training that has lost most, if that is enough."""
        slow = [one for one in self.trainings if one.lost is not None and one.lost >= FALLS]
        return max(slow, key=lambda one: (one.lost or 0.0, one.task_id), default=None)

    @property
    def pressure(self) -> str:
        """In words."""
        if self.bandwidth is not None:
            return f"memory bandwidth {self.bandwidth:.0f} %"
        if self.stalled is None:
            return "nothing known of its pressure"
        return f"threads wait for a core {self.stalled:.0f} % of the time"


class Change(NamedTuple):
    """What is proposed for one task: either cores or a cap."""

    task_id: str
    cause: AdjustmentCause
    reason: str
    cores: int | None = None
    """None: its cap is changed."""
    cap: int | None = None


def left(lost: float) -> float:
    """The part of their cores that others keep, 0 to ½, so that a training loses `FALLS` of its speed, which loses `lost` now (`FALLS` – 1).

    A step of it takes 1 / (1 - lost) as long as alone; what it takes longer grows with the threads that it meets on its cores, so with others' cores.
    """
    return min(0.5, FALLS / (1 - FALLS) * (1 - lost) / lost)


def throttled(view: NodeView, *, halves: bool) -> Sequence[Change]:
    """Who is slowed now, and how far. Source: CODA §V-D."""
    slow = view.slowest
    if slow is None or not view.high:
        return ()
    why = f"{slow.task_id} has lost {100 * (slow.lost or 0.0):.0f} % of its speed on {view.node_id}, {view.pressure}"
    able = [other for other in view.others if other.may_throttle and other.can_be_slowed(caps=view.caps)]
    heavy = max(
        LITTLE_TRAFFIC,
        HEAVY * max((other.traffic for other in able if other.traffic is not None), default=0.0),
    )
    part = 0.5 if halves or view.bandwidth is not None else left(slow.lost or FALLS)
    found = []
    for other in able:
        if other.traffic is not None and other.traffic < heavy:
            continue
        if view.caps:
            found.append(Change(other.task_id, "contention", why, cap=other.lower_cap))
        else:
            found.append(Change(other.task_id, "contention", why, cores=max(1, int(other.cores * part))))
    return found


def released(view: NodeView, *, calm: bool) -> Sequence[Change]:
    """Who is let go now, in one step. `calm`: the pressure has been low for long enough."""
    if view.trainings and not calm:
        return ()
    why = (
        f"on {view.node_id} nothing is short any more, {view.pressure}"
        if view.trainings
        else f"no training runs on {view.node_id} any more"
    )
    found = []
    for other in view.others:
        if view.trainings and not other.may_return:
            continue
        if other.cap is not None:
            found.append(Change(other.task_id, "released", why, cap=None))
        elif other.throttled_from > other.cores and other.most > other.cores:
            cores = min(other.throttled_from, other.most)
            found.append(Change(other.task_id, "released", why, cores=cores))
    return found


def calm_after_ms(times: int) -> int:
    """How long the pressure stays low before jobs are let go that were let go so many times before."""
    return RELEASE_MS << min(times, MAX_DOUBLINGS)
