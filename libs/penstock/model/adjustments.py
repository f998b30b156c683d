"""Adjustments of running tasks: what the placer decides of their cores and memory bandwidth, and what a node makes of it."""

from typing import Annotated, Literal

from msgspec import Meta

from penstock.model.event import Event, event
from penstock.model.external_events import Attempt, TaskEvent, Token
from penstock.model.types import CoreId, Identifier, ShortText

Percent = Annotated[int, Meta(ge=1, le=100)]


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

    cores: Annotated[tuple[CoreId, ...], Meta(min_length=1)]


@event
class BandwidthDecided(AdjustmentDecided, frozen=True, kw_only=True):
    """A running task's memory bandwidth is capped, in percent of what each of its node's memory controllers can do; None lifts the cap."""

    TYPE = "penstock.bandwidth.decided"

    memory_bandwidth_percent: Percent | None


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
