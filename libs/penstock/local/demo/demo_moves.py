"""Demo of a migration by convergence: five trainings on two nodes, one of which converges and moves to the
node with fewer jobs.

The migrator proposes the move (SpeCon Alg. 1–2). The training saves a checkpoint, stops, and resumes from it
on the other node. All trainings run until that was seen. Nothing
is shown only under a profile that moves no jobs, where the migrator judges that the training stays, or where
one of them fails.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from penstock.cli.following.event_text import asked, moved
from penstock.local.demo.demo_jobs import DemoJob
from penstock.local.demo.demo_part import STARTED, STEPS, Cell, Event, Part, Say

# from its first loss to the decision: a loss is looked at every six seconds, and four times at least
USUAL_S = 24.0
SHOWN_S = 2.0  # so long all keep training
SAME = 0.01  # of what its loss has fallen by: the migrator's α, less than which it changes between two looks
MOVE, JUDGED, GIVEN_UP = "penstock.move.decided", "penstock.job.converged", "penstock.move.given_up"


class Report(NamedTuple):
    """Progress of the training that moves."""

    done: int
    loss: float


class MovesPart(Part):
    """`jobs`: the first is the one that converges. `moves`: whether the profile of this name has a stage that
    moves jobs."""

    WORD = "migrator"

    def __init__(
        self, jobs: Sequence[DemoJob], profile: str, end: Callable[[], None], say: Say, *, moves: bool
    ) -> None:
        super().__init__(jobs, end, say)
        self._jobs = jobs
        self._name = jobs[0].spec.name
        self._profile, self._moves = profile, moves
        self._before: list[Report] = []
        self._after: list[Report] = []
        """Reports from the node to which it moves."""
        self._decided = self._there = False
        self._problem = ""
        """Why it does not move after a decision."""

    def _observe_own(self, name: str, event: Event) -> bool:
        kind, data = event["type"], event["data"]
        if name != self._name:
            return False
        if kind == STARTED:
            self._there = self._decided
        elif kind == STEPS and data.get("loss") is not None:
            (self._after if self._there else self._before).append(Report(data["done"], data["loss"]))
        elif kind == JUDGED and not data["moves"]:
            self._problem = f"the migrator judged that {name} stays: {data['reason']}"
        elif kind == GIVEN_UP:
            self._problem = f"not moved: {data['reason']}"
        shown = kind == MOVE and not self.left_out
        if shown:
            self._decided = True
            there = data["tasks"][0]["node_id"]
            self._show(f"{name}: {self._nodes[name]} → {there}, {self.named(asked(data))}")
        return bool(shown)

    async def run(self, cell: Cell) -> None:
        """As of `Part`."""
        if not self._moves:
            self._leave_out(f"profile {self._profile} moves no jobs; specon does")
            return
        self._say(
            f"the loss of {self._name} soon hardly falls any more, after {USUAL_S:.0f} s on a machine "
            "without other work; the losses of the others keep falling"
        )
        for job in self._jobs:
            await cell.submit(job)
        if await self._converges() and await self._resumes():
            self._report((await cell.why(self._ids[self._name]))["placement"])
            await asyncio.sleep(SHOWN_S)
        self._end()
        await self._until(lambda: self._ended == self._names)

    async def _converges(self) -> bool:
        """Until the placer decides the move; whether it did."""
        await self._until(lambda: self._decided or bool(self._problem or self._ended))
        if not self._decided:
            self._leave_out(self._problem or f"{min(self._ended)} has ended before anything moved")
        return self._decided

    async def _resumes(self) -> bool:
        """Until the training reports from the other node; whether it did."""
        await self._until(lambda: bool(self._after or self._problem) or self._name in self._ended)
        if not self._after:
            self._show(f"{self._name}: {self._problem or 'it has ended before it reported from there'}")
        return bool(self._after)

    def _report(self, placement: Mapping[str, Any]) -> None:
        """Cost of the move, and the losses before and after it. `placement`: as `why` has it."""
        name, first, before, after = self._name, self._before[0], self._before[-1], self._after[0]
        self._show(f"{name}: {moved(placement['moved'])}")
        self._show(
            f"{name}: loss {first.loss:#.4g} at iteration {first.done:,}; {before.loss:#.4g} at "
            f"{before.done:,}, its last report before the stop; "
            f"{after.loss:#.4g} at {after.done:,}, its first after it"
        )
        saved = placement["moved"].get("resumes_at")
        if saved is None:
            self.wrong.append(f"{name}: it resumed at iteration {after.done:,}, without a checkpoint")
        elif after.done <= saved:
            self.wrong.append(f"{name}: it resumed at iteration {after.done:,} instead of {saved + 1:,}")
        if after.loss - before.loss > SAME * (first.loss - before.loss):
            self.wrong.append(f"{name}: its loss rose from {before.loss:.4g} to {after.loss:.4g}")
