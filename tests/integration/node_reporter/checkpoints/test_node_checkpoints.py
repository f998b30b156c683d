"""Real tasks save on a real node-reporter, are stopped and killed, and go on at their checkpoints: nothing is
lost or done twice."""

import asyncio
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from infra.codegen.schemas import ROOT
from penstock.model.decisions.orders import CheckpointTask, Peer, StartTask
from penstock.model.inputs import external_events
from penstock.runtime.files.task_logs import log_path
from penstock.sdk.checkpoint import SAVED_STATUS
from penstock_services.node_reporter.options import IsolationChoice, Options
from tests.support.log.memory_log import MemoryBroker, MemoryLog
from tests.support.node_reporter import node_fixtures
from tests.support.node_reporter.node_cell import (
    NODE,
    Cell,
    end_tasks,
    node_options,
    printed,
    reporter_process,
    start_order,
    stop_order,
    working,
)
from tests.support.waiting import await_until

options, broker = node_fixtures.options, node_fixtures.broker
cell, nothing_left = node_fixtures.cell, node_fixtures.nothing_left
embedded = node_fixtures.embedded_cell


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that other users can reach; pytest's own are closed to them."""
    found = Path(tempfile.mkdtemp(prefix="penstock-checkpoints-"))
    found.chmod(0o755)
    yield found
    shutil.rmtree(found)


JOB = "job-1"
TRAIN = """
import json, os, pathlib, time
from penstock.sdk.checkpoint import checkpoint
from penstock.sdk.progress import progress
state = {"done": 0, "sum": 0}
def save(path):
    pathlib.Path(path, "first").write_text(json.dumps(state))
    time.sleep(SAVE_S)
    pathlib.Path(path, "second").write_text(json.dumps(state))
def restore(path):
    (text,) = {pathlib.Path(path, name).read_text() for name in ("first", "second")}
    state.update(json.loads(text))
print("restored" if checkpoint(save, restore) else "fresh", state["done"], flush=True)
while True:
    state["done"] += 1
    state["sum"] += state["done"]
    assert state["sum"] == state["done"] * (state["done"] + 1) // 2, "something was lost or done twice"
    time.sleep(0.002)
    progress(state["done"])
"""


def start(token: int, attempt: int, checkpoint: str = "", save_s: float = 0.0, **more: object) -> StartTask:
    script = TRAIN.replace("SAVE_S", str(save_s))
    return start_order(
        token,
        sys.executable,
        "-c",
        script,
        task_id=f"{JOB}.{attempt}.w0",
        job_id=JOB,
        attempt=attempt,
        checkpoint=checkpoint,
        env={"PYTHONPATH": str(ROOT / "libs")},
        **more,
    )


def output(options: Options, attempt: int) -> str:
    return printed(options, JOB, f"{JOB}.{attempt}.w0")


async def greets(options: Options, attempt: int) -> tuple[str, int]:
    """What the script prints first: whether it restored, and where it is."""
    await await_until(lambda: "\n" in output(options, attempt), f"the greeting of attempt {attempt}")
    word, done = output(options, attempt).split()[:2]
    return word, int(done)


@pytest.mark.parametrize("isolation", [IsolationChoice.AUTO, IsolationChoice.NONE])
async def test_a_stopped_task_saves_in_its_grace_and_the_next_attempt_goes_on(
    options: Options, broker: MemoryBroker, cell: Cell, isolation: IsolationChoice
) -> None:
    """Another job needs the GPU; later it is free again. With mounts of its own a task sees its job's
    checkpoints and no other's."""
    options = replace(options, isolation=isolation)
    async with working(options, MemoryLog(broker, "node-reporter")):
        await cell.order(start(1, 1))
        assert await greets(options, 1) == ("fresh", 0)
        await cell.until(external_events.StepsMeasured)
        await cell.order(stop_order(2, f"{JOB}.1.w0", grace_ms=20_000))
        exited = await cell.until(external_events.TaskExited)
        assert (exited.cause, exited.exit_code) == ("stopped", SAVED_STATUS)
        (saved,) = cell.events(external_events.TaskCheckpointed)
        assert isinstance(saved, external_events.TaskCheckpointed)
        assert saved.iteration
        assert (saved.task_id, saved.token, saved.shared) == (f"{JOB}.1.w0", 1, False)
        assert saved.path == str(
            options.state_dir / f"checkpoints/{JOB}/attempt-1-iteration-{saved.iteration}"
        )
        assert saved.size_bytes > 0
        await cell.order(start(3, 2, Path(saved.path).name))
        assert await greets(options, 2) == ("restored", saved.iteration)
        await cell.order(CheckpointTask(token=4, node_id=NODE, task_id=f"{JOB}.2.w0"))
        again = await cell.until(external_events.TaskCheckpointed, count=2)
        assert again.iteration > saved.iteration
        await cell.order(start_order(5, "sh", "-c", f"ls {options.state_dir}/checkpoints", gpus=(1,)))
        await cell.until(external_events.TaskExited, task_id="job-5.1.0")
        sees = log_path(options.log_dir, "job-5", "job-5.1.0").read_text()
        assert (JOB in sees) == (isolation is IsolationChoice.NONE)


async def test_a_gang_on_several_nodes_goes_on_where_all_find_the_checkpoint_or_not_at_all(
    options: Options, broker: MemoryBroker, cell: Cell, tmp_path: Path
) -> None:
    """The folder is not mounted here: this worker would begin at 0 beside others that do not. Where the
    ledger knows of no checkpoint all begin at 0."""
    shared = tmp_path / "shared"
    shared.mkdir()
    options = replace(options, checkpoint_dir=shared, checkpoint_shared=True)
    peers = tuple(
        Peer(rank=rank, role="worker", node_id=f"n{rank + 1}", address="127.0.0.1") for rank in (0, 1)
    )
    async with working(options, MemoryLog(broker, "node-reporter")):
        await cell.order(start(1, 1, "attempt-9-iteration-5", peers=peers))
        exited = await cell.until(external_events.TaskExited)
        assert exited.cause == "start_failed"
        assert "mount on all nodes what --checkpoint-shared names" in exited.detail
        (shared / JOB / "attempt-1-iteration-7").mkdir()
        await cell.order(start(2, 2, "", peers=peers))
        assert await greets(options, 2) == ("fresh", 0)
        await cell.order(CheckpointTask(token=3, node_id=NODE, task_id=f"{JOB}.2.w0"))
        saved = await cell.until(external_events.TaskCheckpointed)
        assert saved.shared
        assert Path(saved.path).parent == shared / JOB


@pytest.mark.parametrize("own", [True, False])
async def test_what_a_job_saved_is_removed_when_it_has_succeeded(
    options: Options, broker: MemoryBroker, cell: Cell, tmp_path: Path, *, own: bool
) -> None:
    """A year of nightly trainings must not fill the disk. What may be needed again stays: of attempts that
    fail, and in a folder of an operator's."""
    if not own:
        (tmp_path / "shared").mkdir()
        options = replace(options, checkpoint_dir=tmp_path / "shared")
    folder = (options.checkpoint_dir or options.state_dir / "checkpoints") / JOB
    script = (
        'cd "$PENSTOCK_CHECKPOINT_DIR" && mkdir attempt-$1-iteration-1 && ls -d attempt-1-iteration-1 || '
        "exit 9; "
        "exit $((2 - $1))"
    )
    async with working(options, MemoryLog(broker, "node-reporter")):
        for attempt in (1, 2):
            await cell.order(
                start_order(
                    attempt,
                    "sh",
                    "-c",
                    script,
                    "sh",
                    str(attempt),
                    task_id=f"{JOB}.{attempt}.w0",
                    job_id=JOB,
                    attempt=attempt,
                    checkpoint="",
                )
            )
            exited = await cell.until(external_events.TaskExited, task_id=f"{JOB}.{attempt}.w0")
            assert exited.exit_code == 2 - attempt
            if attempt == 1:
                await asyncio.sleep(0.1)  # clock: in which it would be removed; the next attempt looks again
                assert (folder / "attempt-1-iteration-1").is_dir()
        if own:
            await await_until(lambda: not folder.exists(), f"{folder} to be removed")
        else:
            await asyncio.sleep(0.1)  # clock: in which it would be removed
            assert (folder / "attempt-2-iteration-1").is_dir()


async def test_a_folder_that_is_not_mounted_fails_the_start_and_is_named(
    options: Options, broker: MemoryBroker, cell: Cell, tmp_path: Path
) -> None:
    options = replace(options, checkpoint_dir=tmp_path / "not-there")
    async with working(options, MemoryLog(broker, "node-reporter")):
        await cell.order(start(1, 1))
        exited = await cell.until(external_events.TaskExited)
        assert exited.cause == "start_failed"
        assert f"cannot lie in {tmp_path}/not-there/{JOB}: No such file" in exited.detail
        await cell.order(start_order(2, "true"))
        assert (await cell.until(external_events.TaskExited, task_id="job-2.1.0")).exit_code == 0


@pytest.mark.postgres
async def test_kills_of_task_and_reporter_during_saves_never_yield_a_half_checkpoint(
    dsn: str, options: Options, embedded: Cell
) -> None:
    """Twelve power cuts at twelve moments around a save of 60 ms, every third time of the reporter, too. Each
    attempt goes on at a whole checkpoint, never before the last one that was complete; the script itself
    checks that nothing is lost or done twice."""
    known, reporters = 0, 0
    folder = options.state_dir / "checkpoints" / JOB
    async with AsyncExitStack() as stack:
        reporter = await stack.enter_async_context(reporter_process(options, dsn))
        for attempt in range(1, 13):
            name = (
                max((entry.name for entry in folder.glob("attempt-*")), default="") if folder.exists() else ""
            )
            await embedded.order(start(2 * attempt, attempt, name, save_s=0.06))
            word, done = await greets(options, attempt)
            assert (word, done >= known) == ("restored" if known else "fresh", True)
            known_saves = set(folder.glob("attempt-*"))
            await embedded.order(
                CheckpointTask(token=2 * attempt, node_id=NODE, task_id=f"{JOB}.{attempt}.w0")
            )
            before = len(list(folder.glob("attempt-*")))
            await await_until(
                lambda known_saves=known_saves: (
                    (folder / ".new").exists() or not known_saves.issuperset(folder.glob("attempt-*"))
                ),  # type: ignore[misc]
                "a save to begin",
            )  # on a busy machine the save may have ended before it is looked at
            await asyncio.sleep(0.009 * attempt)  # clock: a moment of the kill, any of which is right
            if attempt % 3 == 0:
                await reporter.kill()
                end_tasks(options)
                reporter = await stack.enter_async_context(reporter_process(options, dsn))
                reporters += 1
            else:
                end_tasks(options)
            await embedded.until(external_events.TaskExited, task_id=f"{JOB}.{attempt}.w0")
            found = list(folder.glob("attempt-*"))
            assert len(found) >= min(1, before)
            for entry in found:
                (text,) = {(entry / part).read_text() for part in ("first", "second")}
                known = max(known, json.loads(text)["done"])
            assert "something was lost" not in output(options, attempt)
    assert known > 0
    assert reporters == 4


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can run tasks as another user")
@pytest.mark.parametrize("isolation", [IsolationChoice.AUTO, IsolationChoice.NONE])
async def test_tasks_of_another_user_can_write_into_their_jobs_folder(
    broker: MemoryBroker, cell: Cell, place: Path, isolation: IsolationChoice
) -> None:
    """The reporter is root, tasks are nobody; the folder is theirs, the one around it is not."""
    options = node_options(place, task_user="nobody", allow_root=False, isolation=isolation)
    script = 'cd "$PENSTOCK_CHECKPOINT_DIR" && mkdir attempt-1-iteration-1 && ! mkdir ../mine'
    async with working(options, MemoryLog(broker, "node-reporter")):
        await cell.order(start_order(1, "sh", "-c", script, checkpoint=""))
        exited = await cell.until(external_events.TaskExited)
    end_tasks(options)
    assert (exited.cause, exited.exit_code) == ("exited", 0), exited.detail


LOADER = """
import subprocess, time
from penstock.sdk.checkpoint import checkpoint
from penstock.sdk.progress import progress
loader = subprocess.Popen(["sleep", "600"])
def save(path):
    time.sleep(0.3)
    if loader.poll() is not None:
        raise RuntimeError("the loader is gone")
checkpoint(save, print)
print("fresh 0", flush=True)
for done in range(1, 10**9):
    time.sleep(0.002)
    progress(done)
"""


async def test_a_loader_lives_on_until_the_training_has_saved(
    options: Options, broker: MemoryBroker, cell: Cell
) -> None:
    """A process of the same group that does not handle SIGTERM, such as a data loader: without it the
    iteration under way would fail."""
    async with working(options, MemoryLog(broker, "node-reporter")):
        order = msgspec.structs.replace(start(1, 1), command=(sys.executable, "-c", LOADER))
        await cell.order(order)
        await greets(options, 1)
        await cell.order(stop_order(2, f"{JOB}.1.w0", grace_ms=20_000))
        exited = await cell.until(external_events.TaskExited)
    assert (exited.cause, exited.exit_code) == ("stopped", SAVED_STATUS), output(options, 1)
