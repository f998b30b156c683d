"""The ledger's time as a reader counts it on while no record is written."""

import pytest

from penstock.clock import MAX_AGE_MS, ReadersClock

HOUR_MS = 3_600_000


class Machine:
    """A machine's two clocks, set by hand."""

    boot_s = 100.0
    wall_ms = 50 * 365 * 86_400_000

    def clock(self) -> ReadersClock:
        return ReadersClock(lambda: self.boot_s, lambda: self.wall_ms)


@pytest.mark.parametrize("step_ms", [-40 * HOUR_MS, 0, 40 * HOUR_MS])
def test_time_goes_on_from_the_record_whatever_the_wall_clock_does(step_ms: int) -> None:
    """A placer whose clock is years behind writes one record; then nothing happens for an hour."""
    machine = Machine()
    found = machine.clock()
    found.read(7_000)
    machine.boot_s += 3_600
    machine.wall_ms += step_ms
    assert found.now_ms() == 7_000 + HOUR_MS
    found.read(7_000 + HOUR_MS + 5)
    assert found.now_ms() == 7_000 + HOUR_MS + 5


@pytest.mark.parametrize(
    ("behind_ms", "age_ms"),
    [(HOUR_MS, HOUR_MS), (-HOUR_MS, 0), (MAX_AGE_MS, MAX_AGE_MS), (MAX_AGE_MS + 1, 0)],
)
def test_a_record_from_before_the_start_is_as_old_as_the_logs_stamp(behind_ms: int, age_ms: int) -> None:
    """A gateway starts over a cell that rests. Its wall clock is right, a little behind the log's, or wrong
    by decades."""
    machine = Machine()
    found = machine.clock()
    found.read(7_000, machine.wall_ms - behind_ms)
    machine.boot_s += 2
    assert found.now_ms() == 7_000 + age_ms + 2_000
    found.read(9_000)
    assert found.now_ms() == 9_000, "the first record that is read as it comes settles it"


def test_before_any_record_there_is_only_the_wall_clock() -> None:
    """An acknowledged submission to a cell whose placer has never run."""
    machine = Machine()
    assert machine.clock().now_ms() == machine.wall_ms
