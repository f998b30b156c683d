"""The demo of turns on a scripted cell: it waits until all four jobs have taken turns, whatever the batcher
groups at first."""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from penstock.local.demo.demo_jobs import ALONE_ITERATIONS, DemoJob, turn_jobs
from penstock.local.demo.demo_turns import TURNS, TurnsPart
from penstock.sdk.progress import PROFILE_ITERATIONS
from tests.support.cli.command_process import ROOT

STORAGE, CPU, GPU, NETWORK = (f"{bound}-together" for bound in ("storage", "cpu", "gpu", "network"))
ALL = (STORAGE, CPU, GPU, NETWORK)


class Cell:
    """Runs one job; the batcher lets all of `most` share the GPU, and knows the rest of them."""

    def __init__(self, most: int = 4, unmeasured: Collection[str] = ()) -> None:
        self.shown: list[str] = []
        self.ended: list[str] = []
        self.nodes: list[Mapping[str, Any]] = []
        self._most, self._unmeasured = most, unmeasured
        self._ids: dict[str, str] = {}
        self._runs: list[str] = []
        self._waits: list[str] = []
        self._done = 0
        self.part = TurnsPart(*turn_jobs(ROOT, ROOT), self.end, self.shown.append)

    async def submit(self, job: DemoJob) -> None:
        name = job.spec.name
        self._ids[name] = f"k{len(self._ids)}"
        self.tell(name, "job.submitted", spec={"name": name})
        if name in ALL:
            self._waits.append(name)
            self.plan()
            return
        self.tell(name, "task.started", node_id="node-0")
        if name not in self._unmeasured:
            self.tell(name, "stages.measured")
        self.tell(name, "task.exited")
        self.tell(name, "job.ended", outcome="succeeded")

    def plan(self) -> None:
        """Starts who waits beside those that run, as far as the batcher lets them."""
        self.tell_all("jobs.ranked", ranks=[{"job_id": self._ids[name]} for name in self._waits])
        while self._waits and len(self._runs) < self._most:
            self._runs.append(self._waits.pop(0))
            if len(self._runs) > 1:
                members = [self._ids[name] for name in self._runs]
                self.tell_all(
                    "group.decided", job_ids=members, by="batcher", reason=f"take turns with {members[0]}"
                )
            self.tell(self._runs[-1], "task.started", node_id="node-0")

    def turn(self, iterations: int) -> None:
        """Each job that runs does so many."""
        self._done += iterations
        for name in list(self._runs):
            self.tell(name, "steps.measured", done=self._done)

    def end(self, name: str) -> None:
        self.ended.append(name)
        if name in self._runs:
            self._runs.remove(name)
            self.tell(name, "task.exited")
            self.tell(name, "job.ended", outcome="succeeded")
        elif name in self._waits:
            self._waits.remove(name)
            self.tell(name, "job.ended", outcome="succeeded")
        self.plan()

    async def cancel(self, job_id: str) -> None:
        raise AssertionError(job_id)

    async def why(self, job_id: str) -> Mapping[str, Any]:
        raise AssertionError(job_id)

    def tell(self, name: str, kind: str, **data: Any) -> None:
        self.part.observe(
            {"type": f"penstock.{kind}", "job_id": self._ids[name], "at_ms": 0, "data": data},
        )

    def tell_all(self, kind: str, **data: Any) -> None:
        self.part.observe({"type": f"penstock.{kind}", "job_id": None, "at_ms": 0, "data": data})

    async def show(self, turns: Sequence[int] = (1, TURNS) * 8) -> list[str]:
        showing = asyncio.ensure_future(self.part.run(self))
        for iterations in turns:
            await asyncio.sleep(0)
            if not showing.done():
                self.turn(iterations)
        await showing
        return self.part.lines


async def test_four_jobs_share_the_gpu_and_end_when_all_have_taken_turns() -> None:
    cell = Cell()
    showing = asyncio.ensure_future(cell.part.run(cell))
    for iterations in (1, 1, TURNS - 2):
        await asyncio.sleep(0)
        cell.turn(iterations)
    await asyncio.sleep(0)
    assert cell.ended == [], "one iteration is missing"
    cell.turn(1)
    await showing
    assert cell.ended == list(ALL)
    assert cell.part.lines == [
        f"{', '.join(ALL[:count])} share the GPU, asked for by batcher: take turns with {STORAGE}"
        for count in (2, 3, 4)
    ]
    assert cell.part.wrong == []


async def test_where_the_batcher_leaves_jobs_waiting_the_oldest_member_ends_for_them() -> None:
    """Measured beside much other work, three or four of them gain nothing together. Each pair was in a group
    in the end."""
    for most in (2, 3):
        cell = Cell(most)
        lines = await cell.show()
        assert cell.part.wrong == []
        assert cell.ended[: 4 - most] == list(ALL[: 4 - most])
        for one, other in pairwise(ALL):
            assert any(f"{one}, {other}" in line for line in lines), lines


async def test_a_job_that_shared_with_nobody_is_not_as_expected() -> None:
    """The batcher finds no gain in any group: the demo ends, and says so."""
    cell = Cell(1)
    assert await cell.show() == []
    assert cell.part.wrong == [f"{name}: it never shared the GPU" for name in ALL]


async def test_a_run_alone_that_ends_before_its_stages_are_known_ends_the_demo() -> None:
    """Its environment lacks NumPy."""
    cell = Cell(unmeasured=("cpu-alone",))
    assert await cell.show() == []
    assert cell.part.wrong == ["cpu-alone: it has ended before its stages were known"]


def test_the_runs_alone_teach_no_run_times(tmp_path: Path) -> None:
    """With known run times the shortest job gains most alone, and by a tenth of noise in its stages nobody
    shares with it."""
    alone, together = turn_jobs(ROOT, tmp_path)
    assert {job.spec.env[PROFILE_ITERATIONS] for job in alone} == {str(ALONE_ITERATIONS)}
    assert all("--until" in job.spec.command and not job.spec.env for job in together)
    assert [job.spec.model for job in alone] == [job.spec.model for job in together]
