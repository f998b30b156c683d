"""Real tasks behind real wrappers are stopped, asked to save and left: what the stop reaches, and what
stays on the node."""

import os
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from infra.codegen.schemas import ROOT
from penstock.model.decisions.orders import CheckpointTask, Peer
from penstock.model.inputs.external_events import TaskCheckpointed, TaskExited, TaskStarted
from penstock.model.inputs.saves import SaveRefused
from penstock_services.node_reporter.options import Options
from penstock_services.node_reporter.shell.limits import cgroups
from tests.support.log.memory_log import MemoryBroker, MemoryLog
from tests.support.node_reporter import node_fixtures
from tests.support.node_reporter.node_cell import NODE, Cell, printed, start_order, stop_order, working
from tests.support.trainings.wrappers import WRAPPERS, wrapped
from tests.support.waiting import await_until

options, broker = node_fixtures.options, node_fixtures.broker
cell, nothing_left = node_fixtures.cell, node_fixtures.nothing_left

TRAIN = """
import os, pathlib, sys, time
from penstock.sdk.checkpoint import checkpoint
from penstock.sdk.progress import progress
rank, steps = os.environ.get("RANK", ""), pathlib.Path(sys.argv[1])
def save(path):
    time.sleep(0.4)
    print("saving", flush=True)
    pathlib.Path(path, "state").write_text(str(done))
checkpoint(save, lambda path: None)
done = 0
while True:
    done += 1
    time.sleep(0.01)
    (steps.with_suffix(rank) if rank not in ("", "0") else steps).write_text(str(done))
    progress(done)
"""
MEMBER = """
import os, pathlib, sys, time
from penstock.sdk.checkpoint import checkpoint
from penstock.sdk.progress import progress
rank, place, done = int(os.environ["RANK"]), pathlib.Path(sys.argv[1]), 0
def save(path):
    pathlib.Path(path, "state").write_text(str(done))
checkpoint(save, lambda path: None)
own, other = (os.open(place / f"to-{member}", os.O_RDWR) for member in (rank, 1 - rank))
while True:
    time.sleep(0.01)
    os.write(other, b"x")
    os.read(own, 1)
    done += 1
    (place / f"steps-{rank}").write_text(str(done))
    progress(done)
"""


def behind(name: str, folder: Path) -> str:
    """The job's script: the training behind this wrapper. `train.py` is in the folder."""
    return wrapped(name, f"{sys.executable} {folder}/train.py {folder}/{name.replace(' ', '')}", folder)


async def test_a_stop_reaches_the_training_behind_each_wrapper(
    options: Options, broker: MemoryBroker, cell: Cell, tmp_path: Path
) -> None:
    """A node is drained. Every job saves its last step, whatever is in front of it; where a script was,
    its training was killed at once."""
    env = {"PYTHONPATH": str(ROOT / "libs")}
    (tmp_path / "train.py").write_text(TRAIN)
    jobs = {f"job-{number}": name for number, name in enumerate(WRAPPERS, 1)}
    options = replace(options, virtual_gpus=len(jobs))
    async with working(options, MemoryLog(broker, "node-reporter")):
        for number, (job, name) in enumerate(jobs.items()):
            script = behind(name, tmp_path)
            order = start_order(
                number + 1,
                "bash",
                "-c",
                script,
                gpus=(number,),
                task_id=f"{job}.1.w0",
                checkpoint="",
                env=env,
            )
            await cell.order(order)
        for name in jobs.values():
            steps = tmp_path / name.replace(" ", "")
            await await_until(lambda steps=steps: steps.exists(), f"the first step of {name}")
        for number, job in enumerate(jobs):
            await cell.order(stop_order(100 + number, f"{job}.1.w0", grace_ms=60_000))
        for job, name in jobs.items():
            exited = await cell.until(TaskExited, task_id=f"{job}.1.w0")
            saved = await cell.until(TaskCheckpointed, task_id=f"{job}.1.w0")
            last = int((tmp_path / name.replace(" ", "")).read_text())
            assert (exited.cause, saved.iteration, exited.detail) == ("stopped", last, ""), name
            assert "saving" in printed(options, job, f"{job}.1.w0"), name
        assert cell.events(SaveRefused) == []
    assert "ended with 75" in printed(options, "job-2", "job-2.1.w0")
    assert "saving" in (tmp_path / "train.log").read_text()


async def test_ranks_in_tasks_of_their_own_end_together_when_rank_0_has_saved(
    options: Options, broker: MemoryBroker, cell: Cell, tmp_path: Path
) -> None:
    """A gang is preempted. Each iteration needs both ranks, and a collective without its peer never ends.
    The order to the other rank comes first, and that trains on."""
    (tmp_path / "member.py").write_text(MEMBER)
    for rank in range(2):
        os.mkfifo(tmp_path / f"to-{rank}")

    def done() -> int:
        return int((tmp_path / "steps-1").read_text() or 0)  # empty while it is written

    peers = tuple(Peer(rank=rank, role="worker", node_id=NODE, address="127.0.0.1") for rank in range(2))
    async with working(options, MemoryLog(broker, "node-reporter")):
        for rank in range(2):
            order = start_order(
                1,
                "sh",
                "-c",
                f"{sys.executable} {tmp_path}/member.py {tmp_path}; true",
                gpus=(rank,),
                task_id=f"job-1.1.w{rank}",
                checkpoint="",
                env={"PYTHONPATH": str(ROOT / "libs")},
                peers=peers,
            )
            place = msgspec.structs.replace(order.place, rank=rank)
            await cell.order(msgspec.structs.replace(order, place=place))
        await await_until(lambda: (tmp_path / "steps-1").exists(), "the first iteration")
        await cell.order(stop_order(2, "job-1.1.w1", grace_ms=600_000))
        await cell.order(start_order(3, "true", gpus=(), task_id="job-3.1.w0"))
        await cell.until(TaskExited, task_id="job-3.1.w0")
        steps = done()
        await await_until(lambda: done() > steps, "more iterations")
        await cell.order(stop_order(2, "job-1.1.w0", grace_ms=600_000))
        for rank in range(2):
            exited = await cell.until(TaskExited, task_id=f"job-1.1.w{rank}")
            assert (exited.cause, exited.detail) == ("stopped", "")
        [saved] = cell.events(TaskCheckpointed)
        assert isinstance(saved, TaskCheckpointed)
        assert saved.iteration == int((tmp_path / "steps-0").read_text()), "no step was lost"
        assert cell.events(SaveRefused) == []


async def test_a_request_to_save_goes_to_the_process_that_saves_or_is_refused(
    options: Options, broker: MemoryBroker, cell: Cell, tmp_path: Path
) -> None:
    """`penstock checkpoint` reaches a training behind a script. Where none has registered the answer says
    so; the one that comes later saves at its first step."""
    env = {"PYTHONPATH": str(ROOT / "libs")}
    (tmp_path / "train.py").write_text(TRAIN)
    script = f"until test -e {tmp_path}/go; do sleep 0.05; done\n{behind('run.sh', tmp_path)}"
    async with working(options, MemoryLog(broker, "node-reporter")):
        await cell.order(start_order(1, "bash", "-c", script, task_id="job-1.1.w0", checkpoint="", env=env))
        await cell.until(TaskStarted)
        await cell.order(CheckpointTask(token=2, node_id=NODE, task_id="job-1.1.w0"))
        refused = await cell.until(SaveRefused)
        assert "penstock.sdk.checkpoint" in refused.reason
        (tmp_path / "go").touch()
        assert (await cell.until(TaskCheckpointed)).iteration == 1
        await cell.order(CheckpointTask(token=3, node_id=NODE, task_id="job-1.1.w0"))
        assert (await cell.until(TaskCheckpointed, count=2)).iteration > 1
        ready = tmp_path / "trapped"
        trapped = f"trap 'kill $!; exit 3' TERM; touch {ready}; sleep 60 & wait"
        order = start_order(4, "bash", "-c", trapped, gpus=(1,), task_id="job-4.1.w0", checkpoint="")
        await cell.order(order)
        await await_until(ready.exists, "a script that handles SIGTERM, and saves nothing")
        await cell.order(stop_order(5, "job-4.1.w0"))
        await cell.until(TaskExited, task_id="job-4.1.w0")
        assert len(cell.events(SaveRefused)) == 2


async def test_a_script_that_saves_by_itself_has_its_grace_behind_a_wrapper(
    options: Options, broker: MemoryBroker, cell: Cell, tmp_path: Path
) -> None:
    """`run.sh` starts a training that handles SIGTERM by itself. A process that does not end is killed
    after the grace, and is counted."""
    saves = (
        "import pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.4), "
        f"pathlib.Path('{tmp_path}/saved').touch(), sys.exit(3)))\n"
        f"pathlib.Path('{tmp_path}/ready').touch()\ntime.sleep(60)"
    )
    async with working(options, MemoryLog(broker, "node-reporter")):
        await cell.order(start_order(1, "bash", "-c", f'{sys.executable} -c "{saves}"; true'))
        await await_until(lambda: (tmp_path / "ready").exists(), "the training")
        await cell.order(stop_order(2, "job-1.1.0", grace_ms=60_000))
        exited = await cell.until(TaskExited)
        assert (tmp_path / "saved").exists()
        assert (exited.cause, exited.signal) == ("stopped", 15)
        deaf = f"trap '' TERM; touch {tmp_path}/deaf; while :; do sleep 60; done"
        await cell.order(start_order(3, "sh", "-c", deaf))
        await await_until(lambda: (tmp_path / "deaf").exists(), "a process that ignores the stop")
        await cell.order(stop_order(4, "job-3.1.0", grace_ms=400))
        exited = await cell.until(TaskExited, task_id="job-3.1.0")
        assert exited.detail == "2 processes did not end within the grace and were killed"


async def test_what_a_job_leaves_running_is_ended_and_counted(
    options: Options, broker: MemoryBroker, cell: Cell
) -> None:
    """`nohup train.py &` at the end of a script, as on a workstation: "succeeded" alone misled. Output
    still in a pipe is not lost."""
    async with working(options, MemoryLog(broker, "node-reporter")):
        await cell.order(start_order(1, "bash", "-c", "setsid sleep 60 & setsid sleep 60 & echo started"))
        exited = await cell.until(TaskExited)
        assert (exited.cause, exited.exit_code) == ("exited", 0)
        assert exited.detail == "2 processes left running were ended"
        script = "exec > >(while read line; do sleep 0.05; echo $line; done); echo one; echo two"
        await cell.order(start_order(2, "bash", "-c", script))
        assert (await cell.until(TaskExited, task_id="job-2.1.0")).detail == ""
        assert printed(options, "job-2", "job-2.1.0") == "one\ntwo\n"


async def test_a_task_has_a_tmp_of_its_own_and_sees_what_it_names(
    options: Options, broker: MemoryBroker, cell: Cell, tmp_path: Path
) -> None:
    """Killed jobs had filled a node's memory with batches in /dev/shm. A workdir below /tmp, and a path in
    the command, are the machine's."""
    script = (
        "touch /tmp/own /dev/shm/own && cd / && echo $TMPDIR $(ls /tmp | wc -l) $(df --output=size -BM /tmp "
        f"| tail -1) $(cat {tmp_path}/data); echo kept > {tmp_path}/result"
    )
    (tmp_path / "data").write_text("data")
    async with working(options, MemoryLog(broker, "node-reporter")):
        isolation = (await cell.next_join()).node.isolation
        if isolation is None or isolation.tmp != "task":
            pytest.skip("no mounts are possible here")
        await cell.order(start_order(1, "sh", "-c", script, host_memory_mib=64))
        exited = await cell.until(TaskExited)
    assert exited.exit_code == 0, printed(options, "job-1", "job-1.1.0")
    tmpdir, entries, size, data = printed(options, "job-1", "job-1.1.0").split()
    assert (tmpdir, size, data) == ("/tmp", "64M", "data")
    assert int(entries) <= 3
    assert (tmp_path / "result").read_text() == "kept\n"
    assert "own" not in os.listdir("/tmp")
    assert "own" not in os.listdir("/dev/shm")


async def test_a_job_that_forks_without_end_has_a_bound_that_its_exit_names(
    options: Options, broker: MemoryBroker, cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loader started its workers in each of its workers: nobody could log in to the node any more."""
    monkeypatch.setattr(cgroups, "most_pids", lambda: 30)
    async with working(options, MemoryLog(broker, "node-reporter")):
        isolation = (await cell.next_join()).node.isolation
        if isolation is None or isolation.processes != "limited":
            pytest.skip("this machine gives no groups with pids.max")
        forks = "import subprocess; [subprocess.Popen(['sleep', '60']) for _ in range(60)]"
        await cell.order(start_order(1, sys.executable, "-c", forks))
        exited = await cell.until(TaskExited)
    assert (exited.cause, exited.exit_code) == ("exited", 1)
    assert "limit of processes and threads" in exited.detail
    assert "Resource temporarily unavailable" in printed(options, "job-1", "job-1.1.0")
