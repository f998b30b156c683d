"""Which of several complete checkpoints in one folder a task goes on at."""

import pytest

from penstock_services.node_reporter.shell.checkpoints.checkpoint_folders import covers, newest


@pytest.mark.parametrize(
    ("here", "known", "expected"),
    [
        ([(1, 9), (1, 10)], None, (1, 10)),  # it was killed before it had removed the one before
        ([(4, 150), (5, 110)], (4, 150), (4, 150)),  # attempt 5 began before 4's was known, elsewhere
        ([(4, 150), (5, 160)], (4, 150), (5, 160)),  # its report was lost with its reporter
        ([(4, 150), (5, 110), (6, 155)], (4, 150), (6, 155)),
        ([(3, 90), (5, 110)], (4, 150), (5, 110)),  # what was known is not here, and cannot be had
        (
            [(3, 200), (5, 110)],
            (4, 150),
            (5, 110),
        ),  # an earlier attempt is no substitute, however far it came
    ],
)
def test_the_newest_is_sought_among_those_that_have_all_that_is_known(
    here: list[tuple[int, int]], known: tuple[int, int] | None, expected: tuple[int, int]
) -> None:
    """(attempt, iteration) of each; the SDK and fetches leave several where somebody is killed."""
    of = "attempt-{}-iteration-{}".format
    assert newest([of(*one) for one in here], "" if known is None else of(*known)) == of(*expected)


def test_a_later_attempt_with_fewer_iterations_does_not_have_all_the_work() -> None:
    """It began at an older checkpoint, while nobody knew of this one."""
    assert not covers("attempt-5-iteration-110", "attempt-4-iteration-150")
    assert covers("attempt-5-iteration-150", "attempt-4-iteration-150")
