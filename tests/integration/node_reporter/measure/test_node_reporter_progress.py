"""Real tasks on a real node-reporter tell how far they are and what they use; the events arrive, and nothing
else."""

import asyncio
import fcntl
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Literal

import httpx
import msgspec
import pytest

from infra.codegen.schemas import ROOT
from infra.devservers.processes import free_port  # below the ports that connections get by themselves
from penstock.model.decisions.orders import Peer
from penstock.model.inputs import external_events
from penstock.model.nouns.types import TaskPlacement
from penstock.model.schema.event import Event
from penstock.runtime.files.log_archive import LogArchive
from penstock.runtime.files.task_logs import Output, framed, log_name, log_path
from penstock.runtime.keys.log_keys import key_in_file
from penstock_services.node_reporter.options import IsolationChoice, Options
from penstock_services.node_reporter.shell.logs import archiver
from penstock_services.node_reporter.shell.process.spawner import lock_state
from tests.support.log.memory_log import MemoryBroker, MemoryLog
from tests.support.log.s3_server import S3Server
from tests.support.node_reporter import node_fixtures
from tests.support.node_reporter.node_cell import (
    NODE,
    Cell,
    node_options,
    printed,
    start_order,
    stop_order,
    working,
)
from tests.support.waiting import await_until

TASK = "job-1.1.0"
COUNTED = external_events.CountedTaskEvent | external_events.NodeJoined


@pytest.fixture
def options(tmp_path: Path) -> Options:
    return node_options(tmp_path, cores=None, host_memory_mib=None)


broker, cell, node = node_fixtures.broker, node_fixtures.cell, node_fixtures.node
nothing_left = node_fixtures.nothing_left


def steps_of(cell: Cell, task_id: str = TASK) -> list[external_events.StepsMeasured]:
    found = [event for event in cell.events() if isinstance(event, external_events.StepsMeasured)]
    return [event for event in found if event.task_id == task_id]


def stages_of(cell: Cell) -> list[external_events.StagesMeasured]:
    return [event for event in cell.events() if isinstance(event, external_events.StagesMeasured)]


async def finished(cell: Cell, task_id: str = TASK, exit_code: int | None = 0) -> external_events.TaskExited:
    exited = await cell.until(external_events.TaskExited, task_id=task_id)
    assert isinstance(exited, external_events.TaskExited)
    assert exited.exit_code == exit_code
    return exited


async def test_the_example_of_the_readme_reports_its_progress(node: Options, cell: Cell) -> None:
    """A newcomer copies it; every line of it must be true."""
    (script,) = re.findall(
        r"```python\n(.*?)```", (ROOT / "libs/penstock/sdk/README.md").read_text(), re.DOTALL
    )
    await cell.order(start_order(1, sys.executable, "-c", script))
    exited = await finished(cell)
    kinds = [type(event).__name__ for event in cell.events()[1:]]
    assert kinds[0] == "TaskStarted"
    assert kinds[-1] == "TaskExited", "a task's progress is reported before its end"
    phases = [event.phase for event in cell.events() if isinstance(event, external_events.TaskPhaseChanged)]
    assert phases == ["launch", "train", "save"]
    first, *later = steps_of(cell)
    assert (first.done, first.total, first.steps) == (1, 2_000, 0)
    assert [event.done for event in later] == sorted({event.done for event in later})
    assert later[-1].done == later[-1].total == 2_000
    assert sum(event.steps for event in later) == 1_999
    assert all(event.step_ms > 0 for event in later)
    assert later[-1].loss is not None
    assert first.loss is not None
    assert later[-1].loss < first.loss, "it learns"
    (stages,) = stages_of(cell)[:1]
    assert stages.iterations >= 20
    shares = [
        [one.storage, one.cpu, one.gpu, one.network] for one in stages.samples if one.storage + one.cpu > 0
    ]
    assert shares == [[1, 0, 0, 0], [0, 1, 0, 0]]
    per_iteration_ms = sum(one.lasted_ms for one in stages.samples) / stages.iterations
    assert 0 < per_iteration_ms < exited.exited_ms - exited.started_ms, "in milliseconds"


async def test_the_demos_gang_reports_once_for_all_its_workers(node: Options, cell: Cell) -> None:
    """Two workers train on one node; worker 0 alone reports, and the sum of its stages is the time of its
    steps."""
    peers = tuple(Peer(rank=rank, role="worker", node_id=NODE, address="127.0.0.1") for rank in (0, 1))
    command = (
        sys.executable,
        str(ROOT / "tilt/jobs/allreduce.py"),
        "--epochs",
        "400",
        "--target-loss",
        "0.05",
    )
    port = free_port()
    orders = [
        msgspec.structs.replace(
            start_order(
                1,
                *command,
                gpus=(rank,),
                task_id=f"job-1.1.{rank}",
                job_id="job-1",
                peers=peers,
                rendezvous_port=port,
            ),
            place=place(rank),
        )
        for rank in (0, 1)
    ]
    await cell.order(*orders)
    for rank in (0, 1):
        await finished(cell, f"job-1.1.{rank}")
    assert steps_of(cell, "job-1.1.1") == []
    reported = steps_of(cell, "job-1.1.0")
    assert reported[0].done == 1
    assert {event.total for event in reported} == {2_000}
    log = log_path(node.log_dir, "job-1", "job-1.1.0").read_text()
    epochs = len(re.findall("^epoch", log, re.M))
    assert 2 < epochs < 400, "its target loss ended it early"
    assert reported[-1].done == 5 * epochs, (
        "the last step is reported, although nobody knew that it would be the last"
    )
    for stages in stages_of(cell):
        assert stages.task_id == "job-1.1.0"
        assert sum(sample.cpu for sample in stages.samples) == sum(s.network for s in stages.samples) == 1


async def test_a_worker_that_speaks_for_its_gang_unasked_is_not_heard(node: Options, cell: Cell) -> None:
    """It writes the lines by hand: its phases are its own, the gang's progress is not."""
    script = (
        "from penstock.sdk.reporter.lines import write_line\n"
        'for line in ("train", \'{"steps":{"done":5}}\', "save"): assert write_line(line)'
    )
    order = start_order(1, sys.executable, "-c", script, task_id="job-1.1.1")
    await cell.order(msgspec.structs.replace(order, place=place(1)))
    await finished(cell, "job-1.1.1")
    kinds = [type(event).__name__ for event in cell.events()[1:]]
    assert kinds == ["TaskStarted", "TaskPhaseChanged", "TaskPhaseChanged", "TaskExited"]


def place(rank: int) -> TaskPlacement:
    return TaskPlacement(
        task_id=f"job-1.1.{rank}", role="worker", rank=rank, node_id=NODE, gpus=(rank,), cores=(0,)
    )


HOSTILE = """
import json, os, sys, time
fifo = os.open(os.environ["PENSTOCK_PHASE_FILE"], os.O_WRONLY | os.O_NONBLOCK)
def write(data):
    try:
        return os.write(fifo, data)
    except BlockingIOError:
        return 0
def steps(done):
    return json.dumps({"steps": {"done": done, "total": done}}).encode() + b"\\n"
done = 0
while done < 100 or not os.path.exists(sys.argv[1]):
    done += 1
    write(steps(done))
    write(b'{"stages":{"iterations":1,"samples":[[1,1,0,0,0]]}}\\n' * 20)
    write(b"train\\nsave\\n{]\\n" * 100)
    write(os.urandom(3_000))
os.set_blocking(fifo, True)
for number in range(40):
    os.write(fifo, b"\\n" + b"#" * 4_094 + b"\\n")
os.write(fifo, steps(1 << 50))
sys.exit(4)
"""


async def test_a_line_that_is_written_at_once_is_read(node: Options, cell: Cell) -> None:
    """On a busy machine a program may write before its shim goes on, which here waits for its log, a FIFO,
    and end before its start is known."""
    log, ran = log_path(node.log_dir, "job-1", TASK), node.state_dir.parent / "ran"
    log.parent.mkdir(parents=True)
    os.mkfifo(log)
    script = f"from penstock.sdk.progress import progress\nprogress(1, 1)\nopen({str(ran)!r}, 'w')"
    await cell.order(start_order(1, sys.executable, "-c", script))
    await await_until(ran.exists, "the program to have written")
    reading = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
    await finished(cell)
    os.close(reading)
    assert [event.done for event in steps_of(cell)] == [1]


async def test_a_hostile_script_disturbs_nobody(node: Options, cell: Cell, tmp_path: Path) -> None:
    """It floods its FIFO with all that is known to hurt; another task starts, reports and ends meanwhile."""
    enough = tmp_path / "enough"
    await cell.order(start_order(1, sys.executable, "-c", HOSTILE, str(enough)))
    await cell.until(external_events.TaskStarted)
    honest = "from penstock.sdk.progress import progress\nfor n in range(1, 31): progress(n, 30, 1 / n)"
    await cell.order(start_order(2, sys.executable, "-c", honest, gpus=(1,)))
    await finished(cell, "job-2.1.0")
    done = [event.done for event in steps_of(cell, "job-2.1.0")]
    assert (done[0], done[-1]) == (1, 30)
    assert done == sorted(set(done)), "on a busy machine there may be reports in between"
    assert len(cell.events(external_events.TaskExited)) == 1, "the hostile one goes on"
    enough.touch()
    await finished(cell, exit_code=4)
    reported = [event for event in cell.events() if getattr(event, "task_id", "") == TASK]
    assert len([event for event in reported if isinstance(event, external_events.StepsMeasured)]) <= 201
    assert len([event for event in reported if isinstance(event, external_events.StagesMeasured)]) <= 16
    assert len([event for event in reported if isinstance(event, external_events.TaskPhaseChanged)]) <= 1_000
    assert steps_of(cell)[-1].done == 1 << 50, "after all that, an honest line is read"


FORGED = (
    b'{"steps":{"done":7,"task_id":"job-9.1.0","token":9}}',
    b'{"steps":{"done":7,"node_id":"other"}}',
    b'{"steps":{"done":7},"task_id":"job-9.1.0"}',
    b'{"type":"penstock.task.exited.v1","node_id":"other","task_id":"job-9.1.0","token":9}',
    b'{"exited":{"exit_code":0}}',
    b'{"steps":{"done":7},"steps":{"done":8},"stages":{"iterations":1,"samples":[[1,1,0,0,0]]}}',
    b'{"steps":{"done":-7}}',
    b'{"steps":{"done":1e999}}',
    b'{"steps":{"done":7,"loss":NaN}}',
    b'{"steps":{"done":184467440737095516160}}',
    b'{"stages":{"iterations":1,"samples":[]}}',
    b'{"stages":{"iterations":1,"samples":[[1,1,0,0,0,"job-9"]]}}',
    b'{"steps":' * 400,
    b'{"steps":{"done":7}}' + b" " * 5_000,
    b"exited",
    b"TRAIN",
    b"train\x00",
    b"train job-9.1.0",
    b"\x1b[2Jtrain",
    b"\xff\xfetrain",
    "ｔrain".encode(),
    bytes(range(1, 10)) * 100,
)
"""Lines by which a task speaks for others, of what it may not, or not in our language."""


async def test_a_task_speaks_for_nobody_else(node: Options, cell: Cell) -> None:
    """Its script forges lines in another job's name: none becomes an event, and the honest line among them
    does."""
    script = "import os; fifo = open(os.environ['PENSTOCK_PHASE_FILE'], 'wb', 0)\n"
    script += f"for line in {FORGED!r} + (b'save',): fifo.write(line + b'\\n')"
    await cell.order(start_order(1, sys.executable, "-c", script))
    await finished(cell)
    joined, started, *spoken, _ = cell.events()
    assert [type(event).__name__ for event in (joined, started)] == ["NodeJoined", "TaskStarted"]
    (phase,) = spoken
    assert isinstance(phase, external_events.TaskPhaseChanged)
    assert (phase.node_id, phase.task_id, phase.phase) == (NODE, TASK, "save")


SLOW = """
import pathlib, time
from penstock.sdk.progress import progress
from penstock.sdk.stages import iteration, stage
go = pathlib.Path({go!r})
progress(10, 60)
while not go.exists():
    time.sleep(0.02)
for done in range(11, 61):
    iteration()
    with stage("gpu"):
        time.sleep(0.025)
    progress(done, 60)
print("trained", flush=True)
while go.exists():
    time.sleep(0.02)
"""


async def test_what_was_reported_while_the_reporter_was_down_is_read_by_the_next(
    options: Options, broker: MemoryBroker, cell: Cell, tmp_path: Path
) -> None:
    """An upgrade of the reporter takes as long as the rest of the training; the task's shim keeps the FIFO
    open."""
    go = tmp_path / "go"
    async with working(options, MemoryLog(broker, "before")):
        await cell.order(start_order(1, sys.executable, "-c", SLOW.format(go=str(go))))
        await cell.until(external_events.StepsMeasured)
    go.touch()
    await await_until(lambda: "trained" in printed(options, "job-1", TASK), "the end of its training")
    await cell.read(0)
    assert len(cell.events(external_events.StepsMeasured)) == 1
    async with working(options, MemoryLog(broker, "after")):
        await cell.until(external_events.StagesMeasured)
        go.unlink()
        await finished(cell)
    reported = steps_of(cell)
    assert reported[0].done == 10
    assert reported[-1].done == reported[-1].total == 60
    assert len({*cell.ids(external_events.StepsMeasured)}) == len(reported) >= 2
    (stages,) = stages_of(cell)
    assert [(sample.gpu, sample.cpu) for sample in stages.samples if sample.gpu] == [(1, 0)]
    numbers = [event.said for event in cell.events() if isinstance(event, COUNTED)]
    assert len(numbers) >= 5
    assert numbers == sorted({*numbers}), (
        "each report has a number above those before, also those of the first reporter"
    )


async def test_a_task_that_replaced_its_fifo_does_not_keep_the_next_reporter_from_starting(
    options: Options, broker: MemoryBroker, cell: Cell, tmp_path: Path
) -> None:
    """Where a task sees the node's folders, a script clears one that it took for its own; its exit is
    reported all the same."""
    options = replace(options, isolation=IsolationChoice.NONE)
    script = (
        "import os, sys, time; p = os.environ['PENSTOCK_PHASE_FILE']; os.unlink(p); open(p, "
        "'w').write('train')\n"
        "print('done', flush=True)\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.02)\nraise "
        "SystemExit(3)"
    )
    async with working(options, MemoryLog(broker, "before")):
        await cell.order(start_order(1, sys.executable, "-c", script, str(tmp_path / "go")))
        await cell.until(external_events.TaskStarted)
        await await_until(lambda: "done" in printed(options, "job-1", TASK), "a file instead of the FIFO")
    async with working(options, MemoryLog(broker, "after")):
        (tmp_path / "go").touch()
        await finished(cell, exit_code=3)
    assert not cell.events(external_events.TaskPhaseChanged)


async def test_a_log_that_fails_costs_no_progress(node: Options, cell: Cell, broker: MemoryBroker) -> None:
    """The events wait in the journal and come once, in order, before the exit."""
    await cell.until(external_events.NodeJoined)
    script = (
        "import time; from penstock.sdk.progress import progress; time.sleep(0.2)\n"
        "for n in (1, 50, 100): progress(n, 100)"
    )
    await cell.order(start_order(1, sys.executable, "-c", script))
    for after_write in (False, True, False):
        broker.fail_next_append(after_write=after_write)
    await finished(cell)
    reported: dict[str, Event] = {envelope.id: envelope.data for envelope in cell.envelopes}
    done = [event.done for event in reported.values() if isinstance(event, external_events.StepsMeasured)]
    assert done in ([1, 100], [1, 50, 100]), "on a busy machine there may be a report in between"
    assert [name for name in reported if "/steps/" in name] == [f"{NODE}/{TASK}/1/steps/{n}" for n in done]
    assert isinstance(list(reported.values())[-1], external_events.TaskExited)


@pytest.mark.parametrize("role", ["worker", "ps"])
async def test_what_a_script_reports_of_its_memory_is_in_the_exit(
    node: Options, cell: Cell, role: Literal["worker", "ps"]
) -> None:
    """Its traceback goes into a file of its own, so that its last lines name nothing; also of a parameter
    server, and of any rank."""
    script = (
        "import os, sys; sys.stderr = open(os.devnull, 'w')\n"
        "from penstock.sdk.out_of_memory import report, report_out_of_memory\n"
        "report_out_of_memory()\n"
        "error = type('OutOfMemoryError', (RuntimeError,), {'__module__': 'torch'})()\n"
    )
    ends = ("raise error", "report(MemoryError()); sys.exit(3)", "report(MemoryError())", "raise error")
    env = {"PYTHONPATH": str(ROOT / "libs")}
    first, *others = [
        start_order(number, sys.executable, "-c", script + end, gpus=(0,) if number == 1 else (), env=env)
        for number, end in enumerate(ends, 1)
    ]
    first = msgspec.structs.replace(first, place=msgspec.structs.replace(first.place, role=role, rank=3))
    await cell.order(first, *others)
    codes = (1, 3, 0, 1)
    exits = [await finished(cell, f"job-{number}.1.0", code) for number, code in enumerate(codes, 1)]
    found = [(exited.exhausted, exited.detail) for exited in exits]
    assert found == [
        ("gpu_memory", "the program reported torch.OutOfMemoryError"),
        ("host_memory", "the program reported MemoryError"),
        ("", ""),  # it succeeded
        ("", ""),  # it had no GPU
    ]


async def test_a_tasks_output_is_served_and_copied_to_the_archive(
    options: Options, broker: MemoryBroker, cell: Cell, tmp_path: Path
) -> None:
    """Its joining names where output is served; an ended task's is in the archive, with when it was written;
    a running one's follows after a restart."""
    key, place = tmp_path / "logs.key", tmp_path / "archive"
    key.touch(0o600)
    key.write_bytes(b"k" * 32)
    own = replace(options, log_key=key, log_archive=place.as_uri())
    ended, runs = log_name("job-1", "job-1.1.0"), log_name("job-2", "job-2.1.0")
    async with working(own, MemoryLog(broker)):
        joined = await cell.until(external_events.NodeJoined)
        await cell.order(
            start_order(1, "sh", "-c", "echo done"),
            start_order(2, "sh", "-c", "echo on; sleep 600", gpus=(1,)),
        )
        await cell.until(external_events.TaskExited, task_id="job-1.1.0")
        await await_until((place / ended).exists, "the copy")
        await await_until(lambda: printed(options, "job-2", "job-2.1.0") == "on\n", "its output")
        query = "job=job-2&task=job-2.1.0"
        headers = {"Authorization": key_in_file(key).authorization(NODE, query)}
        async with httpx.AsyncClient(headers=headers, timeout=None) as http:
            url = f"http://127.0.0.1:{joined.node.logs.port}/v1/logs"
            assert (await http.get(f"{url}?{query}")).content == framed(Output(3, b"on\n"))
            assert (await http.get(f"{url}?job=job-1&task=job-1.1.0")).status_code == 403, (
                "of another question"
            )
    assert (place / ended).read_text() == "done\n"
    assert (place / f"{ended}.times").stat().st_size == 16
    assert not (place / runs).exists()
    async with working(own, MemoryLog(broker)):
        await cell.order(stop_order(3, "job-2.1.0", grace_ms=0))
        await cell.until(external_events.TaskExited, task_id="job-2.1.0")
        await await_until((place / runs).exists, "the copy")
        await await_until(lambda: not list((own.state_dir / "archive").iterdir()), "no copy left to make")


async def test_nothing_is_copied_while_an_earlier_reporter_may_start_a_task(
    options: Options, broker: MemoryBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was killed while its launcher starts a task, of which nothing is written down yet: that log is not
    complete."""
    place, name = tmp_path / "archive", log_name("job-1", TASK)
    options.state_dir.mkdir(parents=True)
    lock = await lock_state(options.state_dir)
    archiver.Archiver(LogArchive(place.as_uri()), options.state_dir / "archive", options.log_dir).starting(
        "job-1", TASK, 1
    )
    (options.log_dir / name).parent.mkdir(parents=True)
    (options.log_dir / name).write_text("first words\n")
    flock, tries = fcntl.flock, []

    def counted(descriptor: int, operation: int) -> None:
        tries.append(descriptor)
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", counted)
    coming = working(replace(options, log_archive=place.as_uri()), MemoryLog(broker))
    entering = asyncio.ensure_future(coming.__aenter__())
    await await_until(lambda: len(tries) > 30, "tries")
    assert not place.exists()
    os.close(lock)
    await entering
    await await_until((place / name).exists, "the copy")
    await coming.__aexit__(None, None, None)


async def test_a_store_that_refuses_a_node_changes_no_outcome(
    options: Options,
    broker: MemoryBroker,
    cell: Cell,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The secret of the S3 store is wrong: the task ends as it ends, and the copy is made once the store
    admits the node. The task does not see the secret."""
    monkeypatch.setattr(archiver, "FIRST_PAUSE_S", 0.05)
    with S3Server("id", "secret", "bucket").serving() as store:
        for name, value in store.environment("wrong").items():
            monkeypatch.setenv(name, value)
        async with working(replace(options, log_archive="s3://bucket/cell"), MemoryLog(broker)):
            await cell.order(start_order(1, "sh", "-c", "env; exit 3"))
            exited = await cell.until(external_events.TaskExited)
            assert (exited.cause, exited.exit_code) == ("exited", 3)
            await await_until(lambda: "check its credentials" in caplog.text, "a line in the log")
            store.keys["id"] = "wrong"
            await await_until(
                lambda: not list((options.state_dir / "archive").iterdir()), "no copy left to make"
            )
        stored = store.objects["bucket"][f"cell/{log_name('job-1', 'job-1.1.0')}"].decode()
        assert "PENSTOCK_JOB_ID=job-1" in stored
        assert "AWS_" not in stored
