"""Positions in the queue: computed only as far as they are read, and with caches that an answer leaves to the
next."""

from collections.abc import Iterator

import pytest

from penstock.model.nouns.settings import PlacerSettings
from penstock.model.schema.event import Event
from penstock.scheduling.profiles import profile_for
from penstock.why.queue_position import Places, all_start, line_of
from penstock_services.placer.core.step import Step
from tests.support.cluster.random_cell import RandomCell


def test_the_order_is_computed_only_as_far_as_it_is_read() -> None:
    """A user asks why the second of four thousand jobs waits: two positions are computed. The queue's list
    reads on from there."""
    computed: list[str] = []

    def order() -> Iterator[str]:
        for number in range(4_000):
            computed.append(f"j{number}")
            yield f"j{number}"

    places = Places(order())
    assert places.get("j1") == 1
    assert computed == ["j0", "j1"]
    assert [job_id for job_id, _ in zip(places, range(4), strict=False)] == ["j0", "j1", "j2", "j3"]
    assert places["j0"] == 0
    assert len(computed) < 6
    assert places.get("ended") is None
    assert len(places) == len(computed) == 4_000
    assert list(places) == computed


class Asked(RandomCell):
    """Somebody looks at the queue now and then."""

    looked = 0

    def feed(self, event: Event) -> Step:
        """As `RandomCell`."""
        step = super().feed(event)
        if self.head.seq % 5 == 0 and self.state.queue:
            self.looked += 1
            self.compare()
        return step

    def compare(self) -> None:
        """The order shown, and the one that a profile without any cache has."""
        state, fresh = self.state, profile_for(self.state.settings)
        if fresh.order is None:
            assert fresh.preempt is not None
            right = [job_id for job_id in fresh.preempt.ranking(state) if state.jobs[job_id].in_line]
        else:
            right = list(all_start(state, fresh.order, self.now_ms))
        assert list(line_of(state, self.now_ms).places or ()) == right


@pytest.mark.parametrize("profile", ["penstock", "coda", "drf", "srtf"])
def test_an_answer_that_uses_the_caches_of_the_one_before_is_the_same(profile: str) -> None:
    """Jobs come, start, end and are held between two looks at the queue: the order shown is the one that is
    made from nothing."""
    cell = Asked(3, PlacerSettings(profile=profile), 60)
    cell.run()
    assert cell.looked > 10
