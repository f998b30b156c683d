"""Distrust of nodes and GPUs:
the placer's finding that jobs fail there whoever they belong to, and its end."""

from typing import Annotated

from msgspec import Meta

from penstock.model.decisions.ledger_events import NodeFact
from penstock.model.nouns.types import MAX_GPUS_PER_NODE, GpuIndex, Milliseconds, ShortText
from penstock.model.schema.event import event


@event
class NodeDistrusted(NodeFact, frozen=True, kw_only=True):
    """Different jobs failed on this node or GPU one after another:
    nothing new is placed there for a pause."""

    TYPE = "penstock.node.distrusted"
    OMITTED = ("gpus",)

    reason: ShortText
    pause_ms: Milliseconds
    """Time until one job may start there as a probe."""
    gpus: Annotated[tuple[GpuIndex, ...], Meta(max_length=MAX_GPUS_PER_NODE)] = ()
    """Slots of the distrusted GPUs; empty: the whole node is distrusted."""


@event
class NodePutOnProbation(NodeFact, frozen=True, kw_only=True):
    """The pause of a distrusted node is over: the next job that is placed there is its probe."""

    TYPE = "penstock.node.put_on_probation"


@event
class NodeTrusted(NodeFact, frozen=True, kw_only=True):
    """A distrusted node is used as before."""

    TYPE = "penstock.node.trusted"

    reason: ShortText
