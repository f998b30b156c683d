"""The bit sets that every policy rests on answer exactly, whatever the values."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.ledger.state.index import Thermometer, bits, nth


@given(
    unit=st.sampled_from([1, 7, 1_000]),
    changes=st.lists(st.tuples(st.integers(0, 5), st.integers(-1, 5_000)), max_size=40),
    need=st.integers(0, 5_000),
)
def test_a_thermometer_knows_exactly_who_has_enough(unit: int, changes: list[tuple[int, int]], need: int):
    """Nodes fill and drain, leave (−1) and return; the set is that of a plain comparison."""
    thermometer, values = Thermometer(unit), dict.fromkeys(range(6), -1)
    for node, new in changes:
        thermometer.change(1 << node, values[node], new)
        values[node] = new
    assert set(bits(thermometer.having(need))) == {n for n, value in values.items() if value >= need}


@given(st.integers(1, 1 << 200))
def test_nth_finds_each_set_bit(mask: int):
    """The random policy draws a rank among the open nodes."""
    assert [nth(mask, rank) for rank in range(mask.bit_count())] == list(bits(mask))
