"""The demo of moves on a scripted cell: what a visitor reads where a training moves, and where none does."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ConfigurationError
from penstock.local.demo import demo_moves
from penstock.local.demo.demo_cases import case_of
from penstock.local.demo.demo_jobs import DemoJob, move_jobs
from penstock.local.demo.demo_moves import MovesPart
from penstock.local.options import DemoOptions
from tests.support.cli.command_process import ROOT

REASON = "its loss converges, and 2 of 3 jobs on node-0 still improve; scores: node-0 5, node-1 4"
MOVED = {"seq": 7, "attempt": 1, "nodes": ["node-0"], "stop_ms": 312, "lost_ms": 0, "resumes_at": 900}
DECIDED = {"tasks": [{"node_id": "node-1"}], "by": "migrator", "reason": REASON, "cause": "converged"}
FALLS = ((1, 2.309), (230, 0.1522), (890, 0.1234))


class Cell:
    """Answers at once. `after`: what the job that converges reports first when it has moved."""

    def __init__(self, after: tuple[int, float] = (901, 0.1233)) -> None:
        self.shown: list[str] = []
        self.cancelled: list[str] = []
        self.nodes: list[Mapping[str, Any]] = []
        self.moved: dict[str, Any] = MOVED
        self.jobs = move_jobs(ROOT, ROOT)
        self.part = MovesPart(self.jobs, "specon", self.end, self.shown.append, moves=True)
        self._after = after
        self._submitted: list[str] = []

    async def submit(self, job: DemoJob) -> None:
        job_id = f"k{len(self._submitted)}"
        self._submitted.append(job_id)
        self.tell(job_id, "job.submitted", spec={"name": job.spec.name})
        self.tell(job_id, "task.started", node_id=f"node-{(len(self._submitted) - 1) % 2}")
        self.tell(job_id, "steps.measured", done=1, loss=2.309)
        if len(self._submitted) == len(self.jobs):
            self.converge()

    def converge(self) -> None:
        for done, loss in FALLS[1:]:
            self.tell("k0", "steps.measured", done=done, loss=loss)
        self.tell("k0", "job.converged", moves=True, reason=REASON)
        self.tell("k0", "move.decided", **DECIDED)
        self.tell("k0", "steps.measured", done=900)  # at its end it reports how far it came
        self.go_on()

    def go_on(self) -> None:
        self.tell("k0", "task.started", node_id="node-1")
        self.tell("k0", "steps.measured", done=self._after[0], loss=self._after[1])

    def end(self) -> None:
        for job_id in self._submitted:
            self.tell(job_id, "job.ended", outcome="succeeded")

    async def cancel(self, job_id: str) -> None:
        self.cancelled.append(job_id)

    async def why(self, job_id: str) -> Mapping[str, Any]:
        assert job_id == "k0"
        return {"placement": {"moved": self.moved}}

    def tell(self, job_id: str, kind: str, **data: Any) -> None:
        self.part.observe({"type": f"penstock.{kind}", "job_id": job_id, "at_ms": 0, "data": data})

    async def lines(self) -> list[str]:
        await self.part.run(self)
        return self.part.lines


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody watches."""
    monkeypatch.setattr(demo_moves, "SHOWN_S", 0.0)


async def test_a_training_moves_and_its_loss_goes_on_where_it_was() -> None:
    """Each line has what the cell reports: who moved it and why, what its stop took, which losses it had
    before and after."""
    cell = Cell()
    assert await cell.lines() == [
        f"digits-converges: node-0 → node-1, asked for by migrator: {REASON}",
        "digits-converges: moved from node-0; its stop took 0.31 s and cost no work; it goes on at iteration "
        "900",
        "digits-converges: loss 2.309 at iteration 1; 0.1234 at 890, its last report before the stop; 0.1233 "
        "at 901, its first after it",
    ]
    assert cell.shown[1:] == cell.part.lines, "each is shown when it happens"
    assert (cell.part.wrong, cell.cancelled) == ([], [])


@pytest.mark.parametrize(
    ("after", "resumes_at", "wrong"),
    [
        ((1, 2.309), 900, ["resumed at iteration 1 instead of 901", "rose from 0.1234 to 2.309"]),
        ((901, 0.2), 900, ["rose from 0.1234 to 0.2"]),
        ((1, 0.1233), None, ["resumed at iteration 1, without a checkpoint"]),
        ((901, 0.13), 900, []),
    ],
)
async def test_a_training_that_begins_anew_is_not_as_expected(
    after: tuple[int, float], resumes_at: int | None, wrong: list[str]
) -> None:
    """Its checkpoint is lost, or was read wrongly; that a loss varies by less than a hundredth of its fall is
    no matter."""
    cell = Cell(after)
    cell.moved = {**MOVED, "resumes_at": resumes_at}
    await cell.lines()
    assert len(cell.part.wrong) == len(wrong)
    for line, text in zip(cell.part.wrong, wrong, strict=True):
        assert text in line


async def test_what_is_decided_when_the_demo_has_given_up_is_no_part_of_it() -> None:
    """The decision comes as all trainings have just been let end, since one of them has failed."""

    class Late(Cell):
        def converge(self) -> None:
            self.tell("k3", "job.ended", outcome="failed")

        def end(self) -> None:
            self.tell("k0", "move.decided", **DECIDED)
            super().end()

    [line] = await Late().lines()
    assert line.startswith("left out: digits-learns-3 has ended")


async def test_a_move_that_takes_long_is_waited_for() -> None:
    """Other programs take the cores: the decision and the first report from the other node come when they
    come."""

    class Slow(Cell):
        def converge(self) -> None:
            pass

        def go_on(self) -> None:
            pass

    cell = Slow()
    showing = asyncio.ensure_future(cell.lines())
    await asyncio.sleep(0)
    assert len(cell.shown) == 1
    Cell.converge(cell)
    await asyncio.sleep(0)
    assert len(cell.shown) == 2, "it has moved, and not reported yet"
    Cell.go_on(cell)
    assert len(await showing) == 3


async def test_a_training_that_is_judged_and_stays_is_left_out_with_the_migrators_reason() -> None:
    """The other node has as many jobs."""

    class Stays(Cell):
        def converge(self) -> None:
            self.tell("k0", "job.converged", moves=False, reason="scores: node-0 5, node-1 6")

    assert await Stays().lines() == [
        "left out: the migrator judged that digits-converges stays: scores: node-0 5, node-1 6"
    ]


async def test_a_training_that_ends_too_early_is_the_reason() -> None:
    """Its environment lacks NumPy."""

    class Fails(Cell):
        def converge(self) -> None:
            self.tell("k3", "job.ended", outcome="failed")

    assert await Fails().lines() == ["left out: digits-learns-3 has ended before anything moved"]


@pytest.mark.parametrize(
    ("kind", "data", "text"),
    [
        ("move.given_up", {"reason": "node-1 is cordoned"}, "not moved: node-1 is cordoned"),
        ("job.ended", {"outcome": "failed"}, "has ended before it reported from there"),
    ],
)
async def test_what_becomes_of_a_move_is_shown_when_the_training_does_not_go_on(
    kind: str, data: dict[str, Any], text: str
) -> None:
    class Late(Cell):
        def go_on(self) -> None:
            self.tell("k0", kind, **data)

    decided, became = await Late().lines()
    assert decided.startswith("digits-converges: node-0 → node-1")
    assert text in became


async def test_nothing_is_submitted_under_a_profile_that_moves_no_jobs() -> None:
    shown: list[str] = []
    part = MovesPart(move_jobs(ROOT, ROOT), "fifo", lambda: None, shown.append, moves=False)
    await part.run(Cell())
    assert part.lines == shown == ["left out: profile fifo moves no jobs; specon does"]


def test_one_demonstration_at_a_time(tmp_path: Path) -> None:
    """Each has nodes and settings of its own."""
    with pytest.raises(ConfigurationError, match="--turns and --moves"):
        DemoOptions(turns=True, moves=True)
    moves = case_of(DemoOptions(moves=True, jobs=ROOT))
    assert (moves.options.nodes, moves.options.virtual_gpus, moves.jobs) == (2, 3, ())
    turns = case_of(DemoOptions(turns=True, jobs=ROOT))
    assert (turns.options.nodes, turns.options.virtual_gpus, turns.jobs) == (1, 1, ())
    with pytest.raises(ConfigurationError, match="--jobs"):
        case_of(DemoOptions(moves=True, jobs=tmp_path))
