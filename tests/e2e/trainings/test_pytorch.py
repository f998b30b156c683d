"""The page "Run your PyTorch job": what it shows is what is there, and its commands run line by line where
PyTorch is installed."""

import ast
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from infra.devservers import launchers
from penstock.cli.app import run
from penstock.cli.submission.jobspec import build, read_job_file
from penstock.exits import Exit
from tests.e2e.conftest import Installation, Start
from tests.support.cli.command_process import PENSTOCK, ROOT
from tests.support.waiting import wait_until

PAGE = ROOT / "libs/penstock/sdk/PYTORCH.md"
SCRIPT = ROOT / "tilt/jobs/pytorch_ddp.py"
JOB = ROOT / "tilt/jobs/pytorch-ddp.yaml"
LOCK = ROOT / "tilt/pytorch.lock"
PYTHON = ROOT / ".venv-pytorch/bin/python"
OUT_OF_MEMORY = {
    "torch.empty(1 << 50)": "out of host memory (the program reported DefaultCPUAllocator)",
    "raise torch.OutOfMemoryError": "out of GPU memory (the program reported torch.OutOfMemoryError)",
}
"""Errors of the real PyTorch, as `describe job` names them."""
INSTALLS = ("python3 -m venv ", ".venv-pytorch/bin/pip ", "penstock up ")  # `make pytorch` does these


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)


def typed() -> list[str]:
    """What a reader types."""
    lines = "".join(blocks("console")).splitlines()
    assert all(line.startswith("$ ") for line in lines)
    return [line[2:] for line in lines]


def test_the_page_shows_the_job_file_and_the_script_as_they_are() -> None:
    """A reader who copies from the page gets what was run."""
    [shown] = blocks("yaml")
    assert shown == "".join(line for line in JOB.read_text().splitlines(keepends=True) if line[0] != "#")
    script = SCRIPT.read_text()
    imported = {
        f"from {node.module} import {name.name}"
        for node in ast.walk(ast.parse(script))
        if isinstance(node, ast.ImportFrom)
        for name in node.names
    }
    rendezvous, progress, _turns = blocks("python")
    assert progress.splitlines()[0] in imported
    assert progress.splitlines()[-1].replace("iterations", "asked.iterations").strip() in script
    assert all(
        f'dist.init_process_group("{backend}"' in script for backend in re.findall(r'"(\w+)"', rendezvous)
    )
    for number in re.findall(r"every (\d+) iterations", PAGE.read_text()):
        assert f'"--save-every", type=int, default={number}' in script
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PENSTOCK_JOB_ID"):
        assert f"`{name}`" in PAGE.read_text()
        assert name in script


def test_every_path_and_command_of_the_page_is_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Links lead somewhere, the job is accepted, and each command has the options that the page gives it."""
    for link in re.findall(r"\]\(([^)#]+)\)", PAGE.read_text()):
        assert (PAGE.parent / link).exists(), link
    spec = build(read_job_file(str(JOB)), JOB.name)
    assert spec.environment is not None
    assert spec.environment.venv == str(PYTHON.parents[1])
    assert spec.workdir == str(JOB.parent)
    monkeypatch.chdir(ROOT)
    for line in typed():
        if line.startswith("penstock "):
            words = shlex.split(line, comments=True)[1:]
            checks = "--dry-run" if words[0] == "submit" else "--help"
            assert run([*words, checks]) == 0, f"{line}\n{capsys.readouterr().err}"


@pytest.mark.parametrize(("lock", "package"), [(LOCK, "torch"), (launchers.LOCK, "lightning")])
def test_what_is_installed_is_pinned(lock: Path, package: str) -> None:
    """Each package of `make pytorch`, and of the launchers that meet in CI, has one version and a hash."""
    pinned = re.findall(
        r"^([\w.-]+)==([\w.]+) \\\n    --hash=sha256:[0-9a-f]{64}$", lock.read_text(), re.MULTILINE
    )
    wanted = [line for line in lock.read_text().splitlines() if line[0] not in "# "]
    assert len(pinned) == len(wanted) == len(dict(pinned))
    assert package in dict(pinned)


def test_make_installs_what_is_pinned() -> None:
    """By its hashes, before the page's test."""
    target = (ROOT / "Makefile").read_text().partition("\npytorch: ")[2].partition("\n\n")[0]
    assert "--require-hashes" in target
    assert str(LOCK.relative_to(ROOT)) in target
    assert str(Path(__file__).relative_to(ROOT)) in target


def has_torch() -> bool:
    try:
        imports = [PYTHON, "-c", "import torch, penstock.sdk.out_of_memory"]
        return subprocess.run(imports, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def test_the_page_runs_line_by_line(start: Start) -> None:
    """Two workers on two nodes, stopped in the middle by a drain; the second attempt goes on, to the weights
    of a run without a stop."""
    if not has_torch():
        pytest.skip(f"no PyTorch in {PYTHON.parents[1]}: `make pytorch` installs it and runs this test")
    commands = [line for line in typed() if not line.startswith(INSTALLS)]
    [up] = [shlex.split(line) for line in typed() if line.startswith("penstock up ")]
    installation = start(*up[2:])
    outputs = {line: page_line(installation, line) for line in commands}
    [described] = [out for line, out in outputs.items() if line.startswith("penstock describe")]
    assert {"node-0", "node-1"} <= set(re.findall(r"node-\d", described)), "a worker on each node"
    resumed = outputs[commands[-1]]
    begun = int(re.findall(r"begin at iteration (\d+) with 2 workers on cpu", resumed)[-1])
    assert begun > 0, resumed
    assert installation.run("submit", "-f", str(JOB)).returncode == 0
    [whole] = re.findall(r"done: \d+ iterations, weights \w+", logs(installation))
    assert whole in resumed, "the weights of a run that was never stopped"
    for error, named in OUT_OF_MEMORY.items():
        script = f"from penstock.sdk.out_of_memory import *; report_out_of_memory(); import torch; {error}"
        asked = ("--venv", str(PYTHON.parents[1]), "--gpus", "1", "--host-memory", "4GiB")
        failed = installation.run("submit", "--name", "lacks", *asked, "--", "python", "-c", script)
        assert failed.returncode == Exit.FAILED, failed.stderr
        described = installation.run("describe", "job", failed.stdout.split()[0]).stdout
        assert named in " ".join(described.replace("│", " ").split())


def logs(installation: Installation) -> str:
    return installation.run("logs", "pytorch-ddp").stdout


def page_line(installation: Installation, line: str) -> str:
    """Types it when a reader would: the training runs, or the job waits again. What it prints."""
    if line.startswith("penstock describe"):
        wait_until(lambda: "begin at iteration 0" in logs(installation), installation.printed)
    if line.startswith("penstock node drain"):
        wait_until(
            lambda: " iterations" in installation.run("eta", "pytorch-ddp").stdout, installation.printed
        )
    if line.startswith("penstock why"):
        wait_until(lambda: "queued" in installation.run("get", "jobs").stdout, installation.printed)
    words = shlex.split(line, comments=True)
    assert words[0] == "penstock", line
    done = subprocess.run(
        [*PENSTOCK, *words[1:]],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**installation.env, "PENSTOCK_SERVER": installation.url},
    )
    assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}\n{logs(installation)}"
    return done.stdout


def test_the_lock_and_the_job_name_one_environment() -> None:
    """The Makefile installs where the job file looks."""
    assert f"PYTORCH := {PYTHON.parents[1].name}\n" in (ROOT / "Makefile").read_text()
    venv = yaml.safe_load(JOB.read_text())["environment"]["venv"]
    assert (JOB.parent / venv).resolve() == PYTHON.parents[1].resolve()
