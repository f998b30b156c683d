"""Inputs of the node's core: orders read, processes started and gone, and the machine's own reports."""

from typing import Literal

import msgspec

from penstock.model.decisions.adjustments import Enforcement
from penstock.model.decisions.orders import Order
from penstock.model.inputs.external_events import GpuFaulted
from penstock.model.nouns.types import Usage
from penstock_services.node_reporter.core.state import NO_CONTEXT, Context

NOTHING_MEASURED = Usage()
Exhausted = Literal["", "host_memory", "gpu_memory"]


class OrderRead(msgspec.Struct, frozen=True):
    order: Order
    now_ms: int
    context: Context = NO_CONTEXT


class OfTask(msgspec.Struct, frozen=True):
    """For one task under one token."""

    task_id: str
    token: int


class Spawned(OfTask, frozen=True):
    """The program runs (its exec succeeded)."""

    pid: int
    started_ms: int
    now_ms: int


class Outcome(msgspec.Struct, frozen=True):
    """How a task ended. Without code, signal and failure the result could not be read: it is lost."""

    exited_ms: int
    started_ms: int | None = None
    exit_code: int | None = None
    signal: int | None = None
    failure: str = ""
    """Why it could not be started, with the remedy."""
    out_of_memory: bool = False
    exhausted: Exhausted = ""
    """Kind of memory in which an allocation failed, as far as kernel or program reported it;
    `evidence`: the source."""
    evidence: str = ""
    gpu_memory_limit_mib: int = 0
    """Limit under which it ran out of GPU memory, where other tasks had a part of its GPUs; 0: none."""
    lost: str = ""
    left: int = 0
    """Processes that its program left running, or that a stop did not end within the grace."""
    usage: Usage = NOTHING_MEASURED


class Gone(OfTask, frozen=True):
    """No process of this task is left; proven."""

    outcome: Outcome


class Resumed(msgspec.Struct, frozen=True):
    """A new reporter has found the running tasks; nothing was started since."""


class Done(OfTask, frozen=True):
    """An adjustment was set and read back, or could not be: `enforced` is empty then,
    `detail` has the reason."""

    order_token: int
    what: Literal["cores", "memory_bandwidth"]
    enforced: Enforcement
    detail: str = ""


class Unsaved(OfTask, frozen=True):
    """No process of the task saves. `order_token`: of the request, or that of the start where the task is
    being stopped."""

    order_token: int
    at_ms: int


class Stepped(OfTask, frozen=True):
    """Its script reports how long its iterations take."""


class GraceOver(OfTask, frozen=True):
    """The time between SIGTERM and SIGKILL has passed."""


class Drain(msgspec.Struct, frozen=True):
    now_ms: int
    grace_ms: int


class Faulted(msgspec.Struct, frozen=True):
    """A GPU broke."""

    event: GpuFaulted


Input = OrderRead | Spawned | Resumed | Done | Unsaved | Gone | Stepped | GraceOver | Drain | Faulted
