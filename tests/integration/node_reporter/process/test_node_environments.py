"""Where a task's Python comes from: not from the node-reporter's own virtual environment, but from the one
its job names."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.model.decisions.orders import StartTask
from penstock.model.inputs import external_events
from penstock.model.jobs.job_parts import Environment
from penstock.runtime.files.task_logs import log_path
from penstock_services.node_reporter.options import Options
from tests.support.log.memory_log import MemoryBroker, MemoryLog
from tests.support.node_reporter import node_fixtures
from tests.support.node_reporter.node_cell import Cell, start_order, working

options, broker, cell = node_fixtures.options, node_fixtures.broker, node_fixtures.cell
nothing_left = node_fixtures.nothing_left
SHOW = 'echo "$PATH|$VIRTUAL_ENV|$CONDA_PREFIX|$(command -v python)"'


@pytest.fixture
def activated(monkeypatch: pytest.MonkeyPatch) -> str:
    """The reporter was started as people start it: with its virtual environment activated."""
    own = f"{sys.prefix}/bin"
    assert sys.prefix != sys.base_prefix, "the tests run in a virtual environment"
    monkeypatch.setenv("VIRTUAL_ENV", sys.prefix)
    monkeypatch.setenv("PATH", f"{own}:{own}/:{os.environ['PATH']}")
    return sys.prefix


def made(folder: Path) -> Path:
    """A virtual environment with a package of the user's own."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    [packages] = folder.glob("lib/python*/site-packages")
    (packages / "mine.py").write_text("name = 'mine'")
    return folder


def task(token: int, *command: str, **more: Any) -> StartTask:
    return start_order(token, *command, gpus=(), **more)


async def output(cell: Cell, options: Options, token: int) -> str:
    """What the task printed, which succeeded."""
    exited = await cell.until(external_events.TaskExited, task_id=f"job-{token}.1.0")
    text = log_path(options.log_dir, f"job-{token}", f"job-{token}.1.0").read_text()
    assert exited.exit_code == 0, (exited.detail, text)
    return text.strip()


async def failed(cell: Cell, token: int) -> str:
    exited = await cell.until(external_events.TaskExited, task_id=f"job-{token}.1.0")
    assert exited.cause == "start_failed"
    return str(exited.detail)


async def test_a_task_finds_its_own_python_and_not_the_reporters(
    options: Options,
    broker: MemoryBroker,
    cell: Cell,
    activated: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`python train.py` imported the scheduler's packages, and a job's own virtual environment had no
    effect."""
    venv = made(tmp_path / "venv")
    conda = tmp_path / "envs" / "train"
    (conda / "conda-meta").mkdir(parents=True)
    (conda / "bin").mkdir()
    (conda / "bin" / "python").symlink_to(venv / "bin" / "python")
    monkeypatch.setenv("CONDA_ENVS_PATH", str(conda.parent))
    async with working(options, MemoryLog(broker, "node-reporter")):
        show, mine = ("sh", "-c", SHOW), ("python", "-c", "import mine, sys; print(sys.prefix, mine.name)")
        await cell.order(
            task(1, *show),
            task(2, *mine, environment=Environment(venv=str(venv)), env={"PATH": "/bin"}),
            task(3, *show, environment=Environment(conda="train")),
            task(4, *show, environment=Environment(conda=str(conda))),
            task(5, environment=Environment(venv=str(tmp_path / "gone"))),
            task(6, environment=Environment(conda="gone")),
            task(7, environment=Environment(container="pytorch")),
        )
        path, virtual, prefix, _ = (await output(cell, options, 1)).split("|")
        assert activated not in path
        assert virtual == ""
        assert await output(cell, options, 2) == f"{venv} mine"
        for token in (3, 4):
            path, virtual, prefix, python = (await output(cell, options, token)).split("|")
            assert (virtual, prefix) == ("", str(conda))
            assert python == f"{conda}/bin/python"
        reason = await failed(cell, 5)
        assert f"no virtual environment in '{tmp_path}/gone'" in reason
        assert "python3 -m venv" in reason
        assert "no conda environment 'gone'" in await failed(cell, 6)
        if shutil.which("podman") is None and shutil.which("apptainer") is None:
            refused = await failed(cell, 7)
            assert "jobs run as root on this node" in refused or "podman" in refused
