"""The root README and the guides, typed line by line on one installation: each command ends as the page says,
and prints what it shows."""

import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import Installation, listed, new_place
from tests.support.cli.command_process import ROOT, in_process
from tests.support.pages import Command, File, lacking, steps
from tests.support.waiting import wait_until

GUIDES = ROOT / "libs/penstock/guides"
PAGES = [ROOT / "README.md", *sorted(GUIDES.glob("[a-z]*.md"))]
STARTS_SOMETHING_ELSE = ("make ", "export ")  # `make demo` and `make up` have tests of their own
NEEDS_A_RUNNING_JOB = ("penstock checkpoint ",)

pytestmark = pytest.mark.usefixtures("no_job_stays")


@pytest.fixture
def folder() -> Iterator[Path]:
    """Where a reader tries a guide, with a virtual environment that has NumPy and the SDK."""
    place = new_place()
    environment = place / ".venv"
    environment.mkdir()
    for name in ("bin", "lib"):
        (environment / name).symlink_to(Path(sys.prefix, name))
    shutil.copy(Path(sys.prefix, "pyvenv.cfg"), environment)
    yield place
    shutil.rmtree(place)


def until_it_runs(up: Installation, job: str) -> None:
    """A reader types the next line when the job has begun: it has printed something.

    Raises `AssertionError` for a job that ended without a word."""

    def printed() -> str:
        state = listed(up, "describe", "job", job)
        found = up.run("logs", job).stdout
        assert found or not state["outcome"], state["reason"]
        return found

    wait_until(printed, lambda: f"the first line of {job}")


def until_judged(up: Installation, job_id: str) -> None:
    """A reader looks at a job that was left alone when it has been estimated: then it has a place, or
    waits."""
    path = f"/v1/jobs/{job_id}"
    wait_until(lambda: up.gateway.get(path)["status"] != "submitted", lambda: f"the estimate of {job_id}")


def done(up: Installation, folder: Path, command: Command) -> "subprocess.CompletedProcess[str]":
    """`penstock …` in this process, everything else in a shell."""
    env = {**up.env, "PENSTOCK_SERVER": up.url}
    words = shlex.split(command.line)
    if "--at" in words:  # the number of a record is one of this cell
        job = listed(up, "describe", "job", words[words.index("--at") - 1])
        words[words.index("--at") + 1] = str(job["submitted_seq"] + 1)
    if words[0] == "penstock":
        return in_process(words[1:], env, folder=folder)
    token = f"curl -H 'Authorization: Bearer {up.token_file.read_text().strip()}' "
    line = command.line.replace("curl ", token).replace("http://127.0.0.1:8742", up.url)
    return subprocess.run(
        ["sh", "-c", line], env=env, cwd=folder, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_line_of_a_page_does_what_it_says(up: Installation, folder: Path, page: Path) -> None:
    """A newcomer copies the files, and types the commands in their order."""
    for step in steps(page):
        if isinstance(step, File):
            (folder / step.name).write_text(step.text)
        elif not step.line.startswith(STARTS_SOMETHING_ELSE):
            if step.line.startswith(NEEDS_A_RUNNING_JOB):
                until_it_runs(up, step.line.split()[2])
            answer = done(up, folder, step)
            told = f"{step.line}\n{answer.stdout}\n{answer.stderr}"
            assert answer.returncode == step.code, told
            assert lacking(step.shows, answer.stdout, answer.stderr) == "", told
            if "--detach" in step.line:
                until_judged(up, answer.stdout.split()[0])


def test_the_list_of_guides_is_whole() -> None:
    """A ninth guide was written, and nobody finds it."""
    text = (GUIDES / "README.md").read_text()
    assert all(f"({page.name})" in text for page in PAGES[1:])
    assert len(PAGES) == 1 + 8
