"""Code that a job is sent with, on its node: unpacked as the task's user, removed where it is unchanged; and
starts that hang."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.model.inputs.external_events import TaskExited
from penstock.model.jobs.job_parts import Environment
from penstock.runtime.files.task_logs import log_path
from penstock.sdk.code_archive import pack
from penstock_services.node_reporter.options import IsolationChoice, Options
from tests.support.log.memory_log import MemoryBroker, MemoryLog
from tests.support.node_reporter import node_fixtures
from tests.support.node_reporter.node_cell import Cell, node_options, start_order, stop_order, working
from tests.support.waiting import await_until

broker, cell, nothing_left = node_fixtures.broker, node_fixtures.cell, node_fixtures.nothing_left
RUN = """
id -un
./tool
[ -w . ] && echo result > result.txt
mkdir copy && cp -rp run.sh tool lib settings.txt result.txt copy
[ -e "$OTHER" ] && cat "$OTHER" && echo "another task's code"
sed -i s/1/2/ settings.txt
"""


@pytest.fixture
def options(folder: Path) -> Options:
    return node_options(folder, code_dir=folder / "stored")


def stored(options: Options, files: dict[str, str]) -> str:
    """Puts an archive of these files where the gateway has them; its digest."""
    project = options.state_dir.parent / "project"
    for name, text in files.items():
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(text)
        (project / name).chmod(0o755)
    packed = pack(project)
    assert options.code_dir is not None
    place = options.code_dir / "shared" / packed.sha256
    place.parent.mkdir(parents=True)
    place.write_bytes(packed.data)
    place.chmod(0o600)
    return packed.sha256


def paths_in(folder: Path) -> set[str]:
    """Of files and links; meanwhile some may go."""
    return {
        os.path.relpath(os.path.join(at, name), folder) for at, _, names in os.walk(folder) for name in names
    }


async def test_a_start_that_hangs_holds_up_no_other(
    options: Options, broker: MemoryBroker, cell: Cell
) -> None:
    """A folder on a network that does not answer, here a FIFO that no process writes to: the node's other
    tasks start."""
    home = options.state_dir.parent / "home" / ".conda"
    home.mkdir(parents=True)
    os.mkfifo(home / "environments.txt")
    async with working(options, MemoryLog(broker, "node-reporter")):
        far = Environment(conda="far")
        await cell.order(
            start_order(1, "true", gpus=(), environment=far, env={"HOME": str(home.parent)}),
            start_order(2, "true", gpus=()),
        )
        assert (await cell.until(TaskExited)).task_id == "job-2.1.0"
        await cell.order(stop_order(3, "job-1.1.0"))
        assert (await cell.until(TaskExited, task_id="job-1.1.0")).cause == "stopped"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can run jobs as another user")
@pytest.mark.parametrize("isolation", [IsolationChoice.AUTO, IsolationChoice.NONE])
async def test_code_runs_as_the_tasks_user_and_its_results_stay(
    isolation: IsolationChoice, options: Options, broker: MemoryBroker, cell: Cell
) -> None:
    """The reporter is root, jobs are another user: what is unpacked is theirs. A script snapshots its own
    code beside its results, times included."""
    files = {
        "run.sh": RUN,
        "tool": "#!/bin/sh\necho tool\n",
        "lib/deep/a.py": "a = 1\n",
        "settings.txt": "lr = 1\n",
    }
    digest = stored(options, files)
    async with working(
        replace(options, task_user="nobody", isolation=isolation), MemoryLog(broker, "node-reporter")
    ):
        await cell.order(
            start_order(1, "sh", "run.sh", gpus=(), code=digest),
            start_order(2, "sh", "-c", "ls", gpus=(), code=digest, workdir="lib"),
            start_order(3, "true", gpus=(), code=digest, workdir="absent"),
        )
        exited = await cell.until(TaskExited, task_id="job-1.1.0")
        text = log_path(options.log_dir, "job-1", "job-1.1.0").read_text()
        assert (exited.cause, exited.exit_code) == ("exited", 0), (exited.detail, text)
        assert text.split()[:2] == ["nobody", "tool"]
        second = await cell.until(TaskExited, task_id="job-2.1.0")
        assert (second.exit_code, log_path(options.log_dir, "job-2", "job-2.1.0").read_text()) == (
            0,
            "deep\n",
        )
        refused = await cell.until(TaskExited, task_id="job-3.1.0")
        assert (refused.cause, "cannot enter workdir 'absent'" in refused.detail) == ("start_failed", True)

        tasks = options.state_dir / "tasks"
        works = [tasks / f"job-{token}.1.0@{token}" / "work" for token in (1, 2, 3)]
        await await_until(lambda: not (works[0] / "run.sh").exists(), "the code to be removed")
        copied = {f"copy/{name}" for name in [*files, "result.txt"]}
        await await_until(
            lambda: paths_in(works[0]) == {"result.txt", "settings.txt"} | copied, lambda: paths_in(works[0])
        )
        for work in works[1:]:
            await await_until(lambda work=work: paths_in(work) == set(), f"{work} to be empty")
        owner = (works[0] / "settings.txt").stat()
        assert owner.st_uid != 0
