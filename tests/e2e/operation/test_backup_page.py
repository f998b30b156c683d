"""The page about copies (libs/penstock/backup/README.md), its commands as they stand there, on an
installation of `penstock up`."""

import re
import shlex
import shutil
import subprocess

import pytest

from tests.e2e.conftest import Installation, Start, listed
from tests.support.cli.command_process import PENSTOCK, ROOT

pytestmark = pytest.mark.postgres


def commands() -> list[str]:
    """Every command of the page's blocks, in order."""
    text = (ROOT / "libs/penstock/backup/README.md").read_text()
    return "".join(re.findall(r"```sh\n(.*?)```", text, re.DOTALL)).splitlines()


def typed(command: str, up: Installation) -> None:
    words = [{".penstock": str(up.folder)}.get(word, word) for word in shlex.split(command)]
    assert words[0] == "penstock"
    done = subprocess.run(
        [*PENSTOCK, *words[1:]], env=up.env, cwd=up.folder.parent, capture_output=True, text=True, check=False
    )
    assert (done.returncode, "ok: true" in done.stdout) == (0, True), (
        f"{command}\n{done.stdout}\n{done.stderr}"
    )


@pytest.mark.parametrize(
    "runs", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["while-it-runs", "while-it-is-stopped"]
)
def test_an_installation_comes_back_from_its_copy(start: Start, runs: bool) -> None:
    """Somebody deletes the database's folder and the keys. The copy of this morning brings jobs and tables
    back, the nodes join anew, and what was submitted since is unknown."""
    *take, restore = commands()
    first = start("--nodes", "1", "--virtual-gpus", "1")
    assert first.run("submit", "--quiet", "--name", "before", "--", "true").returncode == 0
    if not runs:
        first.stop()
    for command in take:
        typed(command, first)
    if runs:
        assert first.run("submit", "--quiet", "--name", "since", "--", "true").returncode == 0
        first.stop()
    for lost in ("postgres", "keys", "code"):
        shutil.rmtree(first.folder / lost)
    typed(restore, first)
    second = start("--nodes", "1", "--virtual-gpus", "1")
    names = [job["name"] for job in listed(second, "get", "jobs")["jobs"]]
    assert names == ["before"]
    assert second.run("submit", "--quiet", "--name", "after", "--", "true").returncode == 0
    assert second.run("projections", "verify").returncode == 0
