"""A reader whose state is not the placer's."""

from typing import Annotated

from msgspec import Meta

from penstock.model.nouns.types import MAX_DIGEST, Value


class StateDiffers(Value, frozen=True, kw_only=True):
    """The state behind a record of the ledger, as a reader has folded it, is not the placer's."""

    seq: Annotated[int, Meta(ge=1)]
    """The record's."""
    own: Annotated[str, Meta(max_length=MAX_DIGEST)]
    """The reader's digest (`penstock.ledger.replica.digest`)."""
