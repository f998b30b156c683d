"""Stops of trainings behind real launchers, with real collectives: rank 0 saves once, all ranks end together,
no iteration is lost."""

from dataclasses import replace
from pathlib import Path

import pytest

from penstock.model.decisions.orders import CheckpointTask
from penstock.model.inputs.external_events import TaskCheckpointed, TaskExited
from penstock.model.inputs.saves import SaveRefused
from penstock_services.node_reporter.options import Options
from tests.e2e.conftest import Start, listed
from tests.e2e.trainings.test_launchers import FORKS, WORK, environment
from tests.support.log.memory_log import MemoryBroker, MemoryLog
from tests.support.node_reporter import node_fixtures
from tests.support.node_reporter.node_cell import NODE, Cell, start_order, stop_order, working
from tests.support.waiting import await_until, wait_until

pytestmark = pytest.mark.launchers

options, broker = node_fixtures.options, node_fixtures.broker
cell, nothing_left = node_fixtures.cell, node_fixtures.nothing_left

SAVES = WORK.with_name("saves.py")


def saving(launcher: str, place: Path, port: str, ranks: int = 2) -> tuple[str, ...]:
    """A launcher with these ranks of a training that saves by the SDK, and leaves its steps in this
    folder."""
    place.mkdir()
    flags = ("--multi_gpu", "--num_processes", str(ranks), "--main_process_port", port)
    starts = {
        "torchrun": ("torchrun", f"--nproc_per_node={ranks}"),
        "accelerate": ("accelerate", "launch", *flags),
    }[launcher]
    return (*starts, str(SAVES), str(place))


def lines(place: Path, name: str) -> list[tuple[int, int]]:
    """(attempt, iteration) of its steps or saves so far."""
    text = (place / name).read_text() if (place / name).exists() else ""
    return [(int(attempt), int(done)) for attempt, done in map(str.split, text.splitlines())]


async def test_a_stop_behind_a_launcher_is_saved_once_and_ends_all_its_ranks(
    options: Options, broker: MemoryBroker, cell: Cell, tmp_path: Path
) -> None:
    """One worker, two ranks. SIGTERM to `torchrun` would end its ranks in the middle of an iteration, and
    `penstock checkpoint` did not find rank 0 among them."""
    launched = {"job-1": "torchrun", "job-2": "accelerate"}
    options = replace(options, virtual_gpus=2 * len(launched))
    env = {**environment(), **FORKS}
    async with working(options, MemoryLog(broker, "node-reporter")):
        for token, (job, launcher) in enumerate(launched.items(), 1):
            argv, gpus = saving(launcher, tmp_path / job, f"2977{token + 5}"), (2 * token - 2, 2 * token - 1)
            order = start_order(
                token,
                *argv,
                gpus=gpus,
                task_id=f"{job}.1.w0",
                checkpoint="",
                env=env,
                rendezvous_port=29_770 + token,
            )
            await cell.order(order)
        for job in launched:
            await await_until(lambda job=job: lines(tmp_path / job, "steps"), f"steps of {job}")
        for step, (job, launcher) in enumerate(launched.items(), 10):
            task_id = f"{job}.1.w0"
            await cell.order(CheckpointTask(token=step, node_id=NODE, task_id=task_id))
            asked = await cell.until(TaskCheckpointed, SaveRefused, task_id=task_id)
            assert isinstance(asked, TaskCheckpointed), launcher
            await cell.order(stop_order(20 + step, task_id, grace_ms=600_000))
            exited = await cell.until(TaskExited, task_id=task_id)
            assert (exited.cause, exited.detail) == ("stopped", ""), launcher
            saved = await cell.until(TaskCheckpointed, task_id=task_id, count=2)
            last = lines(tmp_path / job, "steps")[-1]
            assert lines(tmp_path / job, "saves") == [(1, asked.iteration), last], launcher
            assert last == (1, saved.iteration), "no step was lost"
        assert cell.events(SaveRefused) == []


def latest(place: Path) -> int:
    """The latest attempt that has trained; 0: none. Each one went on where the one before was saved."""
    steps = lines(place, "steps")
    assert [done for _, done in steps] == list(range(1, len(steps) + 1)), "no step was lost or came twice"
    return steps[-1][0] if steps else 0


def until_later(place: Path, attempt: int) -> None:
    """Waits until a later attempt than this one trains."""
    wait_until(lambda: latest(place) > attempt, f"an attempt of {place.name} after {attempt}")


@pytest.mark.slow
@pytest.mark.postgres
def test_launchers_go_on_after_a_move_a_drain_and_a_preemption(start: Start, place: Path) -> None:
    """`torchrun` and `accelerate launch` with two ranks in one worker, and a gang with a `torchrun` on each
    of two nodes: the first one is moved, its node is drained, and then a short job needs all GPUs. A gang
    over two nodes that share no folder saves its last step, too, and begins anew."""
    here = start("--nodes", "2", "--virtual-gpus", "6", PENSTOCK_PROFILE="srtf")
    here.gateway.until_nodes(2)
    quick = ("submit", "--name", "quick", "--gpus", "6", "--workers", "2", "--", "true")
    assert here.run(*quick).returncode == 0
    env = {**environment(), **FORKS}
    flags = [word for name, text in env.items() for word in ("--env", f"{name}={text}")]
    keeps = ("--checkpoint", "sdk", "--grace", "10m", "--cores", "1")
    for number, (name, shape, ranks) in enumerate(
        (
            ("gang", ("--gpus", "4", "--workers", "2"), 1),
            ("torchrun", ("--gpus", "1"), 2),
            ("accelerate", ("--gpus", "1"), 2),
        )
    ):
        argv = saving(
            "accelerate" if name == "accelerate" else "torchrun", place / name, f"2979{number}", ranks
        )
        answer = here.run("submit", "-d", "--name", name, *keeps, *shape, *flags, "--", *argv)
        assert answer.returncode == 0, answer.stderr
        until_later(place / name, 0)
        assert here.run("checkpoint", name).returncode == 0
    assert len(set(listed(here, "describe", "job", "gang")["nodes"])) == 2
    [node] = listed(here, "describe", "job", "torchrun")["nodes"]
    [other] = {found["node_id"] for found in listed(here, "get", "nodes")["nodes"]} - {node}
    assert here.run("move", "torchrun", "--to", other).returncode == 0
    until_later(place / "torchrun", 1)
    assert here.run("node", "drain", other).returncode == 0
    until_later(place / "torchrun", 2)
    steps, saves = lines(place / "gang", "steps"), lines(place / "gang", "saves")
    assert steps[-1] == saves[-1], "the gang's last step"
    before = {name: latest(place / name) for name in ("torchrun", "accelerate")}
    assert here.run("node", "uncordon", other).returncode == 0
    wait_until(lambda: lines(place / "gang", "steps")[-1][0] == 2, "the gang's second attempt")
    assert "did not get it: its tasks are on node-0, node-1" in " ".join(
        here.run("why", "gang").stdout.split()
    )
    assert here.run(*quick).returncode == 0, "all made way"
    for name, attempt in before.items():
        until_later(place / name, attempt)
    for name in ("gang", *before):
        (place / name / "end").touch()
        assert here.run("wait", name).returncode == 0
        events = listed(here, "events", name)["events"]
        assert not [event for event in events if event["type"] == "penstock.save.refused"], name
        stopped = [event["data"] for event in events if event["type"] == "penstock.task.exited"]
        assert not [data for data in stopped if data["detail"]], name
