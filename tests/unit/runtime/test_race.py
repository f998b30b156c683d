"""Race of coroutines: the first to end decides, and none of the others is left running."""

# clocks: the whole file runs in virtual time

import asyncio

import pytest

from penstock.runtime.race import all_of, first_of
from tests.unit.virtually import virtually


class Worker:
    """Sleeps, and records that it was cancelled."""

    def __init__(self) -> None:
        self.cancelled = False

    async def run(self, seconds: float, error: Exception | None = None) -> None:
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        if error is not None:
            raise error


@virtually
async def test_the_first_to_end_ends_the_others() -> None:
    """A service is stopped: its work is cancelled and awaited before the stop returns."""
    quick, slow = Worker(), Worker()
    assert await first_of(slow.run(60), quick.run(0))
    assert (quick.cancelled, slow.cancelled) == (False, True)


@virtually
async def test_the_error_of_the_first_is_raised() -> None:
    """A session's reader loses its log: the session ends with that error, its other parts are cancelled."""
    slow = Worker()
    with pytest.raises(ValueError, match="log lost"):
        await first_of(slow.run(60), Worker().run(0, ValueError("log lost")))
    assert slow.cancelled


@virtually
async def test_a_time_limit_cancels_all() -> None:
    """A stream is quiet for too long; what waited for it does not pile up."""
    workers = [Worker(), Worker()]
    assert not await first_of(*(worker.run(60) for worker in workers), timeout_s=0.01)
    assert all(worker.cancelled for worker in workers)


@virtually
async def test_a_cancelled_race_leaves_nothing_behind() -> None:
    """The whole service is cancelled in the middle of a race."""
    worker = Worker()
    race = asyncio.ensure_future(first_of(worker.run(60)))
    await asyncio.sleep(0.01)
    race.cancel()
    with pytest.raises(asyncio.CancelledError):
        await race
    assert worker.cancelled


@virtually
async def test_a_shielded_future_survives() -> None:
    """Several races wait for the same failure; the end of one does not take it from the others."""
    failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    assert not await first_of(asyncio.shield(failed), timeout_s=0.01)
    assert not failed.done()
    failed.set_exception(ValueError("a service ended"))
    with pytest.raises(ValueError, match="a service ended"):
        await first_of(asyncio.shield(failed), Worker().run(60))


@virtually
async def test_the_first_error_ends_what_was_to_be_done_together() -> None:
    """The log is lost while five topics are copied: the error is told at once, and no copy goes on behind
    it."""

    async def fails() -> None:
        raise ValueError("the log is lost")

    workers = [Worker(), Worker()]
    with pytest.raises(ValueError, match="the log is lost"):
        await all_of(workers[0].run(60), fails(), workers[1].run(60))
    assert all(worker.cancelled for worker in workers)
    assert await all_of(asyncio.sleep(0.02, "slow"), asyncio.sleep(0.01, "quick")) == ["slow", "quick"]
