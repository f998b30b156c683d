"""Demo of jobs that take turns: four jobs, each bound by another resource, run alone first, then at once on
one GPU.

The batcher groups them once it knows the stages of each. A member of a group runs until all have been in one
and have done some iterations there: how long that takes depends on the machine,
what is shown does not. Where the batcher leaves a job waiting beside a group, the group's oldest member ends,
and the batcher plans again.
"""

from collections.abc import Callable, Sequence

from penstock.local.demo.demo_jobs import DemoJob
from penstock.local.demo.demo_part import STARTED, STEPS, Cell, Event, Part, Say
from penstock.local.demo.demo_screen import STAGES

TURNS = 20  # iterations of each job after the latest change
GROUPED, RANKED, EXITED = "penstock.group.decided", "penstock.jobs.ranked", "penstock.task.exited"


class TurnsPart(Part):
    """`alone`: runs that end by themselves once their stages are known; `together`: the same jobs, each of
    which runs until `end`."""

    WORD = "batcher"

    def __init__(
        self, alone: Sequence[DemoJob], together: Sequence[DemoJob], end: Callable[[str], None], say: Say
    ) -> None:
        super().__init__((*alone, *together), self._end_all, say)
        self._alone, self._together = alone, together
        self._end_one = end
        """Takes the job's name."""
        self._known: set[str] = set()
        """Whose stages were measured."""
        self._planned: set[str] = set()
        """Jobs that were in a question to the batcher: from then on it has ranks for them."""
        self._running: dict[str, None] = {}
        """Oldest first."""
        self._shared: set[str] = set()
        """Jobs that were in a group."""
        self._first: dict[str, int] = {}
        """The first report since the latest change, in iterations."""
        self._turned: set[str] = set()
        """Jobs with `TURNS` iterations since then."""
        self._enough = False
        """Whether all of them end: other groups in which the last ones find themselves are not shown."""

    def _observe_cell(self, event: Event) -> None:
        data, names = event["data"], {job_id: name for name, job_id in self._ids.items()}
        if event["type"] == RANKED:
            self._planned |= {names[rank["job_id"]] for rank in data["ranks"] if rank["job_id"] in names}
        elif event["type"] == GROUPED:
            members = [names[job_id] for job_id in data["job_ids"] if job_id in names]
            self._shared.update(members)
            self._change()
            if self._enough:
                return
            self._show(
                self.named(f"{', '.join(members)} share the GPU, asked for by {data['by']}: {data['reason']}")
            )

    def _observe_own(self, name: str, event: Event) -> bool:
        kind, data = event["type"], event["data"]
        if kind == STAGES:
            self._known.add(name)
        elif kind == STARTED:
            self._running[name] = None
            self._change()
        elif kind == EXITED:
            self._running.pop(name, None)
            self._change()
        elif kind == STEPS:
            first = self._first.setdefault(name, data["done"])
            if data["done"] >= first + TURNS:
                self._turned.add(name)
        return False

    async def run(self, cell: Cell) -> None:
        """As of `Part`."""
        for job in self._alone:
            name = job.spec.name
            self._say(f"{name} is alone on the GPU, so that its stages become known")
            await cell.submit(job)
            await self._until(lambda name=name: name in self._ended)  # type: ignore[misc]
            if name not in self._known:
                self.wrong.append(f"{name}: it has ended before its stages were known")
                return
        self._say("now all of them at once; each runs until all have taken turns")
        for job in self._together:
            await cell.submit(job)
        while self._left:
            await self._until(lambda: not self._left or self._has_turned())
            if self._left <= self._shared:
                break
            await self._end_oldest()
        self._end()
        await self._until(lambda: not self._left)
        self.wrong += [
            f"{job.spec.name}: it never shared the GPU"
            for job in self._together
            if job.spec.name not in self._shared
        ]

    @property
    def _left(self) -> set[str]:
        """Jobs of the group that have not ended."""
        return {job.spec.name for job in self._together} - self._ended

    def _has_turned(self) -> bool:
        """Whether all that run have done some iterations, and the batcher knows those that wait."""
        return (
            bool(self._running)
            and self._running.keys() <= self._turned
            and self._left <= self._planned | self._shared | self._running.keys()
        )

    async def _end_oldest(self) -> None:
        """It makes room for those that wait."""
        oldest = next(iter(self._running))
        waiting = ", ".join(sorted(self._left - self._running.keys()))
        self._say(f"{oldest} ends, since {waiting or 'no other job'} waits beside the group")
        self._end_one(oldest)
        await self._until(lambda: oldest in self._ended)

    def _end_all(self) -> None:
        self._enough = True
        for job in self._together:
            self._end_one(job.spec.name)

    def _change(self) -> None:
        """Other jobs run from now on: what was reported before tells nothing of them."""
        self._first.clear()
        self._turned.clear()

    @property
    def lines(self) -> list[str]:
        """As of `Part`."""
        return self._lines
