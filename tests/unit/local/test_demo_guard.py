"""The demo's last part on a scripted cell: what a visitor reads where the contention-guard acts, and where
there is nothing to see."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from penstock.local.demo import demo_guard
from penstock.local.demo.demo import start_fresh
from penstock.local.demo.demo_guard import GuardPart, Machine
from penstock.local.demo.demo_jobs import DEVICES, DemoJob, guard_jobs
from penstock.local.services import acts_of
from penstock.local.stack import OWN_FOLDERS
from tests.support.cli.command_process import ROOT

MACHINE = Machine(2, "penstock", eliminates=True)


def measuring(contention: str, memory_bandwidth: str) -> dict[str, Any]:
    """The gateway's row of a node."""
    found = {"contention": contention, "memory_bandwidth": memory_bandwidth}
    return {"node_id": "n0", "cores": 8, "measures": found}


def changed(count: int, cause: str, reason: str) -> dict[str, Any]:
    """The data of a decision about a task's cores."""
    return {"cores": list(range(count)), "cause": cause, "by": "contention-guard", "reason": reason}


NODE = measuring("pressure", "none")
TAKEN = changed(1, "contention", "k1.1.w0 has lost 60 % of its speed on node-0")
RETURNED = changed(7, "released", "no training runs on node-0 any more")


class Cell:
    """Answers at once. `steps_ms`: of the training alone, a second each; `starts`: the nodes of the training
    and of the job beside it."""

    def __init__(self, *steps_ms: float, slows: bool = True, starts: tuple[str, str] = ("n0", "n0")) -> None:
        self.shown: list[str] = []
        self.cancelled: list[str] = []
        self._steps_ms, self._slows, self._starts = steps_ms, slows, starts
        self._at_ms = 0
        self.nodes: list[Mapping[str, Any]] = [NODE]
        self.part = GuardPart(*guard_jobs(ROOT, ROOT, 7), MACHINE, self.end, self.shown.append)

    async def submit(self, job: DemoJob) -> None:
        key, node = ("k1", self._starts[0]) if job is self.part.training else ("k2", self._starts[1])
        self.tell(key, "job.submitted", spec={"name": job.spec.name})
        self.tell(key, "placement.decided", tasks=[{"cores": list(range(job.spec.resources.cores or 0))}])
        self.tell(key, "task.started", node_id=node)
        if job is self.part.training:
            for step_ms in self._steps_ms:
                self.step(step_ms)
        elif self._slows:
            self.tell(key, "cores.decided", **TAKEN)

    def step(self, step_ms: float) -> None:
        """Another second of the training."""
        self._at_ms += 1_000
        self.tell("k1", "steps.measured", steps=1_000 / step_ms, step_ms=step_ms)

    def end(self) -> None:
        """The training does, and the guard gives back what it took."""
        self.tell("k1", "job.ended", outcome="succeeded")
        if self.part.lines and self._slows:
            self.tell("k2", "cores.decided", **RETURNED)

    async def cancel(self, job_id: str) -> None:
        self.cancelled.append(job_id)

    def tell(self, job_id: str, kind: str, **data: Any) -> None:
        self.part.observe(
            {"type": f"penstock.{kind}", "job_id": job_id, "at_ms": self._at_ms, "data": data},
        )

    async def why(self, job_id: str) -> Mapping[str, Any]:
        raise AssertionError(job_id)

    async def lines(self, node: Mapping[str, Any] = NODE) -> list[str]:
        self.nodes = [node]
        await self.part.run(self)
        return self.part.lines


@pytest.fixture(autouse=True)
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cell has answered by then, or never does."""
    for name in ("MARGIN", "ACTS", "SHOWN_S"):
        monkeypatch.setattr(demo_guard, name, 0)


async def test_a_job_loses_cores_and_gets_them_back_and_each_is_a_line_with_its_reason() -> None:
    """The training's steps take equally long, so its speed is known when the other job begins."""
    cell = Cell(*[20.0] * 9)
    assert await cell.lines() == [
        "augment: 7 → 1 core, asked for by contention-guard: softmax-slowed has lost 60 % of its speed on "
        "node-0",
        "augment: 1 → 7 cores, asked for by contention-guard: no training runs on node-0 any more",
    ]
    assert cell.shown[2:] == cell.part.lines, "each is shown when it happens"
    assert cell.cancelled == ["k2"]


async def test_a_training_whose_steps_vary_all_the_time_is_known_by_its_reports() -> None:
    """Six programs share two cores, so that nothing settles: the guard goes by the slowest report, and the
    demo does not give up."""
    cell = Cell(*(20.0 * 1.1 ** (second // 2) for second in range(34)))
    taken, returned = await cell.lines()
    assert taken.startswith("augment: 7 → 1 core")
    assert returned.startswith("augment: 1 → 7 cores")


async def test_too_few_reports_are_waited_out() -> None:
    """The training's speed is known with its last report, not before: the other job comes after that."""
    cell = Cell(20.0, 35.0, 20.0, 50.0, 20.0, 90.0)
    showing = asyncio.ensure_future(cell.lines())
    for _ in range(9):
        await asyncio.sleep(0)
        assert len(cell.shown) == 1, "it still runs alone"
        cell.step(20.0)
    assert len(await showing) == 2


async def test_a_training_that_ends_too_early_is_the_reason() -> None:
    """Its environment lacks NumPy."""

    class Fails(Cell):
        async def submit(self, job: DemoJob) -> None:
            await super().submit(job)
            self.tell("k1", "job.ended", outcome="failed")

    assert await Fails().lines() == ["left out: softmax-slowed has ended before its speed was known"]


@pytest.mark.parametrize(
    ("nodes", "reason"),
    [
        (("n0", "n0"), "did not find the steps of softmax-slowed a tenth longer"),
        (("n0", "n1"), "not on one node"),
    ],
)
async def test_where_the_guard_sees_no_harm_the_demo_goes_on(nodes: tuple[str, str], reason: str) -> None:
    cell = Cell(*[20.0] * 9, slows=False, starts=nodes)
    [line] = await cell.lines()
    assert line.startswith("left out: ")
    assert reason in line
    assert cell.cancelled == ["k2"], "the other job would never end"


@pytest.mark.parametrize(
    ("machine", "node", "reason"),
    [
        (MACHINE._replace(eliminates=False, profile="fifo"), NODE, "profile fifo slows no jobs"),
        (MACHINE._replace(usable_cores=1), NODE, "this machine has one core"),
        (MACHINE, measuring("none", "none"), "n0 measures waiting for cores not at all"),
        (
            MACHINE,
            measuring("pressure", "resctrl"),
            "n0 measures waiting for cores by the kernel's triggers, memory",
        ),
        (MACHINE, {**NODE, "cores": 2}, "n0 gives out 2 cores and the machine has 2"),
    ],
)
def test_what_a_machine_cannot_show_is_left_out_with_the_reason(
    machine: Machine, node: Mapping[str, Any], reason: str
) -> None:
    """A laptop without pressure files, a container with one core, a server that counts memory traffic, real
    GPUs with all cores."""
    assert reason in machine.left_out([node])
    assert MACHINE.left_out([NODE]) == ""


async def test_nothing_is_submitted_where_it_is_left_out() -> None:
    cell = Cell()
    [line] = await cell.lines(measuring("none", "none"))
    assert cell.shown == [line]


def test_the_profile_decides_whether_the_guard_slows_jobs_and_the_migrator_moves_them() -> None:
    assert acts_of({}) == ("penstock", True, True)
    assert acts_of({"PENSTOCK_PROFILE": "fifo"}) == ("fifo", False, False)
    assert acts_of({"PENSTOCK_CONTENTION": '{"eliminate": false}'}) == ("penstock", False, True)
    assert acts_of({"PENSTOCK_PROFILE": "specon"}) == ("specon", False, True)


def test_the_demo_empties_a_folder_that_an_earlier_one_has_left(tmp_path: Path) -> None:
    """A visitor runs it a second time."""
    for name in (*OWN_FOLDERS, DEVICES):
        (tmp_path / name).mkdir()
    for name in ("log", "up.lock"):
        (tmp_path / name).touch()
    start_fresh(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["up.lock"]
