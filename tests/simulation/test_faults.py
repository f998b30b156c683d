"""The real cores in bad weather: late and repeated messages, a placer that crashes between any two records."""

import numpy as np
import pytest

from penstock.cluster.moves import IllegalMove
from penstock.events.facts import PlacerSettings
from penstock.simulator.engine import Options, Unsound
from penstock.simulator.lab.faults import FaultySimulation, Weather
from penstock.simulator.nodes import Latency
from penstock.simulator.traces.cluster import nodes_of
from penstock.simulator.traces.jobs import TraceJob
from penstock.simulator.truths.steady import SteadyWork
from penstock.simulator.truths.truth import Constant

PATIENCE_S = 50_000.0  # of virtual time; a life without faults takes less than 5,000
PROFILES = ("fifo", "srtf", "liquid", "tiresias", "random", "srsf", "sjf")


def life(seed: int) -> FaultySimulation:
    """A small cluster that is always too small; every choice from the seed."""
    rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence((seed, 1))))
    jobs = [
        TraceJob(
            f"j{i:02}", float(rng.uniform(0, 300)), float(rng.uniform(1, 200)), int(2 ** rng.integers(0, 4))
        )
        for i in range(int(rng.integers(5, 25)))
    ]
    return FaultySimulation(
        nodes_of("2x4+1x2"),
        PlacerSettings(profile=PROFILES[seed % len(PROFILES)], seed=seed, queue_limits_gpu_s=(60.0, 200.0)),
        SteadyWork(Constant()),
        jobs,
        Options(latency=Latency(float(rng.uniform(0, 3)), float(rng.uniform(0, 15))), check_every_step=True),
        seed=seed,
        weather=Weather(twice=0.15, crash=0.05),
    )


@pytest.mark.parametrize("first", range(0, 60, 10))
def test_every_job_ends_whatever_the_weather(first: int) -> None:
    """A month of bad network in an afternoon: nothing is placed twice, nothing is forgotten, all jobs end."""
    crashes = repeated = 0
    for seed in range(first, first + 10):
        found = life(seed)
        while found.step():
            assert found.now_s < PATIENCE_S, f"seed {seed}: {sorted(found.cell.state.jobs)} do not end"
        figures = found.figures(1, 1)
        assert figures.unfinished_jobs == 0, f"seed {seed}: {sorted(found.cell.state.jobs)} never ended"
        assert not found.cell.state.jobs, f"seed {seed}: {sorted(found.cell.state.jobs)} are still listed"
        assert found.meter.held == 0, f"seed {seed}: GPUs are still held"
        crashes += found.crashes
        repeated += found.repeated
    assert crashes > 10, "the weather was not bad"
    assert repeated > 50, "the weather was not bad"


def test_a_seed_replays_its_weather() -> None:
    """A failure that cannot be repeated is a rumour."""
    heads = set()
    for _ in range(2):
        found = life(11)
        while found.step():
            pass
        heads.add((found.cell.head.id, found.crashes, found.repeated))
    assert len(heads) == 1


def _nothing(*given: object) -> tuple[()]:
    return ()


MUTANTS = {
    "orders are not repeated after a take-over": ("penstock.simulator.lab.faults.outstanding", _nothing),
    "nobody is placed when something is freed": (
        "penstock.placer.core.decide.Decider._place_waiting",
        _nothing,
    ),
    "every input is let in, also late and repeated ones": (
        "penstock.placer.core.step.refusal",
        lambda state, event: None,
    ),
    "a stopped gang is forgotten": ("penstock.placer.core.decide.Decider._stopped", _nothing),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_laboratory_notices(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that cannot fail proves nothing: each of these faults shows within twenty lives."""
    where, change = MUTANTS[mutant]
    monkeypatch.setattr(where, change)
    for seed in range(20):
        try:
            found = life(seed)
            while found.step():
                if found.now_s > PATIENCE_S:
                    return
        except (Unsound, AssertionError, KeyError, IllegalMove):
            return
        if found.figures(1, 1).unfinished_jobs:
            return
    pytest.fail("twenty lives, and nothing was noticed")
