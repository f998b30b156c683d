"""Actions of the node's core: what its shell does after the changes of a step are durable."""

import signal

import msgspec

from penstock.model.decisions.orders import StartTask
from penstock.model.schema.event import Event
from penstock_services.node_reporter.core.inputs import OfTask
from penstock_services.node_reporter.core.joining import Fence, JoinAgain
from penstock_services.node_reporter.core.state import Change, Context


class Emit(msgspec.Struct, frozen=True):
    event: Event
    context: Context
    name: str = ""
    """End of its id; empty: that of its type."""


class Spawn(msgspec.Struct, frozen=True):
    """Start the process, up to its gate where the task is gated."""

    order: StartTask


class Signal(OfTask, frozen=True):
    """SIGTERM: the task is to end. SIGKILL: to every process of the task."""

    number: signal.Signals


class Carried(OfTask, frozen=True):
    """Carried out on the host; its result is fed back."""


class AskToSave(Carried, frozen=True):
    """Ask the processes of the task that save; feed `Unsaved` where none does. `by_sdk`: those that have
    registered, no others."""

    order_token: int
    by_sdk: bool


class LookForSaver(Carried, frozen=True):
    """Before a stop: feed `Unsaved` where no process of the task saves."""


class OpenGate(OfTask, frozen=True):
    """The task has its GPUs now, and goes on. Idempotent; nothing where the task has ended."""


class KillAt(OfTask, frozen=True):
    """Feed `GraceOver` at this time."""

    at_ms: int


class SetAffinity(Carried, frozen=True):
    """Feed `Done` with the result; nothing where the task has ended."""

    order_token: int
    cores: tuple[int, ...]
    cap_percent: int | None = None
    """The cap that it has (`CapBandwidth.percent`)."""


class CapBandwidth(Carried, frozen=True):
    """As `SetAffinity`."""

    order_token: int
    percent: int | None
    """Of a memory controller's bandwidth, or of its cores' time; None: no cap."""


class Discard(msgspec.Struct, frozen=True):
    """The job of this task has succeeded: remove its checkpoints here."""

    order: StartTask


class Note(msgspec.Struct, frozen=True):
    """For the service's log: an order that is outdated, or that this node cannot carry out."""

    text: str


Action = Emit | Spawn | Signal | Carried | OpenGate | KillAt | Discard | Note | JoinAgain | Fence
Decision = Change | Action
