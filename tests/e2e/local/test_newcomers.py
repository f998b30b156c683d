"""First days of a newcomer: a job that needs more memory than was guessed, the Python client's page, folders
and code."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.e2e.conftest import Installation
from tests.support.cli.command_process import ROOT
from tests.support.waiting import wait_until

GROWING = """
import sys
mib = int(open(sys.argv[1]).read())
data = bytearray(b"x") * (mib << 20)
reserved = bytearray((mib > 100) * 1200 << 20)  # what a cap of each process' own data counts without a touch
"""
"""A training whose data set may grow; takes the file with its size in MiB."""


def answer(up: Installation, *arguments: str) -> dict[str, Any]:
    """What a command prints for programs."""
    done = up.run(*arguments, "-o", "json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def jobs(up: Installation, name: str) -> list[dict[str, Any]]:
    return [job for job in answer(up, "get", "jobs")["jobs"] if job["name"] == name]


def facts(events: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    """The facts of this type about a job, oldest first."""
    return [event["data"] for event in events["events"] if event["type"].startswith(kind)]


def test_a_job_that_outgrows_what_was_learned_runs_on_and_one_that_outgrows_its_request_is_told_so(
    up: Installation, tmp_path: Path
) -> None:
    """The nightly training has had 40 MiB of data for weeks, and tonight it has 200. Nothing in its job
    file mentions memory, and the machine is idle."""
    size, script = tmp_path / "size", tmp_path / "growing.py"
    size.write_text("40")
    script.write_text(GROWING)
    command = ("--", "python3", str(script), str(size))
    nightly = [up.run("submit", "-d", "--name", "nightly", *command).stdout.strip() for _ in range(2)]
    assert up.run("wait", *nightly).returncode == 0

    size.write_text("200")
    grown = up.run("submit", "--name", "grown", *command)
    assert grown.returncode == 0, grown.stdout + grown.stderr
    [placed] = facts(answer(up, "events", "grown"), "penstock.placement.decided")
    [task] = placed["tasks"]
    assert 44 <= task["host_memory_mib"] < 100, "the promise is what was learned"
    assert task["host_memory_cap_mib"] > 200, "and no cap"

    refused = up.run("submit", "--name", "tight", "--host-memory", "64MiB", *command)
    assert refused.returncode == 10
    texts = [up.run(*words).stdout for words in (("describe", "job", "tight"), ("why", "tight"))]
    for text in (*texts, *(job["reason"] for job in jobs(up, "tight"))):
        shown = " ".join(text.replace("│", " ").split())
        assert "its cap was 64 MiB: the job asked for it" in shown
        assert "Ask for more with --host-memory 128MiB" in shown


def test_a_retry_is_estimated_with_what_another_run_has_shown_meanwhile(
    up: Installation, tmp_path: Path
) -> None:
    """Nothing is known of either; the one succeeds, then the other's first attempt fails. What it needs is no
    guess any more."""
    go, job = tmp_path / "go", tmp_path / "job.yaml"
    script = f'until [ -z "$FAILS" ] || [ -e {go} ]; do sleep 0.05; done; exit "${{FAILS:-0}}"'
    job.write_text(
        json.dumps({"command": ["sh", "-c", script], "retry": {"max_attempts": 2, "backoff": "1h"}})
    )
    assert up.run("submit", "-d", "-f", str(job), "--name", "flaky", "-e", "FAILS=1").returncode == 0
    assert up.run("submit", "-f", str(job), "--name", "sound").returncode == 0
    go.touch()

    def estimates() -> list[dict[str, Any]]:
        return facts(answer(up, "events", "flaky"), "penstock.job.estimated")

    wait_until(lambda: len(estimates()) == 2, lambda: up.run("describe", "job", "flaky").stdout)
    first, second = estimates()
    assert [first["estimate"]["tier"], second["estimate"]["tier"]] == ["default", "history"]
    assert [first.get("attempt"), second["attempt"]] == [None, 2]
    assert second["estimate"]["worker"]["host_memory_mib"] < 200, "what the other run was measured to use"
    assert {job["status"] for job in jobs(up, "flaky")} == {"backoff"}, "it shortens no back-off"
    assert up.run("cancel", "flaky").returncode == 0


def test_the_python_client_does_what_its_page_says(up: Installation, place: Path) -> None:
    """A pipeline's author copies the three examples, and the type checker of the editor finds the types."""
    folder = ROOT / "libs/penstock/client"
    examples = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    outputs = []
    for example in examples:
        done = subprocess.run(
            [sys.executable, "-c", example],
            capture_output=True,
            text=True,
            check=False,
            cwd=place,
            env={**up.env, "PENSTOCK_SERVER": up.url},
        )
        assert done.returncode == 0, f"{example}\n{done.stdout}\n{done.stderr}"
        outputs.append(done.stdout)
    first, sweep, wrong = outputs
    assert first.startswith("42\n")
    assert "penstock.job.ended" in first
    assert "It has ended: succeeded." in first
    assert [line for line in sweep.splitlines() if "seed" in line] == [
        f"seed-{seed} succeeded seed {seed}" for seed in range(3)
    ]
    assert sweep.endswith("3 of 3\n")
    assert wrong.startswith("resources.gpus -> ")
    assert (folder.parent / "py.typed").exists()


def test_a_folder_that_is_not_there_is_named_before_the_job_is_placed_and_by_the_node(
    up: Installation,
) -> None:
    """A job is submitted from a laptop's folder: nothing mentioned that the nodes have none of that name."""
    flags = ("--name", "nowhere", "--workdir", "/no/such/workdir", "--venv", "/no/such/venv")
    answer = up.run("submit", *flags, "--", "python", "-c", "1")
    assert answer.returncode == 10, answer.stdout + answer.stderr
    for field, path in (("workdir", "/no/such/workdir"), ("environment.venv", "/no/such/venv/bin/python")):
        assert (
            f"warning: {field} '{path}' is not on this machine, where all nodes are; make it" in answer.stderr
        )
    for shown in (
        answer.stdout,
        up.run("why", "nowhere").stdout,
        up.run("describe", "job", "nowhere").stdout,
    ):
        assert "cannot enter workdir '/no/such/workdir'" in " ".join(shown.replace("│", " ").split())


def test_a_folder_of_code_is_sent_once_and_each_job_runs_in_its_own_copy(
    up: Installation, tmp_path: Path
) -> None:
    """A researcher edits `train.py` on a laptop whose folders no node has."""
    project = tmp_path / "project"
    (project / "lib").mkdir(parents=True)
    (project / "lib" / "net.py").write_text("name = 'resnet'")
    (project / "train.py").write_text(
        "import lib.net; print(lib.net.name, flush=True); open('model.pt', 'w').write('w')"
    )
    (project / "data.bin").write_text("not code")
    (project / ".penstockignore").write_text("*.bin\n")
    (project / "job.yaml").write_text("command: [python3, train.py]\nsync: .\n")
    for name in ("sent", "sent-again"):
        answer = up.run("submit", "-f", str(project / "job.yaml"), "--name", name)
        assert answer.returncode == 0, answer.stdout + answer.stderr
        assert "resnet" in up.run("logs", name).stdout
    [stored] = [path for path in (up.folder / "code").rglob("*") if path.is_file()]
    assert stored.parent.name == "ana"
    (project / "lib" / "net.py").write_text("name = 'vit'")
    answer = up.run(
        "submit",
        "--sync",
        str(project),
        "--workdir",
        str(project / "lib"),
        "--name",
        "edited",
        "--",
        "python3",
        "net.py",
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr

    def left() -> set[str]:
        return {path.name for path in (up.folder / "nodes").rglob("work/**/*")}

    wait_until(lambda: left() <= {"model.pt"}, lambda: f"the end of {left()}")
    outside = up.run("submit", "--sync", str(project), "--workdir", str(tmp_path), "--", "true")
    assert outside.returncode == 2
    assert f"workdir: {tmp_path} is not in" in " ".join(outside.stderr.split())
