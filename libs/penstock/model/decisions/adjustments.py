"""Events that adjust running tasks: the placer's decisions about cores, memory bandwidth and checkpoints, and
a node's report of the result."""

from typing import Annotated, Literal

from msgspec import Meta

from penstock.model.inputs.external_events import Attempt, TaskEvent, Token
from penstock.model.nouns.types import CoreId, Identifier, ShortText
from penstock.model.schema.event import Event, event

Percent = Annotated[int, Meta(ge=1, le=100)]
MAX_CORE_PROBES = 4
"""Maximum number of core counts that services try on a running task, per attempt.
Source: CODA §VI-F, 3 to 4."""
MAX_CORE_CHANGES = 16
"""Maximum number of core changes by services, per worker and summed over a job's tasks: three searches of
four probes and a final change each. A return to the cores of the placement is not counted."""
MAX_THROTTLES = 24
"""Maximum number of throttling steps by services, per worker and summed over a job's tasks, by caps or by
cores. Lifts are not counted: each ends a step that was counted."""
ADJUSTED_FOR_MS = 900_000
"""A service's temporary adjustment (a throttle, a probe) ends after so long, whether its service is alive or
not, unless the service renews it. Twice the longest calm after which the contention-guard gives back
(`penstock.scheduling.acting.eliminator`), so that a service that lives decides first."""
RENEWED_AFTER_MS = ADJUSTED_FOR_MS // 2
"""From then on the same adjustment, proposed again, renews it."""
AdjustmentCause = Literal["", "probe", "settled", "contention", "released", "other"]
"""Why a service adjusts a task. `probe`: to measure its speed with this number of cores, at most
`MAX_CORE_PROBES` times; `settled`: the search for its number of cores has ended, once per attempt;
`contention`: it slows down a training job on its node (never a job with GPUs); `released`: the contention is
over; `other`: the service names no cause. Empty: an operator requested it."""


Enforcement = Literal["", "cpuset", "affinity", "resctrl", "cpu_quota"]
"""Mechanism that enforces what a task has; empty: none does."""


class AdjustmentDecided(Event, frozen=True, kw_only=True):
    """Base of decisions about one running task. They hold for this attempt; the order's token is (epoch, this
    record's seq)."""

    job_id: Identifier
    attempt: Attempt
    task_id: Identifier
    node_id: Identifier
    by: ShortText
    """The operator who asked for it, else the proposer."""
    reason: ShortText


@event
class CoresDecided(AdjustmentDecided, frozen=True, kw_only=True):
    """A running task has exactly these cores from now on: the ones that it retains,
    then the lowest free ones."""

    TYPE = "penstock.cores.decided"
    OMITTED = ("cause",)

    cores: Annotated[tuple[CoreId, ...], Meta(min_length=1)]
    cause: AdjustmentCause = ""


@event
class BandwidthDecided(AdjustmentDecided, frozen=True, kw_only=True):
    """A running task's memory bandwidth is capped, in percent of the bandwidth of each memory controller of
    its node, or of the time of its cores (`Isolation.bandwidth`); None lifts the cap."""

    TYPE = "penstock.bandwidth.decided"
    OMITTED = ("cause",)

    memory_bandwidth_percent: Percent | None
    cause: AdjustmentCause = ""


@event
class CheckpointDecided(AdjustmentDecided, frozen=True, kw_only=True):
    """Rank 0 of a running job is asked to save a checkpoint and continues to train. `TaskCheckpointed`
    answers, or `SaveRefused`."""

    TYPE = "penstock.checkpoint.decided"


@event
class TaskAdjusted(TaskEvent, frozen=True, kw_only=True):
    """A node has carried out an order to adjust a running task, or reports that it cannot. `token`: of the
    order that started the task."""

    TYPE = "penstock.task.adjusted"

    order_token: Token
    """Token of the order that is answered."""
    what: Literal["cores", "memory_bandwidth"]
    enforced: Enforcement
    """Mechanism that enforces it, read back after it was set; `affinity`: the task can widen it. Empty: not
    enforced, `detail` has the reason."""
    detail: ShortText = ""
