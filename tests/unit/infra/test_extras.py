"""What an installation with one extra lacks: `pip install penstock[placer]` on a machine with nothing else
must give a placer that starts."""

import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import packages_distributions, requires

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

STARTS: dict[str, Sequence[str]] = {
    "placer": ("penstock_services.placer.__main__",),
    "papers": ("penstock_papers.profiles", "scipy.optimize"),
    "batcher": ("penstock_services.batcher.__main__", "penstock_services.batcher.shell.worker"),
    "migrator": ("penstock_services.migrator.__main__",),
    "contention-guard": ("penstock_services.contention_guard.__main__",),
    "projector": ("penstock_services.projector.__main__",),
    "estimator": ("penstock_services.estimator.__main__",),
    "node-reporter": ("penstock_services.node_reporter.__main__",),
    "gateway": ("penstock_services.gateway.__main__",),
    "client": ("penstock.client",),
    "cli": ("penstock.cli.main",),
    "simulator": ("penstock.cli.main", "penstock.simulator.runs", "penstock.simulator.report"),
}
"""Extra → modules that its programs import at their start."""
WITHOUT = """
import sys
from importlib import import_module

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in missing:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

missing = set(sys.argv[1].split(","))
sys.meta_path.insert(0, Missing())
for name in sys.argv[2:]:
    import_module(name)
"""


def installed_with(extra: str) -> set[str]:
    """The distributions that this extra installs, with all that they require."""
    found: set[tuple[str, str]] = set()
    rest = [("penstock", extra)]
    while rest:
        name, wanted = rest.pop()
        if (name, wanted) in found:
            continue
        found.add((name, wanted))
        for line in requires(name) or ():
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": wanted}):
                rest += [(requirement.name, extra) for extra in ("", *requirement.extras)]
    return {canonicalize_name(name) for name, _ in found}


@pytest.mark.parametrize("extra", STARTS)
def test_it_starts_with_nothing_else_installed(extra: str) -> None:
    """Here everything is installed, so an import that needs another service's packages would fail on the
    cluster alone."""
    there = installed_with(extra)
    missing = [
        module
        for module, owners in packages_distributions().items()
        if not there & {canonicalize_name(owner) for owner in owners}
    ]
    assert "ortools" in missing
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, ",".join(missing), *STARTS[extra]],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
