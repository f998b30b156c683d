"""What a placer writes about inputs at the ends of their legal ranges, read by the core of every real
reader."""

from typing import Annotated, Literal

import numpy as np
import pytest
from msgspec import Meta

from infra.codegen.examples import EXAMPLES
from penstock.model.nouns.types import MAX_MS, Value
from penstock.model.schema.event import Event
from tests.faults.random_cells import PROFILES, at_extremes
from tests.support.cluster.extremes import at_its_ends, leaves_of, legal


class Reading(Value, frozen=True, kw_only=True):
    """As the parts of events are."""

    at_ms: Annotated[int, Meta(ge=0, le=MAX_MS)] = 0
    share: Annotated[float, Meta(gt=0, lt=1)] | None = None
    count: Annotated[int, Meta(ge=1)] = 1
    kind: Literal["a", "b"] = "a"


def test_ends_are_those_of_the_types() -> None:
    """Nobody lists them by hand: a field that somebody adds tomorrow is drawn, too."""
    found = {way[0]: ends for way, ends in leaves_of(Reading())}
    assert found["at_ms"] == [0, MAX_MS]
    assert found["share"] == [5e-324, float(np.nextafter(1, 0))]
    assert found["count"] == [1, 1 << 53, 1 << 63, 1 << 64, 1 << 70]
    assert found["kind"] == ["a", "b"]


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_every_event_is_drawn_at_its_ends_and_stays_legal(name: str) -> None:
    event: Event = EXAMPLES[name]
    rng = np.random.default_rng(1)
    drawn = [at_its_ends(event, rng) for _ in range(12)]
    assert all(legal(found) == found for found in drawn)
    assert any(found != event for found in drawn)


@pytest.mark.parametrize("seed", range(14))
def test_every_reader_reads_what_follows_from_the_ends_of_ranges(seed: int) -> None:
    """Random inputs, each legal by itself: huge counters, times at the end of time, none at all. Every fold
    is the placer's own."""
    assert at_extremes(3 * seed, jobs=40).what == ""


@pytest.mark.slow
@pytest.mark.parametrize("profile", range(len(PROFILES)))
def test_every_reader_reads_them_in_further_runs(profile: int) -> None:
    for turn in range(1, 13):
        found = at_extremes(turn * len(PROFILES) + profile)
        assert found.what == "", found
