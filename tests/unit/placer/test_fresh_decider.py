"""A decider's caches save work and decide nothing: one that starts from a snapshot decides the same, byte by
byte."""

import pytest
from msgspec.structs import replace

from penstock.ledger.replica.snapshot import dump, load
from penstock.model.inputs.estimates import JobEstimated
from penstock.model.inputs.external_events import JobSubmitted, NodeCordoned, NodeJoined, NodeUncordoned
from penstock.model.nouns.settings import PlacerSettings
from penstock.model.nouns.types import ShapeOption
from penstock.scheduling import profiles
from penstock_services.placer.core.recorder import Recorder
from penstock_services.placer.core.step import PlacerCore
from tests.support.cluster.driver import CellDriver, estimate, job_spec, node_spec
from tests.support.cluster.random_cell import RandomCell


@pytest.mark.parametrize("profile", profiles.names())
def test_a_fresh_decider_decides_the_same(profile: str) -> None:
    """Faults, silence and cordons between. Profiles with caches of each job's shapes are looked at more
    often."""
    shaped = profile in ("genie", "penstock")
    cell = RandomCell(
        3, PlacerSettings(profile=profile), 150 if shaped else 60, fresh_every=3 if shaped else 7
    )
    assert cell.run() == []
    assert cell.compared > 30


@pytest.mark.slow
@pytest.mark.parametrize("profile", profiles.names())
def test_a_fresh_decider_decides_the_same_in_further_runs(profile: str) -> None:
    for seed in range(100, 118):
        assert RandomCell(seed, PlacerSettings(profile=profile), 150, fresh_every=3).run() == [], seed


@pytest.mark.parametrize("profile", ["genie", "penstock"])
def test_shapes_are_offered_anew_when_a_node_is_back(profile: str) -> None:
    """A job with a deadline is estimated while the only node is out of use: its shapes were none, and stayed
    none."""
    cell = CellDriver(PlacerSettings(profile=profile))
    cell.feed(NodeJoined(node=node_spec("n1", 4), incarnation=1))
    cell.feed(NodeCordoned(node_id="n1", by="ada", reason="a driver"))
    options = tuple(
        ShapeOption(
            workers=count,
            nodes=1,
            gpus_per_node=count,
            step_ms=100 / count,
            low_ms=90 / count,
            high_ms=110 / count,
        )
        for count in (1, 2, 3, 4)
    )
    spec = replace(
        job_spec(workers=4),
        min_workers=1,
        global_batch_size=64,
        deadline_ms=4_000_000,
        iterations=100_000,
    )
    cell.feed(JobSubmitted(job_id="j", spec=spec))
    cell.feed(JobEstimated(job_id="j", estimate=replace(estimate(1), run_ms=10_000_000, options=options)))
    fresh = Recorder()
    fresh.core, fresh.head = PlacerCore(load(dump(cell.state))), cell.head
    back = NodeUncordoned(node_id="n1", by="ada", reason="done")
    expected = fresh.record(back, cell.now_ms)
    step = cell.feed(back)
    assert step.explanation == expected.explanation
    assert "a start now is in time with a probability of 100 %" in step.explanation[0].shape
