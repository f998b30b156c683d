"""What a cluster installs: one wheel with every room of the product, and nothing of its tests."""

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXTRAS = {"placer", "projector", "estimator", "node-reporter", "gateway", "cli", "simulator", "local", "dev"}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    [wheel] = out.glob("*.whl")
    return set(zipfile.ZipFile(wheel).namelist())


def test_every_room_is_in_the_wheel(files: set[str]) -> None:
    """A room forgotten in pyproject's `sources` would be missing on every node, and in no test that runs here."""
    for source in [
        *ROOT.glob("libs/*/penstock/*/__init__.py"),
        *ROOT.glob("services/*/penstock/*/__init__.py"),
    ]:
        room = source.parent.name
        if room == "testing":
            continue
        for module in source.parent.rglob("*"):
            if module.is_file() and "__pycache__" not in module.parts:
                assert f"penstock/{module.relative_to(source.parent.parent)}" in files


def test_tests_and_papers_stay_out(files: set[str]) -> None:
    assert not [
        name for name in files if "testing" in name or name.endswith((".md", ".png")) or "decisions" in name
    ]
    assert "penstock/__init__.py" not in files, "penstock is a namespace: other distributions may add to it"


def test_each_service_has_its_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(project["optional-dependencies"]) == EXTRAS
    services = {place.name for place in (ROOT / "services").iterdir() if place.is_dir()}
    assert services <= EXTRAS
