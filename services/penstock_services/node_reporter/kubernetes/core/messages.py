"""Inputs and actions of the reporter's core: what its shell feeds, and what it carries out.

The shell's part, in this order at each start of a session:

1. Carry out `RaiseFence`, which `begin` returns, and feed `FenceRaised`. Note the end of each partition of
   orders: orders are read from there, and no position is ever stored (`reporter`).
2. List nodes and pods, and feed both as `Listed`. `step` answers with the events of what has happened, then
   with a `NodeJoined` for each node. Append events in the order in which they were emitted.
3. Feed orders, watch events, results of writes and acknowledged reports, in any order.
"""

from typing import Any, Literal

import msgspec

from penstock.model.decisions.orders import Order
from penstock_services.node_reporter.core.actions import Emit, Note
from penstock_services.node_reporter.core.state import NO_CONTEXT, Context
from penstock_services.node_reporter.kubernetes.core.objects import Node, Pod

# ------------------------------------------------------------------------------------------------ actions


class RaiseFence(msgspec.Struct, frozen=True):
    """Set the term in the fence's ConfigMap by compare-and-set to one more than the larger of its value and
    `above`, and feed `FenceRaised`. Everything that this reporter writes has that term. Feed `FenceLost`
    where `own` is not 0 and the ConfigMap has another term than `own`."""

    above: int = 0
    own: int = 0


class Write(msgspec.Struct, frozen=True, kw_only=True):
    """Base of requests about one pod. Send it not before `not_before_ms`, with a deadline; feed `Wrote`."""

    namespace: str
    name: str
    task_id: str
    token: int
    not_before_ms: int = 0


class CreatePod(Write, frozen=True, kw_only=True):
    """POST this manifest. On 409 AlreadyExists read the present pod, too."""

    manifest: dict[str, Any]


class ReadPod(Write, frozen=True, kw_only=True):
    """GET the pod, of the present (no `resourceVersion`)."""


class DeletePod(Write, frozen=True, kw_only=True):
    """DELETE with precondition `uid` and this grace."""

    uid: str
    grace_s: int


class ReleasePod(Write, frozen=True, kw_only=True):
    """Merge patch of `metadata.finalizers` to this list, with `uid` and `resource_version` as
    preconditions: the exit of its task is in the log."""

    uid: str
    resource_version: str
    finalizers: tuple[str, ...] = ()


class End(msgspec.Struct, frozen=True):
    """Another reporter of this cluster has taken over: append nothing more, write nothing more, end this
    session."""

    why: str


Action = Emit | Note | RaiseFence | CreatePod | ReadPod | DeletePod | ReleasePod | End


# ------------------------------------------------------------------------------------------------- inputs


class FenceRaised(msgspec.Struct, frozen=True):
    """The ConfigMap has this term, and this reporter has set it."""

    term: int
    now_ms: int


class FenceLost(msgspec.Struct, frozen=True):
    """The ConfigMap has a newer term than this session's: another reporter has taken over."""

    term: int
    now_ms: int


class Listed(msgspec.Struct, frozen=True):
    """All nodes that match the selector, or all pods: the first list, or one after a gap in the watch (410).
    Pods of all namespaces that the reporter may read, placed or not."""

    objects: tuple[Node, ...] | tuple[Pod, ...]
    what: Literal["nodes", "pods"]
    now_ms: int


class Watched(msgspec.Struct, frozen=True):
    """A watch event. A node that no longer matches the selector is `DELETED`, as the API server says it."""

    change: Literal["ADDED", "MODIFIED", "DELETED"]
    object: Node | Pod
    now_ms: int


class OrderRead(msgspec.Struct, frozen=True):
    """An order to any node of the cluster, in the order of its partition."""

    order: Order
    now_ms: int
    context: Context = NO_CONTEXT


class Wrote(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a write.

    `done`: 2xx, with `pod` where the body has one. `conflict`: 409, with the present `pod` after a create
    (None: it is gone again). `absent`: 404 of the pod. `refused`: any other 4xx, with its `text`. `fenced`:
    refused by the fence: a newer term is there. `busy`: 429 or 503, with `retry_ms`. `unknown`: no answer in
    time.
    """

    write: CreatePod | ReadPod | DeletePod | ReleasePod
    outcome: Literal["done", "conflict", "absent", "refused", "fenced", "busy", "unknown"]
    pod: Pod | None = None
    text: str = ""
    retry_ms: int = 0
    now_ms: int


class ConnectionLost(msgspec.Struct, frozen=True):
    """The API server has not answered for so long that nothing may be started through it. Orders read from
    now on are not obeyed; each node that missed one joins again later, so that it is repeated."""

    why: str
    now_ms: int


class ConnectionRestored(msgspec.Struct, frozen=True):
    """The API server answers again, and watches go on or both kinds were listed again."""

    now_ms: int


class Reported(msgspec.Struct, frozen=True):
    """The log has acknowledged the emitted end of a task (`TaskExited`, `OrderRefused`)."""

    task_id: str
    token: int
    now_ms: int


Input = (
    FenceRaised
    | FenceLost
    | Listed
    | Watched
    | OrderRead
    | Wrote
    | ConnectionLost
    | ConnectionRestored
    | Reported
)
