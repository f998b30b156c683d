"""Body of a profiling request:
which runs would reduce the uncertainty about a network's iterations most. Pure."""

from typing import Annotated

from msgspec import Meta

from penstock.model.nouns.types import MAX_GPUS_PER_NODE, MAX_WORKERS, Identifier, Value

MAX_ASKED = 64  # batches, and numbers of workers
Workers = Annotated[int, Meta(ge=1, le=MAX_WORKERS)]
Batch = Annotated[int, Meta(ge=1, le=1 << 30)]


class ProfileAsked(Value, frozen=True, kw_only=True):
    """The owner's network, the numbers of workers and the batches."""

    model: Identifier
    owner: Identifier = "unknown"
    workers: Annotated[tuple[Workers, ...], Meta(min_length=1, max_length=MAX_ASKED)]
    batches: Annotated[tuple[Batch, ...], Meta(min_length=1, max_length=MAX_ASKED)]
    """Of all workers together."""
    gpus: Annotated[int, Meta(ge=1, le=MAX_GPUS_PER_NODE)] = 1
    """Of each worker."""
    gpu_models: Annotated[tuple[Identifier, ...], Meta(max_length=16)] = ()
    runs: Annotated[int, Meta(ge=0, le=64)] | None = None
    """At most so many; None: as many as there are batches and placements."""
