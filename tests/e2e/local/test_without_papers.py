"""A wheel from which the papers were left out: each service runs, and a job ends."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import Start

pytestmark = pytest.mark.postgres

NOT_INSTALLED = 'import sys\nsys.modules["penstock_papers"] = None\n'
"""Each Python process reads the module `sitecustomize` at its start: the package is neither found nor
imported."""


def test_every_service_runs_without_the_papers_and_a_job_ends(start: Start, place: Path) -> None:
    """An operator removes the folder from an installation, and starts a cell."""
    hooks = place / "hooks"
    hooks.mkdir()
    (hooks / "sitecustomize.py").write_text(NOT_INSTALLED)
    up = start("--nodes", "1", "--virtual-gpus", "1", PYTHONPATH=str(hooks))
    tried = subprocess.run([sys.executable, "-c", "import penstock_papers"], env=up.env, capture_output=True)
    assert tried.returncode == 1, "the services' environment lacks the package"
    done = up.run("submit", "--", "echo", "ended")
    assert done.returncode == 0, done.stderr
    assert "ended" in done.stdout.splitlines()
