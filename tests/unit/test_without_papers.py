"""A wheel without `penstock_papers`: every service runs, under the product's own profile."""

import json
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import EntryPoint
from unittest import mock

import pytest

from penstock import entry_points
from penstock.entry_points import Group
from penstock.model.nouns.settings import OWN_PROFILE, PlacerSettings
from penstock.scheduling import profiles
from penstock.scheduling.definition import Definition
from penstock.scheduling.profiles import UnknownProfile, definition_of, names, settings_of

WITHOUT = """
import json, sys
from importlib import import_module

sys.modules["penstock_papers"] = None  # as if it were not installed: neither found nor imported
for name in sys.argv[1:]:
    import_module(name)

from penstock.model.nouns.settings import PlacerSettings
from penstock.scheduling.profiles import UnknownProfile, names, profile_for
from penstock.simulator.engine import Simulation
from penstock.simulator.generators.registry import generators
from penstock.simulator.job_models.catalogue import job_models
from penstock.simulator.job_models.model import Constant
from penstock.simulator.job_models.steady import SteadyWork
from penstock.simulator.traces.cluster import nodes_of
from penstock.simulator.traces.jobs import TraceJob

jobs = [TraceJob(f"j{number}", float(number), 60.0, number % 4 + 1) for number in range(20)]
settings = PlacerSettings(profile="penstock", batch_window_ms=1_000, batch_arrivals=2)
run = Simulation(nodes_of("2x4"), settings, SteadyWork(Constant()), jobs)
while run.step():
    pass
try:
    refused = str(profile_for(PlacerSettings(profile="srtf")))
except UnknownProfile as error:
    refused = str(error)
print(json.dumps({
    "finished": run.figures(0, 1).finished_jobs,
    "profiles": names(),
    "refused": refused,
    "generators": list(generators()),
    "job_models": job_models(),
    "imported": [
        name for name, module in sys.modules.items() if module and name.startswith("penstock_papers")
    ],
}))
"""
PROGRAMS = (
    *(
        f"penstock_services.{name}.__main__"
        for name in (
            "batcher",
            "contention_guard",
            "estimator",
            "gateway",
            "migrator",
            "node_reporter",
            "placer",
            "projector",
        )
    ),
    "penstock.cli.main",
    "penstock.local.stack",
    "penstock.simulator.commands.simulate",
    "penstock.simulator.commands.compare",
)


@pytest.fixture(scope="module")
def found() -> Mapping[str, object]:
    """What a fresh process says in which the package is missing."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, *PROGRAMS], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def test_every_program_starts_and_a_cell_decides(found: Mapping[str, object]) -> None:
    """An operator installs a wheel from which the folder was left out: placer, batcher and migrator serve
    twenty jobs in a window for bursts."""
    assert found["finished"] == 20
    assert found["imported"] == []


def test_its_own_profile_is_the_only_one_and_others_name_their_extra(found: Mapping[str, object]) -> None:
    """Who asks for another profile is told what has it."""
    assert found["profiles"] == [OWN_PROFILE]
    said = "'srtf' is not a profile; there are penstock; for more install the extra `papers`"
    assert str(found["refused"]).startswith(said)
    assert found["generators"] == ["poisson/10-per-hour", "poisson/60-per-hour"]
    assert "muri" not in found["job_models"]  # type: ignore[operator]


def test_the_default_profile_pays_for_no_entry_point() -> None:
    """Reading the installation's entry points takes milliseconds, which a command under the default profile
    saves."""

    def read(**_: str) -> None:
        raise AssertionError("read")

    with (
        mock.patch.object(profiles, "INSTALLED", Group[Definition]("penstock.profiles")),
        mock.patch.object(entry_points, "entry_points", read),
    ):
        settings = settings_of({"profile": OWN_PROFILE, "seed": 3})
        assert profiles.in_force(settings).max_overtakes > settings.max_overtakes
        assert profiles.profile_for(settings).name == OWN_PROFILE
        with pytest.raises(AssertionError):
            names()


def test_a_package_that_cannot_be_imported_is_named() -> None:
    """A dependency of the papers is missing: the profile is there, and the message says what to install."""
    broken = EntryPoint("srtf", "penstock_papers.nowhere:SRTF", "penstock.profiles")
    with (
        mock.patch.object(profiles, "INSTALLED", Group[Definition]("penstock.profiles")),
        mock.patch.object(entry_points, "entry_points", return_value=[broken]),
    ):
        assert names() == [OWN_PROFILE, "srtf"]
        with pytest.raises(
            UnknownProfile, match=r"srtf cannot be loaded: .*nowhere.*; install the extra `papers`"
        ):
            definition_of("srtf")


@pytest.mark.parametrize("name", names())
def test_own_settings_have_names_of_their_own(name: str) -> None:
    """A setting of the cell and one of its profile are given side by side: one name means one of both."""
    own = definition_of(name).form
    assert not {*own.__struct_fields__} & {*PlacerSettings.__struct_fields__}
    assert profiles.profile_for(PlacerSettings(profile=name)).name == name
    assert settings_of({"profile": name}).profile_settings == ""
