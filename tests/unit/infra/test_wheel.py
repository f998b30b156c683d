"""What a cluster installs: one wheel with the whole product, and nothing of its tests."""

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
EXTRAS = {
    "charts",
    "placer",
    "batcher",
    "migrator",
    "contention-guard",
    "projector",
    "estimator",
    "papers",
    "node-reporter",
    "kubernetes",
    "gateway",
    "cli",
    "client",
    "s3",
    "simulator",
    "local",
    "dev",
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    [wheel] = out.glob("*.whl")
    return set(zipfile.ZipFile(wheel).namelist())


def test_the_whole_product_is_in_the_wheel(files: set[str]) -> None:
    """A module forgotten in the packaging would be missing on every node, and in no test that runs here."""
    for package in (
        ROOT / "libs/penstock",
        ROOT / "libs/penstock_papers",
        ROOT / "services/penstock_services",
    ):
        for module in package.rglob("*"):
            if module.is_relative_to(ROOT / "libs/penstock/decisions") or "__pycache__" in module.parts:
                continue
            if module.is_file() and module.suffix not in {".md", ".png"}:
                assert str(module.relative_to(package.parent)) in files


def test_only_the_product_is_in_the_wheel(files: set[str]) -> None:
    """Test apparatus and pages on a production node are an attack surface and a puzzle."""
    packages = {name.partition("/")[0] for name in files}
    own = {"penstock", "penstock_papers", "penstock_services"}
    assert {name for name in packages if not name.endswith(".dist-info")} == own
    assert not [
        name
        for name in files
        if name.endswith((".md", ".png")) or name.startswith("penstock/decisions/") or "test" in name
    ]


def test_each_service_has_its_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(project["optional-dependencies"]) == EXTRAS
    services = {
        place.name.replace("_", "-")
        for place in (ROOT / "services/penstock_services").iterdir()
        if (place / "__main__.py").exists()
    }
    assert services <= EXTRAS
    assert {f"penstock-{name}" for name in services} | {"penstock"} == set(project["scripts"])
