"""Adjustments of running tasks: what the placer decides of their cores and memory bandwidth, and what a node makes of it."""

from typing import Annotated, Literal

from msgspec import Meta

from penstock.model.event import Event, event
from penstock.model.external_events import Attempt, TaskEvent, Token
from penstock.model.types import CoreId, Identifier, ShortText

Percent = Annotated[int, Meta(ge=1, le=100)]
MAX_CORE_PROBES = 4
"""Numbers of cores that a running task is tried with, by services, per attempt. Source: CODA §VI-F, 3 to 4."""
MAX_CORE_CHANGES = 16
"""Of one job's tasks together, by services and per worker: three searches of four probes and an end each. What gives a task back what it was placed with is not counted."""
MAX_THROTTLES = 24
"""Of one job's tasks together, by services and per worker: steps down, whether by caps or by cores. Lifting them is not counted: each lifts one that was."""
AdjustmentCause = Literal["", "probe", "settled", "contention", "released", "other"]
"""Why a service adjusts a task. `probe`: to measure its speed with so many cores, at most `MAX_CORE_PROBES` times; `settled`: the search for its cores has
ended, once per attempt; `contention`: it slows a training beside it (never a job with GPUs); `released`: that is over; `other`: it names none. Empty: an operator asks for it."""


class AdjustmentDecided(Event, frozen=True, kw_only=True):
    """Base of decisions about one running task. They hold for this attempt; the order's token is (epoch, this record's seq)."""

    job_id: Identifier
    attempt: Attempt
    task_id: Identifier
    node_id: Identifier
    by: ShortText
    """The operator who asked for it, else the proposer."""
    reason: ShortText


@event
class CoresDecided(AdjustmentDecided, frozen=True, kw_only=True):
    """A running task has exactly these cores from now on: those that it keeps, then the lowest free ones."""

    TYPE = "penstock.cores.decided"
    OMITTED = ("cause",)

    cores: Annotated[tuple[CoreId, ...], Meta(min_length=1)]
    cause: AdjustmentCause = ""


@event
class BandwidthDecided(AdjustmentDecided, frozen=True, kw_only=True):
    """A running task's memory bandwidth is capped, in percent of what each of its node's memory controllers can do; None lifts the cap."""

    TYPE = "penstock.bandwidth.decided"
    OMITTED = ("cause",)

    memory_bandwidth_percent: Percent | None
    cause: AdjustmentCause = ""


@event
class CheckpointDecided(AdjustmentDecided, frozen=True, kw_only=True):
    """A running job's rank 0 is asked to save what it has done, and trains on. `TaskCheckpointed` answers."""

    TYPE = "penstock.checkpoint.decided"


@event
class TaskAdjusted(TaskEvent, frozen=True, kw_only=True):
    """A node has obeyed an order to adjust a running task, or cannot. `token`: of the order that started the task."""

    TYPE = "penstock.task.adjusted"

    order_token: Token
    """Of the order that is answered."""
    what: Literal["cores", "memory_bandwidth"]
    enforced: Literal["", "cpuset", "affinity", "resctrl"]
    """By what, read back after it was set; `affinity`: the task can widen it. Empty: not, `detail` has the reason."""
    detail: ShortText = ""
