"""Contention eliminator: throttles jobs without GPUs on a node where a training job slows down, and releases
them again.

Source: CODA §V-D. If a node's memory bandwidth is at 75 % of its maximum and the utilisation of its training
jobs drops, the jobs without GPUs are throttled (MBA), or get half their cores where the processor cannot cap
bandwidth. Training jobs are never throttled.

Departures:
- A training job is slow when its speed (steps, or utilisation where it reports no steps) has fallen by 10 %
  from its best with the same cores.
- Where bandwidth cannot be capped, a job that has one core left is capped to a part of that core's time,
  where the node can do that: it may slow a training job from one core, too.
- Without counters of bandwidth the signal is the kernel's pressure stall information: the time in which
  threads of the training job waited for a core.
- Caps are lowered in steps, each of which is measured before the next: 50, 25, 10 %. The source names no
  step.
- Where threads of the training job wait for cores, as many cores are taken at once as its slowdown requires
  (`left`), at least half. The source halves them (`halves`): 8 programs on the cores of a training job then
  slow it for as long as three steps are measured.
- Hysteresis: a throttled job is released when the pressure has stayed under a lower bound for a period, which
  doubles each time, or when no training job is left on the node.
"""

from collections.abc import Sequence
from typing import NamedTuple

from penstock.model.decisions.adjustments import AdjustmentCause
from penstock.model.nouns.nodes import BandwidthCap
from penstock.scheduling.acting.settling import QUIET
from penstock.scheduling.acting.telemetry_windows import WINDOW_MS

BANDWIDTH_HIGH = 75.0
"""Percent of the node's memory bandwidth. Source: CODA §V-D."""
BANDWIDTH_LOW = 60.0  # own: so far below `BANDWIDTH_HIGH` that a release does not throttle again at once
STALLED = 10.0
"""Percent of the time in which some thread of a training job waits for a core. A training job alone on its
cores has almost none. Nodes publish when waiting begins, and once when it has ended, with a value below this:
high and low are separated only in time."""
FALLS = 0.10
"""A training job that has lost this fraction of its best speed is slow."""
CAPS = (50, 25, 10)
"""Steps of the cap, in percent."""
LITTLE_TRAFFIC = 5.0
"""Percent of the node's bandwidth: throttling a job that uses less has no effect."""
HEAVY = 0.5
"""Fraction of the largest traffic of a job without GPUs on the node: a job with less is not throttled with
it. Source: §V-D monitors each such job's bandwidth, and names no bound."""
MAX_DOUBLINGS = 6  # of the time before a release: 6.4 min at most


class Training(NamedTuple):
    """A running task with GPUs."""

    task_id: str
    lost: float | None
    """Fraction of its best speed that it has lost, 0 – 1, measured after the latest change on the node. None:
    not known (yet)."""


class Other(NamedTuple):
    """A running task of a job without GPUs."""

    task_id: str
    cores: int
    cap: int | None
    """The cap that it got here, in percent of memory bandwidth or of its cores' time; None: it has none, or
    an operator's."""
    throttled_from: int
    """Cores that it had before some were taken; 0: none were taken."""
    traffic: float | None
    """Percent of the node's memory bandwidth that it uses; None: not known."""
    most: int
    """The most cores that it could have now, if some were taken; else those that it has."""
    may_throttle: bool
    """Whether it was throttled less often than is allowed, and no operator has set its cores or cap."""
    may_return: bool
    """Whether it could be throttled again after a release while a training job runs beside it."""

    def can_be_slowed(self, caps: BandwidthCap) -> bool:
        """Whether its cap or its cores can still be lowered."""
        by_cap = caps != "none" and (self.cap is None or self.cap > CAPS[-1])
        return by_cap or (self.cores > 1 and caps != "resctrl")

    def lower_cap(self, part: float) -> int:
        """The first step of the cap at or below this part of its present one, else the last step."""
        most = part * (100 if self.cap is None else self.cap)
        return next((cap for cap in CAPS if cap <= most), CAPS[-1])

    @property
    def throttled(self) -> bool:
        return self.cap is not None or self.throttled_from > self.cores


class NodeView(NamedTuple):
    """Measurements of a node."""

    node_id: str
    caps: BandwidthCap
    bandwidth: float | None
    """Percent of the node's maximum; None: it has no counters."""
    stalled: float | None
    """Percent of the time, the maximum of its training jobs, else of the node. None: not known."""
    trainings: Sequence[Training]
    others: Sequence[Other]

    @property
    def high(self) -> bool:
        """Whether bandwidth or cores are short on the node."""
        if self.bandwidth is not None:
            return self.bandwidth >= BANDWIDTH_HIGH
        return self.stalled is not None and self.stalled >= STALLED

    @property
    def low(self) -> bool:
        """Whether certainly neither is short."""
        if self.bandwidth is not None:
            return self.bandwidth < BANDWIDTH_LOW
        return self.stalled is not None and self.stalled < STALLED

    @property
    def slowest(self) -> Training | None:
        """The training job that has lost most speed, if at least `FALLS`."""
        slow = [one for one in self.trainings if one.lost is not None and one.lost >= FALLS]
        return max(slow, key=lambda one: (one.lost or 0.0, one.task_id), default=None)

    @property
    def pressure(self) -> str:
        """The measured pressure, as text."""
        if self.bandwidth is not None:
            return f"memory bandwidth {self.bandwidth:.0f} %"
        if self.stalled is None:
            return "nothing known of its pressure"
        return f"threads wait for a core {self.stalled:.0f} % of the time"


class Change(NamedTuple):
    """A proposed change for one task: either of its cores or of its cap."""

    task_id: str
    cause: AdjustmentCause
    reason: str
    cores: int | None = None
    """None: its cap is changed."""
    cap: int | None = None


def left(lost: float) -> float:
    """The fraction of their cores that others retain, 0 to ½, so that a training job that now loses `lost`
    (`FALLS` – 1) of its speed loses `FALLS`.

    Its step takes 1 / (1 - lost) as long as alone; the additional time is proportional to the threads that
    compete for its cores, so to the others' cores.
    """
    return min(0.5, FALLS / (1 - FALLS) * (1 - lost) / lost)


def throttled(view: NodeView, *, halves: bool) -> Sequence[Change]:
    """Which tasks are throttled now, and to which value. Source: CODA §V-D."""
    slow = view.slowest
    if slow is None or not view.high:
        return ()
    why = (
        f"{slow.task_id} has lost {100 * (slow.lost or 0.0):.0f} % of its speed on {view.node_id}, "
        f"{view.pressure}"
    )
    able = [other for other in view.others if other.may_throttle and other.can_be_slowed(view.caps)]
    heavy = max(
        LITTLE_TRAFFIC,
        HEAVY * max((other.traffic for other in able if other.traffic is not None), default=0.0),
    )
    part = 0.5 if halves or view.bandwidth is not None else left(slow.lost or FALLS)
    found = []
    for other in able:
        if other.traffic is not None and other.traffic < heavy:
            continue
        if view.caps == "resctrl":
            found.append(Change(other.task_id, "contention", why, cap=other.lower_cap(0.5)))
        elif other.cores == 1:
            found.append(Change(other.task_id, "contention", why, cap=other.lower_cap(part)))
        else:
            found.append(Change(other.task_id, "contention", why, cores=max(1, int(other.cores * part))))
    return found


def released(view: NodeView, *, calm: bool) -> Sequence[Change]:
    """Which tasks are released now, in one step; of a task that has both fewer cores and a cap, only the cap.
    `calm`: the pressure has been low for long enough."""
    if view.trainings and not calm:
        return ()
    why = (
        f"on {view.node_id} no resource is short any more, {view.pressure}"
        if view.trainings
        else f"no training runs on {view.node_id} any more"
    )
    found, taken = [], 0
    for other in view.others:
        if view.trainings and not other.may_return:
            continue
        if other.cap is not None:
            found.append(Change(other.task_id, "released", why, cap=None))
        elif (cores := min(other.throttled_from, other.most - taken)) > other.cores:
            taken += cores - other.cores  # of the node's free cores
            found.append(Change(other.task_id, "released", why, cores=cores))
    return found


def calm_after_ms(times: int) -> int:
    """How long the pressure must stay low before jobs that were released `times` before are released again;
    at first as long as a speed without steps settles."""
    return QUIET * WINDOW_MS << min(times, MAX_DOUBLINGS)
