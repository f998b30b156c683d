"""How long an iteration of a group takes: T and γ against every rotation written out, and what must hold of
any group."""

from collections.abc import Sequence
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.model.nouns.types import StageTimes
from penstock.scheduling.groups.interleaving import (
    MAX_SPEED,
    RESOURCES,
    Interleaving,
    Times,
    authors_period,
    credible_times,
    pair_period,
    period,
    times_of,
)
from penstock_papers.muri.authors import ALONE, authors

EQ3 = Interleaving(period, (1.0,) * 4)
TIMES = st.floats(0, 1e6) | st.sampled_from([0.0, 1.0, 10.0])


@st.composite
def times(draw: st.DrawFn) -> Times:
    storage, cpu, gpu, network = (draw(TIMES) for _ in range(RESOURCES))
    return storage, cpu, gpu, network, draw(st.floats(0.1, 4e6))


MEMBERS = st.lists(times(), min_size=2, max_size=4)


def slowest_by_slot(members: Sequence[Times]) -> float:
    """Slot after slot: each member is at the resource after the one it was at, and the slot ends when the
    last of them is done."""
    total = 0.0
    at = list(range(len(members)))
    for _ in range(RESOURCES):
        total += max(one[resource] for one, resource in zip(members, at, strict=True))
        at = [(resource + 1) % RESOURCES for resource in at]
    return total


@given(MEMBERS)
def test_t_is_that_of_the_best_rotation(members: list[Times]) -> None:
    """Four jobs are to share a GPU; somebody tries every order by hand."""
    members.sort()
    best = min(slowest_by_slot(order) for order in permutations(members))
    alone = [one[-1] for one in members]
    expected = max(best, *alone) if best > 0 else sum(alone)
    found = EQ3.predict(tuple(members))
    assert found.period_ms == pytest.approx(expected)
    used = sum(sum(one[:RESOURCES]) for one in members)
    by_eq_4 = (
        1
        - sum(
            (found.period_ms - sum(one[resource] for one in members)) / found.period_ms
            for resource in range(RESOURCES)
        )
        / RESOURCES
    )
    assert found.efficiency == pytest.approx(min(1.0, used / (RESOURCES * found.period_ms)))
    assert found.efficiency == pytest.approx(min(1.0, by_eq_4), abs=1e-9)


@given(
    st.lists(
        st.sampled_from([(1.0, 2.0, 9.0, 3.0, 15.0), (4.0, 4.0, 1.0, 0.0, 9.0), (0.0, 7.0, 7.0, 7.0, 21.0)]),
        min_size=2,
        max_size=4,
    )
)
def test_equal_members_may_be_exchanged(members: list[Times]) -> None:
    """Of all orders the first of the best is found, and of the worst, though orders that only exchange equal
    members are not tried."""
    members.sort()
    every = [
        (authors_period([members[one] for one in order]), order)
        for order in permutations(range(len(members)))
    ]
    ends = {True: max(every, key=lambda one: (one[0], [-index for index in one[1]])), False: min(every)}
    for worst, end in ends.items():
        found = Interleaving(authors_period, (1.0,) * 4, worst=worst, bounded=False).predict(tuple(members))
        assert (found.period_ms, found.order) == end


@given(MEMBERS)
def test_what_holds_of_any_group(members: list[Times]) -> None:
    """Nobody is faster than alone, nothing is used more than all the time, the order has everybody once; the
    worst order is no better."""
    members.sort()
    for model in (EQ3, authors(), authors(matched=False), authors(worst=True)):
        found = model.predict(tuple(members))
        assert sorted(found.order) == list(range(len(members)))
        assert found.period_ms > 0
        assert 0 <= found.efficiency <= 1
        assert all(0 < speed <= MAX_SPEED for speed in found.speeds)
    assert all(speed <= 1 for speed in EQ3.predict(tuple(members)).speeds)
    best, worst = (
        EQ3.predict(tuple(members)),
        Interleaving(period, (1.0,) * 4, worst=True).predict(tuple(members)),
    )
    assert worst.period_ms >= best.period_ms


def test_four_that_each_use_another_resource_do_not_slow_each_other_down() -> None:
    """Muri's picture of the idea (Fig. 2 there)."""
    members = tuple(sorted((*(9.0 if at == mine else 1.0 for at in range(4)), 12.0) for mine in range(4)))
    found = EQ3.predict(members)
    assert found.period_ms == 12.0
    assert found.speeds == (1.0,) * 4


def test_alone_an_iteration_takes_what_it_takes() -> None:
    assert EQ3.predict(((1.0, 2.0, 3.0, 4.0, 11.0),)).period_ms == 11.0
    assert authors().predict(((1.0, 2.0, 3.0, 4.0, 10.0),)).period_ms == pytest.approx(10.0 * ALONE)


def test_stages_that_take_no_time_give_no_gain() -> None:
    """A profile that has seen nothing is no reason to share."""
    nothing = (0.0, 0.0, 0.0, 0.0, 10.0)
    for model in (EQ3, authors()):
        found = model.predict((nothing, nothing))
        assert found.efficiency == 0
        assert found.period_ms == pytest.approx(found.alone_ms)


@given(MEMBERS)
def test_the_published_programs_period_is_between_the_busiest_stage_and_one_after_the_other(
    members: list[Times],
) -> None:
    """Its recurrence overlaps stages of different members and never two stages of one."""
    total = [(one[0] + one[1], one[2], one[3]) for one in members]
    found = authors_period(members)
    assert found <= sum(map(sum, total)) * (1 + 1e-9)
    assert found >= max(map(max, total)) * (1 - 2e-3)


@given(times(), times())
def test_a_pair_overlaps_loading_with_the_rest(one: Times, other: Times) -> None:
    assert pair_period([one, other]) == pytest.approx(pair_period([other, one]))
    assert pair_period([one, other]) >= max(sum(one[:4]), sum(other[:4])) * (1 - 1e-9)


@given(
    st.builds(
        StageTimes,
        storage_ms=TIMES,
        cpu_ms=TIMES,
        gpu_ms=TIMES,
        network_ms=TIMES,
        iteration_ms=st.floats(0.1, 4e6),
    )
)
def test_stages_that_miss_much_of_the_iteration_are_stretched_to_it(stages: StageTimes) -> None:
    """Whoever profiled it for a moment saw its loader idle: in proportion, and never beyond what an iteration
    takes."""
    *read, whole = times_of(stages)
    *found, iteration = credible_times(stages)
    assert iteration == whole
    if 0 < sum(read) < 0.8 * whole:
        assert sum(found) == pytest.approx(whole)
        assert [one * sum(read) for one in found] == pytest.approx([one * whole for one in read])
    else:
        assert found == read


def test_a_profile_that_has_seen_half_of_an_iteration_promises_less() -> None:
    """Alone 100 ms, of which 40 ms were seen: two such jobs would fit into one iteration, if that were
    all."""
    seen = StageTimes(storage_ms=30.0, cpu_ms=0.0, gpu_ms=10.0, network_ms=0.0, iteration_ms=100.0)
    trusting = EQ3.predict((times_of(seen), times_of(seen))).speeds
    wary = EQ3.predict((credible_times(seen), credible_times(seen))).speeds
    assert wary < trusting
