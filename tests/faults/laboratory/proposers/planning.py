"""The batcher's worker in virtual time: slow now and then, killed, with a bug, or with the answer to another
question."""

# clocks: all of it runs in virtual time

import asyncio
from typing import Any

from penstock_services.batcher.core.batcher import Work, solve
from penstock_services.batcher.shell.worker import Worker
from tests.faults.laboratory.injection.policies import PolicyBug
from tests.faults.laboratory.machines.process import Process
from tests.faults.laboratory.world import World
from tests.faults.rules.findings import Violation

USUAL_S = 0.5
LONGEST_S = 40.0  # twice as long as a window
CALM_S = 0.01
MISTAKEN = 0.1  # of the answers
# plans of one state: it is planned again when jobs come to their next queues, and each ten seconds while a
# log takes nothing
MOST_ALIKE = 60


class PlanningWorker(Worker):
    """Of one process of the batcher."""

    def __init__(self, world: World, process: Process, planned: list[str]) -> None:
        super().__init__()
        self._world, self._process, self._planned = world, process, planned
        self._former: tuple[str, Any] | None = None
        """Kind and answer of the question before."""
        self._alike = (0, 0)
        """The state that was planned last, and how often."""

    def warm_up(self) -> "asyncio.Future[None]":
        """There is no process to start."""
        done = self._world.loop.create_future()
        done.set_result(None)
        return done

    async def solve(self, work: Work) -> Any:
        world = self._world
        seq, count = self._alike
        self._alike = work.seq, count + 1 if seq == work.seq else 1
        if self._alike[1] > MOST_ALIKE:
            world.fail(Violation("rest", f"the batcher plans seq {seq} for the {count + 1}th time"))
        took_s = LONGEST_S if world.happens(world.rates.late) else USUAL_S
        await asyncio.sleep(CALM_S if world.calm else world.within(0, took_s))
        await self._process.gate("plan")
        if world.happens(world.rates.policy):
            raise PolicyBug("solve")
        answer = solve(work)
        self._planned.append(work.kind)
        former, self._former = self._former, (work.kind, answer)
        if former is not None and former[0] == work.kind and world.happens(MISTAKEN):
            return former[1]
        return answer
