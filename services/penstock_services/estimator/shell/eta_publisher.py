"""Publisher of running jobs' remaining times, beside the loop that estimates submissions: one job after the
other, and other coroutines run in between."""

import asyncio

from penstock.log.port import Message
from penstock_services.estimator.core.eta_updates import EtaUpdates
from penstock_services.estimator.core.fold.state import State
from penstock_services.estimator.core.step_time.run_time import StepTier
from penstock_services.estimator.shell.publisher import Publisher

MAX_AT_ONCE = 64  # in one append


class EtaPublisher:
    """One cell's publisher."""

    def __init__(self, state: State, steps: StepTier, publisher: Publisher) -> None:
        self._updates = EtaUpdates(state, steps)
        self._state = state
        self._publisher = publisher
        self._wake = asyncio.Event()

    def caught_up(self) -> None:
        """The existing ledger was folded: ETAs that it already answers are not published again."""
        still_open = set(self._updates.open())
        for job_id in list(self._state.stepped):
            if job_id not in still_open:
                del self._state.stepped[job_id]
        self.folded()

    def folded(self) -> None:
        """Records were folded; jobs may have reported their steps."""
        if self._state.stepped:
            self._wake.set()

    async def work(self) -> None:
        """For ever."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            messages: list[Message] = []
            while self._state.stepped:
                job_id = next(iter(self._state.stepped))
                cause = self._state.stepped.pop(job_id)
                if (found := self._updates.next(job_id)) is not None:
                    messages.append(self._publisher.message(f"eta-{cause}", found, cause, job_id))
                if len(messages) == MAX_AT_ONCE:
                    await self._publisher.send(messages, "remaining times")
                    messages = []
                await asyncio.sleep(0)
            if messages:
                await self._publisher.send(messages, "remaining times")
