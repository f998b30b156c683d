"""Jobs that mean harm, on a real node-reporter with real processes: each is contained, or the node reports
that it cannot be.

Every attack is bounded: in processes, bytes and seconds, so that a test that fails harms no machine. The
reporter is root here, its jobs are root with few capabilities or `nobody`; where tests are not root, they are
the tests' own user.
"""

import ctypes
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from penstock.errors import ConfigurationError
from penstock.model.inputs import external_events
from penstock.runtime.files.task_logs import log_path
from penstock_services.node_reporter.options import IsolationChoice, Options
from penstock_services.node_reporter.shell.isolation.confinement import PROBE, Confinement
from penstock_services.node_reporter.shell.limits.cgroups import Cgroups
from penstock_services.node_reporter.shell.linux import LinuxHost
from penstock_services.node_reporter.shell.ports import Started
from penstock_services.node_reporter.shell.process.launcher import IMPORTABLE
from penstock_services.node_reporter.shell.process.records import read_record
from penstock_services.node_reporter.shell.process.spawner import ISOLATED_PYTHON
from tests.faults.processes.hostile_jobs import ATTACKS, CANARY_HALVES, LONG_S, PRELUDE, SLEEP_S
from tests.support.log.memory_log import MemoryBroker, MemoryLog
from tests.support.node_reporter import node_fixtures
from tests.support.node_reporter.node_cell import NODE, Cell, node_options, start_order, stop_order, working
from tests.support.waiting import await_until

PYTHON = "/usr/bin/python3"  # which every user can run
ROOT = os.geteuid() == 0
OPEN_ON_SUCH_A_NODE = {
    "exit record beside its folder",
    "exit record by its path",
    "another task's folder",
    "the reporter's files",
    "processes of others",
    "SIGKILL to a bystander",
    "its FIFO replaced",
}
"""Attacks that succeed where neither namespaces nor another user are to be had: the judge sees them."""


@pytest.fixture
def options(folder: Path) -> Options:
    return node_options(folder, log_limit_mib=1)


broker, cell, node = node_fixtures.broker, node_fixtures.cell, node_fixtures.node


def escaped() -> list[psutil.Process]:
    """Living processes that the attacks left on the machine, known by the odd length of their sleep."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.cmdline() == ["sleep", SLEEP_S] and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def existing(paths: Sequence[str]) -> list[str]:
    return [path for path in paths if Path(path).exists()]


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """The machine stays clean even when a test fails."""
    yield
    for process in escaped():
        with suppress(psutil.NoSuchProcess):
            process.kill()


@pytest.fixture
def bystander() -> Iterator[int]:
    """A process beside the reporter, as the reporter's own parents are: a credential in its environment."""
    with subprocess.Popen(["sleep", "infinity"], env={"SECRET": "".join(CANARY_HALVES)}) as process:
        yield process.pid
        assert process.poll() is None, "a job killed a process that is not its own"
        process.kill()


@pytest.fixture(scope="module", autouse=True)
def credential_in_a_keyring() -> None:
    """As a login session leaves one to the reporter that is started in it."""
    call, planted = ctypes.CDLL(None).syscall, "".join(CANARY_HALVES).encode()
    call(250, 1, None)  # a session keyring of this process' own
    call(248, b"user", b"planted", planted, len(planted), -3)


def outside(folder: Path, stack: ExitStack) -> Path:
    """What lies beside the reporter's folders: a setuid program, and a disk of 4 MiB where the tests may
    mount one."""
    found = folder / "outside"
    (found / "disk").mkdir(parents=True)
    if ROOT:
        shutil.copy("/usr/bin/id", found / "id")
        (found / "id").chmod(0o4755)
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=4m,mode=777", "none", found / "disk"], check=False
        )
        if mounted.returncode == 0:
            stack.callback(subprocess.run, ["umount", found / "disk"], check=True)
    return found


async def attacked(
    options: Options, broker: MemoryBroker, cell: Cell, folder: Path, bystander: int
) -> dict[str, str]:
    """Runs every attack on one node, all at once; what each of them got, and what the judge saw from
    outside."""
    found: dict[str, str] = {}
    with ExitStack() as stack:
        place = outside(folder, stack)
        names = dict(enumerate(ATTACKS, start=1))
        prelude = PRELUDE.format(
            state=str(options.state_dir),
            bystander=bystander,
            outside=str(place),
            sleep=SLEEP_S,
            canary=CANARY_HALVES,
        )
        async with working(options, MemoryLog(broker, "node-reporter")):
            secret = options.state_dir / "secret"
            secret.touch(0o600)
            secret.write_text("".join(CANARY_HALVES))
            for token, name in names.items():
                workdir = str(place / "disk") if name == "its small disk full" else None
                script = prelude + ATTACKS[name]
                order = start_order(
                    token, PYTHON, "-c", script, gpus=(), host_memory_mib=256, workdir=workdir
                )
                await cell.order(order)
            for token, name in names.items():
                task_id = f"job-{token}.1.0"
                log = log_path(options.log_dir, f"job-{token}", task_id)
                if name == "SIGTERM ignored":
                    await cell.until(external_events.TaskStarted, task_id=task_id)
                    await await_until(lambda log=log: "deaf" in log.read_text(), f"the output of {name}")
                    await cell.order(stop_order(token + 100, task_id, grace_ms=100))
                exited = await cell.until(external_events.TaskExited, task_id=task_id)
                ended = (exited.cause, exited.exit_code, exited.signal)
                if ended != (("stopped", None, 9) if name == "SIGTERM ignored" else ("exited", 3, None)):
                    found[name] = f"ended as {exited}: {log.read_text()[-600:]}"
                text = log.read_text(errors="replace")
                if "GOT" in text:
                    found[name] = text.strip()[-600:]
                if len(text) > 2 << 20:
                    found[name] = f"{len(text)} characters of log"
            if escaped():
                found["to outlive the task"] = str([process.pid for process in escaped()])
            await cell.order(start_order(99, "true"))  # the node still works
            assert (await cell.until(external_events.TaskExited, task_id="job-99.1.0")).exit_code == 0
    return found


@pytest.mark.parametrize("user", [None, "nobody"] if ROOT else [None])
async def test_every_attack_is_contained(
    user: str | None, options: Options, broker: MemoryBroker, cell: Cell, folder: Path, bystander: int
) -> None:
    """What the corpus tries as root (with few capabilities) and as another user gets it nothing."""
    assert len(ATTACKS) >= 25
    options = replace(options, task_user=user)
    host = LinuxHost(options)
    if host.spec.isolation is None or not host.spec.isolation.files:
        pytest.skip(f"this machine allows no namespaces and mounts: {host.spec.isolation}")
    found = await attacked(options, broker, cell, folder, bystander)
    if host.spec.isolation.devices == "hint" and user is None:
        found.pop("raw disks", None)  # named by the node as not enforced
    if host.spec.isolation.cores == "affinity":
        found.pop("more cores", None)
    assert found == {}


async def test_where_nothing_is_enforced_the_node_says_so_and_the_judge_sees_it(
    options: Options, broker: MemoryBroker, cell: Cell, folder: Path, bystander: int
) -> None:
    """A machine that gives neither namespaces nor cgroups: attacks get through, and no GPU of the node is
    shared."""
    options = replace(options, isolation=IsolationChoice.NONE)
    found = await attacked(options, broker, cell, folder, bystander)
    assert found.keys() >= OPEN_ON_SUCH_A_NODE
    joined = (await cell.until(external_events.NodeJoined)).node
    assert (joined.isolation.exits, joined.isolation.files, joined.shares_gpus) == ("none", False, False)


@pytest.mark.skipif(not ROOT, reason="only root can run jobs as another user")
async def test_another_user_alone_protects_records_and_credentials(
    options: Options, broker: MemoryBroker, cell: Cell, folder: Path, bystander: int
) -> None:
    """Without namespaces, with --task-user: files and environments of the reporter are another user's."""
    options = replace(options, isolation=IsolationChoice.NONE, task_user="nobody")
    found = await attacked(options, broker, cell, folder, bystander)
    assert found.keys() <= {"another task's folder", "processes of others", "to outlive the task"}, found


def attack(script: str) -> tuple[str, ...]:
    return (
        PYTHON,
        "-c",
        PRELUDE.format(state="/", bystander=1, outside="/", sleep=SLEEP_S, canary=CANARY_HALVES) + script,
    )


async def one_escaped() -> None:
    await await_until(lambda: len(escaped()) == 1, "a process that has escaped")


@pytest.mark.parametrize("isolation", [IsolationChoice.PID_NAMESPACE, IsolationChoice.CGROUP])
async def test_what_a_job_left_behind_is_dead_before_its_killed_shim_is_reported(
    isolation: IsolationChoice, options: Options, broker: MemoryBroker, cell: Cell
) -> None:
    """A job escapes with a double fork, a session of its own and an empty environment; then the OOM killer
    picks its shim. The node reports the GPU as free; a process that still holds it there would be a second
    user."""
    options = replace(options, isolation=isolation)
    try:
        LinuxHost(options)
    except ConfigurationError as error:
        pytest.skip(str(error))
    async with working(options, MemoryLog(broker, "node-reporter")):
        await cell.order(start_order(1, *attack(f"escape(); time.sleep({LONG_S})")))
        await cell.until(external_events.TaskStarted)
        await one_escaped()
        started = read_record(options.state_dir / "tasks/job-1.1.0@1/started.json", Started)
        assert started is not None
        os.kill(started.shim, signal.SIGKILL)
        exited = await cell.until(external_events.TaskExited)
        assert escaped() == []
        assert existing(started.groups) == [], "cgroups without a task"
    assert (exited.cause, exited.exit_code) == ("lost", None)


async def test_a_cgroup_proves_an_end_where_there_is_no_namespace(
    options: Options, broker: MemoryBroker, cell: Cell
) -> None:
    """The job ends by itself; what hid is in its cgroup."""
    if Cgroups(NODE, None).unified is None:
        pytest.skip("this machine lets no process make a cgroup v2")
    async with working(
        replace(options, isolation=IsolationChoice.CGROUP), MemoryLog(broker, "node-reporter")
    ):
        await cell.order(start_order(1, *attack("escape(); sys.exit(5)")))
        exited = await cell.until(external_events.TaskExited)
        assert escaped() == []
    assert (exited.cause, exited.exit_code) == ("exited", 5)
    joined = (await cell.until(external_events.NodeJoined)).node
    assert (joined.isolation.exits, joined.shares_gpus) == ("cgroup", True)


async def test_the_next_reporter_adopts_a_task_in_its_namespace(
    options: Options, broker: MemoryBroker, cell: Cell, folder: Path
) -> None:
    """An upgrade while a job runs: the next reporter finds its shim, and its end is proven as before."""
    end = folder / "end"
    async with working(options, MemoryLog(broker, "before")):
        script = f"escape()\nwhile not os.path.exists({str(end)!r}): time.sleep(0.05)\nsys.exit(6)"
        await cell.order(start_order(1, *attack(script)))
        await cell.until(external_events.TaskStarted)
        await one_escaped()
    async with working(options, MemoryLog(broker, "after")):
        joined = await cell.until(external_events.NodeJoined, count=2)
        assert [task.task_id for task in joined.tasks] == ["job-1.1.0"]
        end.touch()
        assert (await cell.until(external_events.TaskExited)).exit_code == 6
        assert escaped() == []


@pytest.mark.skipif(not ROOT, reason="it becomes another user")
def test_a_reporter_that_is_not_root_confines_tasks_in_a_user_namespace() -> None:
    """The trial that it makes at its start, as `nobody`; who may read the interpreter of these tests."""
    become = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    become += ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
    answer = subprocess.run(
        [*become, *ISOLATED_PYTHON, IMPORTABLE + PROBE, "null"], check=True, stdout=subprocess.PIPE, cwd="/"
    )
    found = json.loads(answer.stdout)
    if found["plan"][0] == "none" and all("not permitted" in error for error in found["errors"]):
        pytest.skip(f"this machine allows no user namespaces: {found['errors']}")
    plan = Confinement(*found["plan"])
    assert (plan.exits, plan.user_namespace, plan.mounts) == ("pid_namespace", True, True)


@pytest.mark.skipif(not ROOT, reason="it is about root")
def test_jobs_are_not_root_by_oversight(options: Options) -> None:
    """A reporter that is root refuses to start until an operator names the user that jobs run as."""
    with pytest.raises(ConfigurationError, match=r"--task-user.*--allow-root"):
        LinuxHost(replace(options, allow_root=False))
    with pytest.raises(ConfigurationError, match="no such user"):
        LinuxHost(replace(options, allow_root=False, task_user="nobody-of-that-name"))
    closed = options.state_dir.parent / "closed"
    closed.mkdir(mode=0o700)
    with pytest.raises(ConfigurationError, match="cannot enter"):
        LinuxHost(replace(options, task_user="nobody", state_dir=closed / "state"))
