"""Units that wait are not tried again where nothing of theirs has changed: every decision is as if they had
been."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest

from penstock.ledger.state.state import CellState
from penstock.model.decisions.plans import PlanUnit
from penstock.model.nouns.settings import PlacerSettings
from penstock.simulator.engine import Simulation
from penstock.simulator.job_models.model import Constant
from penstock.simulator.job_models.steady import SteadyWork
from penstock.simulator.traces.cluster import nodes_of
from penstock.simulator.traces.jobs import Stages, TraceJob
from penstock_services.placer.core.still_waiting import StillWaiting
from tests.unit.ledger.groups.test_group_storms import Storm

JOBS, SEEDS, STEPS = 50, 6, 60
GPUS = (1, 1, 2, 4, 8, 16)
KINDS = (
    Stages(86.0, 78.0, 6.0, 2.0),
    Stages(76.0, 9.0, 26.0, 41.0),
    Stages(101.0, 2.0, 85.0, 14.0),
    Stages(96.0, 92.0, 3.0, 1.0),
)
"""What one needs for long the others hardly need."""


@contextmanager
def all_tried() -> Iterator[None]:
    """Each unit is tried at each record."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StillWaiting, "units", lambda *_: ())
        yield


@pytest.mark.parametrize("profile", ["muri-l", "interleave"])
def test_a_loaded_cell_is_placed_as_if_all_units_were_tried(
    profile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plans stop dozens of jobs at once; each exit frees something on one node, for a few of the units that
    wait."""
    spared = 0
    judge = StillWaiting.units

    def counted(self: StillWaiting, state: CellState, units: Sequence[Sequence[PlanUnit]]) -> Collection[int]:
        nonlocal spared
        found = judge(self, state, units)
        spared += len(found)
        return found

    monkeypatch.setattr(StillWaiting, "units", counted)
    found = ledger_of(profile)
    assert spared
    with all_tried():
        assert ledger_of(profile) == found


def ledger_of(profile: str) -> str:
    rng = np.random.Generator(np.random.PCG64(1))
    jobs = [
        TraceJob(
            f"j{number}",
            60.0 * number,
            float(rng.uniform(600, 20_000)),
            int(rng.choice(GPUS)),
            f"m{number % len(KINDS)}",
            stages=KINDS[number % len(KINDS)],
        )
        for number in range(JOBS)
    ]
    simulation = Simulation(nodes_of("4x8"), PlacerSettings(profile=profile), SteadyWork(Constant()), jobs)
    while simulation.step():
        pass
    found = simulation.figures(0, 0)
    assert not found.unfinished_jobs
    return found.ledger_hash


def test_storms_of_groups_end_the_same_as_if_all_units_were_tried() -> None:
    """Jobs are cancelled, nodes boot again and cores change while units wait for stops."""
    for seed in range(SEEDS):
        found = storm(seed)
        with all_tried():
            assert storm(seed) == found, seed


def storm(seed: int) -> str:
    found = Storm(seed)
    for number in range(STEPS):
        found.act(number)
    return found.cell.head.id
