"""Crash-only restarts: what an attempt held is gone before the next one begins."""

import asyncio
import gc
import weakref
from collections.abc import Iterator

import pytest

from penstock.runtime.crash_only import crash_only


class Replica:
    """Stands for what an attempt folds: large, and referred to by the frames of its error's traceback."""


@pytest.fixture
def rare_collection() -> Iterator[None]:
    """As in a service after its start, where the collector comes by so rarely that we may as well do
    without."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("rare_collection")
async def test_an_attempt_that_failed_holds_no_memory_when_the_next_begins() -> None:
    """Somebody writes rubbish into the ledger's partition again and again, and each time a term ends and is
    begun anew."""
    stop, held, alive = asyncio.Event(), [], []

    async def attempt() -> None:
        alive.append([found() is not None for found in held])
        if len(held) == 3:
            stop.set()
            return
        replica = Replica()
        held.append(weakref.ref(replica))
        try:
            raise OSError("the disk is gone")
        except OSError as error:
            replica.error = error  # its traceback names this frame, which names the replica
            raise RuntimeError("so is the term") from error

    await crash_only("placer", attempt, stop)
    assert alive == [[], [False], [False, False], [False, False, False]]
