"""Ledger events of resource arrays: how a cell is divided between jobs with and without GPUs, and which lent
cores are reclaimed. Source: CODA §V-C."""

from typing import Annotated

from msgspec import Meta

from penstock.model.inputs.external_events import Attempt
from penstock.model.nouns.types import MAX_CORES_PER_NODE, Identifier, ShortText
from penstock.model.schema.event import Event, event

MAX_CORES_PER_GPU_MILLI = 1_000 * MAX_CORES_PER_NODE
MAX_NODES = 1_000_000


@event
class ArraysSized(Event, frozen=True, kw_only=True):
    """New sizes of the resource arrays, computed from the history of the cell's jobs. No running job is
    stopped for it."""

    TYPE = "penstock.arrays.sized"

    cores_per_gpu_milli: Annotated[int, Meta(ge=0, le=MAX_CORES_PER_GPU_MILLI)]
    """Thousandths of a core that each node reserves for each of its GPUs;
    all other cores belong to the CPU array."""
    large_nodes: Annotated[int, Meta(ge=0, le=MAX_NODES)]
    """Number of nodes in the 4-GPU sub-array: of the nodes with at least four GPUs,
    the ones that joined last."""
    reason: ShortText


@event
class CoresReclaimed(Event, frozen=True, kw_only=True):
    """A running job without GPUs is stopped to return borrowed cores, because a job with GPUs needs them;
    `StopDecided` follows.

    It will queue again, at the head of the CPU array."""

    TYPE = "penstock.cores.reclaimed"

    job_id: Identifier
    attempt: Attempt
    by_job_id: Identifier
    reason: ShortText
