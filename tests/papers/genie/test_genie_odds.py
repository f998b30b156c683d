"""The gate on odds of deadlines has to fail where odds are wrong."""

from tests.papers.genie.genie_tables import WITHIN, apart, calibration, calibration_error


def of(odds: float, met: int, tasks: int = 100) -> list[tuple[float, bool]]:
    return [(odds, number < met) for number in range(tasks)]


def test_errors_of_opposite_signs_do_not_cancel() -> None:
    """Of odds of 80 % 60 of 100 are met, and of odds of 30 % 50: 20 points too high in one bucket and too low
    in the other. On average they are right."""
    pairs = [*of(0.8, 60), *of(0.3, 50)]
    assert round(apart(pairs), 6) == 0
    assert round(calibration_error(pairs), 6) == 20
    table = calibration("key", "title", {20: pairs})
    assert [row.reached for row in table.rows] == [None, None, False, False]


def test_a_bucket_counts_by_its_tasks() -> None:
    """One task in a hundred is answered wrongly by 90 points; all others are right."""
    pairs = [*of(0.1, 1, 1), *of(1.0, 99, 99)]
    assert round(calibration_error(pairs), 6) == 0.9
    assert all(row.reached is not False for row in calibration("key", "title", {5: pairs}).rows)
    assert calibration_error([]) == 0 < WITHIN
