"""The node-reporter with real processes, in this process, over a log in memory."""

import asyncio
import json
import os
import re
import signal
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from penstock.log.port import Message, Partition
from penstock.model.inputs import dead_letters, external_events
from penstock.model.schema.topics import Topic, node_partition
from penstock.model.wire.envelope import from_wire
from penstock.runtime.files.task_logs import Folder, TaskLog, Wanted, log_path
from penstock_services.node_reporter.options import Options
from penstock_services.node_reporter.shell.journal import Journal
from penstock_services.node_reporter.shell.process.spawner import Spawner
from penstock_services.node_reporter.shell.task_setup.secrets import MAX_SECRET_BYTES
from tests.support.log.memory_log import MemoryBroker, MemoryLog
from tests.support.node_reporter import node_fixtures
from tests.support.node_reporter.node_cell import (
    NODE,
    TOPICS,
    Cell,
    ours,
    printed,
    start_order,
    stop_order,
    working,
)
from tests.support.waiting import await_until

options, broker = node_fixtures.options, node_fixtures.broker
cell, node = node_fixtures.cell, node_fixtures.node
in_background = node_fixtures.in_background
nothing_left = node_fixtures.nothing_left


async def test_a_task_starts_runs_and_ends_with_its_code(node: Options, cell: Cell) -> None:
    """The ordinary life: joined, ordered, started, exited; its output is in its log."""
    joined = await cell.until(external_events.NodeJoined)
    assert [gpu.index for gpu in joined.node.gpus] == [0, 1]
    await cell.order(start_order(7, "sh", "-c", "echo hello; exit 3"))
    started = await cell.until(external_events.TaskStarted)
    exited = await cell.until(external_events.TaskExited)
    assert started.token == exited.token == 7
    assert (exited.cause, exited.exit_code, exited.signal) == ("exited", 3, None)
    assert exited.started_ms == started.started_ms <= exited.exited_ms
    path = log_path(node.log_dir, "job-7", "job-7.1.0")
    assert path.read_text() == "hello\n"
    assert path.stat().st_mode & 0o777 == 0o600


async def test_a_missing_program_fails_to_start_and_names_the_remedy(node: Options, cell: Cell) -> None:
    """A typo in the command, or a program that this node lacks."""
    await cell.order(
        start_order(1, "no-such-program"), start_order(2, "true", gpus=(1,), workdir="/no/such/folder")
    )
    first = await cell.until(external_events.TaskExited, task_id="job-1.1.0")
    second = await cell.until(external_events.TaskExited, task_id="job-2.1.0")
    assert first.cause == second.cause == "start_failed"
    assert "no-such-program" in first.detail
    assert "/no/such/folder" in second.detail
    assert not cell.events(external_events.TaskStarted)


async def test_secrets_too_large_for_a_start_fail_that_start_alone(
    options: Options, broker: MemoryBroker, cell: Cell
) -> None:
    """A user names a secret in forty variables, each value near its own limit."""
    secrets = options.state_dir.parent / "secrets"
    large = secrets / "vision" / "large"
    large.parent.mkdir(parents=True)
    large.write_bytes(b"x" * MAX_SECRET_BYTES)
    large.chmod(0o600)
    async with working(replace(options, secrets_dir=secrets), MemoryLog(broker, "node-reporter")):
        for token, count in ((1, 27), (2, 40)):
            variables = {f"KEY_{number}": "large" for number in range(count)}
            await cell.order(start_order(token, secrets=variables, owner="vision"))
            exited = await cell.until(external_events.TaskExited, task_id=f"job-{token}.1.0")
            assert exited.cause == "start_failed"
            assert "have the program read files" in exited.detail
            assert "xxx" not in exited.detail
        variables = {f"KEY_{number}": "large" for number in range(15)}
        await cell.order(start_order(3, secrets=variables, owner="vision"))
        assert (await cell.until(external_events.TaskExited, task_id="job-3.1.0")).exit_code == 0
        await cell.order(start_order(4, secrets={"KEY": "large"}, owner="speech"))
        refused = await cell.until(external_events.TaskExited, task_id="job-4.1.0")
        assert refused.cause == "start_failed"
        assert "no secret 'large' for speech" in refused.detail
        assert len(cell.events(external_events.NodeJoined)) == 1


async def test_a_task_that_ignores_sigterm_is_killed_after_its_grace(node: Options, cell: Cell) -> None:
    """A training script swallows SIGTERM; the GPU is free only when it is proven dead."""
    script = (
        "import signal,time; signal.signal(15, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
    )
    await cell.order(start_order(1, sys.executable, "-c", script))
    await cell.until(external_events.TaskStarted)
    await await_until(lambda: "deaf" in printed(node, "job-1", "job-1.1.0"), "the script to be deaf")
    before = time.monotonic()  # clock: a slow machine makes the grace longer, never shorter
    await cell.order(stop_order(2, "job-1.1.0", grace_ms=400))
    exited = await cell.until(external_events.TaskExited)
    assert time.monotonic() - before > 0.39  # clock: as at the begin
    assert (exited.cause, exited.signal) == ("stopped", 9)


async def test_grandchildren_die_before_the_exit_is_reported(node: Options, cell: Cell) -> None:
    """Data loaders and daemons outlive the script, one even in a session of its own: the GPU is not free
    yet."""
    seen = node.state_dir.parent / "seen"
    waits = f"until [ -e {seen} ]; do sleep 0.05; done"
    await cell.order(
        start_order(1, "sh", "-c", f"sleep 61 & setsid sleep 62 & (setsid sleep 63 &) ; {waits}; exit 4")
    )
    await cell.until(external_events.TaskStarted)
    await await_until(lambda: len(sleeps(node)) == 3, "three descendants")
    seen.touch()
    exited = await cell.until(external_events.TaskExited)
    assert exited.exit_code == 4
    assert sleeps(node) == []


def sleeps(options: Options) -> list[psutil.Process]:
    """Those that a task has left; one that ends meanwhile is none."""
    found = []
    for process in ours(options, "sleep"):
        with suppress(psutil.NoSuchProcess):
            if process.cmdline()[1:2] > ["6"]:
                found.append(process)
    return found


async def test_a_predecessor_alive_holds_its_successor_back(node: Options, cell: Cell) -> None:
    """The judge is the processes' own diary: never two lines of begin without an end between."""
    diary = node.state_dir.parent / "diary"
    script = f"echo begin >> {diary}; sleep 0.3; echo end >> {diary}"
    await cell.order(*[start_order(token, "sh", "-c", script) for token in (1, 2)])
    await cell.until(external_events.TaskExited, task_id="job-2.1.0")
    assert diary.read_text().split() == ["begin", "end", "begin", "end"]


async def test_stale_and_zombie_orders_are_refused(node: Options, cell: Cell) -> None:
    """A suspended placer's old order; and a start that comes after its job was cancelled."""
    await cell.order(start_order(9))
    await cell.until(external_events.TaskExited)
    await cell.order(start_order(8), stop_order(20, "job-15.1.0"), start_order(15, gpus=(1,)))
    first = await cell.until(external_events.OrderRefused, task_id="job-8.1.0")
    assert (first.reason, first.highest_token) == ("stale_token", 9)
    second = await cell.until(external_events.OrderRefused, task_id="job-15.1.0")
    assert (second.reason, second.highest_token) == ("stale_token", 20)
    assert len(cell.events(external_events.TaskStarted)) == 1


async def test_an_idle_node_sends_nothing_and_does_nothing(
    node: Options, cell: Cell, broker: MemoryBroker
) -> None:
    """Heartbeat-free: after a task has come and gone, three seconds pass without a message or a wake-up."""
    await cell.order(start_order(1))
    await cell.until(external_events.TaskExited)

    def records() -> int:
        return sum(len(broker.records(Partition(t, 0))) for t in (Topic.NODES, Topic.DEAD_LETTERS)) + sum(
            len(broker.records(Partition(Topic.TELEMETRY, index))) for index in range(TOPICS[Topic.TELEMETRY])
        )

    await await_until((node.state_dir / "spare").exists, "a folder for the next task")
    await at_rest(node)
    helpers = [process.pid for process in ours(node)]
    before = (records(), [wake_ups(pid) for pid in helpers], psutil.Process().cpu_times())
    await asyncio.sleep(3)  # clock: in which it would wake; its processor time does not grow with the load
    after = (records(), [wake_ups(pid) for pid in helpers], psutil.Process().cpu_times())
    assert before[:2] == after[:2]
    assert after[2].user + after[2].system - before[2].user - before[2].system < 0.1


async def at_rest(options: Options) -> None:
    """Returns once the launcher and the shim that it has ready have long waited for something."""
    seen: list[list[tuple[int, int]]] = [[]]

    async def same_as_before() -> bool:
        await asyncio.sleep(0.3)  # clock: whoever would run, and has no processor, is not asleep
        found = ours(options)
        asleep = all(process.status() == psutil.STATUS_SLEEPING for process in found)
        seen.append([(process.pid, wake_ups(process.pid)) for process in found])
        return asleep and seen[-1] == seen[-2]

    await await_until(same_as_before, lambda: f"rest: {seen[-2:]}")


def wake_ups(pid: int) -> int:
    """How often a process gave up the processor of its own accord."""
    found = re.search(r"^voluntary_ctxt_switches:\s*(\d+)", Path(f"/proc/{pid}/status").read_text(), re.M)
    assert found is not None
    return int(found[1])


async def test_the_task_sees_its_place_and_no_secret(
    node: Options, cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Affinity (virtual cores are taken modulo the real ones), GPU ids, no ranks of one task alone; an own
    session; default signals."""
    script = (
        "import json,os,signal; print(json.dumps(dict(env=dict(os.environ), "
        "cores=sorted(os.sched_getaffinity(0)), "
        "session=os.getsid(0)==os.getpid(), term=signal.getsignal(15)==signal.SIG_DFL, cwd=os.getcwd())))"
    )
    order = start_order(
        3, sys.executable, "-c", script, gpus=(0, 1), cores=(2,), env={"LR": "0.1"}, host_memory_mib=512
    )
    await cell.order(order)
    await cell.until(external_events.TaskExited)
    seen = json.loads(log_path(node.log_dir, "job-3", "job-3.1.0").read_text())
    usable = sorted(os.sched_getaffinity(0))
    assert seen["cores"] == [usable[2 % len(usable)]]
    assert seen["session"]
    assert seen["term"]
    assert seen["cwd"].startswith(str(node.state_dir))
    expected = {
        "CUDA_VISIBLE_DEVICES": "0,1",
        "PENSTOCK_TOKEN": "3",
        "PET_NPROC_PER_NODE": "2",
        "LR": "0.1",
    }
    assert {name: seen["env"][name] for name in expected} == expected
    assert not {"PENSTOCK_DSN", "PENSTOCK_LOG", "RANK"} & seen["env"].keys()


@pytest.mark.usefixtures("in_background")
async def test_a_task_inherits_no_state_that_breaks_programs(node: Options, cell: Cell) -> None:
    """With SIGPIPE ignored `yes | head` never ends, a terminal or an open stdin makes a script wait, odd
    variables lose lines. All bytes of its output are kept; a job without GPUs sees none, and Python does
    not hold its output back."""
    given = {
        "LINES2": "-----BEGIN-----\nb\n",
        "QUOTES": "a\"b'c`d",
        "TAIL": "x\\\\",
        "NONE": "",
        "DOLLAR": "$HOME %s {{y}} é",
    }
    script = (
        "sed -n 's/^Sig\\(Blk\\|Ign\\):.0*$/&/p' /proc/self/status | wc -l; umask; readlink "
        "/proc/self/fd/0; echo $(ls /proc/self/fd); "
        "(: </dev/tty) 2>/dev/null || echo no terminal; yes | head -n 1; "
        'echo "[$CUDA_VISIBLE_DEVICES] $PYTHONUNBUFFERED"; printf \'%s|\' "$LINES2" "$QUOTES" "$TAIL" '
        '"$NONE" "$DOLLAR"; '
        "printf '\\200\\377 raw\\000\\033[2J caf\\351'"
    )
    await cell.order(start_order(4, "sh", "-c", script, gpus=(), env=given))
    await cell.until(external_events.TaskExited)
    found = log_path(node.log_dir, "job-4", "job-4.1.0").read_bytes()
    state, values = found.split(b"[] 1\n")
    assert state.decode() == "2\n0022\n/dev/null\n0 1 2 3\nno terminal\ny\n"
    assert (
        values == "".join(f"{text}|" for text in given.values()).encode() + b"\x80\xff raw\x00\x1b[2J caf\xe9"
    )


async def test_what_the_last_lines_report_is_in_the_exit(node: Options, cell: Cell) -> None:
    """C++ aborts; PyTorch raises. A task without a GPU has no GPU's memory to run out of."""
    bad_alloc = "echo \"terminate called after throwing an instance of 'std::bad_alloc'\" >&2; kill -ABRT $$"
    cuda = "echo 'torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB' >&2; exit 1"
    await cell.order(start_order(1, "sh", "-c", bad_alloc))
    await cell.order(start_order(2, "sh", "-c", cuda, gpus=(1,)))
    await cell.order(start_order(3, "sh", "-c", cuda, gpus=()))
    found = [
        await cell.until(external_events.TaskExited, task_id=f"job-{number}.1.0") for number in (1, 2, 3)
    ]
    assert [(exited.cause, exited.exhausted) for exited in found] == [
        ("exited", "host_memory"),
        ("exited", "gpu_memory"),
        ("exited", ""),
    ]
    assert found[0].signal == signal.SIGABRT


async def test_a_killed_guardian_takes_its_task_with_it(node: Options, cell: Cell) -> None:
    """The OOM killer chose the shim: the program dies too, and what it started, before the exit is
    reported."""
    await cell.order(start_order(1, "sh", "-c", "setsid sleep 64 & sleep 65"))
    started = await cell.until(external_events.TaskStarted)
    await await_until(lambda: len(sleeps(node)) == 2, "two descendants")
    psutil.Process(started.pid).parent().kill()  # type: ignore[union-attr]
    exited = await cell.until(external_events.TaskExited)
    assert (exited.cause, exited.signal) == ("lost", signal.SIGKILL)
    assert sleeps(node) == []


async def test_a_killed_launcher_costs_no_task(node: Options, cell: Cell) -> None:
    """The reporter starts over from its journal: the task runs on, and the next one starts."""
    go = node.state_dir.parent / "go"
    await cell.order(start_order(1, "sh", "-c", f"until [ -e {go} ]; do sleep 0.05; done; exit 6"))
    await cell.until(external_events.TaskStarted)
    (launcher,) = [p for p in ours(node, "penstock-launch") if p.ppid() == os.getpid()]
    launcher.kill()
    joined = await cell.until(external_events.NodeJoined, count=2)
    assert [(task.task_id, task.token) for task in joined.tasks] == [("job-1.1.0", 1)]
    await cell.order(start_order(2, gpus=(1,)))
    await cell.until(external_events.TaskExited, task_id="job-2.1.0")
    go.touch()
    assert (await cell.until(external_events.TaskExited, task_id="job-1.1.0")).exit_code == 6


async def test_a_long_log_keeps_its_head_and_its_end(
    options: Options, broker: MemoryBroker, cell: Cell
) -> None:
    """A script prints in a loop, then draws a progress bar and waits: the disk is safe, and what it prints
    last is seen while it runs."""
    go, path = options.state_dir.parent / "go", log_path(options.log_dir, "job-1", "job-1.1.0")
    script = (
        "echo first; head -c 3000000 /dev/zero | tr '\\0' x; echo; printf '\\r1 %%\\r2 %%'; "
        f"until [ -e {go} ]; do sleep 0.05; done; printf '\\r3 %%\\n'; echo last"
    )

    def text() -> str:
        with TaskLog(Folder(path), Wanted()) as log:
            return b"".join(piece.data.removeprefix(b"\r") for piece in log.present()).decode()

    async with working(replace(options, log_limit_mib=1), MemoryLog(broker, "n")):
        await cell.order(start_order(1, "sh", "-c", script))
        await await_until(lambda: path.exists() and text().endswith("x\n2 %"), "the bar")
        go.touch()
        await cell.until(external_events.TaskExited)
    assert text().startswith("first\n")
    assert " bytes left out]\n" in text()
    assert text().endswith("x\n3 %\nlast\n")
    assert sum(one.stat().st_size for one in path.parent.iterdir()) < (1 << 20) + (1 << 17)


async def test_malformed_orders_are_dead_lettered_and_the_next_one_is_obeyed(
    node: Options, cell: Cell, broker: MemoryBroker
) -> None:
    partition = Partition(Topic.ORDERS, node_partition(NODE))
    await cell.log.append([Message(partition, b"{", (("ce_id", b"\xff"),)), Message(partition, b"")])
    await cell.order(start_order(1))
    await cell.until(external_events.TaskExited)
    letters = [from_wire(r.headers, r.value).data for r in broker.records(Partition(Topic.DEAD_LETTERS, 0))]
    assert [letter.reason for letter in letters if isinstance(letter, dead_letters.DeadLettered)] == [
        "undecodable"
    ] * 2


async def test_orders_of_other_nodes_are_not_ours(node: Options, cell: Cell) -> None:
    """Several nodes share a partition."""
    other = msgspec.structs.replace(start_order(5), node_id="n2")
    await cell.order(other, start_order(1))
    await cell.until(external_events.TaskExited, task_id="job-1.1.0")
    assert {
        event.task_id for event in cell.events(external_events.TaskStarted, external_events.OrderRefused)
    } == {"job-1.1.0"}  # type: ignore[attr-defined]


async def test_a_log_that_fails_is_sat_out(node: Options, cell: Cell, broker: MemoryBroker) -> None:
    """Appends fail before and after the write: the events come under the same ids, none is lost."""
    await cell.until(external_events.NodeJoined)
    await cell.order(start_order(1, "sh", "-c", "sleep 0.2; exit 2"))
    for after_write in (False, True, False):
        broker.fail_next_append(after_write=after_write)
    exited = await cell.until(external_events.TaskExited)
    assert exited.exit_code == 2
    assert len(cell.ids(external_events.TaskStarted)) == len(cell.ids(external_events.TaskExited)) == 1


async def test_a_drained_node_stops_its_tasks_and_leaves(
    options: Options, broker: MemoryBroker, cell: Cell
) -> None:
    """`--drain`: the machine is to be taken away; every exit is proven before the node reports that it
    left."""
    async with working(replace(options, drain=True, drain_grace_ms=300), MemoryLog(broker, "n")) as stop:
        await cell.order(start_order(1, "sleep", "600"))
        await cell.until(external_events.TaskStarted)
        stop.set()
        left = await cell.until(external_events.NodeLeft)
    assert left.proof == "shutdown"
    assert isinstance(cell.events()[-2], external_events.TaskExited)
    # the shim that was kept ready ends as it sees that the reporter is gone
    await await_until(lambda: ours(options) == [], "the end of the shim")


async def test_a_script_reports_its_phases(node: Options, cell: Cell) -> None:
    """The sdk writes a line; the node turns each change into an event, in order, before the exit."""
    script = (
        "from penstock.sdk.phases import phase\nfor name in ('launch', 'train', 'train', 'save'): phase(name)"
    )
    await cell.order(start_order(1, sys.executable, "-c", script))
    await cell.until(external_events.TaskExited)
    types = [type(event).__name__ for event in cell.events()[1:]]
    assert types == ["TaskStarted", *["TaskPhaseChanged"] * 3, "TaskExited"]
    phases = [
        event.phase
        for event in cell.events(external_events.TaskPhaseChanged)
        if isinstance(event, external_events.TaskPhaseChanged)
    ]
    assert phases == ["launch", "train", "save"]


async def test_the_token_is_durable_before_the_spawn(
    options: Options, broker: MemoryBroker, cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LAW 4 as an order of calls: a durable write of the task, then the launcher is asked, never the other
    way."""
    calls: list[str] = []
    write, spawn = Journal.write, Spawner.spawn

    def spy_write(self: Journal, changes: Any, events: Any, numbers: Any, *, durable: bool) -> None:
        write(self, changes, events, numbers, durable=durable)
        calls.extend(f"{change.task.status} durable={durable}" for change in changes)

    def spy_spawn(self: Spawner, *given: Any, gated: bool) -> None:
        calls.append("spawn")
        spawn(self, *given, gated=gated)

    monkeypatch.setattr(Journal, "write", spy_write)
    monkeypatch.setattr(Spawner, "spawn", spy_spawn)
    async with working(options, MemoryLog(broker, "n")):
        await cell.order(start_order(1))
        await cell.until(external_events.TaskExited)
    assert calls == ["starting durable=True", "spawn", "running durable=False", "ended durable=False"]


@pytest.mark.parametrize(("expired", "joinings"), [(0, 1), (5, 2)], ids=["rebuilt", "retention"])
async def test_a_log_that_was_made_anew_is_read_from_its_end(
    options: Options, broker: MemoryBroker, expired: int, joinings: int
) -> None:
    """Its journal is behind a rebuilt log, or before the oldest order that is left: it obeys what comes."""
    async with working(options, MemoryLog(broker, "n")):
        cell = Cell(MemoryLog(broker, "placer"))
        await cell.order(start_order(1))
        await cell.until(external_events.TaskExited)
    anew = MemoryBroker()
    anew.create(TOPICS)
    cell = Cell(MemoryLog(anew, "placer"))
    await cell.order(*(stop_order(2, "unknown") for _ in range(expired)))
    await cell.log.delete_before({Partition(Topic.ORDERS, node_partition(NODE)): expired})
    async with working(options, MemoryLog(anew, "n")):
        await cell.until(external_events.NodeJoined, count=joinings)
        await cell.order(start_order(3))
        assert (await cell.until(external_events.TaskExited)).exit_code == 0


async def test_an_unwritable_log_folder_costs_the_log_and_not_the_task(
    options: Options, broker: MemoryBroker, cell: Cell, tmp_path: Path
) -> None:
    (tmp_path / "logs").write_text("a file where the folder should be")
    async with working(options, MemoryLog(broker, "n")):
        await cell.order(start_order(1, "sh", "-c", "echo unheard; exit 2"))
        assert (await cell.until(external_events.TaskExited)).exit_code == 2
