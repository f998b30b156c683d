"""Bit sets of positions on a node: its GPUs' slots, its cores."""

from functools import lru_cache

from penstock.ledger.state.index import bits

MAX_MASKS = 1 << 14  # cached results per function: nodes are in few different states


@lru_cache(MAX_MASKS)
def full_mask(count: int) -> int:
    """A mask of `count` ones."""
    return (1 << count) - 1


@lru_cache(MAX_MASKS)
def mask_of(positions: tuple[int, ...]) -> int:
    """The bit set of these positions."""
    mask = 0
    for position in positions:
        mask |= 1 << position
    return mask


@lru_cache(MAX_MASKS)
def without(positions: tuple[int, ...], mask: int) -> tuple[int, ...]:
    """Those of the positions that are not in the mask, in their order."""
    return tuple([position for position in positions if not mask >> position & 1])


@lru_cache(MAX_MASKS)
def take_lowest(mask: int, count: int) -> tuple[int, ...]:
    """The `count` lowest positions of a mask that holds at least so many."""
    taken: list[int] = []
    for position in bits(mask):
        if len(taken) == count:
            break
        taken.append(position)
    assert len(taken) == count, f"{count} asked, {len(taken)} free"
    return tuple(taken)
