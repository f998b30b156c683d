"""γ and speeds of many groups at once against one prediction after the other."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.scheduling.groups.interleaving import (
    RESOURCES,
    Interleaving,
    Times,
    authors_period,
    pair_period,
    period,
)
from penstock.scheduling.groups.many_groups import PERIODS, many_speeds
from penstock_papers.muri.authors import authors
from penstock_papers.muri.many_efficiencies import Unit, union_efficiencies

FACTORS = (1.0, 1.2, 1.3, 1.4)
MODELS = {
    "eq. 3": Interleaving(period, FACTORS),
    "worst order": Interleaving(period, FACTORS, worst=True),
    "authors": authors(),
    "authors, bounded": Interleaving(authors_period, FACTORS),
    "pairs": Interleaving(pair_period, FACTORS),
}
TIMES = st.floats(0, 1e6) | st.sampled_from([0.0, 1.0])


@st.composite
def times(draw: st.DrawFn) -> Times:
    storage, cpu, gpu, network = (draw(TIMES) for _ in range(RESOURCES))
    return storage, cpu, gpu, network, draw(st.floats(0.1, 4e6))


UNITS = st.lists(
    st.builds(
        Unit,
        st.lists(times(), max_size=3).map(sorted).map(tuple),
        st.booleans(),
        st.sampled_from([0, 4_000, 9_000]),
    ),
    max_size=6,
)


@pytest.mark.parametrize("model", MODELS)
@settings(max_examples=40, deadline=None)
@given(units=UNITS, memory_mib=st.sampled_from([0, 12_000]))
def test_each_union_is_worth_what_it_is_worth_alone(model: str, units: list[Unit], memory_mib: int) -> None:
    """And 0 where nobody may share: unknown stages, two that may not move, too many members, too little
    memory."""
    interleaving, most = MODELS[model], 2 if model == "pairs" else 4
    found = union_efficiencies(interleaving, units, most, memory_mib)
    for row, one in enumerate(units):
        for column, other in enumerate(units):
            shares = (
                row != column
                and one.times
                and other.times
                and not (one.fixed and other.fixed)
                and len(one.times) + len(other.times) <= most
                and not (memory_mib and one.memory_mib + other.memory_mib > memory_mib)
            )
            expected = (
                interleaving.predict(tuple(sorted(one.times + other.times))).efficiency if shares else 0.0
            )
            assert found[row, column] == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("model", MODELS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_speeds_are_those_of_each_group_alone_to_the_last_bit(model: str, data: st.DataObject) -> None:
    """A plan must not depend on whether somebody has asked for a group before, or for many at once."""
    interleaving, size = MODELS[model], data.draw(st.integers(2, 2 if model == "pairs" else 4))
    groups = data.draw(
        st.lists(
            st.lists(times(), min_size=size, max_size=size).map(sorted).map(tuple), min_size=1, max_size=6
        )
    )
    assert many_speeds(interleaving, groups) == [interleaving.predict(group).speeds for group in groups]


def test_every_period_has_one_for_many() -> None:
    for of_one, of_many in PERIODS.items():
        members = [(1.0, 2.0, 30.0, 4.0, 40.0), (20.0, 1.0, 3.0, 9.0, 35.0)]
        columns = [np.array([one]).T for one in members]
        assert of_many(columns).tolist() == [of_one(members)]
